// SlotSampler: slots at random, for policies that rank a sample of the rows instead of all.
//
// Four runs of eight neighbours: as good as 32 slots alone, since neighbours have nothing in common
// once rows have come and gone (measured: equal hit rates), and a quarter of the cache misses.
#pragma once

#include <cstdint>
#include <limits>

#include "embertide/hash.h"

namespace embertide {

class SlotSampler {
 public:
  explicit SlotSampler(uint32_t capacity) : capacity_(capacity) {}

  static constexpr uint32_t kNone = ~0U;
  // The slot of the least rank that is below `bound`, or kNone, of a sample; of all slots if they
  // are 32 at most. `rank` is asked about free slots, too, and must not place them below `bound`.
  template <typename Rank>
  uint32_t Least(float bound, const Rank& rank) {
    if (capacity_ <= kRuns * kRun) return LeastOf(0, capacity_, &bound, rank);
    uint32_t least = kNone;
    for (uint32_t run = 0; run < kRuns; ++run) {
      const uint32_t begin = Below(capacity_ - kRun + 1);
      const uint32_t found = LeastOf(begin, begin + kRun, &bound, rank);
      if (found != kNone) least = found;
    }
    return least;
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
  template <typename Rank>
  static uint32_t LeastOf(uint32_t begin, uint32_t end, float* bound, const Rank& rank) {
    uint32_t least = kNone;
    for (uint32_t slot = begin; slot < end; ++slot) {
      const float its = rank(slot);
      if (its >= *bound) continue;
      *bound = its;
      least = slot;
    }
    return least;
  }
  uint32_t Below(uint32_t bound) {
    return static_cast<uint32_t>((HashKey(draws_++) >> 32) * bound >> 32);
  }

  const uint32_t capacity_;
  uint64_t draws_ = 0;
};

}  // namespace embertide
