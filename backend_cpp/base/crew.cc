// Handing work to sleeping threads, and waiting for them.
#include "base/crew.h"

#include <sched.h>

#include <chrono>

namespace embertide {
namespace {

// A thread that sleeps takes 50 to 150 us to be at work, as long as a small execution; under load
// the next execution is there before this is over, and without load it costs next to nothing.
constexpr std::chrono::microseconds kAwake(200);

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

Crew::Crew(uint32_t threads) {
  for (uint32_t part = 1; part < threads; ++part) {
    Worker* worker = workers_.emplace_back(std::make_unique<Worker>()).get();
    worker->thread = std::thread([this, worker, part] { Serve(worker, part); });
  }
}

Crew::~Crew() {
  work_ = nullptr;
  for (const auto& worker : workers_) {
    ++worker->round;
    worker->round.notify_one();
    worker->thread.join();
  }
}

void Crew::Serve(Worker* worker, uint32_t part) {
  for (uint32_t seen = 0;;) {
    WaitWhile(worker->round, seen);
    seen = worker->round.load();
    if (work_ == nullptr) return;
    (*work_)(part);
    if (--at_work_ == 0) at_work_.notify_one();
  }
}

void Crew::Run(uint32_t parts, const std::function<void(uint32_t)>& work) {
  work_ = &work;
  at_work_ = parts - 1;
  for (uint32_t part = 1; part < parts; ++part) {
    Worker& worker = *workers_[part - 1];
    ++worker.round;
    worker.round.notify_one();
  }
  work(0);
  for (uint32_t left = at_work_; left != 0; left = at_work_) WaitWhile(at_work_, left);
}

}  // namespace embertide
