// Versions: staging records, committing, folding what left the window into the entries.
//
//   entry --> node v7 --> node v5 --> node base (version 0)        pins at 5, 6, 7
//   fold(5):  entry --> node v7 --> node v5                        base retired
//   fold(7):  entry --> slot of v7                                 chain retired
#include <algorithm>
#include <array>

#include "store/store_impl.h"

namespace embertide {
namespace {

// Entries of the retire list, which is not charged, before a fold looks whether readers are gone.
constexpr size_t kMostRetired = 4096;
// Keys whose index groups are asked for before the first of them is looked up.
constexpr size_t kAhead = 32;

}  // namespace

Status Store::StageRecords(uint64_t version, uint32_t table, uint32_t bucket,
                           std::span<const std::byte> records) {
  EMBERTIDE_RETURN_IF_ERROR(impl_->CheckBucket(table, bucket));
  if (version <= impl_->newest.load()) {
    return {Code::kRejected, "version " + std::to_string(version) + " is not newer than " +
                                 std::to_string(impl_->newest.load()) + ", which is committed"};
  }
  const Table& of = impl_->tables[table];
  // A bad message changes nothing.
  EMBERTIDE_RETURN_IF_ERROR(impl_->ProveRecords(of, bucket, records));
  Bucket* rows = Store::Impl::Newest(of, bucket);
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
      const Status staged = impl_->StageOne(&pool, version, table, bucket, rows, record);
      if (!staged.ok()) {
        ++impl_->refused_rows;
        return staged;
      }
    }
  }
  return Status::Ok();
}

Status Store::Impl::ProveRecords(const Table& table, uint32_t bucket,
                                 std::span<const std::byte> records, uint32_t* rows) const {
  const TableConfig& config = table.config;
  while (!records.empty()) {
    const Result<RowRecord> record = ReadRecord(config.layout, &records);
    if (!record.ok()) return record.status();
    if (BucketOfHash(HashKey(record.value().key), config.bucket_bits) != bucket) {
      return {Code::kCorrupt, "key " + std::to_string(record.value().key) + " of table " +
                                  config.name + " is not of bucket " + std::to_string(bucket)};
    }
    if (rows != nullptr && record.value().kind == RecordKind::kRow) ++*rows;
  }
  return Status::Ok();
}

Status Store::Impl::StageBase(RowPool* pool, const Table& table, Bucket* bucket,
                              const RowRecord& record) {
  Location place = Location::Removed(record.kind);
  if (record.kind == RecordKind::kRow) {
    if (bucket->index.Locate(HashKey(record.key), record.key) == BucketIndex::kNotFound) {
      EMBERTIDE_RETURN_IF_ERROR(ReserveEntry(pool, bucket));
    }
    Result<Location> stored = StoreRow(pool, table, record.key, record.live, record.payload);
    if (!stored.ok()) return stored.status();
    place = *stored;
  }
  const uint32_t entry = bucket->index.Locate(HashKey(record.key), record.key);
  if (entry != BucketIndex::kNotFound) {
    const Location old = bucket->index.At(entry);
    if (place.tier() == TierId::kNowhere) {
      EraseEntry(bucket, entry);
    } else {
      bucket->index.Set(entry, place);
    }
    RetirePlace(pool, table, old);
    return Status::Ok();
  }
  if (place.tier() == TierId::kNowhere) return Status::Ok();
  InsertEntry(bucket, record.key, place);
  return Status::Ok();
}

