// The rows that the tiers hold of each table, and what becomes of rows that are read.
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "store/test_residency.h"
#include "store/test_rows.h"

namespace embertide {
namespace {

// The reads of the SSD that readers report, and what becomes of them, add up.
TEST_F(ResidencyTest, EachReadOfTheSsdIsPromotedRefusedOrDroppedAndCounted) {
  for (const char* policy : {"clock", "clock:15"}) {
    StoreOptions options =
        Options({MakeTable("item", 1, {1, 32, DType::kFp32})}, 2 * kMiB, 32 * kMiB);
    options.ddr_policy = policy;
    Open(options);
    constexpr int64_t kKeys = 22'000;
    for (uint64_t key = 0; key < kKeys; ++key) ASSERT_TRUE(Stage(1, 0, key, 1, 1).ok());
    ASSERT_TRUE(store_->Commit(1).ok());
    const StoreStats before = store_->Stats();
    const auto since = [&](uint64_t StoreStats::* value) {
      return store_->Stats().*value - before.*value;
    };
    constexpr auto kSsd = static_cast<size_t>(Source::kSsd);
    for (int64_t first = 0; first < kKeys; first += 250) {
      std::vector<int64_t> keys(250);
      std::iota(keys.begin(), keys.end(), first);
      std::vector<float> out(keys.size() * 32);
      ASSERT_TRUE(
          store_->PinNewest()->Lookup({0, keys, Pooling::kNone, {}, out.data(), 32, nullptr}).ok());
    }
    const uint64_t read = store_->Stats().hits[kSsd] - before.hits[kSsd];
    const uint64_t told = read - since(&StoreStats::dropped_accesses);
    // The log is bounded, by a part of the budget, and so is what one turn promotes.
    EXPECT_GT(read, 10'000U);
    EXPECT_GT(told, 512U);
    EXPECT_LT(told, 2'000U);
    store_->Maintain();
    const uint64_t promoted = since(&StoreStats::promotions);
    const uint64_t refused = since(&StoreStats::refused_promotions);
    EXPECT_EQ(promoted + refused + since(&StoreStats::dropped_accesses), read);
    if (std::string(policy) == "clock") {
      EXPECT_GT(promoted, 0U);
      EXPECT_LE(promoted, 512U);
    } else {
      EXPECT_EQ(refused, told);
    }
    Whole();
  }
}

// A budget of few pages; and rows of a size that none of its pages is for.
TEST_F(ResidencyTest, RowsThatAreReadComeToStayWhateverTheirSize) {
  for (const uint64_t ddr : {2 * kMiB, 48 * kMiB}) {
    Open(Options({MakeTable("large", 1, {1, 96, DType::kFp32}),
                  MakeTable("small", 2, {1, 16, DType::kFp32})},
                 ddr, 256 * kMiB));
    const uint64_t rows = ddr / 256;
    for (uint64_t key = 0; key < rows / 4; ++key) ASSERT_TRUE(Stage(1, 1, key, 1, 1).ok());
    for (uint64_t key = 0; key < rows; ++key) ASSERT_TRUE(Stage(1, 0, key, 1, 1).ok());
    ASSERT_TRUE(store_->Commit(1).ok());
    for (uint32_t table = 0; table < 2; ++table) {
      std::vector<int64_t> keys(ddr / 8192);  // a few of the rows that leave first
      std::iota(keys.begin(), keys.end(), 0);
      const uint32_t dim = store_->options().tables[table].layout.dim();
      std::vector<float> out(keys.size() * dim);
      const auto read = [&] {
        const uint64_t before = store_->Stats().hits[static_cast<size_t>(Source::kDdr)];
        EXPECT_TRUE(store_->PinNewest()
                        ->Lookup({table, keys, Pooling::kNone, {}, out.data(), dim, nullptr})
                        .ok());
        store_->Maintain();
        return store_->Stats().hits[static_cast<size_t>(Source::kDdr)] - before;
      };
      for (int turn = 0; turn < 40; ++turn) read();
      for (int turn = 0; turn < 10; ++turn) {
        ASSERT_GT(read(), keys.size() * 9 / 10) << "table " << table << " of " << ddr;
      }
      Whole();
    }
  }
}

// --- budgets of tables

// Four tables, all of whose rows are wanted in DDR; one has room of its own, one of its own without
// an SSD tier, two share the rest.
TEST_F(ResidencyTest, NoInsertTakesATableOrAnotherOverItsBudget) {
  const RowLayout wide{4, 16, DType::kFp32};
  StoreOptions options =
      Options({MakeTable("user", 1, wide, 2), MakeTable("item", 2, wide, 1),
               MakeTable("shop", 3, {2, 4, DType::kFp32}, 1), MakeTable("page", 4, wide, 1)},
              16 * kMiB, 96 * kMiB);
  options.devices = 2;
  options.table_budgets = {{"user", {5 * kMiB, 48 * kMiB}}, {"shop", {3 * kMiB, 0}}};
  Open(options);
  const auto usage = [&](uint32_t t, uint32_t d) { return store_->UsageOf(t, d); };
  ASSERT_EQ(usage(0, 0).budget_bytes, 5 * kMiB / 2);
  ASSERT_EQ(usage(2, 1).budget_bytes, 3 * kMiB / 2);
  ASSERT_EQ(usage(1, 0).budget_bytes, 4 * kMiB);
  ASSERT_EQ(usage(3, 0).budget_bytes, 4 * kMiB);

  // At every moment, seen from another thread.
  std::atomic<bool> done{false};
  std::atomic<uint64_t> looks{0};
  std::atomic<uint64_t> over{0};
  std::thread watcher([&] {
    while (!done) {
      for (uint32_t t = 0; t < 4; ++t) {
        for (uint32_t d = 0; d < 2; ++d) {
          const Store::Usage now = usage(t, d);
          if (now.budget_used_bytes > now.budget_bytes) ++over;
        }
      }
      ++looks;
    }
  });
  // The neighbours first, and as much as there is of them: nothing of theirs is to shrink later.
  std::mt19937_64 random(5);
  constexpr uint64_t kEnough = 200;
  uint64_t refused = 0;
  for (uint64_t key = 0; key < 2000; ++key) ASSERT_TRUE(Stage(1, 1, key, 15, 1.0F).ok());
  const uint64_t item_rows = usage(1, 0).ddr_rows + usage(1, 1).ddr_rows;
  // Masks of all sizes, keys that come again with another mask, versions, and a table that is full.
  for (uint64_t version = 1; version <= 4; ++version) {
    for (int i = 0; i < (version == 1 ? 60000 : 2000); ++i) {
      const auto live = static_cast<uint16_t>(1 + random() % 15);
      const Status user = Stage(version, 0, random() % 30000, live, 2.0F);
      ASSERT_TRUE(user.ok()) << user.ToString();
      if (refused == kEnough) continue;  // each costs a search for room
      const Status shop =
          Stage(version, 2, random() % 200000, static_cast<uint16_t>(1 + i % 3), 3.0F);
      ASSERT_TRUE(shop.ok() || shop.code() == Code::kResourceExhausted) << shop.ToString();
      refused += shop.ok() ? 0 : 1;
    }
    ASSERT_TRUE(store_->Commit(version).ok());
    Whole();
  }
  done = true;
  watcher.join();
  EXPECT_GT(looks, 0U);
  EXPECT_EQ(over, 0U);
  EXPECT_GT(usage(0, 0).ssd_rows, 0U);
  EXPECT_EQ(usage(2, 0).ssd_rows + usage(2, 1).ssd_rows, 0U) << "shop has no SSD tier";
  EXPECT_GT(refused, 0U) << "shop was never full";
  EXPECT_EQ(store_->Stats().refused_rows, refused);
  // The tables that share have lost nothing, and still have their room.
  EXPECT_EQ(usage(1, 0).ddr_rows + usage(1, 1).ddr_rows, item_rows);
  for (uint64_t key = 0; key < 10000; ++key) ASSERT_TRUE(Stage(5, 3, key, 15, 1.0F).ok());
  EXPECT_EQ(usage(3, 0).ssd_rows + usage(3, 1).ssd_rows, 0U);
}

TEST_F(ResidencyTest, BudgetsThatCannotHoldAreRefusedByName) {
  const RowLayout layout{1, 16, DType::kFp32};
  const std::vector<TableConfig> tables = {MakeTable("user", 1, layout),
                                           MakeTable("item", 2, layout)};
  const auto refusal = [&](const std::map<std::string, TableBudget>& budgets) {
    StoreOptions options = Options(tables, 8 * kMiB, 16 * kMiB);
    options.table_budgets = budgets;
    return Refusal(options);
  };
  EXPECT_NE(refusal({{"itme", {2 * kMiB, 0}}}).find("there is no such table"), std::string::npos);
  EXPECT_NE(refusal({{"item", {1, 0}}}).find("item = 1 is less than"), std::string::npos);
  EXPECT_NE(refusal({{"item", {2 * kMiB, 1}}}).find("ssd_budget_bytes of table item = 1"),
            std::string::npos);
  EXPECT_NE(refusal({{"item", {5 * kMiB, 0}}, {"user", {4 * kMiB, 0}}}).find("exceeds the 8388608"),
            std::string::npos);
  EXPECT_NE(refusal({{"item", {8 * kMiB, 0}}}).find("leave to the others"), std::string::npos);
  EXPECT_NE(refusal({{"item", {2 * kMiB, 16 * kMiB}}}).find("leave to the others"),
            std::string::npos);
  // All tables have their own: nothing need be left.
  StoreOptions options = Options(tables, 8 * kMiB, 16 * kMiB);
  options.table_budgets = {{"item", {4 * kMiB, 8 * kMiB}}, {"user", {4 * kMiB, 8 * kMiB}}};
  Open(options);
  ASSERT_TRUE(Stage(1, 0, 7, 1, 1.0F).ok());
  Whole();
}

// --- policies

// Versions under pins, rows pruned, buckets moved and dropped: whatever orders the rows of DDR
// knows of all that are there and of no other (CheckIntegrity), and no answer depends on it.
class PolicyTest : public ResidencyTest, public ::testing::WithParamInterface<const char*> {};

TEST_P(PolicyTest, RandomVersionsAndMovesUnderAPolicyEqualAMap) {
  const TableConfig table = MakeTable("user", 1, {4, 4, DType::kFp32}, 3);
  StoreOptions options =
      Options({table, MakeTable("item", 2, {1, 8, DType::kFp32}, 1)}, 9 * kMiB, 64 * kMiB);
  options.devices = 2;
  options.hold_all = false;
  options.window_versions = 3;
  options.table_budgets = {{"user", {9 * kMiB / 2, 48 * kMiB, GetParam()}}};
  Open(options);
  std::mt19937 random(7);
  std::map<uint64_t, float> model;
  for (uint32_t b = 0; b < 8; ++b) ASSERT_TRUE(store_->AddBucket(0, b, b % 2, {}).ok());
  constexpr uint64_t kKeys = 40000;
  std::optional<ReadView> pin;
  for (uint64_t version = 1; version <= 12; ++version) {
    for (int i = 0; i < (version == 1 ? 60000 : 2000); ++i) {
      const uint64_t key = random() % kKeys;
      std::vector<std::byte> record;
      if (version > 1 && random() % 4 == 0) {
        AppendRecord({key, 0, RecordKind::kPruned, {}}, &record);
        model.erase(key);
      } else {
        model[key] = static_cast<float>(version);
        record = Record(table, key, static_cast<uint16_t>(random() % 2 == 0 ? 15 : 1),
                        static_cast<float>(version));
      }
      const Status staged = store_->StageRecords(version, 0, BucketOfHash(HashKey(key), 3), record);
      ASSERT_TRUE(staged.ok()) << staged.ToString();
    }
    ASSERT_TRUE(store_->Commit(version).ok());
    pin.reset();
    if (version % 3 == 0) pin.emplace(std::move(*store_->Pin(version)));
    const uint32_t moved = version % 8;
    std::vector<std::byte> rows;
    ASSERT_TRUE(store_->ExportBucket(*store_->PinNewest(), 0, moved, &rows).ok());
    uint32_t to = 1 - *store_->DeviceOf(0, moved);
    if (version % 2 == 0) {
      ASSERT_TRUE(store_->DropBucket(0, moved).ok());
      to = 1 - to;
    }
    const Status added = store_->AddBucket(0, moved, to, rows);
    ASSERT_TRUE(added.ok()) << added.ToString();
    for (int round = 0; round < 8; ++round) {
      std::vector<int64_t> keys;
      // Few keys often: most reads are of rows that were promoted.
      for (int i = 0; i < 400; ++i) {
        keys.push_back(static_cast<int64_t>(random() % (random() % 2 == 0 ? 500 : kKeys)));
      }
      std::vector<float> out(keys.size() * 16);
      ASSERT_TRUE(
          store_->PinNewest()->Lookup({0, keys, Pooling::kNone, {}, out.data(), 16, nullptr}).ok());
      for (size_t k = 0; k < keys.size(); ++k) {
        const auto row = model.find(static_cast<uint64_t>(keys[k]));
        ASSERT_EQ(out[k * 16], row == model.end() ? 0.0F : row->second) << "key " << keys[k];
      }
      store_->Maintain();
    }
    Whole();
  }
  const StoreStats stats = store_->Stats();
  EXPECT_GT(stats.evictions_to_ssd, 0U);
  EXPECT_GT(stats.promotions, 0U);
  EXPECT_EQ(stats.refused_rows, 0U);
}

INSTANTIATE_TEST_SUITE_P(Policies, PolicyTest,
                         ::testing::Values("clock", "clock:2", "lru", "lfu", "s3-fifo", "w-tinylfu",
                                           "reuse-density", "lru:2"));

// Readers tell, the writer replays, and what is evicted beside them is read as it was.
TEST_F(ResidencyTest, ConcurrencyOfReadersAndAPolicy) {
  const TableConfig table = MakeTable("user", 1, {1, 16, DType::kFp32}, 1);
  StoreOptions options = Options({table}, 2 * kMiB, 32 * kMiB);
  options.ddr_policy = "s3-fifo";
  Open(options);
  constexpr uint64_t kKeys = 20000;
  for (uint64_t key = 0; key < kKeys; ++key) {
    ASSERT_TRUE(Stage(1, 0, key, 1, static_cast<float>(key)).ok());
  }
  ASSERT_TRUE(store_->Commit(1).ok());
  std::atomic<bool> done{false};
  std::atomic<uint64_t> wrong{0};
  std::vector<std::thread> readers;
  for (uint32_t r = 0; r < 3; ++r) {
    readers.emplace_back([&, r] {
      std::mt19937 random(r);
      std::vector<int64_t> keys(64);
      std::vector<float> out(64 * 16);
      while (!done) {
        for (int64_t& key : keys) key = random() % (random() % 2 == 0 ? 500 : kKeys);
        const Status read =
            store_->PinNewest()->Lookup({0, keys, Pooling::kNone, {}, out.data(), 16, nullptr});
        for (size_t k = 0; k < keys.size(); ++k) {
          if (!read.ok() || out[k * 16] != static_cast<float>(keys[k])) ++wrong;
        }
        if (store_->Stats().policy_bytes == 0) ++wrong;
      }
    });
  }
  for (int turn = 0; turn < 300; ++turn) store_->Maintain();
  while (store_->Stats().promotions < 1000) store_->Maintain();
  done = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0U);
  Whole();
}

// A trainer's rows too: their optimizer state goes with them, and what is pruned is forgotten.
TEST_F(ResidencyTest, ATrainerUnderAPolicyLearnsAsWithoutBudgets) {
  const RowLayout layout{2, 8, DType::kFp32};
  std::unique_ptr<TrainingStore> store;
  const auto train = [&](const StoreOptions& options) {
    store = std::move(*TrainingStore::Open(options));
    std::mt19937 random(5);
    for (int step = 0; step < 60; ++step) {
      std::vector<int64_t> keys;
      for (int i = 0; i < 500; ++i) {
        keys.push_back(static_cast<int64_t>(random() % (i % 2 == 0 ? 300 : 20000)));
      }
      const std::vector<float> gradients(keys.size() * 16, 0.01F * static_cast<float>(step));
      std::vector<float> out(keys.size() * 16);
      EXPECT_TRUE(
          store->PinNewest()->Lookup({0, keys, Pooling::kNone, {}, out.data(), 16, nullptr}).ok());
      EXPECT_TRUE(store->EnsureRows(0, keys).ok());
      EXPECT_TRUE(ApplyRows(store.get(), 0, keys, gradients, {}).ok());
      EXPECT_TRUE(store->SetLive(0, static_cast<uint64_t>(keys[0]), step % 3).ok());
      if (step % 4 == 0) store->Maintain();
    }
    EXPECT_TRUE(store->CheckIntegrity().ok());
    std::vector<std::byte> rows;
    for (uint32_t b = 0; b < 2; ++b) {
      EXPECT_TRUE(store->ExportBucket(*store->PinNewest(), 0, b, &rows).ok());
    }
    return rows;
  };
  StoreOptions options = Options({MakeTable("user", 1, layout, 1)}, 64 * kMiB, 0);
  const auto want = train(options);
  options.ddr_budget_bytes = 3 * kMiB / 2;
  options.ssd_budget_bytes = 32 * kMiB;
  options.ddr_policy = "s3-fifo";
  EXPECT_EQ(train(options), want);
  EXPECT_GT(store->Stats().promotions, 0U);
}

TEST_F(ResidencyTest, PoliciesThatCannotChooseAreRefused) {
  const RowLayout layout{1, 16, DType::kFp32};
  StoreOptions options =
      Options({MakeTable("user", 1, layout), MakeTable("item", 2, layout)}, 8 * kMiB, 16 * kMiB);
  options.ddr_policy = "lru";
  EXPECT_NE(Refusal(options).find("2 tables share"), std::string::npos);
  options.ddr_policy = "fifo";
  EXPECT_NE(Refusal(options).find("does not exist"), std::string::npos);
  options.ddr_policy = kDefaultDdrPolicy;
  // Also where no row could leave. Only simulations have utilities.
  options.table_budgets = {{"item", {2 * kMiB, 0, "utility:3"}}};
  EXPECT_NE(Refusal(options).find("there are reuse-density"), std::string::npos);
  options.table_budgets = {{"item", {2 * kMiB, 0, "lru"}}};
  EXPECT_NE(Refusal(options).find("nothing to choose"), std::string::npos);
}

TEST_F(ResidencyTest, ExplainSaysWhereARowIsAndCountsNoAccess) {
  const RowLayout layout{4, 8, DType::kFp32};
  StoreOptions options = Options({MakeTable("user", 1, layout, 1)}, 8 * kMiB, 0);
  Open(options);
  ASSERT_TRUE(Stage(1, 0, 5, 0b0101, 1.0F).ok());
  ASSERT_TRUE(Stage(1, 0, 6, 0b1111, 1.0F).ok());
  ASSERT_TRUE(store_->Commit(1).ok());
  ASSERT_TRUE(Stage(2, 0, 5, 0b0100, 1.0F).ok());
  std::vector<std::byte> pruned;
  AppendRecord({6, 0, RecordKind::kPruned, {}}, &pruned);
  ASSERT_TRUE(store_->StageRecords(2, 0, BucketOfHash(HashKey(6), 1), pruned).ok());
  ASSERT_TRUE(store_->Commit(2).ok());
  const auto explain = [&](uint64_t version, uint64_t key) {
    return store_->Pin(version)->Explain(0, key);
  };
  const RowLocation before = explain(1, 5);
  EXPECT_EQ(before.live, 0b0101);
  EXPECT_EQ(before.payload_bytes, 64U);
  EXPECT_EQ(before.slot_bytes, 64U);
  EXPECT_EQ(before.version, 0U) << "of the base";
  const RowLocation after = explain(2, 5);
  EXPECT_TRUE(after.resident);
  EXPECT_EQ(after.tier, Source::kDdr);
  EXPECT_EQ(after.live, 0b0100);
  EXPECT_EQ(after.slot_bytes, 32U);
  EXPECT_EQ(after.version, 2U);
  EXPECT_EQ(after.bucket, BucketOfHash(HashKey(5), 1));
  EXPECT_EQ(after.access_count, before.access_count) << "two looks";
  std::vector<float> out(32);
  const int64_t key = 5;
  for (int i = 0; i < 640; ++i) {  // where counts move no row, one access in 64 counts
    ASSERT_TRUE(store_->PinNewest()
                    ->Lookup({0, {&key, 1}, Pooling::kNone, {}, out.data(), 32, nullptr})
                    .ok());
  }
  EXPECT_GT(explain(2, 5).access_count, after.access_count);
  EXPECT_TRUE(explain(1, 6).resident);
  EXPECT_FALSE(explain(2, 6).resident);
  EXPECT_EQ(explain(2, 6).tier, Source::kPruned);
  EXPECT_EQ(explain(2, 7).tier, Source::kDefault);
}

}  // namespace
}  // namespace embertide
