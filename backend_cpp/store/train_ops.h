// What a training step does with one row: adds the gradients of its occurrences, brings the step of
// row-wise Adagrad into the encoded row, in place, and keeps the utility of its chunks.
//
// By the widest vectors that this CPU has, as row_ops.h chooses them. Every way gives the same
// bits: a dimension's gradients are added in fp64 in their order; a chunk's squares are added in
// sixteen sums (its dimension d in the d % 16th), which meet in one fixed order; no product is
// fused with a sum. Pure and thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "embertide/prune.h"
#include "embertide/row.h"

namespace embertide {

// Training state beside a payload (profile kTrain). Followed by `chunks` floats of utility, as it
// was in the step `tick`, of dead chunks too.
struct RowAux {
  float accumulator = 0.0F;  // row-wise Adagrad's h
  uint32_t changed : 1 = 0;  // since TakeChanges
  uint32_t tick : 31 = 0;    // the step that last used the row; steps are counted modulo 2^31

  float* utility() { return reinterpret_cast<float*>(this + 1); }
  static constexpr uint32_t kTicks = 1U << 31;
  static uint32_t Steps(uint32_t from, uint32_t to) { return (to - from) % kTicks; }
};

// Of the sums of a key's gradients, by chunk.
using ChunkSquares = std::array<double, kMaxChunks>;

// The functions for one kind of vectors.
struct TrainOps {
  // Sums `n` > 0 gradients of layout.dim() floats each into `sums`.
  using Sum = void (*)(const RowLayout& layout, const float* const* gradients, size_t n,
                       double* sums, ChunkSquares* squares);
  // Each chunk's utility u becomes `kept` * u + what the UtilityKind says, rounded once.
  using Use = void (*)(uint32_t chunks, const ChunkSquares& squares, uint32_t accesses, double kept,
                       float* utility);
  // Takes float(step * sums[d]) from each live element d of the row at `payload`. `sums` are
  // unspecified afterwards.
  using Descend = void (*)(const RowLayout& layout, uint16_t live, double* sums, double step,
                           std::byte* payload);
  Sum sum;
  std::array<Use, 3> use;          // by UtilityKind
  std::array<Descend, 4> descend;  // by DType
};
// Those of "avx512", "avx2" or "plain"; null if this CPU has none, or there is no such level.
const TrainOps* TrainOpsOf(std::string_view level);
// Those of the level that VectorLevel() names.
const TrainOps& ChosenTrainOps();

}  // namespace embertide
