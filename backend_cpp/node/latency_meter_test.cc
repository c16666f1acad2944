// The p99 is that of the last second, near enough, whoever notes it.
#include "node/latency_meter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>
#include <vector>

namespace embertide {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr LatencyMeter::Clock::time_point kBegin{std::chrono::hours(1)};

TEST(LatencyMeterTest, TellsTheP99OfManyWithinAnEighth) {
  std::mt19937_64 random(3);
  for (const double scale : {3.0, 100.0, 5000.0, 200'000.0}) {
    LatencyMeter meter;
    std::exponential_distribution<double> draw(1 / scale);
    std::vector<uint64_t> all;
    for (int i = 0; i < 20'000; ++i) {
      all.push_back(static_cast<uint64_t>(draw(random)));
      meter.Note(microseconds(all.back()), 1, kBegin + milliseconds(i % 900));
    }
    std::ranges::sort(all);
    const uint64_t p99 = all[all.size() - all.size() / 100];
    const uint64_t told = meter.P99Us(kBegin + milliseconds(900));
    EXPECT_GE(told, p99);
    EXPECT_LE(told, p99 + p99 / 8);
  }
}

TEST(LatencyMeterTest, ForgetsAfterASecondAndTellsZeroWhenNoneCame) {
  LatencyMeter meter;
  EXPECT_EQ(meter.P99Us(kBegin), 0U);
  meter.Note(milliseconds(500), 1, kBegin);
  meter.Note(milliseconds(1), 50, kBegin + milliseconds(500));
  EXPECT_GE(meter.P99Us(kBegin + milliseconds(899)), 500'000U);
  const uint64_t later = meter.P99Us(kBegin + milliseconds(1100));
  EXPECT_GE(later, 1000U);
  EXPECT_LE(later, 1125U);
  EXPECT_EQ(meter.P99Us(kBegin + milliseconds(1600)), 0U);
  // The same place of the ring, a round later: what was counted there before is gone.
  meter.Note(microseconds(500), 1, kBegin + milliseconds(2200));
  EXPECT_LE(meter.P99Us(kBegin + milliseconds(2250)), 562U);
}

TEST(LatencyMeterTest, TheSlowestOfAFewIsTold) {
  LatencyMeter meter;
  meter.Note(microseconds(100), 99, kBegin);
  meter.Note(milliseconds(30), 1, kBegin);
  EXPECT_GE(meter.P99Us(kBegin), 30'000U);
  meter.Note(microseconds(100), 200, kBegin);
  EXPECT_GE(meter.P99Us(kBegin), 100U);
  meter.Note(microseconds(100), 100, kBegin);
  EXPECT_LE(meter.P99Us(kBegin), 30'000U + 30'000U / 8);
}

TEST(LatencyMeterTest, WhatIsVeryLongStaysVeryLong) {
  LatencyMeter meter;
  meter.Note(seconds(3600), 1, kBegin);
  EXPECT_GE(meter.P99Us(kBegin), 60'000'000U);
  meter.Note(-seconds(1), 1000, kBegin);  // a clock that went back
  EXPECT_EQ(meter.P99Us(kBegin), 1U);
}

TEST(LatencyMeterConcurrencyTest, NothingIsLostWhereATenthBegins) {
  // All threads open each tenth together. A lost note shows as a p99 that is too low: of 99 + 1
  // notes the one that is slow must not go.
  LatencyMeter meter;
  constexpr int kThreads = 4;
  constexpr int kRounds = 2000;
  std::atomic<int> round{0};
  std::atomic<int> done{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int r = 1; r <= kRounds; ++r) {
        for (int now = round; now < r; now = round) round.wait(now);
        const auto at = kBegin + seconds(2 * r);
        meter.Note(t == 0 ? milliseconds(30) : milliseconds(1), 1, at);
        ++done;
        done.notify_one();
      }
    });
  }
  int low = 0;
  for (int r = 1; r <= kRounds; ++r) {
    round = r;
    round.notify_all();
    for (int now = done; now < r * kThreads; now = done) done.wait(now);
    low += meter.P99Us(kBegin + seconds(2 * r)) < 30'000 ? 1 : 0;
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(low, 0);
}

}  // namespace
}  // namespace embertide
