// Compaction: the live rows of a segment that is mostly dead are written again, packed, so that the
// segment is free. Everything here runs under the device's writer lock.
//
// The segment's own blocks say which rows it holds; one look at the index tells the live ones. What
// is live yet in no entry, because its bucket or version was retired, is freed without being moved.
#include <algorithm>
#include <optional>

#include "store/store_impl.h"

namespace embertide {
namespace {

// Blocks of one step: a millisecond or two of a drive, for which writers wait.
constexpr uint32_t kStepBlocks = 64;
// In the background a segment is worth its move when half is dead: a byte is then written twice at
// most. When the budget is full, any segment of which an eighth is.
constexpr double kWorthMoving = 0.5;
constexpr double kWorthMovingFull = 0.125;
// What a device that had nothing to compact may do at once, of a second's budget.
constexpr double kBurstSeconds = 0.1;

}  // namespace

std::optional<Store::Impl::Holder> Store::Impl::HolderOf(Device* device, uint32_t table,
                                                         uint64_t key, uint64_t ssd_slot) {
  const uint64_t hash = HashKey(key);
  Bucket* bucket = tables[table].buckets[BucketOf(tables[table], hash)].On(device);
  if (bucket == nullptr) return std::nullopt;
  const uint32_t entry = bucket->index.Locate(hash, key);
  if (entry == BucketIndex::kNotFound) return std::nullopt;
  const auto there = [ssd_slot](Location place) {
    return place.tier() == TierId::kSsd && place.slot() == ssd_slot;
  };
  const Location place = bucket->index.At(entry);
  if (!place.is_chain()) {
    return there(place) ? std::optional<Holder>({table, bucket, entry, nullptr}) : std::nullopt;
  }
  for (VersionNode* node = place.chain(); node != nullptr; node = node->older.load()) {
    const Holder holder{table, bucket, entry, node};
    if (there(PlaceOf(holder))) return holder;
  }
  return std::nullopt;
}

uint64_t Store::Impl::CompactStep(Device* device, double least_dead) {
  BlockLog& log = *device->ssd;
  const std::optional<BlockLog::Run> run = log.NextToCompact(kStepBlocks, least_dead);
  if (!run.has_value()) return 0;
  std::vector<LogRow> rows;
  std::vector<std::byte> bytes;
  log.Scan(*run, &rows, &bytes);
  std::vector<Holder> holders;
  std::vector<LogEntry> entries;
  uint64_t moved_bytes = 0;
  for (const LogRow& row : rows) {
    const std::optional<Holder> holder = HolderOf(device, row.table, row.key, row.slot);
    if (!holder.has_value()) continue;
    holders.push_back(*holder);
    entries.push_back({row.key, row.table, std::span(bytes).subspan(row.at, row.bytes)});
    moved_bytes += row.bytes;
  }
  const uint64_t work = uint64_t{run->blocks} * kBlockBytes + moved_bytes;
  compacted_bytes += work;
  std::vector<uint64_t> slots;
  // Without room, or with a drive that fails, the rows stay where they are and are tried again.
  if (!log.Append(entries, &slots, /*moved=*/true).ok()) return work;
  for (size_t i = 0; i < holders.size(); ++i) {
    const Table& table = tables[holders[i].table];
    const Location place = PlaceOf(holders[i]);
    const Location moved(TierId::kSsd, place.live(), slots[i]);
    CountPlace(device, table, moved, /*taken=*/true);
    SetPlace(holders[i], moved);
    RetirePlace(device, table, place);
  }
  compacted_rows += holders.size();
  log.Compacted(*run);
  return work;
}

void Store::Impl::CompactInBackground(Device* device) {
  const auto now = std::chrono::steady_clock::now();
  const std::chrono::duration<double> passed = now - device->compaction_at;
  device->compaction_at = now;
  const double rate =
      static_cast<double>(options.ssd_compaction_bytes_per_s) / static_cast<double>(devices.size());
  double& credit = device->compaction_credit;
  credit = std::min(credit + rate * passed.count(), rate * kBurstSeconds);
  if (credit > 0) credit -= static_cast<double>(CompactStep(device, kWorthMoving));
}

bool Store::Impl::CompactForRoom(Device* device) {
  uint32_t steps = 0;
  while (steps < kSegmentBlocks / kStepBlocks && CompactStep(device, kWorthMovingFull) > 0) ++steps;
  if (steps == 0) return false;
  ++compactions_forced;
  return AwaitReaders(device).ok();
}

}  // namespace embertide
