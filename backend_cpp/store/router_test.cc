#include "embertide/router.h"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <random>

#include "embertide/hash.h"

namespace embertide {
namespace {

constexpr uint32_t kRanks = 3;

Router MakeRouter() {
  std::vector<RoutedTable> tables(3);
  tables[0] = {2, 4, 4, {0, 1, 2, 1}};
  tables[1] = {0, 3, 2, {2}};
  tables[2] = {1, 2, 2, {RoutedTable::kEverywhere, RoutedTable::kEverywhere}};
  auto router = Router::Make(std::move(tables), kRanks, 1);
  EXPECT_TRUE(router.ok());
  return std::move(router.value());
}

// A row whose values say table and key.
float ValueOf(uint32_t table, int64_t key, uint32_t d) {
  return static_cast<float>(table) * 100.0F + static_cast<float>(key % 97) + 0.25F * d;
}

// The answer that owners would give to `routed`.
std::vector<float> Answer(const Router& router, const Routed& routed) {
  std::vector<float> rows;
  size_t k = 0;
  for (size_t block = 0; block < routed.lengths().size(); ++block) {
    const auto table = static_cast<uint32_t>(block % router.tables().size());
    for (uint32_t n = 0; n < routed.lengths()[block]; ++n, ++k) {
      for (uint32_t d = 0; d < router.tables()[table].width; ++d) {
        rows.push_back(ValueOf(table, routed.keys()[k], d));
      }
    }
  }
  return rows;
}

TEST(RouterTest, AsksEachOwnerForEachKeyOnce) {
  Router router = MakeRouter();
  const std::vector<int64_t> a = {5, 9, 5, Routed::kPadding, 9, 9};
  const std::vector<int64_t> b = {9, 7};
  const std::vector<int64_t> c = {1, 1, 2};
  const std::array<BagKeys, 4> bags = {{{0, a, {}}, {1, a, {}}, {0, b, {}}, {2, c, {}}}};
  auto routed = router.Route(bags);
  ASSERT_TRUE(routed.ok());
  std::map<std::pair<uint32_t, int64_t>, uint32_t> counts;
  size_t k = 0;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    for (uint32_t t = 0; t < 3; ++t) {
      for (uint32_t n = routed.value().lengths()[rank * 3 + t]; n > 0; --n, ++k) {
        const int64_t key = routed.value().keys()[k];
        const std::array<int64_t, 1> one = {key};
        EXPECT_EQ(router.OwnersOf(t, one)[0], rank);
        EXPECT_TRUE(counts.emplace(std::pair(t, key), routed.value().counts()[k]).second);
      }
    }
  }
  const std::map<std::pair<uint32_t, int64_t>, uint32_t> expected = {
      {{0, 5}, 2}, {{0, 9}, 4}, {{0, 7}, 1}, {{1, 5}, 2}, {{1, 9}, 3}, {{2, 1}, 2}, {{2, 2}, 1}};
  EXPECT_EQ(counts, expected);
  uint64_t load = 0;
  for (const uint64_t each : router.TakeLoad()) load += each;
  EXPECT_EQ(load, expected.size());
}

TEST(RouterTest, PoolsAndSumsAsTheBagsSay) {
  Router router = MakeRouter();
  std::mt19937_64 random(7);
  std::vector<int64_t> keys(200);
  for (auto& key : keys) key = static_cast<int64_t>(random() % 40);
  std::vector<uint32_t> offsets = {0, 0, 1};
  while (offsets.back() < keys.size()) {
    offsets.push_back(
        static_cast<uint32_t>(std::min<size_t>(keys.size(), offsets.back() + random() % 7)));
  }
  const size_t bags_count = offsets.size() - 1;
  const std::array<BagKeys, 2> bags = {{{0, keys, offsets}, {0, keys, {}}}};
  auto routed = router.Route(bags);
  ASSERT_TRUE(routed.ok());
  const std::vector<float> rows = Answer(router, routed.value());
  std::vector<float> mean(bags_count * 6, -1.0F);
  std::vector<float> each(keys.size() * 4, -1.0F);
  const std::array<PooledBags, 2> outs = {
      {{Pooling::kMean, mean.data(), 6}, {Pooling::kNone, each.data(), 4}}};
  ASSERT_TRUE(routed.value().Pool(rows, outs).ok());
  std::vector<float> gradients(std::max(bags_count, keys.size()) * 5);
  for (auto& g : gradients) g = static_cast<float>(random() % 1000) / 7.0F;
  for (size_t bag = 0; bag < bags_count; ++bag) {
    for (uint32_t d = 0; d < 4; ++d) {
      double sum = 0.0;
      for (uint32_t k = offsets[bag]; k < offsets[bag + 1]; ++k) sum += ValueOf(0, keys[k], d);
      const size_t size = offsets[bag + 1] - offsets[bag];
      EXPECT_EQ(mean[bag * 6 + d], static_cast<float>(sum / std::max<double>(size, 1)));
    }
  }
  for (size_t k = 0; k < keys.size(); ++k) EXPECT_EQ(each[k * 4 + 1], ValueOf(0, keys[k], 1));
  std::map<int64_t, std::array<double, 4>> exact;
  for (size_t bag = 0; bag < bags_count; ++bag) {
    for (uint32_t k = offsets[bag]; k < offsets[bag + 1]; ++k) {
      for (uint32_t d = 0; d < 4; ++d) exact[keys[k]][d] += gradients[bag * 5 + d];
    }
  }
  for (size_t k = 0; k < keys.size(); ++k) {
    for (uint32_t d = 0; d < 4; ++d) exact[keys[k]][d] += gradients[k * 5 + d];
  }
  const std::array<BagGradients, 2> from = {
      {{0, keys, offsets, gradients.data(), 5}, {0, keys, {}, gradients.data(), 5}}};
  std::vector<float> sums(routed.value().gradient_floats());
  ASSERT_TRUE(routed.value().Sum(from, sums).ok());
  for (size_t k = 0; k < routed.value().keys().size(); ++k) {
    for (uint32_t d = 0; d < 4; ++d) {
      EXPECT_EQ(sums[k * 4 + d], static_cast<float>(exact[routed.value().keys()[k]][d]));
    }
  }
}

TEST(RouterTest, AHotKeyIsAskedOfItsHostAndStandsInATableOfItsOwn) {
  std::vector<RoutedTable> tables(2);
  tables[0] = {1, 4, 4, {0, 2}};
  tables[1] = {0, 4, 4, {0}};
  auto made = Router::Make(std::move(tables), kRanks, 1);
  ASSERT_TRUE(made.ok());
  Router& router = made.value();
  const std::vector<int64_t> hot = {3, 5};
  const std::vector<uint16_t> hosts = {1, 2};
  ASSERT_TRUE(router.SetHosts(0, 1, hot, hosts).ok());
  const std::vector<int64_t> keys = {5, 1, 3, 5, 2};
  const std::array<BagKeys, 1> bags = {{{0, keys, {}}}};
  auto routed = router.Route(bags);
  ASSERT_TRUE(routed.ok());
  const std::span<const uint32_t> lengths = routed.value().lengths();
  EXPECT_EQ(lengths[0 * 2 + 1], 0U);
  EXPECT_EQ(lengths[1 * 2 + 1], 1U);
  EXPECT_EQ(lengths[2 * 2 + 1], 1U);
  EXPECT_EQ(lengths[0] + lengths[2] + lengths[4], 2U) << "the others are asked of their owners";
  std::vector<float> rows;
  for (const int64_t key : routed.value().keys()) {
    for (uint32_t d = 0; d < 4; ++d) rows.push_back(ValueOf(0, key, d));
  }
  std::vector<float> out(keys.size() * 4);
  const std::array<PooledBags, 1> outs = {{{Pooling::kSum, out.data(), 4}}};
  ASSERT_TRUE(routed.value().Pool(rows, outs).ok());
  for (size_t k = 0; k < keys.size(); ++k) EXPECT_EQ(out[k * 4 + 2], ValueOf(0, keys[k], 2));
  const std::vector<uint16_t> nobody = {1, kRanks};
  EXPECT_FALSE(router.SetHosts(0, 1, hot, nobody).ok());
  EXPECT_FALSE(router.SetHosts(0, 1, keys, hosts).ok());
  EXPECT_FALSE(router.SetHosts(0, 2, hot, hosts).ok());
  EXPECT_EQ(router.Route(bags).value().lengths()[2 * 2 + 1], 1U) << "the last ones hold";
}

TEST(RouterTest, RefusesWhatIsWrong) {
  EXPECT_FALSE(Router::Make({}, 0, 0).ok());
  EXPECT_FALSE(Router::Make({{1, 4, 4, {0}}}, 2, 0).ok());
  EXPECT_FALSE(Router::Make({{0, 4, 4, {2}}}, 2, 0).ok());
  Router router = MakeRouter();
  const std::vector<int64_t> keys = {1, 2};
  const std::vector<uint32_t> offsets = {0, 3};
  const std::array<BagKeys, 1> no_table = {{{3, keys, {}}}};
  const std::array<BagKeys, 1> no_offsets = {{{0, keys, offsets}}};
  EXPECT_FALSE(router.Route(no_table).ok());
  EXPECT_FALSE(router.Route(no_offsets).ok());
  const std::array<BagKeys, 1> bags = {{{0, keys, {}}}};
  const auto routed = router.Route(bags);
  std::vector<float> few(3);
  EXPECT_FALSE(routed.value().Pool(few, {}).ok());
  EXPECT_FALSE(routed.value().Sum({}, few).ok());
}

}  // namespace
}  // namespace embertide
