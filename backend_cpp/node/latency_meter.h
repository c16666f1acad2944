// LatencyMeter: the p99 of what was answered in the last second, for heartbeats.
//
// A histogram for each tenth of a second, in a ring of eleven, with eight bins an octave:
//
//   bin  0 .. 7   0, 1, .. 7 us          cell = tenth that it counts (high half) | count (low half)
//   bin  8 ..15   8, 9, .. 15 us
//   bin 16 ..23   16, 18, .. 30 us       a cell of an older tenth is empty: nothing is ever cleared
//   ...           up to 67 s, which also stands for all that is longer
//
// Thread-safe, without locks; noting allocates nothing and costs one exchange. 18 KiB.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace embertide {

class LatencyMeter {
 public:
  using Clock = std::chrono::steady_clock;

  // `requests` were answered that took this long.
  void Note(Clock::duration latency, uint32_t requests, Clock::time_point now = Clock::now());
  // In us, at most 1/8 more than the true one; 0 if nothing was answered in the last second (0.9 to
  // 1.0 s before `now`).
  uint64_t P99Us(Clock::time_point now = Clock::now()) const;

 private:
  static constexpr uint32_t kSubBits = 3;  // 8 bins an octave
  static constexpr uint32_t kOctaves = 24;
  static constexpr size_t kBins = kOctaves << kSubBits;
  static constexpr size_t kTenths = 11;  // the ten that are told, and the one that is written next

  static size_t BinOf(uint64_t us);
  static uint64_t EndOf(size_t bin);  // the longest latency of a bin, in us
  // Tenths of seconds; starts anew after 13 years.
  static uint32_t TenthOf(Clock::time_point now);

  std::array<std::array<std::atomic<uint64_t>, kBins>, kTenths> cells_{};
};

}  // namespace embertide
