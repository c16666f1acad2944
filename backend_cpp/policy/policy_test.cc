// The promises of every policy, and those of some alone.
#include "policy/policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "policy/frequency_sketch.h"
#include "policy/policies.h"

namespace embertide {
namespace {

// A tier that a policy decides for, checked at each step.
class Tier {
 public:
  Tier(const std::string& name, uint32_t capacity) : Tier(capacity) {
    PolicyOptions options;
    options.name = name;
    options.capacity = capacity;
    options.key_of = key_of();
    Result<std::unique_ptr<Policy>> policy = MakePolicy(options);
    EXPECT_TRUE(policy.ok());
    policy_ = std::move(*policy);
  }
  static Tier OfReuseDensityAt(uint32_t capacity, uint32_t now) {
    Tier tier(capacity);
    tier.policy_ = MakeReuseDensityAt(capacity, tier.key_of(), now);
    return tier;
  }
  Policy* operator->() { return policy_.get(); }
  bool Ask(uint64_t key) {
    const auto at = std::find(keys_.begin(), keys_.end(), key);
    if (at != keys_.end()) {
      policy_->Touch(static_cast<uint32_t>(at - keys_.begin()));
      return true;
    }
    if (policy_->Admit(key, free_.empty())) {
      if (free_.empty()) Evict();
      Load(key);
    }
    return false;
  }
  // A row that was to make room is erased before it could leave, and room is still wanted.
  void AskWhileErasing(uint64_t key, uint32_t slot) {
    if (std::find(keys_.begin(), keys_.end(), key) != keys_.end()) return;
    if (!policy_->Admit(key, free_.empty())) return;
    Erase(slot);
    if (!empty()) Evict();
    if (!full()) Load(key);
  }
  void Load(uint64_t key) {
    const uint32_t slot = *free_.begin();
    free_.erase(slot);
    keys_[slot] = key;
    policy_->Insert(slot, key);
  }
  void Evict() {
    const uint32_t slot = policy_->Evict();
    ASSERT_LT(slot, keys_.size());
    ASSERT_NE(keys_[slot], kFree) << "a free slot was evicted";
    keys_[slot] = kFree;
    free_.insert(slot);
  }
  void Erase(uint32_t slot) {
    if (keys_[slot] == kFree) return;
    policy_->Erase(slot);
    keys_[slot] = kFree;
    free_.insert(slot);
  }
  bool full() const { return free_.empty(); }
  bool empty() const { return free_.size() == keys_.size(); }

