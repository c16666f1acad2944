// Mending: rows whose block on the SSD is not what was written get their bytes again, from whoever
// knows them. Each step holds the pool's writer for one bucket's entries, or for one row.
#include <set>

#include "store/store_impl.h"

namespace embertide {

std::optional<Store::Impl::Holder> Store::Impl::BadPlace(const RowPool* pool,
                                                         const std::set<uint64_t>& blocks,
                                                         uint32_t table, Bucket* bucket,
                                                         uint32_t entry, uint64_t version) {
  Holder holder{table, bucket, entry, nullptr};
  if (const Location at = bucket->index.At(entry); at.is_chain()) {
    holder.node = at.chain();
    while (holder.node != nullptr && holder.node->version > version) {
      holder.node = holder.node->older.load();
    }
    if (holder.node == nullptr) return std::nullopt;
  }
  const Location place = PlaceOf(holder);
  const bool bad = pool->ssd != nullptr && place.tier() == TierId::kSsd &&
                   blocks.contains(BlockLog::BlockOf(place.slot()));
  return bad ? std::optional(holder) : std::nullopt;
}

template <typename Visit>
void Store::Impl::ForEachBad(const RowPool* pool, const std::set<uint64_t>& blocks, uint32_t table,
                             Bucket* bucket, uint64_t version, const Visit& visit) {
  for (uint32_t e = 0; e < bucket->index.capacity(); ++e) {
    if (!bucket->index.Occupied(e)) continue;
    const auto holder = BadPlace(pool, blocks, table, bucket, e, version);
    if (holder) visit(bucket->index.KeyAt(e), PlaceOf(*holder));
  }
}

Bucket* Store::Impl::CopyAt(const RowPool* pool, const BucketSlot& slot, uint64_t version) {
  Bucket* bucket = slot.newest;
  const bool here = bucket != nullptr && bucket->pool == pool && bucket->since <= version;
  return here ? bucket : nullptr;
}

std::vector<BadBlock> Store::FindBadBlocks() {
  std::vector<BadBlock> found;
  for (const auto& pool : impl_->pools) {
    if (pool->ssd == nullptr || pool->ssd->bad_blocks().empty()) continue;
    const std::set<uint64_t> blocks = pool->ssd->bad_blocks().blocks();
    std::map<uint64_t, BadBlock> bad;
    for (const uint32_t t : pool->tables) {
      const Table& table = impl_->tables[t];
      for (uint32_t b = 0; b < table.buckets.size(); ++b) {
        const std::lock_guard writer(pool->writer);
        const uint64_t newest = impl_->newest.load();
        Bucket* bucket = Impl::CopyAt(pool.get(), table.buckets[b], newest);
        if (bucket == nullptr) continue;
        Impl::ForEachBad(pool.get(), blocks, t, bucket, newest, [&](uint64_t key, Location at) {
          bad[BlockLog::BlockOf(at.slot())].rows.push_back({t, b, key});
        });
      }
    }
    for (const uint64_t block : blocks) {
      if (!bad.contains(block)) pool->ssd->bad_blocks().Forget(block, block + 1);
    }
    for (auto& [block, rows] : bad) {
      rows.file = impl_->options.ssd_directory + "/" + impl_->LogOf(*pool);
      rows.offset = block * kBlockBytes;
      found.push_back(std::move(rows));
    }
  }
  return found;
}

Status Store::Mend(const ReadView& view, uint32_t t, uint32_t b,
                   std::span<const std::byte> records) {
  EMBERTIDE_RETURN_IF_ERROR(impl_->CheckBucket(t, b));
  const Table& table = impl_->tables[t];
  if (impl_->training()) return {Code::kInvalidArgument, "a trainer's rows have an aux besides"};
  EMBERTIDE_RETURN_IF_ERROR(impl_->ProveRecords(table, b, records));
  RowPool* pool = impl_->PoolOf(table, table.buckets[b].device);
  if (pool->ssd == nullptr) return Status::Ok();
  std::set<uint64_t> keys;
  {
    const std::lock_guard writer(pool->writer);
    Bucket* bucket = Impl::CopyAt(pool, table.buckets[b], view.version());
    if (bucket == nullptr) {
      return {Code::kNotOwner, "bucket " + std::to_string(b) + " of table " + table.config.name +
                                   " is not held at version " + std::to_string(view.version())};
    }
    const std::set<uint64_t> blocks = pool->ssd->bad_blocks().blocks();
    Impl::ForEachBad(pool, blocks, t, bucket, view.version(),
                     [&](uint64_t key, Location) { keys.insert(key); });
  }
  while (!records.empty() && !keys.empty()) {
    const Result<RowRecord> record = ReadRecord(table.config.layout, &records);
    if (record.value().kind != RecordKind::kRow || keys.erase(record.value().key) == 0) continue;
    const std::lock_guard writer(pool->writer);
    EMBERTIDE_RETURN_IF_ERROR(impl_->MendOne(pool, table, b, view.version(), record.value()));
  }
  if (keys.empty()) return Status::Ok();
  return {Code::kNotFound, "there is no row of key " + std::to_string(*keys.begin()) +
                               " of table " + table.config.name + " at version " +
                               std::to_string(view.version()) + " to mend it by"};
}

Status Store::Impl::MendOne(RowPool* pool, const Table& table, uint32_t b, uint64_t version,
                            const RowRecord& record) {
  Bucket* bucket = CopyAt(pool, table.buckets[b], version);
  if (bucket == nullptr) return Status::Ok();
  const uint32_t entry = bucket->index.Locate(HashKey(record.key), record.key);
  if (entry == BucketIndex::kNotFound) return Status::Ok();
  const std::set<uint64_t> blocks = pool->ssd->bad_blocks().blocks();
  const auto holder = BadPlace(pool, blocks, table.ordinal, bucket, entry, version);
  if (!holder) return Status::Ok();
  if (PlaceOf(*holder).live() != record.live) {
    return {Code::kCorrupt, "key " + std::to_string(record.key) + " of table " + table.config.name +
                                " has other live chunks than its row"};
  }
  const Result<uint64_t> slot =
      AllocateDdr(pool, table, static_cast<uint32_t>(record.payload.size()), /*aux_bytes=*/0);
  if (!slot.ok()) return slot.status();
  std::copy(record.payload.begin(), record.payload.end(), pool->arena.Address(slot.value()));
  // Making room may have moved it, if the block could be read then.
  const Location place = PlaceOf(*holder);
  const Location mended(TierId::kDdr, record.live, slot.value());
  CountPlace(pool, table, mended, /*taken=*/true);
  SetPlace(*holder, mended);
  const Location now = bucket->index.At(entry);
  const bool newest = !now.is_chain() || now.chain() == holder->node;
  if (newest && pool->policy != nullptr) pool->policy->Enter(record.key);
  RetirePlace(pool, table, place);
  ++mended_rows;
  return Status::Ok();
}

}  // namespace embertide
