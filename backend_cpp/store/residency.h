// Residency: which tier holds a row. Room in DDR is made for rows, entries and version nodes; rows
// are stored there, or brought there from the SSD.
//
// Room comes of what waits to be freed, then of cold rows that leave, then of pages that are
// emptied. Upkeep makes it ahead, so that writers find it ready.
//
// Threads: the pool's writer is held throughout, but as WithoutWriter says. Errors:
// kResourceExhausted when nothing more can go.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "embertide/row.h"
#include "store/evictor.h"
#include "store/reclaimer.h"
#include "store/row_pool.h"
#include "store/ssd_batch.h"
#include "store/store_state.h"

namespace embertide {

class Residency {
 public:
  Residency(StoreState& store, Reclaimer& reclaimer, Evictor& evictor)
      : store_(store), reclaimer_(reclaimer), evictor_(evictor) {}

  // --- room
  // Attempts, making room in between, until it no longer fails for want of room.
  template <typename Attempt>
  Status WithRoom(RowPool* pool, const Attempt& attempt) {
    Status status = attempt();
    for (int round = 0; status.code() == Code::kResourceExhausted; ++round) {
      EMBERTIDE_RETURN_IF_ERROR(MakeRoom(pool, round, status));
      status = attempt();
    }
    return status;
  }
  // A DDR slot, evicting to SSD as needed.
  Result<uint64_t> AllocateDdr(RowPool* pool, const Table& table, uint32_t payload_bytes,
                               uint32_t aux_bytes);
  // A version node, charged to the budget.
  Result<VersionNode*> NewNode(RowPool* pool);

  // --- entries
  // Room for so many more entries in the bucket's index (and, in training, for noting their
  // changes), evicting rows as needed. To be called before a slot is taken for the new row: a page
  // with a slot that no entry names cannot be emptied.
  Status ReserveEntries(RowPool* pool, Bucket* bucket, uint32_t entries);
  // As ReserveEntries, for the one entry of a key, which can be inserted then.
  Status ReserveEntry(RowPool* pool, Bucket* bucket, uint64_t key) {
    const uint64_t hash = HashKey(key);
    if (!store_.training() && bucket->index.HasRoom(hash)) return Status::Ok();
    return ReserveBy(pool, bucket, [&](const BucketIndex::Retire& retire) {
      return bucket->index.Reserve(&pool->budget, &pool->index_pages, retire, hash);
    });
  }
  // Gives back what entries that are gone took in a bucket's index.
  void ShrinkIndex(RowPool* pool, Bucket* bucket);
  // Inserts a key that has no entry. Requires: ReserveEntry of it.
  void InsertEntry(Bucket* bucket, uint64_t key, Location location);
  void EraseEntry(Bucket* bucket, uint32_t entry);

  // --- rows
  // A DDR row with this payload, which becomes the newest of its key.
  Result<Location> StoreRow(RowPool* pool, const Table& table, uint64_t key, uint16_t live,
                            std::span<const std::byte> payload);
  // Makes the record's row the only one of its key; a tombstone takes the key away.
  Status PutRecord(RowPool* pool, const Table& table, Bucket* bucket, const RowRecord& record);
  // The row of an entry in DDR (brought there from SSD if need be). kNotFound: the key has none.
  Result<Location> ResidentRow(RowPool* pool, uint32_t table, uint32_t bucket, uint64_t key);
  // The row in DDR of a key that a batch has read. Errors as ResidentRow.
  Result<Location> BringRow(RowPool* pool, const SsdBatch& batch, size_t i);
  // Brings those of the rows to DDR that are on the SSD and can be read, and lets go of the writer
  // while the drive works. Requires: each key of a table once.
  void BringRows(RowPool* pool, std::span<const Access> rows, WriterLock* writer);
  // Gives a row of the SSD, read to `bytes`, a slot of DDR that was allocated for it. Returns its
  // place there.
  Location Install(RowPool* pool, uint32_t table, Bucket* bucket, uint64_t key,
                   const std::byte* bytes, uint64_t slot);

 private:
  // Room in a bucket's index as `reserve` makes it.
  Status ReserveBy(RowPool* pool, Bucket* bucket,
                   const std::function<Status(const BucketIndex::Retire&)>& reserve);
  // One step towards room: reclaims, then takes cold rows, then whole pages out of DDR. Returns
  // `wanted`, which has failed for want of room, when there is nothing left to try.
  Status MakeRoom(RowPool* pool, int round, const Status& wanted);
  // Empties the pages with the fewest rows.
  void EmptyPages(RowPool* pool, int round);
  // Held rows keep condemned pages: makes room for them in one another's.
  Status PackHeld(RowPool* pool);
  // Charges notes of rows on the SSD ahead once more, emptying pages for them, before rows take
  // what came free: without notes none could leave.
  Status ChargeNotes(RowPool* pool);
  // Evicts rows of the table until its share has room for so many bytes. kResourceExhausted: the
  // SSD takes no more.
  Status MakeShareRoom(RowPool* pool, const Table& table, uint64_t bytes);
  // Room to note every row of the bucket as changed. kResourceExhausted as ReserveEntry.
  Status FitChanged(RowPool* pool, Bucket* bucket);
  // Brings one SSD row to DDR. Ok also when it is gone or already there.
  Status PromoteOne(RowPool* pool, const Access& row);

  StoreState& store_;
  Reclaimer& reclaimer_;
  Evictor& evictor_;
};

}  // namespace embertide
