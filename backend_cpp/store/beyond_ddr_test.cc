// Training with more rows than DDR has room for: what a step reads of the SSD, and what happens
// while it does.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "ssd/faulty_file.h"
#include "store/test_rows.h"

namespace embertide {
namespace {

constexpr uint32_t kDim = 32;
constexpr uint32_t kTables = 3;
constexpr int64_t kKeys = 20'000;  // of each table

class BeyondDdrTest : public ::testing::Test {
 protected:
  BeyondDdrTest()
      : directory_(std::filesystem::temp_directory_path() /
                   ("embertide-beyond-" + std::to_string(::getpid()))) {
    options_.ddr_budget_bytes = 5ULL << 20;
    options_.ssd_budget_bytes = 64ULL << 20;
    options_.ssd_directory = directory_;
    options_.wrap_ssd = [this](std::unique_ptr<BlockFile> /*file*/) {
      return std::make_unique<FaultyBlockFile>(NewMemoryBlockFile(), &faults_);
    };
    for (uint32_t t = 0; t < kTables; ++t) {
      TableConfig table;
      table.name = "t" + std::to_string(t);
      table.id = t;
      table.layout = {1, kDim, DType::kFp32};
      table.bucket_bits = 2;
      options_.tables.push_back(table);
    }
    keys_.resize(kKeys);
    std::iota(keys_.begin(), keys_.end(), 0);
  }
  ~BeyondDdrTest() override {
    store_.reset();
    std::filesystem::remove_all(directory_);
  }
  void Open() {
    store_ = std::move(*TrainingStore::Open(options_));
    for (uint32_t t = 0; t < kTables; ++t) ASSERT_TRUE(store_->EnsureRows(t, keys_).ok());
    steps_.assign(kTables, std::vector<uint32_t>(kKeys));
    faults_.TakeReads();
  }
  // One key in `one_in`, by chance.
  std::vector<int64_t> Some(uint32_t one_in) {
    std::vector<int64_t> some;
    for (const int64_t key : keys_) {
      if (random_() % one_in == 0) some.push_back(key);
    }
    return some;
  }
  // A step of the same keys in all tables; a row's accumulator is then one more.
  Result<uint64_t> Step(const std::vector<int64_t>& keys) {
    const std::vector<float> gradients(keys.size() * kDim, 1.0F);
    std::vector<BagGradients> bags;
    for (uint32_t t = 0; t < kTables; ++t) bags.push_back({t, keys, {}, gradients.data(), kDim});
    return store_->ApplyGradients(bags, {});
  }
  void CountedStep(const std::vector<int64_t>& keys) {
    const auto updated = Step(keys);
    ASSERT_TRUE(updated.ok()) << updated.status().ToString();
    ASSERT_EQ(updated.value(), keys.size() * kTables);
    for (auto& steps : steps_) {
      for (const int64_t key : keys) ++steps[static_cast<size_t>(key)];
    }
  }
  Result<uint64_t> Bring(const std::vector<int64_t>& keys) {
    std::vector<TableKeys> of;
    for (uint32_t t = 0; t < kTables; ++t) of.push_back({t, keys});
    return store_->BringRows(of);
  }
  void ExpectAllSteps() const {
    const Status whole = store_->CheckIntegrity();
    ASSERT_TRUE(whole.ok()) << whole.ToString();
    for (uint32_t t = 0; t < kTables; ++t) {
      for (const int64_t key : keys_) {
        const auto state = store_->StateOf(t, static_cast<uint64_t>(key));
        ASSERT_TRUE(state.ok()) << state.status().ToString();
        ASSERT_EQ(state.value().accumulator,
                  static_cast<float>(steps_[t][static_cast<size_t>(key)]))
            << "table " << t << ", key " << key;
      }
    }
  }

