// Reclaimer: what is unlinked waits on its pool's retire list until no reader can be at it, and is
// then freed.
//
// Threads: the pool's writer is held throughout. A reader that looks for what was unlinked before
// it began finds none of it, so what is left to wait for are reads in flight.
#pragma once

#include <cstdint>

#include "store/bucket.h"
#include "store/row_pool.h"
#include "store/store_state.h"
#include "store/table.h"

namespace embertide {

class Reclaimer {
 public:
  explicit Reclaimer(StoreState& store) : store_(store) {}
  // Frees all rows. Requires: there are no readers any more.
  ~Reclaimer();
  Reclaimer(const Reclaimer&) = delete;
  Reclaimer& operator=(const Reclaimer&) = delete;

  // Unlinked: frees when no reader can be at it.
  void RetirePlace(RowPool* pool, const Table& table, Location place);
  void RetireNode(RowPool* pool, VersionNode* node);
  void RetireArrays(RowPool* pool, const BucketIndex::Arrays& arrays);
  // With all its rows.
  void RetireBucket(Bucket* bucket);
  // Frees what no reader can hold any more; of a bucket with many rows a part, and the next call
  // another. True: something was freed.
  bool Reclaim(RowPool* pool);
  // As Reclaim, waiting for those readers. kResourceExhausted naming the one that stays longer than
  // options.reader_wait_ms.
  Status AwaitReaders(RowPool* pool);

 private:
  // False: it is a bucket, of which a part is left.
  bool Free(RowPool* pool, Retired* retired);
  // Frees up to so many entries of a bucket from *entry on, and once it is past the last, the
  // bucket: true. Requires: no reader can hold anything of it.
  bool FreeBucket(Bucket* bucket, uint32_t* entry, uint32_t most);

  StoreState& store_;
};

}  // namespace embertide
