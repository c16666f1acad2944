// Store::Impl: the parts of a store, each of which uses those before it and none after. Private to
// this folder.
//
//   StoreState     options, tables, pools, pins, counters      store_state.h
//     RowPool      DDR and SSD that tables share               row_pool.h, shares.cc
//   SealManifest   which seal counts                           seal_manifest.h
//   Reclaimer      what is unlinked, until it is freed         reclaimer.h
//   SsdMover       rows moved to and on the SSD                ssd_mover.h
//   Evictor        which rows leave DDR                        evictor.h
//   Residency      room in DDR; rows stored and brought        residency.h
//   Upkeep         all that in the background                  upkeep.h
//   serving
//     Versions     stage, commit, fold; buckets held           versions.h, holding.cc
//     Seals        what outlives a kill                        seals.h
//                  rows of bad blocks                          mending.cc
//   training
//     Admission    keys that get a row                         admission.h
//     TrainingRows rows made, taken, changed                   training_rows.h
//                  rows updated ...                            training_step.cc
//                    by its threads                            part_worker.h
//                    made and brought                          late_keys.h
//                  what rows are worth                         pruning.cc, row_note.h
//                  what checkpoints have of that               prune_state.cc
//                  events of keys                              counting.cc
//                  rows held in DDR                            holds.cc, held_rows.h
//
// Reads use StoreState alone: lookup.cc (bags), lookup_rows.cc (rows, keys and sums as they are),
// over finder.h (where a batch's rows lie) and hbm_tier.h (the tier above DDR). store.cc has
// opening, pins and statistics; integrity.cc checks every invariant.
#pragma once

#include <memory>
#include <utility>

#include "embertide/serving_store.h"
#include "embertide/training_store.h"
#include "store/admission.h"
#include "store/evictor.h"
#include "store/reclaimer.h"
#include "store/residency.h"
#include "store/seal_manifest.h"
#include "store/seals.h"
#include "store/ssd_mover.h"
#include "store/store_state.h"
#include "store/training_rows.h"
#include "store/upkeep.h"
#include "store/versions.h"

namespace embertide {

struct Store::Impl {
  Impl(StoreOptions options, Profile profile) : store(std::move(options), profile) {}
  // Errors as the faces' Open has them.
  static Result<std::unique_ptr<Impl>> Open(StoreOptions options, Profile profile);

  // Appends all rows of a bucket, and to `states` (OPTIONAL; of a store that trains) what is kept
  // of each. Errors as Store::ExportBucket.
  Status ExportBucket(const ReadView& view, uint32_t table, uint32_t bucket,
                      std::vector<std::byte>* records, std::vector<RowState>* states);

  StoreState store;
  SealManifest seal_manifest{store.options.ssd_directory};
  Reclaimer reclaimer{store};
  SsdMover mover{store, seal_manifest, reclaimer};
  Evictor evictor{store, reclaimer, mover};
  Residency residency{store, reclaimer, evictor};
  Upkeep upkeep{store, reclaimer, mover, evictor, residency};
  // Serving.
  Versions versions{store, reclaimer, residency};
  Seals seals{store, seal_manifest, reclaimer, residency, versions};
  // Training.
  Admission admission{store};
  TrainingRows rows{store, reclaimer, residency};
};

}  // namespace embertide
