// Readiness: whether a node should be sent requests, looked at twice a second by its own thread.
// Private to this folder.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>

#include "base/background_task.h"
#include "base/mutex.h"

namespace embertide {

class Readiness {
 public:
  // `why_not` says what is missing; empty: nothing. `tell` is called with each change. Both are
  // called from the thread; `why_not` once before this returns.
  Readiness(TaskBoard* board, std::function<std::string()> why_not,
            std::function<void(bool ready)> tell);
  Readiness(const Readiness&) = delete;
  Readiness& operator=(const Readiness&) = delete;

  // The reason that the node is not ready, as last seen; empty: it is.
  std::string why_not() const;
  // Waits until the node is ready, until `deadline`, or until `stop` asks for the end.
  bool Await(std::chrono::steady_clock::time_point deadline, const std::stop_token& stop);

 private:
  Status Look(const std::stop_token& stop);

  TaskBoard* const board_;
  const std::function<std::string()> find_why_not_;
  const std::function<void(bool)> tell_;
  mutable Mutex mutex_;
  std::condition_variable_any looked_;
  std::string why_not_ EMBERTIDE_GUARDED_BY(mutex_);
  std::chrono::milliseconds every_;
  std::unique_ptr<BackgroundTask> task_;  // last: it uses the members above
};

}  // namespace embertide
