// CallThreads: threads for calls that may wait, so that they hold up none of gRPC's own. Private to
// access, peer and front.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace embertide {

class TaskReport;

class CallThreads {
 public:
  // Starts none before it needs one, and `most` at most.
  // `report` is told of threads that the system refuses; outlives this.
  CallThreads(uint32_t most, TaskReport* report) : most_(most), report_(report) {}
  // Finishes all queued calls first. Requires: nobody calls Run any more.
  ~CallThreads();
  CallThreads(const CallThreads&) = delete;
  CallThreads& operator=(const CallThreads&) = delete;

  // Runs `call` on a thread, or here if there is none and the system starts none. Who calls bounds
  // how many wait. `call` does not throw.
  void Run(std::function<void()> call);

 private:
  void Work();

  const uint32_t most_;
  TaskReport* const report_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> waiting_;
  uint32_t idle_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace embertide
