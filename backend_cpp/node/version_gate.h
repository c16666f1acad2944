// VersionGate: which of a node's versions ordinary requests are answered at, where a guard decides
// on them (docs/design/0011).
//
//   held:     5   6   7   8
//             ^promoted           ordinary requests: the newest held that may be seen
//                 \___|___/       candidates: requests that name them, the guard's
//
// Invariant: the served version is in the store's window, and never falls. A version that would
// push it out is not taken before the guard has decided; with a timeout, candidates that waited so
// long are served, unless one was withdrawn.
//
// One thread, that which applies versions, calls what is not const; any thread the rest.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>

#include "bus/promotion.h"
#include "embertide/node.h"

namespace embertide {

class VersionGate {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // `window`: versions that the store keeps, at least 2. `timeout` 0: candidates wait for ever.
  VersionGate(Promotion record, uint32_t window, std::chrono::milliseconds timeout);

  // Whether the record, or a timeout, lets ordinary requests see a version.
  bool MaySee(uint64_t number) const;
  // False: a version would push the served one out of the window. Counted as held back.
  bool MayTake(uint64_t number);
  // A newer revision of the record.
  void SetRecord(Promotion record);
  const Promotion& record() const { return record_; }
  // Around the store's commit of a version.
  void BeginCommit(uint64_t number, Time now);
  void EndCommit();
  // Looks at the timeout.
  void Tick(Time now);

  // The version of ordinary requests.
  uint64_t served() const { return served_; }
  // Once `served` has left the window, the version that was committed in its place.
  uint64_t next() const { return next_; }
  GuardStats stats() const;

 private:
  struct Held {
    uint64_t number;
    Time since;
  };

  void Choose();
  void Publish();

  const uint32_t window_;
  const std::chrono::milliseconds timeout_;
  Promotion record_;
  uint64_t timed_out_ = 0;  // versions up to this one are seen, as nobody decided in time
  std::deque<Held> held_;   // ascending; the store's window
  std::atomic<uint64_t> served_{0};
  std::atomic<uint64_t> next_{0};
  // For stats, which other threads ask for.
  std::atomic<uint64_t> promoted_{0};
  std::atomic<uint64_t> newest_{0};
  std::atomic<bool> holding_{false};
  std::atomic<uint64_t> unguarded_{0};
  std::array<std::atomic<uint64_t>, kWithdrawReasons.size()> withdrawn_{};
};

}  // namespace embertide
