// SlotSampler: slots at random, for policies that rank a sample of the rows instead of all.
//
// Four runs of eight neighbours: as good as 32 slots alone, since neighbours have nothing in common
// once rows have come and gone (measured: equal hit rates), and a quarter of the cache misses.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "embertide/hash.h"

namespace embertide {

// The place with the least rank, found without a branch that depends on it: ranks as integers of
// the same order, each above the number of its place, so that one minimum carries both.
class LeastRank {
 public:
  static constexpr uint32_t kNone = ~0U;
  // Only ranks below `bound` count.
  explicit LeastRank(float bound) : bound_(Ordered(bound)), least_(bound_) {}
  void Add(float rank, uint32_t place) { least_ = std::min(least_, Ordered(rank) | place); }
  // kNone if no rank was below the bound; of equal ones that of the least number.
  uint32_t place() const { return least_ == bound_ ? kNone : static_cast<uint32_t>(least_); }

 private:
  static uint64_t Ordered(float rank) {
    const auto bits = std::bit_cast<uint32_t>(rank);
    const uint32_t flipped = bits >> 31 == 0 ? 1U << 31 : ~0U;
    return uint64_t{bits ^ flipped} << 32;
  }
  const uint64_t bound_;
  uint64_t least_;
};

class SlotSampler {
 public:
  explicit SlotSampler(uint32_t capacity) : capacity_(capacity) {}

  static constexpr uint32_t kNone = LeastRank::kNone;
  // The slot of the least rank that is below `bound`, or kNone, of a sample; of all slots if they
  // are 32 at most. `rank` is asked about free slots, too, and must not place them below `bound`.
  template <typename Rank>
  uint32_t Least(float bound, const Rank& rank) {
    LeastRank least(bound);
    const auto look = [&](uint32_t begin, uint32_t end) {
      for (uint32_t slot = begin; slot < end; ++slot) least.Add(rank(slot), slot);
    };
    if (capacity_ <= kRuns * kRun) {
      look(0, capacity_);
      return least.place();
    }
    for (uint32_t run = 0; run < kRuns; ++run) {
      const uint32_t begin = Below(capacity_ - kRun + 1);
      look(begin, begin + kRun);
    }
    return least.place();
  }
  // As Least without a bound, and goes on beyond the sample until it meets a row. Requires: there
  // is one whose rank is finite.
  template <typename Rank>
  uint32_t LeastOfAny(const Rank& rank) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    const uint32_t least = Least(kInfinity, rank);
    if (least != kNone) return least;
    uint32_t slot = Below(capacity_);
    while (rank(slot) == kInfinity) slot = slot + 1 == capacity_ ? 0 : slot + 1;
    return slot;
  }

 private:
  static constexpr uint32_t kRuns = 4;
  static constexpr uint32_t kRun = 8;
  uint32_t Below(uint32_t bound) {
    return static_cast<uint32_t>((HashKey(draws_++) >> 32) * bound >> 32);
  }

  const uint32_t capacity_;
  uint64_t draws_ = 0;
};

}  // namespace embertide
