// Budget: bytes that all requests together may take. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>

namespace embertide::front {

class Budget {
 public:
  explicit Budget(uint64_t bytes) : bytes_(bytes) {}

  // False, and nothing is taken, if as many are not left.
  bool Take(uint64_t bytes) {
    uint64_t taken = taken_.load();
    do {
      if (bytes > bytes_ - taken) return false;
    } while (!taken_.compare_exchange_weak(taken, taken + bytes));
    return true;
  }
  // Requires: they were taken.
  void Give(uint64_t bytes) { taken_ -= bytes; }
  uint64_t taken() const { return taken_; }
  uint64_t bytes() const { return bytes_; }

 private:
  const uint64_t bytes_;
  std::atomic<uint64_t> taken_{0};
};

}  // namespace embertide::front
