// The loops behind row_ops.h, compiled once for each kind of vectors: a file says how many floats
// go at a time (kWidth) and includes this, under the compiler's flags for that CPU. Everything has
// internal linkage and calls nothing of the library, so that no wide instruction leaves the file.
#include <cstring>
#include <type_traits>

#include "base/float16.h"
#include "store/key_kernels.h"
#include "store/row_ops.h"
#include "store/word_kernels.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace embertide {
namespace {

using Floats = float __attribute__((vector_size(4 * kWidth)));
using HalfFloats = float __attribute__((vector_size(2 * kWidth)));
using Doubles = double __attribute__((vector_size(4 * kWidth)));  // half as many values
constexpr uint32_t kHalf = kWidth / 2;
// Vectors of sums that stay in registers while rows are added: half of AVX2's 16. A pass over the
// rows adds as many dimensions as that: with AVX2 32 in fp64 and 64 in fp32, with AVX-512 twice.
constexpr uint32_t kPassSums = 8;
constexpr uint32_t kPassFloats = kPassSums * kHalf;  // in fp64

// How elements of a dtype become floats: kWidth of them, half as many, or the i-th from `from` on.
// `scale` is that of int8 and int4.
struct Fp32 {
  static constexpr uint32_t kBits = 32;
  static constexpr bool kScaled = false;
  static Floats Many(const std::byte* from, float) { return Load<Floats>(from); }
  static HalfFloats Half(const std::byte* from, float) { return Load<HalfFloats>(from); }
  static float One(const std::byte* from, uint32_t i, float) { return Load<float>(from + 4 * i); }
};

struct Fp16 {
  static constexpr uint32_t kBits = 16;
  static constexpr bool kScaled = false;
  static float One(const std::byte* from, uint32_t i, float) {
#if defined(__F16C__)
    return _cvtsh_ss(Load<uint16_t>(from + 2 * i));
#else
    return static_cast<float>(Load<Float16>(from + 2 * i));
#endif
  }
  template <typename Values>
  static Values Convert(const std::byte* from) {
    Values values = {};
    for (uint32_t i = 0; i < sizeof(Values) / sizeof(float); ++i) {
      values[i] = One(from, i, 0.0F);
    }
    return values;
  }
  static Floats Many(const std::byte* from, float) {
#if defined(__AVX512F__)
    return reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(0xffff, Load<__m256i>(from)));
#elif defined(__F16C__)
    return reinterpret_cast<Floats>(_mm256_cvtph_ps(Load<__m128i>(from)));
#else
    return Convert<Floats>(from);
#endif
  }
  static HalfFloats Half(const std::byte* from, float) {
#if defined(__AVX512F__)
    return reinterpret_cast<HalfFloats>(_mm256_cvtph_ps(Load<__m128i>(from)));
#elif defined(__F16C__)
    return reinterpret_cast<HalfFloats>(
        _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    return Convert<HalfFloats>(from);
#endif
  }
};

struct Bf16 {
  static constexpr uint32_t kBits = 16;
  static constexpr bool kScaled = false;
  static Floats Many(const std::byte* from, float) {
    return reinterpret_cast<Floats>(WordsOfShorts(from) << 16);
  }
  static HalfFloats Half(const std::byte* from, float) {
    return reinterpret_cast<HalfFloats>(HalfWordsOfShorts(from) << 16);
  }
  static float One(const std::byte* from, uint32_t i, float) {
    return __builtin_bit_cast(float, uint32_t{Load<uint16_t>(from + 2 * i)} << 16);
  }
};

struct Int8 {
  static constexpr uint32_t kBits = 8;
  static constexpr bool kScaled = true;
  static Floats Many(const std::byte* from, float scale) {
    return __builtin_convertvector(WordsOfBytes(from), Floats) * scale;
  }
  static HalfFloats Half(const std::byte* from, float scale) {
    return __builtin_convertvector(HalfWordsOfBytes(from), HalfFloats) * scale;
  }
  static float One(const std::byte* from, uint32_t i, float scale) {
    return scale * static_cast<float>(Load<int8_t>(from + i));
  }
};

// Each lane gets the word that holds its element, shifted so that the element's sign is the word's,
// and shifted back.
struct Int4 {
  static constexpr uint32_t kBits = 4;
  static constexpr bool kScaled = true;
  template <typename Values, typename Ints>
  static Values Convert(const std::byte* from, float scale) {
    constexpr uint32_t kValues = sizeof(Values) / sizeof(float);
    Ints words = {};
    Ints up = {};
#if defined(__AVX512F__)
    if constexpr (kValues == 16) {
      words = reinterpret_cast<Ints>(_mm512_mask_set1_epi32(_mm512_set1_epi32(Load<int32_t>(from)),
                                                            0xff00, Load<int32_t>(from + 4)));
    } else
#endif
    {
      int32_t word = 0;
      std::memcpy(&word, from, kValues < 8 ? kValues / 2 : 4);
      words += word;
    }
#pragma GCC unroll 16
    for (uint32_t i = 0; i < kValues; ++i) up[i] = static_cast<int32_t>(28 - i % 8 * 4);
    // No step of a negative scale is -0: a bag of one row and a sum of one then have the same bits.
    return __builtin_convertvector((words << up) >> 28, Values) * scale + 0.0F;
  }
  static Floats Many(const std::byte* from, float scale) {
    return Convert<Floats, Words>(from, scale);
  }
  static HalfFloats Half(const std::byte* from, float scale) {
    return Convert<HalfFloats, HalfWords>(from, scale);
  }
  static float One(const std::byte* from, uint32_t i, float scale) {
    const uint32_t word = Load<uint8_t>(from + i / 2) >> i % 2 * 4;
    return scale * static_cast<float>(static_cast<int32_t>(word << 28) >> 28) + 0.0F;
  }
};

// Zeros that stand for the elements of a dead chunk.
alignas(64) constexpr std::byte kZeros[4 * kWidth] = {};

// One or the other, without a branch, which live masks would send the wrong way half of the time.
inline const std::byte* Choose(size_t first, const std::byte* one, const std::byte* other) {
  const auto with = reinterpret_cast<uintptr_t>(one);
  const auto without = reinterpret_cast<uintptr_t>(other);
  return reinterpret_cast<const std::byte*>(without ^ ((with ^ without) & -uintptr_t{first}));
}

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
  // __builtin_convertvector takes two steps with AVX-512, and four with AVX2.
#if defined(__AVX512F__)
  return _mm512_maskz_cvtps_pd(0xff, values);
#elif defined(__AVX2__)
  return _mm256_cvtps_pd(values);
#else
  return __builtin_convertvector(values, Doubles);
#endif
}

