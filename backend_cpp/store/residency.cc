// Residency: which tier holds a row. Everything here runs under the device's writer lock.
//
// Room in DDR is made by a clock hand that passes over the device's entries: an entry whose halved
// access count was zero leaves for the SSD. When the bytes are wanted by another size class or by
// the index, whole pages are condemned and their rows moved. What is unlinked waits on the retire
// list until no reader can be at it.
#include <algorithm>
#include <chrono>
#include <thread>

#include "store/store_impl.h"

namespace embertide {
namespace {

// Payload that one eviction takes out, so that its SSD write is a few hundred KiB.
constexpr uint64_t kEvictBytes = 256 * 1024;
// Entries that one call of Maintain passes over to move rows out of condemned pages: ~1 ms.
constexpr uint32_t kSweepEntries = 20000;
constexpr size_t kPromotionsPerCall = 512;
constexpr std::chrono::milliseconds kReadersLeave{5};
constexpr std::chrono::microseconds kReadersPoll{50};
// Segments compacted for one write to a full SSD: each gives an eighth of itself or more, and a
// write is about a quarter.
constexpr int kCompactTries = 8;
// Above this share of the budget Maintain makes room ahead of need.
constexpr double kHighWater = 0.97;

}  // namespace

// --- retiring
// ---------------------------------------------------------------------------------------

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

void Store::Impl::RetireArrays(Device* device, BucketIndex::Arrays* arrays) {
  Retired retired;
  retired.epoch = readers.Retire();
  retired.arrays = arrays;
  device->retired.push_back(retired);
}

void Store::Impl::Free(Device* device, const Retired& retired) {
  if (retired.node != nullptr) {
    delete retired.node;
    device->budget.Release(kVersionNodeBytes);
    index_bytes -= kVersionNodeBytes;
  } else if (retired.arrays != nullptr) {
    device->budget.Release(retired.arrays->bytes());
    index_bytes -= retired.arrays->bytes();
    delete retired.arrays;
  } else if (retired.bucket != nullptr) {
    FreeBucket(tables[retired.table], retired.bucket);
  } else if (retired.place.tier() == TierId::kDdr) {
    device->arena.Free(retired.place.slot());
  } else {
    device->ssd->Free(retired.place.slot(), retired.bytes);
  }
}

void Store::Impl::Reclaim(Device* device) {
  if (device->retired.empty()) return;
  const uint64_t safe = readers.MinEpoch();
  while (!device->retired.empty() && device->retired.front().epoch < safe) {
    Free(device, device->retired.front());
    device->retired.pop_front();
  }
}

void Store::Impl::AwaitReaders(Device* device) {
  Reclaim(device);
  // What was retired waits for readers that are about to leave; one at the SSD takes milliseconds.
  const auto deadline = std::chrono::steady_clock::now() + kReadersLeave;
  while (!device->retired.empty() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kReadersPoll);
    Reclaim(device);
  }
}

// --- the clock
// --------------------------------------------------------------------------------------

template <typename Visit>
void Store::Impl::AdvanceHand(Device* device, uint32_t entries, Visit visit) {
  uint32_t skipped_buckets = 0;
  while (entries > 0) {
    Table& table = tables[device->hand_table];
    if (device->hand_bucket >= table.buckets.size()) {
      device->hand_table = (device->hand_table + 1) % tables.size();
      device->hand_entry = 0;
      // The first bucket of the next table that lies on this device.
      device->hand_bucket = 0;
      const auto& slots = tables[device->hand_table].buckets;
      while (device->hand_bucket < slots.size() &&
             slots[device->hand_bucket].On(device) == nullptr) {
        ++device->hand_bucket;
      }
      // A whole round over tables without one entry: there is nothing to visit.
      if (++skipped_buckets > 2 * tables.size() + 2) return;
      continue;
    }
    Bucket* bucket = table.buckets[device->hand_bucket].On(device);
    if (bucket == nullptr || device->hand_entry >= bucket->index.capacity()) {
      ++device->hand_bucket;
      device->hand_entry = 0;
      continue;
    }
    if (bucket->index.Occupied(device->hand_entry)) {
      skipped_buckets = 0;
      if (!visit(device->hand_table, bucket, device->hand_entry)) return;
    }
    ++device->hand_entry;
    --entries;
  }
}

