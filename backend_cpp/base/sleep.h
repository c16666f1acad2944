// SleepFor: a thread's wait that its stop ends.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stop_token>

namespace embertide {

// True: the time has passed. False: a stop was asked for, before or meanwhile. Thread-safe.
inline bool SleepFor(const std::stop_token& stop, std::chrono::nanoseconds time) {
  std::mutex mutex;
  std::condition_variable_any woken;
  std::unique_lock lock(mutex);
  return !woken.wait_for(lock, stop, time, [&stop] { return stop.stop_requested(); });
}

}  // namespace embertide
