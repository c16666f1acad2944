// SlowLog: the slowest inferences of the last minute and of the last hour.
//
// A span of time is kept in slots, each with the slowest that ended in it; so memory is bounded,
// and a span shows up to one slot more than it is called. Nobody's name or key is in it.
//
// Thread-safe; an inference that is not slow pays for two atomic loads.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "front/stages.h"

namespace embertide::front {

struct SlowCall {
  int64_t ended_ms = 0;  // of the wall clock
  std::string model;
  int64_t samples = 0;  // 0: not known
  int64_t version = 0;  // of the answer; 0: the backend says none
  StageTimes times;
};

class SlowLog {
 public:
  static constexpr size_t kKept = 32;  // of each span
  using Time = std::chrono::steady_clock::time_point;

  // Whether it would be kept: of the slowest of a slot.
  bool IsSlow(double whole_us, Time now) const {
    return whole_us > floor_us_.load(std::memory_order_relaxed) ||
           now.time_since_epoch().count() >= slot_ends_.load(std::memory_order_relaxed);
  }
  void Add(const SlowCall& call, Time now);
  // {"minute": [...], "hour": [...]}, each with the slowest first.
  std::string Json(Time now) const;

 private:
  struct Slot {
    int64_t number = -1;          // of its span's slots since the clock began
    std::vector<SlowCall> calls;  // a heap, the fastest first
  };
  struct Span {
    std::chrono::seconds slot;
    std::vector<Slot> slots;  // by their number's remainder
  };
  static std::vector<SlowCall> SlowestOf(const Span& span, Time now);

  mutable std::mutex mutex_;
  Span minute_{std::chrono::seconds(10), std::vector<Slot>(7)};
  Span hour_{std::chrono::minutes(5), std::vector<Slot>(13)};
  // A request must be slower than this to be kept, until a slot ends.
  std::atomic<double> floor_us_{0};
  std::atomic<int64_t> slot_ends_{0};  // Time's count
};

}  // namespace embertide::front
