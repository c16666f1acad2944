// DistinctKeys: how many different keys there were, within some percent, in 2 KiB however many.
//
// HyperLogLog (Flajolet et al. 2007) with 2,048 registers of a byte, standard error 2.3 %, and
// linear counting where few are set. One thread at a time.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

namespace embertide {

class DistinctKeys {
 public:
  void Add(uint64_t hash) {
    uint8_t& most = registers_[hash >> (64 - kBits)];
    const auto zeros = static_cast<uint8_t>(std::countl_zero(hash << kBits | 1U) + 1);
    most = std::max(most, zeros);
  }
  // Counts the keys of both, each once.
  void Merge(const DistinctKeys& other) {
    for (uint32_t i = 0; i < kRegisters; ++i) {
      registers_[i] = std::max(registers_[i], other.registers_[i]);
    }
  }
  double Estimate() const {
    double sum = 0.0;
    uint32_t unset = 0;
    for (const uint8_t each : registers_) {
      sum += std::bit_cast<double>(uint64_t{1023U - each} << 52);  // 2^-each
      unset += static_cast<uint32_t>(each == 0);
    }
    const double estimate = 0.7213 / (1.0 + 1.079 / kRegisters) * kRegisters * kRegisters / sum;
    if (unset == 0 || estimate > 2.5 * kRegisters) return estimate;
    return kRegisters * std::log(static_cast<double>(kRegisters) / unset);
  }

 private:
  static constexpr uint32_t kBits = 11;
  static constexpr uint32_t kRegisters = 1U << kBits;
  std::array<uint8_t, kRegisters> registers_{};
};

}  // namespace embertide
