// Adding floats to doubles, by what the CPU has.
#include "store/row_ops.h"

#include <cstring>

namespace embertide {
namespace {

// Vectors of as many values each.
using Floats2 = float __attribute__((vector_size(8)));
using Floats4 = float __attribute__((vector_size(16)));
using Floats8 = float __attribute__((vector_size(32)));
using Doubles2 = double __attribute__((vector_size(16)));
using Doubles4 = double __attribute__((vector_size(32)));
using Doubles8 = double __attribute__((vector_size(64)));

// Compiled for what the function may use that it is inlined into.
template <typename Floats, typename Doubles>
__attribute__((always_inline)) inline void Add(const std::byte* values, uint32_t n, double* sums) {
  constexpr uint32_t kWidth = sizeof(Floats) / sizeof(float);
  uint32_t d = 0;
  for (; d + kWidth <= n; d += kWidth) {
    Floats row;
    Doubles sum;
    std::memcpy(&row, values + size_t{d} * sizeof(float), sizeof(row));
    std::memcpy(&sum, sums + d, sizeof(sum));
    sum += __builtin_convertvector(row, Doubles);
    std::memcpy(sums + d, &sum, sizeof(sum));
  }
  for (; d < n; ++d) {
    float value;
    std::memcpy(&value, values + size_t{d} * sizeof(float), sizeof(value));
    sums[d] += static_cast<double>(value);
  }
}

void AddPlain(const std::byte* values, uint32_t n, double* sums) {
  Add<Floats2, Doubles2>(values, n, sums);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void AddAvx2(const std::byte* values, uint32_t n, double* sums) {
  Add<Floats4, Doubles4>(values, n, sums);
}

__attribute__((target("avx512f,avx512vl"))) void AddAvx512(const std::byte* values, uint32_t n,
                                                           double* sums) {
  Add<Floats8, Doubles8>(values, n, sums);
}
#endif

using AddFunction = void (*)(const std::byte*, uint32_t, double*);

// Chosen by hand: an ifunc's resolver would run before the sanitizers are ready.
AddFunction ChooseAdd() noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512vl") != 0) {
    return AddAvx512;
  }
  if (__builtin_cpu_supports("avx2") != 0) return AddAvx2;
#endif
  return AddPlain;
}

const AddFunction kAdd = ChooseAdd();

}  // namespace

void AddFloats(const std::byte* values, uint32_t n, double* sums) { kAdd(values, n, sums); }

}  // namespace embertide
