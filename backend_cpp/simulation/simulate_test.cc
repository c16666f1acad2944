// Simulated hits against brute force, and the policies against each other on generated traces.
#include "simulation/simulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "simulation/utility.h"

namespace embertide {
namespace {

Trace MakeTrace(const std::vector<int64_t>& keys) {
  Result<Trace> trace = Trace::FromKeys(keys);
  EXPECT_TRUE(trace.ok());
  return std::move(*trace);
}

double HitRate(const Trace& trace, const std::string& policy, uint32_t capacity) {
  const Result<SimulationResult> result = Simulate(trace, {policy, capacity});
  EXPECT_TRUE(result.ok());
  return static_cast<double>(result.value().hits) / static_cast<double>(trace.numbers().size());
}

// The most hits from access `at` on with these keys resident, over every choice there is.
class BruteForce {
 public:
  BruteForce(std::vector<uint32_t> keys, int capacity)
      : keys_(std::move(keys)), capacity_(capacity) {}
  uint64_t Best(size_t at, uint32_t resident) {
    if (at == keys_.size()) return 0;
    const auto known = best_.find({at, resident});
    if (known != best_.end()) return known->second;
    const uint32_t asked = 1U << keys_[at];
    uint64_t best = 0;
    if ((resident & asked) != 0) {
      best = 1 + Best(at + 1, resident);
    } else {
      best = Best(at + 1, resident);  // left out
      if (std::popcount(resident) < capacity_) {
        best = std::max(best, Best(at + 1, resident | asked));
      }
      for (uint32_t others = resident; others != 0; others &= others - 1) {
        const uint32_t leaves = others & -others;
        best = std::max(best, Best(at + 1, (resident & ~leaves) | asked));
      }
    }
    return best_[{at, resident}] = best;
  }

 private:
  std::vector<uint32_t> keys_;
  int capacity_;
  std::map<std::pair<size_t, uint32_t>, uint64_t> best_;
};

TEST(SimulateTest, OptimalHitsAreTheMostOfAllChoices) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<int64_t> keys(5 + random() % 26);
    const uint32_t distinct = 2 + random() % 6;
    for (int64_t& key : keys) key = random() % distinct;
    const Trace trace = MakeTrace(keys);
    for (uint32_t capacity = 1; capacity <= 4; ++capacity) {
      BruteForce all({trace.numbers().begin(), trace.numbers().end()}, static_cast<int>(capacity));
      EXPECT_EQ(OptimalHits(trace, capacity), all.Best(0, 0)) << round << ' ' << capacity;
    }
  }
}

TEST(SimulateTest, NoPolicyHasMoreHitsThanTheOptimum) {
  std::mt19937 random(2);
  std::vector<int64_t> keys(30000);
  for (int64_t& key : keys) key = random() % (1 + random() % 2000) - 500;
  const Trace trace = MakeTrace(keys);
  for (const uint32_t capacity : {1U, 10U, 100U, 1000U, 5000U}) {
    const uint64_t optimum = OptimalHits(trace, capacity);
    for (const PolicyInfo& info : Policies()) {
      const auto result = Simulate(trace, {info.name, capacity});
      ASSERT_TRUE(result.ok());
      const SimulationResult& r = result.value();
      EXPECT_LE(r.hits, optimum) << info.name << ' ' << capacity;
      EXPECT_EQ(r.hits + r.inserted + r.refused, keys.size()) << info.name;
      EXPECT_EQ(r.inserted - r.evicted, std::min<uint64_t>(capacity, r.inserted)) << info.name;
      // Room for all: each key misses once.
      if (capacity >= trace.distinct()) {
        EXPECT_EQ(r.hits, keys.size() - trace.distinct()) << info.name;
      }
    }
  }
}

TEST(SimulateTest, AFixedSetIsThatOfTheMostAccesses) {
  const Trace trace = MakeTrace({7, 7, 7, -1, -1, 3, 9});
  EXPECT_EQ(trace.distinct(), 4);
  EXPECT_EQ(BestFixedHits(trace, 0), 0);
  EXPECT_EQ(BestFixedHits(trace, 1), 3);
  EXPECT_EQ(BestFixedHits(trace, 2), 5);
  EXPECT_EQ(BestFixedHits(trace, 10), 7);
}

