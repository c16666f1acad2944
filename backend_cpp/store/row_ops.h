// RowOps: what a lookup does with many keys or rows at once: look into index groups, pool rows,
// add them to a bag's fp64 sums, write a row as floats.
//
// By the widest vectors that this CPU has (AVX-512, AVX2, else the compiler's baseline), chosen
// once; EMBERTIDE_VECTORS=avx512, avx2 or plain in the environment says which. Every way gives the
// same bits: each dimension is added to in the order of the rows. Pure and thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "embertide/row.h"
#include "embertide/store.h"
#include "store/index_group.h"
#include "store/prefetch.h"
#include "store/row_shape.h"

namespace embertide {

// The data that a key's answer is made of.
enum class FoundKind : uint8_t {
  kRow,      // a payload
  kDefault,  // the table's default row
  kSums,     // fp64 sums stand where a payload would
  kNothing,  // nothing: it is in another key's sums
};

// The result of the search for a key.
struct FoundRow {
  const std::byte* payload = nullptr;
  uint16_t live = 0;
  Source source = Source::kDefault;
  FoundKind kind = FoundKind::kRow;
};

// The functions below for one kind of vectors, by DType; null of keys.
struct RowOps {
  using Add = void (*)(const RowLayout& layout, const FoundRow* rows, const float* weights,
                       size_t n, double* sums);
  using Pool = void (*)(const RowLayout& layout, const FoundRow* rows, const float* weights,
                        size_t n, double divisor, double* sums, float* out);
  using Pool32 = void (*)(const RowLayout& layout, const FoundRow* rows, size_t n, double divisor,
                          float* out);
  using Write = void (*)(const RowLayout& layout, const FoundRow* rows, size_t n, float* out,
                         size_t out_stride);
  using Round = void (*)(const double* sums, uint32_t n, double divisor, float* out);
  // hashes[i] = HashKey(keys[i]).
  using Hashes = void (*)(const uint64_t* keys, size_t n, uint64_t* hashes);
  // turned[i] = LeanShape::Turn(hashes[i], bucket_bits).
  using Turn = void (*)(const uint64_t* hashes, size_t n, uint32_t bucket_bits, uint64_t* turned);
  // found[i] = FindIn(groups[i], wanted[i]), by find_plain of plain groups alone.
  using Find = void (*)(const GroupRef* groups, const uint64_t* wanted, size_t n, uint64_t* found);
  // Where rows lie of n <= 64 keys, of which FindIn gave `words` in `groups`, as `shape` says it.
  // One that is a row of DDR gets found[i], and in lines[i] the row's lines; one that goes on gets
  // the line of the group after its own there. Reads and writes up to kPlacedAtOnce - 1 more.
  struct Placed {  // bits of keys
    uint64_t go_on;
    uint64_t other;  // neither; nothing was said of them
  };
  using Place = Placed (*)(const RowShape& shape, const uint64_t* words, const GroupRef* groups,
                           size_t n, FoundRow* found, Lines* lines);
  static constexpr size_t kPlacedAtOnce = 8;
  Hashes hashes;
  Turn turn;
  Place place;
  Find find;
  Find find_plain;
  std::array<Add, kDTypes> add;
  std::array<Pool, kDTypes> pool;
  std::array<Pool32, kDTypes> pool32;
  std::array<Write, kDTypes> write;
  Round round;
};
extern const RowOps* const kRowOps;
// The one that serves the groups of a store.
inline RowOps::Find FindOf(IndexKind index) {
  return index == IndexKind::kLean ? kRowOps->find : kRowOps->find_plain;
}
// Those of "avx512", "avx2" or "plain"; null if this CPU has none, or there is no such level.
const RowOps* RowOpsOf(std::string_view level);

// sums[d] += weights[0] * rows[0][d], then that of rows[1] ..., for layout.dim() sums; a dead chunk
// adds nothing. All are payloads. Null weights are 1 each. More rows at once are quicker, for sums
// then stay in registers.
inline void AddRows(const RowLayout& layout, const FoundRow* rows, const float* weights, size_t n,
                    double* sums) {
  kRowOps->add[static_cast<size_t>(layout.dtype)](layout, rows, weights, n, sums);
}

// out[d] = float((0 + weights[0] * rows[0][d] + weights[1] * rows[1][d] ...) / divisor), added in
// fp64 in that order and rounded once. `sums`: working memory, layout.dim() of them. All are
// payloads. Null weights are 1 each.
inline void PoolRows(const RowLayout& layout, const FoundRow* rows, const float* weights, size_t n,
                     double divisor, double* sums, float* out) {
  kRowOps->pool[static_cast<size_t>(layout.dtype)](layout, rows, weights, n, divisor, sums, out);
}

// As PoolRows, but added and divided in fp32: SumKind::kFp32 says what that means.
inline void PoolRows32(const RowLayout& layout, const FoundRow* rows, size_t n, double divisor,
                       float* out) {
  kRowOps->pool32[static_cast<size_t>(layout.dtype)](layout, rows, n, divisor, out);
}

// Writes n rows as layout.dim() floats each to `out`, out + out_stride, ...; dead chunks become
// zeros. All are payloads.
inline void WriteRows(const RowLayout& layout, const FoundRow* rows, size_t n, float* out,
                      size_t out_stride) {
  kRowOps->write[static_cast<size_t>(layout.dtype)](layout, rows, n, out, out_stride);
}

// out[d] = float(sums[d] / divisor) for n values, rounded once.
inline void RoundSums(const double* sums, uint32_t n, double divisor, float* out) {
  kRowOps->round(sums, n, divisor, out);
}

// The level that is used.
const char* VectorLevel();
// kInvalidArgument if EMBERTIDE_VECTORS names no level, or one that this CPU lacks; stores do not
// open then.
const Status& VectorStatus();

}  // namespace embertide
