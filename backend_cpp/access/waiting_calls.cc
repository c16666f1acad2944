#include "access/waiting_calls.h"

namespace embertide {

void WaitingCalls::Enter(grpc::GenericCallbackServerContext* context, Place* place) {
  const auto now = std::chrono::steady_clock::now();
  const std::lock_guard lock(mutex_);
  EndLateLocked(now);
  place->at_ = waiting_.insert(waiting_.end(), {now + most_, context, place});
}

bool WaitingCalls::Leave(Place* place) {
  const std::lock_guard lock(mutex_);
  const bool waited = place->at_.has_value();
  if (waited) waiting_.erase(*place->at_);
  place->at_.reset();
  return waited;
}

void WaitingCalls::EndLate() {
  const std::lock_guard lock(mutex_);
  EndLateLocked(std::chrono::steady_clock::now());
}

void WaitingCalls::EndLateLocked(std::chrono::steady_clock::time_point now) {
  while (!waiting_.empty() && waiting_.front().due <= now) {
    const Waiting late = waiting_.front();
    waiting_.pop_front();
    late.place->at_.reset();
    ++late_;
    late.context->TryCancel();  // it cannot be deleted before it has left, which needs the mutex
  }
}

}  // namespace embertide
