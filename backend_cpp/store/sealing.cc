// Seals written, and a store opened from one: see the header.
#include <algorithm>
#include <map>
#include <new>
#include <utility>

#include "base/clock.h"
#include "embertide/hash.h"
#include "store/seals.h"

namespace embertide {
namespace {

// Bytes of payload that a slice copies under the writer lock: half a millisecond or so.
constexpr uint64_t kSliceBytes = 512 * 1024;
constexpr uint64_t kMaxSliceEntries = 4096;
constexpr uint32_t kSlotBits = 38;

}  // namespace

SealInfo Seals::Describe() const {
  SealInfo info;
  for (const Table& table : store_.tables) {
    const RowLayout& layout = table.config.layout;
    std::string text = table.config.name;
    text.append(" ").append(std::to_string(table.config.id)).append(": ");
    text.append(std::to_string(layout.chunks)).append(" x ");
    text.append(std::to_string(layout.chunk_dim)).append(" ").append(DTypeName(layout.dtype));
    text.append(", ").append(std::to_string(table.config.bucket_bits)).append(" bits");
    info.tables.push_back(std::move(text));
  }
  for (const auto& pool : store_.pools) info.logs.push_back(store_.LogOf(*pool));
  return info;
}

// --- writing

bool Seals::TakeSlice(SealPart* part) {
  Table& table = store_.tables[part->table];
  const BucketSlot& slot = table.buckets[part->bucket];
  RowPool* pool = store_.PoolOf(table, slot.device);
  const std::lock_guard writer(pool->writer);
  const Bucket* bucket = slot.newest.load();
  // Moved between the two lines above, or since the last slice: its rows here are to go.
  if (bucket == nullptr || bucket->pool != pool) return false;
  const auto place_of = [&](const std::unique_ptr<RowPool>& each) { return each.get() == pool; };
  const auto log =
      static_cast<uint32_t>(std::ranges::find_if(store_.pools, place_of) - store_.pools.begin());
  if (part->begin > 0 && part->log != log) return false;
  part->log = log;
  part->ssd.clear();
  part->records.clear();
  const BucketIndex& index = bucket->index;
  part->bucket_rows = index.size();
  const RowLayout& layout = table.config.layout;
  const uint64_t entries = std::clamp<uint64_t>(
      kSliceBytes / (layout.PayloadBytes(layout.full_mask()) + 1), 1, kMaxSliceEntries);
  part->end = std::min(kHashEnd, part->begin + 1 + kHashEnd * entries / (index.capacity() + 1));
  const uint64_t version = store_.newest.load();
  index.ForEachIn(part->begin, part->end, [&](uint64_t key, Location location) {
    const Location place = Resolve(location, version);
    if (place.tier() == TierId::kSsd) {
      pool->ssd->Name(place.slot());
      part->ssd.push_back({key, (uint64_t{place.live()} << kSlotBits) | place.slot()});
    } else if (place.tier() == TierId::kDdr) {
      const uint32_t bytes = layout.PayloadBytes(place.live());
      AppendRecord(
          {key, place.live(), RecordKind::kRow, {pool->arena.Address(place.slot()), bytes}},
          &part->records);
    }
  });
  return true;
}

Status Seals::WriteRows(const SealOptions& seal, uint64_t dropped) {
  const auto name_newest = [&]() -> Result<SealedVersion> {
    const uint64_t number = store_.newest.load();
    const auto named = number == 0 ? std::nullopt : seal.name(number);
    if (named) return *named;
    return Status(Code::kRejected, "version " + std::to_string(number) + " has no name to seal");
  };
  SealInfo info = Describe();
  info.model = seal.model;
  info.schema_id = seal.schema_id;
  const Result<SealedVersion> first = name_newest();
  if (!first.ok()) return first.status();
  info.first = first.value();
  const Result<SealInfo> before = ReadSealInfo(store_.options.ssd_directory);
  info.sequence = before.ok() ? before.value().sequence + 1 : 1;
  info.file = "seal-" + std::to_string(info.sequence) + ".rows";
  RemoveStrays(store_.options.ssd_directory, before.ok() ? before.value().file : "");
  auto made = SealWriter::Create(store_.options.ssd_directory + "/" + info.file);
  if (!made.ok()) return made.status();
  SealWriter& writer = **made;
  SealPart part;
  for (part.table = 0; part.table < store_.tables.size(); ++part.table) {
    for (part.bucket = 0; part.bucket < store_.tables[part.table].buckets.size(); ++part.bucket) {
      for (part.begin = 0; part.begin < kHashEnd && TakeSlice(&part); part.begin = part.end) {
        const uint64_t written = writer.bytes();
        EMBERTIDE_RETURN_IF_ERROR(writer.Add(part));
        bytes_ += writer.bytes() - written;
        info.rows += part.ssd.size();
        for (std::span<const std::byte> rest = part.records; !rest.empty(); ++info.ddr_rows) {
          const auto record = ReadRecord(store_.tables[part.table].config.layout, &rest);
          EMBERTIDE_CHECK(record.ok());  // AppendRecord made it
        }
        const uint64_t pace = seal.bytes_per_s == 0
                                  ? 0
                                  : (writer.bytes() - written) * 1'000'000'000 / seal.bytes_per_s;
        if (seal.wait && !seal.wait(std::chrono::nanoseconds(pace))) {
          return {Code::kRejected, "the seal was given up by whoever asked for it"};
        }
        if (manifest_.dropped() != dropped) return manifest_.Publish(info, dropped);
      }
    }
  }
  info.rows += info.ddr_rows;
  std::vector<std::vector<SealedSegment>> segments(store_.pools.size());
  for (size_t d = 0; d < store_.pools.size(); ++d) {
    if (store_.pools[d]->ssd == nullptr) continue;
    {
      const std::lock_guard lock(store_.pools[d]->writer);
      segments[d] = store_.pools[d]->ssd->Named();
    }
    EMBERTIDE_RETURN_IF_ERROR(store_.pools[d]->ssd->CheckSealed(segments[d].size()));
    EMBERTIDE_RETURN_IF_ERROR(store_.pools[d]->ssd->Sync());
  }
  EMBERTIDE_RETURN_IF_ERROR(writer.Finish(segments, &info));
  const Result<SealedVersion> last = name_newest();
  if (!last.ok()) return last.status();
  info.last = last.value();
  info.written_ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                        std::chrono::system_clock::now().time_since_epoch())
                        .count();
  EMBERTIDE_RETURN_IF_ERROR(manifest_.Publish(info, dropped));
  if (before.ok()) RemoveStrays(store_.options.ssd_directory, info.file);
  return Status::Ok();
}

