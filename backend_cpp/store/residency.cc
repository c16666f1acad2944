// Room in DDR, and rows stored and brought there: see the header.
#include "store/residency.h"

#include <algorithm>
#include <string>

#include "embertide/hash.h"
#include "store/changed_cells.h"

namespace embertide {

// --- room ----------------------------------------------------------------------------------------

Status Residency::MakeRoom(RowPool* pool, int round, const Status& wanted) {
  // Each round takes some hundred KiB out; a budget that this cannot serve is too small.
  constexpr int kRounds = 64;
  if (round >= kRounds) return wanted;
  reclaimer_.Reclaim(pool);
  // Without an SSD rows can only be packed, which gives a page back if a page of slots is free.
  if (pool->ssd == nullptr && pool->retired.empty() &&
      pool->FreeSlotBytes() < pool->arena.slab_bytes()) {
    return wanted;
  }
  if (round == 0) return Status::Ok();
  // Cold rows first, in the odd rounds; slots that they free may be of the wrong size, so whole
  // pages in the even ones: a sixteenth of them, that a pass over the index may pay.
  bool went = false;
  if (round % 2 == 1) went = evictor_.Evict(pool, nullptr);
  if (!went) EmptyPages(pool, round);
  Status waited = reclaimer_.AwaitReaders(pool);
  if (waited.ok()) waited = PackHeld(pool);
  if (waited.ok()) waited = ChargeNotes(pool);
  if (waited.ok()) return waited;
  return {waited.code(), wanted.message() + ": " + waited.message()};
}

void Residency::EmptyPages(RowPool* pool, int round) {
  uint32_t pages = pool->arena.page_count() / 16;
  // The pages with the fewest rows may be those of held rows, round after round: more are taken,
  // until what is not held has left all of them.
  if (pool->held.rows() > 0) pages *= static_cast<uint32_t>(std::max(1, round / 2));
  pool->arena.CondemnPages(1 + pages, /*must_fit=*/pool->ssd == nullptr);
  evictor_.MoveAllCondemned(pool);
}

Status Residency::PackHeld(RowPool* pool) {
  if (pool->held.rows() == 0 || !pool->arena.has_condemned()) return Status::Ok();
  pool->arena.PardonPages();
  pool->arena.CondemnPages(1 + pool->arena.page_count() / 16, /*must_fit=*/true);
  if (!pool->arena.has_condemned()) return Status::Ok();
  evictor_.MoveAllCondemned(pool);
  return reclaimer_.AwaitReaders(pool);
}

Status Residency::ChargeNotes(RowPool* pool) {
  // Each page that is emptied leaves some bytes more than the notes of its rows take.
  constexpr int kPages = 8;
  for (int page = 0; pool->notes != nullptr && page < kPages; ++page) {
    if (pool->notes->ChargeAhead()) break;
    pool->arena.CondemnPages(1);
    evictor_.MoveAllCondemned(pool);
    EMBERTIDE_RETURN_IF_ERROR(reclaimer_.AwaitReaders(pool));
  }
  return Status::Ok();
}

Status Residency::MakeShareRoom(RowPool* pool, const Table& table, uint64_t bytes) {
  while (!pool->ShareHolds(table.ordinal, bytes)) {
    if (evictor_.EvictTable(pool, table.ordinal, nullptr)) continue;
    // Rows of buckets that were dropped count until they are freed.
    if (!pool->retired.empty()) {
      EMBERTIDE_RETURN_IF_ERROR(reclaimer_.AwaitReaders(pool));
      continue;
    }
    return {Code::kResourceExhausted,
            "table " + table.config.name + " has " +
                std::to_string(pool->in_ddr[table.ordinal].bytes) +
                " bytes of rows in its DDR share of " +
                std::to_string(pool->shares[table.ordinal].bytes) + " on device " +
                std::to_string(pool->number) +
                ", and the SSD tier takes no more; raise the SSD budget or the share"};
  }
  return Status::Ok();
}

Result<uint64_t> Residency::AllocateDdr(RowPool* pool, const Table& table, uint32_t payload_bytes,
                                        uint32_t aux_bytes) {
  EMBERTIDE_RETURN_IF_ERROR(MakeShareRoom(pool, table, uint64_t{payload_bytes} + aux_bytes));
  if (pool->policy != nullptr) {
    EMBERTIDE_RETURN_IF_ERROR(WithRoom(pool, [&]() -> Status {
      if (pool->policy->Reserve()) return Status::Ok();
      return {Code::kResourceExhausted, "no room for the policy of one row more"};
    }));
  }
  uint64_t slot = 0;
  EMBERTIDE_RETURN_IF_ERROR(WithRoom(pool, [&] {
    Result<uint64_t> allocated = pool->arena.Allocate(payload_bytes, aux_bytes);
    if (!allocated.ok()) return allocated.status();
    slot = *allocated;
    return Status::Ok();
  }));
  return slot;
}

Result<VersionNode*> Residency::NewNode(RowPool* pool) {
  VersionNode* node = nullptr;
  EMBERTIDE_RETURN_IF_ERROR(WithRoom(pool, [&]() -> Status {
    node = pool->nodes.Take();
    if (node != nullptr) return Status::Ok();
    return {Code::kResourceExhausted, "no room for version nodes in the DDR budget"};
  }));
  return node;
}

// --- entries -------------------------------------------------------------------------------------

Status Residency::ReserveEntries(RowPool* pool, Bucket* bucket, uint32_t entries) {
  return ReserveBy(pool, bucket, [&](const BucketIndex::Retire& retire) {
    return bucket->index.ReserveEntries(&pool->budget, &pool->index_pages, retire, entries);
  });
}

Status Residency::ReserveBy(RowPool* pool, Bucket* bucket,
                            const std::function<Status(const BucketIndex::Retire&)>& reserve) {
  // A new row is never why rows that are there cannot be pruned.
  EMBERTIDE_RETURN_IF_ERROR(WithRoom(pool, [&]() -> Status {
    pool->TakeReserveBack();
    if (!pool->reserve_lent) return Status::Ok();
    return {Code::kResourceExhausted, "the DDR budget has no room beside what pruning needs"};
  }));
  uint64_t retired_bytes = 0;
  const auto retire = [&](const BucketIndex::Arrays& arrays) {
    reclaimer_.RetireArrays(pool, arrays);
    retired_bytes += arrays.bytes();
  };
  EMBERTIDE_RETURN_IF_ERROR(WithRoom(pool, [&]() -> Status {
    const uint64_t before = bucket->index.bytes();
    retired_bytes = 0;
    Status reserved = reserve(retire);
    // Retired bytes stay charged until they are freed: now, but for readers.
    store_.counters.index_bytes += bucket->index.bytes() + retired_bytes - before;
    if (retired_bytes > 0) reclaimer_.Reclaim(pool);
    if (reserved.ok()) return reserved;
    return {reserved.code(), reserved.message() + ": of this device's " +
                                 std::to_string(pool->budget.limit_bytes()) + " bytes " +
                                 std::to_string(pool->budget.used_bytes()) + " are used, " +
                                 std::to_string(pool->arena.page_bytes()) + " of them by rows"};
  }));
  return store_.training() ? FitChanged(pool, bucket) : Status::Ok();
}

Status Residency::FitChanged(RowPool* pool, Bucket* bucket) {
  const uint64_t before = bucket->changed.bytes();
  const uint32_t entries = bucket->index.capacity();
  const uint64_t bytes = ChangedCells::BytesFor(entries);
  if (bytes <= before) return Status::Ok();
  EMBERTIDE_RETURN_IF_ERROR(WithRoom(pool, [&]() -> Status {
    if (pool->budget.TryCharge(bytes)) return Status::Ok();
    return {Code::kResourceExhausted, "no room for the marks of changed rows"};
  }));
  bucket->changed.Fit(entries);
  pool->budget.Release(before);
  store_.counters.index_bytes += bytes - before;
  return Status::Ok();
}

void Residency::ShrinkIndex(RowPool* pool, Bucket* bucket) {
  uint64_t retired_bytes = 0;
  const uint64_t before = bucket->index.bytes();
  bucket->index.Shrink(&pool->budget, &pool->index_pages, [&](const BucketIndex::Arrays& arrays) {
    reclaimer_.RetireArrays(pool, arrays);
    retired_bytes += arrays.bytes();
  });
  store_.counters.index_bytes += bucket->index.bytes() + retired_bytes - before;
  reclaimer_.Reclaim(pool);
}

void Residency::InsertEntry(Bucket* bucket, uint64_t key, Location location) {
  bucket->index.Insert(HashKey(key), location);
  ++store_.counters.rows;
}

void Residency::EraseEntry(Bucket* bucket, uint32_t entry) {
  TierPolicy* policy = bucket->pool->policy.get();
  if (policy != nullptr) policy->Leave(bucket->index.KeyAt(entry));
  bucket->index.Erase(entry);
  --store_.counters.rows;
}

// --- rows ----------------------------------------------------------------------------------------

Result<Location> Residency::StoreRow(RowPool* pool, const Table& table, uint64_t key, uint16_t live,
                                     std::span<const std::byte> payload) {
  // A row without live chunks needs no slot of its own, but the least keeps one meaning of "row".
  Result<uint64_t> slot =
      AllocateDdr(pool, table, SlotPayload(table.config.layout, live), store_.AuxBytes(table));
  if (slot.ok() && live == 0 && slot.value() == 0) {  // see LeanShape::WordOf
    slot = AllocateDdr(pool, table, SlotPayload(table.config.layout, live), store_.AuxBytes(table));
    pool->arena.Free(0);
  }
  if (!slot.ok()) return slot.status();
  std::copy(payload.begin(), payload.end(), pool->arena.Address(*slot));
  const Location place(TierId::kDdr, live, *slot);
  store_.CountPlace(pool, table, place, /*taken=*/true);
  if (pool->policy != nullptr) pool->policy->Enter(key);
  return place;
}

Status Residency::PutRecord(RowPool* pool, const Table& table, Bucket* bucket,
                            const RowRecord& record) {
  Location place = Location::Removed(record.kind);
  if (record.kind == RecordKind::kRow) {
    if (bucket->index.Locate(HashKey(record.key), record.key) == BucketIndex::kNotFound) {
      EMBERTIDE_RETURN_IF_ERROR(ReserveEntry(pool, bucket, record.key));
    }
    Result<Location> stored = StoreRow(pool, table, record.key, record.live, record.payload);
    if (!stored.ok()) return stored.status();
    place = *stored;
  }
  const uint32_t entry = bucket->index.Locate(HashKey(record.key), record.key);
  if (entry != BucketIndex::kNotFound) {
    const Location old = bucket->index.At(entry);
    if (place.tier() == TierId::kNowhere) {
      EraseEntry(bucket, entry);
    } else {
      bucket->index.Set(entry, place);
    }
    reclaimer_.RetirePlace(pool, table, old);
    return Status::Ok();
  }
  if (place.tier() == TierId::kNowhere) return Status::Ok();
  InsertEntry(bucket, record.key, place);
  return Status::Ok();
}

Result<Location> Residency::ResidentRow(RowPool* pool, uint32_t t, uint32_t b, uint64_t key) {
  BucketIndex& index = store_.tables[t].Newest(b)->index;
  const uint32_t entry = index.Locate(HashKey(key), key);
  if (entry == BucketIndex::kNotFound) {
    return Status(Code::kNotFound, "key " + std::to_string(key) + " has no row in table " +
                                       store_.tables[t].config.name);
  }
  if (index.At(entry).tier() == TierId::kSsd) {
    EMBERTIDE_RETURN_IF_ERROR(PromoteOne(pool, {key, t}));
  }
  return index.At(index.Locate(HashKey(key), key));
}

Location Residency::Install(RowPool* pool, uint32_t t, Bucket* bucket, uint64_t key,
                            const std::byte* bytes, uint64_t slot) {
  const Table& table = store_.tables[t];
  BucketIndex& index = bucket->index;
  const uint32_t entry = index.Locate(HashKey(key), key);
  // Making room may have compacted the segment that it lay in.
  const Location place = index.At(entry);
  const uint32_t payload = table.config.layout.PayloadBytes(place.live());
  const uint32_t aux = store_.AuxBytes(table);
  std::copy_n(bytes, payload, pool->arena.Address(slot));
  if (aux > 0) std::copy_n(bytes + payload, aux, pool->arena.Aux(slot));
  const Location moved(TierId::kDdr, place.live(), slot);
  store_.CountPlace(pool, table, moved, /*taken=*/true);
  index.Set(entry, moved);
  if (pool->policy != nullptr) pool->policy->Enter(key);
  reclaimer_.RetirePlace(pool, table, place);
  ++store_.counters.promoted;
  return moved;
}

Status Residency::PromoteOne(RowPool* pool, const Access& row) {
  Bucket* bucket = nullptr;
  const uint32_t entry = EntryOnSsd(store_, pool, row, &bucket);
  if (entry == BucketIndex::kNotFound) return Status::Ok();
  LogRead read = ReadOf(store_, row, bucket->index.At(entry), nullptr);
  std::vector<std::byte> bytes(read.bytes);
  read.to = bytes.data();
  EMBERTIDE_RETURN_IF_ERROR(pool->ssd->Read({&read, 1}));
  const uint32_t aux = store_.AuxBytes(store_.tables[row.table]);
  const Result<uint64_t> slot = AllocateDdr(pool, store_.tables[row.table], read.bytes - aux, aux);
  if (!slot.ok()) return slot.status();
  Install(pool, row.table, bucket, row.key, bytes.data(), slot.value());
  return Status::Ok();
}

Result<Location> Residency::BringRow(RowPool* pool, const SsdBatch& batch, size_t i) {
  const Access& row = batch.row(i);
  Bucket* bucket = nullptr;
  const uint32_t entry = EntryOnSsd(store_, pool, row, &bucket);
  const bool there = entry != BucketIndex::kNotFound && bucket->index.At(entry) == batch.place(i);
  const std::byte* bytes = there ? batch.Bytes(i) : nullptr;
  if (bytes != nullptr) {
    const Table& table = store_.tables[row.table];
    const uint32_t aux = store_.AuxBytes(table);
    const Result<uint64_t> slot = AllocateDdr(pool, table, batch.bytes_of(i) - aux, aux);
    if (!slot.ok()) return slot.status();
    return Install(pool, row.table, bucket, row.key, bytes, slot.value());
  }
  if (there) {
    EMBERTIDE_RETURN_IF_ERROR(batch.StatusOf(i));
  }
  return ResidentRow(pool, row.table, store_.tables[row.table].BucketOf(HashKey(row.key)), row.key);
}

void Residency::BringRows(RowPool* pool, std::span<const Access> rows, WriterLock* writer) {
  SsdBatch batch;
  for (size_t first = 0; first < rows.size();) {
    batch.Begin(&store_, pool);
    for (; first < rows.size() && !batch.full(); ++first) batch.Add(rows[first]);
    batch.Read(writer);
    // Who needs a row that cannot be brought asks for it again, and is told why.
    for (size_t i = 0; i < batch.size(); ++i) static_cast<void>(BringRow(pool, batch, i));
  }
}

}  // namespace embertide
