// The loops behind train_ops.h, compiled once for each kind of vectors: to be included after
// row_kernels.h, whose vectors and dtypes they use and whose rules they keep.
#include <type_traits>

#include "store/train_ops.h"

namespace embertide {
namespace {

constexpr uint32_t kSquareLanes = 16;

using FourDoubles = double __attribute__((vector_size(32)));
using TwoDoubles = double __attribute__((vector_size(16)));

inline double Fold(const TwoDoubles& lanes) { return lanes[0] + lanes[1]; }
#if defined(__AVX2__)
inline double Fold(const FourDoubles& lanes) {
  return Fold(__builtin_shufflevector(lanes, lanes, 0, 1) +
              __builtin_shufflevector(lanes, lanes, 2, 3));
}
#endif
#if defined(__AVX512F__)
inline double Fold(const Doubles& lanes) {
  return Fold(__builtin_shufflevector(lanes, lanes, 0, 1, 2, 3) +
              __builtin_shufflevector(lanes, lanes, 4, 5, 6, 7));
}
#endif

// The first kLanes of sixteen sums of squares, of which the others are zeros.
template <uint32_t kLanes>
struct Squares {
  using Vector = std::conditional_t<(kLanes < kHalf), FourDoubles, Doubles>;
  static constexpr uint32_t kEach = sizeof(Vector) / sizeof(double);
  static constexpr uint32_t kVectors = kLanes / kEach;
  Vector lanes[kVectors] = {};

  void AddRound(const double* values) {
#pragma GCC unroll 8
    for (uint32_t v = 0; v < kVectors; ++v) {
      const auto vector = Load<Vector>(values + size_t{v} * kEach);
      lanes[v] += vector * vector;
    }
  }
  // Lane l and l + 8, then l + 4, l + 2, l + 1, however many of them are one vector.
  double Total() {
    FoldVectors<kVectors / 2>();
    return Fold(lanes[0]);
  }

