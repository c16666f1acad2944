// The loops behind row_ops.h, compiled once for each kind of vectors: a file says how many floats
// go at a time (kWidth) and includes this, under the compiler's flags for that CPU. Everything has
// internal linkage and calls nothing of the library, so that no wide instruction leaves the file.
#include <cstring>

#include "store/row_ops.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace embertide {
namespace {

using Floats = float __attribute__((vector_size(4 * kWidth)));
using HalfFloats = float __attribute__((vector_size(2 * kWidth)));
using Doubles = double __attribute__((vector_size(4 * kWidth)));  // half as many values
constexpr uint32_t kHalf = kWidth / 2;
// Sums that stay in registers while rows are added: of AVX-512's 32 registers 64 doubles fill 8.
constexpr uint32_t kPassFloats = 8 * kHalf;

template <typename T>
inline T Load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <typename T>
inline void Save(const T& value, void* to) {
  std::memcpy(to, &value, sizeof(value));
}

// How elements of a dtype become floats, kWidth of them or one. `scale` is int8's.
struct Fp32 {
  static constexpr uint32_t kBytes = 4;
  static constexpr bool kScaled = false;
  static Floats Many(const std::byte* from, float) { return Load<Floats>(from); }
  static float One(const std::byte* from, float) { return Load<float>(from); }
};

struct Fp16 {
  static constexpr uint32_t kBytes = 2;
  static constexpr bool kScaled = false;
  static float One(const std::byte* from, float) {
#if defined(__F16C__)
    return _cvtsh_ss(Load<uint16_t>(from));
#else
    return static_cast<float>(Load<_Float16>(from));
#endif
  }
  static Floats Many(const std::byte* from, float scale) {
#if defined(__AVX512F__)
    (void)scale;
    return reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(0xffff, Load<__m256i>(from)));
#elif defined(__F16C__)
    (void)scale;
    return reinterpret_cast<Floats>(_mm256_cvtph_ps(Load<__m128i>(from)));
#else
    Floats values;
    for (uint32_t i = 0; i < kWidth; ++i) values[i] = One(from + i * kBytes, scale);
    return values;
#endif
  }
};

struct Bf16 {
  static constexpr uint32_t kBytes = 2;
  static constexpr bool kScaled = false;
  using Shorts = uint16_t __attribute__((vector_size(2 * kWidth)));
  using Words = uint32_t __attribute__((vector_size(4 * kWidth)));
  static Floats Many(const std::byte* from, float) {
    return reinterpret_cast<Floats>(__builtin_convertvector(Load<Shorts>(from), Words) << 16);
  }
  static float One(const std::byte* from, float) {
    return __builtin_bit_cast(float, uint32_t{Load<uint16_t>(from)} << 16);
  }
};

struct Int8 {
  static constexpr uint32_t kBytes = 1;
  static constexpr bool kScaled = true;
  using Bytes = int8_t __attribute__((vector_size(kWidth)));
  using Words = int32_t __attribute__((vector_size(4 * kWidth)));
  static Floats Many(const std::byte* from, float scale) {
    const Words words = __builtin_convertvector(Load<Bytes>(from), Words);
    return __builtin_convertvector(words, Floats) * scale;
  }
  static float One(const std::byte* from, float scale) {
    return scale * static_cast<float>(Load<int8_t>(from));
  }
};

// What stands for the elements of a dead chunk.
alignas(64) constexpr std::byte kZeros[4 * kWidth] = {};

// A row's elements, from the first dimension on.
template <typename D>
struct Elements {
  explicit Elements(const FoundRow& row) : at(row.payload) {
    if (D::kScaled && row.live != 0) {
      scale = Load<float>(at);
      at += sizeof(float);
    }
  }
  const std::byte* at;
  float scale = 0.0F;
};

inline Doubles Widen(HalfFloats values) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtps_pd(0xff, values);  // __builtin_convertvector takes two steps
#else
  return __builtin_convertvector(values, Doubles);
#endif
}

