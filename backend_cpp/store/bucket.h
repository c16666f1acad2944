// Bucket: the rows of one bucket of a table in one pool, and what becomes of one that is
// unlinked.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "embertide/row.h"
#include "store/bucket_index.h"
#include "store/changed_cells.h"
#include "store/location.h"
#include "store/node_pool.h"

namespace embertide {

struct Bucket;
struct RowPool;
struct Table;

// Something unlinked, to be freed when no reader of its epoch is left.
struct Retired {
  uint64_t epoch = 0;
  Location place;  // a slot, of `bytes` payload + aux (SSD needs them)
  uint32_t bytes = 0;
  VersionNode* node = nullptr;
  BucketIndex::Arrays arrays;
  Bucket* bucket = nullptr;  // with all its rows
  uint32_t entry = 0;        // of `bucket`: those before it are freed
};

struct RemovedKey {
  uint64_t key;
  RecordKind kind;
};

// The rows of one bucket in one pool. The part that a lookup reads comes first, in one cache line.
struct alignas(64) Bucket {
  Bucket(RowPool* on, const Table& of, uint32_t number);
  ~Bucket();
  Bucket(const Bucket&) = delete;
  Bucket& operator=(const Bucket&) = delete;
  BucketIndex index;
  std::byte* const rows;  // address of slot 0 of its DDR rows
  // It answers versions from here on; below, `older` does, if there is one. Set before readers can
  // reach it.
  uint64_t since = 0;
  std::atomic<Bucket*> older{nullptr};  // in another pool; until no pin below `since` is left
  const uint32_t chunk_bytes;           // of its table's rows
  const uint16_t scale_bytes;           // before the chunks
  const uint16_t full_mask;             // live mask of a whole row
  const uint32_t table;                 // ordinal
  RowPool* const pool;                  // where its rows lie
  // As RowLayout::PayloadBytes. Requires: a live chunk.
  uint32_t PayloadBytes(uint16_t live) const {
    return scale_bytes + static_cast<uint32_t>(std::popcount(live)) * chunk_bytes;
  }
  ChangedCells changed;  // training: where rows with aux.changed are
  // Training: keys removed since TakeChanges. The last of several notes of a key counts, and none
  // if it has a row again: those are left out once there are twice as many as `tidied`.
  std::deque<RemovedKey> removed;
  size_t tidied = 0;
  uint64_t removed_bytes = 0;  // charged for them
  // Bytes of marks and notes, as the budget is charged.
  uint64_t change_bytes() const { return changed.bytes() + removed_bytes; }
};

// Bytes that the budget is charged for a bucket, its rows and arrays aside.
inline constexpr uint64_t kBucketBytes = sizeof(Bucket) + alignof(Bucket);

// The copies of one bucket in this store. The newest is owned here, and owns its older one.
struct BucketSlot {
  BucketSlot() = default;
  BucketSlot(BucketSlot&&) noexcept {}     // for std::vector, before there is anything in it
  std::atomic<Bucket*> newest{nullptr};    // null: not held
  std::atomic<Bucket*> building{nullptr};  // being filled: writers see it, readers do not
  // For those who ask and pin nothing, and so may not follow the pointers.
  static constexpr uint64_t kNotHeld = ~0ULL;
  std::atomic<uint64_t> held_since{kNotHeld};
  std::atomic<uint32_t> device{0};  // of `newest`

  // The copy that answers at a version; null if the bucket is not held there.
  const Bucket* At(uint64_t version) const {
    const Bucket* bucket = newest.load(std::memory_order_acquire);
    while (bucket != nullptr && version < bucket->since) {
      bucket = bucket->older.load(std::memory_order_acquire);
    }
    return bucket;
  }
  // Its copy in a pool, being filled or superseded ones too. Requires: the pool's writer.
  Bucket* On(const RowPool* pool) const {
    Bucket* bucket = building.load();
    if (bucket != nullptr && bucket->pool == pool) return bucket;
    for (bucket = newest.load(); bucket != nullptr; bucket = bucket->older.load()) {
      if (bucket->pool == pool) return bucket;
    }
    return nullptr;
  }
};

}  // namespace embertide