 private:
  template <uint32_t kApart>
  void FoldVectors() {
    if constexpr (kApart > 0) {
#pragma GCC unroll 8
      for (uint32_t v = 0; v < kApart; ++v) lanes[v] += lanes[v + kApart];
      FoldVectors<kApart / 2>();
    }
  }
};

template <uint32_t kLanes>
inline double SquaresOfOneRound(const double* sums) {
  Squares<kLanes> squares;
  squares.AddRound(sums);
  return squares.Total();
}

#if defined(__AVX2__)
// The squares of four chunks of four sums each, with the bits of SquaresOfOneRound of each.
inline void SquaresOfFours(const double* sums, double* squares) {
  FourDoubles chunk[4];
#pragma GCC unroll 4
  for (uint32_t c = 0; c < 4; ++c) {
    chunk[c] = Load<FourDoubles>(sums + size_t{c} * 4);
    chunk[c] *= chunk[c];
  }
  const auto halves = [](const FourDoubles& a, const FourDoubles& b) {
    return __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
  };
  const FourDoubles first = halves(chunk[0], chunk[1]);
  const FourDoubles second = halves(chunk[2], chunk[3]);
  Save(__builtin_shufflevector(first, second, 0, 2, 4, 6) +
           __builtin_shufflevector(first, second, 1, 3, 5, 7),
       squares);
}
#endif

// The sum of the squares of the `dim` sums of a chunk.
inline double SquaresOf(const double* sums, uint32_t dim) {
  if (dim == 4) return SquaresOfOneRound<4>(sums);
  if (dim == 8) return SquaresOfOneRound<8>(sums);
  Squares<kSquareLanes> squares;
  uint32_t d = 0;
  for (; d + kSquareLanes <= dim; d += kSquareLanes) squares.AddRound(sums + d);
  if (d < dim) {
    double rest[kSquareLanes] = {};
    for (uint32_t i = 0; d + i < dim; ++i) rest[i] = sums[d + i];
    squares.AddRound(rest);
  }
  return squares.Total();
}

// Dimensions [first, first + kVectors * kHalf) of all gradients, in their order.
template <uint32_t kVectors>
inline void SumPass(const float* const* gradients, size_t n, uint32_t first, double* sums) {
  Doubles total[kVectors];
#pragma GCC unroll 32
  for (uint32_t v = 0; v < kVectors; ++v) {
    total[v] = Widen(Load<HalfFloats>(gradients[0] + first + v * kHalf));
  }
  for (size_t i = 1; i < n; ++i) {
    const float* gradient = gradients[i] + first;
#pragma GCC unroll 32
    for (uint32_t v = 0; v < kVectors; ++v) {
      total[v] += Widen(Load<HalfFloats>(gradient + v * kHalf));
    }
  }
#pragma GCC unroll 32
  for (uint32_t v = 0; v < kVectors; ++v) Save(total[v], sums + first + v * kHalf);
}

void Sum(const RowLayout& layout, const float* const* gradients, size_t n, double* sums,
         ChunkSquares* squares) {
  const uint32_t dim = layout.dim();
  uint32_t d = 0;
  for (; d + kPassFloats <= dim; d += kPassFloats) {
    SumPass<kPassFloats / kHalf>(gradients, n, d, sums);
  }
  for (; d + kPassFloats / 2 <= dim; d += kPassFloats / 2) {
    SumPass<kPassFloats / kHalf / 2>(gradients, n, d, sums);
  }
  for (; d + kWidth <= dim; d += kWidth) SumPass<kWidth / kHalf>(gradients, n, d, sums);
  for (; d < dim; ++d) {
    sums[d] = gradients[0][d];
    for (size_t g = 1; g < n; ++g) sums[d] += static_cast<double>(gradients[g][d]);
  }
  uint32_t c = 0;
#if defined(__AVX2__)
  if (layout.chunk_dim == 4) {
    for (; c + 4 <= layout.chunks; c += 4, sums += 16) SquaresOfFours(sums, squares->data() + c);
  }
#endif
  for (; c < layout.chunks; ++c, sums += layout.chunk_dim) {
    squares->data()[c] = SquaresOf(sums, layout.chunk_dim);
  }
}

template <UtilityKind kKind>
void Use(uint32_t chunks, const ChunkSquares& squares, uint32_t accesses, double kept,
         float* utility) {
  uint32_t c = 0;
#if defined(__AVX__)
  const __m256d count = _mm256_set1_pd(accesses);
  for (; c + 4 <= chunks; c += 4) {
    __m256d earned = count;
    if constexpr (kKind != UtilityKind::kAccesses) earned = _mm256_loadu_pd(squares.data() + c);
    if constexpr (kKind == UtilityKind::kNorms) {
      earned = _mm256_mul_pd(count, _mm256_sqrt_pd(earned));
    }
    const __m256d before = _mm256_cvtps_pd(_mm_loadu_ps(utility + c));
    const __m256d after = _mm256_add_pd(_mm256_mul_pd(_mm256_set1_pd(kept), before), earned);
    _mm_storeu_ps(utility + c, _mm256_cvtpd_ps(after));
  }
#endif
  for (; c < chunks; ++c) {
    double earned = accesses;
    if constexpr (kKind == UtilityKind::kSquares) earned = squares.data()[c];
    if constexpr (kKind == UtilityKind::kNorms) earned *= __builtin_sqrt(squares.data()[c]);
    utility[c] = static_cast<float>(kept * static_cast<double>(utility[c]) + earned);
  }
}

// Calls many(dimension) at the dimensions of the live chunks where kMany of them begin, then
// one(dimension) at single ones.
template <uint32_t kMany, typename Many, typename One>
inline void ForEachLive(const RowLayout& layout, uint16_t live, const Many& many, const One& one) {
  const bool whole = live == layout.full_mask();
  const uint32_t run = whole ? layout.dim() : layout.chunk_dim;
  const uint32_t runs = whole ? 1 : layout.chunks;
  for (uint32_t c = 0; c < runs; ++c) {
    if ((live >> c & 1U) == 0) continue;
    uint32_t d = c * run;
    const uint32_t end = d + run;
    for (; d + kMany <= end; d += kMany) many(d);
    for (; d < end; ++d) one(d);
  }
}

inline Doubles Root(const Doubles& values) {
#if defined(__AVX512F__)
  return _mm512_maskz_sqrt_pd(0xff, values);
#elif defined(__AVX2__)
  return _mm256_sqrt_pd(values);
#else
  Doubles roots;
  for (uint32_t i = 0; i < kHalf; ++i) roots[i] = __builtin_sqrt(values[i]);
  return roots;
#endif
}

void Adagrad(const RowLayout& layout, uint16_t live, double scale, float initial, double epsilon,
             float* elements, double* sums) {
  ForEachLive<kHalf>(
      layout, live,
      [=](uint32_t d) {
        const Doubles g = Load<Doubles>(sums + d) * scale;
        const auto before = Load<HalfFloats>(elements + d);
        const HalfFloats begun = before == 0.0F ? HalfFloats{} + initial : before;
        const HalfFloats after = __builtin_convertvector(Widen(begun) + g * g, HalfFloats);
        Save(after, elements + d);
        Save(g / (Root(Widen(after)) + epsilon), sums + d);
      },
      [=](uint32_t d) {
        const double g = sums[d] * scale;
        const double begun = elements[d] == 0.0F ? initial : elements[d];
        elements[d] = static_cast<float>(begun + g * g);
        sums[d] = g / (__builtin_sqrt(static_cast<double>(elements[d])) + epsilon);
      });
}

void Momentum(const RowLayout& layout, uint16_t live, double kept, double taken, float* elements,
              double* sums) {
  ForEachLive<kHalf>(
      layout, live,
      [=](uint32_t d) {
        const Doubles before = Widen(Load<HalfFloats>(elements + d)) * kept;
        const Doubles after = before + Load<Doubles>(sums + d) * taken;
        const HalfFloats rounded = __builtin_convertvector(after, HalfFloats);
        Save(rounded, elements + d);
        Save(Widen(rounded), sums + d);
      },
      [=](uint32_t d) {
        const double before = static_cast<double>(elements[d]) * kept;
        elements[d] = static_cast<float>(before + sums[d] * taken);
        sums[d] = elements[d];
      });
}

// The floats that a step takes from kWidth dimensions or one, rounded once.
inline Floats StepMany(const double* sums, double step) {
  const auto half = [=](uint32_t h) {
    return __builtin_convertvector(Load<Doubles>(sums + h * kHalf) * step, HalfFloats);
  };
#if defined(__AVX512F__)
  return __builtin_shufflevector(half(0), half(1), 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,
                                 15);
#elif defined(__AVX2__)
  return __builtin_shufflevector(half(0), half(1), 0, 1, 2, 3, 4, 5, 6, 7);
#else
  return __builtin_shufflevector(half(0), half(1), 0, 1, 2, 3);
#endif
}
inline float StepOne(double sum, double step) { return static_cast<float>(step * sum); }

// How floats become elements of a dtype, the bits of EncodePayload.
template <typename D>
struct To;

template <>
struct To<Fp32> {
  static void Many(const Floats& values, std::byte* to) { Save(values, to); }
  static void One(float value, std::byte* to) { Save(value, to); }
};

template <>
struct To<Fp16> {
  static void One(float value, std::byte* to) {
#if defined(__F16C__)
    Save(static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT)), to);
#else
    Save(static_cast<Float16>(value), to);
#endif
  }
  static void Many(const Floats& values, std::byte* to) {
#if defined(__AVX512F__)
    Save(_mm512_maskz_cvtps_ph(0xffff, reinterpret_cast<__m512>(values), _MM_FROUND_TO_NEAREST_INT),
         to);
#elif defined(__F16C__)
    Save(_mm256_cvtps_ph(reinterpret_cast<__m256>(values), _MM_FROUND_TO_NEAREST_INT), to);
#else
    for (uint32_t i = 0; i < kWidth; ++i) One(values[i], to + 2 * i);
#endif
  }
};

