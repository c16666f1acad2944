// Which rows leave DDR, and pages that are emptied: see the header.
#include "store/evictor.h"

#include <algorithm>

#include "embertide/hash.h"

namespace embertide {
namespace {

// Payload that one eviction takes out, so that its SSD write is a few hundred KiB.
constexpr uint64_t kEvictBytes = 256 * 1024;
// And no more than this part of the budget: a batch is what the policy cannot take back.
constexpr uint64_t kMinOverEvicted = 64;
// Entries passed at once by upkeep, a third of a millisecond: on the way to the rows of condemned
// pages, which are looked up and moved, and to cold rows, which are only looked at.
constexpr uint32_t kSweepEntries = 10000;
constexpr uint32_t kClockEntries = 32768;
// A small share keeps no more than this part of it free ahead of need.
constexpr uint64_t kMinShareOverReady = 4;

bool IsHeld(const RowPool& pool, const Holder& holder) {
  return pool.held.rows() > 0 &&
         pool.held.Has(holder.table, holder.bucket->index.KeyAt(holder.entry));
}

}  // namespace

template <typename Visit>
uint32_t Evictor::AdvanceHand(RowPool* pool, Hand* hand, uint32_t entries, Visit visit) {
  uint32_t skipped_buckets = 0;
  uint32_t passed = 0;
  while (passed < entries) {
    if (hand->tables.empty()) return entries;
    const Table& table = store_.tables[hand->tables[hand->table]];
    if (hand->bucket >= table.buckets.size()) {
      hand->table = (hand->table + 1) % hand->tables.size();
      hand->entry = 0;
      // The first bucket of the next table that lies in this pool.
      hand->bucket = 0;
      const auto& slots = store_.tables[hand->tables[hand->table]].buckets;
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
    const uint32_t first = hand->entry;
    const auto end = static_cast<uint32_t>(
        std::min<uint64_t>(bucket->index.capacity(), uint64_t{first} + entries - passed));
    hand->entry = bucket->index.Walk(first, end, [&](uint32_t e, Location said) {
      skipped_buckets = 0;
      return visit(table.ordinal, bucket, e, said);
    });
    passed += hand->entry - first;
    if (hand->entry < end) return passed;
  }
  return passed;
}

uint32_t Evictor::RoundOf(const RowPool* pool, const Hand& hand) const {
  uint64_t entries = 0;
  for (const uint32_t t : hand.tables) {
    for (const BucketSlot& slot : store_.tables[t].buckets) {
      if (const Bucket* bucket = slot.On(pool)) entries += bucket->index.capacity();
    }
  }
  return static_cast<uint32_t>(std::min<uint64_t>(entries, ~0U));
}

void Evictor::Sweep(RowPool* pool, Hand* hand, uint32_t entries, Sweeping sweeping,
                    std::vector<Holder>* victims, uint64_t wanted) {
  uint64_t bytes = 0;
  const auto take = [&](const Holder& holder, Location place) {
    if (place.tier() != TierId::kDdr || place.live() == 0) return;
    if (IsHeld(*pool, holder)) return;
    victims->push_back(holder);
    bytes += store_.tables[holder.table].config.layout.PayloadBytes(place.live());
  };
  // At most one round: a row is met once.
  AdvanceHand(pool, hand, entries, [&](uint32_t t, Bucket* b, uint32_t e, Location place) {
    if (sweeping == Sweeping::kChained) {
      ForEachPlace(t, b, e, place, take);
      return bytes < wanted;
    }
    if (place.is_chain() || place.tier() != TierId::kDdr || place.live() == 0) return true;
    if (b->index.Age(e) > 1 && sweeping == Sweeping::kCold) return true;
    take(Holder{t, b, e, nullptr}, place);
    return bytes < wanted;
  });
}

uint32_t Evictor::ChooseByPolicy(RowPool* pool, uint64_t wanted, std::vector<Holder>* victims,
                                 std::vector<uint64_t>* held) {
  const uint32_t t = pool->tables.front();
  uint64_t bytes = 0;
  uint32_t chosen = 0;
  for (; bytes < wanted; ++chosen) {
    const std::optional<uint64_t> key = pool->policy->Evict();
    if (!key) break;
    if (pool->held.Has(t, *key)) {
      held->push_back(*key);
      continue;
    }
    const uint64_t hash = HashKey(*key);
    Bucket* bucket = store_.tables[t].In(pool, hash);
    if (bucket == nullptr) continue;  // it was dropped, and its rows are about to leave
    const uint32_t entry = bucket->index.Locate(hash, *key);
    const Location said = bucket->index.At(entry);
    ForEachPlace(t, bucket, entry, said, [&](const Holder& holder, Location place) {
      if (place.tier() != TierId::kDdr) return;
      victims->push_back(holder);
      bytes += kMinSlotBytes + store_.tables[t].config.layout.PayloadBytes(place.live());
    });
  }
  return chosen;
}

bool Evictor::Demote(RowPool* pool, const std::vector<Holder>& victims, MoveKind kind,
                     WriterLock* writer) {
  if (victims.empty() || pool->ssd == nullptr || pool->ssd->paused()) return false;
  std::vector<Moving> rows;
  uint64_t all_bytes = 0;
  for (const Holder& v : victims) {
    const Location place = v.place();
    const Table& table = store_.tables[v.table];
    all_bytes += table.config.layout.PayloadBytes(place.live()) + store_.AuxBytes(table);
    rows.push_back({v.table, v.bucket->index.KeyAt(v.entry), place, {}});
  }
  std::vector<std::byte> bytes(all_bytes);
  auto to = bytes.begin();
  for (Moving& row : rows) {
    const Table& table = store_.tables[row.table];
    const uint32_t payload = table.config.layout.PayloadBytes(row.from.live());
    const uint32_t aux = store_.AuxBytes(table);
    row.bytes = {to, to + payload + aux};
    to = std::copy_n(pool->arena.Address(row.from.slot()), payload, to);
    if (aux > 0) to = std::copy_n(pool->arena.Aux(row.from.slot()), aux, to);
  }
  const Result<size_t> moved = mover_.Move(pool, rows, kind, writer);
  for (const Moving& row : rows) {
    if (pool->policy == nullptr) break;
    EnterAgain(pool, row.table, row.key);
  }
  if (!moved.ok()) return false;
  store_.counters.evictions += moved.value();
  if (writer == nullptr) store_.counters.evictions_by_writers += moved.value();
  return moved.value() > 0;
}

void Evictor::EnterAgain(RowPool* pool, uint32_t table, uint64_t key) {
  const uint64_t hash = HashKey(key);
  const Bucket* bucket = store_.tables[table].In(pool, hash);
  const Location newest_place =
      bucket == nullptr ? Location() : Resolve(bucket->index.Peek(hash, key), ~0ULL);
  if (newest_place.tier() == TierId::kDdr) {
    pool->policy->Enter(key);
  } else {
    pool->policy->Leave(key);
  }
}

bool Evictor::EvictByPolicy(RowPool* pool, uint64_t bytes, WriterLock* writer) {
  std::vector<Holder> victims;
  std::vector<uint64_t> held;
  const uint32_t chosen = ChooseByPolicy(pool, bytes, &victims, &held);
  const bool went = Demote(pool, victims, MoveKind::kEvict, writer);
  for (const uint64_t key : held) EnterAgain(pool, pool->tables.front(), key);
  pool->policy->Settle(chosen);
  return went;
}

bool Evictor::EvictByClock(RowPool* pool, Hand* hand, uint64_t bytes, bool chained,
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

bool Evictor::Evict(RowPool* pool, WriterLock* writer) {
  if (pool->ssd == nullptr || pool->ssd->paused()) return false;
  const uint64_t bytes = std::min(kEvictBytes, pool->budget.limit_bytes() / kMinOverEvicted);
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

void Evictor::MoveCondemned(RowPool* pool, uint32_t entries, bool demote, WriterLock* writer) {
  std::vector<Holder> victims;
  uint64_t bytes = 0;
  bool is_stuck = false;
  const auto move = [&](const Holder& holder, Location place) {
    if (place.tier() != TierId::kDdr || !pool->arena.Condemned(place.slot())) return;
    const Table& table = store_.tables[holder.table];
    const uint32_t payload = table.config.layout.PayloadBytes(place.live());
    const uint32_t aux = store_.AuxBytes(table);
    const Result<uint64_t> slot =
        pool->arena.AllocateInRoom(SlotPayload(table.config.layout, place.live()), aux);
    if (slot.ok() && place.live() == 0 && slot.value() == 0) {  // see LeanShape::WordOf
      pool->arena.Free(0);
      return;
    }
    if (!slot.ok()) {
      is_stuck = !demote;
      if (!demote || !pool->GivesWay(holder.table) || IsHeld(*pool, holder)) return;
      victims.push_back(holder);
      bytes += payload;
      return;
    }
    SlabArena& arena = pool->arena;
    std::copy_n(arena.Address(place.slot()), payload, arena.Address(slot.value()));
    if (aux > 0) std::copy_n(arena.Aux(place.slot()), aux, arena.Aux(slot.value()));
    const Location moved(TierId::kDdr, place.live(), slot.value());
    holder.Set(moved);
    reclaimer_.RetirePlace(pool, table, place);
    // After the old place: a share is never exceeded, not for a moment.
    store_.CountPlace(pool, table, moved, /*taken=*/true);
  };
  const auto visit = [&](uint32_t t, Bucket* b, uint32_t e, Location said) {
    ForEachPlace(t, b, e, said, move);
    return bytes < kEvictBytes && !is_stuck;
  };
  for (uint32_t passed = 0; passed < entries && !is_stuck;) {
    const uint32_t part = std::min(entries - passed, kSweepEntries);
    passed += std::max(1U, AdvanceHand(pool, &pool->packing, part, visit));
    if (!victims.empty() && !Demote(pool, victims, MoveKind::kEmptyPage, writer)) return;
    victims.clear();
    bytes = 0;
  }
}

void Evictor::MoveAllCondemned(RowPool* pool) {
  MoveCondemned(pool, RoundOf(pool, pool->packing), /*demote=*/true, nullptr);
}

uint64_t Evictor::ShareLacks(const RowPool& pool, uint32_t table) const {
  const TableShare& share = pool.shares[table];
  if (pool.ssd == nullptr || !share.given()) return 0;
  const uint64_t bytes = share.bytes;
  const TableConfig& config = store_.tables[table].config;
  const uint64_t row =
      config.layout.PayloadBytes(config.layout.full_mask()) + store_.AuxBytes(store_.tables[table]);
  const uint64_t ready =
      std::max(static_cast<uint64_t>(RowPool::kLowRoom * static_cast<double>(bytes)),
               kPromotionsAtOnce * row);
  const uint64_t used = pool.in_ddr[table].bytes;
  const uint64_t most = bytes - std::min(ready, bytes / kMinShareOverReady);
  return used > most ? used - most : 0;
}

bool Evictor::EvictTable(RowPool* pool, uint32_t table, WriterLock* writer) {
  if (pool->ssd == nullptr || pool->ssd->paused()) return false;
  TableShare& share = pool->shares[table];
  const uint64_t lacks = ShareLacks(*pool, table);
  const uint64_t batch = std::min(kEvictBytes, std::max(share.bytes / kMinOverEvicted, lacks));
  const bool went = pool->policy != nullptr
                        ? EvictByPolicy(pool, batch, writer)
                        : EvictByClock(pool, &share.clock, batch, /*chained=*/true, writer);
  const uint64_t left = pool->in_ddr[table].bytes;
  share.allowed = std::max(share.bytes.load(), std::min(share.allowed.load(), left));
  return went;
}

}  // namespace embertide
