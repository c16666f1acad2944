// Asking ahead for the lines of memory that a batch is about to read.
#pragma once

#include <cstdint>

namespace embertide {

inline constexpr uintptr_t kLine = 64;  // bytes

// To the second-level cache: the first has room for some two dozen misses only.
inline void AskFor(const void* line) { __builtin_prefetch(line, 0, 2); }

// That `bytes` at an address touch.
inline uint32_t LinesOf(uintptr_t at, uint32_t bytes) {
  return static_cast<uint32_t>((at % kLine + bytes + kLine - 1) / kLine);
}

inline void AskForLines(const void* at, uint32_t bytes) {
  const uint32_t lines = LinesOf(reinterpret_cast<uintptr_t>(at), bytes);
  for (uint32_t l = 0; l < lines; ++l) AskFor(static_cast<const char*>(at) + l * kLine);
}

}  // namespace embertide