inline HalfFloats Half(const Floats& values, uint32_t which) {
  return Load<HalfFloats>(reinterpret_cast<const std::byte*>(&values) + which * sizeof(HalfFloats));
}

// Where sums come from and go to: memory, or nowhere and, rounded, the output. Sums: a vector of
// them; a vector of floats is added to one of floats, or to two of doubles.
struct ToSums {
  using Sums = Doubles;
  double* sums;
  Doubles Begin(uint32_t d) const { return Load<Doubles>(sums + d); }
  void End(const Doubles& total, uint32_t d) const { Save(total, sums + d); }
};

// Dividing by one changes nothing but takes as long as a row.
template <bool kDivide>
struct ToFloats {
  using Sums = Doubles;
  float* out;
  double divisor;
  static Doubles Begin(uint32_t) { return Doubles{}; }
  void End(const Doubles& total, uint32_t d) const {
    Save(__builtin_convertvector(kDivide ? total / divisor : total, HalfFloats), out + d);
  }
};

// As ToFloats, of sums in fp32.
template <bool kDivide>
struct ToFloats32 {
  using Sums = Floats;
  float* out;
  float divisor;
  static Floats Begin(uint32_t) { return Floats{}; }
  void End(const Floats& total, uint32_t d) const {
    Save(kDivide ? total / divisor : total, out + d);
  }
};

