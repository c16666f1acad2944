// Prices of chunks: one price a byte for all rows of a group of tables, so that what is worth it
// fits the bytes that the group may have (docs/design/0008-pruning.md).
//
//   a chunk is kept     if its utility exceeds price x its bytes
//   a row is kept       if what its kept chunks and its counters are worth over that exceeds price
//   x
//                       what the row costs beside them: index entry, optimizer state, utilities
//
// A row that is kept has its counters, be it without chunks.
//
// Bytes are integers and a sum of them is the same in any order, so neither depends on the order in
// which rows are met. Pure and thread-safe.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <vector>

#include "embertide/table.h"
#include "store/train_ops.h"

namespace embertide {

// An index entry, of arrays as full as they are on average.
inline constexpr uint32_t kEntryBytes = 24;

// The cost of rows of a table.
struct RowCost {
  uint32_t chunks = 0;  // that gradients teach
  uint32_t chunk_bytes = 0;
  uint32_t row_bytes = 0;      // beside chunks and counters: the scale, aux, the index entry
  uint16_t counters = 0;       // chunks that a kept row always has ...
  uint32_t counter_bytes = 0;  // ... and their bytes

  static RowCost Of(const TableConfig& table, uint32_t aux_bytes) {
    const RowLayout& layout = table.layout;
    const RowLayout learned = table.learned();
    const auto counters = static_cast<uint16_t>(layout.full_mask() & ~learned.full_mask());
    const uint32_t scale = layout.scale_bytes();
    return {learned.chunks, layout.chunk_bytes(), scale + aux_bytes + kEntryBytes, counters,
            layout.PayloadBytes(counters)};
  }
  // Bytes of a row with these live chunks.
  uint64_t Bytes(uint16_t live) const {
    const auto learned = static_cast<uint16_t>(live & ~counters);
    return LeastBytes() + uint64_t{chunk_bytes} * static_cast<uint32_t>(std::popcount(learned));
  }
  uint64_t FullBytes() const { return LeastBytes() + uint64_t{chunk_bytes} * chunks; }
  // Without chunks.
  uint64_t LeastBytes() const { return uint64_t{row_bytes} + counter_bytes; }
  // Numbers of a row's utility: its chunks', then its counters', if it can have some.
  uint32_t utilities() const { return chunks + (counters != 0 ? 1U : 0U); }
  // The chunks that are worth `price` utility a byte; 0: the row is not.
  uint16_t WorthKeeping(const float* utility, float price) const {
    const double chunk_price = static_cast<double>(price) * chunk_bytes;
    double surplus = counters != 0 ? static_cast<double>(utility[chunks]) : 0.0;
    uint32_t kept = counters;
    for (uint32_t c = 0; c < chunks; ++c) {
      const double over = static_cast<double>(utility[c]) - chunk_price;
      if (over <= 0.0) continue;
      surplus += over;
      kept |= 1U << c;
    }
    // Without a price nothing is too little, but for what was never of use.
    const bool worth = surplus > static_cast<double>(price) * static_cast<double>(LeastBytes());
    return worth ? static_cast<uint16_t>(kept) : uint16_t{0};
  }
};

// Rows that stand for all of their group.
class PriceSample {
 public:
  void Add(const RowCost& cost, const float* utility) {
    rows_.push_back({cost, utilities_.size()});
    utilities_.insert(utilities_.end(), utility, utility + cost.utilities());
  }
  size_t size() const { return rows_.size(); }
  // Bytes of the rows and chunks that are worth that price.
  uint64_t BytesAt(float price) const {
    uint64_t bytes = 0;
    for (const Row& row : rows_) {
      const uint16_t kept = row.cost.WorthKeeping(utilities_.data() + row.first, price);
      if (kept != 0) bytes += row.cost.Bytes(kept);
    }
    return bytes;
  }
  // The least price at which they take `bytes` at most; 0 if they do so anyhow.
  float PriceFor(uint64_t bytes) const {
    // A price's bits, as a number, are in the order of prices.
    uint32_t enough = std::bit_cast<uint32_t>(std::numeric_limits<float>::max());
    uint32_t little = 0;
    if (BytesAt(0.0F) <= bytes) return 0.0F;
    while (enough - little > 1) {
      const uint32_t middle = little + (enough - little) / 2;
      (BytesAt(std::bit_cast<float>(middle)) <= bytes ? enough : little) = middle;
    }
    return std::bit_cast<float>(enough);
  }

 private:
  struct Row {
    RowCost cost;
    size_t first;  // of its utilities
  };
  std::vector<Row> rows_;
  std::vector<float> utilities_;
};

}  // namespace embertide
