// Counts are about what was read; the hottest keys come first; nothing grows without bound.
#include "node/load_meter.h"

#include <gtest/gtest.h>

#include <random>
#include <thread>
#include <tuple>

#include "embertide/hash.h"

namespace embertide {
namespace {

std::vector<TableConfig> OneTable() {
  TableConfig table;
  table.name = "item";
  table.layout = {2, 4, DType::kFp32};
  table.bucket_bits = 1;
  return {table};
}

// As a store would tell of reading these keys one after another; returns how many it told of.
size_t Read(const std::vector<uint64_t>& keys, LoadMeter* meter) {
  std::vector<ObservedRead> observed;
  std::vector<WatchedKey> watched;
  std::mt19937 dice(2);
  const uint32_t every = meter->every();
  for (const uint64_t key : keys) {
    ObservedRead read;
    read.key = key;
    read.hash = HashKey(key);
    read.bucket = BucketOfHash(read.hash, 1);
    read.bytes = 32;
    read.source = Source::kDdr;
    read.weight = every;
    if (IsWatched(read.hash)) watched.push_back({read.hash, 0, read.bucket});
    if (dice() % every == 0) observed.push_back(read);
  }
  meter->Watch(watched);
  meter->Observe(observed);
  return observed.size();
}

TEST(LoadMeterTest, TellsWhatTheProcessSpentAndAnsweredInTheLastWindow) {
  LoadMeter meter(OneTable(), std::chrono::milliseconds(50));
  const auto busy_until = [](std::chrono::steady_clock::time_point end) {
    while (std::chrono::steady_clock::now() < end) {
    }
  };
  const auto begun = std::chrono::steady_clock::now();
  meter.NoteAnswered(std::chrono::microseconds(300), 2);
  meter.NoteAnswered(std::chrono::milliseconds(1), 1);
  busy_until(begun + std::chrono::milliseconds(60));
  LoadWindow window = meter.Last(10);
  EXPECT_EQ(window.requests, 3U);
  EXPECT_EQ(window.request_us, 1600U);
  EXPECT_GT(window.cpu_us, 5'000U);  // it spun for 60 ms, on a machine that others use too
  EXPECT_LT(window.cpu_us, 2 * window.window_ms * 1'000);
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  window = meter.Last(10);
  EXPECT_EQ(window.requests, 0U);
  EXPECT_EQ(window.request_us, 0U);
  EXPECT_LT(window.cpu_us, 30'000U);  // it slept
}

TEST(LoadMeterTest, TellsReadsDistinctAndHotKeysOfTheLastWindow) {
  LoadMeter meter(OneTable(), std::chrono::milliseconds(50));
  EXPECT_EQ(meter.Last(10).window_ms, 0U);
  std::mt19937_64 random(1);
  std::vector<uint64_t> keys;
  for (int i = 0; i < 200'000; ++i) keys.push_back(i % 10 == 0 ? 42 : random() % 20'000);
  Read(keys, &meter);
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  const LoadWindow window = meter.Last(10);
  ASSERT_GE(window.window_ms, 50U);
  uint64_t reads = 0;
  uint64_t distinct = 0;
  for (const BucketReads& bucket : window.buckets[0]) {
    reads += bucket.reads;
    distinct += bucket.unique_keys;
    EXPECT_EQ(bucket.reads, bucket.by_source[static_cast<size_t>(Source::kDdr)]);
    EXPECT_EQ(bucket.bytes, bucket.reads * 32);
  }
  EXPECT_NEAR(static_cast<double>(reads), 200'000, 6'000);
  EXPECT_NEAR(static_cast<double>(distinct), 20'000, 20'000 * 0.5);
  ASSERT_EQ(window.hot_keys.size(), 10U);
  EXPECT_EQ(window.hot_keys[0].key, 42U);
  EXPECT_GE(window.hot_keys[0].reads, 17'000U);
  EXPECT_LE(window.hot_keys[0].reads - window.hot_keys[0].error, 23'000U);
  EXPECT_LT(window.hot_keys[1].reads, 5'000U);
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  EXPECT_TRUE(meter.Last(10).hot_keys.empty()) << "a window without reads";
}

// 20,000 reads a second are heard one by one; of ten times as many, a tenth, and they count as
// much.
TEST(LoadMeterTest, HearsAPartOfWhatIsTooMuch) {
  constexpr auto kWindow = std::chrono::milliseconds(100);
  LoadMeter meter(OneTable(), kWindow);
  const auto window = [&](size_t reads) {
    std::vector<uint64_t> keys;
    for (size_t i = 0; i < reads; ++i) keys.push_back(i % 1000);
    const size_t told = Read(keys, &meter);
    std::this_thread::sleep_for(kWindow + std::chrono::milliseconds(10));
    uint64_t counted = 0;
    const LoadWindow last = meter.Last(10);
    for (const BucketReads& bucket : last.buckets[0]) counted += bucket.reads;
    // A window on a busy machine is longer than that.
    const double a_window = 20'000 * static_cast<double>(last.window_ms) / 1000;
    return std::tuple(told, counted, a_window);
  };
  window(200);
  {
    const auto [told, counted, most] = window(500);
    EXPECT_EQ(told, 500U) << "few are told one by one";
    EXPECT_EQ(counted, 500U);
  }
  for (int i = 0; i < 4; ++i) {
    const auto [told, counted, most] = window(400'000);
    if (i == 0) continue;  // nobody knew
    EXPECT_LT(static_cast<double>(told), 3 * most);
    EXPECT_NEAR(static_cast<double>(counted), 400'000, 60'000);
  }
  EXPECT_GT(meter.every(), 20U);
}

}  // namespace
}  // namespace embertide
