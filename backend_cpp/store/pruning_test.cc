// Pruning as its contract says it: prices, passes over rows, keys that wait for a row.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "embertide/serving_store.h"
#include "store/distinct_keys.h"
#include "store/prune_price.h"
#include "store/test_rows.h"
#include "store/waiting_keys.h"

namespace embertide {
namespace {

// --- prices

TEST(PriceSampleTest, APriceIsTheLeastThatFits) {
  std::mt19937 random(3);
  std::exponential_distribution<float> utility(0.2F);
  PriceSample sample;
  const RowCost wide{4, 64, 48};
  const RowCost narrow{2, 16, 40};
  uint64_t all = 0;
  for (int row = 0; row < 3000; ++row) {
    const RowCost& cost = row % 3 == 0 ? wide : narrow;
    std::array<float, kMaxChunks> values{};
    for (uint32_t c = 0; c < cost.chunks; ++c) values[c] = utility(random);
    sample.Add(cost, values.data());
    all += cost.FullBytes();
  }
  EXPECT_EQ(sample.BytesAt(0.0F), all);
  EXPECT_EQ(sample.PriceFor(all), 0.0F);
  uint64_t before = all;
  for (const uint64_t share : {2U, 5U, 50U, 500U}) {
    const float price = sample.PriceFor(all / share);
    EXPECT_LE(sample.BytesAt(price), all / share);
    EXPECT_GT(sample.BytesAt(std::nextafter(price, 0.0F)), all / share) << "not the least";
    EXPECT_LT(sample.BytesAt(price), before);
    before = sample.BytesAt(price);
  }
  EXPECT_EQ(sample.BytesAt(sample.PriceFor(0)), 0U);
}

TEST(RowCostTest, ARowStaysForWhatItsChunksAreWorthOverTheirPrice) {
  const RowCost cost{3, 10, 20};
  const auto kept = [&](std::array<float, kMaxChunks> utility, float price) {
    return cost.WorthKeeping(utility.data(), price);
  };
  // Price 1: a chunk must be worth 10, and over that the row 20.
  EXPECT_EQ(kept({31, 9, 0}, 1.0F), 0b001);
  EXPECT_EQ(kept({30, 9, 0}, 1.0F), 0) << "nothing is left for what the row costs";
  EXPECT_EQ(kept({21, 9, 20}, 1.0F), 0b101);
  EXPECT_EQ(kept({0, 0, 1e-6F}, 0.0F), 0b100);
  EXPECT_EQ(kept({0, 0, 0}, 0.0F), 0) << "never of use";
}

TEST(RowCostTest, ARowOfCountersStaysForWhatTheyAreWorth) {
  // Two chunks of 10 bytes, 20 of the row, counters of 8.
  const RowCost cost{2, 10, 20, 0b100, 8};
  const auto kept = [&](std::array<float, kMaxChunks> utility) {
    return cost.WorthKeeping(utility.data(), 1.0F);
  };
  EXPECT_EQ(cost.Bytes(0b100), 28U);
  EXPECT_EQ(cost.FullBytes(), 48U);
  EXPECT_EQ(kept({9, 9, 29}), 0b100) << "the chunks are not worth their price";
  EXPECT_EQ(kept({9, 9, 28}), 0);
  EXPECT_EQ(kept({20, 9, 19}), 0b101) << "both pay for the row";
  EXPECT_EQ(kept({40, 9, 0}), 0b101) << "a row has its counters, whatever they are worth";
}

// --- keys that wait

TEST(WaitingKeysTest, KeysEarnAndForgetAsRowsDo) {
  const Decay decay(0.99);
  WaitingKeys waiting(64 << 10, &decay);
  std::mt19937_64 random(5);
  std::map<uint64_t, double> want;
  for (uint64_t step = 1; step <= 6000; ++step) {  // the scale is made anew on the way
    for (auto& [hash, utility] : want) utility *= 0.99;
    const uint64_t hash = HashKey(random() % 200);
    const auto earned = static_cast<float>(1 + random() % 8);
    want[hash] += earned;
    ASSERT_NEAR(waiting.Add(hash, earned, step), want[hash], 0.05 * want[hash]) << step;
  }
  const uint64_t some = want.begin()->first;
  waiting.Remove(some);
  EXPECT_EQ(waiting.Add(some, 1.0F, 6000), 1.0F);
}

TEST(WaitingKeysTest, KeysThatNeverComeAgainDriveOutNoneThatDo) {
  const Decay decay(0.9999);
  WaitingKeys waiting(4 << 10, &decay);  // 1,024 keys
  EXPECT_EQ(waiting.bytes(), 4U << 10);
  std::mt19937_64 random(6);
  for (uint64_t step = 1; step <= 400; ++step) {
    for (uint64_t key = 0; key < 100; ++key) waiting.Add(HashKey(key), 1.0F, step);
    for (int i = 0; i < 400; ++i) waiting.Add(random(), 0.5F, step);
  }
  WaitingKeys one_set(32, &decay);
  for (uint64_t key = 0; key < WaitingKeys::kWays; ++key) one_set.Add(HashKey(key), 1.0F, 1);
  for (uint64_t key = 100; key < 200; ++key) one_set.Add(HashKey(key), 0.9F, 1);
  EXPECT_NEAR(one_set.Add(HashKey(3), 0.0F, 1), 1.0F, 0.01F) << "of more worth than any that came";
  uint32_t kept = 0;
  for (uint64_t key = 0; key < 100; ++key) kept += waiting.Add(HashKey(key), 0.0F, 400) > 300.0F;
  EXPECT_GE(kept, 99U);
}

TEST(WaitingKeysTest, ItsStateIsAllThatItDependsOn) {
  const Decay decay(0.99);
  WaitingKeys one(1 << 10, &decay);
  std::mt19937_64 random(7);
  const auto add = [&](WaitingKeys* to, uint64_t step, std::mt19937_64 from) {
    float sum = 0;
    for (int i = 0; i < 500; ++i) {
      sum += to->Add(HashKey(from() % 400), static_cast<float>(from() % 5), step + i);
    }
    return sum;
  };
  add(&one, 1, random);
  WaitingKeys other(1 << 10, &decay);
  const std::string state = one.Save();
  const std::string_view view(state);
  ASSERT_EQ(WaitingKeys::BytesOf(view), one.bytes());
  other.Load({&view, 1});
  EXPECT_EQ(other.Save(), state);
  EXPECT_EQ(add(&one, 5000, random), add(&other, 5000, random));
  EXPECT_EQ(one.Save(), other.Save());
  EXPECT_FALSE(WaitingKeys::BytesOf(view.substr(1)).has_value());
  EXPECT_FALSE(WaitingKeys::BytesOf(view.substr(WaitingKeys::kSetBytes)).has_value());
  EXPECT_FALSE(WaitingKeys::BytesOf("").has_value());
}

TEST(DistinctKeysTest, CountsWithinSomePercentHoweverMany) {
  DistinctKeys seen;
  uint64_t key = 0;
  EXPECT_EQ(seen.Estimate(), 0.0);
  for (const uint64_t count : {1U, 100U, 3000U, 6000U, 100'000U, 3'000'000U}) {
    for (; key < count; ++key) {
      seen.Add(HashKey(key));
      seen.Add(HashKey(key / 2));
    }
    const auto want = static_cast<double>(count);
    EXPECT_NEAR(seen.Estimate(), want, 0.07 * want + 0.5);
  }
}

// --- the store

class PruningTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kChunks = 4;
  static constexpr uint32_t kDim = 16;
  PruningTest() {
    options_.ddr_budget_bytes = 64ULL << 20;
    options_.utility_decay = 0.999;
    for (uint32_t t = 0; t < 2; ++t) {
      TableConfig table;
      table.name = "t" + std::to_string(t);
      table.id = t;
      table.layout = {kChunks, kDim / kChunks, DType::kFp32};
      table.bucket_bits = 2 * t;
      options_.tables.push_back(table);
    }
    options_.prune_groups = {{{0, 1}, 16 << 10}};
  }
  void Open() { store_ = std::move(*TrainingStore::Open(options_)); }
  std::string Refusal() const { return TrainingStore::Open(options_).status().message(); }
  // One step with the same gradient in all dimensions of each key, times `scale` by chunk.
  void Step(uint32_t t, const std::vector<int64_t>& keys, float gradient,
            std::array<float, kChunks> scale = {1, 1, 1, 1}) {
    std::vector<float> gradients(keys.size() * kDim);
    for (size_t i = 0; i < gradients.size(); ++i) {
      gradients[i] = gradient * scale[i % kDim / (kDim / kChunks)];
    }
    const auto done = ApplyRows(store_.get(), t, keys, gradients, {0.1F, 1e-8F, 0.0F});
    ASSERT_TRUE(done.ok()) << done.status().ToString();
  }
  PruneOutcome Prune(uint64_t bytes, uint32_t max_age = 0) {
    auto outcome = store_->Prune(0, bytes, max_age);
    EXPECT_TRUE(outcome.ok()) << outcome.status().ToString();
    const Status whole = store_->CheckIntegrity();
    EXPECT_TRUE(whole.ok()) << whole.ToString();
    EXPECT_LE(outcome->bytes, bytes + bytes / 100);
    return *outcome;
  }
  uint16_t Live(uint32_t t, uint64_t key) const {
    const RowLocation row = store_->PinNewest()->Explain(t, key);
    return row.resident ? row.live : uint16_t{0};
  }
  std::vector<float> Read(uint32_t t, int64_t key) const {
    std::vector<float> out(kDim);
    EXPECT_TRUE(store_->PinNewest()
                    ->Lookup({t, {&key, 1}, Pooling::kNone, {}, out.data(), kDim, nullptr})
                    .ok());
    return out;
  }
  static std::vector<int64_t> Keys(int64_t first, int64_t count) {
    std::vector<int64_t> keys;
    for (int64_t key = first; key < first + count; ++key) keys.push_back(key);
    return keys;
  }
  // Bytes of a whole row: payload, accumulator and marks, utilities, index entry.
  static constexpr uint64_t kRow = 4 * kDim + 8 + 4 * kChunks + 24;

  StoreOptions options_;
  std::unique_ptr<TrainingStore> store_;
};

TEST_F(PruningTest, WhatCannotBePrunedIsRefused) {
  options_.prune_groups = {{{0, 2}}};
  EXPECT_NE(Refusal().find("table 2 does not exist"), std::string::npos);
  options_.prune_groups = {{{0}}, {{1, 0}}};
  EXPECT_NE(Refusal().find("t0 stands twice"), std::string::npos);
  options_.prune_groups = {{{}}};
  EXPECT_NE(Refusal().find("without tables"), std::string::npos);
  options_.prune_groups = {{{0, 1}, uint64_t{1} << 40}};
  EXPECT_NE(Refusal().find("waiting_bytes"), std::string::npos);
  options_.prune_groups = {{{0, 1}}};
  EXPECT_NE(ServingStore::Open(options_).status().message().find("in a trainer"),
            std::string::npos);
  Open();
  EXPECT_EQ(store_->Prune(1, 1 << 20).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(store_->Prune(0, kRow - 1).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(store_->SetPruneState(0, "short").code(), Code::kCorrupt);
}

TEST_F(PruningTest, TheMostUsefulRowsOfAllTablesStay) {
  Open();
  for (uint32_t t = 0; t < 2; ++t) {
    Step(t, Keys(0, 1000), 0.1F);
    Step(t, Keys(t == 0 ? 0 : 700, 300), 2.0F);
  }
  EXPECT_EQ(store_->Stats().rows, 2000U);
  const PruneOutcome all = Prune(4000 * kRow);
  EXPECT_EQ(all.price, 0.0F);
  EXPECT_EQ(all.rows, 2000U);
  EXPECT_EQ(all.bytes, 2000 * kRow);
  // 600 rows earned more; 5 % is left free.
  const PruneOutcome outcome = Prune(700 * kRow);
  EXPECT_EQ(outcome.rows, 600U);
  EXPECT_EQ(outcome.rows_pruned, 1400U);
  EXPECT_GT(outcome.price, 0.0F);
  for (int64_t key = 0; key < 1000; ++key) {
    ASSERT_EQ(Live(0, key) != 0, key < 300) << key;
    ASSERT_EQ(Live(1, key) != 0, key >= 700) << key;
  }
  // They are told as pruned.
  std::vector<std::byte> records;
  ASSERT_TRUE(store_->TakeChanges(0, 0, &records).ok());
  uint32_t pruned = 0;
  for (std::span<const std::byte> rest = records; !rest.empty();) {
    pruned += ReadRecord(options_.tables[0].layout, &rest)->kind == RecordKind::kPruned;
  }
  EXPECT_EQ(pruned, 700U);
}

// Rows of two tables that earned alike; of one of them four times as much is at stake.
TEST_F(PruningTest, UtilitiesCountAsMuchAsWhatIsAtStakeInTheirTable) {
  Open();
  for (uint32_t t = 0; t < 2; ++t) {
    Step(t, Keys(0, 500), 1.0F);
    Step(t, Keys(500, 500), 1.5F);
  }
  ASSERT_TRUE(store_->RecordSensitivity(0, 10.0, 1000.0).ok());
  ASSERT_TRUE(store_->RecordSensitivity(1, 20.0, 500.0).ok());
  const std::string state = *store_->PruneState(0);
  const PruneOutcome outcome = Prune(1100 * kRow);
  EXPECT_EQ(outcome.rows, 1000U);
  for (const int64_t key : {0, 499, 500, 999}) {
    EXPECT_EQ(Live(0, key), 0) << key;
    EXPECT_EQ(Live(1, key), 0b1111) << key;
  }
  // A key of the lesser table needs four times what one of the other does for a row.
  const float earned = std::sqrt(outcome.price * kRow * 2 / kDim);
  Step(0, {2000}, earned);
  Step(1, {2000}, earned);
  EXPECT_EQ(Live(0, 2000), 0);
  EXPECT_EQ(Live(1, 2000), 0b1111);
  Step(0, {2001}, 2 * earned);
  EXPECT_EQ(Live(0, 2001), 0b1111);
  // Without stakes, or once they are as large in both, the tables are one again.
  ASSERT_TRUE(store_->SetPruneState(0, state).ok());
  EXPECT_EQ(*store_->PruneState(0), state);
  ASSERT_TRUE(store_->RecordSensitivity(0, 1e6, 2.5e7).ok());
  Prune(4000 * kRow);
  Step(0, {3000}, 0.1F);
  EXPECT_EQ(Live(0, 3000), 0b1111);
  for (const auto& [stake, squares] : {std::pair{-1.0, 1.0}, {1.0, -1.0}, {NAN, 1.0}}) {
    const Status refused = store_->RecordSensitivity(0, stake, squares);
    EXPECT_NE(refused.message().find("table t0: a stake of"), std::string::npos);
  }
}

TEST_F(PruningTest, ChunksGoAndComeBackCleanByWhatTheyAreWorth) {
  Open();
  Step(0, Keys(0, 500), 1.0F, {2, 2, 0.01F, 0.01F});
  Step(0, Keys(500, 500), 1.0F, {1, 1, 1, 1});
  const uint64_t half = kRow - 2 * (kDim / kChunks) * 4;
  const PruneOutcome outcome = Prune(static_cast<uint64_t>(500 * (half + kRow) / 0.95) + kRow);
  EXPECT_EQ(outcome.rows, 1000U);
  EXPECT_EQ(outcome.chunks_pruned, 1000U);
  for (int64_t key = 0; key < 1000; ++key) {
    ASSERT_EQ(Live(0, key), key < 500 ? 0b0011 : 0b1111) << key;
  }
  EXPECT_EQ(Read(0, 7)[8], 0.0F);
  EXPECT_NE(Read(0, 7)[0], 0.0F);
  // Dead chunks go on earning.
  const float before = store_->StateOf(0, 7)->utility[3];
  for (int i = 0; i < 3; ++i) Step(0, Keys(0, 500), 1.0F, {0, 0, 3, 3});
  EXPECT_GT(store_->StateOf(0, 7)->utility[3], before + 100.0F);
  EXPECT_EQ(Read(0, 7)[8], 0.0F);
  const PruneOutcome regrown = Prune(2000 * kRow);
  EXPECT_EQ(regrown.chunks_regrown, 1000U);
  EXPECT_EQ(Live(0, 7), 0b1111);
  EXPECT_EQ(Read(0, 7)[8], 0.0F) << "a chunk that comes back starts at zero";
}

TEST_F(PruningTest, AKeyGetsItsRowOnceItHasEarnedThePrice) {
  Open();
  Step(0, Keys(0, 1000), 1.0F);
  const PruneOutcome outcome = Prune(500 * kRow);
  EXPECT_GT(outcome.price, 0.0F);
  EXPECT_EQ(outcome.rows, 0U) << "all are worth the same, so none is worth more than the price";
  // A row earned 16 in its step; so much buys it.
  Step(0, {5000}, 0.9F);
  EXPECT_EQ(Live(0, 5000), 0);
  EXPECT_EQ(store_->Stats().unworthy_keys, 1U);
  EXPECT_EQ(store_->Stats().dropped_gradients, 1U);
  Step(0, {5000}, 0.9F);
  EXPECT_EQ(Live(0, 5000), 0b1111);
  const RowState state = *store_->StateOf(0, 5000);
  float sum = 0;
  for (uint32_t c = 0; c < kChunks; ++c) sum += state.utility[c];
  EXPECT_NEAR(sum, 2 * 16 * 0.81F, 0.3F) << "a row begins with what its key earned";
  // The utility that it earned before was spent on the row.
  ASSERT_TRUE(store_->SetLive(0, 5000, 0).ok());
  Step(0, {5000}, 0.3F);
  EXPECT_EQ(Live(0, 5000), 0);
  // A pruned key is remembered: a little is enough for it, not for a new key.
  Step(0, {3, 6000}, 0.3F);
  EXPECT_EQ(Live(0, 3), 0b1111);
  EXPECT_EQ(Live(0, 6000), 0);
}

// A row that was of much use long ago is worth less than one of some use now.
TEST_F(PruningTest, WhatWasOfUseIsForgotten) {
  options_.utility_decay = 0.9;
  Open();
  Step(0, Keys(0, 100), 4.0F);
  for (int i = 0; i < 60; ++i) Step(1, Keys(0, 100), 0.5F);
  const PruneOutcome outcome = Prune(110 * kRow);
  EXPECT_EQ(outcome.rows, 100U);
  EXPECT_EQ(Live(0, 3), 0);
  EXPECT_EQ(Live(1, 3), 0b1111);
}

TEST_F(PruningTest, WhatAKeyWithoutARowEarnedIsForgotten) {
  options_.utility_decay = 0.9;
  Open();
  Step(0, Keys(0, 1000), 1.0F);
  Prune(500 * kRow);
  Step(0, {5000, 5001}, 0.9F);
  for (int i = 0; i < 30; ++i) Step(1, {1}, 0.1F);
  Step(0, {5000}, 0.9F);
  EXPECT_EQ(Live(0, 5000), 0);
  Step(0, {5000}, 0.9F);
  EXPECT_EQ(Live(0, 5000), 0b1111);
}

TEST_F(PruningTest, NewRowsNeverTakeMoreThanIsLeft) {
  options_.prune_groups = {{{0, 1}, 256 << 10}};
  Open();
  Step(0, Keys(0, 500), 1.0F);
  Prune(1000 * kRow);  // with a price of nothing
  for (int64_t first = 1000; first < 4000; first += 100) Step(1, Keys(first, 100), 5.0F);
  EXPECT_EQ(store_->Stats().rows, 1000U);
  EXPECT_EQ(store_->Stats().worthy_keys_without_room, 2500U);
  const double all = 3500 * kRow;  // whether they have a row or not
  EXPECT_NEAR(static_cast<double>(*store_->SeenBytes(0)), all, 0.07 * all);
  // They had no row, and are worth more than some that have.
  Prune(1000 * kRow);
  for (int64_t first = 1000; first < 4000; first += 100) Step(1, Keys(first, 100), 5.0F);
  EXPECT_LE(store_->Stats().rows, 1000U);
  EXPECT_EQ(Live(0, 3), 0);
}

TEST_F(PruningTest, RowsThatNobodyAsksForExpire) {
  Open();
  Step(0, Keys(0, 100), 9.0F);
  for (int i = 0; i < 20; ++i) Step(0, Keys(50, 100), 0.1F);
  const PruneOutcome outcome = Prune(1000 * kRow, 19);
  EXPECT_EQ(outcome.rows_expired, 50U);
  EXPECT_EQ(outcome.rows_pruned, 0U);
  EXPECT_EQ(Live(0, 49), 0);
  EXPECT_EQ(Live(0, 50), 0b1111);
}

// With rows by the ten thousand a sample decides, and the index gives its memory back.
TEST_F(PruningTest, ASampleFindsThePriceWithinOnePercent) {
  options_.prune_groups = {{{1}, 1 << 20}};
  Open();
  std::mt19937 random(8);
  std::lognormal_distribution<float> gradient(0.0F, 1.0F);
  const std::vector<int64_t> keys = Keys(0, 300'000);
  std::vector<float> gradients(keys.size() * kDim);
  for (size_t k = 0; k < keys.size(); ++k) {
    std::fill_n(gradients.begin() + static_cast<ptrdiff_t>(k * kDim), kDim, gradient(random));
  }
  ASSERT_TRUE(ApplyRows(store_.get(), 1, keys, gradients, {}).ok());
  store_->Maintain();
  const uint64_t index_before = store_->Stats().index_bytes;
  for (const uint64_t share : {2U, 10U, 50U}) {
    const uint64_t target = keys.size() * kRow / share;
    const PruneOutcome outcome = Prune(target);
    const double aim = 0.95 * static_cast<double>(target);
    EXPECT_NEAR(static_cast<double>(outcome.bytes), aim, 0.02 * aim) << share;
    EXPECT_EQ(outcome.rows, store_->Stats().rows);
  }
  std::vector<std::byte> records;  // with notes of the keys that are gone
  for (uint32_t b = 0; b < options_.tables[1].buckets(); ++b) {
    ASSERT_TRUE(store_->TakeChanges(1, b, &records).ok());
  }
  for (int i = 0; i < 200; ++i) store_->Maintain();
  const StoreStats stats = store_->Stats();
  EXPECT_LT(stats.index_bytes, (1 << 20) + index_before / 4);
  EXPECT_LT(stats.ddr_payload_bytes, 2 * keys.size() * kRow / 50);
}

// Rows, state and prune state are all that a run depends on, wherever it goes on from.
TEST_F(PruningTest, ARunGoesOnFromItsState) {
  const auto run = [&](TrainingStore* store, int first, int end, std::vector<std::byte>* rows) {
    for (int turn = first; turn < end; ++turn) {
      std::mt19937_64 random(turn);
      std::vector<int64_t> keys;
      std::vector<float> gradients;
      for (int i = 0; i < 300; ++i) {
        keys.push_back(static_cast<int64_t>(random() % (random() % 3000 + 1)));
        for (uint32_t d = 0; d < kDim; ++d) {
          gradients.push_back(static_cast<float>(random() % 100) * 0.01F);
        }
      }
      for (uint32_t t = 0; t < 2; ++t) {
        ASSERT_TRUE(ApplyRows(store, t, keys, gradients, {}).ok());
      }
      if (turn % 10 == 9) {
        ASSERT_TRUE(store->Prune(0, 500 * kRow).ok());
      }
    }
    for (uint32_t t = 0; t < 2; ++t) {
      for (uint32_t b = 0; b < options_.tables[t].buckets(); ++b) {
        ASSERT_TRUE(store->ExportBucket(*store->PinNewest(), t, b, rows).ok());
      }
    }
  };
  Open();
  std::vector<std::byte> whole;
  run(store_.get(), 0, 60, &whole);
  Open();
  std::vector<std::byte> half;
  run(store_.get(), 0, 35, &half);
  const std::unique_ptr<TrainingStore> other = std::move(*TrainingStore::Open(options_));
  for (uint32_t t = 0; t < 2; ++t) {
    for (uint32_t b = 0; b < options_.tables[t].buckets(); ++b) {
      std::vector<std::byte> records;
      ASSERT_TRUE(store_->ExportBucket(*store_->PinNewest(), t, b, &records).ok());
      ASSERT_TRUE(other->ImportRecords(t, b, records).ok());
      for (std::span<const std::byte> rest = records; !rest.empty();) {
        const uint64_t key = ReadRecord(options_.tables[t].layout, &rest)->key;
        ASSERT_TRUE(other->SetState(t, key, *store_->StateOf(t, key)).ok());
      }
    }
  }
  ASSERT_TRUE(other->SetPruneState(0, *store_->PruneState(0)).ok());
  EXPECT_EQ(*other->PruneState(0), *store_->PruneState(0));
  std::vector<std::byte> resumed;
  run(other.get(), 35, 60, &resumed);
  EXPECT_EQ(resumed, whole);
  EXPECT_LT(other->Stats().rows, 600U);
}

}  // namespace
}  // namespace embertide
