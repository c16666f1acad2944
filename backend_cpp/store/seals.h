// Seals: the rows of every bucket written down slice by slice, while writers and readers go on; and
// a store opened from what was written (docs/design/0006-seals.md).
//
// A slice is a range of the hashes' low halves, which an index that grows or moves its entries
// meanwhile cannot upset. It is taken under the pool's writer lock, at the newest version then; a
// row that a later version changes is put right by applying that version again.
//
// Threads: any; one seal is written at a time. Takes the writers of pools itself. Errors are those
// of ServingStore::Seal and ServingStore::Open.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "embertide/seal.h"
#include "store/reclaimer.h"
#include "store/residency.h"
#include "store/seal_file.h"
#include "store/seal_manifest.h"
#include "store/store_state.h"
#include "store/versions.h"

namespace embertide {

class Seals {
 public:
  Seals(StoreState& store, SealManifest& manifest, Reclaimer& reclaimer, Residency& residency,
        Versions& versions)
      : store_(store),
        manifest_(manifest),
        reclaimer_(reclaimer),
        residency_(residency),
        versions_(versions) {}

  // The tables and logs, as a seal names them.
  SealInfo Describe() const;
  Status Write(const SealOptions& options);
  // Requires: nothing is committed yet, and the logs are reopened.
  Status Load(SealReader* seal);
  void AddTo(StoreStats* stats) const;

 private:
  // All but what the logs keep for it. `dropped`: the manifest's when it began; given up when that
  // has changed.
  Status WriteRows(const SealOptions& options, uint64_t dropped);
  // Takes those rows of a bucket whose hash's low half is part->begin or more; sets part->end.
  // False: it is not held, or has left part->log (which the first slice sets).
  bool TakeSlice(SealPart* part);
  Status LoadPart(const SealPart& part);

  StoreState& store_;
  SealManifest& manifest_;
  Reclaimer& reclaimer_;
  Residency& residency_;
  Versions& versions_;
  std::mutex mutex_;  // held while one is written
  std::atomic<uint64_t> written_{0};
  std::atomic<uint64_t> failed_{0};
  std::atomic<uint64_t> bytes_{0};
  std::atomic<double> seconds_{0};
};

}  // namespace embertide
