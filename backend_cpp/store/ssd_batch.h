// SsdBatch: rows of the SSD that a writer reads at once, each block once, without holding the
// pool's writer lock while the drive works.
//
//   with the lock      Add(row) ...          notes where each row lies, and pins its segment
//   lets go of it      Read
//   with it again      Bytes(i)
//                      End                   what was freed meanwhile may be written over
//
// A row on the SSD never changes there: if the index still names the place, the bytes are the
// row's. That is for the caller to look at, who may let go of the writer again before End. It is no
// reader of the store: what others unlink while the drive works is freed at once.
//
// Used by one thread. Its memory is kept for the next batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "store/row_pool.h"
#include "store/store_state.h"

namespace embertide {

// The entry of a row whose newest place is on the SSD; kNotFound: it has none there. Requires: the
// pool's writer.
uint32_t EntryOnSsd(const StoreState& store, RowPool* pool, const Access& row, Bucket** bucket);
// How a row at a place of the SSD is read.
LogRead ReadOf(const StoreState& store, const Access& row, Location place, std::byte* to);

class SsdBatch {
 public:
  SsdBatch() = default;
  SsdBatch(const SsdBatch&) = delete;
  SsdBatch& operator=(const SsdBatch&) = delete;
  // Requires: if it was not ended, the pool's writer.
  ~SsdBatch() { End(); }

  // Ends the batch before. Requires: as all that follow, the pool's writer.
  void Begin(const StoreState* store, RowPool* pool);
  // Adds a row; false: its newest place is not on the SSD.
  bool Add(const Access& row);
  // Reads them, with `writer` unlocked.
  void Read(WriterLock* writer);
  // Lets go of the rows; what was read is not to be used any more.
  void End();

  size_t size() const { return rows_.size(); }
  // Whether it is to be read before more is added: with far more rows than a drive's queue, yet no
  // more than it reads in a tenth of a second, for segments that empty meanwhile stay.
  bool full() const { return rows_.size() >= kMaxRows || bytes_ >= kMaxBytes; }
  const Access& row(size_t i) const { return rows_[i].row; }
  Location place(size_t i) const { return rows_[i].place; }
  uint32_t bytes_of(size_t i) const { return rows_[i].bytes; }
  // Payload and aux; null: they could not be read.
  const std::byte* Bytes(size_t i) const;
  // Why they could not; Ok: they were.
  Status StatusOf(size_t i) const;

 private:
  static constexpr size_t kMaxRows = 8192;
  static constexpr uint64_t kMaxBytes = 8U << 20;
  struct Row {
    Access row;
    Location place;
    uint32_t bytes;
    uint64_t at;  // in memory_
  };
  // All but those that fail, whose errors are noted.
  void ReadGood(std::span<LogRead> reads);

  const StoreState* store_ = nullptr;
  RowPool* pool_ = nullptr;
  std::vector<Row> rows_;
  uint64_t bytes_ = 0;
  std::vector<std::byte> memory_;
  std::vector<LogRead> reads_;
  std::map<const std::byte*, Status> failed_;  // by where the row's bytes would stand
};

}  // namespace embertide
