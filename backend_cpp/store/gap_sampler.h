// GapSampler: how many keys to pass over between two that are sampled, cheap and the same in every
// run.
#pragma once

#include <cstdint>

namespace embertide {

// Gaps vary: steady ones would meet the same features again and again.
class GapSampler {
 public:
  // Keys to pass over, `every` - 1 on average.
  uint32_t Gap(uint32_t every) {
    state_ = state_ * 1664525 + 1013904223;  // Numerical Recipes, 2nd edition, 7.1
    return (state_ >> 16) % (2 * every - 1);
  }

 private:
  uint32_t state_ = 1;
};

}  // namespace embertide