inline HalfFloats Half(const Floats& values, uint32_t which) {
  return Load<HalfFloats>(reinterpret_cast<const std::byte*>(&values) + which * sizeof(HalfFloats));
}

// Where sums come from and go to: memory, or nowhere and, rounded, the output.
struct ToSums {
  double* sums;
  Doubles Begin(uint32_t d) const { return Load<Doubles>(sums + d); }
  void End(const Doubles& total, uint32_t d) const { Save(total, sums + d); }
};

struct ToFloats {
  float* out;
  double divisor;
  static Doubles Begin(uint32_t) { return Doubles{}; }
  void End(const Doubles& total, uint32_t d) const {
    // Dividing by one changes nothing but takes as long as a row.
    const Doubles value = divisor == 1.0 ? total : total / divisor;
    Save(__builtin_convertvector(value, HalfFloats), out + d);
  }
};

// Dimensions [first, first + kSteps * kWidth) of all rows. Rows that are not whole: of layouts
// whose chunks are multiples of kWidth.
template <typename D, bool kWhole, uint32_t kSteps, typename To>
void AddPass(const RowLayout& layout, const FoundRow* rows, size_t n, uint32_t first, To to) {
  Doubles total[2 * kSteps];
  for (uint32_t s = 0; s < 2 * kSteps; ++s) total[s] = to.Begin(first + s * kHalf);
  const uint32_t chunk_dim = layout.chunk_dim;
  for (size_t r = 0; r < n; ++r) {
    const FoundRow& row = rows[r];
    Elements<D> from(row);
    uint32_t chunk = 0;
    uint32_t left = 0;  // dimensions of `chunk` to come
    if (kWhole) {
      from.at += size_t{first} * D::kBytes;
    } else {
      chunk = first / chunk_dim;
      left = chunk_dim - first % chunk_dim;
      const auto before =
          static_cast<uint32_t>(__builtin_popcount(row.live & ((1U << chunk) - 1U)));
      const uint32_t lives = row.live >> chunk & 1U;
      from.at += size_t{before * chunk_dim + lives * (first % chunk_dim)} * D::kBytes;
    }
#pragma GCC unroll 16
    for (uint32_t s = 0; s < kSteps; ++s) {
      const std::byte* element = from.at;
      if (kWhole) {
        from.at += size_t{kWidth} * D::kBytes;
      } else {
        const bool lives = (row.live >> chunk & 1U) != 0;
        element = lives ? element : kZeros;
        from.at += lives ? size_t{kWidth} * D::kBytes : 0;
        left -= kWidth;
        chunk += static_cast<uint32_t>(left == 0);
        left = left == 0 ? chunk_dim : left;
      }
      const Floats values = D::Many(element, from.scale);
      total[2 * s] += Widen(Half(values, 0));
      total[2 * s + 1] += Widen(Half(values, 1));
    }
  }
  for (uint32_t s = 0; s < 2 * kSteps; ++s) to.End(total[s], first + s * kHalf);
}

// Calls use(dimension, element) for the live elements: kWidth at a time, then one at a time.
template <typename D, typename Many, typename One>
inline void ForEachLive(const RowLayout& layout, const FoundRow& row, const Many& many,
                        const One& one) {
  Elements<D> from(row);
  const bool whole = row.live == layout.full_mask();
  const uint32_t run = whole ? layout.dim() : layout.chunk_dim;
  const uint32_t runs = whole ? 1 : layout.chunks;
  for (uint32_t c = 0; c < runs; ++c) {
    if ((row.live >> c & 1U) == 0) continue;
    uint32_t d = 0;
    for (; d + kWidth <= run; d += kWidth, from.at += size_t{kWidth} * D::kBytes) {
      many(c * run + d, D::Many(from.at, from.scale));
    }
    for (; d < run; ++d, from.at += D::kBytes) one(c * run + d, D::One(from.at, from.scale));
  }
}

