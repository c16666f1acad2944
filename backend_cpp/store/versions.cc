// Versions: staging records, committing, folding what left the window into the entries.
#include "store/versions.h"

#include <algorithm>
#include <array>
#include <string>

#include "embertide/hash.h"

namespace embertide {
namespace {

// Entries of the retire list, which is not charged, before a fold looks whether readers are gone.
constexpr size_t kMaxRetired = 4096;
// Keys whose index groups are asked for before the first of them is looked up.
constexpr size_t kAhead = 32;

}  // namespace

Status Versions::Stage(uint64_t version, uint32_t table, uint32_t bucket,
                       std::span<const std::byte> records) {
  EMBERTIDE_RETURN_IF_ERROR(store_.CheckBucket(table, bucket));
  if (version <= store_.newest.load()) {
    return {Code::kRejected, "version " + std::to_string(version) + " is not newer than " +
                                 std::to_string(store_.newest.load()) + ", which is committed"};
  }
  const Table& of = store_.tables[table];
  // A bad message changes nothing.
  EMBERTIDE_RETURN_IF_ERROR(ValidateRecords(of, bucket, records));
  Bucket* rows = of.Newest(bucket);
  if (rows == nullptr) {
    return {Code::kNotOwner, "bucket " + std::to_string(bucket) + " of table " + of.config.name +
                                 " is not held here"};
  }
  RowPool& pool = *rows->pool;
  const std::lock_guard writer(pool.writer);
  std::array<RowRecord, kAhead> next;
  while (!records.empty()) {
    size_t count = 0;
    for (; count < next.size() && !records.empty(); ++count) {
      next[count] = ReadRecord(of.config.layout, &records).value();
      rows->index.Begin(HashKey(next[count].key)).Prefetch();
    }
    for (const RowRecord& record : std::span(next).first(count)) {
      const Status staged = StageOne(&pool, version, table, bucket, rows, record);
      if (!staged.ok()) {
        ++store_.counters.refused_rows;
        return staged;
      }
    }
  }
  return Status::Ok();
}

Status Versions::StageOne(RowPool* pool, uint64_t version, uint32_t t, uint32_t b, Bucket* bucket,
                          const RowRecord& record) {
  Table& table = store_.tables[t];
  if (store_.newest.load() == 0) return residency_.PutRecord(pool, table, bucket, record);

  const uint64_t hash = HashKey(record.key);
  // Everything that can fail for want of room comes first; what follows only links.
  const bool unknown = bucket->index.Locate(hash, record.key) == BucketIndex::kNotFound;
  if (unknown) EMBERTIDE_RETURN_IF_ERROR(residency_.ReserveEntry(pool, bucket, record.key));
  Result<VersionNode*> node = residency_.NewNode(pool);
  if (!node.ok()) return node.status();
  Result<VersionNode*> base = residency_.NewNode(pool);
  const auto drop = [&](Result<VersionNode*>& unused) {
    if (unused.ok()) reclaimer_.RetireNode(pool, unused.value());
  };
  Result<Location> place = Location::Removed(record.kind);
  Status failed = base.ok() ? Status::Ok() : base.status();
  if (failed.ok() && record.kind == RecordKind::kRow) {
    place = residency_.StoreRow(pool, table, record.key, record.live, record.payload);
    if (!place.ok()) failed = place.status();
  }
  if (!failed.ok()) {
    drop(node);
    drop(base);
    return failed;
  }
  if (unknown) residency_.InsertEntry(bucket, record.key, Location());
  const uint32_t entry = bucket->index.Locate(hash, record.key);
  const Location current = bucket->index.At(entry);
  if (current.is_chain() && current.chain()->version >= version) {
    // Staged before: the later bytes count. No reader is at an uncommitted version.
    VersionNode* head = current.chain();
    reclaimer_.RetirePlace(pool, table, Location::FromWord(head->word.load()));
    head->word.store(place->word(), std::memory_order_release);
    drop(node);
    drop(base);
    return Status::Ok();
  }
  VersionNode* older = current.is_chain() ? current.chain() : *base;
  if (current.is_chain()) {
    drop(base);
  } else {
    (*base)->word.store(current.word(), std::memory_order_relaxed);
    (*base)->key = record.key;
  }
  VersionNode* head = *node;
  head->version = version;
  head->word.store(place->word(), std::memory_order_relaxed);
  head->older.store(older, std::memory_order_relaxed);
  head->key = record.key;
  head->table = t;
  head->bucket = b;
  head->next_staged = pool->staged[version];
  pool->staged[version] = head;
  bucket->index.Set(entry, Location(head));
  if (store_.hbm != nullptr) store_.hbm->cache().End(t, record.key, version);
  return Status::Ok();
}

void Versions::DropStaged() {
  const uint64_t newest = store_.newest.load();
  for (auto& pool : store_.pools) {
    const std::lock_guard writer(pool->writer);
    auto& staged = pool->staged;
    // From the newest on, so that each node is the head of its chain in its turn.
    while (!staged.empty() && staged.rbegin()->first > newest) {
      VersionNode* head = std::prev(staged.end())->second;
      staged.erase(std::prev(staged.end()));
      for (VersionNode *node = head, *next = nullptr; node != nullptr; node = next) {
        next = node->next_staged;
        if (pool->retired.size() > kMaxRetired) reclaimer_.Reclaim(pool.get());
        UnstageNode(pool.get(), node);
      }
    }
    reclaimer_.Reclaim(pool.get());
  }
}

void Versions::UnstageNode(RowPool* pool, VersionNode* node) {
  Table& table = store_.tables[node->table];
  Bucket* bucket = BucketOn(pool, *node);
  const uint32_t entry = bucket->index.Locate(HashKey(node->key), node->key);
  VersionNode* older = node->older.load();
  if (older->older.load() != nullptr) {
    bucket->index.Set(entry, Location(older));
  } else {
    // Every pin reads it: it is the base, or what a fold has left.
    const Location base = Location::FromWord(older->word.load());
    if (base.tier() == TierId::kNowhere) {
      residency_.EraseEntry(bucket, entry);
    } else {
      bucket->index.Set(entry, base);
    }
    reclaimer_.RetireNode(pool, older);
  }
  reclaimer_.RetirePlace(pool, table, Location::FromWord(node->word.load()));
  reclaimer_.RetireNode(pool, node);
}

Status Versions::Commit(uint64_t version) {
  const MutexLock commit(mutex_);
  const uint64_t newest = store_.newest.load();
  if (version <= newest) {
    return {Code::kRejected,
            "version " + std::to_string(version) + " is not newer than " + std::to_string(newest)};
  }
  if (store_.hbm != nullptr) store_.hbm->cache().Flush();
  store_.newest.store(version);
  window_.push_back(version);
  while (window_.size() > store_.options.window_versions) window_.pop_front();
  LeaveWindow();
  return Status::Ok();
}

void Versions::Forget(uint64_t version) {
  const MutexLock commit(mutex_);
  while (window_.size() > 1 && window_.front() < version) window_.pop_front();
  if (!window_.empty()) LeaveWindow();
}

void Versions::LeaveWindow() {
  store_.oldest.store(window_.front());
  // After `oldest` moved, no new pin goes below it; those there now hold the fold back.
  const uint64_t limit = std::min(store_.oldest.load(), store_.readers.MinVersion());
  for (auto& pool : store_.pools) {
    const std::lock_guard writer(pool->writer);
    Fold(pool.get(), limit);
    reclaimer_.Reclaim(pool.get());
  }
  RetireSuperseded(limit);
}

void Versions::Fold(RowPool* pool, uint64_t limit) {
  // Version by version, so that no node of a later one is freed before its turn.
  while (!pool->staged.empty() && pool->staged.begin()->first <= limit) {
    const auto [version, head] = *pool->staged.begin();
    pool->staged.erase(pool->staged.begin());
    std::array<VersionNode*, kAhead> next;  // of one key each, so that none is freed by another
    for (VersionNode* node = head; node != nullptr;) {
      size_t count = 0;
      for (; count < next.size() && node != nullptr; node = node->next_staged) {
        next[count++] = node;
        BucketOn(pool, *node)->index.Begin(HashKey(node->key)).Prefetch();
      }
      for (VersionNode* each : std::span(next).first(count)) {
        if (pool->retired.size() > kMaxRetired) reclaimer_.Reclaim(pool);
        FoldKey(pool, *each, version);
      }
    }
  }
}

Bucket* Versions::BucketOn(RowPool* pool, const VersionNode& node) {
  return store_.tables[node.table].buckets[node.bucket].On(pool);
}

void Versions::FoldKey(RowPool* pool, const VersionNode& staged, uint64_t version) {
  const BucketIndex& index = BucketOn(pool, staged)->index;
  const uint32_t entry = index.Locate(HashKey(staged.key), staged.key);
  if (entry == BucketIndex::kNotFound || !index.At(entry).is_chain()) return;
  VersionNode* first = index.At(entry).chain();
  first->table = staged.table;
  first->bucket = staged.bucket;
  FoldNode(pool, first, version);
}

void Versions::FoldNode(RowPool* pool, VersionNode* head, uint64_t limit) {
  Table& table = store_.tables[head->table];
  Bucket* bucket = BucketOn(pool, *head);
  BucketIndex& index = bucket->index;
  VersionNode* keep = head;
  while (keep->version > limit) {
    VersionNode* older = keep->older.load();
    if (older == nullptr) return;
    keep = older;
  }
  // Nodes below `keep` can be pinned no more. Unlink, then retire.
  VersionNode* gone = keep->older.exchange(nullptr);
  const Location kept = Location::FromWord(keep->word.load());
  if (keep == head) {
    const uint32_t entry = index.Locate(HashKey(head->key), head->key);
    if (kept.tier() == TierId::kNowhere) {
      residency_.EraseEntry(bucket, entry);
    } else {
      index.Set(entry, kept);
    }
    reclaimer_.RetireNode(pool, head);
  }
  while (gone != nullptr) {
    VersionNode* older = gone->older.load();
    reclaimer_.RetirePlace(pool, table, Location::FromWord(gone->word.load()));
    reclaimer_.RetireNode(pool, gone);
    gone = older;
  }
}

}  // namespace embertide
