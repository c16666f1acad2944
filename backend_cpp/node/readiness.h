// Readiness: whether a node should be sent requests, looked at twice a second by its own thread.
// Private to this folder.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <stop_token>
#include <string>
#include <thread>

#include "base/mutex.h"

namespace embertide {

class Readiness {
 public:
  // `why_not` says what is missing; empty: nothing. `tell` is called with each change. Both are
  // called from the thread; `why_not` once before this returns.
  Readiness(std::function<std::string()> why_not, std::function<void(bool ready)> tell);
  Readiness(const Readiness&) = delete;
  Readiness& operator=(const Readiness&) = delete;

  // What is missing, as last seen; empty: the node is ready.
  std::string why_not() const;
  // Waits until the node is ready, or until `deadline`.
  bool Await(std::chrono::steady_clock::time_point deadline);

 private:
  void Look(const std::stop_token& stop);

  const std::function<std::string()> find_why_not_;
  const std::function<void(bool)> tell_;
  mutable Mutex mutex_;
  std::condition_variable_any looked_;
  std::string why_not_ EMBERTIDE_GUARDED_BY(mutex_);
  std::jthread thread_;  // last: it uses the members above
};

}  // namespace embertide
