// The part of row_kernels.h, which includes it behind key_kernels.h, that turns integers of fewer
// bits into words and back. GCC 12's own conversion takes bytes apart one by one, and shorts in
// halves, where these CPUs have an instruction.
#include <cstddef>
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace embertide {
namespace {

using Words = int32_t __attribute__((vector_size(4 * kWidth)));
using HalfWords = int32_t __attribute__((vector_size(2 * kWidth)));

inline Words WordsOfBytes(const std::byte* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Words>(_mm512_maskz_cvtepi8_epi32(0xffff, Load<__m128i>(from)));
#elif defined(__AVX2__)
  return reinterpret_cast<Words>(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  using Bytes = int8_t __attribute__((vector_size(kWidth)));
  return __builtin_convertvector(Load<Bytes>(from), Words);
#endif
}

inline HalfWords HalfWordsOfBytes(const std::byte* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<HalfWords>(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return reinterpret_cast<HalfWords>(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(Load<int32_t>(from))));
#else
  using Bytes = int8_t __attribute__((vector_size(kWidth / 2)));
  return __builtin_convertvector(Load<Bytes>(from), HalfWords);
#endif
}

inline Words WordsOfShorts(const std::byte* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Words>(_mm512_maskz_cvtepu16_epi32(0xffff, Load<__m256i>(from)));
#elif defined(__AVX2__)
  return reinterpret_cast<Words>(_mm256_cvtepu16_epi32(Load<__m128i>(from)));
#else
  using Shorts = uint16_t __attribute__((vector_size(2 * kWidth)));
  return __builtin_convertvector(Load<Shorts>(from), Words);
#endif
}

inline HalfWords HalfWordsOfShorts(const std::byte* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<HalfWords>(_mm256_cvtepu16_epi32(Load<__m128i>(from)));
#elif defined(__AVX2__)
  return reinterpret_cast<HalfWords>(
      _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  using Shorts = uint16_t __attribute__((vector_size(kWidth)));
  return __builtin_convertvector(Load<Shorts>(from), HalfWords);
#endif
}

// The lowest byte of each.
inline void SaveBytes(const Words& words, std::byte* to) {
#if defined(__AVX512F__)
  Save(_mm512_maskz_cvtepi32_epi8(0xffff, reinterpret_cast<__m512i>(words)), to);
#elif defined(__AVX2__)
  const auto lowest = reinterpret_cast<__m256i>(words & 0xff);
  const __m128i shorts =
      _mm_packus_epi32(_mm256_castsi256_si128(lowest), _mm256_extracti128_si256(lowest, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(shorts, shorts));
#else
  using Bytes = int8_t __attribute__((vector_size(kWidth)));
  Save(__builtin_convertvector(words, Bytes), to);
#endif
}

// Requires: words from 0 to 0xffff.
inline void SaveShorts(const Words& words, std::byte* to) {
#if defined(__AVX512F__)
  Save(_mm512_maskz_cvtepi32_epi16(0xffff, reinterpret_cast<__m512i>(words)), to);
#elif defined(__AVX2__)
  const auto both = reinterpret_cast<__m256i>(words);
  Save(_mm_packus_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1)), to);
#else
  using Shorts = uint16_t __attribute__((vector_size(2 * kWidth)));
  Save(__builtin_convertvector(words, Shorts), to);
#endif
}

}  // namespace
}  // namespace embertide
