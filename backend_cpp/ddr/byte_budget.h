// ByteBudget: the bound that resident bytes never cross (DESIGN.md section 9, invariant 3).
//
// Everything that a store keeps in memory is charged here before it is allocated and released after
// it is freed. Thread-safe and lock-free.
#pragma once

#include <atomic>
#include <cstdint>

namespace embertide {

class ByteBudget {
 public:
  explicit ByteBudget(uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Charges `bytes` unless that would cross the limit; false then, and nothing is charged.
  [[nodiscard]] bool TryCharge(uint64_t bytes) {
    uint64_t used = used_bytes_.load(std::memory_order_relaxed);
    while (used + bytes <= limit_bytes_) {
      if (used_bytes_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed)) {
        return true;
      }
    }
    return false;
  }
  void Release(uint64_t bytes) { used_bytes_.fetch_sub(bytes, std::memory_order_relaxed); }

  uint64_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }
  uint64_t limit_bytes() const { return limit_bytes_; }

 private:
  const uint64_t limit_bytes_;
  std::atomic<uint64_t> used_bytes_{0};
};

}  // namespace embertide
