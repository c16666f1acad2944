// JoinPace: how many buckets a node adds in one step, and how long it then rests, so that a join
// costs requests and the freshness of versions little.
//
// A step adds at most 64 buckets, and at most 1 MiB of rows unless told otherwise, by the size of
// those of the step before; one bucket, if that is larger. A step that took more than 10 ms is
// followed by one of half as many: no version is taken meanwhile, and a request may wait for the
// core. After each, the node rests as long as it took, unless told otherwise: the join has half of
// a core where the machine has room. Steps run at a low priority (bucket_mover.cc), so where it has
// none they take longer, and the join has a few hundredths of a core. Used by one thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace embertide {

class JoinPace {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kStepBuckets = 64;
  static constexpr std::chrono::milliseconds kStepTime{10};
  static constexpr uint32_t kRest = 1;  // times what a step took

  explicit JoinPace(uint64_t step_bytes = 1 << 20, uint32_t rest = kRest)
      : step_bytes_(step_bytes), rest_(rest) {}

  // The number of buckets that the next step may add.
  size_t buckets() const { return buckets_; }
  bool Rests(Clock::time_point now) const { return now < until_; }
  // A step that ended at `now` added buckets with so many bytes of rows. Nothing changes if there
  // were none.
  void Note(size_t added, uint64_t bytes, Clock::duration took, Clock::time_point now) {
    until_ = now + rest_ * took;
    if (added == 0) return;
    if (took > kStepTime) {
      buckets_ = std::max<size_t>(1, added / 2);
    } else if (took < kStepTime / 4) {
      buckets_ = std::min(added * 2, kStepBuckets);
    }
    const uint64_t each = std::max<uint64_t>(1, bytes / added);
    buckets_ = std::min(buckets_, static_cast<size_t>(std::max<uint64_t>(1, step_bytes_ / each)));
  }

 private:
  uint64_t step_bytes_;
  int64_t rest_;  // times what a step took
  size_t buckets_ = 1;
  Clock::time_point until_;
};

}  // namespace embertide