template <typename D>
inline void AddRow(const RowLayout& layout, const FoundRow& row, double* sums) {
  ForEachLive<D>(
      layout, row,
      [sums](uint32_t d, const Floats& values) {
        for (uint32_t h = 0; h < 2; ++h) {
          double* at = sums + d + h * kHalf;
          Save(Load<Doubles>(at) + Widen(Half(values, h)), at);
        }
      },
      [sums](uint32_t d, float value) { sums[d] += static_cast<double>(value); });
}

template <typename D, bool kWhole, typename To>
void AddInPasses(const RowLayout& layout, const FoundRow* rows, size_t n, To to) {
  const uint32_t dim = layout.dim();
  uint32_t d = 0;
  constexpr uint32_t kSteps = kPassFloats / kWidth;
  for (; d + kPassFloats <= dim; d += kPassFloats) {
    AddPass<D, kWhole, kSteps>(layout, rows, n, d, to);
  }
  for (; d < dim; d += kWidth) AddPass<D, kWhole, 1>(layout, rows, n, d, to);
}

// False, and nothing is done, if the layout is not made of whole vectors.
template <typename D, typename To>
inline bool AddByVectors(const RowLayout& layout, const FoundRow* rows, size_t n, To to) {
  if (layout.dim() % kWidth != 0) return false;
  const uint16_t full = layout.full_mask();
  uint32_t dead = 0;
  for (size_t r = 0; r < n; ++r) dead |= rows[r].live ^ full;
  if (dead == 0) {
    AddInPasses<D, true>(layout, rows, n, to);
  } else if (layout.chunk_dim % kWidth == 0) {
    AddInPasses<D, false>(layout, rows, n, to);
  } else {
    return false;
  }
  return true;
}

template <typename D>
void Add(const RowLayout& layout, const FoundRow* rows, size_t n, double* sums) {
  if (AddByVectors<D>(layout, rows, n, ToSums{sums})) return;
  for (size_t r = 0; r < n; ++r) AddRow<D>(layout, rows[r], sums);
}

void Round(const double* sums, uint32_t n, double divisor, float* out) {
  uint32_t d = 0;
  for (; d + kHalf <= n; d += kHalf) {
    Save(__builtin_convertvector(Load<Doubles>(sums + d) / divisor, HalfFloats), out + d);
  }
  for (; d < n; ++d) out[d] = static_cast<float>(sums[d] / divisor);
}

template <typename D>
void Pool(const RowLayout& layout, const FoundRow* rows, size_t n, double divisor, double* sums,
          float* out) {
  if (AddByVectors<D>(layout, rows, n, ToFloats{out, divisor})) return;
  const uint32_t dim = layout.dim();
  std::memset(sums, 0, dim * sizeof(double));
  for (size_t r = 0; r < n; ++r) AddRow<D>(layout, rows[r], sums);
  Round(sums, dim, divisor, out);
}

template <typename D>
void Write(const RowLayout& layout, const FoundRow* rows, size_t n, size_t step, float* out,
           size_t out_stride) {
  for (; n > 0; --n, rows += step, out += out_stride) {
    if (rows->live != layout.full_mask()) std::memset(out, 0, layout.dim() * sizeof(float));
    ForEachLive<D>(
        layout, *rows, [out](uint32_t d, const Floats& values) { Save(values, out + d); },
        [out](uint32_t d, float value) { out[d] = value; });
  }
}

void Words(const BucketIndex::Group* const* groups, const uint64_t* keys, size_t n,
           uint64_t* words) {
  for (size_t i = 0; i < n; ++i) words[i] = BucketIndex::WordOrGoesOn(*groups[i], keys[i]);
}

constexpr RowOps kOps = {Words,
                         {Add<Fp32>, Add<Fp16>, Add<Bf16>, Add<Int8>},
                         {Pool<Fp32>, Pool<Fp16>, Pool<Bf16>, Pool<Int8>},
                         {Write<Fp32>, Write<Fp16>, Write<Bf16>, Write<Int8>},
                         Round};

}  // namespace
}  // namespace embertide
