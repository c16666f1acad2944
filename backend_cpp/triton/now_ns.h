// The clock that Triton's own statistics are taken with, in ns.
#pragma once

#include <chrono>
#include <cstdint>

namespace embertide::triton {

inline uint64_t NowNs() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

}  // namespace embertide::triton
