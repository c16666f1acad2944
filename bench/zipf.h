// Ranks by a Zipf law, for benchmarks.
#pragma once

#include <cmath>
#include <cstdint>

namespace embertide {

// The rank, from 1 below `rows`, at `u` of [0, 1) in the law of weights rank^-exponent; by
// inversion of its continuous form. Requires: the exponent is not 1.
inline uint64_t ZipfRank(double u, uint64_t rows, double exponent) {
  const double power = 1.0 - exponent;
  const double top = std::pow(static_cast<double>(rows), power) - 1.0;
  return static_cast<uint64_t>(std::pow(u * top + 1.0, 1.0 / power));
}

}  // namespace embertide
