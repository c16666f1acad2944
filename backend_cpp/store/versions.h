// Versions: the versions that a store which serves answers, and the buckets that it answers them
// of.
//
//   entry --> node v7 --> node v5 --> node base (version 0)        pins at 5, 6, 7
//   fold(5):  entry --> node v7 --> node v5                        base retired
//   fold(7):  entry --> slot of v7                                 chain retired
//
// Records are staged beside readers, and a commit makes all of a version visible at once; what left
// the window is folded into the entries (versions.cc). Between two versions buckets are added,
// superseded by a copy in another pool, and dropped (holding.cc).
//
// Threads: any, beside readers. Commits and changes of what is held come one after the other. They
// take the writers of pools themselves; pointers to buckets change under those of all pools, since
// a writer of one pool walks past the copies in others. Errors are those of Store.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "embertide/row.h"
#include "store/reclaimer.h"
#include "store/residency.h"
#include "store/row_pool.h"
#include "store/store_state.h"

namespace embertide {

class Versions {
 public:
  Versions(StoreState& store, Reclaimer& reclaimer, Residency& residency)
      : store_(store), reclaimer_(reclaimer), residency_(residency) {}

  // As Store's methods of these names.
  Status Stage(uint64_t version, uint32_t table, uint32_t bucket,
               std::span<const std::byte> records);
  void DropStaged();
  Status Commit(uint64_t version);
  void Forget(uint64_t version);
  Status AddBucket(uint32_t table, uint32_t bucket, uint32_t device,
                   std::span<const std::byte> records, uint64_t leave_bytes);
  Status DropBucket(uint32_t table, uint32_t bucket);
  uint64_t superseded_until() const { return superseded_until_.load(); }

 private:
  // Requires, of these: the pool's writer.
  Status StageOne(RowPool* pool, uint64_t version, uint32_t table, uint32_t number, Bucket* bucket,
                  const RowRecord& record);
  // Takes the head of a chain, of a version that is not committed, out of it.
  void UnstageNode(RowPool* pool, VersionNode* node);
  // Folds all versions <= `limit` of a pool. Requires: no reader below `limit`, or ever again.
  void Fold(RowPool* pool, uint64_t limit);
  // The same for the key of a node that `version` has staged.
  void FoldKey(RowPool* pool, const VersionNode& staged, uint64_t version);
  void FoldNode(RowPool* pool, VersionNode* node, uint64_t limit);
  // The bucket of a node that was staged.
  Bucket* BucketOn(RowPool* pool, const VersionNode& node);

  // The window is what it is from now on: folds and retires what left it and no pin needs.
  void LeaveWindow() EMBERTIDE_REQUIRES(mutex_);
  // Retires older copies that no pin can read any more.
  void RetireSuperseded(uint64_t limit) EMBERTIDE_REQUIRES(mutex_);
  // Unlinks a bucket's versions and retires it, in slices under its pool's writer. Requires:
  // nobody can reach the bucket from now on but readers that have it.
  void RetireBucket(uint32_t table, uint32_t number, Bucket* bucket) EMBERTIDE_REQUIRES(mutex_);

  StoreState& store_;
  Reclaimer& reclaimer_;
  Residency& residency_;
  Mutex mutex_;
  // Committed versions, ascending.
  std::deque<uint64_t> window_ EMBERTIDE_GUARDED_BY(mutex_);
  // (table, bucket) that have an older copy.
  std::vector<std::pair<uint32_t, uint32_t>> superseded_ EMBERTIDE_GUARDED_BY(mutex_);
  std::atomic<uint64_t> superseded_until_{0};  // the largest `since` of them; 0: none
};

}  // namespace embertide
