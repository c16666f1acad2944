// Wall clock, for what people and other machines compare. Private to this library.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace embertide {

// ms from `wall_ms` (since the Unix epoch) to now; 0 where clocks disagree.
inline uint64_t MsSince(int64_t wall_ms) {
  const auto now = std::chrono::duration_cast<std::chrono::milliseconds>(
                       std::chrono::system_clock::now().time_since_epoch())
                       .count();
  return static_cast<uint64_t>(std::max<int64_t>(0, now - wall_ms));
}

}  // namespace embertide
