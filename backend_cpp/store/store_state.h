// StoreState: what all parts of a store share: options, tables, pools, pins and counters.
//
// Invariants: tables and pools are those of the options, and stay where they are.
//
// Threads: readers and writers alike; what is not atomic does not change once the store is open,
// but for the rows, which each pool's writer guards.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/crew.h"
#include "embertide/store.h"
#include "ssd/block_log.h"
#include "store/decay.h"
#include "store/group_price.h"
#include "store/hbm_tier.h"
#include "store/option_checks.h"
#include "store/reader_registry.h"
#include "store/row_pool.h"
#include "store/table.h"
#include "store/train_ops.h"

namespace embertide {

// The counts of StoreStats since the store was opened. On cache lines of their own, for every
// reader counts.
struct alignas(64) StoreCounters {
  std::atomic<uint64_t> hits[kSources] = {};
  std::atomic<uint64_t> evictions{0};
  std::atomic<uint64_t> evictions_by_writers{0};
  std::atomic<uint64_t> promoted{0};
  std::atomic<uint64_t> refused_promotions{0};
  std::atomic<uint64_t> dropped_accesses{0};
  std::atomic<uint64_t> refused_rows{0};
  std::atomic<uint64_t> reader_waits_given_up{0};
  std::atomic<uint64_t> new_keys_waiting{0};
  std::atomic<uint64_t> dropped_gradients{0};
  std::atomic<uint64_t> refused_gradients{0};
  std::atomic<uint64_t> clipped_gradients{0};
  std::atomic<uint64_t> failed_keys{0};
  std::atomic<uint64_t> step_reads{0};
  std::atomic<uint64_t> held_rows_removed{0};
  std::atomic<uint64_t> placed_keys{0};
  std::atomic<uint64_t> stale_places{0};
  std::atomic<uint64_t> unworthy_keys{0};
  std::atomic<uint64_t> worthy_keys_without_room{0};
  std::atomic<uint64_t> compacted_bytes{0};
  std::atomic<uint64_t> compacted_rows{0};
  std::atomic<uint64_t> compactions_forced{0};
  std::atomic<uint64_t> mended_rows{0};
  // Not since then, but now:
  std::atomic<uint64_t> rows{0};         // index entries of all buckets
  std::atomic<uint64_t> index_bytes{0};  // arrays, nodes and directories, retired ones included
};

struct StoreState {
  // Tables, their buckets if the store holds all, and pools, which are to be opened.
  StoreState(StoreOptions opts, Profile face);

  const StoreOptions options;
  const Profile profile;
  std::vector<Table> tables;
  // Part by part; the part that tables share, if any do, is the first.
  std::vector<std::unique_ptr<RowPool>> pools;
  mutable ReaderRegistry readers{kMaxReaders};
  std::unique_ptr<HbmTier> hbm;  // null without an HBM budget

  std::atomic<uint64_t> newest{0};  // version; 0 before the first
  std::atomic<uint64_t> oldest{0};  // of the window

  // Training.
  const Decay decay{options.utility_decay};
  std::vector<std::unique_ptr<GroupPrice>> groups;  // as options.prune_groups
  std::atomic<uint32_t> tick{0};                    // steps that were begun, modulo RowAux::kTicks

  mutable StoreCounters counters;

  bool training() const { return profile == Profile::kTrain; }
  // Whether lookups tell where rows lie: RowPlaces.
  bool tells_places() const { return training() && options.devices == 1 && hbm == nullptr; }
  // Requires: d < options.devices.
  RowPool* PoolOf(const Table& table, uint32_t d) const {
    return pools[size_t{table.part} * options.devices + d].get();
  }
  uint32_t AuxBytes(const Table& table) const {
    return training() ? RowAux::Bytes(options.optimizer, table.config.learned()) : 0;
  }
  // kInvalidArgument naming what is out of range.
  Status CheckTable(uint32_t table) const;
  // The same, and that its rows are values: for calls that make numbers of them.
  Status CheckValues(uint32_t table) const;
  Status CheckBucket(uint32_t table, uint32_t bucket) const;
  Status CheckGroup(uint32_t group) const;

  // The directories of a pool's tiers, its policy and its logs, charged; its file on the SSD, with
  // what `sealed` names of it, or empty.
  Status OpenPool(RowPool* pool, const std::vector<SealedSegment>* sealed);
  // Bytes of a pool's DDR that are taken before the first bucket.
  uint64_t DirectoryBytes(const RowPool& pool) const;
  // The name of a pool's file on the SSD; empty: it has none.
  std::string LogOf(const RowPool& pool) const;

  // A place was taken, or freed, for a row of the table. Requires: the pool's writer.
  void CountPlace(RowPool* pool, const Table& table, Location place, bool taken) const;

  // The crew of so many threads, at least 1, for as long as `lock` is held. Taken before any writer
  // lock, or a read begins.
  Crew* TakeCrew(uint32_t threads, std::unique_lock<std::mutex>* lock);

 private:
  void MakePools();

  std::mutex crew_mutex_;
  std::unique_ptr<Crew> crew_;  // of as many threads as were asked for last
};

}  // namespace embertide
