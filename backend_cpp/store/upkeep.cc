// Upkeep, the work of a thread in the background for a store: see the header.
#include "store/upkeep.h"

#include <algorithm>
#include <set>

#include "embertide/hash.h"
#include "store/ssd_batch.h"

namespace embertide {
namespace {

// Turns of one call of MakeRoomAhead.
constexpr int kRoomTurns = 16;
// Entries that one call passes over to move rows out of condemned pages: half a millisecond.
constexpr uint32_t kPassedEntries = 10000;
// Rows that one call may free, of buckets that were dropped, a part of a bucket at a time.
constexpr int kFreeTurns = 64;
constexpr size_t kPromotionsPerCall = 512;
// Reads that the policy is told of in one hold of it: 28 to 54 ns each.
constexpr size_t kReplayedAtOnce = 4096;

// Makes one region of a page pool a huge page, if one is due.
void MakeHugePage(RowPool* pool, PagePool* pages) {
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

}  // namespace

void Upkeep::MakeRoomAhead(RowPool* pool, uint32_t pages) {
  const uint64_t wanted = pool->ReadyBytes() + uint64_t{pages} * pool->arena.slab_bytes();
  for (int turn = 0; turn < kRoomTurns; ++turn) {
    WriterLock writer(pool->writer);
    reclaimer_.Reclaim(pool);
    if (pool->notes != nullptr) pool->notes->ChargeAhead();
    if (pool->Full()) {
      if (!evictor_.Evict(pool, &writer)) return;
      continue;
    }
    bool shrank = false;
    for (const uint32_t t : pool->tables) {
      if (evictor_.ShareLacks(*pool, t) > 0) shrank |= evictor_.EvictTable(pool, t, &writer);
    }
    if (shrank) continue;
    const uint64_t room = pool->budget.limit_bytes() - pool->budget.used_bytes();
    if (pool->ssd == nullptr || pool->ssd->paused() || room >= wanted) return;
    if (!pool->arena.has_condemned()) {
      pool->arena.CondemnPages(1 +
                               static_cast<uint32_t>((wanted - room) / pool->arena.slab_bytes()));
    }
    evictor_.MoveCondemned(pool, kPassedEntries, /*demote=*/true, &writer);
  }
}

bool Upkeep::Promote(RowPool* pool, std::span<const Access> rows) {
  WriterLock writer(pool->writer);
  SsdBatch batch;
  batch.Begin(&store_, pool);
  for (const Access& row : rows) batch.Add(row);
  batch.Read(&writer);
  bool lacks_page = false;
  for (size_t i = 0; i < batch.size(); ++i) {
    const Access& row = batch.row(i);
    Bucket* bucket = nullptr;
    const uint32_t entry = EntryOnSsd(store_, pool, row, &bucket);
    const bool there = entry != BucketIndex::kNotFound && bucket->index.At(entry) == batch.place(i);
    const std::byte* bytes = there ? batch.Bytes(i) : nullptr;
    // A promotion that finds no room, or a bad block, leaves the row where it is: nothing is lost.
    const uint32_t aux = store_.AuxBytes(store_.tables[row.table]);
    const uint32_t payload = batch.bytes_of(i) - aux;
    const bool holds = pool->ShareHolds(row.table, batch.bytes_of(i));
    if (bytes != nullptr && holds && (pool->policy == nullptr || pool->policy->Reserve())) {
      // A page that is kept ready is not for this: another would be emptied for it.
      const Result<uint64_t> slot = pool->SparePages() > 0
                                        ? pool->arena.Allocate(payload, aux)
                                        : pool->arena.AllocateInRoom(payload, aux);
      if (slot.ok()) {
        residency_.Install(pool, row.table, bucket, row.key, bytes, slot.value());
        continue;
      }
      lacks_page |= !pool->Full();
    }
    ++store_.counters.dropped_accesses;
  }
  return lacks_page;
}

std::vector<Access> Upkeep::Replay(RowPool* pool) {
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
      if (EntryOnSsd(store_, pool, row, &bucket) == BucketIndex::kNotFound) continue;
      const bool admits =
          pool->policy != nullptr
              ? pool->policy->Admit(row.key,
                                    pool->Full() || evictor_.ShareLacks(*pool, row.table) > 0)
              : bucket->index.AccessCount(HashKey(row.key), row.key) >= pool->least_count;
      if (!admits) {
        ++store_.counters.refused_promotions;
        continue;
      }
      if (asked.contains({row.table, row.key})) continue;
      if (admitted.size() == kPromotionsPerCall) {
        ++store_.counters.dropped_accesses;
        continue;
      }
      asked.insert({row.table, row.key});
      admitted.push_back(row);
    }
  }
  return admitted;
}

void Upkeep::Maintain(RowPool* pool) {
  MakeHugePage(pool, pool->arena.pool());
  MakeHugePage(pool, &pool->index_pages);
  std::vector<Access> admitted = Replay(pool);
  MakeRoomAhead(pool, 0);
  // Rows that find no room are read for nothing, and none leaves while the SSD takes no writes.
  if (pool->ssd != nullptr && pool->ssd->paused()) {
    store_.counters.dropped_accesses += admitted.size();
    admitted.clear();
  }
  for (size_t first = 0; first < admitted.size(); first += Evictor::kPromotionsAtOnce) {
    const auto some = std::span(admitted).subspan(
        first, std::min(Evictor::kPromotionsAtOnce, admitted.size() - first));
    MakeRoomAhead(pool, Promote(pool, some) ? 1 : 0);
  }
  for (int turn = 0; turn < kFreeTurns; ++turn) {
    const std::lock_guard writer(pool->writer);
    if (!reclaimer_.Reclaim(pool)) break;
  }
  WriterLock writer(pool->writer);
  if (pool->policy != nullptr) pool->policy->Fit();
  if (!pool->arena.has_condemned()) pool->arena.CondemnSparsePages();
  if (pool->arena.has_condemned()) {
    evictor_.MoveCondemned(pool, kPassedEntries, /*demote=*/false, &writer);
  }
  if (pool->ssd != nullptr) {
    pool->ssd->Probe();
    mover_.CompactInBackground(pool, &writer);
  }
  reclaimer_.Reclaim(pool);
}

}  // namespace embertide
