// The store over an SSD tier that fails, fills up and is compacted.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "embertide/hash.h"
#include "embertide/serving_store.h"
#include "ssd/faulty_file.h"
#include "store/test_rows.h"

namespace embertide {
namespace {

constexpr uint32_t kDim = 32;
// In DDR, beside their index, a tenth of them have room.
constexpr uint64_t kKeys = 40'000;

float ValueOf(uint32_t table, uint64_t key, uint32_t d, uint64_t version) {
  return static_cast<float>(table * 1000 + key % 1000 + d) + static_cast<float>(version) * 0.25F;
}

class SsdStoreTest : public ::testing::Test {
 protected:
  SsdStoreTest()
      : directory_(std::filesystem::temp_directory_path() /
                   ("embertide-ssd-" + std::to_string(::getpid()))) {
    options_.tables.resize(2);
    for (uint32_t t = 0; t < 2; ++t) {
      options_.tables[t].name = t == 0 ? "user" : "item";
      options_.tables[t].id = t + 1;
      options_.tables[t].layout = {1, kDim, DType::kFp32};
      options_.tables[t].bucket_bits = 2;
    }
    options_.ddr_budget_bytes = 6ULL << 20;
    options_.ssd_budget_bytes = 64ULL << 20;
    options_.ssd_directory = directory_;
    options_.window_versions = 1;
    options_.ssd_compaction_bytes_per_s = 0;
    options_.wrap_ssd = [this](std::unique_ptr<BlockFile> file) {
      return std::make_unique<FaultyBlockFile>(std::move(file), &faults_);
    };
  }
  ~SsdStoreTest() override { std::filesystem::remove_all(directory_); }

  void Open() { store_ = std::move(*ServingStore::Open(options_)); }
  Status Stage(uint64_t version, uint32_t t, uint64_t key) {
    const TableConfig& table = options_.tables[t];
    std::vector<float> values(kDim);
    for (uint32_t d = 0; d < kDim; ++d) values[d] = ValueOf(t, key, d, version);
    std::vector<std::byte> payload(kDim * sizeof(float));
    EncodePayload(table.layout, 1, values.data(), payload.data());
    std::vector<std::byte> record;
    AppendRecord({key, 1, RecordKind::kRow, payload}, &record);
    const Status staged =
        store_->StageRecords(version, t, BucketOfHash(HashKey(key), table.bucket_bits), record);
    if (staged.ok()) rows_[{t, key}] = version;
    return staged;
  }
  void Commit(uint64_t version) { ASSERT_TRUE(store_->Commit(version).ok()); }
  // kKeys rows of each table.
  void Load() {
    for (uint64_t key = 0; key < kKeys; ++key) {
      for (uint32_t t = 0; t < 2; ++t) ASSERT_TRUE(Stage(1, t, key).ok());
    }
    Commit(1);
  }
  Status Lookup(uint32_t t, int64_t key, Source* from = nullptr) const {
    std::vector<float> out(kDim);
    uint8_t source = 0;
    auto view = store_->PinNewest();
    const Status status =
        view->Lookup({t, {&key, 1}, Pooling::kNone, {}, out.data(), kDim, &source});
    if (!status.ok()) return status;
    const uint64_t version = rows_.at({t, static_cast<uint64_t>(key)});
    for (uint32_t d = 0; d < kDim; ++d) {
      EXPECT_EQ(out[d], ValueOf(t, key, d, version)) << "table " << t << ", key " << key;
    }
    if (from != nullptr) *from = static_cast<Source>(source);
    return status;
  }
  // Stages `share` of each eight rows again, some thousand a version, as a follower would: their
  // old places on the SSD are dead.
  void Replace(uint64_t first_version, uint64_t share) {
    for (uint64_t key = 0; key < kKeys; ++key) {
      for (uint32_t t = 0; t < 2 && key % 8 < share; ++t) {
        ASSERT_TRUE(Stage(first_version + key / 4000, t, key).ok()) << key;
      }
      if (key % 4000 == 3999) Commit(first_version + key / 4000);
    }
  }
  void CheckAll() const {
    auto view = store_->PinNewest();
    for (uint32_t t = 0; t < 2; ++t) {
      std::vector<int64_t> keys;
      for (auto row = rows_.lower_bound({t, 0}); row != rows_.end() && row->first.first == t;
           ++row) {
        keys.push_back(static_cast<int64_t>(row->first.second));
      }
      std::vector<float> out(keys.size() * kDim);
      const Status read = view->Lookup({t, keys, Pooling::kNone, {}, out.data(), kDim, nullptr});
      ASSERT_TRUE(read.ok()) << read.ToString();
      for (size_t k = 0; k < keys.size(); ++k) {
        const auto key = static_cast<uint64_t>(keys[k]);
        const uint64_t version = rows_.at({t, key});
        for (uint32_t d = 0; d < kDim; ++d) {
          ASSERT_EQ(out[k * kDim + d], ValueOf(t, key, d, version)) << "key " << key;
        }
      }
    }
    const Status integrity = store_->CheckIntegrity();
    ASSERT_TRUE(integrity.ok()) << integrity.ToString();
  }
  // Waits until the SSD takes writes again, which it is asked for seconds apart.
  void AwaitRoom() const {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!store_->SsdFailure().empty() && std::chrono::steady_clock::now() < until) {
      store_->Maintain();
    }
    EXPECT_EQ(store_->SsdFailure(), "");
  }
  uint64_t CompactedWhileMaintained(std::chrono::milliseconds time) {
    const auto until = std::chrono::steady_clock::now() + time;
    while (std::chrono::steady_clock::now() < until) store_->Maintain();
    return store_->Stats().ssd.compacted_bytes;
  }

