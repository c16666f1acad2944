// Mending: rows whose block on the SSD is not what was written get their bytes again, from whoever
// knows them. Each step holds the pool's writer for one bucket's entries, or for one row.
#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "embertide/hash.h"
#include "store/holder.h"
#include "store/store_impl.h"

namespace embertide {
namespace {

// Requires, of these: the pool's writer.
//
// The place that answers the key of an entry at a version, if it is of a bad block.
std::optional<Holder> BadPlace(const RowPool* pool, const std::set<uint64_t>& blocks,
                               uint32_t table, Bucket* bucket, uint32_t entry, uint64_t version) {
  Holder holder{table, bucket, entry, nullptr};
  if (const Location at = bucket->index.At(entry); at.is_chain()) {
    holder.node = at.chain();
    while (holder.node != nullptr && holder.node->version > version) {
      holder.node = holder.node->older.load();
    }
    if (holder.node == nullptr) return std::nullopt;
  }
  const Location place = holder.place();
  const bool bad = pool->ssd != nullptr && place.tier() == TierId::kSsd &&
                   blocks.contains(BlockLog::BlockOf(place.slot()));
  return bad ? std::optional(holder) : std::nullopt;
}

// Calls visit(key, place) for all of a bucket's entries of which there is one.
template <typename Visit>
void ForEachBad(const RowPool* pool, const std::set<uint64_t>& blocks, uint32_t table,
                Bucket* bucket, uint64_t version, const Visit& visit) {
  bucket->index.Walk(0, bucket->index.capacity(), [&](uint32_t e, Location /*said*/) {
    const auto holder = BadPlace(pool, blocks, table, bucket, e, version);
    if (holder) visit(bucket->index.KeyAt(e), holder->place());
    return true;
  });
}

// The newest copy of a bucket, if it is in this pool and answers that version.
Bucket* CopyAt(const RowPool* pool, const BucketSlot& slot, uint64_t version) {
  Bucket* bucket = slot.newest;
  const bool here = bucket != nullptr && bucket->pool == pool && bucket->since <= version;
  return here ? bucket : nullptr;
}

// Ok also if the row is not in a bad block any more.
Status MendOne(Store::Impl* impl, RowPool* pool, const Table& table, uint32_t b, uint64_t version,
               const RowRecord& record) {
  Bucket* bucket = CopyAt(pool, table.buckets[b], version);
  if (bucket == nullptr) return Status::Ok();
  const uint32_t entry = bucket->index.Locate(HashKey(record.key), record.key);
  if (entry == BucketIndex::kNotFound) return Status::Ok();
  const std::set<uint64_t> blocks = pool->ssd->bad_blocks().blocks();
  const auto holder = BadPlace(pool, blocks, table.ordinal, bucket, entry, version);
  if (!holder) return Status::Ok();
  if (holder->place().live() != record.live) {
    return {Code::kCorrupt, "key " + std::to_string(record.key) + " of table " + table.config.name +
                                " has other live chunks than its row"};
  }
  const Result<uint64_t> slot = impl->residency.AllocateDdr(
      pool, table, static_cast<uint32_t>(record.payload.size()), /*aux_bytes=*/0);
  if (!slot.ok()) return slot.status();
  std::copy(record.payload.begin(), record.payload.end(), pool->arena.Address(slot.value()));
  // Making room may have moved it, if the block could be read then.
  const Location place = holder->place();
  const Location mended(TierId::kDdr, record.live, slot.value());
  impl->store.CountPlace(pool, table, mended, /*taken=*/true);
  holder->Set(mended);
  const Location now = bucket->index.At(entry);
  const bool newest = !now.is_chain() || now.chain() == holder->node;
  if (newest && pool->policy != nullptr) pool->policy->Enter(record.key);
  impl->reclaimer.RetirePlace(pool, table, place);
  ++impl->store.counters.mended_rows;
  return Status::Ok();
}

}  // namespace

std::vector<BadBlock> ServingStore::FindBadBlocks() {
  std::vector<BadBlock> found;
  for (const auto& pool : impl_->store.pools) {
    if (pool->ssd == nullptr || pool->ssd->bad_blocks().empty()) continue;
    const std::set<uint64_t> blocks = pool->ssd->bad_blocks().blocks();
    std::map<uint64_t, BadBlock> bad;
    for (const uint32_t t : pool->tables) {
      const Table& table = impl_->store.tables[t];
      for (uint32_t b = 0; b < table.buckets.size(); ++b) {
        const std::lock_guard writer(pool->writer);
        const uint64_t newest = impl_->store.newest.load();
        Bucket* bucket = CopyAt(pool.get(), table.buckets[b], newest);
        if (bucket == nullptr) continue;
        ForEachBad(pool.get(), blocks, t, bucket, newest, [&](uint64_t key, Location at) {
          bad[BlockLog::BlockOf(at.slot())].rows.push_back({t, b, key});
        });
      }
    }
    for (const uint64_t block : blocks) {
      if (!bad.contains(block)) pool->ssd->bad_blocks().Forget(block, block + 1);
    }
    for (auto& [block, rows] : bad) {
      rows.file = impl_->store.options.ssd_directory + "/" + impl_->store.LogOf(*pool);
      rows.offset = block * kBlockBytes;
      found.push_back(std::move(rows));
    }
  }
  return found;
}

Status ServingStore::Mend(const ReadView& view, uint32_t t, uint32_t b,
                          std::span<const std::byte> records) {
  EMBERTIDE_RETURN_IF_ERROR(impl_->store.CheckBucket(t, b));
  const Table& table = impl_->store.tables[t];
  EMBERTIDE_RETURN_IF_ERROR(ValidateRecords(table, b, records));
  RowPool* pool = impl_->store.PoolOf(table, table.buckets[b].device);
  if (pool->ssd == nullptr) return Status::Ok();
  std::set<uint64_t> keys;
  {
    const std::lock_guard writer(pool->writer);
    Bucket* bucket = CopyAt(pool, table.buckets[b], view.version());
    if (bucket == nullptr) {
      return {Code::kNotOwner, "bucket " + std::to_string(b) + " of table " + table.config.name +
                                   " is not held at version " + std::to_string(view.version())};
    }
    const std::set<uint64_t> blocks = pool->ssd->bad_blocks().blocks();
    ForEachBad(pool, blocks, t, bucket, view.version(),
               [&](uint64_t key, Location) { keys.insert(key); });
  }
  while (!records.empty() && !keys.empty()) {
    const Result<RowRecord> record = ReadRecord(table.config.layout, &records);
    if (record.value().kind != RecordKind::kRow || keys.erase(record.value().key) == 0) continue;
    const std::lock_guard writer(pool->writer);
    EMBERTIDE_RETURN_IF_ERROR(MendOne(impl_.get(), pool, table, b, view.version(), record.value()));
  }
  if (keys.empty()) return Status::Ok();
  return {Code::kNotFound, "there is no row of key " + std::to_string(*keys.begin()) +
                               " of table " + table.config.name + " at version " +
                               std::to_string(view.version()) + " to mend it by"};
}

}  // namespace embertide