template <>
struct To<Bf16> {
  using Bits = uint32_t __attribute__((vector_size(4 * kWidth)));
  static constexpr uint32_t kNoSign = 0x7fffffffU;
  static constexpr uint32_t kInfinity = 0x7f800000U;
  // To nearest even. A NaN stays one: only a row that was one before can be.
  static void Many(const Floats& values, std::byte* to) {
    const auto bits = reinterpret_cast<Bits>(values);
    const Bits rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    const Bits nan = (bits >> 16) | 0x40U;
    const Bits chosen = (bits & kNoSign) > kInfinity ? nan : rounded;
    SaveShorts(reinterpret_cast<Words>(chosen), to);
  }
  static void One(float value, std::byte* to) {
    const auto bits = __builtin_bit_cast(uint32_t, value);
    const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    const bool nan = (bits & kNoSign) > kInfinity;
    Save(static_cast<uint16_t>(nan ? (bits >> 16) | 0x40U : rounded), to);
  }
};

template <typename D>
constexpr float kMaxOf = LargestOf(DType::kFp32);
template <>
constexpr float kMaxOf<Fp16> = LargestOf(DType::kFp16);
template <>
constexpr float kMaxOf<Bf16> = LargestOf(DType::kBf16);
template <>
constexpr float kMaxOf<Int8> = LargestOf(DType::kInt8);

