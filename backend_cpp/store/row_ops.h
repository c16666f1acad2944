// What a lookup does with many keys or rows at once: hash keys, look into index groups, add rows to
// a bag's fp64 sums, write a row as floats.
//
// By the widest vectors that this CPU has (AVX-512, AVX2, else the compiler's baseline), chosen
// once; EMBERTIDE_VECTORS=avx2 or =plain in the environment forbids wider ones. Every way gives the
// same bits: each dimension is added to in the order of the rows. Pure and thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "embertide/row.h"
#include "store/bucket_index.h"

namespace embertide {

// An encoded row.
struct EncodedRow {
  const std::byte* payload = nullptr;
  uint16_t live = 0;
};

// The functions below for one kind of vectors, by DType.
struct RowOps {
  using Add = void (*)(const RowLayout& layout, const EncodedRow* rows, size_t n, double* sums);
  using Write = void (*)(const RowLayout& layout, const EncodedRow& row, float* out);
  using Round = void (*)(const double* sums, uint32_t n, double divisor, float* out);
  // hashes[i] = HashKey(keys[i]); `keys` are written as unsigned numbers to `plain`.
  using Hash = void (*)(const int64_t* keys, size_t n, uint64_t* plain, uint64_t* hashes);
  // words[i] = BucketIndex::WordIn(*groups[i], keys[i]).
  using Words = void (*)(const BucketIndex::Group* const* groups, const uint64_t* keys, size_t n,
                         uint64_t* words);
  Hash hash;
  Words words;
  std::array<Add, 4> add;
  std::array<Write, 4> write;
  Round round;
};
extern const RowOps* const kRowOps;
// Those of "avx512", "avx2" or "plain"; null if this CPU has none, or there is no such level.
const RowOps* RowOpsOf(std::string_view level);

// sums[d] += rows[0][d], then rows[1][d] ..., for layout.dim() sums; a dead chunk adds nothing.
// More rows at once are quicker, for sums then stay in registers.
inline void AddRows(const RowLayout& layout, const EncodedRow* rows, size_t n, double* sums) {
  kRowOps->add[static_cast<size_t>(layout.dtype)](layout, rows, n, sums);
}

// out[d] = row[d] for layout.dim() floats; dead chunks become zeros.
inline void WriteRow(const RowLayout& layout, const EncodedRow& row, float* out) {
  kRowOps->write[static_cast<size_t>(layout.dtype)](layout, row, out);
}

// out[d] = float(sums[d] / divisor) for n values, rounded once.
inline void RoundSums(const double* sums, uint32_t n, double divisor, float* out) {
  kRowOps->round(sums, n, divisor, out);
}

// The level that is used.
const char* VectorLevel();

}  // namespace embertide
