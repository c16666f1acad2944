// WaitingCalls: calls that wait for their caller, for a message to come or an answer to go. One
// that waits too long is cancelled by the next one that comes, or by who calls EndLate; none holds
// a thread. Private to access, peer and front. Thread-safe.
#pragma once

#include <grpcpp/generic/async_generic_service.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>

namespace embertide {

class WaitingCalls {
 private:
  struct Waiting;
  using List = std::list<Waiting>;

 public:
  // A call's own place here; empty while it does not wait.
  class Place {
   private:
    friend class WaitingCalls;
    std::optional<List::iterator> at_;  // under the mutex
  };

  explicit WaitingCalls(std::chrono::milliseconds most) : most_(most) {}
  // Requires: the call has not ended; `place` is empty and stays where it is until Leave.
  void Enter(grpc::GenericCallbackServerContext* context, Place* place);
  // Returns once nobody here touches the call any more, and whether it was still waiting; does
  // nothing for an empty place.
  bool Leave(Place* place);
  void EndLate();
  // The number of calls that were cancelled.
  uint64_t late() const { return late_; }

 private:
  struct Waiting {
    std::chrono::steady_clock::time_point due;
    grpc::GenericCallbackServerContext* context = nullptr;
    Place* place = nullptr;
  };
  void EndLateLocked(std::chrono::steady_clock::time_point now);

  const std::chrono::milliseconds most_;
  std::atomic<uint64_t> late_{0};
  // Cancelling a call may call its Leave from within.
  std::recursive_mutex mutex_;
  List waiting_;  // the earliest due first
};

}  // namespace embertide