// A step too far ends at the largest value, so that no row is ever published that is not finite.
// NaN, which only an infinite step gives, becomes that value, too.
template <typename D, typename Values>
inline Values Bounded(const Values& value) {
  constexpr float kMost = kMaxOf<D>;
  const Values most = Values{} + kMost;
  const Values below = value < most ? value : most;
  return below > -most ? below : -most;
}

// ForEachLive, with the place of each dimension's element.
template <typename D, typename Many, typename One>
inline void ForEachPlace(const RowLayout& layout, uint16_t live, std::byte* at, const Many& many,
                         const One& one) {
  ForEachLive<kWidth>(
      layout, live,
      [&](uint32_t d) {
        many(d, at);
        at += size_t{kWidth} * D::kBits / 8;
      },
      [&](uint32_t d) {
        one(d, at);
        at += D::kBits / 8;
      });
}

// The row less the step; `sums` become its values where they must be known before the row's scale.
template <typename D>
struct Row {
  static void Descend(const RowLayout& layout, uint16_t live, double* sums, double step,
                      std::byte* payload) {
    ForEachPlace<D>(
        layout, live, payload,
        [&](uint32_t d, std::byte* at) {
          To<D>::Many(Bounded<D>(D::Many(at, 0.0F) - StepMany(sums + d, step)), at);
        },
        [&](uint32_t d, std::byte* at) {
          To<D>::One(Bounded<D>(D::One(at, 0, 0.0F) - StepOne(sums[d], step)), at);
        });
  }
};

template <>
struct Row<Int8> {
  static void Descend(const RowLayout& layout, uint16_t live, double* sums, double step,
                      std::byte* payload) {
    if (live == 0) return;
    const auto before = Load<float>(payload);
    std::byte* elements = payload + sizeof(float);
    // New values lie as floats over the sums that they were made of.
    auto* values = reinterpret_cast<std::byte*>(sums);
    const auto place = [values](uint32_t d) { return values + size_t{d} * sizeof(float); };
    Floats most = {};
    float most_one = 0.0F;
    ForEachPlace<Int8>(
        layout, live, elements,
        [&](uint32_t d, std::byte* at) {
          const auto value = Bounded<Int8>(Int8::Many(at, before) - StepMany(sums + d, step));
          Save(value, place(d));
          const Floats size = value < 0.0F ? -value : value;
          most = most < size ? size : most;
        },
        [&](uint32_t d, std::byte* at) {
          const auto value = Bounded<Int8>(Int8::One(at, 0, before) - StepOne(sums[d], step));
          Save(value, place(d));
          const float size = value < 0.0F ? -value : value;
          most_one = most_one < size ? size : most_one;
        });
    for (uint32_t i = 0; i < kWidth; ++i) most_one = most_one < most[i] ? most[i] : most_one;
    const float scale = most_one / 127.0F;
    Save(scale, payload);
    const float divisor = scale == 0.0F ? 1.0F : scale;
    // Adding it leaves no bits behind the point, rounded to the nearest even.
    constexpr float kPoint = 0x1.8p23F;
    ForEachPlace<Int8>(
        layout, live, elements,
        [&](uint32_t d, std::byte* at) {
          Floats value = Load<Floats>(place(d)) / divisor;
          value = value > 127.0F ? Floats{} + 127.0F : value;
          value = value < -127.0F ? Floats{} - 127.0F : value;
          SaveBytes(__builtin_convertvector((value + kPoint) - kPoint, Words), at);
        },
        [&](uint32_t d, std::byte* at) {
          float value = Load<float>(place(d)) / divisor;
          value = value > 127.0F ? 127.0F : value;
          value = value < -127.0F ? -127.0F : value;
          Save(static_cast<int8_t>((value + kPoint) - kPoint), at);
        });
  }
};

constexpr TrainOps kTrainOps = {
    Sum,
    {Use<UtilityKind::kSquares>, Use<UtilityKind::kNorms>, Use<UtilityKind::kAccesses>},
    Adagrad,
    Momentum,
    {Row<Fp32>::Descend, Row<Fp16>::Descend, Row<Bf16>::Descend, Row<Int8>::Descend}};

}  // namespace
}  // namespace embertide