Status Store::Impl::StageOne(RowPool* pool, uint64_t version, uint32_t t, uint32_t b,
                             Bucket* bucket, const RowRecord& record) {
  Table& table = tables[t];
  if (newest.load() == 0) return StageBase(pool, table, bucket, record);

  const uint64_t hash = HashKey(record.key);
  // Everything that can fail for want of room comes first; what follows only links.
  const bool unknown = bucket->index.Locate(hash, record.key) == BucketIndex::kNotFound;
  if (unknown) EMBERTIDE_RETURN_IF_ERROR(ReserveEntry(pool, bucket));
  Result<VersionNode*> node = NewNode(pool);
  if (!node.ok()) return node.status();
  Result<VersionNode*> base = NewNode(pool);
  const auto drop = [&](Result<VersionNode*>& unused) {
    if (unused.ok()) RetireNode(pool, unused.value());
  };
  Result<Location> place = Location::Removed(record.kind);
  Status failed = base.ok() ? Status::Ok() : base.status();
  if (failed.ok() && record.kind == RecordKind::kRow) {
    place = StoreRow(pool, table, record.key, record.live, record.payload);
    if (!place.ok()) failed = place.status();
  }
  if (!failed.ok()) {
    drop(node);
    drop(base);
    return failed;
  }
  if (unknown) InsertEntry(bucket, record.key, Location());
  const uint32_t entry = bucket->index.Locate(hash, record.key);
  const Location current = bucket->index.At(entry);
  if (current.is_chain() && current.chain()->version >= version) {
    // Staged before: the later bytes count. No reader is at an uncommitted version.
    VersionNode* head = current.chain();
    RetirePlace(pool, table, Location::FromWord(head->word.load()));
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
  if (hbm != nullptr) hbm->cache().End(t, record.key, version);
  return Status::Ok();
}

void Store::DropStaged() {
  const uint64_t newest = impl_->newest.load();
  for (auto& pool : impl_->pools) {
    const std::lock_guard writer(pool->writer);
    auto& staged = pool->staged;
    // From the newest on, so that each node is the head of its chain in its turn.
    while (!staged.empty() && staged.rbegin()->first > newest) {
      VersionNode* head = std::prev(staged.end())->second;
      staged.erase(std::prev(staged.end()));
      for (VersionNode *node = head, *next = nullptr; node != nullptr; node = next) {
        next = node->next_staged;
        if (pool->retired.size() > kMostRetired) impl_->Reclaim(pool.get());
        impl_->UnstageNode(pool.get(), node);
      }
    }
    impl_->Reclaim(pool.get());
  }
}

void Store::Impl::UnstageNode(RowPool* pool, VersionNode* node) {
  Table& table = tables[node->table];
  Bucket* bucket = BucketOn(pool, *node);
  const uint32_t entry = bucket->index.Locate(HashKey(node->key), node->key);
  VersionNode* older = node->older.load();
  if (older->older.load() != nullptr) {
    bucket->index.Set(entry, Location(older));
  } else {
    // Every pin reads it: it is the base, or what a fold has left.
    const Location base = Location::FromWord(older->word.load());
    if (base.tier() == TierId::kNowhere) {
      EraseEntry(bucket, entry);
    } else {
      bucket->index.Set(entry, base);
    }
    RetireNode(pool, older);
  }
  RetirePlace(pool, table, Location::FromWord(node->word.load()));
  RetireNode(pool, node);
}

Status Store::Commit(uint64_t version) {
  const MutexLock commit(impl_->commit_mutex);
  const uint64_t newest = impl_->newest.load();
  if (version <= newest) {
    return {Code::kRejected,
            "version " + std::to_string(version) + " is not newer than " + std::to_string(newest)};
  }
  if (impl_->hbm != nullptr) impl_->hbm->cache().Flush();
  impl_->newest.store(version);
  impl_->window.push_back(version);
  while (impl_->window.size() > impl_->options.window_versions) impl_->window.pop_front();
  impl_->LeaveWindow();
  return Status::Ok();
}

void Store::Forget(uint64_t version) {
  const MutexLock commit(impl_->commit_mutex);
  auto& window = impl_->window;
  while (window.size() > 1 && window.front() < version) window.pop_front();
  if (!window.empty()) impl_->LeaveWindow();
}

void Store::Impl::LeaveWindow() {
  oldest.store(window.front());
  // After `oldest` moved, no new pin goes below it; those there now hold the fold back.
  const uint64_t limit = std::min(oldest.load(), readers.MinVersion());
  for (auto& pool : pools) {
    const std::lock_guard writer(pool->writer);
    Fold(pool.get(), limit);
    Reclaim(pool.get());
  }
  RetireSuperseded(limit);
}

void Store::Impl::Fold(RowPool* pool, uint64_t limit) {
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
        if (pool->retired.size() > kMostRetired) Reclaim(pool);
        FoldKey(pool, *each, version);
      }
    }
  }
}

Bucket* Store::Impl::BucketOn(RowPool* pool, const VersionNode& node) {
  return tables[node.table].buckets[node.bucket].On(pool);
}

void Store::Impl::FoldKey(RowPool* pool, const VersionNode& staged, uint64_t version) {
  const BucketIndex& index = BucketOn(pool, staged)->index;
  const uint32_t entry = index.Locate(HashKey(staged.key), staged.key);
  if (entry == BucketIndex::kNotFound || !index.At(entry).is_chain()) return;
  VersionNode* first = index.At(entry).chain();
  first->table = staged.table;
  first->bucket = staged.bucket;
  FoldNode(pool, first, version);
}

void Store::Impl::FoldNode(RowPool* pool, VersionNode* head, uint64_t limit) {
  Table& table = tables[head->table];
  Bucket* bucket = BucketOn(pool, *head);
  BucketIndex& index = bucket->index;
  VersionNode* keep = head;
  while (keep->version > limit) {
    VersionNode* older = keep->older.load();
    if (older == nullptr) return;
    keep = older;
  }
  // What lies below `keep` can be pinned no more. Unlink, then retire.
  VersionNode* gone = keep->older.exchange(nullptr);
  const Location kept = Location::FromWord(keep->word.load());
  if (keep == head) {
    const uint32_t entry = index.Locate(HashKey(head->key), head->key);
    if (kept.tier() == TierId::kNowhere) {
      EraseEntry(bucket, entry);
    } else {
      index.Set(entry, kept);
    }
    RetireNode(pool, head);
  }
  while (gone != nullptr) {
    VersionNode* older = gone->older.load();
    RetirePlace(pool, table, Location::FromWord(gone->word.load()));
    RetireNode(pool, gone);
    gone = older;
  }
}

}  // namespace embertide
