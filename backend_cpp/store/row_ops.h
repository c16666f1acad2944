// What a lookup does with a found row: copy it, or add it to a bag's fp64 sums.
//
// Whole fp32 rows, which nearly all are, take a short way: a copy as it stands, and sums by the
// widest vectors of this CPU. Every way gives the same bits: each dimension is added to in order.
// Pure and thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "embertide/row.h"

namespace embertide {

// out[d] = values[d] for n floats, at any alignment; most rows are whole cache lines.
inline void CopyFloats(const std::byte* values, uint32_t n, float* out) {
  constexpr uint32_t kLineFloats = 16;
  for (; n >= kLineFloats; n -= kLineFloats) {
    std::memcpy(out, values, kLineFloats * sizeof(float));
    values += kLineFloats * sizeof(float);
    out += kLineFloats;
  }
  if (n > 0) std::memcpy(out, values, n * sizeof(float));
}

// sums[d] += values[d] for n floats, at any alignment.
void AddFloats(const std::byte* values, uint32_t n, double* sums);

// Rows of one table that take the short way.
inline bool IsWholeFp32(const RowLayout& layout, uint16_t live) {
  return layout.dtype == DType::kFp32 && live == layout.full_mask();
}

}  // namespace embertide
