// Upkeep: what a thread in the background does for a store. Here writers shall not wait for a drive
// or for the system: what takes long runs without the writer lock, what needs it comes in slices.
#include <algorithm>
#include <set>

#include "store/ssd_batch.h"
#include "store/store_impl.h"

namespace embertide {
namespace {

// Entries that one call passes over to move rows out of condemned pages: half a millisecond.
constexpr uint32_t kSweepEntries = 10000;
// Rows that one call may free, of buckets that were dropped, a part of a bucket at a time.
constexpr int kFreeTurns = 64;
constexpr size_t kPromotionsPerCall = 512;
// Reads that the policy is told of in one hold of it: 28 to 54 ns each.
constexpr size_t kReplayedAtOnce = 4096;

}  // namespace

uint32_t Store::Impl::EntryOnSsd(RowPool* pool, const Access& row, Bucket** bucket) const {
  const Table& table = tables[row.table];
  const uint64_t hash = HashKey(row.key);
  *bucket = table.buckets[BucketOf(table, hash)].On(pool);
  if (*bucket == nullptr) return BucketIndex::kNotFound;
  const BucketIndex& index = (*bucket)->index;
  const uint32_t entry = index.Locate(hash, row.key);
  if (entry == BucketIndex::kNotFound) return entry;
  const Location place = index.At(entry);
  return !place.is_chain() && place.tier() == TierId::kSsd ? entry : BucketIndex::kNotFound;
}

LogRead Store::Impl::ReadOf(const Access& row, Location place, std::byte* to) const {
  const Table& table = tables[row.table];
  return {place.slot(), row.key, row.table,
          table.config.layout.PayloadBytes(place.live()) + AuxBytes(table), to};
}

void Store::Impl::Install(RowPool* pool, uint32_t t, Bucket* bucket, uint64_t key,
                          const std::byte* bytes, uint64_t slot) {
  const Table& table = tables[t];
  BucketIndex& index = bucket->index;
  const uint32_t entry = index.Locate(HashKey(key), key);
  // Making room may have compacted the segment that it lay in.
  const Location place = index.At(entry);
  const uint32_t payload = table.config.layout.PayloadBytes(place.live());
  const uint32_t aux = AuxBytes(table);
  std::copy_n(bytes, payload, pool->arena.Address(slot));
  if (aux > 0) std::copy_n(bytes + payload, aux, pool->arena.Aux(slot));
  const Location moved(TierId::kDdr, place.live(), slot);
  CountPlace(pool, table, moved, /*taken=*/true);
  index.Set(entry, moved);
  if (pool->policy != nullptr) pool->policy->Enter(key);
  RetirePlace(pool, table, place);
  ++promoted;
}

Status Store::Impl::PromoteOne(RowPool* pool, const Access& row) {
  Bucket* bucket = nullptr;
  const uint32_t entry = EntryOnSsd(pool, row, &bucket);
  if (entry == BucketIndex::kNotFound) return Status::Ok();
  LogRead read = ReadOf(row, bucket->index.At(entry), nullptr);
  std::vector<std::byte> bytes(read.bytes);
  read.to = bytes.data();
  EMBERTIDE_RETURN_IF_ERROR(pool->ssd->Read({&read, 1}));
  const uint32_t aux = AuxBytes(tables[row.table]);
  const Result<uint64_t> slot = AllocateDdr(pool, tables[row.table], read.bytes - aux, aux);
  if (!slot.ok()) return slot.status();
  Install(pool, row.table, bucket, row.key, bytes.data(), slot.value());
  return Status::Ok();
}

Result<Location> Store::Impl::BringRow(RowPool* pool, const SsdBatch& batch, size_t i) {
  const Access& row = batch.row(i);
  Bucket* bucket = nullptr;
  const uint32_t entry = EntryOnSsd(pool, row, &bucket);
  const bool there = entry != BucketIndex::kNotFound && bucket->index.At(entry) == batch.place(i);
  const std::byte* bytes = there ? batch.Bytes(i) : nullptr;
  if (bytes != nullptr) {
    const Table& table = tables[row.table];
    const uint32_t aux = AuxBytes(table);
    const Result<uint64_t> slot = AllocateDdr(pool, table, batch.bytes_of(i) - aux, aux);
    if (!slot.ok()) return slot.status();
    Install(pool, row.table, bucket, row.key, bytes, slot.value());
  } else if (there) {
    EMBERTIDE_RETURN_IF_ERROR(batch.StatusOf(i));
  }
  return ResidentRow(pool, row.table, BucketOf(tables[row.table], HashKey(row.key)), row.key);
}

void Store::Impl::BringRows(RowPool* pool, std::span<const Access> rows, WriterLock* writer) {
  SsdBatch batch;
  for (size_t first = 0; first < rows.size();) {
    batch.Begin(this, pool);
    for (; first < rows.size() && !batch.full(); ++first) batch.Add(rows[first]);
    batch.Read(writer);
    // Who needs a row that cannot be brought asks for it again, and is told why.
    for (size_t i = 0; i < batch.size(); ++i) static_cast<void>(BringRow(pool, batch, i));
  }
}

bool Store::Impl::Promote(RowPool* pool, std::span<const Access> rows) {
  WriterLock writer(pool->writer);
  SsdBatch batch;
  batch.Begin(this, pool);
  for (const Access& row : rows) batch.Add(row);
  if (!batch.Read(&writer)) {
    dropped_accesses += rows.size();
    return false;
  }
  bool lacks_page = false;
  for (size_t i = 0; i < batch.size(); ++i) {
    const Access& row = batch.row(i);
    Bucket* bucket = nullptr;
    const uint32_t entry = EntryOnSsd(pool, row, &bucket);
    const bool there = entry != BucketIndex::kNotFound && bucket->index.At(entry) == batch.place(i);
    const std::byte* bytes = there ? batch.Bytes(i) : nullptr;
    // A promotion that finds no room, or a bad block, leaves the row where it is: nothing is lost.
    const uint32_t aux = AuxBytes(tables[row.table]);
    const uint32_t payload = batch.bytes_of(i) - aux;
    const bool holds = ShareHolds(*pool, row.table, batch.bytes_of(i));
    if (bytes != nullptr && holds && (pool->policy == nullptr || pool->policy->Reserve())) {
      // A page that is kept ready is not for this: another would be emptied for it.
      const Result<uint64_t> slot = SparePages(*pool) > 0
                                        ? pool->arena.Allocate(payload, aux)
                                        : pool->arena.AllocateInRoom(payload, aux);
      if (slot.ok()) {
        Install(pool, row.table, bucket, row.key, bytes, slot.value());
        continue;
      }
      lacks_page |= !Full(*pool);
    }
    ++dropped_accesses;
  }
  return lacks_page;
}

std::vector<Access> Store::Impl::Replay(RowPool* pool) {
  pool->replayed.clear();
  {
    const MutexLock lock(pool->accesses_mutex);
    pool->accesses.swap(pool->replayed);
  }
  std::vector<Access> admitted;
  std::set<std::pair<uint32_t, uint64_t>> asked;  // a key once
  const std::span<const Access> all(pool->replayed);
  for (size_t first = 0; first < all.size(); first += kReplayedAtOnce) {
    const std::lock_guard writer(pool->writer);
    for (const Access& row : all.subspan(first, std::min(kReplayedAtOnce, all.size() - first))) {
      if (pool->policy != nullptr && pool->policy->Touch(row.key)) continue;
      Bucket* bucket = nullptr;
      if (EntryOnSsd(pool, row, &bucket) == BucketIndex::kNotFound) continue;
      const bool admits =
          pool->policy != nullptr
              ? pool->policy->Admit(row.key, Full(*pool) || ShareLacks(*pool, row.table) > 0)
              : bucket->index.AccessCount(HashKey(row.key), row.key) >= pool->least_count;
      if (!admits) {
        ++refused_promotions;
        continue;
      }
      if (asked.contains({row.table, row.key})) continue;
      if (admitted.size() == kPromotionsPerCall) {
        ++dropped_accesses;
        continue;
      }
      asked.insert({row.table, row.key});
      admitted.push_back(row);
    }
  }
  return admitted;
}

void Store::Impl::MakeHugePage(RowPool* pool, PagePool* pages) {
  std::optional<uint32_t> region;
  {
    const std::lock_guard writer(pool->writer);
    region = pages->NextDue(PagePool::Clock::now());
  }
  if (!region.has_value()) return;
  const bool ready = pages->Prepare(*region);
  const std::lock_guard writer(pool->writer);
  if (ready) {
    pages->Exchange(*region);
  } else {
    pages->PutBack(*region, PagePool::Clock::now());
  }
}

void Store::Impl::Maintain(RowPool* pool) {
  MakeHugePage(pool, pool->arena.pool());
  MakeHugePage(pool, &pool->index_pages);
  const std::vector<Access> admitted = Replay(pool);
  MakeRoomAhead(pool, 0);
  for (size_t first = 0; first < admitted.size(); first += kPromotionsAtOnce) {
    const auto some =
        std::span(admitted).subspan(first, std::min(kPromotionsAtOnce, admitted.size() - first));
    MakeRoomAhead(pool, Promote(pool, some) ? 1 : 0);
  }
  for (int turn = 0; turn < kFreeTurns; ++turn) {
    const std::lock_guard writer(pool->writer);
    if (!Reclaim(pool)) break;
  }
  WriterLock writer(pool->writer);
  if (pool->policy != nullptr) pool->policy->Fit();
  if (!pool->arena.has_condemned()) pool->arena.CondemnSparsePages();
  if (pool->arena.has_condemned()) {
    MoveCondemned(pool, kSweepEntries, /*demote=*/false, &writer);
  }
  if (pool->ssd != nullptr) CompactInBackground(pool, &writer);
  Reclaim(pool);
}

void Store::Maintain() {
  for (uint32_t d = 0; d < impl_->options.devices; ++d) Maintain(d);
}

void Store::Maintain(uint32_t number) {
  for (auto& pool : impl_->pools) {
    if (pool->number != number) continue;
    const std::unique_lock upkeep(pool->upkeep, std::try_to_lock);
    if (upkeep.owns_lock()) impl_->Maintain(pool.get());
  }
  if (number == 0 && impl_->hbm != nullptr) impl_->FillHbm();
}

}  // namespace embertide
