// TrainOps: what a training step does with one row: adds the gradients of its occurrences, makes
// the optimizer's step of them, brings that into the encoded row, in place, and keeps the utility
// of its chunks.
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

#include "embertide/optimizer.h"
#include "embertide/prune.h"
#include "embertide/row.h"

namespace embertide {

// Training state beside a payload (profile kTrain), zeros for a new row:
//
//   [RowAux][utility: a float a chunk][t: u32, where steps are counted][a float an element, if
//   kept]
//
// Utility is what it was in the step `tick`, of dead chunks too. The state of a dead chunk's
// elements is zero.
struct RowAux {
  float accumulator = 0.0F;  // row-wise Adagrad's h, row-wise Adam's v; else 0
  uint32_t changed : 1 = 0;  // since TakeChanges
  uint32_t tick : 31 = 0;    // the step that last used the row; steps are counted modulo 2^31

  float* utility() { return reinterpret_cast<float*>(this + 1); }
  // Requires: CountsSteps.
  uint32_t* steps(const RowLayout& layout) {
    return reinterpret_cast<uint32_t*>(utility() + layout.chunks);
  }
  // Requires: KeepsElements.
  float* elements(Optimizer optimizer, const RowLayout& layout) {
    return utility() + layout.chunks + (CountsSteps(optimizer) ? 1 : 0);
  }
  // With all that follows.
  static uint32_t Bytes(Optimizer optimizer, const RowLayout& layout) {
    const uint32_t words = layout.chunks + (CountsSteps(optimizer) ? 1U : 0U) +
                           (KeepsElements(optimizer) ? layout.dim() : 0U);
    return static_cast<uint32_t>(sizeof(RowAux)) + 4U * words;
  }
  static constexpr uint32_t kTicks = 1U << 31;
  static uint32_t Steps(uint32_t from, uint32_t to) { return (to - from) % kTicks; }
};

// The squares of the sums of a key's gradients, added up by chunk.
using ChunkSquares = std::array<double, kMaxChunks>;

// The functions for one kind of vectors.
struct TrainOps {
  // Sums `n` > 0 gradients of layout.dim() floats each into `sums`.
  using Sum = void (*)(const RowLayout& layout, const float* const* gradients, size_t n,
                       double* sums, ChunkSquares* squares);
  // Each chunk's utility u becomes `kept` * u + what the UtilityKind says, rounded once.
  using Use = void (*)(uint32_t chunks, const ChunkSquares& squares, uint32_t accesses, double kept,
                       float* utility);
  // Adagrad. For each live element d, with g = scale * sums[d]: g^2 is added to elements[d], or to
  // `initial` where that is 0, and the sum h rounded to a float; sums[d] becomes g / (sqrt(h) +
  // epsilon).
  using Adagrad = void (*)(const RowLayout& layout, uint16_t live, double scale, float initial,
                           double epsilon, float* elements, double* sums);
  // Adam's first moment: of each live element d, elements[d] becomes float(kept * elements[d] +
  // taken * sums[d]), and sums[d] the same.
  using Momentum = void (*)(const RowLayout& layout, uint16_t live, double kept, double taken,
                            float* elements, double* sums);
  // Takes float(step * sums[d]) from each live element d of the row at `payload`. `sums` are
  // unspecified afterwards.
  using Descend = void (*)(const RowLayout& layout, uint16_t live, double* sums, double step,
                           std::byte* payload);
  Sum sum;
  std::array<Use, 3> use;  // by UtilityKind
  Adagrad adagrad;
  Momentum momentum;
  std::array<Descend, 4> descend;  // by DType
};
// Those of "avx512", "avx2" or "plain"; null if this CPU has none, or there is no such level.
const TrainOps* TrainOpsOf(std::string_view level);
// Those of the level that VectorLevel() names.
const TrainOps& ChosenTrainOps();

}  // namespace embertide