uint32_t Store::Impl::RoundOf(const Device* device) const {
  uint64_t entries = 0;
  for (const Table& table : tables) {
    for (const BucketSlot& slot : table.buckets) {
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

void Store::Impl::Sweep(Device* device, uint32_t entries, bool any, std::vector<Holder>* victims,
                        uint64_t wanted) {
  uint64_t bytes = 0;
  // At most one round: a row is met once.
  AdvanceHand(device, entries, [&](uint32_t t, Bucket* b, uint32_t e) {
    BucketIndex& index = b->index;
    const Location place = index.At(e);
    if (place.is_chain() || place.tier() != TierId::kDdr || place.live() == 0) return true;
    if (index.Age(e) > 1 && !any) return true;
    victims->push_back({t, b, e, nullptr});
    bytes += tables[t].config.layout.PayloadBytes(place.live());
    return bytes < wanted;
  });
}

bool Store::Impl::Demote(Device* device, const std::vector<Holder>& victims) {
  if (victims.empty() || device->ssd == nullptr) return false;
  std::vector<std::byte> rows;
  std::vector<size_t> offsets;
  for (const Holder& v : victims) {
    const Table& table = tables[v.table];
    const Location place = PlaceOf(v);
    offsets.push_back(rows.size());
    const std::byte* from = device->arena.Address(place.slot());
    rows.insert(rows.end(), from, from + table.config.layout.PayloadBytes(place.live()));
    if (const uint32_t aux = AuxBytes(table); aux > 0) {
      const std::byte* aux_from = device->arena.Aux(place.slot());
      rows.insert(rows.end(), aux_from, aux_from + aux);
    }
  }
  offsets.push_back(rows.size());
  std::vector<LogEntry> entries;
  for (size_t i = 0; i < victims.size(); ++i) {
    const Holder& v = victims[i];
    entries.push_back({v.bucket->index.KeyAt(v.entry),
                       v.table,
                       {rows.data() + offsets[i], offsets[i + 1] - offsets[i]}});
  }
  std::vector<uint64_t> slots;
  Status appended = device->ssd->Append(entries, &slots);
  for (int tries = 0; appended.code() == Code::kResourceExhausted && tries < kCompactTries &&
                      CompactForRoom(device);
       ++tries) {
    appended = device->ssd->Append(entries, &slots);
  }
  if (!appended.ok()) return false;
  for (size_t i = 0; i < victims.size(); ++i) {
    const Location place = PlaceOf(victims[i]);
    const Table& table = tables[victims[i].table];
    const Location moved(TierId::kSsd, place.live(), slots[i]);
    CountPlace(device, table, moved, /*taken=*/true);
    SetPlace(victims[i], moved);
    RetirePlace(device, table, place);
  }
  evictions += victims.size();
  return true;
}

bool Store::Impl::Evict(Device* device, uint64_t bytes) {
  if (device->ssd == nullptr) return false;
  std::vector<Holder> victims;
  const uint32_t round = RoundOf(device);
  Sweep(device, round, /*any=*/false, &victims, bytes);
  // All were in use lately: take them in the hand's order.
  if (victims.empty()) Sweep(device, round, /*any=*/true, &victims, bytes);
  return Demote(device, victims);
}

void Store::Impl::MoveCondemned(Device* device, uint32_t entries, bool demote) {
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
      victims.push_back(holder);
      bytes += payload;
      return;
    }
    SlabArena& arena = device->arena;
    std::copy_n(arena.Address(place.slot()), payload, arena.Address(slot.value()));
    if (aux > 0) std::copy_n(arena.Aux(place.slot()), aux, arena.Aux(slot.value()));
    const Location moved(TierId::kDdr, place.live(), slot.value());
    CountPlace(device, table, moved, /*taken=*/true);
    SetPlace(holder, moved);
    RetirePlace(device, table, place);
  };
  AdvanceHand(device, entries, [&](uint32_t t, Bucket* b, uint32_t e) {
    const Location place = b->index.At(e);
    if (!place.is_chain()) {
      move({t, b, e, nullptr});
    } else {
      for (VersionNode* n = place.chain(); n != nullptr; n = n->older.load()) move({t, b, e, n});
    }
    if (demote && bytes >= kEvictBytes) {
      Demote(device, victims);
      victims.clear();
      bytes = 0;
    }
    return true;
  });
  if (demote) Demote(device, victims);
}

// --- room
// ---------------------------------------------------------------------------------------------

bool Store::Impl::MakeRoom(Device* device, int round) {
  // Each round takes some hundred KiB out; a budget that this cannot serve is too small.
  constexpr int kRounds = 64;
  if (round >= kRounds) return false;
  Reclaim(device);
  if (round == 0) return true;
  // Cold rows first, in the odd rounds; slots that they free may be of the wrong size, so whole
  // pages in the even ones: a sixteenth of them, that a pass over the index may pay.
  bool went = false;
  if (round % 2 == 1) went = Evict(device, kEvictBytes);
  if (!went) {
    device->arena.CondemnPages(1 + device->arena.page_count() / 16);
    MoveCondemned(device, RoundOf(device), /*demote=*/true);
  }
  AwaitReaders(device);
  return true;
}

Result<uint64_t> Store::Impl::AllocateDdr(Device* device, uint32_t payload_bytes,
                                          uint32_t aux_bytes) {
  Result<uint64_t> slot = device->arena.Allocate(payload_bytes, aux_bytes);
  for (int round = 0; !slot.ok() && MakeRoom(device, round); ++round) {
    slot = device->arena.Allocate(payload_bytes, aux_bytes);
  }
  return slot;
}

Result<Location> Store::Impl::StoreRow(Device* device, const Table& table, uint16_t live,
                                       std::span<const std::byte> payload) {
  // A row without live chunks needs no slot of its own, but the least keeps one meaning of "row".
  Result<uint64_t> slot =
      AllocateDdr(device, static_cast<uint32_t>(payload.size()), AuxBytes(table));
  if (!slot.ok()) return slot.status();
  std::copy(payload.begin(), payload.end(), device->arena.Address(*slot));
  const Location place(TierId::kDdr, live, *slot);
  CountPlace(device, table, place, /*taken=*/true);
  return place;
}

Status Store::Impl::ReserveEntry(Device* device, Bucket* bucket) {
  const auto retire = [&](BucketIndex::Arrays* arrays) { RetireArrays(device, arrays); };
  for (int round = 0;; ++round) {
    const uint64_t before = bucket->index.bytes();
    Status reserved = bucket->index.Reserve(&device->budget, retire);
    if (reserved.ok()) {
      // The old arrays stay charged until they are freed.
      if (bucket->index.bytes() != before) index_bytes += bucket->index.bytes();
      return reserved;
    }
    if (!MakeRoom(device, round)) {
      return {reserved.code(), reserved.message() + ": of this device's " +
                                   std::to_string(device->budget.limit_bytes()) + " bytes " +
                                   std::to_string(device->budget.used_bytes()) + " are used, " +
                                   std::to_string(device->arena.page_bytes()) + " of them by rows"};
    }
  }
}

void Store::Impl::InsertEntry(Bucket* bucket, uint64_t key, Location location) {
  bucket->index.Insert(HashKey(key), key, location);
  ++rows;
}

Result<VersionNode*> Store::Impl::NewNode(Device* device) {
  for (int round = 0; !device->budget.TryCharge(kVersionNodeBytes); ++round) {
    if (!MakeRoom(device, round)) {
      return Status(Code::kResourceExhausted, "no room for a version node in the DDR budget");
    }
  }
  index_bytes += kVersionNodeBytes;
  return new VersionNode;
}

// --- moving rows
// ----------------------------------------------------------------------------------------

Status Store::Impl::Promote(Device* device, uint32_t t, uint32_t b, uint64_t key) {
  Bucket* bucket = tables[t].buckets[b].On(device);
  return bucket == nullptr ? Status::Ok() : PromoteRow(device, t, bucket, key);
}

Status Store::Impl::PromoteRow(Device* device, uint32_t t, Bucket* bucket, uint64_t key) {
  const Table& table = tables[t];
  BucketIndex& index = bucket->index;
  const uint32_t entry = index.Locate(HashKey(key), key);
  if (entry == BucketIndex::kNotFound) return Status::Ok();
  Location place = index.At(entry);
  if (place.is_chain() || place.tier() != TierId::kSsd) return Status::Ok();
  const uint32_t payload = table.config.layout.PayloadBytes(place.live());
  const uint32_t aux = AuxBytes(table);
  std::vector<std::byte> row(payload + aux);
  LogRead read{place.slot(), key, t, payload + aux, row.data()};
  EMBERTIDE_RETURN_IF_ERROR(device->ssd->Read({&read, 1}));
  Result<uint64_t> slot = AllocateDdr(device, payload, aux);
  if (!slot.ok()) return slot.status();
  std::copy_n(row.data(), payload, device->arena.Address(*slot));
  if (aux > 0) std::copy_n(row.data() + payload, aux, device->arena.Aux(*slot));
  // Making room may have compacted the segment that it lay in.
  place = index.At(entry);
  const Location moved(TierId::kDdr, place.live(), *slot);
  CountPlace(device, table, moved, /*taken=*/true);
  index.Set(entry, moved);
  RetirePlace(device, table, place);
  ++promoted;
  return Status::Ok();
}

void Store::Maintain() {
  for (auto& owned : impl_->devices) {
    Device* device = owned.get();
    const std::lock_guard writer(device->writer);
    impl_->Reclaim(device);
    std::vector<Promotion> wanted;
    {
      const std::lock_guard lock(device->promotions_mutex);
      const size_t take = std::min(device->promotions.size(), kPromotionsPerCall);
      wanted.assign(device->promotions.begin(),
                    device->promotions.begin() + static_cast<ptrdiff_t>(take));
      device->promotions.erase(device->promotions.begin(),
                               device->promotions.begin() + static_cast<ptrdiff_t>(take));
    }
    for (const Promotion& row : wanted) {
      // A promotion that finds no room, or a bad block, leaves the row where reads find it (or
      // report it); nothing is lost.
      if (!impl_->Promote(device, row.table, row.bucket, row.key).ok()) {
        impl_->promotions_dropped.fetch_add(1, std::memory_order_relaxed);
      }
    }
    const auto high =
        static_cast<uint64_t>(kHighWater * static_cast<double>(device->budget.limit_bytes()));
    if (device->ssd != nullptr && device->budget.used_bytes() > high) {
      impl_->Evict(device, kEvictBytes);
    }
    if (!device->arena.has_condemned()) device->arena.CondemnSparsePages();
    if (device->arena.has_condemned())
      impl_->MoveCondemned(device, kSweepEntries, /*demote=*/false);
    if (device->ssd != nullptr) impl_->CompactInBackground(device);
    impl_->Reclaim(device);
  }
}

}  // namespace embertide