// Vectors in a chunk: none of the rows has dead chunks, so there are none to mind; or as many as
// turns out.
constexpr uint32_t kWhole = 0;
constexpr uint32_t kAsMany = ~0U;

// The factors of rows: none, or a weight each. A product of two floats is exact in fp64.
struct Unweighed {
  struct Of {
    static Doubles Times(const Doubles& values) { return values; }
    static double Times(double value) { return value; }
  };
  static Of At(size_t) { return {}; }
};
struct Weighed {
  struct Of {
    double weight;
    Doubles Times(const Doubles& values) const { return weight * values; }
    double Times(double value) const { return weight * value; }
  };
  const float* weights;
  Of At(size_t r) const { return {double{weights[r]}}; }
};

// Dimensions [first, first + kSteps * kWidth) of all rows, which begin a chunk unless kAsMany.
template <typename D, uint32_t kChunkVectors, uint32_t kSteps, typename Weights, typename To>
void AddPass(const RowLayout& layout, const FoundRow* rows, Weights weights, size_t n,
             uint32_t first, To to) {
  constexpr bool kSingle = std::is_same_v<typename To::Sums, Floats>;
  constexpr uint32_t kSums = kSingle ? kSteps : 2 * kSteps;
  constexpr uint32_t kEach = kSingle ? kWidth : kHalf;  // dimensions
  // Loops over it are unrolled, or it would lie in memory.
  typename To::Sums total[kSums];
#pragma GCC unroll 16
  for (uint32_t s = 0; s < kSums; ++s) total[s] = to.Begin(first + s * kEach);
  constexpr size_t kBytes = size_t{kWidth} * D::kBits / 8;
  const uint32_t vectors = kChunkVectors == kAsMany ? layout.chunk_dim / kWidth : kChunkVectors;
  const uint32_t before = kChunkVectors == kWhole ? first / kWidth : first / kWidth / vectors;
  const uint32_t into = kChunkVectors == kAsMany ? first / kWidth % vectors : 0;
  for (size_t r = 0; r < n; ++r) {
    Elements<D> from(rows[r]);
    const auto weight = weights.At(r);
    uint32_t live = rows[r].live;
    if (kChunkVectors == kWhole) {
      from.at += before * kBytes;
    } else {
      const auto passed = static_cast<uint32_t>(__builtin_popcount(live & ((1U << before) - 1U)));
      live >>= before;
      from.at += (size_t{passed} * vectors + (live & 1U) * into) * kBytes;
    }
    uint32_t left = vectors - into;  // of the chunk
#pragma GCC unroll 16
    for (uint32_t s = 0; s < kSteps; ++s) {
      const std::byte* element = from.at;
      if (kChunkVectors == kWhole) {
        from.at += kBytes;
      } else {
        const size_t lives = live & 1U;
        element = Choose(lives, element, kZeros);
        from.at += lives * kBytes;
        if (kChunkVectors == kAsMany) {
          --left;
          live >>= static_cast<uint32_t>(left == 0);
          left = left == 0 ? vectors : left;
        } else if ((s + 1) % kChunkVectors == 0) {
          live >>= 1;
        }
      }
      if constexpr (kSingle) {
        total[s] += D::Many(element, from.scale);
      } else {
        total[2 * s] += weight.Times(Widen(D::Half(element, from.scale)));
        total[2 * s + 1] += weight.Times(Widen(D::Half(element + kBytes / 2, from.scale)));
      }
    }
  }
#pragma GCC unroll 16
  for (uint32_t s = 0; s < kSums; ++s) to.End(total[s], first + s * kEach);
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
    for (; d + kWidth <= run; d += kWidth, from.at += size_t{kWidth} * D::kBits / 8) {
      many(c * run + d, D::Many(from.at, from.scale));
    }
    const uint32_t rest = run - d;
    for (uint32_t i = 0; i < rest; ++i) one(c * run + d + i, D::One(from.at, i, from.scale));
    from.at += size_t{rest} * D::kBits / 8;
  }
}