  const std::filesystem::path directory_;
  StoreOptions options_;
  Faults faults_;
  std::unique_ptr<TrainingStore> store_;
  std::vector<int64_t> keys_;
  std::vector<std::vector<uint32_t>> steps_;  // by table and key
  std::mt19937 random_{5};
};

// One batch for all its tables: the drive is asked for as many blocks at once as there are.
TEST_F(BeyondDdrTest, AStepReadsTheRowsThatItLacksInOneBatch) {
  for (const uint32_t devices : {1U, 2U}) {
    options_.devices = devices;
    ASSERT_NO_FATAL_FAILURE(Open());
    for (int step = 0; step < 5; ++step) {
      ASSERT_NO_FATAL_FAILURE(CountedStep(Some(40)));
      const auto batches = faults_.TakeReads();
      EXPECT_EQ(batches.size(), devices) << "step " << step;
      for (const auto& blocks : batches) {
        EXPECT_GT(blocks.size(), 100U);
        const std::set<uint64_t> distinct(blocks.begin(), blocks.end());
        EXPECT_EQ(distinct.size(), blocks.size()) << "a block was read twice";
      }
    }
    ASSERT_NO_FATAL_FAILURE(ExpectAllSteps());
  }
}

TEST_F(BeyondDdrTest, RowsThatWereBroughtAreNotReadAgain) {
  options_.ddr_budget_bytes = 7ULL << 20;
  ASSERT_NO_FATAL_FAILURE(Open());
  std::vector<int64_t> keys = Some(80);
  keys.insert(keys.end(), keys.begin(), keys.end());  // twice each
  keys.push_back(kKeys + 5);                          // without a row
  const auto brought = Bring(keys);
  ASSERT_TRUE(brought.ok()) << brought.status().ToString();
  EXPECT_GT(brought.value(), keys.size() / 2);
  EXPECT_EQ(faults_.TakeReads().size(), 1U);
  EXPECT_EQ(*Bring(keys), 0U);
  EXPECT_EQ(store_->Stats().rows, uint64_t{kTables} * kKeys);
  keys.resize(keys.size() / 2);
  ASSERT_NO_FATAL_FAILURE(CountedStep(keys));
  EXPECT_TRUE(faults_.TakeReads().empty());
  ASSERT_NO_FATAL_FAILURE(ExpectAllSteps());
  options_.ssd_budget_bytes = 0;
  options_.ddr_budget_bytes = 64ULL << 20;
  ASSERT_NO_FATAL_FAILURE(Open());
  EXPECT_EQ(*Bring(keys), 0U) << "there is no SSD";
}

// More rows than DDR has room for are brought all the same; those that left again are read again.
TEST_F(BeyondDdrTest, AStepOfMoreRowsThanDdrHolds) {
  ASSERT_NO_FATAL_FAILURE(Open());
  for (int step = 0; step < 3; ++step) {
    ASSERT_TRUE(Bring(keys_).ok());
    ASSERT_NO_FATAL_FAILURE(CountedStep(keys_));
  }
  ASSERT_NO_FATAL_FAILURE(ExpectAllSteps());
}

// While a step or a call that brings rows waits for the drive, others take the writer: they bring
// and change the very rows, which then leave for other places.
TEST_F(BeyondDdrTest, RowsThatMoveWhileTheyAreReadLoseNothing) {
  options_.ddr_budget_bytes = 6ULL << 20;
  ASSERT_NO_FATAL_FAILURE(Open());
  uint64_t beside = 0;
  uint64_t evicted = 0;
  for (int turn = 0; turn < 40; ++turn) {
    for (int i = 0; i < 3; ++i) store_->Maintain();  // room, which is not to be had below
    const std::vector<int64_t> keys = Some(400);
    faults_.BeforeRead([&] {
      ++beside;
      std::thread([&] {
        const uint64_t before = store_->Stats().evictions_to_ssd;
        for (int i = 0; i < 4; ++i) {
          ASSERT_NO_FATAL_FAILURE(CountedStep(keys));
          ASSERT_TRUE(Bring(Some(400)).ok());
          store_->Maintain();
        }
        evicted += store_->Stats().evictions_to_ssd - before;
      }).join();
    });
    if (turn % 2 == 0) {
      ASSERT_NO_FATAL_FAILURE(CountedStep(keys));
    } else {
      ASSERT_TRUE(Bring(keys).ok());
    }
    const Status whole = store_->CheckIntegrity();
    ASSERT_TRUE(whole.ok()) << turn << ": " << whole.ToString();
  }
  EXPECT_EQ(beside, 40U);
  EXPECT_GT(evicted, 1000U);
  ASSERT_NO_FATAL_FAILURE(ExpectAllSteps());
}

TEST_F(BeyondDdrTest, RowsOfABadBlockAreNamedAndTheOthersAreBrought) {
  ASSERT_NO_FATAL_FAILURE(Open());
  faults_.Put(3, Fault::kIoError);
  faults_.Put(20, Fault::kBitFlip, 777);
  const auto brought = Bring(Some(8));
  ASSERT_FALSE(brought.ok());
  EXPECT_NE(brought.status().message().find(" of table t"), std::string::npos);
  EXPECT_NE(brought.status().message().find("SSD block"), std::string::npos);
  const uint64_t failed = store_->Stats().failed_keys;
  EXPECT_GT(failed, 0U);
  EXPECT_LT(failed, 60U) << "two blocks";
  faults_.Clear();
  ASSERT_NO_FATAL_FAILURE(ExpectAllSteps());
}

// A version's changes, and counts of events, are read in batches, too.
TEST_F(BeyondDdrTest, RowsAreReadInBatchesForVersionsAndCounts) {
  options_.tables[2].layout = {2, kDim / 2, DType::kFp32};
  options_.tables[2].counter_chunks = 1;
  options_.ddr_budget_bytes = 6ULL << 20;
  ASSERT_NO_FATAL_FAILURE(Open());
  std::vector<std::byte> records;
  for (uint32_t t = 0; t < 2; ++t) {
    faults_.TakeReads();
    for (uint32_t b = 0; b < 4; ++b) ASSERT_TRUE(store_->TakeChanges(t, b, &records).ok());
    const auto batches = faults_.TakeReads();
    uint64_t blocks = 0;
    for (const auto& each : batches) blocks += each.size();
    EXPECT_GT(blocks, 200U);
    EXPECT_LT(batches.size(), blocks / 10) << "table " << t;
  }
  const std::vector<int64_t> some = Some(40);
  const std::vector<float> logs(some.size() * kDim / 2, 30.0F);
  faults_.TakeReads();
  EXPECT_EQ(*store_->AddCounts(2, some, logs.data(), kDim / 2), some.size());
  EXPECT_EQ(faults_.TakeReads().size(), 1U);
  const Status whole = store_->CheckIntegrity();
  ASSERT_TRUE(whole.ok()) << whole.ToString();
}

// Steps in one thread, and in another all that may be done beside them.
TEST_F(BeyondDdrTest, OtherCallsBesideTheStepsLoseNothing) {
  ASSERT_NO_FATAL_FAILURE(Open());
  std::atomic<bool> done{false};
  std::thread other([&] {
    std::mt19937 random(3);
    while (!done) {
      std::vector<int64_t> keys(500);
      for (int64_t& key : keys) key = static_cast<int64_t>(random() % kKeys);
      ASSERT_TRUE(Bring(keys).ok());
      store_->Maintain();
      std::vector<std::byte> records;
      ASSERT_TRUE(store_->TakeChanges(random() % kTables, random() % 4, &records).ok());
    }
  });
  for (int step = 0; step < 30; ++step) {
    ASSERT_NO_FATAL_FAILURE(CountedStep(Some(20)));
  }
  done = true;
  other.join();
  ASSERT_NO_FATAL_FAILURE(ExpectAllSteps());
}

}  // namespace
}  // namespace embertide
