// The random lines that one core of this machine brings from memory: the limit of any lookup.
// Called by bench.store.lookup; compiled by it.
#include <cstddef>
#include <cstdint>

// Reads the cache lines at lines[0..n) of `memory`, each asked for `ahead` lines before, into the
// second-level cache, to which more can be on their way than to the first. Returns a sum, so that
// nothing is left out.
extern "C" uint64_t ReadLines(const std::byte* memory, const uint64_t* lines, uint64_t n,
                              uint64_t ahead) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < n; ++i) {
    if (i + ahead < n) __builtin_prefetch(memory + lines[i + ahead] * 64, 0, 2);
    sum += *reinterpret_cast<const uint64_t*>(memory + lines[i] * 64);
  }
  return sum;
}
