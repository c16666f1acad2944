// The threads, and who starts one.
#include "access/call_threads.h"

#include <new>
#include <utility>

#include "base/background_task.h"
#include "base/task_faults.h"
#include "base/thread_name.h"

namespace embertide {

CallThreads::~CallThreads() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& each : threads_) each.join();
}

void CallThreads::Run(std::function<void()> call) {
  {
    const std::lock_guard lock(mutex_);
    if (idle_ <= waiting_.size() && threads_.size() < most_) {
      try {
        FaultAt("answers", FaultPoint::kStart);
        threads_.emplace_back([this] { Work(); });
        report_->Good();
      } catch (const std::exception& error) {
        // A limit of processes or of memory; those that are there do it.
        report_->NotStarted(error.what(), false);
      }
    }
    try {
      if (!threads_.empty()) {
        waiting_.push_back(std::move(call));
        call = nullptr;
      }
    } catch (const std::bad_alloc&) {
      report_->Failed("out of memory");  // it is done here
    }
  }
  if (call) {
    call();
  } else {
    wake_.notify_one();
  }
}

void CallThreads::Work() {
  NameThread("answers");
  std::unique_lock lock(mutex_);
  while (true) {
    ++idle_;
    wake_.wait(lock, [this] { return stop_ || !waiting_.empty(); });
    --idle_;
    if (waiting_.empty()) return;
    const std::function<void()> call = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    call();
    lock.lock();
  }
}

}  // namespace embertide
