// Residency: which tier holds a row. Everything here runs under the pool's writer lock, which
// upkeep lets go of while the drive writes: it makes room ahead, so that writers find it ready.
//
// Room in DDR is made as the pool's policy says; without one, by a clock hand that passes over
// the pool's entries: an entry whose halved access count was zero leaves for the SSD. When the
// bytes are wanted by another size class or by the index, whole pages are condemned and their rows
// moved. What is unlinked waits on the retire list until no reader can be at it.
#include <algorithm>
#include <chrono>
#include <thread>

#include "store/ssd_batch.h"
#include "store/store_impl.h"

namespace embertide {
namespace {

constexpr std::chrono::microseconds kReadersPoll{50};
// And it empties pages until this part of the budget is free, a page of rows and two of nodes or
// index at least and so many bytes at most: rows of another size, index arrays and version nodes
// need pages, which slots that came free here and there do not give. A budget of which the least
// is more than an eighth keeps none.
constexpr uint64_t kLeastOverReady = 100;
constexpr uint64_t kLeastReady = kMostSlabPageBytes + uint64_t{2} * BucketIndex::kPageBytes;
constexpr uint64_t kMostReady = 64 << 20;
constexpr uint64_t kLeastLimitOverReady = 8;
// Entries of a bucket that are freed at once, under the writer lock.
constexpr uint32_t kFreedAtOnce = 1024;
// Entries passed at once by upkeep, a third of a millisecond: on the way to the rows of condemned
// pages, which are looked up and moved, and to cold rows, which are only looked at.
constexpr uint32_t kSweepEntries = 10000;
constexpr uint32_t kClockEntries = 32768;
// Such turns of one call of MakeRoomAhead.
constexpr int kRoomTurns = 16;

}  // namespace

// --- retiring ------------------------------------------------------------------------------------

void Store::Impl::CountPlace(RowPool* pool, const Table& table, Location place, bool taken) const {
  TierCount& count = (place.tier() == TierId::kSsd ? pool->in_ssd : pool->in_ddr)[table.ordinal];
  const uint64_t bytes = table.config.layout.PayloadBytes(place.live()) + AuxBytes(table);
  if (taken) {
    ++count.rows;
    count.bytes += bytes;
  } else {
    --count.rows;
    count.bytes -= bytes;
  }
}

void Store::Impl::RetirePlace(RowPool* pool, const Table& table, Location place) {
  if (place.tier() == TierId::kNowhere) return;
  CountPlace(pool, table, place, /*taken=*/false);
  Retired retired;
  retired.epoch = readers.Retire();
  retired.place = place;
  retired.bytes = table.config.layout.PayloadBytes(place.live()) + AuxBytes(table);
  pool->retired.push_back(retired);
}

void Store::Impl::RetireNode(RowPool* pool, VersionNode* node) {
  Retired retired;
  retired.epoch = readers.Retire();
  retired.node = node;
  pool->retired.push_back(retired);
}

void Store::Impl::RetireArrays(RowPool* pool, const BucketIndex::Arrays& arrays) {
  Retired retired;
  retired.epoch = readers.Retire();
  retired.arrays = arrays;
  pool->retired.push_back(retired);
}

bool Store::Impl::Free(RowPool* pool, Retired* retired) {
  if (retired->node != nullptr) {
    pool->nodes.Give(retired->node);
  } else if (retired->arrays.pages != nullptr) {
    pool->budget.Release(retired->arrays.bytes());
    index_bytes -= retired->arrays.bytes();
    BucketIndex::Free(&pool->index_pages, retired->arrays);
  } else if (retired->bucket != nullptr) {
    return FreeBucket(tables[retired->table], retired->bucket, &retired->entry, kFreedAtOnce);
  } else if (retired->place.tier() == TierId::kDdr) {
    pool->arena.Free(retired->place.slot());
  } else {
    for (SsdBatch* batch : pool->reading) batch->Forget(retired->place.slot());
    pool->ssd->Free(retired->place.slot(), retired->bytes);
  }
  return true;
}

bool Store::Impl::Reclaim(RowPool* pool) {
  if (pool->retired.empty()) return false;
  const uint64_t safe = readers.MinEpoch();
  if (pool->retired.front().epoch >= safe) return false;
  while (!pool->retired.empty() && pool->retired.front().epoch < safe &&
         Free(pool, &pool->retired.front())) {
    pool->retired.pop_front();
  }
  return true;
}

Status Store::Impl::AwaitReaders(RowPool* pool) {
  const auto begin = std::chrono::steady_clock::now();
  const std::chrono::milliseconds most(options.reader_wait_ms);
  // Reads that begin from now on hold none of it. Those in flight take microseconds, or as long as
  // the SSD; they tell nobody when they end, so that they cost nothing.
  while (!pool->retired.empty()) {
    if (Reclaim(pool)) continue;
    const auto waited = std::chrono::steady_clock::now() - begin;
    if (waited > most) {
      ++reader_waits_given_up;
      return {Code::kResourceExhausted,
              std::to_string(pool->retired.size()) + " retired pieces wait for " +
                  readers.OldestRead() + ", and did for " +
                  std::to_string(
                      std::chrono::duration_cast<std::chrono::milliseconds>(waited).count()) +
                  " ms"};
    }
    std::this_thread::sleep_for(kReadersPoll);
  }
  return Status::Ok();
}

// --- the clock -----------------------------------------------------------------------------------

template <typename Visit>
uint32_t Store::Impl::AdvanceHand(RowPool* pool, Hand* hand, uint32_t entries, Visit visit) {
  uint32_t skipped_buckets = 0;
  uint32_t passed = 0;
  while (passed < entries) {
    if (hand->tables.empty()) return entries;
    const Table& table = tables[hand->tables[hand->table]];
    if (hand->bucket >= table.buckets.size()) {
      hand->table = (hand->table + 1) % hand->tables.size();
      hand->entry = 0;
      // The first bucket of the next table that lies in this pool.
      hand->bucket = 0;
      const auto& slots = tables[hand->tables[hand->table]].buckets;
      while (hand->bucket < slots.size() && slots[hand->bucket].On(pool) == nullptr) {
        ++hand->bucket;
      }
      // A whole round over tables without one entry: there is nothing to visit.
      if (++skipped_buckets > 2 * hand->tables.size() + 2) return entries;
      continue;
    }
    Bucket* bucket = table.buckets[hand->bucket].On(pool);
    if (bucket == nullptr || hand->entry >= bucket->index.capacity()) {
      ++hand->bucket;
      hand->entry = 0;
      continue;
    }
    if (bucket->index.Occupied(hand->entry)) {
      skipped_buckets = 0;
      if (!visit(table.ordinal, bucket, hand->entry)) return passed;
    }
    ++hand->entry;
    ++passed;
  }
  return passed;
}

uint32_t Store::Impl::RoundOf(const RowPool* pool, const Hand& hand) const {
  uint64_t entries = 0;
  for (const uint32_t t : hand.tables) {
    for (const BucketSlot& slot : tables[t].buckets) {
      if (const Bucket* bucket = slot.On(pool)) entries += bucket->index.capacity();
    }
  }
  return static_cast<uint32_t>(std::min<uint64_t>(entries, ~0U));
}

Location Store::Impl::PlaceOf(const Holder& holder) {
  if (holder.node != nullptr) return Location::FromWord(holder.node->word.load());
  return holder.bucket->index.At(holder.entry);
}

void Store::Impl::SetPlace(const Holder& holder, Location place) {
  if (holder.node != nullptr) {
    holder.node->word.store(place.word(), std::memory_order_release);
  } else {
    holder.bucket->index.Set(holder.entry, place);
  }
}

void Store::Impl::Sweep(RowPool* pool, Hand* hand, uint32_t entries, Sweeping sweeping,
                        std::vector<Holder>* victims, uint64_t wanted) {
  uint64_t bytes = 0;
  const auto take = [&](const Holder& holder) {
    const Location place = PlaceOf(holder);
    if (place.tier() != TierId::kDdr || place.live() == 0) return;
    victims->push_back(holder);
    bytes += tables[holder.table].config.layout.PayloadBytes(place.live());
  };
  // At most one round: a row is met once.
  AdvanceHand(pool, hand, entries, [&](uint32_t t, Bucket* b, uint32_t e) {
    BucketIndex& index = b->index;
    const Location place = index.At(e);
    if (sweeping == Sweeping::kChained) {
      ForEachPlace(t, b, e, take);
      return bytes < wanted;
    }
    if (place.is_chain() || place.tier() != TierId::kDdr || place.live() == 0) return true;
    if (index.Age(e) > 1 && sweeping == Sweeping::kCold) return true;
    take(Holder{t, b, e, nullptr});
    return bytes < wanted;
  });
}

template <typename Visit>
void Store::Impl::ForEachPlace(uint32_t t, Bucket* bucket, uint32_t entry, const Visit& visit) {
  const Location place = bucket->index.At(entry);
  if (!place.is_chain()) return visit(Holder{t, bucket, entry, nullptr});
  for (VersionNode* n = place.chain(); n != nullptr; n = n->older.load()) {
    visit(Holder{t, bucket, entry, n});
  }
}

uint32_t Store::Impl::ChooseByPolicy(RowPool* pool, uint64_t wanted, std::vector<Holder>* victims) {
  const uint32_t t = pool->tables.front();
  uint64_t bytes = 0;
  uint32_t chosen = 0;
  for (; bytes < wanted; ++chosen) {
    const std::optional<uint64_t> key = pool->policy->Evict();
    if (!key) break;
    const uint64_t hash = HashKey(*key);
    Bucket* bucket = tables[t].buckets[BucketOf(tables[t], hash)].On(pool);
    if (bucket == nullptr) continue;  // it was dropped, and its rows are about to leave
    ForEachPlace(t, bucket, bucket->index.Locate(hash, *key), [&](const Holder& holder) {
      const Location place = PlaceOf(holder);
      if (place.tier() != TierId::kDdr) return;
      victims->push_back(holder);
      bytes += kMinSlotBytes + tables[t].config.layout.PayloadBytes(place.live());
    });
  }
  return chosen;
}

bool Store::Impl::Demote(RowPool* pool, const std::vector<Holder>& victims, MoveKind kind,
                         WriterLock* writer) {
  if (victims.empty() || pool->ssd == nullptr) return false;
  std::vector<Moving> rows;
  uint64_t all_bytes = 0;
  for (const Holder& v : victims) {
    const Location place = PlaceOf(v);
    const Table& table = tables[v.table];
    all_bytes += table.config.layout.PayloadBytes(place.live()) + AuxBytes(table);
    rows.push_back({v.table, v.bucket->index.KeyAt(v.entry), place, {}});
  }
  std::vector<std::byte> bytes(all_bytes);
  auto to = bytes.begin();
  for (Moving& row : rows) {
    const Table& table = tables[row.table];
    const uint32_t payload = table.config.layout.PayloadBytes(row.from.live());
    const uint32_t aux = AuxBytes(table);
    row.bytes = {to, to + payload + aux};
    to = std::copy_n(pool->arena.Address(row.from.slot()), payload, to);
    if (aux > 0) to = std::copy_n(pool->arena.Aux(row.from.slot()), aux, to);
  }
  const Result<size_t> moved = MoveToLog(pool, rows, kind, writer);
  for (const Moving& row : rows) {
    if (pool->policy == nullptr) break;
    // Chosen or not, it holds the rows whose newest place is in DDR.
    const uint64_t hash = HashKey(row.key);
    const Bucket* bucket = tables[row.table].buckets[BucketOf(tables[row.table], hash)].On(pool);
    const Location newest_place =
        bucket == nullptr ? Location() : Resolve(bucket->index.Peek(hash, row.key), ~0ULL);
    if (newest_place.tier() == TierId::kDdr) {
      pool->policy->Enter(row.key);
    } else {
      pool->policy->Leave(row.key);
    }
  }
  if (!moved.ok()) return false;
  evictions += moved.value();
  if (writer == nullptr) evictions_by_writers += moved.value();
  return moved.value() > 0;
}

bool Store::Impl::EvictByPolicy(RowPool* pool, uint64_t bytes, WriterLock* writer) {
  std::vector<Holder> victims;
  const uint32_t chosen = ChooseByPolicy(pool, bytes, &victims);
  const bool went = Demote(pool, victims, MoveKind::kEvict, writer);
  pool->policy->Settle(chosen);
  return went;
}

bool Store::Impl::EvictByClock(RowPool* pool, Hand* hand, uint64_t bytes, bool chained,
                               WriterLock* writer) {
  std::vector<Holder> victims;
  const uint32_t round = RoundOf(pool, *hand);
  // Who waits for the writer gets it between two parts of a round.
  const uint32_t part = writer == nullptr ? round : kClockEntries;
  for (uint32_t passed = 0; passed < round && victims.empty(); passed += part) {
    Sweep(pool, hand, std::min(round - passed, part), Sweeping::kCold, &victims, bytes);
    if (victims.empty()) WithoutWriter(writer, [] {});
  }
  // All were in use lately: take them in the hand's order.
  if (victims.empty()) Sweep(pool, hand, round, Sweeping::kAny, &victims, bytes);
  if (victims.empty() && chained) {
    Sweep(pool, hand, round, Sweeping::kChained, &victims, bytes);
  }
  return Demote(pool, victims, MoveKind::kEvict, writer);
}

bool Store::Impl::Evict(RowPool* pool, WriterLock* writer) {
  if (pool->ssd == nullptr) return false;
  const uint64_t bytes = std::min(kEvictBytes, pool->budget.limit_bytes() / kLeastOverEvicted);
  if (pool->policy != nullptr) return EvictByPolicy(pool, bytes, writer);
  if (pool->shared_out) {
    for (const uint32_t t : pool->tables) {
      const TableShare& share = pool->shares[t];
      if (share.given() && pool->in_ddr[t].bytes > share.bytes && EvictTable(pool, t, writer)) {
        return true;
      }
    }
    if (EvictByClock(pool, &pool->unshared_clock, bytes, /*chained=*/true, writer)) {
      return true;
    }
  }
  return EvictByClock(pool, &pool->clock, bytes, /*chained=*/false, writer);
}

void Store::Impl::MoveCondemned(RowPool* pool, uint32_t entries, bool demote, WriterLock* writer) {
  std::vector<Holder> victims;
  uint64_t bytes = 0;
  const auto move = [&](const Holder& holder) {
    const Location place = PlaceOf(holder);
    if (place.tier() != TierId::kDdr || !pool->arena.Condemned(place.slot())) return;
    const Table& table = tables[holder.table];
    const uint32_t payload = table.config.layout.PayloadBytes(place.live());
    const uint32_t aux = AuxBytes(table);
    const Result<uint64_t> slot = pool->arena.AllocateInRoom(payload, aux);
    if (!slot.ok()) {
      if (!demote || !GivesWay(*pool, holder.table)) return;
      victims.push_back(holder);
      bytes += payload;
      return;
    }
    SlabArena& arena = pool->arena;
    std::copy_n(arena.Address(place.slot()), payload, arena.Address(slot.value()));
    if (aux > 0) std::copy_n(arena.Aux(place.slot()), aux, arena.Aux(slot.value()));
    const Location moved(TierId::kDdr, place.live(), slot.value());
    SetPlace(holder, moved);
    RetirePlace(pool, table, place);
    // After the old place: a share is never exceeded, not for a moment.
    CountPlace(pool, table, moved, /*taken=*/true);
  };
  const auto visit = [&](uint32_t t, Bucket* b, uint32_t e) {
    ForEachPlace(t, b, e, move);
    return bytes < kEvictBytes;
  };
  for (uint32_t passed = 0; passed < entries;) {
    const uint32_t part = std::min(entries - passed, kSweepEntries);
    passed += std::max(1U, AdvanceHand(pool, &pool->packing, part, visit));
    if (!victims.empty() && !Demote(pool, victims, MoveKind::kEmptyPage, writer)) return;
    victims.clear();
    bytes = 0;
  }
}

// --- room ----------------------------------------------------------------------------------------

uint64_t Store::Impl::FreeSlotBytes(const RowPool& pool) {
  uint64_t bytes = pool.arena.page_bytes();
  for (const TierCount& rows : pool.in_ddr) bytes -= rows.bytes.load();
  return bytes;
}

uint64_t Store::Impl::SparePages(const RowPool& pool) {
  const uint64_t kept = pool.budget.used_bytes() + ReadyBytes(pool);
  const uint64_t limit = pool.budget.limit_bytes();
  return kept < limit ? (limit - kept) / pool.arena.slab_bytes() : 0;
}

bool Store::Impl::Full(const RowPool& pool) {
  const auto low = static_cast<uint64_t>(kLowRoom * static_cast<double>(pool.budget.limit_bytes()));
  const uint64_t spare = SparePages(pool) * pool.arena.slab_bytes();
  return pool.ssd != nullptr && FreeSlotBytes(pool) + spare < low;
}

uint64_t Store::Impl::ReadyBytes(const RowPool& pool) {
  const uint64_t limit = pool.budget.limit_bytes();
  if (limit < kLeastReady * kLeastLimitOverReady) return 0;
  return std::clamp(limit / kLeastOverReady, kLeastReady, kMostReady);
}

void Store::Impl::MakeRoomAhead(RowPool* pool, uint32_t pages) {
  const uint64_t wanted = ReadyBytes(*pool) + uint64_t{pages} * pool->arena.slab_bytes();
  for (int turn = 0; turn < kRoomTurns; ++turn) {
    WriterLock writer(pool->writer);
    Reclaim(pool);
    if (pool->notes != nullptr) pool->notes->ChargeAhead();
    if (Full(*pool)) {
      if (!Evict(pool, &writer)) return;
      continue;
    }
    bool shrank = false;
    for (const uint32_t t : pool->tables) {
      if (ShareLacks(*pool, t) > 0) shrank |= EvictTable(pool, t, &writer);
    }
    if (shrank) continue;
    const uint64_t room = pool->budget.limit_bytes() - pool->budget.used_bytes();
    if (pool->ssd == nullptr || room >= wanted) return;
    if (!pool->arena.has_condemned()) {
      pool->arena.CondemnPages(1 +
                               static_cast<uint32_t>((wanted - room) / pool->arena.slab_bytes()));
    }
    MoveCondemned(pool, kSweepEntries, /*demote=*/true, &writer);
  }
}

Status Store::Impl::ChargeNotes(RowPool* pool) {
  // Each page that is emptied leaves some bytes more than the notes of its rows take.
  constexpr int kPages = 8;
  for (int page = 0; pool->notes != nullptr && page < kPages; ++page) {
    if (pool->notes->ChargeAhead()) break;
    pool->arena.CondemnPages(1);
    MoveCondemned(pool, RoundOf(pool, pool->packing), /*demote=*/true, nullptr);
    EMBERTIDE_RETURN_IF_ERROR(AwaitReaders(pool));
  }
  return Status::Ok();
}

Status Store::Impl::MakeRoom(RowPool* pool, int round, const Status& wanted) {
  // Each round takes some hundred KiB out; a budget that this cannot serve is too small.
  constexpr int kRounds = 64;
  if (round >= kRounds) return wanted;
  Reclaim(pool);
  // Without an SSD rows can only be packed, which gives a page back if a page of slots is free.
  if (pool->ssd == nullptr && pool->retired.empty() &&
      FreeSlotBytes(*pool) < pool->arena.slab_bytes()) {
    return wanted;
  }
  if (round == 0) return Status::Ok();
  // Cold rows first, in the odd rounds; slots that they free may be of the wrong size, so whole
  // pages in the even ones: a sixteenth of them, that a pass over the index may pay.
  bool went = false;
  if (round % 2 == 1) went = Evict(pool, nullptr);
  if (!went) {
    pool->arena.CondemnPages(1 + pool->arena.page_count() / 16,
                             /*must_fit=*/pool->ssd == nullptr);
    MoveCondemned(pool, RoundOf(pool, pool->packing), /*demote=*/true, nullptr);
  }
  Status waited = AwaitReaders(pool);
  if (waited.ok()) waited = ChargeNotes(pool);
  if (waited.ok()) return waited;
  return {waited.code(), wanted.message() + ": " + waited.message()};
}

void Store::Impl::TakeReserveBack(RowPool* pool) {
  if (pool->reserve_lent) pool->reserve_lent = !pool->budget.TryCharge(pool->reserve_bytes);
}

Result<uint64_t> Store::Impl::AllocateDdr(RowPool* pool, const Table& table, uint32_t payload_bytes,
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

Result<Location> Store::Impl::StoreRow(RowPool* pool, const Table& table, uint64_t key,
                                       uint16_t live, std::span<const std::byte> payload) {
  // A row without live chunks needs no slot of its own, but the least keeps one meaning of "row".
  Result<uint64_t> slot =
      AllocateDdr(pool, table, static_cast<uint32_t>(payload.size()), AuxBytes(table));
  if (!slot.ok()) return slot.status();
  std::copy(payload.begin(), payload.end(), pool->arena.Address(*slot));
  const Location place(TierId::kDdr, live, *slot);
  CountPlace(pool, table, place, /*taken=*/true);
  if (pool->policy != nullptr) pool->policy->Enter(key);
  return place;
}

Status Store::Impl::ReserveEntries(RowPool* pool, Bucket* bucket, uint32_t entries) {
  // A new row is never why rows that are there cannot be pruned.
  EMBERTIDE_RETURN_IF_ERROR(WithRoom(pool, [&]() -> Status {
    TakeReserveBack(pool);
    if (!pool->reserve_lent) return Status::Ok();
    return {Code::kResourceExhausted, "the DDR budget has no room beside what pruning needs"};
  }));
  uint64_t retired_bytes = 0;
  const auto retire = [&](const BucketIndex::Arrays& arrays) {
    RetireArrays(pool, arrays);
    retired_bytes += arrays.bytes();
  };
  EMBERTIDE_RETURN_IF_ERROR(WithRoom(pool, [&]() -> Status {
    const uint64_t before = bucket->index.bytes();
    retired_bytes = 0;
    Status reserved = bucket->index.Reserve(&pool->budget, &pool->index_pages, retire, entries);
    // What was retired stays charged until it is freed: now, but for readers.
    index_bytes += bucket->index.bytes() + retired_bytes - before;
    if (retired_bytes > 0) Reclaim(pool);
    if (reserved.ok()) return reserved;
    return {reserved.code(), reserved.message() + ": of this device's " +
                                 std::to_string(pool->budget.limit_bytes()) + " bytes " +
                                 std::to_string(pool->budget.used_bytes()) + " are used, " +
                                 std::to_string(pool->arena.page_bytes()) + " of them by rows"};
  }));
  return training() ? FitChanged(pool, bucket) : Status::Ok();
}

void Store::Impl::ShrinkIndex(RowPool* pool, Bucket* bucket) {
  uint64_t retired_bytes = 0;
  const uint64_t before = bucket->index.bytes();
  bucket->index.Shrink(&pool->budget, &pool->index_pages, [&](const BucketIndex::Arrays& arrays) {
    RetireArrays(pool, arrays);
    retired_bytes += arrays.bytes();
  });
  index_bytes += bucket->index.bytes() + retired_bytes - before;
  Reclaim(pool);
}

void Store::Impl::InsertEntry(Bucket* bucket, uint64_t key, Location location) {
  bucket->index.Insert(HashKey(key), key, location);
  ++rows;
}

void Store::Impl::EraseEntry(Bucket* bucket, uint32_t entry) {
  TierPolicy* policy = bucket->pool->policy.get();
  if (policy != nullptr) policy->Leave(bucket->index.KeyAt(entry));
  bucket->index.Erase(entry);
  --rows;
}

Result<VersionNode*> Store::Impl::NewNode(RowPool* pool) {
  VersionNode* node = nullptr;
  EMBERTIDE_RETURN_IF_ERROR(WithRoom(pool, [&]() -> Status {
    node = pool->nodes.Take();
    if (node != nullptr) return Status::Ok();
    return {Code::kResourceExhausted, "no room for version nodes in the DDR budget"};
  }));
  return node;
}

}  // namespace embertide
