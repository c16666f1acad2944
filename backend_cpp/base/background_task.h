// BackgroundTask: a thread that works round after round, whatever becomes of a round.
//
// An exception ends neither the thread nor the process: the round is tried again after a back-off.
// A thread that the system refuses is tried again as well, by whoever calls StartMissing. How a
// task is doing stands on a TaskBoard, which a node shows in its status, its metrics and its log.
//
// Every thread of ours that works in the background is one of these; threads that share a caller's
// work are a Crew.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "embertide/status.h"
#include "embertide/task_health.h"

namespace embertide {

class BackgroundTask;
class TaskBoard;

// One task's line on the board. Thread-safe; nothing here throws.
class TaskReport {
 public:
  // It does what it is for.
  void Good() noexcept;
  void Failed(const char* error) noexcept;
  // A thread could not be started: the `first` attempt, or one more. While one is missing, the task
  // is failing, whatever its other threads do.
  void NotStarted(const char* error, bool first) noexcept;
  // It runs, or is wanted no longer.
  void MissesOneLess() noexcept;
  void Note(const Status& status) noexcept;
  TaskHealth Health() const;

 private:
  friend class TaskBoard;
  using Clock = std::chrono::steady_clock;
  TaskReport(std::string name, const TaskBoard* board);
  void Fail(const char* error, uint64_t* count, bool misses_more) noexcept;
  // Returns the line to log; empty: none. Requires `mutex_`.
  std::string LineOfFailure(Clock::time_point now);

  const std::string name_;
  const TaskBoard* const board_;
  std::atomic<bool> failing_{false};
  mutable std::mutex mutex_;
  uint64_t failures_ = 0;
  uint64_t failed_starts_ = 0;
  uint64_t failures_in_a_row_ = 0;
  uint32_t missing_ = 0;  // threads
  int64_t failing_since_ms_ = 0;
  bool logged_ = false;        // that it fails; then it is logged that it works again
  Clock::time_point may_log_;  // not before
  char error_[256] = {};       // no memory may be left for a string
};

// The tasks of a node, or of a process. Thread-safe. Outlives its tasks.
class TaskBoard {
 public:
  // `log`: OPTIONAL, told a line when a task begins to fail, once a minute while it does, and when
  // it works again. From any thread; must not call the board.
  explicit TaskBoard(std::function<void(const std::string& line)> log = nullptr);
  TaskBoard(const TaskBoard&) = delete;
  TaskBoard& operator=(const TaskBoard&) = delete;
  // The board of tasks that belong to no node; its lines go to stderr.
  static TaskBoard& OfProcess();

  // The line of a name, for as long as the board lives: one for all who ask for it.
  TaskReport* Of(const std::string& name);
  std::vector<TaskHealth> Tasks() const;  // by name
  // Tries again to start the threads that could not be, at most twice a second; one load if there
  // are none.
  void StartMissing() noexcept {
    if (missing_count_.load(std::memory_order_relaxed) > 0) StartSome();
  }

 private:
  friend class BackgroundTask;
  friend class TaskReport;
  void StartSome() noexcept;
  void Add(BackgroundTask* task);
  void Remove(BackgroundTask* task);

  const std::function<void(const std::string&)> log_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<TaskReport>> reports_;
  std::vector<BackgroundTask*> missing_;  // without a thread
  std::atomic<size_t> missing_count_{0};
  std::chrono::steady_clock::time_point start_again_;
};

struct TaskOptions {
  std::string name;
  TaskBoard* board = nullptr;  // null: the process's
  // After a round that failed, twice as long each time.
  std::chrono::milliseconds first_back_off{100};
  std::chrono::milliseconds longest_back_off{5000};
  // A round that returns an error has waited by itself: only exceptions are followed by a back-off.
  bool own_pace = false;
};

class BackgroundTask {
 public:
  // Does one round and returns Ok, or why it failed. A round waits for its own work, and returns
  // soon after `stop` is requested.
  using Round = std::function<Status(const std::stop_token& stop)>;

  BackgroundTask(TaskOptions options, Round round);
  // Asks the thread to stop and waits for it.
  ~BackgroundTask();
  BackgroundTask(const BackgroundTask&) = delete;
  BackgroundTask& operator=(const BackgroundTask&) = delete;

  void RequestStop() { stop_.request_stop(); }
  // Its thread is there.
  bool running() const { return running_.load(std::memory_order_relaxed); }
  TaskReport& report() const { return *report_; }

 private:
  friend class TaskBoard;
  bool Start() noexcept;
  void Run() noexcept;

  const TaskOptions options_;
  const Round round_;
  TaskBoard* const board_;
  TaskReport* const report_;
  std::stop_source stop_;
  std::atomic<bool> running_{false};
  // --- under the board's mutex
  bool missed_ = false;  // a start has failed, and none has gone well since
  std::thread thread_;
};

}  // namespace embertide
