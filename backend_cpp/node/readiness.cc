// The thread that looks.
#include "node/readiness.h"

#include <algorithm>

#include "base/sleep.h"

namespace embertide {
namespace {

constexpr std::chrono::milliseconds kLookEvery{500};
// Until the node is ready for the first time.
constexpr std::chrono::milliseconds kLookAtStart{20};

}  // namespace

Readiness::Readiness(TaskBoard* board, std::function<std::string()> why_not,
                     std::function<void(bool ready)> tell)
    : board_(board),
      find_why_not_(std::move(why_not)),
      tell_(std::move(tell)),
      why_not_(find_why_not_()) {
  const bool ready = why_not_.empty();
  every_ = ready ? kLookEvery : kLookAtStart;
  tell_(ready);
  task_ =
      std::make_unique<BackgroundTask>(TaskOptions{.name = "readiness", .board = board},
                                       [this](const std::stop_token& stop) { return Look(stop); });
}

std::string Readiness::why_not() const {
  const MutexLock lock(mutex_);
  return why_not_;
}

bool Readiness::Await(std::chrono::steady_clock::time_point deadline, const std::stop_token& stop) {
  const auto is_ready = [this]() EMBERTIDE_REQUIRES(mutex_) { return why_not_.empty(); };
  while (std::chrono::steady_clock::now() < deadline && !stop.stop_requested()) {
    board_->StartMissing();  // nobody else may be there to do so
    MutexLock lock(mutex_);
    if (looked_.wait_until(lock, stop,
                           std::min(deadline, std::chrono::steady_clock::now() + kLookEvery),
                           is_ready)) {
      return true;
    }
  }
  return false;
}

Status Readiness::Look(const std::stop_token& stop) {
  if (!SleepFor(stop, every_)) return Status::Ok();
  std::string now = find_why_not_();
  const bool ready = now.empty();
  if (ready != why_not().empty()) tell_(ready);
  if (ready) every_ = kLookEvery;
  {
    const MutexLock lock(mutex_);
    why_not_ = std::move(now);
  }
  looked_.notify_all();
  return Status::Ok();
}

}  // namespace embertide
