// Slowest: the slowest calls of the last minute and of the last hour.
//
// A span of time is kept in slots, each with the slowest that ended in it; so memory is bounded,
// and a span shows up to one slot more than it is called.
//
// Thread-safe; a call that is not slow pays for two atomic loads.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/mutex.h"

namespace embertide {

// Requires of a Call: `double WholeUs() const`, how long it took.
template <typename Call>
class Slowest {
 public:
  static constexpr size_t kKept = 32;  // of each span
  using Time = std::chrono::steady_clock::time_point;

  // Whether it would be kept: of the slowest of a slot.
  bool IsSlow(double whole_us, Time now) const {
    return whole_us > floor_us_.load(std::memory_order_relaxed) ||
           now.time_since_epoch().count() >= slot_ends_.load(std::memory_order_relaxed);
  }

  void Add(const Call& call, Time now) {
    const MutexLock lock(mutex_);
    double floor_us = std::numeric_limits<double>::infinity();
    for (Span* span : {&minute_, &hour_}) {
      const int64_t number = NumberAt(span->slot, now);
      Slot& slot = span->slots[static_cast<size_t>(number) % span->slots.size()];
      if (slot.number != number) slot = {number, {}};
      slot.calls.push_back(call);
      std::ranges::push_heap(slot.calls, IsSlower);
      if (slot.calls.size() > kKept) {
        std::ranges::pop_heap(slot.calls, IsSlower);
        slot.calls.pop_back();
      }
      floor_us = slot.calls.size() < kKept ? 0 : std::min(floor_us, slot.calls.front().WholeUs());
    }
    floor_us_ = floor_us;
    const Time ends{(NumberAt(minute_.slot, now) + 1) * minute_.slot};
    slot_ends_ = ends.time_since_epoch().count();
  }

  // The slowest first.
  std::vector<Call> OfMinute(Time now) const {
    const MutexLock lock(mutex_);
    return SlowestOf(minute_, now);
  }
  std::vector<Call> OfHour(Time now) const {
    const MutexLock lock(mutex_);
    return SlowestOf(hour_, now);
  }

 private:
  struct Slot {
    int64_t number = -1;      // of its span's slots since the clock began
    std::vector<Call> calls;  // a heap, the fastest first
  };
  struct Span {
    std::chrono::seconds slot;
    std::vector<Slot> slots;  // by their number's remainder
  };

  static bool IsSlower(const Call& one, const Call& other) {
    return one.WholeUs() > other.WholeUs();
  }
  static int64_t NumberAt(std::chrono::seconds slot, Time now) {
    return now.time_since_epoch() / slot;
  }
  static std::vector<Call> SlowestOf(const Span& span, Time now) {
    const int64_t oldest = NumberAt(span.slot, now) - static_cast<int64_t>(span.slots.size()) + 1;
    std::vector<Call> slowest;
    for (const Slot& slot : span.slots) {
      if (slot.number < oldest) continue;
      slowest.insert(slowest.end(), slot.calls.begin(), slot.calls.end());
    }
    std::ranges::sort(slowest, IsSlower);
    if (slowest.size() > kKept) slowest.resize(kKept);
    return slowest;
  }

  mutable Mutex mutex_;
  Span minute_ EMBERTIDE_GUARDED_BY(mutex_){std::chrono::seconds(10), std::vector<Slot>(7)};
  Span hour_ EMBERTIDE_GUARDED_BY(mutex_){std::chrono::minutes(5), std::vector<Slot>(13)};
  // A call must be slower than this to be kept, until a slot ends.
  std::atomic<double> floor_us_{0};
  std::atomic<int64_t> slot_ends_{0};  // Time's count
};

}  // namespace embertide
