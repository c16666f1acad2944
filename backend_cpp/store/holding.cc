// Which buckets a store holds: added at its newest version, superseded by a copy in another pool,
// dropped. Pointers to buckets change under the writer locks of all pools: a writer of one pool
// walks past the copies on others.
#include <algorithm>

#include "store/store_impl.h"

namespace embertide {
namespace {

// Records that one hold of the writer lock takes in, so that Maintain gets its turn.
constexpr size_t kRecordsAtOnce = 1024;

// Versions' nodes and entries that one hold of it passes when a bucket leaves.
constexpr uint32_t kPassedAtOnce = 4096;

using Writers = std::vector<WriterLock>;

Writers LockAll(const std::vector<std::unique_ptr<RowPool>>& pools) {
  Writers writers;
  writers.reserve(pools.size());
  for (const auto& pool : pools) writers.emplace_back(pool->writer);
  return writers;
}

}  // namespace

Status Store::AddBucket(uint32_t t, uint32_t b, uint32_t d, std::span<const std::byte> records,
                        uint64_t leave_bytes) {
  EMBERTIDE_RETURN_IF_ERROR(impl_->CheckBucket(t, b));
  const Table& table = impl_->tables[t];
  const std::string name = "bucket " + std::to_string(b) + " of table " + table.config.name;
  if (impl_->training()) return {Code::kInvalidArgument, name + ": a trainer holds all buckets"};
  if (d >= impl_->options.devices) {
    return {Code::kInvalidArgument, name + ": device " + std::to_string(d) +
                                        " does not exist; there are " +
                                        std::to_string(impl_->options.devices)};
  }
  uint32_t rows = 0;
  EMBERTIDE_RETURN_IF_ERROR(impl_->ProveRecords(table, b, records, &rows));
  const MutexLock commit(impl_->commit_mutex);
  RowPool* pool = impl_->PoolOf(table, d);
  BucketSlot& slot = impl_->tables[t].buckets[b];
  Bucket* before = slot.newest;
  if (before != nullptr && before->pool == pool) {
    return {Code::kRejected, name + " is on device " + std::to_string(d) + " already"};
  }
  if (before != nullptr && before->older != nullptr) {
    return {Code::kBusy, name + " is still read where it was before its last move"};
  }
  {
    const std::lock_guard writer(pool->writer);
    EMBERTIDE_RETURN_IF_ERROR(impl_->WithRoom(pool, [&]() -> Status {
      if (pool->budget.TryCharge(kBucketBytes)) return Status::Ok();
      return {Code::kResourceExhausted, name + ": no room for a bucket more in the DDR budget"};
    }));
    impl_->index_bytes += kBucketBytes;
  }
  auto* bucket = new Bucket(pool, table);
  {
    const Writers writers = LockAll(impl_->pools);
    slot.building = bucket;
  }
  const auto leaves = [&]() -> Status {
    const uint64_t left =
        pool->budget.limit_bytes() - pool->budget.used_bytes() + Impl::FreeSlotBytes(*pool);
    if (pool->ssd != nullptr || left >= leave_bytes) return Status::Ok();
    return {Code::kResourceExhausted,
            name + ": of the " + std::to_string(pool->budget.limit_bytes()) + " bytes of device " +
                std::to_string(d) + " it would leave " + std::to_string(left) + ", and " +
                std::to_string(leave_bytes) +
                " are kept for versions; raise the DDR budget, or move less there"};
  };
  Status status = Status::Ok();
  if (rows > 0) {
    // At once: an index that grows with its rows copies what it has again and again.
    const std::lock_guard writer(pool->writer);
    impl_->Reclaim(pool);
    status = leaves();
    if (status.ok()) status = impl_->ReserveEntries(pool, bucket, rows);
  }
  while (status.ok()) {
    const std::lock_guard writer(pool->writer);
    impl_->Reclaim(pool);
    status = leaves();
    if (records.empty()) break;
    for (size_t i = 0; i < kRecordsAtOnce && !records.empty() && status.ok(); ++i) {
      const Result<RowRecord> record = ReadRecord(table.config.layout, &records);
      status = impl_->StageBase(pool, table, bucket, record.value());
    }
  }
  {
    const Writers writers = LockAll(impl_->pools);
    slot.building = nullptr;
    if (status.ok()) {
      bucket->since = impl_->newest.load();
      bucket->older = before;
      slot.newest.store(bucket, std::memory_order_release);
      slot.device = d;
      if (before == nullptr) slot.held_since.store(bucket->since, std::memory_order_release);
    }
  }
  if (!status.ok()) {
    impl_->RetireBucket(t, b, bucket);
    ++impl_->refused_rows;
    return status;
  }
  if (before != nullptr) {
    impl_->superseded.emplace_back(t, b);
    impl_->superseded_until = bucket->since;  // versions only go up
  }
  return Status::Ok();
}

Status Store::DropBucket(uint32_t t, uint32_t b) {
  EMBERTIDE_RETURN_IF_ERROR(impl_->CheckBucket(t, b));
  const MutexLock commit(impl_->commit_mutex);
  BucketSlot& slot = impl_->tables[t].buckets[b];
  Bucket* bucket = nullptr;
  {
    const Writers writers = LockAll(impl_->pools);
    slot.held_since = BucketSlot::kNotHeld;
    bucket = slot.newest.exchange(nullptr);
    for (const Bucket* each = bucket; each != nullptr && impl_->hbm != nullptr;
         each = each->older) {
      impl_->EndInHbm(t, *each);
    }
  }
  while (bucket != nullptr) {
    Bucket* older = bucket->older;
    impl_->RetireBucket(t, b, bucket);
    bucket = older;
  }
  std::erase(impl_->superseded, std::pair(t, b));
  if (impl_->superseded.empty()) impl_->superseded_until = 0;
  return Status::Ok();
}

std::optional<uint64_t> Store::HeldSince(uint32_t t, uint32_t b) const {
  const uint64_t since = impl_->tables[t].buckets[b].held_since.load(std::memory_order_acquire);
  return since == BucketSlot::kNotHeld ? std::nullopt : std::optional(since);
}

std::optional<uint32_t> Store::DeviceOf(uint32_t t, uint32_t b) const {
  const BucketSlot& slot = impl_->tables[t].buckets[b];
  if (slot.held_since == BucketSlot::kNotHeld) return std::nullopt;
  return slot.device.load();
}

std::optional<Store::BucketSize> Store::BucketSizeOf(const ReadView& view, uint32_t t,
                                                     uint32_t b) const {
  const Reading reading(&impl_->readers, view.reader_);
  const Table& table = impl_->tables[t];
  const Bucket* bucket = table.buckets[b].newest;
  if (bucket == nullptr) return std::nullopt;
  const RowLayout& layout = table.config.layout;
  BucketSize size;
  size.rows = bucket->index.size();
  size.index_bytes = bucket->index.bytes();
  size.payload_bytes = size.rows * layout.PayloadBytes(layout.full_mask());
  return size;
}

uint64_t Store::SupersededUntil() const { return impl_->superseded_until; }

void Store::Impl::RetireSuperseded(uint64_t limit) {
  if (superseded.empty()) return;
  struct Left {
    uint32_t table;
    uint32_t number;
    Bucket* bucket;
  };
  std::vector<Left> left;
  {
    const Writers writers = LockAll(pools);
    std::erase_if(superseded, [&](const std::pair<uint32_t, uint32_t>& where) {
      BucketSlot& slot = tables[where.first].buckets[where.second];
      Bucket* newest_copy = slot.newest;
      if (newest_copy->since > limit) return false;
      slot.held_since = newest_copy->since;
      left.push_back({where.first, where.second, newest_copy->older.exchange(nullptr)});
      return true;
    });
  }
  for (const Left& each : left) RetireBucket(each.table, each.number, each.bucket);
  if (superseded.empty()) superseded_until = 0;
}

void Store::Impl::RetireBucket(uint32_t t, uint32_t number, Bucket* bucket) {
  RowPool* pool = bucket->pool;
  WriterLock writer(pool->writer);
  uint32_t passed = 0;
  const auto pass = [&] {
    if (++passed % kPassedAtOnce == 0) WithoutWriter(&writer, [] {});
  };
  // The lists of versions in this pool name nodes that go with the bucket. Meanwhile nothing is
  // folded, and what is staged, of other buckets, comes before the nodes that were there.
  for (auto& [version, head] : pool->staged) {
    for (VersionNode** link = &head; *link != nullptr; pass()) {
      VersionNode* node = *link;
      if (node->table == t && node->bucket == number) {
        *link = node->next_staged;
      } else {
        link = &node->next_staged;
      }
    }
  }
  for (uint32_t e = 0; pool->policy != nullptr && e < bucket->index.capacity(); ++e, pass()) {
    if (bucket->index.Occupied(e)) pool->policy->Leave(bucket->index.KeyAt(e));
  }
  rows -= bucket->index.size();
  Retired retired;
  retired.epoch = readers.Retire();
  retired.bucket = bucket;
  retired.table = t;
  pool->retired.push_back(retired);
}

bool Store::Impl::FreeBucket(const Table& table, Bucket* bucket, uint32_t* entry, uint32_t most) {
  RowPool* pool = bucket->pool;
  const auto free_place = [&](Location place) {
    if (place.tier() == TierId::kNowhere) return;
    CountPlace(pool, table, place, /*taken=*/false);
    Retired retired;
    retired.place = place;
    retired.bytes = table.config.layout.PayloadBytes(place.live()) + AuxBytes(table);
    Free(pool, &retired);
  };
  for (; *entry < bucket->index.capacity(); ++*entry, --most) {
    if (most == 0) return false;
    if (!bucket->index.Occupied(*entry)) continue;
    const Location place = bucket->index.At(*entry);
    bucket->index.Erase(*entry);
    if (!place.is_chain()) {
      free_place(place);
      continue;
    }
    for (VersionNode* node = place.chain(); node != nullptr;) {
      VersionNode* older = node->older.load();
      free_place(Location::FromWord(node->word.load()));
      Retired retired;
      retired.node = node;
      Free(pool, &retired);
      node = older;
    }
  }
  const uint64_t bytes = kBucketBytes + bucket->index.bytes() + bucket->change_bytes();
  pool->budget.Release(bytes);
  index_bytes -= bytes;
  delete bucket;
  return true;
}

}  // namespace embertide
