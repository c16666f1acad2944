// Callers: what each caller has under way, so that none takes all the room of the others. Only
// those with a call under way are known, so there are no more of them than calls.
//
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>

#include "front/budget.h"

namespace embertide::front {

class Callers {
 public:
  struct Limits {
    uint32_t calls = 0;  // of one caller, at once
    uint64_t bytes = 0;  // of those calls
  };
  class Caller {
   public:
    explicit Caller(uint64_t max_bytes) : bytes(max_bytes) {}
    Budget bytes;

   private:
    friend class Callers;
    uint32_t calls_ = 0;                 // under the mutex
    const std::string* name_ = nullptr;  // its own in the map
  };

  explicit Callers(const Limits& limits) : limits_(limits) {}
  const Limits& limits() const { return limits_; }

  // A place for a call of this caller, until Leave; null if it has as many as it may.
  Caller* Enter(const std::string& name);
  // Requires: Enter gave it; what was taken of its bytes has been given back.
  void Leave(Caller* caller);
  // The number of callers that have a call under way.
  size_t known() const {
    const std::lock_guard lock(mutex_);
    return callers_.size();
  }

 private:
  const Limits limits_;
  mutable std::mutex mutex_;
  std::unordered_map<std::string, Caller> callers_;  // under mutex_; entries stay where they are
};

}  // namespace embertide::front
