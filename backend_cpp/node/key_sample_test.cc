// The lookups that stay in a sample: within its bytes, and mostly of late.
#include "node/key_sample.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>

namespace embertide {
namespace {

const std::vector<TableConfig>& Tables() {
  static const std::vector<TableConfig> tables = [] {
    std::vector<TableConfig> made(3);
    made[0].name = "user";
    made[1].name = "item";
    made[2].name = "hour";
    return made;
  }();
  return tables;
}

std::vector<KeySample::Lookup> Kept(const KeySample& sample) {
  auto read = KeySample::Parse(sample.Serialized(Tables()), Tables(), 1U << 30);
  EXPECT_TRUE(read.ok()) << read.status().ToString();
  return read.value();
}

TEST(KeySampleTest, KeysOfARequestStandByTable) {
  const std::vector<BagFeature> features = {{1}, {0}, {1}};
  const std::vector<int64_t> keys = {7, 5, 9, 7, 6, 7};
  const auto rectangular = KeySample::KeysOf(features, {.keys = keys, .offsets = {}});
  ASSERT_EQ(rectangular.size(), 2U);
  EXPECT_EQ(rectangular[0].table, 0U);
  EXPECT_EQ(rectangular[0].keys, (std::vector<int64_t>{5, 6}));
  EXPECT_EQ(rectangular[1].keys, (std::vector<int64_t>{7, 9, 7, 7}));
  // Bags of 2, 0 and 3 keys, which begin at the second key.
  const std::vector<uint32_t> offsets = {1, 3, 3, 6};
  const auto jagged = KeySample::KeysOf(features, {.keys = keys, .offsets = offsets});
  ASSERT_EQ(jagged.size(), 1U);
  EXPECT_EQ(jagged[0].table, 1U);
  EXPECT_EQ(jagged[0].keys, (std::vector<int64_t>{5, 9, 7, 6, 7}));
}

TEST(KeySampleTest, KeysThatAPeerAnsweredAreNotThisNodes) {
  const std::vector<BagFeature> features = {{0}};
  const std::vector<int64_t> keys = {7, 5, 9};
  const std::vector<uint32_t> remote_of = {0, 1, 0};
  const auto found =
      KeySample::KeysOf(features, {.keys = keys, .offsets = {}, .remote_of = remote_of.data()});
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].keys, (std::vector<int64_t>{7, 9}));
}

TEST(KeySampleTest, OneLookupInSixteenIsTaken) {
  KeySample sample(1U << 20);
  int taken = 0;
  for (int n = 0; n < 1600; ++n) taken += sample.Takes() ? 1 : 0;
  EXPECT_EQ(taken, 100);
}

TEST(KeySampleTest, RequestsThatComeInACircleAreAllTaken) {
  KeySample sample(1U << 20);
  std::vector<bool> taken(32);
  for (int n = 0; n < 32 * 400; ++n) {
    if (sample.Takes()) taken[n % 32] = true;
  }
  EXPECT_EQ(std::ranges::count(taken, true), 32);
}

TEST(KeySampleTest, StaysWithinItsBytesAndForgetsTheOldest) {
  constexpr uint64_t kBytes = 64 << 10;
  std::mt19937_64 random(5);
  KeySample sample(kBytes);
  for (int64_t n = 0; n < 20'000; ++n) {
    // Its number first, then others; some keys twice.
    KeySample::Lookup lookup = {{2, {n}}, {0, {}}};
    for (uint64_t k = random() % 40; k > 0; --k) lookup[1].keys.push_back(random() % 100);
    sample.Add(std::move(lookup));
    ASSERT_LE(sample.figures().bytes, kBytes);
  }
  const KeySample::Figures figures = sample.figures();
  EXPECT_EQ(figures.taken, 20'000U);
  EXPECT_EQ(figures.too_large, 0U);
  EXPECT_GT(figures.bytes, kBytes / 2);
  const std::vector<KeySample::Lookup> kept = Kept(sample);
  EXPECT_EQ(kept.size(), figures.lookups);
  int64_t oldest = 20'000;
  for (const KeySample::Lookup& lookup : kept) {
    for (const KeySample::Keys& of : lookup) {
      EXPECT_TRUE(std::ranges::is_sorted(of.keys, std::ranges::less_equal())) << "distinct";
      if (of.table == 2) oldest = std::min(oldest, of.keys[0]);
    }
  }
  // One that was there before ten times as many came stays with a chance of e^-10.
  EXPECT_GT(oldest, 20'000 - 20 * static_cast<int64_t>(kept.size()));
}

TEST(KeySampleTest, ALookupThatIsTooLargeIsCounted) {
  KeySample sample(8 * 1000);
  KeySample::Lookup large = {{0, {}}};
  for (int64_t key = 0; key < 200; ++key) large[0].keys.push_back(key);
  sample.Add(large);
  EXPECT_EQ(sample.figures().too_large, 1U);
  EXPECT_EQ(sample.figures().lookups, 0U);
  large[0].keys.resize(50);
  sample.Add(large);
  EXPECT_EQ(sample.figures().lookups, 1U);
}

TEST(KeySampleTest, TablesThatAreGoneAreLeftOut) {
  KeySample sample(1U << 20);
  sample.Add({{0, {3}}, {1, {4, 5}}});
  sample.Add({{0, {6}}});
  const std::string text = sample.Serialized(Tables());
  const std::vector<TableConfig> others = {Tables()[2], Tables()[1]};
  const auto read = KeySample::Parse(text, others, 1U << 20);
  ASSERT_TRUE(read.ok());
  ASSERT_EQ(read.value().size(), 1U);
  EXPECT_EQ(read.value()[0][0].table, 1U);
  EXPECT_EQ(read.value()[0][0].keys, (std::vector<int64_t>{4, 5}));
}

TEST(KeySampleTest, AFileThatIsNoneIsRefused) {
  KeySample sample(1U << 20);
  sample.Add({{0, {3, 4, 5}}});
  const std::string text = sample.Serialized(Tables());
  EXPECT_EQ(KeySample::Parse(text.substr(0, text.size() - 1), Tables(), 1U << 20).status().code(),
            Code::kCorrupt);
  EXPECT_EQ(KeySample::Parse(text, Tables(), 23).status().code(), Code::kCorrupt);
  EXPECT_TRUE(KeySample::Parse(text, Tables(), 24).ok());
}

TEST(KeySampleTest, ManyThreadsMayAddAtOnce) {
  KeySample sample(16 << 10);
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&sample, t] {
      for (int64_t n = 0; n < 3000; ++n) {
        if (sample.Takes()) sample.Add({{static_cast<uint32_t>(t % 3), {n, n + 1}}});
        if (n % 500 == 0) Kept(sample);
      }
    });
  }
  threads.clear();
  EXPECT_EQ(sample.figures().taken, 4 * 3000 / KeySample::kOneIn);
  EXPECT_LE(sample.figures().bytes, 16U << 10);
}

}  // namespace
}  // namespace embertide
