// BucketIndex: what it holds is what a map holds, in every state of a growth that goes in steps.
#include "store/bucket_index.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

#include "embertide/hash.h"

namespace embertide {
namespace {

constexpr uint64_t kBudget = 64ULL << 20;

struct IndexTest : testing::Test {
  ByteBudget budget{kBudget};
  PagePool pool{kBudget / BucketIndex::kPageBytes * BucketIndex::kPagesPerBudgetPage,
                BucketIndex::kPageBytes};
  BucketIndex index;
  std::vector<BucketIndex::Arrays> retired;

  static Location Place(uint64_t slot) { return {TierId::kDdr, 1, slot}; }
  bool Reserve() {
    return index.Reserve(&budget, &pool, [&](const auto& arrays) { retired.push_back(arrays); })
        .ok();
  }
  void FreeRetired() {
    for (const BucketIndex::Arrays& arrays : retired) {
      budget.Release(arrays.bytes());
      BucketIndex::Free(&pool, arrays);
    }
    retired.clear();
  }
  void TearDown() override {
    FreeRetired();
    index.Clear(&pool);
  }
};

TEST_F(IndexTest, GivesBackWhatEntriesThatAreGoneTook) {
  const auto shrink = [&] {
    index.Shrink(&budget, &pool, [&](const auto& arrays) { retired.push_back(arrays); });
    FreeRetired();
    const Status whole = index.CheckIntegrity(HashKey);
    EXPECT_TRUE(whole.ok()) << whole.ToString();
    EXPECT_EQ(budget.used_bytes(), index.bytes());
  };
  shrink();  // of nothing
  for (uint64_t key = 0; key < 50'000; ++key) {
    ASSERT_TRUE(Reserve());
    FreeRetired();
    index.Insert(HashKey(key), key, Place(key));
  }
  const uint64_t full = index.bytes();
  shrink();
  EXPECT_GE(index.bytes(), full * 3 / 4) << "it is as full as it should be";
  for (uint64_t key = 0; key < 50'000; ++key) {
    if (key % 10 != 0) index.Erase(index.Locate(HashKey(key), key));
  }
  shrink();
  EXPECT_LT(index.bytes(), full / 8);
  for (uint64_t key = 0; key < 50'000; ++key) {
    const Location place = index.Peek(HashKey(key), key);
    ASSERT_EQ(place.tier() == TierId::kDdr, key % 10 == 0) << key;
    ASSERT_TRUE(key % 10 != 0 || place.slot() == key);
  }
  // Without room for both it stays as it is.
  for (uint64_t key = 0; key < 50'000; key += 20) index.Erase(index.Locate(HashKey(key), key));
  const uint64_t before = index.bytes();
  const uint64_t rest = kBudget - budget.used_bytes();
  ASSERT_TRUE(budget.TryCharge(rest));
  index.Shrink(&budget, &pool, [&](const auto& arrays) { retired.push_back(arrays); });
  EXPECT_EQ(index.bytes(), before);
  budget.Release(rest);
  shrink();
  EXPECT_LT(index.bytes(), before);
}

TEST_F(IndexTest, HoldsWhatAMapHoldsWhileItGrows) {
  std::mt19937_64 random(1);
  std::unordered_map<uint64_t, uint64_t> expected;
  std::vector<uint64_t> keys;
  uint64_t growths = 0;
  uint64_t steps_in_growth = 0;
  for (uint64_t step = 0; step < 200000; ++step) {
    const uint32_t chance = random() % 10;
    if (keys.empty() || chance < 6) {
      const uint64_t key = random();
      ASSERT_TRUE(Reserve());
      growths += retired.empty() ? 0 : 1;
      FreeRetired();
      index.Insert(HashKey(key), key, Place(step));
      expected[key] = step;
      keys.push_back(key);
    } else {
      std::swap(keys[random() % keys.size()], keys.back());
      const uint64_t key = keys.back();
      const uint32_t entry = index.Locate(HashKey(key), key);
      ASSERT_NE(entry, BucketIndex::kNotFound);
      ASSERT_EQ(index.KeyAt(entry), key);
      if (chance < 8) {
        index.Set(entry, Place(step));
        expected[key] = step;
      } else {
        index.Erase(entry);
        expected.erase(key);
        keys.pop_back();
      }
    }
    ASSERT_EQ(index.size(), expected.size());
    ASSERT_EQ(budget.used_bytes(), index.bytes());
    steps_in_growth += index.growing() ? 1 : 0;
    const uint64_t asked = keys.empty() ? 0 : keys[random() % keys.size()];
    if (expected.contains(asked)) {
      ASSERT_EQ(index.Peek(HashKey(asked), asked), Place(expected[asked])) << "step " << step;
    }
    ASSERT_EQ(index.Peek(HashKey(~step), ~step), Location()) << "a key that was never there";
    if (step % 5000 != 0 && !(index.growing() && step % 50 == 0)) continue;
    const Status status = index.CheckIntegrity(&HashKey);
    ASSERT_TRUE(status.ok()) << status.ToString();
    uint64_t occupied = 0;
    for (uint32_t e = 0; e < index.capacity(); ++e) {
      if (!index.Occupied(e)) continue;
      ++occupied;
      ASSERT_EQ(index.At(e), Place(expected.at(index.KeyAt(e))));
    }
    ASSERT_EQ(occupied, expected.size());
  }
  EXPECT_GT(growths, 10U);
  EXPECT_GT(steps_in_growth, 500U) << "no growth took several steps";
}

TEST_F(IndexTest, AFullBudgetRefusesAndChangesNothing) {
  ByteBudget small(600 << 10);
  uint64_t key = 0;
  while (index.Reserve(&small, &pool, [&](const auto& a) { retired.push_back(a); }).ok()) {
    index.Insert(HashKey(key), key, Place(key));
    ++key;
    for (const auto& arrays : retired) small.Release(arrays.bytes());
    for (const auto& arrays : retired) BucketIndex::Free(&pool, arrays);
    retired.clear();
  }
  EXPECT_EQ(small.used_bytes(), index.bytes());
  EXPECT_TRUE(index.CheckIntegrity(&HashKey).ok());
  for (uint64_t k = 0; k < key; ++k) ASSERT_EQ(index.Peek(HashKey(k), k), Place(k));
}

// Arrays stay until the readers are gone, as the store's epochs see to.
TEST_F(IndexTest, ReadersFindEveryKeyThatWasThereWhenTheyAsked) {
  constexpr uint64_t kKeys = 60000;
  std::atomic<uint64_t> there = 0;
  std::atomic<uint64_t> lost = 0;
  std::vector<std::thread> readers;
  for (uint64_t r = 0; r < 2; ++r) {
    readers.emplace_back([&, r] {
      std::mt19937_64 random(r);
      uint64_t now = 0;
      while ((now = there.load()) < kKeys) {
        if (now == 0) continue;
        const uint64_t key = random() % now;
        if (!(index.Peek(HashKey(key), key) == Place(key))) ++lost;
      }
    });
  }
  for (uint64_t key = 0; key < kKeys; ++key) {
    ASSERT_TRUE(Reserve());
    index.Insert(HashKey(key), key, Place(key));
    there = key + 1;
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(lost, 0U);
}

// Under TSan: the word alone orders a row before those who find its key.
TEST_F(IndexTest, WhoFindsAKeySeesWhatWasWrittenBeforeItWasAdded) {
  constexpr uint64_t kKeys = 20000;
  std::vector<uint64_t> rows(kKeys);
  std::atomic<uint64_t> wrong = 0;
  std::vector<std::thread> readers;
  for (uint64_t r = 0; r < 2; ++r) {
    readers.emplace_back([&, r] {
      std::mt19937_64 random(r);
      bool all = false;
      while (!all) {
        const uint64_t last = kKeys - 1;
        all = index.Peek(HashKey(last), last) == Place(last);
        const uint64_t key = random() % kKeys;
        if (index.Peek(HashKey(key), key) == Place(key)) wrong += rows[key] != key + 1 ? 1 : 0;
      }
    });
  }
  for (uint64_t key = 0; key < kKeys; ++key) {
    ASSERT_TRUE(Reserve());
    rows[key] = key + 1;
    index.Insert(HashKey(key), key, Place(key));
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0U);
}

}  // namespace
}  // namespace embertide
