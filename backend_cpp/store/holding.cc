// Which buckets a store holds: added at its newest version, superseded by a copy in another pool,
// dropped.
#include <algorithm>
#include <string>

#include "store/hbm_fill.h"
#include "store/versions.h"

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

Status Versions::AddBucket(uint32_t t, uint32_t b, uint32_t d, std::span<const std::byte> records,
                           uint64_t leave_bytes) {
  EMBERTIDE_RETURN_IF_ERROR(store_.CheckBucket(t, b));
  const Table& table = store_.tables[t];
  const std::string name = "bucket " + std::to_string(b) + " of table " + table.config.name;
  if (d >= store_.options.devices) {
    return {Code::kInvalidArgument, name + ": device " + std::to_string(d) +
                                        " does not exist; there are " +
                                        std::to_string(store_.options.devices)};
  }
  uint32_t rows = 0;
  EMBERTIDE_RETURN_IF_ERROR(ValidateRecords(table, b, records, &rows));
  const MutexLock commit(mutex_);
  RowPool* pool = store_.PoolOf(table, d);
  BucketSlot& slot = store_.tables[t].buckets[b];
  Bucket* before = slot.newest;
  if (before != nullptr && before->pool == pool) {
    return {Code::kRejected, name + " is on device " + std::to_string(d) + " already"};
  }
  if (before != nullptr && before->older != nullptr) {
    return {Code::kBusy, name + " is still read where it was before its last move"};
  }
  {
    const std::lock_guard writer(pool->writer);
    EMBERTIDE_RETURN_IF_ERROR(residency_.WithRoom(pool, [&]() -> Status {
      if (pool->budget.TryCharge(kBucketBytes)) return Status::Ok();
      return {Code::kResourceExhausted, name + ": no room for a bucket more in the DDR budget"};
    }));
    store_.counters.index_bytes += kBucketBytes;
  }
  auto* bucket = new Bucket(pool, table, b);
  {
    const Writers writers = LockAll(store_.pools);
    slot.building = bucket;
  }
  const auto leaves = [&]() -> Status {
    const uint64_t left =
        pool->budget.limit_bytes() - pool->budget.used_bytes() + pool->FreeSlotBytes();
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
    reclaimer_.Reclaim(pool);
    status = leaves();
    if (status.ok()) status = residency_.ReserveEntries(pool, bucket, rows);
  }
  while (status.ok()) {
    const std::lock_guard writer(pool->writer);
    reclaimer_.Reclaim(pool);
    status = leaves();
    if (records.empty()) break;
    for (size_t i = 0; i < kRecordsAtOnce && !records.empty() && status.ok(); ++i) {
      const Result<RowRecord> record = ReadRecord(table.config.layout, &records);
      status = residency_.PutRecord(pool, table, bucket, record.value());
    }
  }
  {
    const Writers writers = LockAll(store_.pools);
    slot.building = nullptr;
    if (status.ok()) {
      bucket->since = store_.newest.load();
      bucket->older = before;
      slot.newest.store(bucket, std::memory_order_release);
      slot.device = d;
      if (before == nullptr) slot.held_since.store(bucket->since, std::memory_order_release);
    }
  }
  if (!status.ok()) {
    RetireBucket(t, b, bucket);
    ++store_.counters.refused_rows;
    return status;
  }
  if (before != nullptr) {
    superseded_.emplace_back(t, b);
    superseded_until_ = bucket->since;  // versions only go up
  }
  return Status::Ok();
}

Status Versions::DropBucket(uint32_t t, uint32_t b) {
  EMBERTIDE_RETURN_IF_ERROR(store_.CheckBucket(t, b));
  const MutexLock commit(mutex_);
  BucketSlot& slot = store_.tables[t].buckets[b];
  Bucket* bucket = nullptr;
  {
    const Writers writers = LockAll(store_.pools);
    slot.held_since = BucketSlot::kNotHeld;
    bucket = slot.newest.exchange(nullptr);
    for (const Bucket* each = bucket; each != nullptr && store_.hbm != nullptr;
         each = each->older) {
      EndInHbm(store_, t, *each);
    }
  }
  while (bucket != nullptr) {
    Bucket* older = bucket->older;
    RetireBucket(t, b, bucket);
    bucket = older;
  }
  std::erase(superseded_, std::pair(t, b));
  if (superseded_.empty()) superseded_until_ = 0;
  return Status::Ok();
}

void Versions::RetireSuperseded(uint64_t limit) {
  if (superseded_.empty()) return;
  struct Left {
    uint32_t table;
    uint32_t number;
    Bucket* bucket;
  };
  std::vector<Left> left;
  {
    const Writers writers = LockAll(store_.pools);
    std::erase_if(superseded_, [&](const std::pair<uint32_t, uint32_t>& where) {
      BucketSlot& slot = store_.tables[where.first].buckets[where.second];
      Bucket* newest_copy = slot.newest;
      if (newest_copy->since > limit) return false;
      slot.held_since = newest_copy->since;
      left.push_back({where.first, where.second, newest_copy->older.exchange(nullptr)});
      return true;
    });
  }
  for (const Left& each : left) RetireBucket(each.table, each.number, each.bucket);
  if (superseded_.empty()) superseded_until_ = 0;
}

void Versions::RetireBucket(uint32_t t, uint32_t number, Bucket* bucket) {
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
  const uint32_t entries = pool->policy == nullptr ? 0 : bucket->index.capacity();
  for (uint32_t e = 0; e < entries; e += kPassedAtOnce) {
    bucket->index.Walk(e, std::min(e + kPassedAtOnce, entries),
                       [&](uint32_t at, Location /*said*/) {
                         pool->policy->Leave(bucket->index.KeyAt(at));
                         return true;
                       });
    WithoutWriter(&writer, [] {});
  }
  store_.counters.rows -= bucket->index.size();
  reclaimer_.RetireBucket(bucket);
}

}  // namespace embertide
