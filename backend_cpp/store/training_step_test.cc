// A training step as its contract says it: bags, repeated keys, rows on the SSD, keys that fail,
// gradients that are not finite.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>
#include <numeric>
#include <set>
#include <thread>

#include "ssd/faulty_file.h"
#include "store/test_rows.h"

namespace embertide {
namespace {

constexpr StepOptions kAdagrad{0.1F, 1e-6F, 0.0F};

class TrainingStepTest : public ::testing::Test {
 protected:
  TrainingStepTest()
      : directory_(std::filesystem::temp_directory_path() /
                   ("embertide-step-" + std::to_string(::getpid()))) {
    options_.ddr_budget_bytes = 64ULL << 20;
  }
  ~TrainingStepTest() override {
    store_.reset();
    std::filesystem::remove_all(directory_);
  }
  void Open() { store_ = std::move(*TrainingStore::Open(options_)); }
  // Tables of `dim` floats and of so many buckets.
  void Tables(uint32_t count, uint16_t dim, uint32_t bucket_bits) {
    for (uint32_t t = 0; t < count; ++t) {
      TableConfig table;
      table.name = "t" + std::to_string(t);
      table.id = t;
      table.layout = {1, dim, DType::kFp32};
      table.bucket_bits = bucket_bits;
      options_.tables.push_back(table);
    }
  }
  // A table whose rows are mostly on an SSD, two blocks of which cannot be read.
  void OpenWithBadBlocks(uint16_t dim, int64_t rows, uint32_t bucket_bits = 3) {
    Tables(1, dim, bucket_bits);
    options_.ddr_budget_bytes = 3ULL << 20;
    options_.ssd_budget_bytes = 64ULL << 20;
    options_.ssd_directory = directory_;
    options_.wrap_ssd = [this](std::unique_ptr<BlockFile> file) {
      return std::make_unique<FaultyBlockFile>(std::move(file), &faults_);
    };
    Open();
    std::vector<int64_t> keys(static_cast<size_t>(rows));
    std::iota(keys.begin(), keys.end(), 0);
    ASSERT_TRUE(store_->EnsureRows(0, keys).ok());
    for (const uint64_t block : {3, 20}) faults_.Put(block, Fault::kIoError);
  }
  // After so many more calls for blocks, none can be read.
  void FailReadsAfter(int reads) {
    faults_.BeforeRead([this, reads] {
      if (reads > 0) return FailReadsAfter(reads - 1);
      for (uint64_t block = 0; block < options_.ssd_budget_bytes / kBlockBytes; ++block) {
        faults_.Put(block, Fault::kIoError);
      }
    });
  }
  std::vector<float> Read(uint32_t t, int64_t key) const {
    std::vector<float> out(options_.tables[t].layout.dim());
    EXPECT_TRUE(store_->PinNewest()
                    ->Lookup({t, {&key, 1}, Pooling::kNone, {}, out.data(), out.size(), nullptr})
                    .ok());
    return out;
  }
  std::vector<std::byte> Everything() const {
    std::vector<std::byte> rows;
    for (uint32_t t = 0; t < options_.tables.size(); ++t) {
      for (uint32_t b = 0; b < options_.tables[t].buckets(); ++b) {
        EXPECT_TRUE(store_->ExportBucket(*store_->PinNewest(), t, b, &rows).ok());
      }
    }
    return rows;
  }
  void Whole() const {
    const Status integrity = store_->CheckIntegrity();
    ASSERT_TRUE(integrity.ok()) << integrity.ToString();
  }

