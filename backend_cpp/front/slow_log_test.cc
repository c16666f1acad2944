#include "front/slow_log.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace embertide::front {
namespace {

using std::chrono::minutes;
using std::chrono::seconds;

constexpr SlowLog::Time kStart{std::chrono::hours(5)};

SlowCall Took(double us) {
  SlowCall call{
      .ended_ms = 1, .model = "news", .samples = 64, .version = 3, .trace = {}, .times = {}};
  call.times.whole_us = us;
  call.times.us = {1, 2, -1, -1, -1, 3};
  return call;
}

std::vector<double> Read(const SlowLog& log, const char* span, SlowLog::Time now) {
  const auto json = nlohmann::json::parse(log.Json(now));
  std::vector<double> all;
  for (const auto& call : json.at(span)) all.push_back(call.at("us"));
  return all;
}

TEST(SlowLog, KeepsTheSlowestOfASpan) {
  SlowLog log;
  for (int i = 0; i < 1000; ++i) log.Add(Took((i * 37) % 1000), kStart);
  for (const char* span : {"minute", "hour"}) {
    const std::vector<double> kept = Read(log, span, kStart);
    ASSERT_EQ(kept.size(), SlowLog::kKept);
    for (size_t i = 0; i < kept.size(); ++i) EXPECT_EQ(kept[i], 999 - static_cast<double>(i));
  }
}

TEST(SlowLog, ForgetsWhatIsOlderThanItsSpan) {
  SlowLog log;
  log.Add(Took(5), kStart);
  EXPECT_EQ(Read(log, "minute", kStart + seconds(60)).size(), 1U);
  EXPECT_EQ(Read(log, "minute", kStart + seconds(70)).size(), 0U);
  EXPECT_EQ(Read(log, "hour", kStart + minutes(60)).size(), 1U);
  EXPECT_EQ(Read(log, "hour", kStart + minutes(65)).size(), 0U);
  // A slot is used again.
  log.Add(Took(7), kStart + seconds(70));
  EXPECT_EQ(Read(log, "minute", kStart + seconds(70)), std::vector<double>{7});
  EXPECT_EQ(Read(log, "hour", kStart + seconds(70)), (std::vector<double>{7, 5}));
}

TEST(SlowLog, AsksForNothingThatItWouldNotKeep) {
  SlowLog log;
  EXPECT_TRUE(log.IsSlow(1, kStart));
  for (size_t i = 0; i < SlowLog::kKept; ++i) log.Add(Took(10 + static_cast<double>(i)), kStart);
  EXPECT_FALSE(log.IsSlow(10, kStart));
  EXPECT_TRUE(log.IsSlow(10.5, kStart));
  EXPECT_FALSE(log.IsSlow(1, kStart + seconds(9)));
  EXPECT_TRUE(log.IsSlow(1, kStart + seconds(10)));  // the slowest of its slot, so far
}

TEST(SlowLog, SaysWhatIsKnown) {
  SlowLog log;
  log.Add(Took(9), kStart);
  SlowCall other = Took(8);
  other.model = "\xff";
  other.samples = 0;
  other.version = 0;
  other.trace = "4bf92f3577b34da6a3ce929d0e0e4736";
  log.Add(other, kStart);
  const nlohmann::json minute = nlohmann::json::parse(log.Json(kStart)).at("minute");
  EXPECT_EQ(minute[0], nlohmann::json::parse(R"({"ended_ms": 1, "model": "news", "us": 9.0,
      "samples": 64, "version": 3, "stages_us": {"parse": 1.0, "queue": 2.0, "send": 3.0}})"));
  EXPECT_FALSE(minute[1].contains("samples"));
  EXPECT_FALSE(minute[1].contains("version"));
  EXPECT_EQ(minute[1].at("trace"), other.trace);
}

}  // namespace
}  // namespace embertide::front
