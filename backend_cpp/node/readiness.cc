// The thread that looks.
#include "node/readiness.h"

#include "base/sleep.h"

namespace embertide {
namespace {

constexpr std::chrono::milliseconds kLookEvery{500};
// Until the node is ready for the first time.
constexpr std::chrono::milliseconds kLookAtStart{20};

}  // namespace

Readiness::Readiness(std::function<std::string()> why_not, std::function<void(bool ready)> tell)
    : find_why_not_(std::move(why_not)), tell_(std::move(tell)), why_not_(find_why_not_()) {
  tell_(why_not_.empty());
  thread_ = std::jthread([this](const std::stop_token& stop) { Look(stop); });
}

std::string Readiness::why_not() const {
  const MutexLock lock(mutex_);
  return why_not_;
}

bool Readiness::Await(std::chrono::steady_clock::time_point deadline) {
  MutexLock lock(mutex_);
  return looked_.wait_until(lock, deadline,
                            [this]() EMBERTIDE_REQUIRES(mutex_) { return why_not_.empty(); });
}

void Readiness::Look(const std::stop_token& stop) {
  bool was_ready = why_not().empty();
  std::chrono::milliseconds every = was_ready ? kLookEvery : kLookAtStart;
  while (SleepFor(stop, every)) {
    std::string why_not = find_why_not_();
    const bool ready = why_not.empty();
    if (ready != was_ready) tell_(ready);
    if (ready) every = kLookEvery;
    was_ready = ready;
    {
      const MutexLock lock(mutex_);
      why_not_ = std::move(why_not);
    }
    looked_.notify_all();
  }
}

}  // namespace embertide
