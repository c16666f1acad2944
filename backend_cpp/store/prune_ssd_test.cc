// Pruning with rows on an SSD: what it keeps of them in DDR, and that a run ends with the bytes of
// one whose rows all lie in DDR.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "ssd/faulty_file.h"
#include "store/ssd_notes.h"
#include "store/test_rows.h"

namespace embertide {
namespace {

// --- notes

constexpr uint64_t SlotOf(uint64_t segment, uint64_t block, uint64_t place) {
  return (segment * kSegmentBlocks + block) << kSsdOffsetBits | place;
}

class SsdNotesTest : public ::testing::Test {
 protected:
  // Each note says its slot.
  void Add(const std::vector<uint64_t>& slots) {
    ASSERT_EQ(notes_.Take(slots.size(), false), slots.size());
    notes_.Add(slots, [&](size_t i, uint32_t* words) {
      words[0] = static_cast<uint32_t>(slots[i]);
      words[1] = ~words[0];
    });
  }
  void Expect(const std::vector<uint64_t>& slots) const {
    for (const uint64_t slot : slots) {
      const uint32_t* words = notes_.Find(slot);
      ASSERT_NE(words, nullptr) << slot;
      ASSERT_EQ(words[0], static_cast<uint32_t>(slot));
      ASSERT_EQ(words[1], ~words[0]);
    }
  }
  ByteBudget budget_{4000};
  SsdNotes notes_{&budget_, 3, 2, 10};
};

TEST_F(SsdNotesTest, ANoteIsFoundByTheSlotOfItsRow) {
  // Blocks 1 and 4 have none; a batch goes on in the next segment.
  const std::vector<uint64_t> first = {SlotOf(0, 0, 1), SlotOf(0, 0, 9), SlotOf(0, 2, 1),
                                       SlotOf(0, 3, 5)};
  const std::vector<uint64_t> second = {SlotOf(0, 5, 1), SlotOf(0, 255, 1), SlotOf(1, 0, 1),
                                        SlotOf(1, 0, 17)};
  Add(first);
  Add(second);
  Expect(first);
  Expect(second);
  for (const uint64_t slot : {SlotOf(0, 0, 5), SlotOf(0, 0, 17), SlotOf(0, 2, 5), SlotOf(0, 3, 1),
                              SlotOf(0, 255, 5), SlotOf(1, 1, 1), SlotOf(2, 0, 1)}) {
    EXPECT_EQ(notes_.Find(slot), nullptr) << slot;
  }
  EXPECT_EQ(notes_.bytes(), 8 * notes_.NoteBytes());
  notes_.Drop(0);
  Expect({SlotOf(1, 0, 1), SlotOf(1, 0, 17)});
  EXPECT_EQ(notes_.Find(SlotOf(0, 0, 1)), nullptr);
  // A segment is used again from its first block on.
  Add({SlotOf(0, 0, 3)});
  Expect({SlotOf(0, 0, 3)});
}

TEST_F(SsdNotesTest, SomeAreChargedAheadForWhenThereIsNoRoom) {
  const uint64_t note = notes_.NoteBytes();
  ASSERT_TRUE(notes_.ChargeAhead());
  EXPECT_EQ(notes_.bytes(), 20 * note);
  ASSERT_TRUE(budget_.TryCharge(4000 - 20 * note - 2 * note));
  EXPECT_EQ(notes_.Take(2, false), 2U) << "of what is free";
  EXPECT_EQ(notes_.Take(6, false), 6U) << "of what is charged";
  EXPECT_EQ(notes_.Take(6, false), 4U) << "the rest is for a page";
  EXPECT_EQ(notes_.Take(6, false), 0U);
  EXPECT_EQ(notes_.Take(6, true), 6U);
  EXPECT_EQ(notes_.Take(6, true), 4U);
  EXPECT_EQ(notes_.Take(6, true), 0U);
  EXPECT_FALSE(notes_.ChargeAhead());
  EXPECT_EQ(budget_.used_bytes(), 4000U);
  budget_.Release(1000);
  ASSERT_TRUE(notes_.ChargeAhead());
  EXPECT_EQ(notes_.bytes(), 42 * note);
  notes_.GiveBack(22);
  EXPECT_EQ(notes_.bytes(), 20 * note);
  EXPECT_EQ(budget_.used_bytes(), 3000 - 2 * note);
}

// --- the store

constexpr uint32_t kDim = 16;
constexpr uint32_t kCounters = 4;

class PruneSsdTest : public ::testing::Test {
 protected:
  PruneSsdTest()
      : directory_(std::filesystem::temp_directory_path() /
                   ("embertide-prune-ssd-" + std::to_string(::getpid()))) {
    options_.utility_decay = 0.999;
    options_.ssd_directory = directory_;
    for (uint32_t t = 0; t < 3; ++t) {
      TableConfig table;
      table.name = "t" + std::to_string(t);
      table.id = t;
      // Rows of one chunk; of four; of two and counters.
      table.layout = t == 0   ? RowLayout{1, kDim, DType::kFp32}
                     : t == 1 ? RowLayout{4, kDim / 4, DType::kFp32}
                              : RowLayout{3, kDim / 2, DType::kFp32};
      table.counter_chunks = t == 2 ? 1 : 0;
      table.bucket_bits = t;
      options_.tables.push_back(table);
    }
    options_.prune_groups = {{{0, 1, 2}, 64 << 10, {{2, 1, 0.5F}}}};
  }
  ~PruneSsdTest() override { std::filesystem::remove_all(directory_); }
  std::unique_ptr<TrainingStore> Open(uint64_t ddr_bytes, uint64_t ssd_bytes) {
    StoreOptions options = options_;
    options.ddr_budget_bytes = ddr_bytes;
    options.ssd_budget_bytes = ssd_bytes;
    options.wrap_ssd = [this](std::unique_ptr<BlockFile> /*file*/) {
      return std::make_unique<FaultyBlockFile>(NewMemoryBlockFile(), &faults_);
    };
    auto store = TrainingStore::Open(options);
    EXPECT_TRUE(store.ok()) << (store.ok() ? "" : store.status().ToString());
    return std::move(*store);
  }
  // Keys of which some come often, and gradients of which some count for more.
  static void Learn(TrainingStore* store, int turn, uint32_t threads) {
    std::mt19937_64 random(turn);
    std::vector<std::vector<int64_t>> keys(3, std::vector<int64_t>(4000));
    std::vector<std::vector<float>> gradients(3, std::vector<float>(4000 * kDim));
    std::vector<BagGradients> bags;
    for (uint32_t t = 0; t < 3; ++t) {
      for (int64_t& key : keys[t]) {
        key = static_cast<int64_t>(random() % (random() % 30'000 + 1));
      }
      for (float& each : gradients[t]) each = static_cast<float>(random() % 100) * 0.01F;
      bags.push_back({t, keys[t], {}, gradients[t].data(), kDim});
    }
    const auto done = store->ApplyGradients(bags, {0.1F, 1e-8F, 0.0F}, threads);
    ASSERT_TRUE(done.ok()) << done.status().ToString() << ", rows of "
                           << store->Stats().ddr_payload_bytes << " bytes, index "
                           << store->Stats().index_bytes;
    std::vector<int64_t> counted(300);
    std::vector<float> logs(counted.size() * kCounters * 2, 0.0F);
    for (int64_t& key : counted) key = static_cast<int64_t>(random() % 8000);
    for (float& log : logs) log = 20.0F + static_cast<float>(random() % 100) * 0.1F;
    ASSERT_TRUE(store->AddCounts(2, counted, logs.data(), kDim / 2).ok());
    for (uint32_t t = 0; t < 3; ++t) {
      ASSERT_TRUE(store->RecordSensitivity(t, static_cast<double>(random() % 100), 100.0).ok());
    }
    store->Maintain();
  }
  static void ExpectEqual(const PruneOutcome& got, const PruneOutcome& want) {
    EXPECT_EQ(got.price, want.price);
    EXPECT_EQ(got.rows, want.rows);
    EXPECT_EQ(got.bytes, want.bytes);
    EXPECT_EQ(got.rows_pruned, want.rows_pruned);
    EXPECT_EQ(got.rows_expired, want.rows_expired);
    EXPECT_EQ(got.chunks_pruned, want.chunks_pruned);
    EXPECT_EQ(got.chunks_regrown, want.chunks_regrown);
    EXPECT_EQ(got.rows_unchanged, want.rows_unchanged);
  }
  void ExpectEqualRows(const TrainingStore& got, const TrainingStore& want) const {
    EXPECT_EQ(*got.PruneState(0), *want.PruneState(0));
    for (uint32_t t = 0; t < options_.tables.size(); ++t) {
      for (uint32_t b = 0; b < options_.tables[t].buckets(); ++b) {
        std::array<std::vector<std::byte>, 2> rows;
        std::array<std::vector<RowState>, 2> states;
        ASSERT_TRUE(got.ExportBucketWithStates(*got.PinNewest(), t, b, &rows[0], &states[0]).ok());
        ASSERT_TRUE(
            want.ExportBucketWithStates(*want.PinNewest(), t, b, &rows[1], &states[1]).ok());
        ASSERT_TRUE(rows[0] == rows[1] && states[0] == states[1]) << "table " << t << ", " << b;
      }
    }
  }

  const std::filesystem::path directory_;
  StoreOptions options_;
  Faults faults_;
};

// With a quarter of the rows in DDR, and with so little of both that rows and notes hardly fit.
TEST_F(PruneSsdTest, ARunBeyondDdrEndsWithTheBytesOfOneInDdr) {
  struct Case {
    uint32_t devices;
    uint32_t threads;
    uint64_t ddr_bytes;
    uint64_t ssd_bytes;
  };
  for (const auto& [devices, threads, ddr_bytes, ssd_bytes] :
       {Case{1, 1, 6U << 20, 64U << 20}, Case{2, 3, 7U << 20, 64U << 20},
        Case{1, 1, 5U << 20, 12U << 20}}) {
    options_.devices = devices;
    const auto whole = Open(128ULL << 20, 0);
    const auto store = Open(ddr_bytes, ssd_bytes);
    uint64_t pruned = 0;
    uint64_t reshaped = 0;
    for (int turn = 0; turn < 45; ++turn) {
      ASSERT_NO_FATAL_FAILURE(Learn(whole.get(), turn, 1));
      ASSERT_NO_FATAL_FAILURE(Learn(store.get(), turn, threads));
      if (turn % 9 != 8) continue;
      const uint32_t max_age = turn == 35 ? 20 : 0;
      const uint64_t bytes = (turn % 2 == 0 ? 60 : 30) * 100'000;
      const auto want = whole->Prune(0, bytes, max_age);
      const auto got = store->Prune(0, bytes, max_age);
      ASSERT_TRUE(got.ok()) << got.status().ToString();
      ASSERT_NO_FATAL_FAILURE(ExpectEqual(got.value(), want.value())) << turn;
      EXPECT_EQ(got.value().rows_unchanged, 0U);
      pruned += got.value().rows_pruned;
      reshaped += got.value().chunks_pruned + got.value().chunks_regrown;
      const Status sound = store->CheckIntegrity();
      ASSERT_TRUE(sound.ok()) << turn << ": " << sound.ToString();
    }
    EXPECT_GT(pruned, 10'000U);
    EXPECT_GT(reshaped, 1'000U);
    EXPECT_GT(store->Stats().evictions_to_ssd, 20'000U);
    ASSERT_NO_FATAL_FAILURE(ExpectEqualRows(*store, *whole));
  }
}

TEST_F(PruneSsdTest, APassOverWholeRowsReadsNothing) {
  options_.tables.resize(1);
  options_.prune_groups = {{{0}, 64 << 10}};
  const auto store = Open(4U << 20, 64U << 20);
  std::vector<int64_t> keys(40'000);
  std::iota(keys.begin(), keys.end(), 0);
  std::vector<float> gradients(keys.size() * kDim);
  for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = 1e-3F * static_cast<float>(i % 997);
  ASSERT_TRUE(ApplyRows(store.get(), 0, keys, gradients, {}).ok());
  EXPECT_GT(store->UsageOf(0, 0).ssd_rows, 10'000U);
  faults_.TakeReads();
  const auto outcome = store->Prune(0, 1'000'000);
  ASSERT_TRUE(outcome.ok());
  EXPECT_GT(outcome.value().rows_pruned, 20'000U);
  EXPECT_TRUE(faults_.TakeReads().empty());
  EXPECT_TRUE(store->CheckIntegrity().ok());
  // The remains of the rows on the SSD go with their segments.
  for (int i = 0; i < 50; ++i) store->Maintain();
  EXPECT_LT(store->Stats().ssd_bytes, 3U << 20);
}

TEST_F(PruneSsdTest, RowsThatLoseChunksAreReadInBatches) {
  options_.tables = {options_.tables[1]};
  options_.prune_groups = {{{0}, 64 << 10}};
  const auto store = Open(5000U << 10, 64U << 20);
  std::vector<int64_t> keys(60'000);
  std::iota(keys.begin(), keys.end(), 0);
  std::vector<float> gradients(keys.size() * kDim);
  for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = i % kDim < kDim / 2 ? 2.0F : 0.01F;
  ASSERT_TRUE(ApplyRows(store.get(), 0, keys, gradients, {}).ok());
  for (int i = 0; i < 5; ++i) store->Maintain();
  faults_.TakeReads();
  const auto outcome = store->Prune(0, 100 * keys.size());
  ASSERT_TRUE(outcome.ok());
  EXPECT_GT(outcome.value().chunks_pruned, 20'000U);
  const auto batches = faults_.TakeReads();
  uint64_t blocks = 0;
  for (const auto& each : batches) blocks += each.size();
  EXPECT_GT(blocks, 200U);
  EXPECT_LT(batches.size(), blocks / 10);
}

// A row that is to lose a chunk and cannot be read stays as it is, and is counted.
TEST_F(PruneSsdTest, ARowThatCannotBeReadIsLeftUnchanged) {
  options_.tables = {options_.tables[1]};
  options_.prune_groups = {{{0}, 64 << 10}};
  const auto store = Open(3U << 20, 64U << 20);
  std::vector<int64_t> keys(30'000);
  std::iota(keys.begin(), keys.end(), 0);
  std::vector<float> gradients(keys.size() * kDim);
  for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = i % kDim < kDim / 2 ? 2.0F : 0.01F;
  ASSERT_TRUE(ApplyRows(store.get(), 0, keys, gradients, {}).ok());
  for (const uint64_t block : {3, 40, 77}) faults_.Put(block, Fault::kIoError);
  const auto outcome = store->Prune(0, 100 * keys.size());
  ASSERT_TRUE(outcome.ok());
  EXPECT_GT(outcome.value().rows_unchanged, 0U);
  EXPECT_LT(outcome.value().rows_unchanged, 200U) << "of three blocks";
  EXPECT_GT(outcome.value().chunks_pruned, 10'000U);
  faults_.Clear();
  EXPECT_TRUE(store->CheckIntegrity().ok());
}

TEST_F(PruneSsdTest, ADdrBudgetWithoutRoomForNotesIsRefused) {
  StoreOptions options = options_;
  options.ddr_budget_bytes = 1U << 20;
  options.ssd_budget_bytes = 4ULL << 30;
  options.prune_groups[0].waiting_bytes = 1 << 10;
  options.wrap_ssd = [](std::unique_ptr<BlockFile> /*file*/) { return NewMemoryBlockFile(); };
  const auto refused = TrainingStore::Open(options);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("ddr_budget_bytes is too small"), std::string::npos);
}

}  // namespace
}  // namespace embertide
