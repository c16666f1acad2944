// LateKeys: the keys of a step that have no row in DDR. They come after all others, of all tables,
// in the order of the batch: a row is made, or read from the SSD and brought.
//
// Rows on the SSD are read some thousands at a time: a drive answers as fast as it can only when
// it is asked for many blocks at once. The writer lock is let go meanwhile. The order in which keys
// are seen to does not depend on what lay where, nor does any result.
//
// Used by one thread.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "store/part_worker.h"
#include "store/ssd_batch.h"
#include "store/store_impl.h"

namespace embertide {

class LateKeys {
 public:
  // Forgets the step before. `step`: of any table.
  void Begin(const TableStep& step, Store::Impl* impl);
  // Keys of one turn, in the order in which they are to come; their gradients last as long as the
  // step. Sees to keys that wait, if they are many. Requires: no writer lock.
  void Add(Table* table, RowPool* pool, std::span<const PartWorker::Late* const> keys);
  // Sees to all that wait. Requires: no writer lock.
  void Finish();

  // Counts of the rows that these keys have now.
  uint64_t made() const { return made_; }
  uint64_t brought() const { return brought_; }
  uint64_t updated() const { return updated_; }
  // The status of the first key that failed.
  const Status& failure() const { return failure_; }

 private:
  struct Key {
    Table* table;
    RowPool* pool;
    PartWorker::Group group;
    uint64_t gradients;  // place of the first
  };
  static constexpr uint32_t kNotRead = ~0U;

  // The row of a key; kResourceExhausted, kDeviceError, kCorrupt naming it.
  Status MakeOrBring(const Key& key, uint32_t read);
  Result<Location> MakeRow(RowPool* pool, Bucket* bucket, const PartWorker::Group& group);
  // A new row begins with what its key earned without one, its chunks with the same.
  void Credit(const RowPool& pool, Location place, float utility) const;
  // Reads the rows of keys from `first` on; returns where it ended.
  size_t ReadRows(size_t first);
  // Asks for the index group of a key that is soon looked for, if there is such a key.
  void AskAhead(size_t k) const;
  // The keys [first, end) in their order.
  void ProcessRange(size_t first, size_t end);
  // With the last of them, what was read for them.
  void EndBatches();
  PartWorker::Late LateOf(const Key& key) const;
  void BeginTable(Table* table);
  void CountUpdates();

  Store::Impl* impl_ = nullptr;
  TableStep step_;
  PartWorker worker_;
  std::vector<Key> keys_;
  std::vector<const float*> gradients_;
  // By pool that has rows to read: a batch. By key: the row's place in its pool's.
  std::deque<SsdBatch> batches_;
  std::vector<RowPool*> pools_;
  std::vector<uint32_t> reads_;
  const RowPool* full_ = nullptr;  // had no room for a row of the table: it is asked for no more
  uint64_t made_ = 0;
  uint64_t brought_ = 0;
  uint64_t updated_ = 0;
  Status failure_;
};

}  // namespace embertide
