// How this CPU is asked for lines.
#include "store/prefetch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace embertide {
namespace {

// docs/results/store.md has the figures.
bool HasRoomInFirst() noexcept {
#if defined(__x86_64__)
  constexpr unsigned kAmdOfZen5 = 0x1A;  // family
  __builtin_cpu_init();
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__builtin_cpu_is("amd") == 0 || __get_cpuid(1, &a, &b, &c, &d) == 0) return false;
  const unsigned family = ((a >> 8) & 0xFU) + ((a >> 20) & 0xFFU);
  return family >= kAmdOfZen5;
#else
  return false;
#endif
}

size_t KeysAStep() noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  // AMD's CPUs before Zen 4, which have no such vectors: of a Zen 3, from 20 keys on each waits
  // longer the more there are (docs/results/store.md).
  constexpr size_t kFew = 16;
  if (__builtin_cpu_is("amd") != 0 && __builtin_cpu_supports("avx512f") == 0) return kFew;
#endif
  return kMaxKeysAStep;
}

}  // namespace

const bool kAskIntoFirst = HasRoomInFirst();
const size_t kKeysAStep = KeysAStep();

}  // namespace embertide
