// Asking ahead for the lines of memory that a batch is about to read.
#pragma once

#include <cstddef>
#include <cstdint>

namespace embertide {

inline constexpr uintptr_t kLine = 64;  // bytes

// Lines that follow one another.
struct Lines {
  uint64_t first;  // address
  uint64_t count;
};

// Which cache lines are asked into: the first level's where it has room for the misses of a whole
// step, as AMD's Zen 5 has; else the second level's, for other CPUs wait after some two dozen.
extern const bool kAskIntoFirst;
// Keys that a batch is to ask for at once, at most kMaxKeysAStep: where a CPU waits for what it
// has asked of memory already, fewer. Four steps are more lines than a core has misses in flight,
// and few enough to stay in the second-level cache with their rows.
inline constexpr size_t kMaxKeysAStep = 32;
extern const size_t kKeysAStep;

// Inlined before all else, for GCC drops calls of functions that do nothing but ask: they return
// nothing and change nothing.
#define EMBERTIDE_ASKS [[gnu::always_inline]] inline

EMBERTIDE_ASKS void AskFor(const void* line) {
  if (kAskIntoFirst) {
    __builtin_prefetch(line, 0, 3);
  } else {
    __builtin_prefetch(line, 0, 2);
  }
}

// That `bytes` at an address touch.
inline uint32_t LinesOf(uintptr_t at, uint32_t bytes) {
  return static_cast<uint32_t>((at % kLine + bytes + kLine - 1) / kLine);
}

// Those that they touch.
inline Lines LinesAt(uintptr_t at, uint32_t bytes) {
  return {at & ~(kLine - 1), LinesOf(at, bytes)};
}

// For the first even if there are none, which costs no test.
EMBERTIDE_ASKS void AskForLines(const Lines& lines) {
  const char* line = reinterpret_cast<const char*>(lines.first);
  AskFor(line);
  for (uint64_t l = 1; l < lines.count; ++l) AskFor(line += kLine);
}

// For those that an object touches, in fewer instructions: its last line may be asked for twice.
EMBERTIDE_ASKS void AskForBytes(const void* at, uint32_t bytes) {
  const char* byte = static_cast<const char*>(at);
  const char* const last = byte + bytes - 1;
  for (; byte < last; byte += kLine) AskFor(byte);
  AskFor(last);
}

#undef EMBERTIDE_ASKS

}  // namespace embertide