 private:
  static constexpr uint64_t kFree = ~0ULL - 1;
  explicit Tier(uint32_t capacity) : owned_(new std::vector<uint64_t>(capacity, kFree)) {
    for (uint32_t slot = 0; slot < capacity; ++slot) free_.insert(slot);
  }
  KeyOf key_of() const {
    return [keys = owned_.get()](uint32_t slot) {
      EXPECT_NE((*keys)[slot], kFree) << "the key of a free slot was asked for";
      return (*keys)[slot];
    };
  }
  // Where it stays if the tier moves.
  std::unique_ptr<std::vector<uint64_t>> owned_;
  std::vector<uint64_t>& keys_ = *owned_;
  std::unique_ptr<Policy> policy_;
  std::set<uint32_t> free_;
};

// A name, and whether it has an ending ":2".
using Case = std::pair<std::string, bool>;
class EveryPolicyTest : public testing::TestWithParam<Case> {
 protected:
  std::string name() const { return GetParam().first + (GetParam().second ? ":2" : ""); }
};

TEST_P(EveryPolicyTest, EvictsRowsThatAreThereWhateverIsErasedMeanwhile) {
  for (const uint32_t capacity : {1U, 2U, 9U, 33U, 100U}) {
    Tier tier(name(), capacity);
    std::mt19937 random(capacity);
    for (int step = 0; step < 60000; ++step) {
      const uint32_t what = random() % 100;
      // Few keys at small numbers, many at large ones; -1 is a key like any other.
      const uint64_t key = static_cast<uint64_t>(random() % (1 + random() % (4 * capacity))) - 1;
      if (what < 80) {
        tier.Ask(key);
      } else if (what < 90) {
        tier.AskWhileErasing(key, random() % capacity);
      } else if (what < 95) {
        tier.Erase(random() % capacity);
      } else if (what < 98 && !tier.empty()) {
        tier.Evict();
      } else if (what == 99 && !tier.full()) {
        tier.Load(key + 1000 * capacity + step);  // loaded without being asked for
      }
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(EveryPolicyTest, MemoryIsConstantAndWithinWhatIsStated) {
  const auto infos = Policies();
  const auto info = std::find_if(infos.begin(), infos.end(), [&](const PolicyInfo& each) {
    return each.name == GetParam().first;
  });
  for (const uint32_t capacity : {1U, 7U, 64U, 1000U, 65537U}) {
    Tier tier(name(), capacity);
    const uint64_t bytes = tier->bytes();
    const uint64_t sketch = GetParam().second ? 16ULL * std::max(capacity, 64U) : 0;
    const uint64_t a_slot = info->slot_bytes + info->history_bytes;
    EXPECT_LE(bytes, a_slot * capacity + info->fixed_bytes + sketch) << capacity;
    for (uint64_t key = 0; key < 2000; ++key) tier.Ask(key % 300);
    EXPECT_EQ(tier->bytes(), bytes);
  }
}

TEST_P(EveryPolicyTest, EqualCallsGiveEqualAnswers) {
  Tier first(name(), 40);
  Tier second(name(), 40);
  std::mt19937_64 random(7);
  for (int step = 0; step < 20000; ++step) {
    const uint64_t key = random() % (1 + random() % 200);
    ASSERT_EQ(first.Ask(key), second.Ask(key)) << step;
  }
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const PolicyInfo& info : Policies()) {
    cases.emplace_back(info.name, false);
    cases.emplace_back(info.name, true);
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Policies, EveryPolicyTest, testing::ValuesIn(Cases()),
                         [](const testing::TestParamInfo<Case>& info) {
                           std::string name = info.param.first;
                           std::erase(name, '-');
                           return name + (info.param.second ? "AtSecond" : "");
                         });

TEST(PolicyTest, WhatCannotBeIsRefusedByName) {
  const auto refusal = [](const char* name, uint32_t capacity) {
    PolicyOptions options;
    options.name = name;
    options.capacity = capacity;
    if (std::string(name) != "keyless") options.key_of = [](uint32_t) { return 0; };
    const auto made = MakePolicy(options);
    return made.ok() ? "" : made.status().ToString();
  };
  EXPECT_NE(refusal("mru", 4).find("'mru': does not exist; there are reuse-density, lru"),
            std::string::npos);
  EXPECT_NE(refusal("lru", 0).find("capacity of 0"), std::string::npos);
  EXPECT_NE(refusal("lru", (1U << 28) + 1).find("capacity"), std::string::npos);
  EXPECT_NE(refusal("keyless", 4).find("which key"), std::string::npos);
  for (const char* name : {"lru:", "lru:1", "lru:16", "lru:2x", "lru:-2"}) {
    EXPECT_NE(refusal(name, 4).find("after the colon"), std::string::npos) << name;
  }
  EXPECT_EQ(refusal("lru:15", 4), "");
}

TEST(PolicyTest, AFrequencyLetsAKeyEnterAtThatAccess) {
  Tier tier("lru:3", 8);
  EXPECT_FALSE(tier->Admit(1, false));
  EXPECT_FALSE(tier->Admit(1, false));
  EXPECT_TRUE(tier->Admit(1, false));
  EXPECT_FALSE(tier->Admit(2, false));
}

TEST(PolicyTest, TheClockOfReuseDensityMayWrap) {
  constexpr uint32_t kCapacity = 50;
  Tier first = Tier::OfReuseDensityAt(kCapacity, 0);
  Tier second = Tier::OfReuseDensityAt(kCapacity, ~0U - 5000);
  std::mt19937_64 random(3);
  for (int step = 0; step < 20000; ++step) {
    const uint64_t key = random() % (1 + random() % 400);
    ASSERT_EQ(first.Ask(key), second.Ask(key)) << step;
  }
}

TEST(FrequencySketchTest, CountsUpToFifteenAndHalves) {
  FrequencySketch sketch(64);
  for (uint32_t n = 1; n <= 20; ++n) EXPECT_EQ(sketch.Add(42), std::min(n, 15U));
  EXPECT_EQ(sketch.Estimate(43), 0);
  // 640 additions age it once: the last of these comes after the halving.
  for (uint64_t key = 0; key < 620; ++key) sketch.Add(42);
  EXPECT_EQ(sketch.Estimate(42), 15);
  sketch.Add(1000);
  EXPECT_EQ(sketch.Estimate(42), 7);
}

TEST(FrequencySketchTest, IsSeldomTooHighAndNeverTooLow) {
  FrequencySketch sketch(1000);
  std::mt19937_64 random(5);
  std::vector<uint32_t> counts(1500);
  for (int i = 0; i < 6000; ++i) {
    const uint64_t key = random() % counts.size();
    ++counts[key];
    sketch.Add(key);
  }
  int high = 0;
  for (uint64_t key = 0; key < counts.size(); ++key) {
    const uint32_t truth = std::min(counts[key], 15U);
    EXPECT_GE(sketch.Estimate(key), truth);
    high += sketch.Estimate(key) > truth ? 1 : 0;
  }
  EXPECT_LT(high, 150);
}

}  // namespace
}  // namespace embertide
