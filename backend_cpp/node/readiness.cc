// The thread that looks.
#include "node/readiness.h"

namespace embertide {
namespace {

constexpr std::chrono::milliseconds kLookEvery{500};
// Until the node is ready for the first time.
constexpr std::chrono::milliseconds kLookAtStart{20};

}  // namespace

Readiness::Readiness(std::function<std::string()> why_not, std::function<void(bool ready)> tell)
    : find_why_not_(std::move(why_not)), tell_(std::move(tell)), why_not_(find_why_not_()) {
  tell_(why_not_.empty());
  thread_ = std::thread([this] { Look(); });
}

Readiness::~Readiness() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

std::string Readiness::why_not() const {
  const MutexLock lock(mutex_);
  return why_not_;
}

bool Readiness::Await(std::chrono::steady_clock::time_point deadline) {
  MutexLock lock(mutex_);
  return wake_.wait_until(lock, deadline,
                          [this]() EMBERTIDE_REQUIRES(mutex_) { return why_not_.empty(); });
}

bool Readiness::Wait(std::chrono::milliseconds time) {
  MutexLock lock(mutex_);
  return !wake_.wait_for(lock, time, [this]() EMBERTIDE_REQUIRES(mutex_) { return stop_; });
}

void Readiness::Look() {
  bool was_ready = why_not().empty();
  std::chrono::milliseconds every = was_ready ? kLookEvery : kLookAtStart;
  while (Wait(every)) {
    std::string why_not = find_why_not_();
    const bool ready = why_not.empty();
    if (ready != was_ready) tell_(ready);
    if (ready) every = kLookEvery;
    was_ready = ready;
    {
      const MutexLock lock(mutex_);
      why_not_ = std::move(why_not);
    }
    wake_.notify_all();
  }
}

}  // namespace embertide
