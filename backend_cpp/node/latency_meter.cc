// Noting and telling latencies.
#include "node/latency_meter.h"

#include <algorithm>
#include <bit>

namespace embertide {

size_t LatencyMeter::BinOf(uint64_t us) {
  constexpr uint64_t kLinear = 1 << kSubBits;
  if (us < kLinear) return us;
  const auto octave = static_cast<uint32_t>(std::bit_width(us)) - kSubBits;  // 1 for 8 .. 15
  return std::min((size_t{octave} << kSubBits) + ((us >> (octave - 1)) & (kLinear - 1)), kBins - 1);
}

uint64_t LatencyMeter::EndOf(size_t bin) {
  constexpr uint64_t kLinear = 1 << kSubBits;
  if (bin < kLinear) return bin;
  const uint64_t octave = bin >> kSubBits;
  return ((kLinear + (bin & (kLinear - 1)) + 1) << (octave - 1)) - 1;
}

uint32_t LatencyMeter::TenthOf(Clock::time_point now) {
  constexpr std::chrono::milliseconds kTenth{100};
  return static_cast<uint32_t>(now.time_since_epoch() / kTenth);
}

void LatencyMeter::Note(Clock::duration latency, uint32_t requests, Clock::time_point now) {
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(latency).count();
  const uint32_t tenth = TenthOf(now);
  auto& cell = cells_[tenth % kTenths][BinOf(static_cast<uint64_t>(std::max<int64_t>(0, us)))];
  uint64_t held = cell.load(std::memory_order_relaxed);
  uint64_t next = 0;
  do {
    const uint64_t before = held >> 32 == tenth ? held : uint64_t{tenth} << 32;
    next = before + requests;
  } while (!cell.compare_exchange_weak(held, next, std::memory_order_relaxed));
}

uint64_t LatencyMeter::P99Us(Clock::time_point now) const {
  const uint32_t tenth = TenthOf(now);
  std::array<uint64_t, kBins> counts{};
  uint64_t all = 0;
  for (const auto& histogram : cells_) {
    for (size_t bin = 0; bin < kBins; ++bin) {
      const uint64_t held = histogram[bin].load(std::memory_order_relaxed);
      if (tenth - static_cast<uint32_t>(held >> 32) >= kTenths - 1) continue;
      counts[bin] += held & UINT32_MAX;
      all += held & UINT32_MAX;
    }
  }
  if (all == 0) return 0;
  // The bin that the slowest hundredth ends in, counted from above: one of a few is the slowest.
  uint64_t left = std::max<uint64_t>(1, all / 100);
  size_t bin = kBins - 1;
  while (counts[bin] < left) left -= counts[bin--];
  return std::max<uint64_t>(1, EndOf(bin));
}

}  // namespace embertide
