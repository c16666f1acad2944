// Deadlines of callers: by when an answer is of use to them.
#pragma once

#include <algorithm>
#include <chrono>

namespace embertide {

using Deadline = std::chrono::steady_clock::time_point;
// The caller names none.
inline constexpr Deadline kNoDeadline = Deadline::max();

// `wait` from now. Waits of more than a day are a day: callers name any number.
template <typename Duration>
Deadline DeadlineAfter(Duration wait) {
  constexpr std::chrono::hours kLongest{24};
  const auto now = std::chrono::steady_clock::now();
  if (wait >= kLongest) return now + kLongest;
  return now +
         std::max(std::chrono::duration_cast<Deadline::duration>(wait), Deadline::duration::zero());
}

inline bool HasPassed(Deadline deadline) { return std::chrono::steady_clock::now() >= deadline; }

}  // namespace embertide
