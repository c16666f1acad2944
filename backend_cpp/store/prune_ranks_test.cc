// Stores that share the rows of one, as the ranks of a trainer do: they prune to the rows that the
// one store has, and go on with their states at another number.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "store/test_rows.h"
#include "store/waiting_keys.h"

namespace embertide {
namespace {

constexpr uint32_t kDim = 8;
constexpr uint32_t kCounters = 4;
constexpr StepOptions kStep{0.1F, 1e-8F, 0.0F};

// Stores that have the buckets b % their number == rank, and one that has all.
class PruneRanksTest : public ::testing::Test {
 protected:
  PruneRanksTest() {
    options_.ddr_budget_bytes = 64ULL << 20;
    options_.utility_decay = 0.999;
    for (uint32_t t = 0; t < 2; ++t) {
      TableConfig table;
      table.name = "t" + std::to_string(t);
      table.id = t;
      table.layout = {static_cast<uint16_t>(2 + t), 4, DType::kFp32};
      table.counter_chunks = static_cast<uint16_t>(t);
      table.bucket_bits = 3;
      options_.tables.push_back(table);
    }
    options_.prune_groups = {{{0, 1}, 256 << 10, {{1, 2, 0.5F}}}};
  }
  std::unique_ptr<TrainingStore> OpenOne() const {
    return std::move(*TrainingStore::Open(options_));
  }
  void Open(uint32_t ranks) {
    whole_ = OpenOne();
    ranks_.clear();
    for (uint32_t r = 0; r < ranks; ++r) ranks_.push_back(OpenOne());
  }
  size_t OwnerOf(uint64_t key) const { return BucketOfHash(HashKey(key), 3) % ranks_.size(); }
  // One step of all, with the same gradient in all dimensions of a key.
  void Step(uint32_t t, const std::vector<int64_t>& keys, const std::vector<float>& gradient) {
    for (size_t r = 0; r <= ranks_.size(); ++r) {
      std::vector<int64_t> mine;
      std::vector<float> gradients;
      for (size_t k = 0; k < keys.size(); ++k) {
        if (r < ranks_.size() && OwnerOf(static_cast<uint64_t>(keys[k])) != r) continue;
        mine.push_back(keys[k]);
        gradients.insert(gradients.end(), kDim, gradient[k]);
      }
      TrainingStore* store = r < ranks_.size() ? ranks_[r].get() : whole_.get();
      const auto done = ApplyRows(store, t, mine, gradients, kStep);
      ASSERT_TRUE(done.ok()) << done.status().ToString();
    }
  }
  void Count(const std::vector<int64_t>& keys, std::mt19937_64* random) {
    for (const int64_t key : keys) {
      std::array<float, kCounters> logs;
      for (float& log : logs) log = 20.0F + static_cast<float>((*random)() % 100) * 0.1F;
      for (TrainingStore* store :
           {whole_.get(), ranks_[OwnerOf(static_cast<uint64_t>(key))].get()}) {
        ASSERT_TRUE(store->AddCounts(1, {&key, 1}, logs.data(), kCounters).ok());
      }
    }
  }
  // The samples of all ranks.
  std::vector<std::string> Samples() {
    uint64_t rows = 0;
    for (const auto& rank : ranks_) rows += *rank->PruneRows(0);
    std::vector<std::string> samples;
    for (const auto& rank : ranks_) samples.push_back(*rank->PruneSample(0, rows));
    return samples;
  }
  // A pass of all; the outcome of the one store.
  PruneOutcome Prune(uint64_t bytes) {
    const auto samples = Samples();
    const PruneOutcome want = *whole_->Prune(0, bytes);
    PruneOutcome all;
    for (const auto& rank : ranks_) {
      const auto outcome = rank->Prune(0, bytes, 0, samples);
      EXPECT_TRUE(outcome.ok()) << outcome.status().ToString();
      EXPECT_EQ(outcome.value().price, want.price);
      all.rows += outcome.value().rows;
      all.bytes += outcome.value().bytes;
      all.rows_pruned += outcome.value().rows_pruned;
      all.chunks_pruned += outcome.value().chunks_pruned;
      EXPECT_EQ(ranks_.size() > 1 ? 0 : bytes - outcome.value().bytes, *rank->PruneRoom(0));
    }
    EXPECT_EQ(all.rows, want.rows);
    EXPECT_EQ(all.bytes, want.bytes);
    EXPECT_EQ(all.rows_pruned, want.rows_pruned);
    EXPECT_EQ(all.chunks_pruned, want.chunks_pruned);
    return want;
  }
  void ExpectEqualRows() const {
    for (uint32_t t = 0; t < 2; ++t) {
      for (uint32_t b = 0; b < 8; ++b) {
        std::array<std::pair<std::vector<std::byte>, std::vector<RowState>>, 2> rows;
        const std::array<const TrainingStore*, 2> stores = {whole_.get(),
                                                            ranks_[b % ranks_.size()].get()};
        for (size_t i = 0; i < 2; ++i) {
          ASSERT_TRUE(stores[i]
                          ->ExportBucketWithStates(*stores[i]->PinNewest(), t, b, &rows[i].first,
                                                   &rows[i].second)
                          .ok());
        }
        ASSERT_TRUE(rows[0] == rows[1]) << "table " << t << ", bucket " << b;
      }
    }
  }
  void SetRoom(uint64_t bytes) {
    ASSERT_TRUE(whole_->SetPruneRoom(0, bytes).ok());
    for (const auto& rank : ranks_) ASSERT_TRUE(rank->SetPruneRoom(0, bytes).ok());
  }
  bool Has(const TrainingStore& store, int64_t key) const {
    return store.PinNewest()->Explain(0, static_cast<uint64_t>(key)).resident;
  }

