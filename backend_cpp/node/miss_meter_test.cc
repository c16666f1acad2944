// A sample of keys gives the curve of all of them.
#include "node/miss_meter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "embertide/hash.h"
#include "simulation/simulate.h"

namespace embertide {
namespace {

constexpr uint64_t kRowBytes = 100;

double At(const MissCurve& curve, double bytes) {
  size_t right = 1;
  while (right + 1 < curve.bytes.size() && static_cast<double>(curve.bytes[right]) < bytes) ++right;
  const auto left = static_cast<double>(curve.bytes[right - 1]);
  const double share = (bytes - left) / (static_cast<double>(curve.bytes[right]) - left);
  return curve.missed[right - 1] + share * (curve.missed[right] - curve.missed[right - 1]);
}

// Reads of two tables: of one, few keys often; of the other, all keys alike.
class MissMeterTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kKeys = 50'000;
  // `windows` of so many reads of each table.
  void Read(int windows, int reads) {
    for (int w = 0; w < windows; ++w) {
      for (int i = 0; i < reads; ++i) {
        const double u = std::uniform_real_distribution(1e-6, 1.0)(random_);
        Tell(0, static_cast<uint64_t>(kKeys * u * u * u * u));
        Tell(1, random_() % uniform_keys_);
      }
      meter_.EndWindow(std::vector<uint64_t>(2, reads));
    }
  }
  void Tell(uint32_t table, uint64_t key) {
    keys_[table].push_back(static_cast<int64_t>(key));
    const uint64_t hash = HashKey(key);
    if (!IsWatched(hash)) return;
    const WatchedKey watched{hash, table, static_cast<uint32_t>(hash >> 63)};
    meter_.Note({&watched, 1});
  }
  std::vector<MissCurve> Curves() const {
    return meter_.Curves([](uint32_t, uint32_t) { return 0U; },
                         [this](uint32_t table, uint32_t) {
                           const uint64_t keys = table == 0 ? kKeys : uniform_keys_;
                           return TableRows{keys, keys * kRowBytes};
                         });
  }
  // The share of misses among the second half of the reads of all keys.
  double Missed(uint32_t table, uint32_t capacity) const {
    const auto half = std::span(keys_[table]).first(keys_[table].size() / 2);
    const uint64_t all = Simulate(*Trace::FromKeys(keys_[table]), {"clock", capacity})->hits;
    const uint64_t warm = Simulate(*Trace::FromKeys(half), {"clock", capacity})->hits;
    const double counted = static_cast<double>(keys_[table].size() - half.size());
    return 1 - static_cast<double>(all - warm) / counted;
  }

  uint64_t uniform_keys_ = kKeys;
  std::mt19937_64 random_{3};
  std::vector<int64_t> keys_[2];
  MissMeter meter_{2};
};

TEST_F(MissMeterTest, ASampleGivesTheCurveOfAllKeys) {
  Read(20, 50'000);
  const std::vector<MissCurve> curves = Curves();
  ASSERT_EQ(curves.size(), 2U);
  for (uint32_t t = 0; t < 2; ++t) {
    EXPECT_EQ(curves[t].table, t);
    EXPECT_EQ(curves[t].bytes.front(), 0U);
    EXPECT_EQ(curves[t].missed.back(), 0.0);
    EXPECT_TRUE(std::ranges::is_sorted(curves[t].missed, std::greater()));
    for (const uint32_t capacity : {2'500, 5'000, 10'000, 20'000}) {
      EXPECT_NEAR(At(curves[t], static_cast<double>(capacity * kRowBytes)), Missed(t, capacity),
                  0.06)
          << "table " << t << ", room for " << capacity;
    }
  }
}

TEST_F(MissMeterTest, ManyReadsAreSampledMoreThinly) {
  uniform_keys_ = 400'000;
  Read(1, 300'000);
  Read(7, 1'000);
  EXPECT_TRUE(Curves().empty()) << "it has begun anew";
  for (std::vector<int64_t>& keys : keys_) keys.clear();
  Read(8, 200'000);
  const std::vector<MissCurve> curves = Curves();
  ASSERT_EQ(curves.size(), 2U);
  EXPECT_NEAR(At(curves[1], 160'000.0 * kRowBytes), Missed(1, 160'000), 0.1);
}

TEST_F(MissMeterTest, FewWindowsAndReadsElsewhereSayNothing) {
  EXPECT_TRUE(Curves().empty());
  Read(5, 50'000);
  EXPECT_TRUE(Curves().empty());
  Read(5, 50'000);
  EXPECT_EQ(Curves().size(), 2U);
  EXPECT_TRUE(meter_
                  .Curves([](uint32_t, uint32_t) { return std::nullopt; },
                          [](uint32_t, uint32_t) { return TableRows{1, 1}; })
                  .empty());
}

}  // namespace
}  // namespace embertide
