// Rows that are held in DDR: how they are counted, what passes over them, and that no result knows.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ssd/faulty_file.h"
#include "store/held_rows.h"
#include "store/test_rows.h"

namespace embertide {
namespace {

// --- the notes

TEST(HeldRowsTest, HoldsAreCountedAsAMapCountsThem) {
  constexpr uint64_t kBytes = 100;
  ByteBudget budget(1 << 20);
  std::map<std::pair<uint32_t, uint64_t>, uint32_t> counts;
  {
    HeldRows held(&budget);
    EXPECT_FALSE(held.Has(0, 7));
    EXPECT_FALSE(held.Release(0, 7, kBytes));
    std::mt19937_64 random(3);
    for (int turn = 0; turn < 30'000; ++turn) {
      const auto table = static_cast<uint32_t>(random() % 3);
      const uint64_t key = random() % 700;  // so that chains of slots grow and close
      uint32_t& count = counts[{table, key}];
      if (random() % (turn < 15'000 ? 3 : 2) == 0) {
        ASSERT_EQ(held.Release(table, key, kBytes), count > 0);
        count -= count > 0 ? 1 : 0;
      } else {
        ASSERT_TRUE(held.Reserve(1));
        ASSERT_EQ(held.Hold(table, key, kBytes), count == 0);
        ++count;
      }
      if (turn % 100 != 0) continue;
      const Status whole = held.CheckIntegrity();
      ASSERT_TRUE(whole.ok()) << whole.ToString();
      uint64_t rows = 0;
      for (const auto& [of, times] : counts) {
        ASSERT_EQ(held.Has(of.first, of.second), times > 0);
        rows += times > 0 ? 1 : 0;
      }
      ASSERT_EQ(held.rows(), rows);
      ASSERT_EQ(held.row_bytes(), rows * kBytes);
      ASSERT_EQ(budget.used_bytes(), held.bytes());
    }
  }
  EXPECT_EQ(budget.used_bytes(), 0U);
}

TEST(HeldRowsTest, ABudgetWithoutRoomRefusesAndKeepsWhatIsHeld) {
  ByteBudget budget(20'000);
  HeldRows held(&budget);
  ASSERT_TRUE(held.Reserve(100));
  for (uint64_t key = 0; key < 100; ++key) ASSERT_TRUE(held.Hold(1, key, 8));
  EXPECT_FALSE(held.Reserve(2000));
  for (uint64_t key = 0; key < 100; ++key) ASSERT_TRUE(held.Has(1, key));
  EXPECT_TRUE(held.CheckIntegrity().ok());
}

// --- the store

constexpr uint32_t kDim = 32;
constexpr uint32_t kTables = 2;
constexpr int64_t kKeys = 30'000;  // of each table

class HoldsTest : public ::testing::Test {
 protected:
  HoldsTest()
      : directory_(std::filesystem::temp_directory_path() /
                   ("embertide-holds-" + std::to_string(::getpid()))) {
    options_.ddr_budget_bytes = 5ULL << 20;
    options_.ssd_budget_bytes = 64ULL << 20;
    options_.ssd_directory = directory_;
    options_.hold_bytes = 2ULL << 20;
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
  }
  ~HoldsTest() override {
    store_.reset();
    std::filesystem::remove_all(directory_);
  }
  void Open() {
    auto opened = TrainingStore::Open(options_);
    ASSERT_TRUE(opened.ok()) << opened.status().ToString();
    store_ = std::move(*opened);
    std::vector<int64_t> keys(kKeys);
    std::iota(keys.begin(), keys.end(), 0);
    for (uint32_t t = 0; t < kTables; ++t) ASSERT_TRUE(store_->EnsureRows(t, keys).ok());
    faults_.TakeReads();
  }
  std::vector<int64_t> Some(size_t count) {
    std::vector<int64_t> some(count);
    for (int64_t& key : some) key = static_cast<int64_t>(random_() % kKeys);
    return some;
  }
  static std::vector<TableKeys> Of(const std::vector<int64_t>& keys) {
    std::vector<TableKeys> of;
    for (uint32_t t = 0; t < kTables; ++t) of.push_back({t, keys});
    return of;
  }
  Result<uint64_t> Step(const std::vector<int64_t>& keys) {
    const std::vector<float> gradients(keys.size() * kDim, 1.0F);
    std::vector<BagGradients> bags;
    for (uint32_t t = 0; t < kTables; ++t) bags.push_back({t, keys, {}, gradients.data(), kDim});
    return store_->ApplyGradients(bags, {});
  }
  void Whole() {
    const Status whole = store_->CheckIntegrity();
    ASSERT_TRUE(whole.ok()) << whole.ToString();
  }
  bool InDdr(uint32_t table, int64_t key) {
    const auto view = store_->PinNewest();
    return view.value().Explain(table, static_cast<uint64_t>(key)).tier == Source::kDdr;
  }

  const std::filesystem::path directory_;
  StoreOptions options_;
  Faults faults_;
  std::unique_ptr<TrainingStore> store_;
  std::mt19937 random_{5};
};

TEST_F(HoldsTest, HeldRowsStayUntilTheirLastUseIsOver) {
  for (const uint32_t devices : {1U, 3U}) {
    options_.devices = devices;
    ASSERT_NO_FATAL_FAILURE(Open());
    const std::vector<int64_t> first = Some(1000);
    std::vector<int64_t> second = Some(1000);
    std::copy_n(first.begin(), 500, second.begin());  // rows of both batches
    ASSERT_TRUE(store_->HoldRows(Of(first)).ok());
    ASSERT_TRUE(store_->HoldRows(Of(second)).ok());
    ASSERT_TRUE(store_->BringRows(Of(first)).ok());
    ASSERT_TRUE(store_->BringRows(Of(second)).ok());
    for (int turn = 0; turn < 10; ++turn) {  // all others pass through what is left of DDR
      ASSERT_TRUE(Step(Some(8000)).ok());
      store_->Maintain();
    }
    ASSERT_NO_FATAL_FAILURE(Whole());
    const auto expect = [&](const std::vector<int64_t>& keys) {
      for (uint32_t t = 0; t < kTables; ++t) {
        for (const int64_t key : keys) ASSERT_TRUE(InDdr(t, key)) << "key " << key;
      }
    };
    ASSERT_NO_FATAL_FAILURE(expect(first));
    ASSERT_NO_FATAL_FAILURE(expect(second));
    const uint64_t reads = store_->Stats().step_reads;
    EXPECT_GT(reads, 0U) << "of the rows that nobody brought";
    ASSERT_TRUE(Step(first).ok());
    EXPECT_EQ(store_->Stats().step_reads, reads);
    ASSERT_TRUE(store_->ReleaseRows(Of(first)).ok());
    for (int turn = 0; turn < 10; ++turn) ASSERT_TRUE(Step(Some(8000)).ok());
    ASSERT_NO_FATAL_FAILURE(expect(second));
    ASSERT_TRUE(store_->ReleaseRows(Of(second)).ok());
    EXPECT_EQ(store_->Held().rows, 0U);
    EXPECT_EQ(store_->Held().bytes, 0U);
    for (int turn = 0; turn < 10; ++turn) ASSERT_TRUE(Step(Some(8000)).ok());
    EXPECT_GT(std::ranges::count_if(second, [&](int64_t key) { return !InDdr(0, key); }), 100)
        << "what was let go of leaves as all others";
    ASSERT_NO_FATAL_FAILURE(Whole());
  }
}

// Rows that steps drive out of DDR while a drive works make room at once: steps wait for no read.
TEST_F(HoldsTest, StepsFindRoomWhileRowsAreBrought) {
  options_.reader_wait_ms = 20;
  ASSERT_NO_FATAL_FAILURE(Open());
  const std::vector<int64_t> keys = Some(2000);
  ASSERT_TRUE(store_->HoldRows(Of(keys)).ok());
  Status stepped;
  faults_.BeforeRead([&] {
    std::thread([&] {
      for (int turn = 0; stepped.ok() && turn < 10; ++turn) {
        if (const auto step = Step(Some(8000)); !step.ok()) stepped = step.status();
      }
    }).join();
  });
  const auto brought = store_->BringRows(Of(keys));
  ASSERT_TRUE(brought.ok()) << brought.status().ToString();
  EXPECT_TRUE(stepped.ok()) << stepped.ToString();
  for (const int64_t key : keys) ASSERT_TRUE(InDdr(0, key) && InDdr(1, key));
  EXPECT_EQ(store_->Stats().reader_waits_given_up, 0U);
  ASSERT_NO_FATAL_FAILURE(Whole());
}

TEST_F(HoldsTest, HoldsAreCountedPerKeyAndReleasedInAnyOrder) {
  ASSERT_NO_FATAL_FAILURE(Open());
  const std::vector<int64_t> keys = {1, 2, 2, 3, kKeys + 9};  // the last has no row yet
  const std::vector<TableKeys> of = {{0, keys}};
  const auto first_holds = [&](const std::vector<TableKeys>& of) { return *store_->HoldRows(of); };
  using Lists = std::vector<std::vector<int64_t>>;
  EXPECT_EQ(first_holds(of), (Lists{{1, 2, 3, kKeys + 9}})) << "each once";
  EXPECT_EQ(first_holds(of), Lists{{}});
  const auto held = store_->Held();
  EXPECT_EQ(held.rows, 4U);
  // 128 of payload, an Adagrad row's 16 beside it, and what a page has left over.
  EXPECT_GE(held.bytes, 4U * 128);
  EXPECT_LT(held.bytes, 4U * 200);
  EXPECT_EQ(held.bytes, 4 * store_->HoldBytes(0));
  EXPECT_TRUE(store_->ReleaseRows(of).ok());
  EXPECT_EQ(store_->Held().rows, 4U) << "the other batch holds them";
  EXPECT_TRUE(store_->ReleaseRows(of).ok());
  EXPECT_EQ(store_->Held().rows, 0U);
  const Status wrong = store_->ReleaseRows(of);
  EXPECT_EQ(wrong.code(), Code::kInvalidArgument);
  EXPECT_NE(wrong.message().find("key 1 of table t0 is not held"), std::string::npos);
  EXPECT_EQ(store_->HoldRows(std::vector<TableKeys>{{7, keys}}).status().code(),
            Code::kInvalidArgument);
}

TEST_F(HoldsTest, ARowThatIsMadeLaterIsHeldFromItsFirstMoment) {
  ASSERT_NO_FATAL_FAILURE(Open());
  std::vector<int64_t> fresh(500);
  std::iota(fresh.begin(), fresh.end(), kKeys);
  ASSERT_TRUE(store_->HoldRows(Of(fresh)).ok());
  ASSERT_TRUE(Step(fresh).ok());
  for (int turn = 0; turn < 10; ++turn) ASSERT_TRUE(Step(Some(8000)).ok());
  for (const int64_t key : fresh) ASSERT_TRUE(InDdr(1, key));
}

TEST_F(HoldsTest, WhatDoesNotFitIsRefusedWholeAndSaysWhatWould) {
  ASSERT_NO_FATAL_FAILURE(Open());
  const std::vector<int64_t> few = Some(100);
  ASSERT_TRUE(store_->HoldRows(Of(few)).ok());
  const auto before = store_->Held();
  std::vector<int64_t> all(kKeys);
  std::iota(all.begin(), all.end(), 0);
  const auto refused = store_->HoldRows(Of(all));
  EXPECT_EQ(refused.status().code(), Code::kResourceExhausted);
  EXPECT_NE(refused.status().message().find("hold_bytes = 2097152"), std::string::npos)
      << refused.status().message();
  EXPECT_EQ(store_->Held().rows, before.rows);
  EXPECT_EQ(store_->Held().bytes, before.bytes);
  // Index and directories leave less than hold_bytes: 60,000 entries of some 25 bytes.
  EXPECT_LT(before.most_bytes, options_.hold_bytes);
  ASSERT_NO_FATAL_FAILURE(Whole());
  // Up to its bound all can be held and read, whatever else goes on.
  // A tenth of it is what the notes of holds take, which leave rows less.
  const uint64_t rows = before.most_bytes / 160 / kTables * 9 / 10;
  std::vector<int64_t> most(all.begin(), all.begin() + static_cast<ptrdiff_t>(rows));
  ASSERT_TRUE(store_->HoldRows(Of(most)).ok());
  ASSERT_TRUE(store_->BringRows(Of(most)).ok());
  for (int turn = 0; turn < 5; ++turn) ASSERT_TRUE(Step(Some(8000)).ok());
  const uint64_t reads = store_->Stats().step_reads;
  ASSERT_TRUE(Step(most).ok());
  EXPECT_EQ(store_->Stats().step_reads, reads);
  ASSERT_NO_FATAL_FAILURE(Whole());
}

TEST_F(HoldsTest, OptionsThatCannotBeRightAreRefused) {
  const auto refusal = [&] {
    const auto store = TrainingStore::Open(options_);
    return store.ok() ? std::string() : store.status().message();
  };
  options_.hold_bytes = (5ULL << 19) + 1;
  EXPECT_NE(refusal().find("more than half of ddr_budget_bytes"), std::string::npos);
  options_.hold_bytes = 1;
  options_.ssd_budget_bytes = 0;
  EXPECT_NE(refusal().find("without an SSD no row leaves DDR"), std::string::npos);
  options_.hold_bytes = 0;
  options_.ssd_budget_bytes = 64ULL << 20;
  ASSERT_NO_FATAL_FAILURE(Open());
  EXPECT_NE(store_->HoldRows(Of({1})).status().message().find("hold_bytes is 0"),
            std::string::npos);
}

TEST_F(HoldsTest, EveryPolicyPassesOverHeldRows) {
  options_.tables.resize(1);
  for (const char* policy : {"clock", "lru", "lfu", "s3-fifo", "w-tinylfu", "reuse-density"}) {
    options_.ddr_policy = policy;
    auto opened = TrainingStore::Open(options_);
    ASSERT_TRUE(opened.ok()) << opened.status().ToString();
    store_ = std::move(*opened);
    std::vector<int64_t> keys(kKeys);
    std::iota(keys.begin(), keys.end(), 0);
    ASSERT_TRUE(store_->EnsureRows(0, keys).ok());
    const std::vector<int64_t> held = Some(2000);
    const std::vector<TableKeys> of = {{0, held}};
    ASSERT_TRUE(store_->HoldRows(of).ok());
    ASSERT_TRUE(store_->BringRows(of).ok());
    for (int turn = 0; turn < 10; ++turn) {
      const std::vector<int64_t> others = Some(8000);
      ASSERT_TRUE(store_->BringRows(std::vector<TableKeys>{{0, others}}).ok());
      store_->Maintain();
    }
    for (const int64_t key : held) ASSERT_TRUE(InDdr(0, key)) << policy;
    ASSERT_NO_FATAL_FAILURE(Whole());
  }
}

// A trainer that read a row ahead found it in DDR, held it, and missed it all the same: upkeep had
// chosen it to leave before, and was writing it to the SSD without the writer lock.
TEST_F(HoldsTest, ARowThatIsHeldWhileItIsWrittenToTheSsdStays) {
  for (const bool by_policy : {false, true}) {
    if (by_policy) options_.tables.resize(1);
    options_.ddr_policy = by_policy ? "lru" : "clock";
    auto opened = TrainingStore::Open(options_);
    ASSERT_TRUE(opened.ok()) << opened.status().ToString();
    store_ = std::move(*opened);
    std::vector<int64_t> keys(kKeys);
    std::iota(keys.begin(), keys.end(), 0);
    ASSERT_TRUE(store_->EnsureRows(0, keys).ok());  // DDR is full: upkeep is to make room ahead
    std::vector<int64_t> held;
    bool written = false;
    faults_.BeforeWrite([&] {
      written = true;
      for (const int64_t key : keys) {
        if (!InDdr(0, key) || key % 2 == 0) continue;
        if (!store_->HoldRows(std::vector<TableKeys>{{0, {&key, 1}}}).ok()) break;
        held.push_back(key);
      }
      const auto brought = store_->BringRows(std::vector<TableKeys>{{0, held}});
      ASSERT_TRUE(brought.ok()) << brought.status().ToString();
      for (const int64_t key : held) ASSERT_TRUE(InDdr(0, key)) << "as nobody told it to leave";
    });
    const uint64_t before = store_->Stats().evictions_to_ssd;
    for (int turn = 0; turn < 100 && !written; ++turn) store_->Maintain();
    ASSERT_TRUE(written);
    EXPECT_GT(store_->Stats().evictions_to_ssd, before) << "rows that nobody holds left";
    ASSERT_GT(held.size(), 1000U);
    for (const int64_t key : held) ASSERT_TRUE(InDdr(0, key)) << "key " << key;
    ASSERT_NO_FATAL_FAILURE(Whole());
  }
}

// A version's records, a checkpoint's and the rows themselves are as they would be without holds.
TEST_F(HoldsTest, VersionsAndCheckpointsDoNotKnowOfHolds) {
  std::vector<std::byte> records[2];
  std::vector<std::byte> exported[2];
  for (const bool holds : {false, true}) {
    random_.seed(7);
    ASSERT_NO_FATAL_FAILURE(Open());
    const std::vector<int64_t> keys = Some(2000);
    if (holds) {
      ASSERT_TRUE(store_->HoldRows(Of(keys)).ok());
      ASSERT_TRUE(store_->BringRows(Of(keys)).ok());
    }
    for (int turn = 0; turn < 3; ++turn) ASSERT_TRUE(Step(Some(4000)).ok());
    ASSERT_TRUE(Step(keys).ok());
    ASSERT_TRUE(store_->SetLive(0, static_cast<uint64_t>(keys[0]), 0).ok());
    EXPECT_EQ(store_->Stats().held_rows_removed, holds ? 1U : 0U);
    EXPECT_EQ(store_->Held().rows > 0, holds) << "the key stays held";
    for (uint32_t t = 0; t < kTables; ++t) {
      for (uint32_t b = 0; b < 4; ++b) {
        ASSERT_TRUE(store_->TakeChanges(t, b, &records[holds]).ok());
        const auto view = store_->PinNewest();
        std::vector<RowState> states;
        ASSERT_TRUE(
            store_->ExportBucketWithStates(view.value(), t, b, &exported[holds], &states).ok());
      }
    }
    if (holds) {
      // A row that comes back is held, and each hold is let go of as if it had never gone.
      ASSERT_TRUE(Step({keys[0]}).ok());
      for (int turn = 0; turn < 8; ++turn) ASSERT_TRUE(Step(Some(8000)).ok());
      EXPECT_TRUE(InDdr(0, keys[0]));
      ASSERT_TRUE(store_->ReleaseRows(Of(keys)).ok());
    }
    ASSERT_NO_FATAL_FAILURE(Whole());
  }
  EXPECT_EQ(records[0], records[1]);
  EXPECT_EQ(exported[0], exported[1]);
}

// Batches that are held, brought, learned and let go of while others take the writer.
TEST_F(HoldsTest, AWindowBesideStepsMissesNothing) {
  ASSERT_NO_FATAL_FAILURE(Open());
  constexpr int kWindow = 4;
  constexpr int kSteps = 60;
  std::vector<std::vector<int64_t>> batches;
  for (int b = 0; b < kSteps; ++b) batches.push_back(Some(500));
  for (int b = 1; b < kSteps; ++b) std::copy_n(batches[b - 1].begin(), 100, batches[b].begin());
  std::atomic<int> ready{0};
  std::atomic<int> learned{0};
  std::thread planner([&] {
    for (int b = 0; b < kSteps; ++b) {
      while (b - learned >= kWindow) std::this_thread::yield();
      ASSERT_TRUE(store_->HoldRows(Of(batches[b])).ok());
      ASSERT_TRUE(store_->BringRows(Of(batches[b])).ok());
      store_->Maintain();
      ++ready;
    }
  });
  for (int b = 0; b < kSteps; ++b) {
    while (ready <= b) std::this_thread::yield();
    ASSERT_TRUE(Step(batches[b]).ok());
    ASSERT_TRUE(store_->ReleaseRows(Of(batches[b])).ok());
    ++learned;
  }
  planner.join();
  EXPECT_EQ(store_->Stats().step_reads, 0U);
  EXPECT_GT(store_->Stats().evictions_to_ssd, 1000U);
  EXPECT_EQ(store_->Held().rows, 0U);
  ASSERT_NO_FATAL_FAILURE(Whole());
}

// Held rows that lie in every page, when nothing else is left there and rows of another size come:
// they move together, and leave pages.
TEST_F(HoldsTest, HeldRowsInEveryPageMakeRoomForRowsOfAnotherSize) {
  options_.tables[1].layout = {1, kDim / 2, DType::kFp32};
  for (const uint64_t ddr : {1ULL << 20, 2ULL << 20, 5ULL << 20}) {
    options_.ddr_budget_bytes = ddr;
    options_.hold_bytes = ddr / 2;
    auto opened = TrainingStore::Open(options_);
    ASSERT_TRUE(opened.ok()) << opened.status().ToString();
    store_ = std::move(*opened);
    std::vector<int64_t> keys(ddr / 220);  // a little more than DDR holds of the first table
    std::iota(keys.begin(), keys.end(), 0);
    ASSERT_TRUE(store_->EnsureRows(0, keys).ok());
    std::vector<int64_t> held;
    while (true) {
      const std::vector<int64_t> key = {static_cast<int64_t>(random_() % keys.size())};
      if (!InDdr(0, key[0])) continue;
      if (!store_->HoldRows(std::vector<TableKeys>{{0, key}}).ok()) break;
      held.push_back(key[0]);
    }
    ASSERT_GT(held.size(), ddr / 700);
    for (size_t first = 0; first < keys.size(); first += 100) {
      const std::span<const int64_t> some = std::span(keys).subspan(first);
      const auto made = store_->EnsureRows(1, some.first(std::min<size_t>(100, some.size())));
      ASSERT_TRUE(made.ok()) << first << ": " << made.status().ToString();
    }
    ASSERT_NO_FATAL_FAILURE(Whole());
    for (const int64_t key : held) ASSERT_TRUE(InDdr(0, key));
    const Status released = store_->ReleaseRows(std::vector<TableKeys>{{0, held}});
    ASSERT_TRUE(released.ok()) << released.ToString();
  }
}

// Rows of many sizes in few pages, as many of them held as may be: these must not keep every page
// from being emptied for rows of another size.
TEST_F(HoldsTest, PruningWithHeldRowsInASmallDdrFindsPages) {
  options_.tables.clear();
  for (uint32_t t = 0; t < kTables; ++t) {
    TableConfig table;
    table.name = "t" + std::to_string(t);
    table.id = t;
    table.layout = {4, kDim / 2, DType::kFp32};
    options_.tables.push_back(table);
  }
  options_.prune_groups = {{{0, 1}, 64 << 10, {}}};
  options_.utility_decay = 0.999;
  options_.ddr_budget_bytes = 3ULL << 20;
  options_.hold_bytes = 3ULL << 19;
  auto opened = TrainingStore::Open(options_);
  ASSERT_TRUE(opened.ok()) << opened.status().ToString();
  store_ = std::move(*opened);
  std::mt19937_64 random(11);
  std::deque<std::vector<int64_t>> window;
  const auto release = [&] {
    const Status released = store_->ReleaseRows(Of(window.front()));
    ASSERT_TRUE(released.ok()) << released.ToString();
    window.pop_front();
  };
  uint64_t most = 0;
  uint64_t refused = 0;
  for (int turn = 0; turn < 120; ++turn) {
    std::vector<int64_t> keys(400);
    for (int64_t& key : keys) key = static_cast<int64_t>(random() % (random() % 9000 + 1));
    auto held = store_->HoldRows(Of(keys));
    for (; !held.ok(); held = store_->HoldRows(Of(keys))) {
      ASSERT_EQ(held.status().code(), Code::kResourceExhausted);
      ASSERT_FALSE(window.empty()) << held.status().ToString();
      ++refused;
      ASSERT_NO_FATAL_FAILURE(release());
    }
    window.push_back(keys);
    most = std::max(most, store_->Held().bytes);
    const Result<uint64_t> brought = store_->BringRows(Of(keys));
    ASSERT_TRUE(brought.ok()) << turn << ": " << brought.status().ToString();
    std::vector<float> gradients(keys.size() * 2 * kDim);
    for (float& each : gradients) each = static_cast<float>(random() % 100) * 0.01F;
    std::vector<BagGradients> bags;
    for (uint32_t t = 0; t < kTables; ++t) {
      bags.push_back({t, keys, {}, gradients.data(), 2 * kDim});
    }
    const auto updated = store_->ApplyGradients(bags, {});
    ASSERT_TRUE(updated.ok()) << turn << ": " << updated.status().ToString();
    if (turn % 10 == 9) {
      const auto pruned = store_->Prune(0, 900'000 + turn % 3 * 600'000);
      ASSERT_TRUE(pruned.ok());
      EXPECT_EQ(pruned.value().rows_unchanged, 0U) << turn;
    }
    ASSERT_NO_FATAL_FAILURE(Whole());
  }
  EXPECT_GT(most, 500'000U);
  EXPECT_GT(refused, 20U);
  EXPECT_EQ(store_->Stats().failed_keys, 0U);
  EXPECT_GT(store_->Stats().held_rows_removed, 100U);
  while (!window.empty()) ASSERT_NO_FATAL_FAILURE(release());
  EXPECT_EQ(store_->Held().rows, 0U);
}

}  // namespace
}  // namespace embertide
