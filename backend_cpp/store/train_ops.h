// What a training step does with one row: adds the gradients of its occurrences, and brings the
// step of row-wise Adagrad into the encoded row, in place.
//
// By the widest vectors that this CPU has, as row_ops.h chooses them. Every way gives the same
// bits: a dimension's gradients are added in fp64 in their order; squares are added in sixteen sums
// (dimension d in the d % 16th), which meet in one fixed order; no product is fused with a sum.
// Pure and thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "embertide/row.h"

namespace embertide {

// Training state beside a payload (profile kTrain). Followed by `chunks` floats of utility.
struct RowAux {
  float accumulator = 0.0F;  // row-wise Adagrad's h
  uint32_t changed = 0;      // 1: changed since TakeChanges
};

// The functions for one kind of vectors.
struct TrainOps {
  // Sums `n` > 0 gradients of `dim` floats each into `sums`; returns the sum of their squares.
  using Sum = double (*)(const float* const* gradients, size_t n, uint32_t dim, double* sums);
  // Takes float(step * sums[d]) from each live element d of the row at `payload`. `sums` are
  // unspecified afterwards.
  using Descend = void (*)(const RowLayout& layout, uint16_t live, double* sums, double step,
                           std::byte* payload);
  Sum sum;
  std::array<Descend, 4> descend;  // by DType
};
// Those of "avx512", "avx2" or "plain"; null if this CPU has none, or there is no such level.
const TrainOps* TrainOpsOf(std::string_view level);
// Those of the level that VectorLevel() names.
const TrainOps& ChosenTrainOps();

}  // namespace embertide
