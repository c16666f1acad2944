// FrequencySketch: how often a key was asked for of late, in 8 bytes for each slot of its tier.
//
// A count-min sketch of four rows of 4-bit counters (Cormode & Muthukrishnan), all halved once as
// many accesses were added as `10 x slots` (TinyLFU's aging). An estimate is never below the true
// number of additions since two halvings ago, halved as they were, up to 15.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "embertide/hash.h"

namespace embertide {

class FrequencySketch {
 public:
  static constexpr uint32_t kMost = 15;
  // Why 64 words: of so few keys, no two should share all four counters.
  static constexpr uint32_t kMinWords = 64;
  explicit FrequencySketch(uint32_t slots)
      : words_(BytesFor(slots) / sizeof(uint64_t)), until_aging_(uint64_t{10} * words_.size()) {}

  // Adds an access and returns the estimate with it.
  uint32_t Add(uint64_t key) {
    // Aging comes first, so that what is returned holds until the next call.
    if (until_aging_-- == 0) Age();
    const uint64_t hash = HashKey(key);
    uint32_t least = kMost;
    for (uint32_t row = 0; row < kRows; ++row) {
      uint64_t& word = words_[WordOf(hash, row)];
      const uint32_t shift = ShiftOf(hash, row);
      uint32_t count = (word >> shift) & kMost;
      if (count < kMost) {
        word += uint64_t{1} << shift;
        ++count;
      }
      least = std::min(least, count);
    }
    return least;
  }
  uint32_t Estimate(uint64_t key) const {
    const uint64_t hash = HashKey(key);
    uint32_t least = kMost;
    for (uint32_t row = 0; row < kRows; ++row) {
      const uint64_t word = words_[WordOf(hash, row)];
      least = std::min(least, static_cast<uint32_t>(word >> ShiftOf(hash, row)) & kMost);
    }
    return least;
  }
  static uint64_t BytesFor(uint32_t slots) {
    return uint64_t{std::bit_ceil(std::max(slots, kMinWords))} * sizeof(uint64_t);
  }
  uint64_t bytes() const { return words_.size() * sizeof(uint64_t); }

 private:
  static constexpr uint32_t kRows = 4;
  size_t WordOf(uint64_t hash, uint32_t row) const {
    // An odd multiplier a row makes four places of one hash.
    return (hash * (kHashSeed + 2 * row) >> 32) & (words_.size() - 1);
  }
  // Four counters of a word belong to each row.
  static uint32_t ShiftOf(uint64_t hash, uint32_t row) {
    return 16 * row + 4 * static_cast<uint32_t>(hash >> (2 * row) & 3);
  }
  void Age() {
    for (uint64_t& word : words_) word = (word >> 1) & 0x7777777777777777ULL;
    until_aging_ = uint64_t{5} * words_.size();
  }

  std::vector<uint64_t> words_;
  uint64_t until_aging_;
};

}  // namespace embertide
