// Crew: threads that share one piece of work after the other, the caller's among them: executions
// of the Triton backend, turns of a training step.
//
// They stay awake for a moment after their work and then sleep: threads that spin for long take the
// cores that others need. Used by one thread at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace embertide {

class Crew {
 public:
  // Requires: threads >= 1; one is the caller's.
  explicit Crew(uint32_t threads);
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  uint32_t size() const { return static_cast<uint32_t>(workers_.size()) + 1; }
  // Runs work(0) .. work(parts - 1) at the same time, the first on the caller's thread; returns
  // when all are done. Requires: 1 <= parts <= size(); `work` does not throw.
  void Run(uint32_t parts, const std::function<void(uint32_t)>& work);

 private:
  struct Worker {
    std::atomic<uint32_t> round{0};  // goes up when there is work
    std::thread thread;
  };
  void Serve(Worker* worker, uint32_t part);

  std::vector<std::unique_ptr<Worker>> workers_;
  const std::function<void(uint32_t)>* work_ = nullptr;  // null: the end
  std::atomic<uint32_t> at_work_{0};
};

}  // namespace embertide