template <typename D, typename Weight>
inline void AddRow(const RowLayout& layout, const FoundRow& row, Weight weight, double* sums) {
  ForEachLive<D>(
      layout, row,
      [sums, weight](uint32_t d, const Floats& values) {
        for (uint32_t h = 0; h < 2; ++h) {
          double* at = sums + d + h * kHalf;
          Save(Load<Doubles>(at) + weight.Times(Widen(Half(values, h))), at);
        }
      },
      [sums, weight](uint32_t d, float value) {
        sums[d] += weight.Times(static_cast<double>(value));
      });
}

// The dimensions from d on in as few passes as there are: of kSteps vectors, then of half as many.
template <typename D, uint32_t kChunkVectors, uint32_t kSteps, typename Weights, typename To>
void AddRest(const RowLayout& layout, const FoundRow* rows, Weights weights, size_t n, uint32_t d,
             To to) {
  if constexpr (kSteps > 0) {
    if (d + kSteps * kWidth <= layout.dim()) {
      AddPass<D, kChunkVectors, kSteps>(layout, rows, weights, n, d, to);
      d += kSteps * kWidth;
    }
    AddRest<D, kChunkVectors, kSteps / 2>(layout, rows, weights, n, d, to);
  }
}

template <typename D, uint32_t kChunkVectors, typename Weights, typename To>
void AddInPasses(const RowLayout& layout, const FoundRow* rows, Weights weights, size_t n, To to) {
  constexpr uint32_t kSteps = std::is_same_v<typename To::Sums, Floats> ? kPassSums : kPassSums / 2;
  const uint32_t dim = layout.dim();
  uint32_t d = 0;
  for (; d + kSteps * kWidth <= dim; d += kSteps * kWidth) {
    AddPass<D, kChunkVectors, kSteps>(layout, rows, weights, n, d, to);
  }
  constexpr uint32_t kRest = kChunkVectors == kWhole ? kWhole : kAsMany;
  AddRest<D, kRest, kSteps / 2>(layout, rows, weights, n, d, to);
}

// False, and nothing is done, if the layout is not made of whole vectors.
template <typename D, typename Weights, typename To>
inline bool AddByVectors(const RowLayout& layout, const FoundRow* rows, Weights weights, size_t n,
                         To to) {
  if (layout.dim() % kWidth != 0) return false;
  const uint16_t full = layout.full_mask();
  uint32_t dead = 0;  // chunks of any of them
  for (size_t r = 0; r < n; ++r) dead |= rows[r].live ^ uint32_t{full};
  if (dead == 0) {
    AddInPasses<D, kWhole>(layout, rows, weights, n, to);
  } else if (layout.chunk_dim % kWidth != 0) {
    return false;
  } else if (layout.chunk_dim == kWidth) {
    AddInPasses<D, 1>(layout, rows, weights, n, to);
  } else if (layout.chunk_dim == 2 * kWidth) {
    AddInPasses<D, 2>(layout, rows, weights, n, to);
  } else {
    AddInPasses<D, kAsMany>(layout, rows, weights, n, to);
  }
  return true;
}

template <typename D, typename Weights>
void AddAll(const RowLayout& layout, const FoundRow* rows, Weights weights, size_t n,
            double* sums) {
  if (AddByVectors<D>(layout, rows, weights, n, ToSums{sums})) return;
  for (size_t r = 0; r < n; ++r) AddRow<D>(layout, rows[r], weights.At(r), sums);
}