  StoreOptions options_;
  std::unique_ptr<TrainingStore> whole_;
  std::vector<std::unique_ptr<TrainingStore>> ranks_;
};

// Tables that share a price, with stakes and counts; whose keys go on earning between passes.
TEST_F(PruneRanksTest, StoresThatShareTheRowsOfOneKeepTheRowsThatItKeeps) {
  for (const uint32_t ranks : {1U, 2U, 3U}) {
    Open(ranks);
    std::mt19937_64 random(ranks);
    uint64_t pruned = 0;
    for (int turn = 0; turn < 6; ++turn) {
      for (uint32_t t = 0; t < 2; ++t) {
        std::vector<int64_t> keys(3000);
        std::vector<float> gradients(keys.size());
        for (int64_t& key : keys) key = static_cast<int64_t>(random() % (random() % 5000 + 1));
        for (float& each : gradients) each = static_cast<float>(random() % 100) * 0.01F;
        Step(t, keys, gradients);
      }
      std::vector<int64_t> counted(200);
      for (int64_t& key : counted) key = static_cast<int64_t>(random() % 2000);
      Count(counted, &random);
      for (uint32_t t = 0; t < 2; ++t) {
        const double stake = static_cast<double>(random() % 1000) * 0.37;
        ASSERT_TRUE(whole_->RecordSensitivity(t, stake, 1000.0).ok());
        for (const auto& rank : ranks_) ASSERT_TRUE(rank->RecordSensitivity(t, stake, 1000.0).ok());
      }
      const PruneOutcome outcome = Prune(30'000 + 15'000 * (turn % 3));
      pruned += outcome.rows_pruned;
      ExpectEqualRows();
      SetRoom(1 << 20);
    }
    EXPECT_GT(pruned, 1000U);
  }
}

// So many rows that some stand for all, on each rank those that the one store would take.
TEST_F(PruneRanksTest, ManyRowsArePricedByOneSampleOfAllRanks) {
  Open(2);
  std::mt19937_64 random(9);
  std::vector<int64_t> keys(150'000);
  std::vector<float> gradients(keys.size());
  for (size_t k = 0; k < keys.size(); ++k) keys[k] = static_cast<int64_t>(k);
  for (float& each : gradients) each = static_cast<float>(random() % 10'000) * 1e-3F;
  Step(0, keys, gradients);
  uint64_t bytes = 0;
  for (const std::string& sample : Samples()) bytes += sample.size();
  EXPECT_LT(bytes, 65'536 * 2 * sizeof(float)) << "one row in four";
  const PruneOutcome outcome = Prune(150'000 * 24);
  EXPECT_GT(outcome.rows_pruned, 50'000U);
  ExpectEqualRows();
}

TEST_F(PruneRanksTest, NoKeyGetsARowBeforeARankKnowsItsRoom) {
  Open(2);
  Step(0, {1, 2, 3, 4}, {1.0F, 1.0F, 1.0F, 1.0F});
  const auto samples = Samples();
  for (const auto& rank : ranks_) ASSERT_TRUE(rank->Prune(0, 1 << 20, 0, samples).ok());
  Step(0, {100}, {5.0F});
  EXPECT_FALSE(Has(*ranks_[OwnerOf(100)], 100));
  SetRoom(1 << 20);
  Step(0, {100}, {5.0F});
  EXPECT_TRUE(Has(*ranks_[OwnerOf(100)], 100));
  EXPECT_LT(*ranks_[OwnerOf(100)]->PruneRoom(0), 1U << 20);
}

TEST_F(PruneRanksTest, SamplesThatAreNotOfOnePassAreRefused) {
  Open(2);
  Step(0, {1, 2, 3, 4, 5, 6, 7, 8}, std::vector<float>(8, 1.0F));
  const auto refusal = [&](const std::vector<std::string>& samples) {
    const auto outcome = ranks_[0]->Prune(0, 1 << 20, 0, samples);
    EXPECT_EQ(outcome.status().code(), Code::kInvalidArgument);
    return outcome.status().message();
  };
  const auto good = Samples();
  EXPECT_NE(refusal({good[0], "short"}).find("sample 1: a prune sample of 5 bytes"),
            std::string::npos);
  EXPECT_NE(refusal({good[0], good[1] + "x"}).find("is cut short or is none"), std::string::npos);
  EXPECT_NE(refusal({good[0], good[1].substr(0, good[1].size() - 4)}).find("sample 1"),
            std::string::npos);
  const std::string rare = *ranks_[1]->PruneSample(0, 1 << 20);
  EXPECT_NE(refusal({good[0], rare}).find("one of 2^n rows, n 0"), std::string::npos);
  ASSERT_TRUE(ranks_[1]->RecordSensitivity(0, 1.0, 2.0).ok());
  ASSERT_TRUE(ranks_[1]->RecordSensitivity(1, 2.0, 1.0).ok());
  const std::string other_stakes = *ranks_[1]->PruneSample(0, 8);
  EXPECT_NE(refusal({good[0], other_stakes}).find("sample 1: scale 1.000000"), std::string::npos);
  Step(0, {1}, {1.0F});
  EXPECT_NE(refusal({good[0], good[1]}).find("sample 0: step 2"), std::string::npos);
  EXPECT_GT(*ranks_[0]->PruneRoom(0), 1ULL << 60) << "no pass was made";
}

// From three ranks to two: who had no row goes on earning, wherever it comes now; keys that were
// seen are counted once.
TEST_F(PruneRanksTest, StatesOfSeveralRanksGoOnAtAnotherNumber) {
  Open(3);
  std::vector<int64_t> keys(3000);
  for (size_t k = 0; k < keys.size(); ++k) keys[k] = static_cast<int64_t>(k);
  Step(0, keys, std::vector<float>(keys.size(), 1.0F));
  const float price = Prune(40'000).price;
  SetRoom(1 << 20);
  // 0.8 of what a row costs, twice, is enough.
  constexpr float kRow = 4 * kDim + 8 + 4 * 2 + 24;
  const float some = std::sqrt(0.8F * price * kRow / kDim);
  const std::vector<int64_t> waiting = {10'000, 10'001, 10'002, 10'003, 10'004, 10'005};
  Step(0, waiting, std::vector<float>(waiting.size(), some));
  std::vector<std::string> states;
  uint64_t seen = 0;
  for (const auto& rank : ranks_) {
    states.push_back(*rank->PruneState(0));
    seen += *rank->SeenBytes(0);
  }
  for (const uint64_t waiting_bytes : {64U << 10, 256U << 10, 1024U << 10}) {
    options_.prune_groups[0].waiting_bytes = waiting_bytes;
    Open(2);
    for (size_t r = 0; r < 2; ++r) {
      const Status loaded = ranks_[r]->LoadPruneStates(0, states, /*seen=*/r == 0);
      ASSERT_TRUE(loaded.ok()) << loaded.ToString();
    }
    EXPECT_NEAR(static_cast<double>(*ranks_[0]->SeenBytes(0)), static_cast<double>(seen),
                0.05 * static_cast<double>(seen));
    EXPECT_EQ(*ranks_[1]->SeenBytes(0), 0U);
    SetRoom(1 << 20);
    std::vector<int64_t> come = waiting;
    for (const int64_t key : {20'000, 20'001, 20'002, 20'003}) come.push_back(key);
    Step(0, come, std::vector<float>(come.size(), some));
    for (const int64_t key : come) {
      EXPECT_EQ(Has(*ranks_[OwnerOf(static_cast<uint64_t>(key))], key), key < 20'000)
          << key << " with " << waiting_bytes;
    }
  }
}

TEST_F(PruneRanksTest, OneStateOfAsManyBytesIsLoadedAsItWasSaved) {
  Open(1);
  std::vector<int64_t> keys(3000);
  for (size_t k = 0; k < keys.size(); ++k) keys[k] = static_cast<int64_t>(k);
  Step(0, keys, std::vector<float>(keys.size(), 1.0F));
  Prune(40'000);
  Step(0, {10'000}, {0.1F});
  const std::vector<std::string> states = {*whole_->PruneState(0)};
  Open(1);
  ASSERT_TRUE(whole_->LoadPruneStates(0, states, /*seen=*/true).ok());
  EXPECT_EQ(*whole_->PruneState(0), states[0]);
}

TEST_F(PruneRanksTest, StatesOfAnotherGroupAreRefused) {
  Open(1);
  const std::string good = *whole_->PruneState(0);
  const std::vector<std::string> short_state = {good, "short"};
  EXPECT_EQ(whole_->LoadPruneStates(0, short_state, true).code(), Code::kCorrupt);
  const std::vector<std::string> cut = {good.substr(0, good.size() - 1)};
  EXPECT_EQ(whole_->LoadPruneStates(0, cut, true).code(), Code::kCorrupt);
  EXPECT_EQ(whole_->LoadPruneStates(0, {}, true).code(), Code::kInvalidArgument);
  EXPECT_EQ(whole_->LoadPruneStates(1, short_state, true).code(), Code::kInvalidArgument);
  options_.prune_groups[0].waiting_bytes = 1 << 10;
  Open(1);
  EXPECT_EQ(whole_->SetPruneState(0, good).code(), Code::kCorrupt) << "of other waiting_bytes";
}

// --- the keys that wait

// Two tables of keys, one of which began its steps anew long after the other.
TEST(WaitingKeysUnionTest, KeysOfSeveralAreWorthWhatTheyEarned) {
  const Decay decay(0.99);
  std::mt19937_64 random(3);
  std::map<uint64_t, double> want;
  const auto earn = [&](WaitingKeys* keys, uint64_t step, int count) {
    for (int i = 0; i < count; ++i) {
      const uint64_t hash = HashKey(random());
      const auto utility = static_cast<float>(1 + random() % 50);
      keys->Add(hash, utility, step);
      want[hash] = utility * std::pow(0.99, 6000.0 - static_cast<double>(step));
    }
  };
  WaitingKeys one(4 << 10, &decay);
  earn(&one, 5900, 60);
  WaitingKeys other(16 << 10, &decay);
  other.Add(1, 1.0F, 1);
  earn(&other, 6000, 60);
  for (const uint64_t bytes : {4U << 10, 8U << 10, 16U << 10, 64U << 10}) {
    for (const bool swapped : {false, true}) {
      std::array<std::string, 2> states = {one.Save(), other.Save()};
      if (swapped) std::swap(states[0], states[1]);
      const std::array<std::string_view, 2> views = {states[0], states[1]};
      WaitingKeys both(bytes, &decay);
      both.Load(views);
      EXPECT_EQ(both.bytes(), bytes);
      for (const auto& [hash, utility] : want) {
        ASSERT_NEAR(both.Add(hash, 0.0F, 6000), utility, 0.02 * utility) << bytes;
      }
    }
  }
}

TEST(WaitingKeysUnionTest, OfTooManyThoseOfMostWorthAreKept) {
  const Decay decay(0.99);
  std::array<std::string, 4> states;
  std::vector<uint64_t> best;
  for (uint64_t r = 0; r < 4; ++r) {
    WaitingKeys one_set(32, &decay);
    for (uint64_t way = 0; way < WaitingKeys::kWays; ++way) {
      const uint64_t hash = HashKey(r * 100 + way);
      one_set.Add(hash, way < 2 ? 9.0F : 1.0F, 1);
      if (way < 2) best.push_back(hash);
    }
    states[r] = one_set.Save();
  }
  WaitingKeys kept(32, &decay);
  const std::array<std::string_view, 4> views = {states[0], states[1], states[2], states[3]};
  kept.Load(views);
  for (const uint64_t hash : best) EXPECT_NEAR(kept.Add(hash, 0.0F, 1), 9.0F, 0.05F);
}

// Ranks that were told of the same keys, not knowing whose they are, count them once.
TEST(WaitingKeysUnionTest, AKeyThatSeveralHaveIsWorthTheMost) {
  const Decay decay(0.99);
  WaitingKeys one(4 << 10, &decay);
  WaitingKeys other(4 << 10, &decay);
  one.Add(HashKey(5), 3.0F, 1);
  other.Add(HashKey(5), 4.0F, 1);
  const std::array<std::string, 2> states = {one.Save(), other.Save()};
  const std::array<std::string_view, 2> views = {states[0], states[1]};
  WaitingKeys both(4 << 10, &decay);
  both.Load(views);
  EXPECT_NEAR(both.Add(HashKey(5), 0.0F, 1), 4.0F, 0.02F);
  both.Remove(HashKey(5));
  EXPECT_EQ(both.Add(HashKey(5), 0.0F, 1), 0.0F);
}

}  // namespace
}  // namespace embertide
