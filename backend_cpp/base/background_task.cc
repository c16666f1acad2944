// Rounds, and what is told of them.
#include "base/background_task.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <utility>

#include "base/sleep.h"
#include "base/task_faults.h"
#include "base/thread_name.h"

namespace embertide {
namespace {

constexpr std::chrono::milliseconds kStartAgain{500};
constexpr std::chrono::minutes kLogAgain{1};
// A task that fails and works by turns is logged so often at most.
constexpr std::chrono::seconds kLogSoonest{10};

std::atomic<FaultHook> fault_hook{nullptr};

int64_t NowMs() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// As SleepFor, which may find no memory.
bool Rest(const std::stop_token& stop, std::chrono::milliseconds time) noexcept {
  try {
    return SleepFor(stop, time);
  } catch (...) {
    const auto until = std::chrono::steady_clock::now() + time;
    while (!stop.stop_requested() && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return !stop.stop_requested();
  }
}

}  // namespace

void SetFaultHook(FaultHook hook) noexcept { fault_hook.store(hook); }

void FaultAt(const char* task, FaultPoint point) {
  if (const FaultHook hook = fault_hook.load(std::memory_order_relaxed)) hook(task, point);
}

// --- the report ----------------------------------------------------------------------------------

TaskReport::TaskReport(std::string name, const TaskBoard* board)
    : name_(std::move(name)), board_(board) {}

void TaskReport::Good() noexcept {
  if (!failing_.load(std::memory_order_relaxed)) return;
  std::string line;
  {
    const std::lock_guard lock(mutex_);
    if (missing_ > 0) return;
    failing_ = false;
    if (logged_) {
      try {
        line = "task " + name_ + " works again, after " + std::to_string(failures_in_a_row_) +
               (failures_in_a_row_ == 1 ? " failure in " : " failures in ") +
               std::to_string((NowMs() - failing_since_ms_) / 1000) + " s";
      } catch (...) {
        line.clear();
      }
    }
    failures_in_a_row_ = 0;
    failing_since_ms_ = 0;
    logged_ = false;
  }
  if (line.empty() || !board_->log_) return;
  try {
    board_->log_(line);
  } catch (...) {
    return;  // the log's trouble is not the task's
  }
}

std::string TaskReport::LineOfFailure(Clock::time_point now) {
  if (now < may_log_) return "";
  may_log_ = now + (logged_ ? Clock::duration(kLogAgain) : Clock::duration(kLogSoonest));
  logged_ = true;
  return "task " + name_ + " fails, and is tried again: " + error_ +
         (failures_in_a_row_ > 1 ? " (" + std::to_string(failures_in_a_row_) + " times)" : "");
}

void TaskReport::Fail(const char* error, uint64_t* count, bool misses_more) noexcept {
  try {
    std::string line;
    {
      const std::lock_guard lock(mutex_);
      ++*count;
      missing_ += misses_more ? 1 : 0;
      std::snprintf(error_, sizeof(error_), "%s", error);
      ++failures_in_a_row_;
      if (failing_since_ms_ == 0) failing_since_ms_ = NowMs();
      failing_ = true;
      line = LineOfFailure(Clock::now());
    }
    if (!line.empty() && board_->log_) board_->log_(line);
  } catch (...) {
    return;  // no memory for the line: it is counted all the same
  }
}

void TaskReport::Failed(const char* error) noexcept { Fail(error, &failures_, false); }

void TaskReport::NotStarted(const char* error, bool first) noexcept {
  char text[sizeof(error_)];
  std::snprintf(text, sizeof(text),
                "its thread cannot be started: %s; raise the limit of threads (ulimit -u, pids)",
                error);
  Fail(text, &failed_starts_, first);
}

void TaskReport::MissesOneLess() noexcept {
  {
    const std::lock_guard lock(mutex_);
    --missing_;
  }
  Good();
}

void TaskReport::Note(const Status& status) noexcept {
  if (status.ok()) return Good();
  try {
    Failed(status.ToString().c_str());
  } catch (...) {
    Failed("out of memory");
  }
}

TaskHealth TaskReport::Health() const {
  const std::lock_guard lock(mutex_);
  return {name_, failing_, missing_ > 0, failures_, failed_starts_, failing_since_ms_, error_};
}

// --- the board -----------------------------------------------------------------------------------

TaskBoard::TaskBoard(std::function<void(const std::string&)> log) : log_(std::move(log)) {}

TaskBoard& TaskBoard::OfProcess() {
  static auto* const board = new TaskBoard([](const std::string& line) {
    std::fprintf(stderr, "embertide: %s\n", line.c_str());
  });  // threads may outlive main
  return *board;
}

TaskReport* TaskBoard::Of(const std::string& name) {
  const std::lock_guard lock(mutex_);
  for (const auto& report : reports_) {
    if (report->name_ == name) return report.get();
  }
  return reports_.emplace_back(new TaskReport(name, this)).get();
}

std::vector<TaskHealth> TaskBoard::Tasks() const {
  std::vector<TaskHealth> tasks;
  {
    const std::lock_guard lock(mutex_);
    tasks.reserve(reports_.size());
    for (const auto& report : reports_) tasks.push_back(report->Health());
  }
  std::ranges::sort(tasks, {}, &TaskHealth::name);
  return tasks;
}

void TaskBoard::StartSome() noexcept {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || std::chrono::steady_clock::now() < start_again_) return;
  std::erase_if(missing_, [](BackgroundTask* task) { return task->Start(); });
  missing_count_ = missing_.size();
  start_again_ = std::chrono::steady_clock::now() + kStartAgain;
}

void TaskBoard::Add(BackgroundTask* task) {
  const std::lock_guard lock(mutex_);
  missing_.push_back(task);
  if (task->Start()) missing_.pop_back();
  missing_count_ = missing_.size();
  start_again_ = std::chrono::steady_clock::now() + kStartAgain;
}

void TaskBoard::Remove(BackgroundTask* task) {
  const std::lock_guard lock(mutex_);
  std::erase(missing_, task);
  missing_count_ = missing_.size();
}

// --- the task ------------------------------------------------------------------------------------

BackgroundTask::BackgroundTask(TaskOptions options, Round round)
    : options_(std::move(options)),
      round_(std::move(round)),
      board_(options_.board == nullptr ? &TaskBoard::OfProcess() : options_.board),
      report_(board_->Of(options_.name)) {
  board_->Add(this);
}

BackgroundTask::~BackgroundTask() {
  stop_.request_stop();
  board_->Remove(this);
  if (missed_) report_->MissesOneLess();
  if (thread_.joinable()) thread_.join();
}

bool BackgroundTask::Start() noexcept {
  try {
    FaultAt(options_.name.c_str(), FaultPoint::kStart);
    thread_ = std::thread([this] { Run(); });
    running_ = true;
    if (std::exchange(missed_, false)) report_->MissesOneLess();
    return true;
  } catch (const std::exception& error) {
    report_->NotStarted(error.what(), !std::exchange(missed_, true));
    return false;
  } catch (...) {
    report_->NotStarted("no reason is given", !std::exchange(missed_, true));
    return false;
  }
}

void BackgroundTask::Run() noexcept {
  NameThread(options_.name);
  const std::stop_token stop = stop_.get_token();
  auto back_off = options_.first_back_off;
  while (!stop.stop_requested()) {
    bool rests = true;
    try {
      FaultAt(options_.name.c_str(), FaultPoint::kRound);
      const Status status = round_(stop);
      if (stop.stop_requested()) return;
      report_->Note(status);
      rests = !status.ok() && !options_.own_pace;
      if (status.ok()) back_off = options_.first_back_off;
    } catch (const std::bad_alloc&) {
      report_->Failed("out of memory");
    } catch (const std::exception& error) {
      report_->Failed(error.what());
    } catch (...) {
      report_->Failed("an exception that says nothing");
    }
    board_->StartMissing();
    TaskBoard::OfProcess().StartMissing();  // its tasks may all be missing
    if (!rests) continue;
    if (!Rest(stop, back_off)) return;
    back_off = std::min(2 * back_off, options_.longest_back_off);
  }
}

}  // namespace embertide
