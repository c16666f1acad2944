// Counts are about what was read; the hottest keys come first; nothing grows without bound.
#include "node/load_meter.h"

#include <gtest/gtest.h>

#include <random>
#include <thread>

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

// As a store would tell of reading these keys one after another.
std::vector<ObservedRead> Reads(const std::vector<uint64_t>& keys) {
  std::vector<ObservedRead> observed;
  std::mt19937 dice(2);
  for (size_t i = 0; i < keys.size(); ++i) {
    ObservedRead read;
    read.key = keys[i];
    read.hash = HashKey(keys[i]);
    read.bucket = BucketOfHash(read.hash, 1);
    read.bytes = 32;
    read.source = Source::kDdr;
    read.by_place = dice() % kObserveEvery == 0;
    read.by_key = (read.hash >> 20) % kObserveEvery == 0;
    if (read.by_place || read.by_key) observed.push_back(read);
  }
  return observed;
}

TEST(LoadMeterTest, TellsReadsDistinctAndHotKeysOfTheLastWindow) {
  LoadMeter meter(OneTable(), std::chrono::milliseconds(50));
  EXPECT_EQ(meter.Last(10).window_ms, 0U);
  std::mt19937_64 random(1);
  std::vector<uint64_t> keys;
  for (int i = 0; i < 200'000; ++i) keys.push_back(i % 10 == 0 ? 42 : random() % 20'000);
  meter.Observe(Reads(keys));
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

}  // namespace
}  // namespace embertide
