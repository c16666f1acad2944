// Upkeep: what a thread in the background does for a store. Here writers shall not wait for a drive
// or for the system: what takes long runs without the writer lock, what needs it comes in slices.
#include <algorithm>
#include <set>

#include "store/store_impl.h"

namespace embertide {
namespace {

// Entries that one call passes over to move rows out of condemned pages: half a millisecond.
constexpr uint32_t kSweepEntries = 10000;
constexpr size_t kPromotionsPerCall = 512;
// Rows of one batch of reads, and then of one hold of the writer lock.
constexpr size_t kPromotionsAtOnce = 64;
// Reads that the policy is told of in one hold of it: 28 to 54 ns each.
constexpr size_t kReplayedAtOnce = 4096;

}  // namespace

uint32_t Store::Impl::EntryOnSsd(Device* device, const Access& row, Bucket** bucket) const {
  const Table& table = tables[row.table];
  const uint64_t hash = HashKey(row.key);
  *bucket = table.buckets[BucketOf(table, hash)].On(device);
  if (*bucket == nullptr) return BucketIndex::kNotFound;
  const BucketIndex& index = (*bucket)->index;
  const uint32_t entry = index.Locate(hash, row.key);
  if (entry == BucketIndex::kNotFound) return entry;
  const Location place = index.At(entry);
  return !place.is_chain() && place.tier() == TierId::kSsd ? entry : BucketIndex::kNotFound;
}

Status Store::Impl::Install(Device* device, uint32_t t, Bucket* bucket, uint64_t key,
                            const std::byte* bytes) {
  const Table& table = tables[t];
  BucketIndex& index = bucket->index;
  const uint32_t entry = index.Locate(HashKey(key), key);
  const uint32_t payload = table.config.layout.PayloadBytes(index.At(entry).live());
  const uint32_t aux = AuxBytes(table);
  Result<uint64_t> slot = AllocateDdr(device, payload, aux);
  if (!slot.ok()) return slot.status();
  std::copy_n(bytes, payload, device->arena.Address(*slot));
  if (aux > 0) std::copy_n(bytes + payload, aux, device->arena.Aux(*slot));
  // Making room may have compacted the segment that it lay in.
  const Location place = index.At(entry);
  const Location moved(TierId::kDdr, place.live(), *slot);
  CountPlace(device, table, moved, /*taken=*/true);
  index.Set(entry, moved);
  if (device->policy != nullptr) device->policy->Enter(key);
  RetirePlace(device, table, place);
  ++promoted;
  return Status::Ok();
}

Status Store::Impl::PromoteOne(Device* device, const Access& row) {
  Bucket* bucket = nullptr;
  const uint32_t entry = EntryOnSsd(device, row, &bucket);
  if (entry == BucketIndex::kNotFound) return Status::Ok();
  const Location place = bucket->index.At(entry);
  const Table& table = tables[row.table];
  std::vector<std::byte> bytes(table.config.layout.PayloadBytes(place.live()) + AuxBytes(table));
  LogRead read{place.slot(), row.key, row.table, static_cast<uint32_t>(bytes.size()), bytes.data()};
  EMBERTIDE_RETURN_IF_ERROR(device->ssd->Read({&read, 1}));
  return Install(device, row.table, bucket, row.key, bytes.data());
}

void Store::Impl::Promote(Device* device, std::span<const Access> rows) {
  // A reader like any other, of no version, so that what it reads stays where it is; but not while
  // it waits for the writer lock, whose holder may wait for reads to end.
  Result<uint32_t> reader = readers.Enter(~0ULL);
  if (!reader.ok()) {
    dropped_accesses += rows.size();
    return;
  }
  struct Wanted {
    Location place;
    std::vector<std::byte> bytes;
    bool good = true;
  };
  std::vector<Wanted> wanted(rows.size());
  std::vector<LogRead> reads;
  std::optional<Reading> reading;
  {
    const std::lock_guard writer(device->writer);
    reading.emplace(&readers, *reader);
    for (size_t i = 0; i < rows.size(); ++i) {
      Bucket* bucket = nullptr;
      const uint32_t entry = EntryOnSsd(device, rows[i], &bucket);
      if (entry == BucketIndex::kNotFound) continue;
      const Table& table = tables[rows[i].table];
      wanted[i].place = bucket->index.At(entry);
      wanted[i].bytes.resize(table.config.layout.PayloadBytes(wanted[i].place.live()) +
                             AuxBytes(table));
      reads.push_back({wanted[i].place.slot(), rows[i].key, rows[i].table,
                       static_cast<uint32_t>(wanted[i].bytes.size()), wanted[i].bytes.data()});
      device->promoting.insert(wanted[i].place.slot());
    }
  }
  if (!reads.empty() && !device->ssd->Read(reads).ok()) {
    // One by one, to pass over the bad ones: reads find those, and report them.
    for (size_t i = 0; i < rows.size(); ++i) {
      if (wanted[i].bytes.empty()) continue;
      LogRead read{wanted[i].place.slot(), rows[i].key, rows[i].table,
                   static_cast<uint32_t>(wanted[i].bytes.size()), wanted[i].bytes.data()};
      wanted[i].good = device->ssd->Read({&read, 1}).ok();
    }
  }
  reading.reset();
  readers.Leave(*reader);
  const std::lock_guard writer(device->writer);
  // A slot that was freed may hold other bytes by now. Before room is made, which frees some.
  std::vector<Bucket*> buckets(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const uint32_t entry = EntryOnSsd(device, rows[i], &buckets[i]);
    if (entry == BucketIndex::kNotFound || buckets[i]->index.At(entry) != wanted[i].place ||
        !device->promoting.contains(wanted[i].place.slot())) {
      buckets[i] = nullptr;
    }
  }
  device->promoting.clear();
  for (size_t i = 0; i < rows.size(); ++i) {
    if (wanted[i].bytes.empty()) continue;
    // A promotion that finds no room, or a bad block, leaves the row where it is: nothing is lost.
    if (buckets[i] == nullptr || !wanted[i].good ||
        !Install(device, rows[i].table, buckets[i], rows[i].key, wanted[i].bytes.data()).ok()) {
      ++dropped_accesses;
    }
  }
}

std::vector<Access> Store::Impl::Replay(Device* device) {
  device->replayed.clear();
  {
    const std::lock_guard lock(device->accesses_mutex);
    device->accesses.swap(device->replayed);
  }
  std::vector<Access> admitted;
  std::set<std::pair<uint32_t, uint64_t>> asked;  // a key once
  const std::span<const Access> all(device->replayed);
  for (size_t first = 0; first < all.size(); first += kReplayedAtOnce) {
    const std::lock_guard writer(device->writer);
    for (const Access& row : all.subspan(first, std::min(kReplayedAtOnce, all.size() - first))) {
      if (device->policy != nullptr && device->policy->Touch(row.key)) continue;
      Bucket* bucket = nullptr;
      if (EntryOnSsd(device, row, &bucket) == BucketIndex::kNotFound) continue;
      const bool admits =
          device->policy != nullptr
              ? device->policy->Admit(row.key, Full(*device))
              : bucket->index.AccessCount(HashKey(row.key), row.key) >= device->least_count;
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

void Store::Impl::MakeHugePage(Device* device, PagePool* pool) {
  std::optional<uint32_t> region;
  {
    const std::lock_guard writer(device->writer);
    region = pool->NextDue(PagePool::Clock::now());
  }
  if (!region.has_value()) return;
  const bool ready = pool->Prepare(*region);
  const std::lock_guard writer(device->writer);
  if (ready) {
    pool->Exchange(*region);
  } else {
    pool->PutBack(*region, PagePool::Clock::now());
  }
}

void Store::Impl::Maintain(Device* device) {
  MakeHugePage(device, device->arena.pool());
  MakeHugePage(device, &device->index_pages);
  const std::vector<Access> admitted = Replay(device);
  for (size_t first = 0; first < admitted.size(); first += kPromotionsAtOnce) {
    Promote(device, std::span(admitted).subspan(
                        first, std::min(kPromotionsAtOnce, admitted.size() - first)));
  }
  const std::lock_guard writer(device->writer);
  Reclaim(device);
  if (Full(*device)) Evict(device);
  if (device->policy != nullptr) device->policy->Fit();
  if (!device->arena.has_condemned()) device->arena.CondemnSparsePages();
  if (device->arena.has_condemned()) MoveCondemned(device, kSweepEntries, /*demote=*/false);
  if (device->ssd != nullptr) CompactInBackground(device);
  Reclaim(device);
}

void Store::Maintain() {
  for (auto& device : impl_->devices) {
    const std::unique_lock upkeep(device->upkeep, std::try_to_lock);
    if (upkeep.owns_lock()) impl_->Maintain(device.get());
  }
  if (impl_->hbm != nullptr) impl_->FillHbm();
}

}  // namespace embertide