TEST(SimulateTest, RefusesWhatCannotBe) {
  EXPECT_EQ(Trace::FromKeys({}).status().code(), Code::kInvalidArgument);
  const Trace trace = MakeTrace({1, 2});
  EXPECT_EQ(Simulate(trace, {"nothing", 1}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(Simulate(trace, {"lru", 0}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(Simulate(trace, {"utility", 1, 0}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(Simulate(trace, {"utility", 0}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(Simulate(trace, {"utility:1", 1}).status().code(), Code::kInvalidArgument);
  // Each key was asked for once, so none enters at its second access.
  EXPECT_EQ(Simulate(trace, {"utility:2", 1}).value().refused, 2);
}

TEST(SimulateTest, UtilityKeepsTheMostUseful) {
  std::vector<uint64_t> keys(10);
  const auto made = MakeUtility(
      10, [&](uint32_t slot) { return keys[slot]; },
      [](uint64_t key) { return static_cast<float>(key % 97); });
  ASSERT_TRUE(made.ok());
  Policy& policy = *made.value();
  for (uint64_t key = 0; key < 97; ++key) {
    const bool full = key >= keys.size();
    ASSERT_TRUE(policy.Admit(key, full)) << key;
    const uint32_t slot = full ? policy.Evict() : static_cast<uint32_t>(key);
    keys[slot] = key;
    policy.Insert(slot, key);
  }
  std::ranges::sort(keys);
  EXPECT_EQ(keys.front(), 87);
  EXPECT_FALSE(policy.Admit(86, true));
  EXPECT_TRUE(policy.Admit(86, false));
  policy.Erase(3);
  EXPECT_NE(policy.Evict(), 3);
  EXPECT_LE(policy.bytes(), kUtilityPolicy.slot_bytes * 10 + kUtilityPolicy.fixed_bytes);
}

// --- reuse-density on traces of different kinds; 400,000 accesses, a tier of 500
class GeneratedTraceTest : public testing::Test {
 protected:
  static constexpr uint32_t kAccesses = 400'000;
  static constexpr uint32_t kCapacity = 500;
  static std::vector<int64_t> Zipf() {
    std::vector<double> weights(20000);
    for (size_t k = 0; k < weights.size(); ++k) weights[k] = std::pow(1.0 + k, -0.9);
    std::discrete_distribution<int64_t> draw(weights.begin(), weights.end());
    std::mt19937 random(11);
    std::vector<int64_t> keys(kAccesses);
    for (int64_t& key : keys) key = draw(random);
    return keys;
  }
  static double Gain(const std::vector<int64_t>& keys, const std::string& over) {
    const Trace trace = MakeTrace(keys);
    return HitRate(trace, "reuse-density", kCapacity) - HitRate(trace, over, kCapacity);
  }
};

TEST_F(GeneratedTraceTest, KeepsAHotSetThatStays) {
  EXPECT_GT(Gain(Zipf(), "lru"), 0.10);
  EXPECT_GT(Gain(Zipf(), "s3-fifo"), 0);
}

TEST_F(GeneratedTraceTest, RefusesWhatWouldLeaveAtOnce) {
  const Trace trace = MakeTrace(Zipf());
  const auto result = Simulate(trace, {"reuse-density", kCapacity});
  ASSERT_TRUE(result.ok());
  const SimulationResult& r = result.value();
  EXPECT_LT(r.inserted, (r.inserted + r.refused) / 3);
}

TEST_F(GeneratedTraceTest, FollowsAHotSetThatMoves) {
  std::vector<int64_t> keys = Zipf();
  for (size_t i = 0; i < keys.size(); ++i) keys[i] += static_cast<int64_t>(i / 20);
  EXPECT_GT(Gain(keys, "lru"), 0.03);
  EXPECT_GT(Gain(keys, "w-tinylfu"), 0.03);
}

TEST_F(GeneratedTraceTest, HoldsPartOfALoopThatDoesNotFit) {
  std::vector<int64_t> keys(kAccesses);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i % 2000);
  const Trace trace = MakeTrace(keys);
  EXPECT_EQ(HitRate(trace, "lru", kCapacity), 0);
  EXPECT_GT(HitRate(trace, "reuse-density", kCapacity), 0.22);  // 0.25 is all there is
}

TEST_F(GeneratedTraceTest, LosesNothingWhereTheLatestIsTheBest) {
  std::vector<int64_t> stack(5000);
  for (size_t k = 0; k < stack.size(); ++k) stack[k] = static_cast<int64_t>(k);
  std::geometric_distribution<size_t> depth(1.0 / 700);
  std::mt19937 random(13);
  std::vector<int64_t> keys(kAccesses);
  for (int64_t& key : keys) {
    const auto at =
        stack.begin() + static_cast<ptrdiff_t>(std::min(depth(random), stack.size() - 1));
    key = *at;
    std::rotate(stack.begin(), at, at + 1);
  }
  EXPECT_GT(Gain(keys, "lru"), -0.005);
}

}  // namespace
}  // namespace embertide
