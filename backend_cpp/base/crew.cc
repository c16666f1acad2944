// Handing work to sleeping threads, and waiting for them.
#include "base/crew.h"

#include <sched.h>

#include <chrono>
#include <utility>

#include "base/background_task.h"
#include "base/task_faults.h"
#include "base/thread_name.h"

namespace embertide {
namespace {

// A thread that sleeps takes 50 to 150 us to be at work, as long as a small execution; under load
// the next execution is there before this is over, and without load it costs next to nothing.
constexpr std::chrono::microseconds kAwake(200);
// Between attempts to start threads that are missing.
constexpr std::chrono::milliseconds kThreadsAgain(500);

// Tells the CPU that the core's other thread may have its turn.
void Relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  // `yield` does nothing on most cores; `isb` waits about as long as x86's `pause`.
  asm volatile("isb" ::: "memory");
#endif
}

// Waits until `value` is not `old`: awake for kAwake, leaving the core to whoever wants it, then
// asleep.
void WaitWhile(const std::atomic<uint32_t>& value, uint32_t old) {
  const auto end = std::chrono::steady_clock::now() + kAwake;
  do {
    for (int i = 0; i < 64; ++i) {
      if (value.load() != old) return;
      Relax();
    }
    sched_yield();
  } while (std::chrono::steady_clock::now() < end);
  value.wait(old);
}

}  // namespace

Crew::Crew(uint32_t threads, TaskBoard* board)
    : report_((board == nullptr ? TaskBoard::OfProcess() : *board).Of("crew")) {
  for (uint32_t part = 1; part < threads; ++part) {
    workers_.push_back(std::make_unique<Worker>());
    Start(part);
  }
  start_again_ = std::chrono::steady_clock::now() + kThreadsAgain;
}

Crew::~Crew() {
  work_ = nullptr;
  for (const auto& worker : workers_) {
    if (worker->missed) report_->MissesOneLess();
    if (!worker->thread.joinable()) continue;
    ++worker->round;
    worker->round.notify_one();
    worker->thread.join();
  }
}

void Crew::Start(uint32_t part) noexcept {
  Worker* const worker = workers_[part - 1].get();
  try {
    FaultAt("crew", FaultPoint::kStart);
    worker->thread = std::thread([this, worker, part] {
      NameThread("crew");
      Serve(worker, part);
    });
    if (!worker->missed) return;
    worker->missed = false;
    --missing_;
    report_->MissesOneLess();
  } catch (const std::exception& error) {
    report_->NotStarted(error.what(), !worker->missed);
    missing_ += worker->missed ? 0 : 1;
    worker->missed = true;
  }
}

void Crew::StartMissing() noexcept {
  const auto now = std::chrono::steady_clock::now();
  if (now < start_again_) return;
  start_again_ = now + kThreadsAgain;
  for (uint32_t part = 1; part < size(); ++part) {
    if (workers_[part - 1]->missed) Start(part);
  }
}

void Crew::Do(uint32_t part) noexcept {
  try {
    FaultAt("crew", FaultPoint::kRound);
    (*work_)(part);
  } catch (...) {
    const std::lock_guard lock(failure_mutex_);
    if (failure_ == nullptr) failure_ = std::current_exception();
  }
}

void Crew::Serve(Worker* worker, uint32_t part) {
  for (uint32_t seen = 0;;) {
    WaitWhile(worker->round, seen);
    seen = worker->round.load();
    if (work_ == nullptr) return;
    Do(part);
    if (--at_work_ == 0) at_work_.notify_one();
  }
}

void Crew::Run(uint32_t parts, const std::function<void(uint32_t)>& work) {
  if (missing_ > 0) StartMissing();
  const auto runs = [this](uint32_t part) { return workers_[part - 1]->thread.joinable(); };
  uint32_t given = 0;
  for (uint32_t part = 1; part < parts; ++part) given += runs(part) ? 1 : 0;
  work_ = &work;
  at_work_ = given;
  for (uint32_t part = 1; part < parts; ++part) {
    if (!runs(part)) continue;
    Worker& worker = *workers_[part - 1];
    ++worker.round;
    worker.round.notify_one();
  }
  Do(0);
  for (uint32_t part = 1; given + 1 < parts && part < parts; ++part) {
    if (!runs(part)) Do(part);
  }
  for (uint32_t left = at_work_; left != 0; left = at_work_) WaitWhile(at_work_, left);
  // Nobody writes to it any more.
  if (failure_ != nullptr) std::rethrow_exception(std::exchange(failure_, nullptr));
}

}  // namespace embertide
