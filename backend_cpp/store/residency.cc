// Residency: which tier holds a row. Everything here runs under the device's writer lock, which
// upkeep lets go of while the drive writes: it makes room ahead, so that writers find it ready.
//
// Room in DDR is made as the device's policy says; without one, by a clock hand that passes over
// the device's entries: an entry whose halved access count was zero leaves for the SSD. When the
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

void Store::Impl::CountPlace(Device* device, const Table& table, Location place, bool taken) const {
  TierCount& count =
      (place.tier() == TierId::kSsd ? device->in_ssd : device->in_ddr)[table.ordinal];
  const uint64_t bytes = table.config.layout.PayloadBytes(place.live()) + AuxBytes(table);
  if (taken) {
    ++count.rows;
    count.bytes += bytes;
  } else {
    --count.rows;
    count.bytes -= bytes;
  }
}

void Store::Impl::RetirePlace(Device* device, const Table& table, Location place) {
  if (place.tier() == TierId::kNowhere) return;
  CountPlace(device, table, place, /*taken=*/false);
  Retired retired;
  retired.epoch = readers.Retire();
  retired.place = place;
  retired.bytes = table.config.layout.PayloadBytes(place.live()) + AuxBytes(table);
  device->retired.push_back(retired);
}

void Store::Impl::RetireNode(Device* device, VersionNode* node) {
  Retired retired;
  retired.epoch = readers.Retire();
  retired.node = node;
  device->retired.push_back(retired);
}

void Store::Impl::RetireArrays(Device* device, const BucketIndex::Arrays& arrays) {
  Retired retired;
  retired.epoch = readers.Retire();
  retired.arrays = arrays;
  device->retired.push_back(retired);
}

bool Store::Impl::Free(Device* device, Retired* retired) {
  if (retired->node != nullptr) {
    device->nodes.Give(retired->node);
  } else if (retired->arrays.pages != nullptr) {
    device->budget.Release(retired->arrays.bytes());
    index_bytes -= retired->arrays.bytes();
    BucketIndex::Free(&device->index_pages, retired->arrays);
  } else if (retired->bucket != nullptr) {
    return FreeBucket(tables[retired->table], retired->bucket, &retired->entry, kFreedAtOnce);
  } else if (retired->place.tier() == TierId::kDdr) {
    device->arena.Free(retired->place.slot());
  } else {
    for (SsdBatch* batch : device->reading) batch->Forget(retired->place.slot());
    device->ssd->Free(retired->place.slot(), retired->bytes);
  }
  return true;
}

bool Store::Impl::Reclaim(Device* device) {
  if (device->retired.empty()) return false;
  const uint64_t safe = readers.MinEpoch();
  if (device->retired.front().epoch >= safe) return false;
  while (!device->retired.empty() && device->retired.front().epoch < safe &&
         Free(device, &device->retired.front())) {
    device->retired.pop_front();
  }
  return true;
}

