// Which cache this CPU's lines are asked into.
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

}  // namespace

const bool kAskIntoFirst = HasRoomInFirst();

}  // namespace embertide