  std::filesystem::path directory_;
  StoreOptions options_;
  Faults faults_;
  std::unique_ptr<ServingStore> store_;
  std::map<std::pair<uint32_t, uint64_t>, uint64_t> rows_;  // -> version
};

TEST_F(SsdStoreTest, ABadBlockFailsTheLookupsOfItsRowsAlone) {
  Open();
  Load();
  std::vector<int64_t> on_ssd;
  for (int64_t key = 0; key < 4000; ++key) {
    Source source{};
    ASSERT_TRUE(Lookup(0, key, &source).ok());
    if (source == Source::kSsd) on_ssd.push_back(key);
  }
  ASSERT_GT(on_ssd.size(), 1000U);
  for (const Fault fault : {Fault::kIoError, Fault::kShortRead, Fault::kBitFlip}) {
    const StoreStats before = store_->Stats();
    faults_.Put(5, fault, 12345);
    uint64_t failed = 0;
    for (const int64_t key : on_ssd) {
      const Status read = Lookup(0, key);
      if (read.ok()) continue;
      ++failed;
      ASSERT_EQ(read.code(), fault == Fault::kIoError ? Code::kDeviceError : Code::kCorrupt);
      ASSERT_NE(read.message().find("SSD block 5"), std::string::npos) << read.ToString();
    }
    faults_.Clear();
    EXPECT_GT(failed, 0U);
    EXPECT_LT(failed, 30U);
    const StoreStats after = store_->Stats();
    const bool device = fault == Fault::kIoError;
    EXPECT_EQ(after.ssd.read_errors - before.ssd.read_errors, device ? failed : 0);
    EXPECT_EQ(after.ssd.corrupt - before.ssd.corrupt, device ? 0 : failed);
    for (const int64_t key : on_ssd) ASSERT_TRUE(Lookup(0, key).ok());
  }
}

TEST_F(SsdStoreTest, AFullDiskRefusesRowsAndLosesNone) {
  Open();
  Load();
  faults_.FillDisk();
  Status staged;
  for (uint64_t key = kKeys; staged.ok() && key < 2 * kKeys; ++key) staged = Stage(2, 0, key);
  EXPECT_EQ(staged.code(), Code::kResourceExhausted);
  EXPECT_GT(store_->Stats().ssd.write_errors, 0U);
  EXPECT_EQ(store_->Stats().refused_rows, 1U);
  EXPECT_NE(store_->SsdFailure().find("No space left on device"), std::string::npos);
  faults_.Clear();
  AwaitRoom();
  for (uint64_t key = kKeys; key < kKeys + 4000; ++key) ASSERT_TRUE(Stage(2, 0, key).ok());
  Commit(2);
  CheckAll();
  EXPECT_EQ(store_->SsdFailure(), "");
}

// While the disk is full, upkeep neither compacts nor reads what it could put nowhere, and asks the
// disk again now and then.
TEST_F(SsdStoreTest, AFullDiskIsNotWornByUpkeep) {
  options_.ssd_compaction_bytes_per_s = 1ULL << 40;
  Open();
  Load();
  for (uint64_t v = 2; v < 12; ++v) {  // segments that are worth their compaction
    for (uint64_t key = 0; key < kKeys; key += 2) ASSERT_TRUE(Stage(v, 0, key).ok());
    Commit(v);
  }
  faults_.FillDisk();
  Status staged;
  for (uint64_t key = kKeys; staged.ok() && key < 2 * kKeys; ++key) staged = Stage(12, 0, key);
  ASSERT_EQ(staged.code(), Code::kResourceExhausted);
  store_->DropStaged();
  rows_.erase(rows_.lower_bound({0, kKeys}), rows_.lower_bound({1, 0}));
  const SsdStats before = store_->Stats().ssd;
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(500);
  while (std::chrono::steady_clock::now() < until) store_->Maintain();
  const SsdStats after = store_->Stats().ssd;
  EXPECT_EQ(after.compacted_bytes, before.compacted_bytes);
  EXPECT_EQ(after.read_errors, before.read_errors);
  EXPECT_EQ(after.blocks_read, before.blocks_read);
  EXPECT_LE(after.write_errors - before.write_errors, 4U);
  faults_.Clear();
  AwaitRoom();
  CheckAll();
}

// The live rows of segments that are mostly dead move, and the segments come free. The rows are the
// same, and the bytes as the budget says.
TEST_F(SsdStoreTest, CompactionInTheBackgroundKeepsToItsBudgetAndFreesSegments) {
  constexpr uint64_t kRate = 4ULL << 20;
  options_.ssd_compaction_bytes_per_s = kRate;
  Open();
  Load();
  Replace(2, 5);
  const StoreStats before = store_->Stats();
  const auto start = std::chrono::steady_clock::now();
  const uint64_t compacted =
      CompactedWhileMaintained(std::chrono::milliseconds(1000)) - before.ssd.compacted_bytes;
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const StoreStats after = store_->Stats();
  // A burst of a tenth of a second, and the last step, come on top.
  const double most = static_cast<double>(kRate) * (seconds + 0.1) + (512 << 10);
  EXPECT_LE(static_cast<double>(compacted), most);
  EXPECT_GE(static_cast<double>(compacted), static_cast<double>(kRate) * seconds * 0.5);
  EXPECT_GT(after.ssd.compacted_rows, 1000U);
  EXPECT_LT(after.ssd_bytes, before.ssd_bytes);
  EXPECT_EQ(after.ssd.compactions_forced, 0U);
  EXPECT_GT(after.ssd.bytes_written, after.ssd.row_bytes);
  CheckAll();
}

TEST_F(SsdStoreTest, WithoutABudgetOfBytesNothingIsCompactedInTheBackground) {
  Open();
  Load();
  Replace(2, 5);
  EXPECT_EQ(CompactedWhileMaintained(std::chrono::milliseconds(100)), 0U);
}

// Versions under pins until the SSD is full of dead rows: room is made there, no row is refused,
// and pins read what they pinned, also rows that moved while on a chain.
TEST_F(SsdStoreTest, AFullSsdIsCompactedForRoomUnderPins) {
  options_.ssd_budget_bytes = 9ULL << 20;
  options_.ddr_budget_bytes = 8ULL << 20;
  options_.window_versions = 2;
  Open();
  Load();
  std::mt19937 random(5);
  for (uint64_t version = 2; version <= 40; ++version) {
    auto older = store_->PinNewest();
    std::map<std::pair<uint32_t, int64_t>, uint64_t> pinned;
    for (int i = 0; i < 1500; ++i) {
      const auto t = static_cast<uint32_t>(random() % 2);
      const uint64_t key = random() % kKeys;
      pinned.try_emplace({t, static_cast<int64_t>(key)}, rows_.at({t, key}));
      const Status staged = Stage(version, t, key);
      ASSERT_TRUE(staged.ok()) << version << ": " << staged.ToString();
    }
    for (const auto& [row, at] : pinned) {
      std::vector<float> out(kDim);
      const int64_t key = row.second;
      const Status read =
          older->Lookup({row.first, {&key, 1}, Pooling::kNone, {}, out.data(), kDim, nullptr});
      ASSERT_TRUE(read.ok()) << read.ToString();
      ASSERT_EQ(out[3], ValueOf(row.first, static_cast<uint64_t>(key), 3, at));
    }
    Commit(version);
    // Brings in some of what was read, whose room may be made by moving the very row.
    store_->Maintain();
    if (version % 4 == 0) CheckAll();
    if (HasFatalFailure()) return;
  }
  const StoreStats stats = store_->Stats();
  EXPECT_GT(stats.ssd.compactions_forced, 0U);
  EXPECT_GT(stats.ssd.compacted_rows, 0U);
  EXPECT_GT(stats.promotions, 0U);
  EXPECT_EQ(stats.refused_rows, 0U);
  CheckAll();
}

// A trainer of one table, all of whose keys have rows; steps of gradients that are one everywhere.
class SsdTrainerTest : public SsdStoreTest {
 protected:
  void OpenTrainer() {
    options_.tables.resize(1);
    trainer_ = std::move(*TrainingStore::Open(options_));
    std::iota(keys_.begin(), keys_.end(), 0);
    ASSERT_TRUE(trainer_->EnsureRows(0, keys_).ok());
  }
  // Takes a step over one key in `one_in`, by chance.
  void Step(uint32_t one_in) {
    std::vector<int64_t> some;
    for (const int64_t key : keys_) {
      if (random_() % one_in == 0) some.push_back(key);
    }
    const std::vector<float> gradients(some.size() * kDim, 1.0F);
    const auto updated = ApplyRows(trainer_.get(), 0, some, gradients, {});
    ASSERT_TRUE(updated.ok()) << updated.status().ToString();
    ASSERT_EQ(updated.value(), some.size());
    for (const int64_t key : some) ++steps_[static_cast<size_t>(key)];
  }
  // The accumulator grows by the mean of the squared gradients, which is one.
  void ExpectAllSteps() const {
    for (const int64_t key : keys_) {
      const auto state = trainer_->StateOf(0, static_cast<uint64_t>(key));
      ASSERT_TRUE(state.ok()) << state.status().ToString();
      ASSERT_EQ(state.value().accumulator, static_cast<float>(steps_[static_cast<size_t>(key)]))
          << key;
    }
  }
  void ExpectIntegrity(int turn) const {
    const Status integrity = trainer_->CheckIntegrity();
    ASSERT_TRUE(integrity.ok()) << turn << ": " << integrity.ToString();
  }

