// Crew: threads that share one piece of work after the other, the caller's among them: executions
// of the Triton backend, turns of a training step.
//
// They stay awake for a moment after their work and then sleep: threads that spin for long take the
// cores that others need. A thread that the system refuses is done without, and tried again; its
// part is then the caller's. Used by one thread at a time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace embertide {

class TaskBoard;
class TaskReport;

class Crew {
 public:
  // Requires: threads >= 1; one is the caller's. `board` is told of threads that are missing, and
  // outlives the crew; null: the process's.
  explicit Crew(uint32_t threads, TaskBoard* board = nullptr);
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  uint32_t size() const { return static_cast<uint32_t>(workers_.size()) + 1; }
  // Runs work(0) .. work(parts - 1) at the same time, the first on the caller's thread; returns
  // when all are done, or throws the first exception of them then. Requires: 1 <= parts <= size().
  void Run(uint32_t parts, const std::function<void(uint32_t)>& work);

 private:
  struct Worker {
    std::atomic<uint32_t> round{0};  // goes up when there is work
    std::thread thread;
    bool missed = false;  // it could not be started
  };
  void Start(uint32_t part) noexcept;
  void StartMissing() noexcept;
  void Serve(Worker* worker, uint32_t part);
  void Do(uint32_t part) noexcept;

  TaskReport* const report_;
  std::vector<std::unique_ptr<Worker>> workers_;
  uint32_t missing_ = 0;
  std::chrono::steady_clock::time_point start_again_;
  const std::function<void(uint32_t)>* work_ = nullptr;  // null: the end
  std::atomic<uint32_t> at_work_{0};
  std::mutex failure_mutex_;
  std::exception_ptr failure_;  // of the work at hand
};

}  // namespace embertide
