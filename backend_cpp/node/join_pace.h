// JoinPace: how many buckets a node adds in one step, and how long it then rests, so that a join
// costs requests and the freshness of versions little.
//
// A step adds at most 64 buckets, and at most 4 MiB of rows, by the size of those of the step
// before; one bucket, if that is larger. Since no version is taken meanwhile, a step that took more
// than 50 ms is followed by one of half as many. After each, the node rests as long as it took, so
// that the join has half of one core and of its memory traffic. Used by one thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace embertide {

class JoinPace {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr uint64_t kStepBytes = 4 << 20;
  static constexpr size_t kStepBuckets = 64;
  static constexpr std::chrono::milliseconds kStepTime{50};

  // What the next step may add.
  size_t buckets() const { return buckets_; }
  bool Rests(Clock::time_point now) const { return now < until_; }
  // A step that ended at `now` added buckets with so many bytes of rows. Nothing changes if there
  // were none.
  void Note(size_t added, uint64_t bytes, Clock::duration took, Clock::time_point now) {
    until_ = now + took;
    if (added == 0) return;
    if (took > kStepTime) {
      buckets_ = std::max<size_t>(1, added / 2);
    } else if (took < kStepTime / 4) {
      buckets_ = std::min(added * 2, kStepBuckets);
    }
    const uint64_t each = std::max<uint64_t>(1, bytes / added);
    buckets_ = std::min(buckets_, static_cast<size_t>(std::max<uint64_t>(1, kStepBytes / each)));
  }

 private:
  size_t buckets_ = 1;
  Clock::time_point until_;
};

}  // namespace embertide