  std::unique_ptr<TrainingStore> trainer_;
  std::vector<int64_t> keys_ = std::vector<int64_t>(kKeys);
  std::vector<uint32_t> steps_ = std::vector<uint32_t>(kKeys);
  std::mt19937 random_{9};
};

// Each row that a step updates is brought from the SSD; room for it is made by moving others there,
// and with the SSD full that may move the very row.
TEST_F(SsdTrainerTest, TrainingOverAFullSsdLosesNoStep) {
  options_.ddr_budget_bytes = 3ULL << 20;
  options_.ssd_budget_bytes = 8ULL << 20;
  ASSERT_NO_FATAL_FAILURE(OpenTrainer());
  for (int step = 0; step < 25; ++step) {
    ASSERT_NO_FATAL_FAILURE(Step(16)) << step;
    ASSERT_NO_FATAL_FAILURE(ExpectIntegrity(step));
  }
  EXPECT_GT(trainer_->Stats().ssd.compactions_forced, 0U);
  ExpectAllSteps();
}

// A block that fails when its segment is compacted keeps its rows where they are: the others move,
// and asking for a lost one names the block.
TEST_F(SsdStoreTest, CompactionPassesOverABadBlock) {
  options_.ssd_compaction_bytes_per_s = 1ULL << 30;
  Open();
  Load();
  faults_.Put(9, Fault::kBitFlip, 777);
  Replace(2, 5);
  CompactedWhileMaintained(std::chrono::milliseconds(300));
  EXPECT_GT(store_->Stats().ssd.corrupt, 0U);
  uint64_t lost = 0;
  for (uint64_t key = 0; key < kKeys; ++key) {
    const Status read = Lookup(0, static_cast<int64_t>(key));
    if (read.ok()) continue;
    ++lost;
    ASSERT_NE(read.message().find("SSD block 9 "), std::string::npos) << read.ToString();
  }
  faults_.Clear();
  EXPECT_GT(lost, 0U);
  EXPECT_LT(lost, 30U);
  // Rows that come anew for them are good.
  Replace(100, 8);
  CheckAll();
}

TEST_F(SsdStoreTest, AWriterThatNeedsRoomWaitsForALongRead) {
  Open();
  Load();
  auto view = std::make_optional(std::move(*store_->PinNewest()));
  auto held = std::make_optional<BagReader>(*view);
  const uint64_t before = store_->Stats().evictions_to_ssd;
  std::atomic<bool> staged = false;
  std::thread writer([&] {
    for (uint64_t key = kKeys; key < kKeys + 20'000; ++key) ASSERT_TRUE(Stage(2, 0, key).ok());
    staged = true;
  });
  // The read holds what it evicts, so it soon stands still; longer than rounds of 5 ms would.
  uint64_t evicted = before;
  auto since = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() < since + std::chrono::milliseconds(600)) {
    std::this_thread::yield();
    if (const uint64_t now = store_->Stats().evictions_to_ssd; now != evicted) {
      evicted = now;
      since = std::chrono::steady_clock::now();
    }
  }
  EXPECT_GT(evicted, before) << "the writer needed no room";
  EXPECT_FALSE(staged);
  held.reset();
  writer.join();
  EXPECT_TRUE(staged);
  EXPECT_EQ(store_->Stats().reader_waits_given_up, 0U);
  Commit(2);
  EXPECT_TRUE(store_->CheckIntegrity().ok()) << store_->CheckIntegrity().ToString();
}

TEST_F(SsdStoreTest, AReadThatDoesNotEndIsNamedWhereRoomIsRefused) {
  options_.reader_wait_ms = 20;
  Open();
  Load();
  auto view = std::move(*store_->PinNewest());
  const BagReader held(view);
  Status refused = Status::Ok();
  for (uint64_t key = kKeys; refused.ok() && key < 3 * kKeys; ++key) refused = Stage(2, 0, key);
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_NE(refused.message().find("at version 1"), std::string::npos) << refused.message();
  EXPECT_GT(store_->Stats().reader_waits_given_up, 0U);
  EXPECT_TRUE(store_->CheckIntegrity().ok());
}

TEST_F(SsdStoreTest, ARowThatChangesWhileItIsPromotedKeepsItsNewValues) {
  Open();
  Load();
  std::vector<uint64_t> keys;
  for (uint64_t key = 0; keys.size() < 200; key += 7) {
    Source from = Source::kDefault;
    ASSERT_TRUE(Lookup(0, static_cast<int64_t>(key), &from).ok());
    if (from == Source::kSsd) keys.push_back(key);
  }
  const uint64_t before = store_->Stats().promotions;
  // A writer, while the rows are read: were its lock held then, this would never end.
  std::optional<uint64_t> promoted_meanwhile;
  faults_.BeforeRead([&] {
    for (size_t k = 0; k < keys.size(); k += 2) ASSERT_TRUE(Stage(2, 0, keys[k]).ok());
    Commit(2);
    promoted_meanwhile = store_->Stats().promotions - before;
  });
  store_->Maintain();
  EXPECT_EQ(promoted_meanwhile, 0U) << "nothing was read, or rows came before they were";
  EXPECT_GT(store_->Stats().promotions, before);
  EXPECT_GT(store_->Stats().dropped_accesses, 0U) << "rows that changed";
  CheckAll();
}

// A drive that is as slow as can be: no write or read of upkeep, for evictions and for compaction,
// ends before a writer has written a row.
TEST_F(SsdStoreTest, NoWriterWaitsForTheDriveOfUpkeep) {
  options_.ssd_compaction_bytes_per_s = 1ULL << 30;
  Open();
  Load();
  Replace(2, 5);
  uint64_t version = 100;
  // Needs no slot, so that it never waits for room.
  const auto prune = [&] {
    const uint64_t key = kKeys - version;
    std::vector<std::byte> record;
    AppendRecord({key, 0, RecordKind::kPruned, {}}, &record);
    rows_.erase({0, key});
    return store_->StageRecords(version, 0, BucketOfKey(options_.tables[0], key), record);
  };
  std::future<Status> pruned;
  bool waited = false;
  uint64_t beside = 0;
  const std::function<void()> write_beside = [&] {
    ++beside;
    pruned = std::async(std::launch::async, prune);
    // Where it waits for the writer lock, it ends once this has.
    waited = pruned.wait_for(std::chrono::seconds(5)) != std::future_status::ready;
    EXPECT_TRUE(waited || pruned.get().ok());
  };
  const StoreStats before = store_->Stats();
  uint64_t evicted_by_upkeep = 0;
  uint64_t compacted = 0;
  for (uint64_t turn = 0; turn < 200 && !waited; ++turn) {
    (turn % 2 == 0) ? faults_.BeforeWrite(write_beside) : faults_.BeforeRead(write_beside);
    const StoreStats maintained = store_->Stats();
    store_->Maintain();
    faults_.Clear();
    const StoreStats now = store_->Stats();
    evicted_by_upkeep += now.evictions_to_ssd - maintained.evictions_to_ssd;
    compacted += now.ssd.compacted_rows - maintained.ssd.compacted_rows;
    // Less than what is kept ready.
    for (uint64_t key = turn * 100; key < turn * 100 + 100; ++key) {
      ASSERT_TRUE(Stage(version, turn % 2, key).ok());
    }
    Commit(version++);
  }
  EXPECT_FALSE(waited) << "beside read or write " << beside;
  EXPECT_TRUE(!pruned.valid() || pruned.get().ok());
  EXPECT_GT(beside, 50U);
  EXPECT_GT(evicted_by_upkeep, 5000U);
  EXPECT_GT(compacted, 5000U);
  const uint64_t by_writers = store_->Stats().evictions_by_writers - before.evictions_by_writers;
  EXPECT_LT(by_writers * 20, evicted_by_upkeep);
  CheckAll();
}

// While rows are written to the SSD, some of them change, some go, their bucket goes.
class MovingRowsTest : public SsdStoreTest, public testing::WithParamInterface<const char*> {};

TEST_P(MovingRowsTest, RowsThatChangeMeanwhileStayAsTheyAre) {
  const uint64_t ddr = options_.ddr_budget_bytes / 2;
  const uint64_t ssd = options_.ssd_budget_bytes / 2;
  options_.table_budgets = {{"user", {ddr, ssd, GetParam()}}, {"item", {ddr, ssd, GetParam()}}};
  options_.ssd_compaction_bytes_per_s = 1ULL << 30;
  options_.window_versions = 2;
  Open();
  Load();
  std::mt19937 random(3);
  uint64_t version = 2;
  uint64_t beside = 0;
  // Until the writes end, rows that lie in DDR are written, some of them twice, and a bucket is
  // dropped and comes back empty.
  const auto change = [&] {
    ++beside;
    for (int i = 0; i < 300; ++i) {
      const auto t = static_cast<uint32_t>(random() % 2);
      const uint64_t key = random() % kKeys;
      if (!rows_.contains({t, key})) continue;
      ASSERT_TRUE(Stage(version, t, key).ok());
    }
    if (beside % 2 == 0) Commit(version++);
    if (beside % 8 != 4) return;
    const auto t = static_cast<uint32_t>(random() % 2);
    const auto bucket = static_cast<uint32_t>(random() % 4);
    ASSERT_TRUE(store_->DropBucket(t, bucket).ok());
    std::erase_if(rows_, [&](const auto& row) {
      return row.first.first == t && BucketOfKey(options_.tables[t], row.first.second) == bucket;
    });
    ASSERT_TRUE(store_->AddBucket(t, bucket, 0, {}).ok());
  };
  for (int turn = 0; turn < 24; ++turn) {
    for (int i = 0; i < 400; ++i) {
      const auto t = static_cast<uint32_t>(random() % 2);
      const uint64_t key = random() % kKeys;
      ASSERT_TRUE(Stage(version, t, key).ok());
    }
    Commit(version++);
    faults_.BeforeWrite(change);
    store_->Maintain();
    faults_.Clear();
    const Status integrity = store_->CheckIntegrity();
    ASSERT_TRUE(integrity.ok()) << turn << ": " << integrity.ToString();
  }
  EXPECT_GT(beside, 8U);
  Commit(version);
  CheckAll();
}

INSTANTIATE_TEST_SUITE_P(Policies, MovingRowsTest,
                         testing::Values("clock", "lru", "s3-fifo", "reuse-density"));

TEST_F(SsdTrainerTest, TrainingBesideAnEvictionLosesNoStep) {
  options_.ddr_budget_bytes = 4ULL << 20;
  ASSERT_NO_FATAL_FAILURE(OpenTrainer());
  uint64_t beside = 0;
  for (int turn = 0; turn < 16; ++turn) {
    ASSERT_NO_FATAL_FAILURE(Step(64)) << turn;
    faults_.BeforeWrite([&] {
      ++beside;
      Step(64);
    });
    trainer_->Maintain();
    faults_.Clear();
    ASSERT_NO_FATAL_FAILURE(ExpectIntegrity(turn));
  }
  EXPECT_GT(beside, 4U);
  ExpectAllSteps();
}

TEST_F(SsdStoreTest, PromotionsPassOverABadBlock) {
  Open();
  Load();
  for (int64_t key = 0; key < 500; ++key) ASSERT_TRUE(Lookup(0, key).ok());
  for (uint64_t block = 0; block < 60; block += 6) faults_.Put(block, Fault::kBitFlip, 12345);
  const StoreStats before = store_->Stats();
  store_->Maintain();
  const StoreStats after = store_->Stats();
  const uint64_t dropped = after.dropped_accesses - before.dropped_accesses;
  EXPECT_GT(dropped, 0U) << "no row of a bad block was asked for";
  EXPECT_GT(after.promotions - before.promotions, dropped);
  EXPECT_GT(after.ssd.corrupt, before.ssd.corrupt);
  faults_.Clear();
  CheckAll();
}

}  // namespace
}  // namespace embertide
