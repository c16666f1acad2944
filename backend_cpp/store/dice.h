// Dice: chance for sampling, cheap and the same in every run.
#pragma once

#include <cstdint>

namespace embertide {

// Gaps between sampled keys. They vary: steady ones would meet the same features again and again.
class Dice {
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
