// Sealing: the rows of every bucket written down slice by slice, while writers and readers go on;
// and a store opened from what was written.
//
// A slice is a range of the hashes' low halves, which an index that grows or moves its entries
// meanwhile cannot upset. It is taken under the pool's writer lock, at the newest version then; a
// row that a later version changes is put right by applying that version again.
#include <algorithm>
#include <map>

#include "base/clock.h"
#include "store/store_impl.h"

namespace embertide {
namespace {

// Of payload that a slice copies under the writer lock: half a millisecond or so.
constexpr uint64_t kSliceBytes = 512 * 1024;
constexpr uint64_t kMostSliceEntries = 4096;
constexpr uint32_t kSlotBits = 38;

}  // namespace

SealInfo Store::Impl::DescribeSeal() const {
  SealInfo info;
  for (const Table& table : tables) {
    const RowLayout& layout = table.config.layout;
    std::string text = table.config.name;
    text.append(" ").append(std::to_string(table.config.id)).append(": ");
    text.append(std::to_string(layout.chunks)).append(" x ");
    text.append(std::to_string(layout.chunk_dim)).append(" ").append(DTypeName(layout.dtype));
    text.append(", ").append(std::to_string(table.config.bucket_bits)).append(" bits");
    info.tables.push_back(std::move(text));
  }
  for (const auto& pool : pools) info.logs.push_back(LogOf(*pool));
  return info;
}

// --- writing

bool Store::Impl::TakeSlice(SealPart* part) {
  Table& table = tables[part->table];
  const BucketSlot& slot = table.buckets[part->bucket];
  RowPool* pool = PoolOf(table, slot.device);
  const std::lock_guard writer(pool->writer);
  const Bucket* bucket = slot.newest.load();
  // Moved between the two lines above, or since the last slice: its rows here are to go.
  if (bucket == nullptr || bucket->pool != pool) return false;
  const auto place_of = [&](const std::unique_ptr<RowPool>& each) { return each.get() == pool; };
  const auto log = static_cast<uint32_t>(std::ranges::find_if(pools, place_of) - pools.begin());
  if (part->begin > 0 && part->log != log) return false;
  part->log = log;
  part->ssd.clear();
  part->records.clear();
  const BucketIndex& index = bucket->index;
  part->bucket_rows = index.size();
  const RowLayout& layout = table.config.layout;
  const uint64_t entries = std::clamp<uint64_t>(
      kSliceBytes / (layout.PayloadBytes(layout.full_mask()) + 1), 1, kMostSliceEntries);
  part->end = std::min(kHashEnd, part->begin + 1 + kHashEnd * entries / (index.capacity() + 1));
  const uint64_t version = newest.load();
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

bool Store::Impl::DropSeals(RowPool* pool) {
  if (pool->ssd->kept_bytes() == 0) return false;
  const std::lock_guard manifest(seal_manifest_mutex);
  // A manifest that stays names segments that are written over: they must be kept then.
  if (!RemoveSeal(options.ssd_directory).ok()) return false;
  ++seals_dropped;
  sealed_version = 0;
  pool->ssd->DropSeals();
  return true;
}

Status Store::Impl::PublishSeal(const SealInfo& info, uint64_t dropped) {
  const std::lock_guard manifest(seal_manifest_mutex);
  if (seals_dropped != dropped) {
    return {Code::kRejected, "the seal was given up: rows needed its room on the SSD"};
  }
  Status status = WriteSealInfo(options.ssd_directory, info);
  if (status.ok()) {
    sealed_version = info.last.number;
  } else {
    // Either one may lie there now, and only the older one's segments stay.
    ++seals_dropped;
    sealed_version = 0;
    if (const Status removed = RemoveSeal(options.ssd_directory); !removed.ok()) status = removed;
  }
  return status;
}

Status Store::Impl::WriteSeal(const SealOptions& seal, uint64_t dropped) {
  const auto name_newest = [&]() -> Result<SealedVersion> {
    const uint64_t number = newest.load();
    const auto named = number == 0 ? std::nullopt : seal.name(number);
    if (named) return *named;
    return Status(Code::kRejected, "version " + std::to_string(number) + " has no name to seal");
  };
  SealInfo info = DescribeSeal();
  info.model = seal.model;
  info.schema_id = seal.schema_id;
  const Result<SealedVersion> first = name_newest();
  if (!first.ok()) return first.status();
  info.first = first.value();
  const Result<SealInfo> before = ReadSealInfo(options.ssd_directory);
  info.sequence = before.ok() ? before.value().sequence + 1 : 1;
  info.file = "seal-" + std::to_string(info.sequence) + ".rows";
  RemoveStrays(options.ssd_directory, before.ok() ? before.value().file : "");
  auto made = SealWriter::Create(options.ssd_directory + "/" + info.file);
  if (!made.ok()) return made.status();
  SealWriter& writer = **made;
  SealPart part;
  for (part.table = 0; part.table < tables.size(); ++part.table) {
    for (part.bucket = 0; part.bucket < tables[part.table].buckets.size(); ++part.bucket) {
      for (part.begin = 0; part.begin < kHashEnd && TakeSlice(&part); part.begin = part.end) {
        const uint64_t written = writer.bytes();
        EMBERTIDE_RETURN_IF_ERROR(writer.Add(part));
        seal_bytes += writer.bytes() - written;
        info.rows += part.ssd.size();
        for (std::span<const std::byte> rest = part.records; !rest.empty(); ++info.ddr_rows) {
          const auto record = ReadRecord(tables[part.table].config.layout, &rest);
          EMBERTIDE_CHECK(record.ok());  // AppendRecord made it
        }
        const uint64_t pace = seal.bytes_per_s == 0
                                  ? 0
                                  : (writer.bytes() - written) * 1'000'000'000 / seal.bytes_per_s;
        if (seal.wait && !seal.wait(std::chrono::nanoseconds(pace))) {
          return {Code::kRejected, "the seal was given up by whoever asked for it"};
        }
        if (seals_dropped != dropped) return PublishSeal(info, dropped);
      }
    }
  }
  info.rows += info.ddr_rows;
  std::vector<std::vector<SealedSegment>> segments(pools.size());
  for (size_t d = 0; d < pools.size(); ++d) {
    if (pools[d]->ssd == nullptr) continue;
    {
      const std::lock_guard lock(pools[d]->writer);
      segments[d] = pools[d]->ssd->Named();
    }
    EMBERTIDE_RETURN_IF_ERROR(pools[d]->ssd->Sync());
  }
  EMBERTIDE_RETURN_IF_ERROR(writer.Finish(segments, &info));
  const Result<SealedVersion> last = name_newest();
  if (!last.ok()) return last.status();
  info.last = last.value();
  info.written_ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                        std::chrono::system_clock::now().time_since_epoch())
                        .count();
  EMBERTIDE_RETURN_IF_ERROR(PublishSeal(info, dropped));
  if (before.ok()) RemoveStrays(options.ssd_directory, info.file);
  return Status::Ok();
}

Status Store::Seal(const SealOptions& options) {
  if (impl_->training() || impl_->options.ssd_budget_bytes == 0) {
    return {Code::kInvalidArgument, "seals are of the SSD tier of a store that serves"};
  }
  const std::lock_guard one(impl_->seal_mutex);
  const auto begun = std::chrono::steady_clock::now();
  const uint64_t dropped = impl_->seals_dropped;
  const Status status = impl_->WriteSeal(options, dropped);
  for (const auto& pool : impl_->pools) {
    if (pool->ssd == nullptr) continue;
    const std::lock_guard writer(pool->writer);
    // Dropped: there is no seal any more, neither this one nor the one before.
    if (impl_->seals_dropped != dropped) {
      pool->ssd->DropSeals();
    } else if (status.ok()) {
      pool->ssd->CompleteSeal();
    } else {
      pool->ssd->AbandonSeal();
    }
  }
  ++(status.ok() ? impl_->seals_written : impl_->seals_failed);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
  impl_->seal_seconds += took.count();
  return status;
}

// --- opening

Status Store::Impl::LoadPart(const SealPart& part) {
  const Table& table = tables[part.table];
  RowPool* pool = pools[part.log].get();
  Bucket* bucket = Newest(table, part.bucket);
  const auto wrong = [](uint64_t key, const char* why) {
    return Status(Code::kCorrupt, "key " + std::to_string(key) + " " + why);
  };
  const auto belongs = [&](uint64_t key) {
    const uint64_t hash = HashKey(key);
    return BucketOf(table, hash) == part.bucket && static_cast<uint32_t>(hash) >= part.begin &&
           static_cast<uint32_t>(hash) < part.end &&
           bucket->index.Locate(hash, key) == BucketIndex::kNotFound;
  };
  const std::lock_guard writer(pool->writer);
  Reclaim(pool);
  if (part.bucket_rows > pool->budget.limit_bytes() / sizeof(uint64_t)) {
    return {Code::kCorrupt, "the part says that its bucket has more rows than an index can"};
  }
  if (part.begin == 0 && part.bucket_rows > 0) {
    EMBERTIDE_RETURN_IF_ERROR(ReserveEntries(pool, bucket, part.bucket_rows));
  }
  for (const SealPart::SsdRow& row : part.ssd) {
    const auto live = static_cast<uint16_t>(row.place >> kSlotBits);
    const uint64_t slot = row.place & ((1ULL << kSlotBits) - 1U);
    if (!belongs(row.key)) return wrong(row.key, "is not of this part, or is in it twice");
    if ((row.place >> kSlotBits) > table.config.layout.full_mask())
      return wrong(row.key, "has no such chunks");
    EMBERTIDE_RETURN_IF_ERROR(ReserveEntry(pool, bucket));
    if (pool->ssd == nullptr || !pool->ssd->Adopt(slot, table.config.layout.PayloadBytes(live)))
      return wrong(row.key, "lies where no sealed segment has a row");
    const Location place(TierId::kSsd, live, slot);
    CountPlace(pool, table, place, /*taken=*/true);
    InsertEntry(bucket, row.key, place);
  }
  for (std::span<const std::byte> rest = part.records; !rest.empty();) {
    const Result<RowRecord> record = ReadRecord(table.config.layout, &rest);
    if (!record.ok()) return record.status();
    if (record.value().kind != RecordKind::kRow || !belongs(record.value().key)) {
      return wrong(record.value().key, "is not of this part, or is in it twice");
    }
    EMBERTIDE_RETURN_IF_ERROR(StageBase(pool, table, bucket, record.value()));
  }
  return Status::Ok();
}

Status Store::LoadSeal(SealReader* seal) {
  Impl& impl = *impl_;
  std::map<std::pair<uint32_t, uint32_t>, std::pair<uint32_t, uint64_t>> read;  // -> log, end
  EMBERTIDE_RETURN_IF_ERROR(seal->ReadParts([&](const SealPart& part) -> Status {
    EMBERTIDE_RETURN_IF_ERROR(impl.CheckBucket(part.table, part.bucket));
    const auto [at, first] =
        read.try_emplace({part.table, part.bucket}, std::pair(part.log, uint64_t{0}));
    const uint32_t part_of = impl.tables[part.table].part * impl.options.devices;
    if (at->second != std::pair(part.log, part.begin) || part.log < part_of ||
        part.log >= part_of + impl.options.devices) {
      return {Code::kCorrupt, "the part is not the next one of its bucket"};
    }
    at->second.second = part.end;
    if (first && !impl.options.hold_all) {
      EMBERTIDE_RETURN_IF_ERROR(
          AddBucket(part.table, part.bucket, impl.pools[part.log]->number, {}));
    }
    if (Impl::Newest(impl.tables[part.table], part.bucket)->pool != impl.pools[part.log].get())
      return {Code::kCorrupt, "the part is of another device than its bucket"};
    return impl.LoadPart(part);
  }));
  for (const auto& [bucket, got] : read) {
    if (got.second == kHashEnd) continue;
    // It left while it was sealed.
    if (impl.options.hold_all) return {Code::kCorrupt, "the seal lacks a part of a bucket"};
    EMBERTIDE_RETURN_IF_ERROR(DropBucket(bucket.first, bucket.second));
  }
  uint64_t buckets = 0;
  for (const Table& table : impl.tables) buckets += table.buckets.size();
  if (impl.options.hold_all && read.size() != buckets) {
    return {Code::kCorrupt, "the seal holds " + std::to_string(read.size()) + " of " +
                                std::to_string(buckets) + " buckets"};
  }
  if (impl.rows != seal->info().rows && impl.options.hold_all) {
    return {Code::kCorrupt, "the seal holds " + std::to_string(impl.rows) + " rows and says " +
                                std::to_string(seal->info().rows)};
  }
  impl.sealed_version = seal->info().last.number;
  return Status::Ok();
}

}  // namespace embertide
