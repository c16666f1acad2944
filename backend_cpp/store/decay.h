// Decay: what is left of a number that is multiplied by a factor in each step, after many steps at
// once. The same bits for the same factor and count, on any machine.
#pragma once

#include <array>
#include <cstdint>

namespace embertide {

// Immutable; any thread.
class Decay {
 public:
  // `factor`: a step's, at most 1.
  explicit Decay(double factor) {
    for (auto& powers : powers_) {
      powers[0] = 1.0;
      for (size_t i = 1; i < kDigit; ++i) powers[i] = powers[i - 1] * factor;
      factor *= powers[kDigit - 1];
    }
  }
  double Over(uint32_t steps) const {
    const double kept = powers_[0][steps % kDigit] * powers_[1][steps / kDigit % kDigit];
    if (steps < kDigit * kDigit) [[likely]]
      return kept;
    const uint32_t rest = steps / (kDigit * kDigit);
    return kept * powers_[2][rest % kDigit] * powers_[3][rest / kDigit];
  }

 private:
  static constexpr uint32_t kDigit = 256;  // a count of steps is four such digits
  std::array<std::array<double, kDigit>, 4> powers_;
};

}  // namespace embertide