Status Seals::Write(const SealOptions& options) {
  if (store_.options.ssd_budget_bytes == 0) {
    return {Code::kInvalidArgument, "seals are of the SSD tier of a store that serves"};
  }
  const std::lock_guard one(mutex_);
  const auto begun = std::chrono::steady_clock::now();
  const uint64_t dropped = manifest_.dropped();
  Status status = Status::Ok();
  try {
    status = WriteRows(options, dropped);
  } catch (const std::bad_alloc&) {
    status = {Code::kResourceExhausted, "out of memory"};  // what it named is let go below
  }
  if (!status.ok()) {
    // Half a seal is of no use, and takes the room that it lacked.
    const Result<SealInfo> kept = ReadSealInfo(store_.options.ssd_directory);
    RemoveStrays(store_.options.ssd_directory, kept.ok() ? kept.value().file : "");
  }
  for (const auto& pool : store_.pools) {
    if (pool->ssd == nullptr) continue;
    const std::lock_guard writer(pool->writer);
    // Dropped: there is no seal any more, neither this one nor the one before.
    if (manifest_.dropped() != dropped) {
      pool->ssd->DropSeals();
    } else if (status.ok()) {
      pool->ssd->CompleteSeal();
    } else {
      pool->ssd->AbandonSeal();
    }
  }
  ++(status.ok() ? written_ : failed_);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
  seconds_ += took.count();
  return status;
}

void Seals::AddTo(StoreStats* stats) const {
  stats->seal.written = written_;
  stats->seal.failed = failed_;
  stats->seal.dropped = manifest_.dropped();
  stats->seal.bytes = bytes_;
  stats->seal.seconds = seconds_;
  stats->seal.version = manifest_.version();
}

// --- opening

