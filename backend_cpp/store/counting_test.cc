// Counters as their contract says them: sums of events in chunks that nothing learns.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "store/test_rows.h"

namespace embertide {
namespace {

constexpr uint32_t kChunkDim = 4;
constexpr uint32_t kLearned = 8;  // values
constexpr uint32_t kCounters = 4;

StoreOptions Options(uint16_t counter_chunks, Optimizer optimizer) {
  StoreOptions options;
  options.ddr_budget_bytes = 64ULL << 20;
  options.optimizer = optimizer;
  TableConfig table;
  table.name = "item";
  table.layout = {static_cast<uint16_t>(kLearned / kChunkDim + counter_chunks), kChunkDim,
                  DType::kFp32};
  table.bucket_bits = 2;
  table.init_scale = 0.05F;
  table.counter_chunks = counter_chunks;
  options.tables = {table};
  options.prune_groups = {{{0}, 1 << 10}};
  return options;
}

class CountingTest : public ::testing::TestWithParam<Optimizer> {
 protected:
  std::vector<float> Read(const TrainingStore& store, int64_t key) const {
    std::vector<float> out(store.options().tables[0].layout.dim());
    EXPECT_TRUE(store.PinNewest()
                    ->Lookup({0,
                              {&key, 1},
                              Pooling::kNone,
                              {},
                              out.data(),
                              static_cast<uint32_t>(out.size()),
                              nullptr})
                    .ok());
    return out;
  }
  void Step(TrainingStore* store, const std::vector<int64_t>& keys,
            const std::vector<float>& gradients) {
    const auto done = ApplyRows(store, 0, keys, gradients, {0.1F, 1e-8F, 0.0F});
    ASSERT_TRUE(done.ok()) << done.status().ToString();
  }
  static std::unique_ptr<TrainingStore> Open(uint16_t counter_chunks, Optimizer optimizer) {
    return std::move(*TrainingStore::Open(Options(counter_chunks, optimizer)));
  }
};

// A table with counters beside one without: what is learned, and what the optimizer and pruning
// keep of it, are the same bits whatever is counted.
TEST_P(CountingTest, CountsAndLearningDoNotTouchEachOther) {
  const auto counted = Open(1, GetParam());
  const auto plain = Open(0, GetParam());
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> log(30.0F, 40.0F);
  std::map<int64_t, std::vector<double>> sums;
  for (int step = 0; step < 60; ++step) {
    std::vector<int64_t> keys;
    for (int i = 0; i < 20; ++i) keys.push_back(static_cast<int64_t>(random() % 50));
    std::vector<float> gradients(keys.size() * kLearned);
    for (float& each : gradients) each = normal(random);
    Step(counted.get(), keys, gradients);
    Step(plain.get(), keys, gradients);
    std::vector<float> logs(keys.size() * kCounters);
    for (float& each : logs) each = random() % 3 == 0 ? 0.0F : log(random);
    const auto added = counted->AddCounts(0, keys, logs.data(), kCounters);
    ASSERT_TRUE(added.ok());
    EXPECT_EQ(added.value(), keys.size());
    for (size_t i = 0; i < logs.size(); ++i) {
      auto& sum = sums[keys[i / kCounters]];
      sum.resize(kCounters);
      if (logs[i] != 0.0F) sum[i % kCounters] += std::exp2(static_cast<double>(logs[i]));
    }
  }
  for (const auto& [key, sum] : sums) {
    const std::vector<float> values = Read(*counted, key);
    const std::vector<float> learned = Read(*plain, key);
    EXPECT_EQ(std::vector(values.begin(), values.begin() + kLearned), learned) << key;
    EXPECT_EQ(*counted->StateOf(0, static_cast<uint64_t>(key)),
              *plain->StateOf(0, static_cast<uint64_t>(key)));
    for (uint32_t c = 0; c < kCounters; ++c) {
      const float want = sum[c] == 0.0 ? 0.0F : static_cast<float>(std::log2(sum[c]));
      EXPECT_NEAR(values[kLearned + c], want, 1e-4) << key;
    }
  }
  EXPECT_TRUE(counted->CheckIntegrity().ok());
}

INSTANTIATE_TEST_SUITE_P(EveryOptimizer, CountingTest,
                         ::testing::Values(Optimizer::kRowwiseAdagrad, Optimizer::kAdagrad,
                                           Optimizer::kSgd, Optimizer::kRowwiseAdam),
                         [](const auto& of) { return std::string(OptimizerName(of.param)); });

TEST_F(CountingTest, KeysWithoutARowAreLeftOutAndChangesAreTaken) {
  const auto store = Open(1, Optimizer::kRowwiseAdagrad);
  Step(store.get(), {1, 2}, std::vector<float>(2 * kLearned, 0.1F));
  const auto changed = [&] {
    std::vector<std::byte> records;
    for (uint32_t b = 0; b < 4; ++b) EXPECT_TRUE(store->TakeChanges(0, b, &records).ok());
    return records.size();
  };
  EXPECT_GT(changed(), 0U);
  const std::vector<int64_t> keys{1, 7, 1};
  const std::vector<float> logs(3 * kCounters, 33.0F);
  EXPECT_EQ(*store->AddCounts(0, keys, logs.data(), kCounters), 2U);
  EXPECT_EQ(Read(*store, 1)[kLearned], 34.0F);
  EXPECT_EQ(Read(*store, 7)[kLearned], 0.0F);
  EXPECT_EQ(changed(), kRecordHeaderBytes + (kLearned + kCounters) * sizeof(float));
}

TEST_F(CountingTest, CountersOfARowWithDeadChunksLieBehindTheOthers) {
  const auto store = Open(1, Optimizer::kRowwiseAdagrad);
  Step(store.get(), {1}, std::vector<float>(kLearned, 0.1F));
  ASSERT_TRUE(store->SetLive(0, 1, 0b110).ok());
  const std::vector<int64_t> keys{1};
  const std::vector<float> logs{33, 34, 35, 36};
  EXPECT_EQ(*store->AddCounts(0, keys, logs.data(), kCounters), 1U);
  std::vector<float> values = Read(*store, 1);
  EXPECT_EQ(values[0], 0.0F);
  EXPECT_EQ(std::vector(values.begin() + kLearned, values.end()), logs);
  // Without them there is nothing to count in.
  ASSERT_TRUE(store->SetLive(0, 1, 0b011).ok());
  EXPECT_EQ(*store->AddCounts(0, keys, logs.data(), kCounters), 0U);
  EXPECT_TRUE(store->CheckIntegrity().ok());
}

TEST_F(CountingTest, PruningLeavesCountersWhileTheirRowStays) {
  const auto store = Open(1, Optimizer::kRowwiseAdagrad);
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < 1000; ++key) keys.push_back(key);
  std::vector<float> gradients(keys.size() * kLearned);
  for (size_t i = 0; i < gradients.size(); ++i) {
    const bool second = i % kLearned >= kChunkDim;
    gradients[i] = second ? 0.0F : 0.001F * static_cast<float>(i / kLearned + 1);
  }
  Step(store.get(), keys, gradients);
  const std::vector<float> logs(keys.size() * kCounters, 33.0F);
  EXPECT_EQ(*store->AddCounts(0, keys, logs.data(), kCounters), 1000U);
  // Bytes of a row with one chunk: chunk, counters, accumulator and marks, utilities, index entry.
  constexpr uint64_t kRow = 4 * kChunkDim + 4 * kCounters + 8 + 4 * 2 + 24;
  auto outcome = store->Prune(0, 500 * kRow);
  ASSERT_TRUE(outcome.ok());
  EXPECT_NEAR(static_cast<double>(outcome->rows), 475, 2) << "5 % are left free";
  EXPECT_EQ(outcome->bytes, outcome->rows * kRow);
  EXPECT_EQ(outcome->chunks_pruned, outcome->rows);
  EXPECT_EQ(store->PinNewest()->Explain(0, 999).live, 0b101);
  EXPECT_EQ(Read(*store, 999)[kLearned], 33.0F);
  EXPECT_FALSE(store->PinNewest()->Explain(0, 0).resident);
  EXPECT_TRUE(store->CheckIntegrity().ok());
}

// 1,000 keys learned alike, and the first hundred of them counted: as rows of counters alone they
// stay when all others go; a key without a row gets one for what it counts; what is learned later
// starts clean.
TEST_F(CountingTest, CountsHaveAWorthOfTheirOwn) {
  StoreOptions options = Options(1, Optimizer::kRowwiseAdagrad);
  options.prune_groups[0].counts = {{0, 1, 4.0F}};
  const auto store = std::move(*TrainingStore::Open(options));
  std::vector<int64_t> keys(1000);
  std::iota(keys.begin(), keys.end(), 0);
  std::vector<float> gradients(keys.size() * kLearned, 0.01F);
  for (size_t i = 0; i < gradients.size(); ++i) {
    gradients[i] += 1e-5F * static_cast<float>(i / kLearned);
  }
  Step(store.get(), keys, gradients);
  const std::vector<int64_t> counted(keys.begin(), keys.begin() + 100);
  std::vector<float> logs(counted.size() * kCounters, 33.0F);
  EXPECT_EQ(*store->AddCounts(0, counted, logs.data(), kCounters), 100U);
  constexpr uint64_t kLeast = 4 * kCounters + 8 + 4 * 2 + 24;
  auto outcome = store->Prune(0, 106 * kLeast);
  ASSERT_TRUE(outcome.ok());
  EXPECT_EQ(outcome->rows, 100U);
  EXPECT_EQ(outcome->bytes, 100 * kLeast);
  for (const int64_t key : {0, 99, 100, 999}) {
    const uint16_t live = store->PinNewest()->Explain(0, static_cast<uint64_t>(key)).live;
    EXPECT_EQ(live, key < 100 ? 0b100 : 0) << key;
  }
  EXPECT_EQ(Read(*store, 0)[kLearned], 33.0F);
  // The free bytes hold a few more rows: not for one event, for as many as the others have.
  const std::string state = *store->PruneState(0);
  const std::vector<int64_t> once{2000};
  const std::vector<int64_t> often{2001};
  const std::vector<float> few(kCounters, 25.0F);
  EXPECT_EQ(*store->AddCounts(0, once, few.data(), kCounters), 0U);
  EXPECT_EQ(*store->AddCounts(0, often, logs.data(), kCounters), 1U);
  EXPECT_EQ(store->PinNewest()->Explain(0, 2001).live, 0b100);
  EXPECT_EQ(Read(*store, 2001)[kLearned + 1], 33.0F);
  ASSERT_TRUE(store->SetPruneState(0, state).ok());
  EXPECT_EQ(*store->PruneState(0), state) << "and what counts are worth is a part of it";
  // A chunk that comes back is zeros, and its steps are as long as a new row's.
  for (int step = 0; step < 5; ++step) Step(store.get(), {0}, std::vector<float>(kLearned, 9.0F));
  EXPECT_GT(store->StateOf(0, 0)->accumulator, 81.0F) << "it goes on earning";
  ASSERT_TRUE(store->SetLive(0, 0, 0b101).ok());
  EXPECT_EQ(store->StateOf(0, 0)->accumulator, 0.0F);
  EXPECT_EQ(Read(*store, 0)[0], 0.0F);
  EXPECT_EQ(Read(*store, 0)[kLearned], 33.0F);
  EXPECT_TRUE(store->CheckIntegrity().ok());
  // A row of counters is as old as itself.
  const std::vector<int64_t> late{2002};
  EXPECT_EQ(*store->AddCounts(0, late, logs.data(), kCounters), 1U);
  outcome = store->Prune(0, 1000 * kLeast, /*max_age=*/3);
  ASSERT_TRUE(outcome.ok());
  EXPECT_EQ(outcome->rows, 2U) << "the keys 0 and 2002";
  EXPECT_EQ(store->PinNewest()->Explain(0, 2002).live, 0b100);
  // Another worth is of the next pass on, not what a checkpoint says.
  options.prune_groups[0].counts = {{0, 1, 0.0F}};
  const auto other = std::move(*TrainingStore::Open(options));
  ASSERT_TRUE(other->SetPruneState(0, state).ok());
  EXPECT_NE(*other->PruneState(0), state);
  options.prune_groups[0].counts = {{0, kCounters, 1.0F}};
  EXPECT_NE(TrainingStore::Open(options).status().message().find("counter 4"), std::string::npos);
}

TEST_F(CountingTest, WhatCannotBeCountedIsRefused) {
  const auto store = Open(1, Optimizer::kRowwiseAdagrad);
  const std::vector<int64_t> keys{1, 2};
  std::vector<float> logs(2 * kCounters, 33.0F);
  logs[5] = std::numeric_limits<float>::infinity();
  const Status refused = store->AddCounts(0, keys, logs.data(), kCounters).status();
  EXPECT_NE(refused.message().find("key 2: a log of inf"), std::string::npos);
  const auto plain = Open(0, Optimizer::kRowwiseAdagrad);
  EXPECT_EQ(plain->AddCounts(0, keys, logs.data(), kCounters).status().code(),
            Code::kInvalidArgument);
  for (const auto& [chunks, dtype] : {std::pair{3, DType::kFp32}, {1, DType::kFp16}}) {
    StoreOptions options = Options(1, Optimizer::kSgd);
    options.tables[0].counter_chunks = static_cast<uint16_t>(chunks);
    options.tables[0].layout.dtype = dtype;
    EXPECT_NE(TrainingStore::Open(options).status().message().find("counter_chunks"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace embertide
