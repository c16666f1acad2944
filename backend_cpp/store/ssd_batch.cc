// Rows of the SSD read at once: see the header.
#include "store/ssd_batch.h"

#include <algorithm>

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
  rows_.clear();
  bytes_ = 0;
  failed_.clear();
}

void SsdBatch::End() {
  if (read_) std::erase(pool_->reading, this);
  read_ = false;
}

bool SsdBatch::Add(const Access& row) {
  Bucket* bucket = nullptr;
  const uint32_t entry = EntryOnSsd(*store_, pool_, row, &bucket);
  if (entry == BucketIndex::kNotFound) return false;
  const Location place = bucket->index.At(entry);
  const uint32_t bytes = ReadOf(*store_, row, place, nullptr).bytes;
  rows_.push_back({row, place, bytes, bytes_, false});
  bytes_ += bytes;
  return true;
}

bool SsdBatch::Read(WriterLock* writer) {
  if (rows_.empty()) return true;
  // A reader like any other, of no version, so that what it reads stays where it is; but not while
  // it waits for the writer lock, whose holder may wait for reads to end.
  const Result<uint32_t> reader = store_->readers.Enter(~0ULL);
  if (!reader.ok()) return false;
  if (memory_.size() < bytes_) memory_.resize(bytes_);
  reads_.clear();
  by_slot_.clear();
  for (uint32_t i = 0; i < rows_.size(); ++i) {
    const Row& row = rows_[i];
    reads_.push_back(ReadOf(*store_, row.row, row.place, memory_.data() + row.at));
    by_slot_.emplace_back(row.place.slot(), i);
  }
  std::ranges::sort(by_slot_);
  pool_->reading.push_back(this);
  read_ = true;
  {
    const Reading reading(&store_->readers, reader.value());
    writer->unlock();
    ReadGood(reads_);
  }
  store_->readers.Leave(reader.value());
  writer->lock();
  return true;
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

void SsdBatch::Forget(uint64_t slot) {
  auto at = std::ranges::lower_bound(by_slot_, std::pair(slot, 0U));
  for (; at != by_slot_.end() && at->first == slot; ++at) rows_[at->second].freed = true;
}

const std::byte* SsdBatch::Bytes(size_t i) const {
  const std::byte* bytes = memory_.data() + rows_[i].at;
  return read_ && !rows_[i].freed && !failed_.contains(bytes) ? bytes : nullptr;
}

Status SsdBatch::StatusOf(size_t i) const {
  const auto failed = failed_.find(memory_.data() + rows_[i].at);
  return failed == failed_.end() || rows_[i].freed ? Status::Ok() : failed->second;
}

}  // namespace embertide