Status Seals::LoadPart(const SealPart& part) {
  const Table& table = store_.tables[part.table];
  RowPool* pool = store_.pools[part.log].get();
  Bucket* bucket = table.Newest(part.bucket);
  const auto wrong = [](uint64_t key, const char* why) {
    return Status(Code::kCorrupt, "key " + std::to_string(key) + " " + why);
  };
  const auto belongs = [&](uint64_t key) {
    const uint64_t hash = HashKey(key);
    return table.BucketOf(hash) == part.bucket && static_cast<uint32_t>(hash) >= part.begin &&
           static_cast<uint32_t>(hash) < part.end &&
           bucket->index.Locate(hash, key) == BucketIndex::kNotFound;
  };
  const std::lock_guard writer(pool->writer);
  reclaimer_.Reclaim(pool);
  if (part.bucket_rows > pool->budget.limit_bytes() / sizeof(uint64_t)) {
    return {Code::kCorrupt, "the part says that its bucket has more rows than an index can"};
  }
  if (part.begin == 0 && part.bucket_rows > 0) {
    EMBERTIDE_RETURN_IF_ERROR(residency_.ReserveEntries(pool, bucket, part.bucket_rows));
  }
  for (const SealPart::SsdRow& row : part.ssd) {
    const auto live = static_cast<uint16_t>(row.place >> kSlotBits);
    const uint64_t slot = row.place & ((1ULL << kSlotBits) - 1U);
    if (!belongs(row.key)) return wrong(row.key, "is not of this part, or is in it twice");
    if ((row.place >> kSlotBits) > table.config.layout.full_mask())
      return wrong(row.key, "has no such chunks");
    EMBERTIDE_RETURN_IF_ERROR(residency_.ReserveEntry(pool, bucket, row.key));
    if (pool->ssd == nullptr || !pool->ssd->MarkLive(slot, table.config.layout.PayloadBytes(live)))
      return wrong(row.key, "lies where no sealed segment has a row");
    const Location place(TierId::kSsd, live, slot);
    store_.CountPlace(pool, table, place, /*taken=*/true);
    residency_.InsertEntry(bucket, row.key, place);
  }
  for (std::span<const std::byte> rest = part.records; !rest.empty();) {
    const Result<RowRecord> record = ReadRecord(table.config.layout, &rest);
    if (!record.ok()) return record.status();
    if (record.value().kind != RecordKind::kRow || !belongs(record.value().key)) {
      return wrong(record.value().key, "is not of this part, or is in it twice");
    }
    EMBERTIDE_RETURN_IF_ERROR(residency_.PutRecord(pool, table, bucket, record.value()));
  }
  return Status::Ok();
}

Status Seals::Load(SealReader* seal) {
  std::map<std::pair<uint32_t, uint32_t>, std::pair<uint32_t, uint64_t>> read;  // -> log, end
  EMBERTIDE_RETURN_IF_ERROR(seal->ReadParts([&](const SealPart& part) -> Status {
    EMBERTIDE_RETURN_IF_ERROR(store_.CheckBucket(part.table, part.bucket));
    const auto [at, first] =
        read.try_emplace({part.table, part.bucket}, std::pair(part.log, uint64_t{0}));
    const uint32_t part_of = store_.tables[part.table].part * store_.options.devices;
    if (at->second != std::pair(part.log, part.begin) || part.log < part_of ||
        part.log >= part_of + store_.options.devices) {
      return {Code::kCorrupt, "the part is not the next one of its bucket"};
    }
    at->second.second = part.end;
    if (first && !store_.options.hold_all) {
      EMBERTIDE_RETURN_IF_ERROR(
          versions_.AddBucket(part.table, part.bucket, store_.pools[part.log]->number, {}, 0));
    }
    if (store_.tables[part.table].Newest(part.bucket)->pool != store_.pools[part.log].get())
      return {Code::kCorrupt, "the part is of another device than its bucket"};
    return LoadPart(part);
  }));
  for (const auto& [bucket, got] : read) {
    if (got.second == kHashEnd) continue;
    // It left while it was sealed.
    if (store_.options.hold_all) return {Code::kCorrupt, "the seal lacks a part of a bucket"};
    EMBERTIDE_RETURN_IF_ERROR(versions_.DropBucket(bucket.first, bucket.second));
  }
  uint64_t buckets = 0;
  for (const Table& table : store_.tables) buckets += table.buckets.size();
  if (store_.options.hold_all && read.size() != buckets) {
    return {Code::kCorrupt, "the seal holds " + std::to_string(read.size()) + " of " +
                                std::to_string(buckets) + " buckets"};
  }
  if (store_.counters.rows != seal->info().rows && store_.options.hold_all) {
    return {Code::kCorrupt, "the seal holds " + std::to_string(store_.counters.rows) +
                                " rows and says " + std::to_string(seal->info().rows)};
  }
  manifest_.Opened(seal->info().last.number);
  return Status::Ok();
}

}  // namespace embertide
