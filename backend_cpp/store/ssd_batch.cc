// Rows of the SSD read at once: see the header.
#include "store/ssd_batch.h"

namespace embertide {

uint32_t EntryOnSsd(const StoreState& store, RowPool* pool, const Access& row, Bucket** bucket) {
  const Table& table = store.tables[row.table];
  const uint64_t hash = HashKey(row.key);
  *bucket = table.In(pool, hash);
  if (*bucket == nullptr) return BucketIndex::kNotFound;
  const BucketIndex& index = (*bucket)->index;
  const uint32_t entry = index.Locate(hash, row.key);
  if (entry == BucketIndex::kNotFound) return entry;
  const Location place = index.At(entry);
  return !place.is_chain() && place.tier() == TierId::kSsd ? entry : BucketIndex::kNotFound;
}

LogRead ReadOf(const StoreState& store, const Access& row, Location place, std::byte* to) {
  const Table& table = store.tables[row.table];
  return {place.slot(), row.key, row.table,
          table.config.layout.PayloadBytes(place.live()) + store.AuxBytes(table), to};
}

void SsdBatch::Begin(const StoreState* store, RowPool* pool) {
  End();
  store_ = store;
  pool_ = pool;
}

void SsdBatch::End() {
  for (const Row& row : rows_) pool_->ssd->Unpin(row.place.slot());
  rows_.clear();
  bytes_ = 0;
  failed_.clear();
}

bool SsdBatch::Add(const Access& row) {
  Bucket* bucket = nullptr;
  const uint32_t entry = EntryOnSsd(*store_, pool_, row, &bucket);
  if (entry == BucketIndex::kNotFound) return false;
  const Location place = bucket->index.At(entry);
  const uint32_t bytes = ReadOf(*store_, row, place, nullptr).bytes;
  pool_->ssd->Pin(place.slot());
  rows_.push_back({row, place, bytes, bytes_});
  bytes_ += bytes;
  return true;
}

void SsdBatch::Read(WriterLock* writer) {
  if (rows_.empty()) return;
  if (memory_.size() < bytes_) memory_.resize(bytes_);
  reads_.clear();
  for (const Row& row : rows_) {
    reads_.push_back(ReadOf(*store_, row.row, row.place, memory_.data() + row.at));
  }
  WithoutWriter(writer, [this] { ReadGood(reads_); });
}

void SsdBatch::ReadGood(std::span<LogRead> reads) {
  const Status status = pool_->ssd->Read(reads);
  if (status.ok()) return;
  if (reads.size() == 1) {
    failed_.emplace(reads[0].to, status);
    return;
  }
  ReadGood(reads.first(reads.size() / 2));
  ReadGood(reads.subspan(reads.size() / 2));
}

const std::byte* SsdBatch::Bytes(size_t i) const {
  const std::byte* bytes = memory_.data() + rows_[i].at;
  return failed_.contains(bytes) ? nullptr : bytes;
}

Status SsdBatch::StatusOf(size_t i) const {
  const auto failed = failed_.find(memory_.data() + rows_[i].at);
  return failed == failed_.end() ? Status::Ok() : failed->second;
}

}  // namespace embertide