  std::filesystem::path directory_;
  StoreOptions options_;
  Faults faults_;
  std::unique_ptr<TrainingStore> store_;
};

// A batch over several tables, one of them in two pieces whose gradients stand apart, as features
// of a batch do: against a reference in fp64.
TEST_F(TrainingStepTest, PooledBagsEqualAReferenceInDoubles) {
  constexpr uint32_t kDim = 20;
  constexpr uint32_t kStride = 50;
  constexpr int kKeys = 300;
  Tables(2, kDim, 3);
  Open();
  struct Reference {
    std::vector<double> values;
    double h = 0;
  };
  std::map<std::pair<uint32_t, int64_t>, Reference> rows;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (int step = 0; step < 30; ++step) {
    struct Piece {
      uint32_t table;
      std::vector<int64_t> keys;
      std::vector<uint32_t> offsets;
      std::vector<float> gradients;
    };
    std::vector<Piece> pieces;
    for (const uint32_t table : {1U, 0U, 1U}) {
      Piece piece{table, {}, {0}, {}};
      for (int bag = 0; bag < 40; ++bag) {
        for (uint32_t n = random() % 8; n > 0; --n) piece.keys.push_back(random() % kKeys);
        piece.offsets.push_back(static_cast<uint32_t>(piece.keys.size()));
        for (uint32_t d = 0; d < kStride; ++d) piece.gradients.push_back(normal(random));
      }
      pieces.push_back(std::move(piece));
    }
    std::vector<BagGradients> bags;
    std::map<std::pair<uint32_t, int64_t>, std::vector<double>> sums;
    for (const Piece& piece : pieces) {
      bags.push_back({piece.table, piece.keys, piece.offsets, piece.gradients.data(), kStride});
      for (size_t bag = 0; bag + 1 < piece.offsets.size(); ++bag) {
        for (uint32_t k = piece.offsets[bag]; k < piece.offsets[bag + 1]; ++k) {
          auto& sum = sums[{piece.table, piece.keys[k]}];
          sum.resize(kDim);
          for (uint32_t d = 0; d < kDim; ++d) sum[d] += piece.gradients[bag * kStride + d];
        }
      }
    }
    for (const auto& [name, sum] : sums) {
      Reference& row = rows[name];
      const TableConfig& table = options_.tables[name.first];
      for (uint32_t d = 0; row.values.size() < kDim; ++d) {
        row.values.push_back(
            InitialValue(table.init_seed, table.id, name.second, d, table.init_scale));
      }
      double squares = 0;
      for (const double each : sum) squares += each * each;
      row.h += squares / kDim;
      const double rate = kAdagrad.learning_rate / (std::sqrt(row.h) + kAdagrad.epsilon);
      for (uint32_t d = 0; d < kDim; ++d) row.values[d] -= rate * sum[d];
    }
    const auto updated = store_->ApplyGradients(bags, kAdagrad);
    ASSERT_TRUE(updated.ok()) << updated.status().ToString();
    ASSERT_EQ(updated.value(), sums.size());
  }
  for (const auto& [name, row] : rows) {
    const auto got = Read(name.first, name.second);
    for (uint32_t d = 0; d < kDim; ++d) ASSERT_NEAR(got[d], row.values[d], 1e-6);
    const auto h = static_cast<uint64_t>(name.second);
    ASSERT_NEAR(store_->StateOf(name.first, h)->accumulator, row.h, 1e-6 * row.h);
  }
  Whole();
}

// One key's gradients whose fp64 sum depends on their order: it is that of the batch, over bags and
// pieces, whatever the batch is dealt out to, by however many threads.
TEST_F(TrainingStepTest, RepeatedKeysAddUpInTheOrderOfTheBatch) {
  constexpr uint32_t kDim = 4;
  Tables(1, kDim, 5);
  const std::vector<float> in_order = {1e30F, 1.0F, -1e30F, 1e-3F, 1e22F, 3.0F, -1e22F, 5.0F};
  double sum = 0;
  for (const float each : in_order) sum += static_cast<double>(each);
  ASSERT_EQ(sum, 5.0);
  ASSERT_NE(std::accumulate(in_order.rbegin(), in_order.rend(), 0.0), sum);
  for (const auto& [others, threads] : {std::pair(0U, 1U), {3000U, 1U}, {3000U, 4U}}) {
    Open();
    std::vector<int64_t> keys;
    std::vector<float> gradients;
    for (const float each : in_order) {
      keys.push_back(-77);
      gradients.insert(gradients.end(), kDim, each);
      for (uint32_t n = 0; n < others; ++n) {
        keys.push_back(static_cast<int64_t>(keys.size()));
        gradients.insert(gradients.end(), kDim, 0.25F);
      }
    }
    // In two pieces.
    const size_t half = keys.size() / 2;
    const std::span<const int64_t> all(keys);
    const std::vector<BagGradients> bags = {
        {0, all.first(half), {}, gradients.data(), kDim},
        {0, all.subspan(half), {}, gradients.data() + half * kDim, kDim}};
    ASSERT_EQ(*store_->ApplyGradients(bags, kAdagrad, threads), keys.size() - in_order.size() + 1);
    EXPECT_EQ(store_->StateOf(0, static_cast<uint64_t>(-77))->accumulator, 25.0F);
    Whole();
  }
}

// The bytes of rows and states do not depend on devices, buckets aside, nor on what was in DDR, nor
// on the threads of a step.
TEST_F(TrainingStepTest, TheSameBytesWhateverTheDevicesTheTiersAndTheThreads) {
  constexpr uint32_t kDim = 64;
  Tables(3, kDim, 4);
  struct Case {
    uint32_t devices;
    uint32_t threads;
    bool ssd;
  };
  std::vector<std::byte> want;
  std::vector<RowState> want_states;
  for (const Case& of : std::vector<Case>{{1, 1, false},
                                          {3, 1, false},
                                          {2, 1, true},
                                          {1, 2, false},
                                          {3, 5, false},
                                          {2, 4, true}}) {
    options_.devices = of.devices;
    options_.ddr_budget_bytes = of.ssd ? 4ULL << 20 : 64ULL << 20;
    options_.ssd_budget_bytes = of.ssd ? 64ULL << 20 : 0;
    options_.ssd_directory = directory_;
    Open();
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    for (int step = 0; step < 12; ++step) {
      std::vector<int64_t> keys(10000);
      for (int64_t& key : keys) key = static_cast<int64_t>(random() % 9000);
      std::vector<float> gradients(keys.size() / 5 * kDim);
      for (float& each : gradients) each = normal(random);
      std::vector<uint32_t> offsets;
      for (uint32_t at = 0; at <= keys.size(); at += 5) offsets.push_back(at);
      const std::vector<BagGradients> bags = {
          {2, keys, offsets, gradients.data(), kDim},
          {0, std::span(keys).first(1200), {}, gradients.data(), kDim}};
      const std::vector<TableKeys> about_to_use = {{2, keys}, {0, std::span(keys).first(1200)}};
      if (step % 3 == 1) {
        ASSERT_TRUE(store_->BringRows(about_to_use, of.threads).ok());
      }
      ASSERT_TRUE(store_->ApplyGradients(bags, kAdagrad, of.threads).ok());
    }
    Whole();
    EXPECT_EQ(store_->Stats().promotions > 0, of.ssd);
    const std::vector<std::byte> got = Everything();
    std::vector<RowState> states;
    for (uint64_t key = 0; key < 9000; key += 100) {
      const auto state = store_->StateOf(2, key);
      states.push_back(state.ok() ? state.value() : RowState{-1.0F, 0, {}});
    }
    if (want.empty()) want = got;
    if (want_states.empty()) want_states = states;
    EXPECT_EQ(got, want) << of.devices << " devices, " << of.threads << " threads";
    EXPECT_TRUE(states == want_states) << of.devices << " devices, " << of.threads << " threads";
  }
}

// Many threads at a step beside one that takes changes and maintains the store: nothing is lost.
TEST(StepConcurrencyTest, ThreadsOfAStepAndOtherCallsLoseNothing) {
  constexpr uint32_t kDim = 16;
  constexpr uint64_t kKeys = 20000;
  StoreOptions options;
  options.ddr_budget_bytes = 64ULL << 20;
  TableConfig table;
  table.name = "t";
  table.layout = {4, kDim / 4, DType::kFp32};
  table.bucket_bits = 1;  // so that parts share buckets, and words of their marks
  options.tables = {table};
  std::vector<std::vector<std::byte>> got;
  for (const uint32_t threads : {1U, 4U}) {
    const auto store = std::move(*TrainingStore::Open(options));
    std::set<uint64_t> taken;
    const auto take = [&] {
      for (uint32_t b = 0; b < 2; ++b) {
        std::vector<std::byte> records;
        ASSERT_TRUE(store->TakeChanges(0, b, &records).ok());
        for (std::span<const std::byte> rest = records; !rest.empty();) {
          taken.insert(ReadRecord(table.layout, &rest).value().key);
        }
      }
    };
    std::atomic<bool> done{false};
    std::thread other([&] {
      while (!done) {
        take();
        store->Maintain();
      }
    });
    std::mt19937 random(5);
    std::set<uint64_t> used;
    for (int step = 0; step < 20; ++step) {
      std::vector<int64_t> keys(30000);
      for (int64_t& key : keys) key = static_cast<int64_t>(random() % kKeys);
      used.insert(keys.begin(), keys.end());
      std::vector<float> gradients(keys.size() * kDim);
      for (float& each : gradients) each = static_cast<float>(random() % 100) - 50.0F;
      const BagGradients bags{0, keys, {}, gradients.data(), kDim};
      ASSERT_TRUE(store->ApplyGradients({&bags, 1}, kAdagrad, threads).ok());
    }
    done = true;
    other.join();
    take();
    EXPECT_EQ(taken, used);
    ASSERT_TRUE(store->CheckIntegrity().ok());
    std::vector<std::byte>& rows = got.emplace_back();
    for (uint32_t b = 0; b < 2; ++b) {
      ASSERT_TRUE(store->ExportBucket(*store->PinNewest(), 0, b, &rows).ok());
    }
  }
  EXPECT_EQ(got[1], got[0]);
}

// A chunk's utility against one that is decayed in each step, for all keys and dead chunks too.
TEST_F(TrainingStepTest, UtilityEqualsOneThatIsKeptInDoublesStepByStep) {
  constexpr uint32_t kChunks = 3;
  constexpr uint32_t kChunkDim = 5;
  constexpr uint32_t kDim = kChunks * kChunkDim;
  constexpr uint64_t kKeys = 200;
  Tables(1, kDim, 2);
  options_.tables[0].layout = {kChunks, kChunkDim, DType::kFp32};
  options_.utility = UtilityKind::kNorms;
  options_.utility_decay = 0.97;
  Open();
  std::map<uint64_t, std::array<double, kChunks>> want;
  std::map<uint64_t, uint32_t> ages;
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  for (int step = 0; step < 400; ++step) {
    for (auto& [key, utility] : want) {
      ++ages[key];
      for (double& each : utility) each *= options_.utility_decay;
    }
    std::vector<int64_t> keys(30);
    for (int64_t& key : keys) key = static_cast<int64_t>(random() % kKeys);
    std::vector<float> gradients(keys.size() * kDim);
    for (float& each : gradients) each = normal(random);
    // One key's gradients are refused: its utility decays, and nothing else.
    const bool refused = step % 10 == 9;
    if (refused) gradients[3] = std::numeric_limits<float>::infinity();
    std::map<uint64_t, std::array<double, kDim>> sums;
    std::map<uint64_t, int> accesses;
    for (size_t k = 0; k < keys.size(); ++k) {
      const auto key = static_cast<uint64_t>(keys[k]);
      ++accesses[key];
      for (uint32_t d = 0; d < kDim; ++d) sums[key][d] += gradients[k * kDim + d];
    }
    ASSERT_TRUE(ApplyRows(store_.get(), 0, keys, gradients, kAdagrad).ok());
    for (const auto& [key, sum] : sums) {
      auto& utility = want[key];
      if (refused && key == static_cast<uint64_t>(keys[0])) continue;
      ages[key] = 0;
      for (uint32_t c = 0; c < kChunks; ++c) {
        double squares = 0;
        for (uint32_t d = c * kChunkDim; d < (c + 1) * kChunkDim; ++d) squares += sum[d] * sum[d];
        utility[c] += accesses[key] * std::sqrt(squares);
      }
    }
    if (step == 100) {
      for (const uint64_t key : {1, 2, 3}) {
        if (want.contains(key)) {
          ASSERT_TRUE(store_->SetLive(0, key, 1).ok());
        }
      }
    }
  }
  uint32_t oldest = 0;
  for (const auto& [key, utility] : want) {
    const RowState state = store_->StateOf(0, key).value();
    if (state.accumulator > 0) {
      EXPECT_EQ(state.age, ages[key]) << key;
    }
    oldest = std::max(oldest, state.age);
    for (uint32_t c = 0; c < kChunks; ++c) {
      EXPECT_NEAR(store_->UtilityNow(state.utility[c], state.age), utility[c], 1e-5 * utility[c]);
    }
    // Into another store, where it decays on.
    ASSERT_TRUE(store_->SetState(0, key, {state.accumulator, 7, state.utility}).ok());
    EXPECT_EQ(store_->StateOf(0, key)->age, 7U);
    EXPECT_EQ(store_->StateOf(0, key)->utility, state.utility);
  }
  EXPECT_GT(oldest, 10U) << "no key waited";
}

TEST_F(TrainingStepTest, GradientsThatAreNotFiniteAreRefusedAndCounted) {
  Tables(1, 4, 2);
  Open();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kHuge = 1e30F;  // its square is no float
  const std::vector<int64_t> keys = {1, 2, 3, 4, 5, 5, 6};
  ASSERT_EQ(*store_->EnsureRows(0, keys), 6U);
  const std::vector<std::byte> before = Everything();
  std::vector<float> gradients(keys.size() * 4, 0.0F);
  gradients[0] = kNan;
  gradients[7] = -kInfinity;
  gradients[8] = kHuge;
  gradients[16] = kInfinity;  // both of key 5: no number
  gradients[20] = -kInfinity;
  ASSERT_EQ(*ApplyRows(store_.get(), 0, keys, gradients, kAdagrad), 2U);
  EXPECT_EQ(store_->Stats().refused_gradients, 4U);
  EXPECT_EQ(Everything(), before) << "4 and 6 have gradients of zeros";
  for (const uint64_t key : {1, 2, 3, 5}) EXPECT_EQ(store_->StateOf(0, key)->accumulator, 0.0F);
  gradients.assign(keys.size() * 4, 1.0F);
  ASSERT_EQ(*ApplyRows(store_.get(), 0, keys, gradients, kAdagrad), 6U);
  EXPECT_EQ(store_->Stats().refused_gradients, 4U);
}

// A block that cannot be read fails its rows, by name; all others of the batch are updated once.
TEST_F(TrainingStepTest, AKeyThatFailsLosesNoOther) {
  constexpr uint16_t kDim = 32;
  constexpr int64_t kKeys = 40000;
  OpenWithBadBlocks(kDim, kKeys);
  std::vector<int64_t> some;
  for (int64_t key = 0; key < kKeys; key += 8) some.push_back(key);
  const std::vector<float> gradients(some.size() * kDim, 1.0F);
  const auto updated = ApplyRows(store_.get(), 0, some, gradients, kAdagrad);
  ASSERT_FALSE(updated.ok());
  EXPECT_EQ(updated.status().code(), Code::kDeviceError) << updated.status().ToString();
  EXPECT_NE(updated.status().message().find(" of table t0"), std::string::npos);
  const uint64_t failed = store_->Stats().failed_keys;
  EXPECT_GT(failed, 0U);
  EXPECT_LT(failed, 60U) << "two blocks";
  faults_.Clear();
  uint64_t not_updated = 0;
  for (const int64_t key : some) {
    const auto h = store_->StateOf(0, static_cast<uint64_t>(key));
    ASSERT_TRUE(h.ok()) << h.status().ToString();
    ASSERT_TRUE(h.value().accumulator == 1.0F || h.value().accumulator == 0.0F)
        << h.value().accumulator;
    if (h.value().accumulator == 0.0F) ++not_updated;
  }
  EXPECT_EQ(not_updated, failed);
  Whole();
}

// Before: what was taken of a bucket until one of its rows could not be read was in no version.
TEST_F(TrainingStepTest, ChangesThatCannotAllBeTakenAreTakenTheNextTime) {
  constexpr int64_t kKeys = 40000;
  OpenWithBadBlocks(32, kKeys);
  std::map<uint64_t, int> times;
  const auto take = [&] {
    int failed = 0;
    for (uint32_t b = 0; b < 8; ++b) {
      std::vector<std::byte> records;
      if (const Status status = store_->TakeChanges(0, b, &records); !status.ok()) {
        EXPECT_EQ(status.code(), Code::kDeviceError) << status.ToString();
        EXPECT_TRUE(records.empty());
        ++failed;
      }
      for (std::span<const std::byte> rest = records; !rest.empty();) {
        ++times[ReadRecord(options_.tables[0].layout, &rest)->key];
      }
    }
    return failed;
  };
  EXPECT_GT(take(), 0);
  EXPECT_LT(times.size(), size_t{kKeys});
  faults_.Clear();
  EXPECT_EQ(take(), 0);
  EXPECT_EQ(times.size(), size_t{kKeys});
  for (const auto& [key, n] : times) ASSERT_EQ(n, 1) << key;
  Whole();
}

// One bucket that is larger than DDR: rows that were taken make room for others on the SSD, and the
// drive fails at any moment. Before, these could not be given back, and were in no version.
TEST_F(TrainingStepTest, ChangesAreTakenTheNextTimeThoughTheDriveFailsAsAWhole) {
  constexpr int64_t kKeys = 40000;
  OpenWithBadBlocks(32, kKeys, /*bucket_bits=*/0);
  for (const int reads : {10, 100, 300, 1000, 3000}) {
    faults_.Clear();
    FailReadsAfter(reads);
    std::vector<std::byte> none;
    EXPECT_EQ(store_->TakeChanges(0, 0, &none).code(), Code::kDeviceError) << reads;
    EXPECT_TRUE(none.empty());
  }
  faults_.Clear();
  std::vector<std::byte> records;
  ASSERT_TRUE(store_->TakeChanges(0, 0, &records).ok());
  std::set<uint64_t> taken;
  for (std::span<const std::byte> rest = records; !rest.empty();) {
    taken.insert(ReadRecord(options_.tables[0].layout, &rest)->key);
  }
  EXPECT_EQ(taken.size(), size_t{kKeys});
  Whole();
}

TEST_F(TrainingStepTest, AFullBudgetFailsNewRowsAndUpdatesTheOthers) {
  constexpr uint32_t kDim = 64;
  Tables(1, kDim, 2);
  options_.ddr_budget_bytes = 2ULL << 20;
  Open();
  std::vector<int64_t> keys(20000);
  std::iota(keys.begin(), keys.end(), 0);
  const std::vector<float> gradients(keys.size() * kDim, 1.0F);
  const auto first = ApplyRows(store_.get(), 0, keys, gradients, kAdagrad);
  ASSERT_FALSE(first.ok());
  EXPECT_EQ(first.status().code(), Code::kResourceExhausted) << first.status().ToString();
  const StoreStats stats = store_->Stats();
  EXPECT_GT(stats.rows, 3000U);
  EXPECT_EQ(stats.failed_keys, keys.size() - stats.rows);
  Whole();
  EXPECT_FALSE(ApplyRows(store_.get(), 0, keys, gradients, kAdagrad).ok());
  uint64_t twice = 0;
  for (const int64_t key : keys) {
    const auto h = store_->StateOf(0, static_cast<uint64_t>(key));
    if (!h.ok()) continue;
    ASSERT_EQ(h.value().accumulator, 2.0F);
    ++twice;
  }
  EXPECT_EQ(twice, stats.rows);
  // The same keys fail, whatever the threads.
  const std::vector<std::byte> rows = Everything();
  Open();
  const BagGradients bags{0, keys, {}, gradients.data(), kDim};
  for (int step = 0; step < 2; ++step) {
    const auto shared = store_->ApplyGradients({&bags, 1}, kAdagrad, 4);
    ASSERT_FALSE(shared.ok());
    if (step == 0) {
      EXPECT_EQ(shared.status().message(), first.status().message());
    }
  }
  EXPECT_EQ(Everything(), rows);
}

// Keys that others have deduplicated, in several pieces: rows, states and refusals are those of a
// step that gets every occurrence by itself.
TEST_F(TrainingStepTest, AKeyThatStandsForSeveralOccurrencesLearnsAsTheyDo) {
  constexpr uint32_t kDim = 8;
  Tables(1, kDim, 2);
  options_.tables[0].layout = {2, kDim / 2, DType::kFp32};
  struct Deduplicated {
    std::vector<int64_t> keys;
    std::vector<uint32_t> counts;
    std::vector<float> sums;
    std::map<int64_t, size_t> place_of;
    void Add(int64_t key, const float* gradient) {
      const auto [at, added] = place_of.emplace(key, keys.size());
      if (added) {
        keys.push_back(key);
        counts.push_back(0);
        sums.resize(sums.size() + kDim);
      }
      ++counts[at->second];
      for (uint32_t d = 0; d < kDim; ++d) sums[at->second * kDim + d] += gradient[d];
    }
  };
  struct Case {
    UtilityKind utility;
    uint32_t new_row_accesses;
    bool pruned;
  };
  for (const auto& [utility, accesses, pruned] :
       {Case{UtilityKind::kAccesses, 1, false}, Case{UtilityKind::kNorms, 1, true},
        Case{UtilityKind::kAccesses, 1, true}, Case{UtilityKind::kNorms, 3, false}}) {
    options_.utility = utility;
    options_.new_row_accesses = accesses;
    options_.prune_groups.clear();
    if (pruned) options_.prune_groups = {{{0}, 16 << 10}};
    const auto whole = std::move(*TrainingStore::Open(options_));
    Open();
    std::mt19937 random(11);
    for (int step = 0; step < 30; ++step) {
      std::vector<int64_t> keys;
      std::vector<float> gradients;
      std::array<Deduplicated, 2> pieces;
      for (auto& piece : pieces) {
        for (int n = 0; n < 400; ++n) {
          keys.push_back(static_cast<int64_t>(random() % 40 * (random() % 40)));
          // Small integers: their sums are exact in any order.
          for (uint32_t d = 0; d < kDim; ++d) {
            gradients.push_back(static_cast<float>(random() % 5) - 2.0F);
          }
          piece.Add(keys.back(), &gradients[gradients.size() - kDim]);
        }
      }
      const BagGradients occurrences{0, keys, {}, gradients.data(), kDim};
      std::vector<BagGradients> counted;
      for (const auto& piece : pieces) {
        counted.push_back({0, piece.keys, {}, piece.sums.data(), kDim, piece.counts});
      }
      const auto want = whole->ApplyGradients({&occurrences, 1}, kAdagrad);
      const auto got = store_->ApplyGradients(counted, kAdagrad, 1 + step % 4);
      ASSERT_TRUE(got.ok()) << got.status().ToString();
      ASSERT_EQ(got.value(), want.value());
      if (!pruned || step % 10 != 4) continue;
      ASSERT_EQ(store_->Prune(0, 20'000)->rows, whole->Prune(0, 20'000)->rows);
    }
    const auto all = [&](const TrainingStore& store) {
      std::pair<std::vector<std::byte>, std::vector<RowState>> rows;
      for (uint32_t b = 0; b < options_.tables[0].buckets(); ++b) {
        EXPECT_TRUE(
            store.ExportBucketWithStates(*store.PinNewest(), 0, b, &rows.first, &rows.second).ok());
      }
      return rows;
    };
    EXPECT_TRUE(all(*store_) == all(*whole)) << static_cast<int>(utility) << " " << accesses;
    EXPECT_EQ(store_->Stats().new_keys_waiting, whole->Stats().new_keys_waiting);
    EXPECT_EQ(store_->Stats().unworthy_keys, whole->Stats().unworthy_keys);
    Whole();
  }
}

TEST_F(TrainingStepTest, CountsPastTheLargestNumberStayThere) {
  Tables(1, 4, 0);
  options_.utility = UtilityKind::kAccesses;
  Open();
  const std::vector<int64_t> keys = {5, 5};
  const std::vector<float> gradients(8, 1.0F);
  const std::vector<uint32_t> counts = {0xffff'fffeU, 7};
  const BagGradients bags{0, keys, {}, gradients.data(), 4, counts};
  ASSERT_TRUE(store_->ApplyGradients({&bags, 1}, kAdagrad).ok());
  EXPECT_EQ(store_->StateOf(0, 5)->utility[0], static_cast<float>(0xffff'ffffU));
}

TEST_F(TrainingStepTest, BagsThatCannotBeRightAreRefusedBeforeAnythingChanges) {
  Tables(2, 8, 1);
  Open();
  const std::vector<int64_t> keys = {1, 2, 3};
  const std::vector<float> gradients(24, 1.0F);
  const std::vector<uint32_t> descending = {0, 2, 1};
  const std::vector<uint32_t> past = {0, 4};
  const std::vector<uint32_t> whole = {0, 3};
  const std::vector<uint32_t> counts = {1, 2, 3};
  const std::vector<uint32_t> few_counts = {1, 2};
  const std::vector<uint32_t> no_count = {1, 0, 3};
  const BagGradients good{0, keys, {}, gradients.data(), 8};
  for (const BagGradients& bad :
       {BagGradients{2, keys, {}, gradients.data(), 8},
        BagGradients{1, keys, descending, gradients.data(), 8},
        BagGradients{1, keys, past, gradients.data(), 8},
        BagGradients{1, keys, {}, gradients.data(), 7}, BagGradients{1, keys, {}, nullptr, 8},
        BagGradients{1, keys, whole, gradients.data(), 8, counts},
        BagGradients{1, keys, {}, gradients.data(), 8, few_counts},
        BagGradients{1, keys, {}, gradients.data(), 8, no_count}}) {
    const std::vector<BagGradients> bags = {good, bad};
    const auto refused = store_->ApplyGradients(bags, kAdagrad);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.status().code(), Code::kInvalidArgument) << refused.status().ToString();
  }
  for (const uint32_t threads : {0U, kMaxStepThreads + 1}) {
    const auto refused = store_->ApplyGradients({&good, 1}, kAdagrad, threads);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.status().code(), Code::kInvalidArgument) << refused.status().ToString();
  }
  for (const double decay : {0.0, 1.5, std::numeric_limits<double>::quiet_NaN()}) {
    StoreOptions wrong = options_;
    wrong.utility_decay = decay;
    EXPECT_EQ(TrainingStore::Open(wrong).status().code(), Code::kInvalidArgument);
  }
  EXPECT_EQ(store_->Stats().rows, 0U);
  // Keys outside of all bags are none.
  const std::vector<uint32_t> inner = {1, 2, 2};
  const BagGradients bags{0, keys, inner, gradients.data(), 8};
  EXPECT_EQ(*store_->ApplyGradients({&bags, 1}, kAdagrad), 1U);
  EXPECT_EQ(store_->Stats().rows, 1U);
}

// Marks of changed rows are charged: noted in an index that grows, taken once, exactly.
TEST_F(TrainingStepTest, ChangesAreNotedWhileTheIndexGrows) {
  Tables(1, 4, 1);
  Open();
  std::set<int64_t> changed;
  std::mt19937 random(3);
  for (int step = 0; step < 60; ++step) {
    std::vector<int64_t> keys(step % 7 == 0 ? 3000 : 40);
    for (int64_t& key : keys) key = static_cast<int64_t>(random() % 30000);
    const std::vector<float> gradients(keys.size() * 4, 1.0F);
    ASSERT_TRUE(ApplyRows(store_.get(), 0, keys, gradients, kAdagrad).ok());
    changed.insert(keys.begin(), keys.end());
    if (step % 5 != 0) continue;
    Whole();
    std::set<int64_t> taken;
    for (uint32_t b = 0; b < 2; ++b) {
      std::vector<std::byte> records;
      ASSERT_TRUE(store_->TakeChanges(0, b, &records).ok());
      for (std::span<const std::byte> rest = records; !rest.empty();) {
        taken.insert(
            static_cast<int64_t>(ReadRecord(options_.tables[0].layout, &rest).value().key));
      }
    }
    ASSERT_EQ(taken, changed);
    changed.clear();
  }
}

}  // namespace
}  // namespace embertide
