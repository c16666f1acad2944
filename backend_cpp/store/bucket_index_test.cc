// BucketIndex: what it holds is what a map holds, in every state of a growth that goes in steps.
#include "store/bucket_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "embertide/hash.h"

namespace embertide {
namespace {

constexpr uint64_t kBudget = 64ULL << 20;

// Shapes of one bucket's index: without lean groups; with lean ones of any size, whose entries hold
// all of a hash; and with lean ones once there are enough groups.
LeanShape ShapeOf(const std::string& name) {
  const RowLayout row{1, 2, DType::kFp32};
  if (name == "plain") return {};
  return LeanShape::Of(row, 0, 0, name == "lean" ? 1ULL << 18 : 1ULL << 26);
}

struct IndexTest : testing::TestWithParam<std::string> {
  ByteBudget budget{kBudget};
  PagePool pool{kBudget / BucketIndex::kPageBytes * BucketIndex::kPagesPerBudgetPage,
                BucketIndex::kPageBytes};
  BucketIndex index{ShapeOf(GetParam())};
  std::vector<BucketIndex::Arrays> retired;

  static Location Place(uint64_t slot) { return {TierId::kDdr, 1, 2 * slot}; }
  BucketIndex::Retire Retires() {
    return [this](const auto& arrays) { retired.push_back(arrays); };
  }
  bool Reserve(uint64_t key) { return index.Reserve(&budget, &pool, Retires(), HashKey(key)).ok(); }
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

TEST_P(IndexTest, GivesBackWhatEntriesThatAreGoneTook) {
  const auto shrink = [&] {
    index.Shrink(&budget, &pool, Retires());
    FreeRetired();
    const Status whole = index.CheckIntegrity();
    EXPECT_TRUE(whole.ok()) << whole.ToString();
    EXPECT_EQ(budget.used_bytes(), index.bytes());
  };
  shrink();  // of nothing
  for (uint64_t key = 0; key < 50'000; ++key) {
    ASSERT_TRUE(Reserve(key));
    FreeRetired();
    index.Insert(HashKey(key), Place(key));
  }
  const uint64_t full = index.bytes();
  shrink();
  EXPECT_GE(index.bytes(), full * 3 / 4) << "it is as full as it should be";
  for (uint64_t key = 0; key < 50'000; ++key) {
    if (key % 10 != 0) index.Erase(index.Locate(HashKey(key), key));
  }
  shrink();
  EXPECT_LT(index.bytes(), full / 5);
  for (uint64_t key = 0; key < 50'000; ++key) {
    const Location place = index.Peek(HashKey(key), key);
    ASSERT_EQ(place.tier() == TierId::kDdr, key % 10 == 0) << key;
    ASSERT_TRUE(key % 10 != 0 || place.slot() == 2 * key);
  }
  // Without room for both it stays as it is.
  for (uint64_t key = 0; key < 50'000; key += 20) index.Erase(index.Locate(HashKey(key), key));
  const uint64_t before = index.bytes();
  const uint64_t rest = kBudget - budget.used_bytes();
  ASSERT_TRUE(budget.TryCharge(rest));
  index.Shrink(&budget, &pool, Retires());
  EXPECT_EQ(index.bytes(), before);
  budget.Release(rest);
  shrink();
  EXPECT_LT(index.bytes(), before);
}

TEST_P(IndexTest, HoldsWhatAMapHoldsWhileItGrows) {
  std::mt19937_64 random(1);
  std::unordered_map<uint64_t, uint64_t> expected;
  std::vector<uint64_t> keys;
  uint64_t growths = 0;
  uint64_t steps_in_growth = 0;
  for (uint64_t step = 0; step < 200000; ++step) {
    const uint32_t chance = random() % 10;
    if (keys.empty() || chance < 6) {
      const uint64_t key = random();
      ASSERT_TRUE(Reserve(key));
      growths += retired.empty() ? 0 : 1;
      FreeRetired();
      index.Insert(HashKey(key), Place(step));
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
    const Status status = index.CheckIntegrity();
    ASSERT_TRUE(status.ok()) << status.ToString();
    uint64_t occupied = 0;
    const auto count = [&](uint32_t e, Location place) {
      ++occupied;
      EXPECT_EQ(place, Place(expected.at(index.KeyAt(e))));
      EXPECT_EQ(place, index.At(e));
      return true;
    };
    const uint32_t end = index.capacity();
    ASSERT_EQ(index.Walk(0, end, count), end);
    ASSERT_EQ(occupied, expected.size());
  }
  EXPECT_GT(growths, 10U);
  EXPECT_GT(steps_in_growth, 500U) << "no growth took several steps";
}

TEST_P(IndexTest, AWalkStopsWhereItsVisitSaysAndGoesOnFromThere) {
  std::unordered_map<uint64_t, uint64_t> expected;
  // Until it grows: entries stand in two arrays.
  for (uint64_t key = 0; key < 30'000 || !index.growing(); ++key) {
    ASSERT_TRUE(Reserve(key));
    FreeRetired();
    index.Insert(HashKey(key), Place(key));
    expected[key] = key;
  }
  std::mt19937_64 random(1);
  const uint32_t all = index.capacity();
  std::unordered_map<uint64_t, uint64_t> met;
  for (uint32_t at = 0; at < all;) {
    const uint32_t end = std::min<uint32_t>(all, at + random() % 50);
    uint32_t left = random() % 8;
    uint32_t last = at;
    const uint32_t reached = index.Walk(at, end, [&](uint32_t e, Location place) {
      EXPECT_GE(e, last);
      EXPECT_LT(e, end);
      last = e;
      if (left-- == 0) return false;
      EXPECT_TRUE(met.emplace(index.KeyAt(e), place.slot() / 2).second) << "met twice";
      index.Erase(e);
      return true;
    });
    ASSERT_TRUE(reached == end || reached == last);
    at = reached;
  }
  EXPECT_EQ(met, expected);
  EXPECT_EQ(index.size(), 0U);
  EXPECT_EQ(index.Walk(0, all, [](uint32_t, Location) { return false; }), all);
}

TEST_P(IndexTest, AFullBudgetRefusesAndChangesNothing) {
  ByteBudget small(600 << 10);
  uint64_t key = 0;
  while (index.Reserve(&small, &pool, Retires(), HashKey(key)).ok()) {
    index.Insert(HashKey(key), Place(key));
    ++key;
    for (const auto& arrays : retired) small.Release(arrays.bytes());
    for (const auto& arrays : retired) BucketIndex::Free(&pool, arrays);
    retired.clear();
  }
  EXPECT_EQ(small.used_bytes(), index.bytes());
  EXPECT_TRUE(index.CheckIntegrity().ok());
  for (uint64_t k = 0; k < key; ++k) ASSERT_EQ(index.Peek(HashKey(k), k), Place(k));
}

// The system may have no memory where the budget has room. Before, that ended the process.
TEST_P(IndexTest, WithoutMemoryItRefusesAndChangesNothing) {
  constexpr uint64_t kPages = kHugePageBytes / BucketIndex::kPageBytes;  // it has no fewer
  PagePool few(kPages, BucketIndex::kPageBytes);
  Status refused;
  uint64_t key = 0;
  const auto reserve = [&] {
    refused = index.Reserve(&budget, &few, Retires(), HashKey(key));
    for (const auto& arrays : retired) budget.Release(arrays.bytes());
    for (const auto& arrays : retired) BucketIndex::Free(&few, arrays);
    retired.clear();
    return refused.ok();
  };
  for (; reserve(); ++key) index.Insert(HashKey(key), Place(key));
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_NE(refused.message().find("the system has no memory"), std::string::npos)
      << refused.message();
  EXPECT_FALSE(reserve());
  EXPECT_EQ(budget.used_bytes(), index.bytes());
  EXPECT_TRUE(index.CheckIntegrity().ok());
  for (uint64_t k = 0; k < key; ++k) ASSERT_EQ(index.Peek(HashKey(k), k), Place(k));
  index.Clear(&few);
  for (uint64_t page = 0; page < kPages; ++page) {
    EXPECT_NE(few.Take(), nullptr) << "pages of attempts that failed are given back";
  }
}

// Arrays stay until the readers are gone, as the store's epochs see to.
TEST_P(IndexTest, ReadersFindEveryKeyThatWasThereWhenTheyAsked) {
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
    ASSERT_TRUE(Reserve(key));
    index.Insert(HashKey(key), Place(key));
    there = key + 1;
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(lost, 0U);
}

// Under TSan: the word alone orders a row before those who find its key.
TEST_P(IndexTest, WhoFindsAKeySeesWhatWasWrittenBeforeItWasAdded) {
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
    ASSERT_TRUE(Reserve(key));
    rows[key] = key + 1;
    index.Insert(HashKey(key), Place(key));
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0U);
}

// Keys whose hashes have one low half, as who knows the hash can make them: no window holds them.
TEST_P(IndexTest, KeysMadeToStandInOnePlaceAreHeldAllTheSame) {
  std::unordered_map<uint64_t, uint64_t> expected;
  const auto put = [&](uint64_t key) {
    ASSERT_TRUE(Reserve(key));
    FreeRetired();
    index.Insert(HashKey(key), Place(expected.size()));
    expected.emplace(key, expected.size());
  };
  const auto whole = [&] {
    const Status status = index.CheckIntegrity();
    ASSERT_TRUE(status.ok()) << status.ToString();
    for (const auto& [key, slot] : expected) {
      ASSERT_EQ(index.Peek(HashKey(key), key), Place(slot)) << key;
    }
    ASSERT_EQ(budget.used_bytes(), index.bytes());
  };
  std::mt19937_64 random(2);
  for (int i = 0; i < 30'000; ++i) put(random());
  for (uint64_t i = 0; i < 700; ++i) {
    put(KeyOfHash(i << 32 | 0x12345678U));
    if (i % 50 == 0) whole();
  }
  // Arrays that grow with them in it.
  for (int i = 0; i < 30'000; ++i) {
    put(random());
    if (i % 5'000 == 0) whole();
  }
  whole();
}

// As much of a hash as an entry holds and as little as it can: all that differ are told apart.
TEST_P(IndexTest, AHashIsFoundAgainFromItsPlaceAndBits) {
  std::mt19937_64 random(3);
  for (int turn = 0; turn < 20'000; ++turn) {
    const uint32_t bits = random() % 18;
    const uint64_t hash = random();
    const uint32_t bucket = BucketOfHash(hash, bits);
    const auto chunks = static_cast<uint16_t>(1 + random() % kMaxChunks);
    const LeanShape shape =
        LeanShape::Of({chunks, 8, DType::kFp32}, bucket, bits, 1ULL << (17 + random() % 21));
    const uint32_t groups = 1 + random() % (1U << (random() % 27));
    const uint32_t window = shape.Window(groups);
    if (window == 0) continue;
    const auto home = static_cast<uint32_t>(((hash & 0xffffffffU) * groups) >> 32);
    const uint64_t held = LeanShape::kBesideBits + 64U - shape.slot_bits;
    const uint64_t turned = shape.Turned(hash) & (held < 64 ? (1ULL << held) - 1 : ~0ULL);
    for (const uint32_t behind : {0U, 1U, window / 2, window - 1}) {
      const auto number = static_cast<uint32_t>((uint64_t{home} + behind) % groups);
      ASSERT_EQ(shape.HashOf(turned, number, groups), hash)
          << groups << " groups, " << behind << " behind the first of " << window;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Groups, IndexTest, testing::Values("plain", "lean", "lean_when_large"),
                         [](const auto& each) { return each.param; });

}  // namespace
}  // namespace embertide