Status Store::Impl::AwaitReaders(Device* device) {
  const auto begin = std::chrono::steady_clock::now();
  const std::chrono::milliseconds most(options.reader_wait_ms);
  // Reads that begin from now on hold none of it. Those in flight take microseconds, or as long as
  // the SSD; they tell nobody when they end, so that they cost nothing.
  while (!device->retired.empty()) {
    if (Reclaim(device)) continue;
    const auto waited = std::chrono::steady_clock::now() - begin;
    if (waited > most) {
      ++reader_waits_given_up;
      return {Code::kResourceExhausted,
              std::to_string(device->retired.size()) + " retired pieces wait for " +
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
uint32_t Store::Impl::AdvanceHand(Device* device, Hand* hand, uint32_t entries, Visit visit) {
  uint32_t skipped_buckets = 0;
  uint32_t passed = 0;
  while (passed < entries) {
    if (hand->tables.empty()) return entries;
    const Table& table = tables[hand->tables[hand->table]];
    if (hand->bucket >= table.buckets.size()) {
      hand->table = (hand->table + 1) % hand->tables.size();
      hand->entry = 0;
      // The first bucket of the next table that lies on this device.
      hand->bucket = 0;
      const auto& slots = tables[hand->tables[hand->table]].buckets;
      while (hand->bucket < slots.size() && slots[hand->bucket].On(device) == nullptr) {
        ++hand->bucket;
      }
      // A whole round over tables without one entry: there is nothing to visit.
      if (++skipped_buckets > 2 * hand->tables.size() + 2) return entries;
      continue;
    }
    Bucket* bucket = table.buckets[hand->bucket].On(device);
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

uint32_t Store::Impl::RoundOf(const Device* device, const Hand& hand) const {
  uint64_t entries = 0;
  for (const uint32_t t : hand.tables) {
    for (const BucketSlot& slot : tables[t].buckets) {
      if (const Bucket* bucket = slot.On(device)) entries += bucket->index.capacity();
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

void Store::Impl::Sweep(Device* device, Hand* hand, uint32_t entries, Sweeping sweeping,
                        std::vector<Holder>* victims, uint64_t wanted) {
  uint64_t bytes = 0;
  const auto take = [&](const Holder& holder) {
    const Location place = PlaceOf(holder);
    if (place.tier() != TierId::kDdr || place.live() == 0) return;
    victims->push_back(holder);
    bytes += tables[holder.table].config.layout.PayloadBytes(place.live());
  };
  // At most one round: a row is met once.
  AdvanceHand(device, hand, entries, [&](uint32_t t, Bucket* b, uint32_t e) {
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

uint32_t Store::Impl::ChooseByPolicy(Device* device, uint64_t wanted,
                                     std::vector<Holder>* victims) {
  const uint32_t t = device->tables.front();
  uint64_t bytes = 0;
  uint32_t chosen = 0;
  for (; bytes < wanted; ++chosen) {
    const std::optional<uint64_t> key = device->policy->Evict();
    if (!key) break;
    const uint64_t hash = HashKey(*key);
    Bucket* bucket = tables[t].buckets[BucketOf(tables[t], hash)].On(device);
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

bool Store::Impl::Demote(Device* device, const std::vector<Holder>& victims, MoveKind kind,
                         WriterLock* writer) {
  if (victims.empty() || device->ssd == nullptr) return false;
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
    to = std::copy_n(device->arena.Address(row.from.slot()), payload, to);
    if (aux > 0) to = std::copy_n(device->arena.Aux(row.from.slot()), aux, to);
  }
  const Result<size_t> moved = MoveToLog(device, rows, kind, writer);
  for (const Moving& row : rows) {
    if (device->policy == nullptr) break;
    // Chosen or not, it holds the rows whose newest place is in DDR.
    const uint64_t hash = HashKey(row.key);
    const Bucket* bucket = tables[row.table].buckets[BucketOf(tables[row.table], hash)].On(device);
    const Location newest_place =
        bucket == nullptr ? Location() : Resolve(bucket->index.Peek(hash, row.key), ~0ULL);
    if (newest_place.tier() == TierId::kDdr) {
      device->policy->Enter(row.key);
    } else {
      device->policy->Leave(row.key);
    }
  }
  if (!moved.ok()) return false;
  evictions += moved.value();
  if (writer == nullptr) evictions_by_writers += moved.value();
  return moved.value() > 0;
}

bool Store::Impl::EvictByPolicy(Device* device, uint64_t bytes, WriterLock* writer) {
  std::vector<Holder> victims;
  const uint32_t chosen = ChooseByPolicy(device, bytes, &victims);
  const bool went = Demote(device, victims, MoveKind::kEvict, writer);
  device->policy->Settle(chosen);
  return went;
}

bool Store::Impl::EvictByClock(Device* device, Hand* hand, uint64_t bytes, bool chained,
                               WriterLock* writer) {
  std::vector<Holder> victims;
  const uint32_t round = RoundOf(device, *hand);
  // Who waits for the writer gets it between two parts of a round.
  const uint32_t part = writer == nullptr ? round : kClockEntries;
  for (uint32_t passed = 0; passed < round && victims.empty(); passed += part) {
    Sweep(device, hand, std::min(round - passed, part), Sweeping::kCold, &victims, bytes);
    if (victims.empty()) WithoutWriter(writer, [] {});
  }
  // All were in use lately: take them in the hand's order.
  if (victims.empty()) Sweep(device, hand, round, Sweeping::kAny, &victims, bytes);
  if (victims.empty() && chained) {
    Sweep(device, hand, round, Sweeping::kChained, &victims, bytes);
  }
  return Demote(device, victims, MoveKind::kEvict, writer);
}

bool Store::Impl::Evict(Device* device, WriterLock* writer) {
  if (device->ssd == nullptr) return false;
  const uint64_t bytes = std::min(kEvictBytes, device->budget.limit_bytes() / kLeastOverEvicted);
  if (device->policy != nullptr) return EvictByPolicy(device, bytes, writer);
  if (device->shared_out) {
    for (const uint32_t t : device->tables) {
      const TableShare& share = device->shares[t];
      if (share.given() && device->in_ddr[t].bytes > share.bytes && EvictTable(device, t, writer)) {
        return true;
      }
    }
    if (EvictByClock(device, &device->unshared_clock, bytes, /*chained=*/true, writer)) {
      return true;
    }
  }
  return EvictByClock(device, &device->clock, bytes, /*chained=*/false, writer);
}

void Store::Impl::MoveCondemned(Device* device, uint32_t entries, bool demote, WriterLock* writer) {
  std::vector<Holder> victims;
  uint64_t bytes = 0;
  const auto move = [&](const Holder& holder) {
    const Location place = PlaceOf(holder);
    if (place.tier() != TierId::kDdr || !device->arena.Condemned(place.slot())) return;
    const Table& table = tables[holder.table];
    const uint32_t payload = table.config.layout.PayloadBytes(place.live());
    const uint32_t aux = AuxBytes(table);
    const Result<uint64_t> slot = device->arena.AllocateInRoom(payload, aux);
    if (!slot.ok()) {
      if (!demote || !GivesWay(*device, holder.table)) return;
      victims.push_back(holder);
      bytes += payload;
      return;
    }
    SlabArena& arena = device->arena;
    std::copy_n(arena.Address(place.slot()), payload, arena.Address(slot.value()));
    if (aux > 0) std::copy_n(arena.Aux(place.slot()), aux, arena.Aux(slot.value()));
    const Location moved(TierId::kDdr, place.live(), slot.value());
    SetPlace(holder, moved);
    RetirePlace(device, table, place);
    // After the old place: a share is never exceeded, not for a moment.
    CountPlace(device, table, moved, /*taken=*/true);
  };
  const auto visit = [&](uint32_t t, Bucket* b, uint32_t e) {
    ForEachPlace(t, b, e, move);
    return bytes < kEvictBytes;
  };
  for (uint32_t passed = 0; passed < entries;) {
    const uint32_t part = std::min(entries - passed, kSweepEntries);
    passed += std::max(1U, AdvanceHand(device, &device->packing, part, visit));
    if (!victims.empty() && !Demote(device, victims, MoveKind::kEmptyPage, writer)) return;
    victims.clear();
    bytes = 0;
  }
}

// --- room ----------------------------------------------------------------------------------------

uint64_t Store::Impl::FreeSlotBytes(const Device& device) {
  uint64_t bytes = device.arena.page_bytes();
  for (const TierCount& rows : device.in_ddr) bytes -= rows.bytes.load();
  return bytes;
}

uint64_t Store::Impl::SparePages(const Device& device) {
  const uint64_t kept = device.budget.used_bytes() + ReadyBytes(device);
  const uint64_t limit = device.budget.limit_bytes();
  return kept < limit ? (limit - kept) / device.arena.slab_bytes() : 0;
}

bool Store::Impl::Full(const Device& device) {
  const auto low =
      static_cast<uint64_t>(kLowRoom * static_cast<double>(device.budget.limit_bytes()));
  const uint64_t spare = SparePages(device) * device.arena.slab_bytes();
  return device.ssd != nullptr && FreeSlotBytes(device) + spare < low;
}

uint64_t Store::Impl::ReadyBytes(const Device& device) {
  const uint64_t limit = device.budget.limit_bytes();
  if (limit < kLeastReady * kLeastLimitOverReady) return 0;
  return std::clamp(limit / kLeastOverReady, kLeastReady, kMostReady);
}

void Store::Impl::MakeRoomAhead(Device* device, uint32_t pages) {
  const uint64_t wanted = ReadyBytes(*device) + uint64_t{pages} * device->arena.slab_bytes();
  for (int turn = 0; turn < kRoomTurns; ++turn) {
    WriterLock writer(device->writer);
    Reclaim(device);
    if (device->notes != nullptr) device->notes->ChargeAhead();
    if (Full(*device)) {
      if (!Evict(device, &writer)) return;
      continue;
    }
    bool shrank = false;
    for (const uint32_t t : device->tables) {
      if (ShareLacks(*device, t) > 0) shrank |= EvictTable(device, t, &writer);
    }
    if (shrank) continue;
    const uint64_t room = device->budget.limit_bytes() - device->budget.used_bytes();
    if (device->ssd == nullptr || room >= wanted) return;
    if (!device->arena.has_condemned()) {
      device->arena.CondemnPages(
          1 + static_cast<uint32_t>((wanted - room) / device->arena.slab_bytes()));
    }
    MoveCondemned(device, kSweepEntries, /*demote=*/true, &writer);
  }
}

Status Store::Impl::ChargeNotes(Device* device) {
  // Each page that is emptied leaves some bytes more than the notes of its rows take.
  constexpr int kPages = 8;
  for (int page = 0; device->notes != nullptr && page < kPages; ++page) {
    if (device->notes->ChargeAhead()) break;
    device->arena.CondemnPages(1);
    MoveCondemned(device, RoundOf(device, device->packing), /*demote=*/true, nullptr);
    EMBERTIDE_RETURN_IF_ERROR(AwaitReaders(device));
  }
  return Status::Ok();
}

Status Store::Impl::MakeRoom(Device* device, int round, const Status& wanted) {
  // Each round takes some hundred KiB out; a budget that this cannot serve is too small.
  constexpr int kRounds = 64;
  if (round >= kRounds) return wanted;
  Reclaim(device);
  // Without an SSD rows can only be packed, which gives a page back if a page of slots is free.
  if (device->ssd == nullptr && device->retired.empty() &&
      FreeSlotBytes(*device) < device->arena.slab_bytes()) {
    return wanted;
  }
  if (round == 0) return Status::Ok();
  // Cold rows first, in the odd rounds; slots that they free may be of the wrong size, so whole
  // pages in the even ones: a sixteenth of them, that a pass over the index may pay.
  bool went = false;
  if (round % 2 == 1) went = Evict(device, nullptr);
  if (!went) {
    device->arena.CondemnPages(1 + device->arena.page_count() / 16,
                               /*must_fit=*/device->ssd == nullptr);
    MoveCondemned(device, RoundOf(device, device->packing), /*demote=*/true, nullptr);
  }
  Status waited = AwaitReaders(device);
  if (waited.ok()) waited = ChargeNotes(device);
  if (waited.ok()) return waited;
  return {waited.code(), wanted.message() + ": " + waited.message()};
}

void Store::Impl::TakeReserveBack(Device* device) {
  if (device->reserve_lent) device->reserve_lent = !device->budget.TryCharge(device->reserve_bytes);
}

Result<uint64_t> Store::Impl::AllocateDdr(Device* device, const Table& table,
                                          uint32_t payload_bytes, uint32_t aux_bytes) {
  EMBERTIDE_RETURN_IF_ERROR(MakeShareRoom(device, table, uint64_t{payload_bytes} + aux_bytes));
  if (device->policy != nullptr) {
    EMBERTIDE_RETURN_IF_ERROR(WithRoom(device, [&]() -> Status {
      if (device->policy->Reserve()) return Status::Ok();
      return {Code::kResourceExhausted, "no room for the policy of one row more"};
    }));
  }
  uint64_t slot = 0;
  EMBERTIDE_RETURN_IF_ERROR(WithRoom(device, [&] {
    Result<uint64_t> allocated = device->arena.Allocate(payload_bytes, aux_bytes);
    if (!allocated.ok()) return allocated.status();
    slot = *allocated;
    return Status::Ok();
  }));
  return slot;
}

Result<Location> Store::Impl::StoreRow(Device* device, const Table& table, uint64_t key,
                                       uint16_t live, std::span<const std::byte> payload) {
  // A row without live chunks needs no slot of its own, but the least keeps one meaning of "row".
  Result<uint64_t> slot =
      AllocateDdr(device, table, static_cast<uint32_t>(payload.size()), AuxBytes(table));
  if (!slot.ok()) return slot.status();
  std::copy(payload.begin(), payload.end(), device->arena.Address(*slot));
  const Location place(TierId::kDdr, live, *slot);
  CountPlace(device, table, place, /*taken=*/true);
  if (device->policy != nullptr) device->policy->Enter(key);
  return place;
}

Status Store::Impl::ReserveEntries(Device* device, Bucket* bucket, uint32_t entries) {
  // A new row is never why rows that are there cannot be pruned.
  EMBERTIDE_RETURN_IF_ERROR(WithRoom(device, [&]() -> Status {
    TakeReserveBack(device);
    if (!device->reserve_lent) return Status::Ok();
    return {Code::kResourceExhausted, "the DDR budget has no room beside what pruning needs"};
  }));
  uint64_t retired_bytes = 0;
  const auto retire = [&](const BucketIndex::Arrays& arrays) {
    RetireArrays(device, arrays);
    retired_bytes += arrays.bytes();
  };
  EMBERTIDE_RETURN_IF_ERROR(WithRoom(device, [&]() -> Status {
    const uint64_t before = bucket->index.bytes();
    retired_bytes = 0;
    Status reserved = bucket->index.Reserve(&device->budget, &device->index_pages, retire, entries);
    // What was retired stays charged until it is freed: now, but for readers.
    index_bytes += bucket->index.bytes() + retired_bytes - before;
    if (retired_bytes > 0) Reclaim(device);
    if (reserved.ok()) return reserved;
    return {reserved.code(), reserved.message() + ": of this device's " +
                                 std::to_string(device->budget.limit_bytes()) + " bytes " +
                                 std::to_string(device->budget.used_bytes()) + " are used, " +
                                 std::to_string(device->arena.page_bytes()) + " of them by rows"};
  }));
  return training() ? FitChanged(device, bucket) : Status::Ok();
}

void Store::Impl::ShrinkIndex(Device* device, Bucket* bucket) {
  uint64_t retired_bytes = 0;
  const uint64_t before = bucket->index.bytes();
  bucket->index.Shrink(&device->budget, &device->index_pages,
                       [&](const BucketIndex::Arrays& arrays) {
                         RetireArrays(device, arrays);
                         retired_bytes += arrays.bytes();
                       });
  index_bytes += bucket->index.bytes() + retired_bytes - before;
  Reclaim(device);
}

void Store::Impl::InsertEntry(Bucket* bucket, uint64_t key, Location location) {
  bucket->index.Insert(HashKey(key), key, location);
  ++rows;
}

void Store::Impl::EraseEntry(Bucket* bucket, uint32_t entry) {
  TierPolicy* policy = bucket->device->policy.get();
  if (policy != nullptr) policy->Leave(bucket->index.KeyAt(entry));
  bucket->index.Erase(entry);
  --rows;
}

Result<VersionNode*> Store::Impl::NewNode(Device* device) {
  VersionNode* node = nullptr;
  EMBERTIDE_RETURN_IF_ERROR(WithRoom(device, [&]() -> Status {
    node = device->nodes.Take();
    if (node != nullptr) return Status::Ok();
    return {Code::kResourceExhausted, "no room for version nodes in the DDR budget"};
  }));
  return node;
}

}  // namespace embertide