template <typename D>
void Add(const RowLayout& layout, const FoundRow* rows, const float* weights, size_t n,
         double* sums) {
  if (weights == nullptr) {
    AddAll<D>(layout, rows, Unweighed{}, n, sums);
  } else {
    AddAll<D>(layout, rows, Weighed{weights}, n, sums);
  }
}

void Round(const double* sums, uint32_t n, double divisor, float* out) {
  uint32_t d = 0;
  for (; d + kHalf <= n; d += kHalf) {
    Save(__builtin_convertvector(Load<Doubles>(sums + d) / divisor, HalfFloats), out + d);
  }
  for (; d < n; ++d) out[d] = static_cast<float>(sums[d] / divisor);
}

template <typename D, typename Weights>
void PoolAll(const RowLayout& layout, const FoundRow* rows, Weights weights, size_t n,
             double divisor, double* sums, float* out) {
  if (divisor == 1.0 ? AddByVectors<D>(layout, rows, weights, n, ToFloats<false>{out, divisor})
                     : AddByVectors<D>(layout, rows, weights, n, ToFloats<true>{out, divisor})) {
    return;
  }
  const uint32_t dim = layout.dim();
  std::memset(sums, 0, dim * sizeof(double));
  for (size_t r = 0; r < n; ++r) AddRow<D>(layout, rows[r], weights.At(r), sums);
  Round(sums, dim, divisor, out);
}

template <typename D>
void Pool(const RowLayout& layout, const FoundRow* rows, const float* weights, size_t n,
          double divisor, double* sums, float* out) {
  if (weights == nullptr) {
    PoolAll<D>(layout, rows, Unweighed{}, n, divisor, sums, out);
  } else {
    PoolAll<D>(layout, rows, Weighed{weights}, n, divisor, sums, out);
  }
}

template <typename D>
void Pool32(const RowLayout& layout, const FoundRow* rows, size_t n, double divisor, float* out) {
  const auto by = static_cast<float>(divisor);
  if (divisor == 1.0 ? AddByVectors<D>(layout, rows, Unweighed{}, n, ToFloats32<false>{out, by})
                     : AddByVectors<D>(layout, rows, Unweighed{}, n, ToFloats32<true>{out, by})) {
    return;
  }
  const uint32_t dim = layout.dim();
  std::memset(out, 0, dim * sizeof(float));
  for (size_t r = 0; r < n; ++r) {
    ForEachLive<D>(
        layout, rows[r],
        [out](uint32_t d, const Floats& values) { Save(Load<Floats>(out + d) + values, out + d); },
        [out](uint32_t d, float value) { out[d] += value; });
  }
  for (uint32_t d = 0; d < dim; ++d) out[d] /= by;
}

template <typename D>
void Write(const RowLayout& layout, const FoundRow* rows, size_t n, float* out, size_t out_stride) {
  for (; n > 0; --n, ++rows, out += out_stride) {
    if (rows->live != layout.full_mask()) std::memset(out, 0, layout.dim() * sizeof(float));
    ForEachLive<D>(
        layout, *rows, [out](uint32_t d, const Floats& values) { Save(values, out + d); },
        [out](uint32_t d, float value) { out[d] = value; });
  }
}

constexpr RowOps kOps = {
    Hashes,
    Turn,
    Place,
    Find,
    FindInPlain,
    {Add<Fp32>, Add<Fp16>, Add<Bf16>, Add<Int8>, nullptr, Add<Int4>},
    {Pool<Fp32>, Pool<Fp16>, Pool<Bf16>, Pool<Int8>, nullptr, Pool<Int4>},
    {Pool32<Fp32>, Pool32<Fp16>, Pool32<Bf16>, Pool32<Int8>, nullptr, Pool32<Int4>},
    {Write<Fp32>, Write<Fp16>, Write<Bf16>, Write<Int8>, nullptr, Write<Int4>},
    Round};

}  // namespace
}  // namespace embertide
