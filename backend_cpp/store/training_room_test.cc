// The contents of a trainer's tiers: rows that new keys wait for, and room that pruning frees.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "store/test_residency.h"
#include "store/test_rows.h"

namespace embertide {
namespace {

// --- rows of new keys

class TrainingRoomTest : public TieredStoreTest<TrainingStore> {};

TEST_F(TrainingRoomTest, AKeyGetsItsRowAtItsThirdOccurrence) {
  const RowLayout layout{1, 8, DType::kFp32};
  StoreOptions options =
      Options({MakeTable("user", 1, layout, 1), MakeTable("item", 2, layout)}, 4 * kMiB, 0);
  options.tables[0].default_row.assign(8, 0.5F);
  options.new_row_accesses = 3;
  EXPECT_NE(ServingStore::Open(options).status().message().find("new_row_accesses = 3"),
            std::string::npos);
  options.new_row_accesses = 16;
  EXPECT_NE(Refusal(options).find("new_row_accesses = 16"), std::string::npos);
  options.new_row_accesses = 3;
  Open(options);
  const std::vector<float> gradients(size_t{3} * 8, 1.0F);
  const auto value = [&](int64_t key) {
    std::vector<float> out(8);
    EXPECT_TRUE(store_->PinNewest()
                    ->Lookup({0, {&key, 1}, Pooling::kNone, {}, out.data(), 8, nullptr})
                    .ok());
    return out[0];
  };
  // Twice in one batch; in another table it is another key.
  EXPECT_EQ(*store_->EnsureRows(0, std::vector<int64_t>{7, 8, 7}), 0U);
  EXPECT_EQ(*store_->EnsureRows(1, std::vector<int64_t>{7, 7}), 0U);
  EXPECT_EQ(store_->Stats().new_keys_waiting, 5U);
  // A gradient is an occurrence too.
  EXPECT_EQ(*ApplyRows(store_.get(), 0, std::vector<int64_t>{8}, gradients, {}), 0U);
  EXPECT_EQ(store_->Stats().new_keys_waiting, 6U);
  EXPECT_EQ(store_->Stats().dropped_gradients, 1U);
  EXPECT_EQ(value(7), 0.5F);
  EXPECT_EQ(*ApplyRows(store_.get(), 0, std::vector<int64_t>{7, 9, 7}, gradients, {}), 1U);
  EXPECT_NE(value(7), 0.5F);
  EXPECT_EQ(value(8), 0.5F);
  EXPECT_EQ(value(9), 0.5F);
  EXPECT_EQ(store_->Stats().new_keys_waiting, 7U);
  EXPECT_EQ(store_->Stats().dropped_gradients, 2U);
  EXPECT_EQ(*store_->EnsureRows(0, std::vector<int64_t>{7, 8}), 1U);
  Whole();
  // A stream of keys that never come again makes no rows to speak of.
  std::mt19937_64 random(9);
  uint64_t made = 0;
  for (int i = 0; i < 3000; ++i) {
    const auto key = static_cast<int64_t>(random());
    made += *store_->EnsureRows(0, {&key, 1});
  }
  EXPECT_LT(made, 100U) << "of 3,000 keys that were there once, by chance of the sketch";
  Whole();
}

// --- bytes that pruning frees

// A full training store loses nine tenths of its chunks; rows of one chunk then find all the room
// that was freed, but for what the moving of rows may waste.
TEST_F(TrainingRoomTest, ChunksThatArePrunedMakeRoomForOtherRows) {
  const RowLayout layout{10, 16, DType::kFp32};
  StoreOptions options = Options({MakeTable("user", 1, layout, 4)}, 32 * kMiB, 0);
  Open(options);
  std::vector<int64_t> keys;
  for (int64_t key = 0;; ++key) {
    const auto made = store_->EnsureRows(0, {&key, 1});
    if (!made.ok()) {
      ASSERT_EQ(made.status().code(), Code::kResourceExhausted);
      break;
    }
    keys.push_back(key);
  }
  ASSERT_GT(keys.size(), 35000U);
  std::mt19937 random(3);
  for (const int64_t key : keys) {
    const Status pruned =
        store_->SetLive(0, static_cast<uint64_t>(key), static_cast<uint16_t>(1U << random() % 10));
    ASSERT_TRUE(pruned.ok()) << pruned.ToString();
  }
  Whole();
  // One more chunk would need 64 bytes and its aux: what a row costs is page bytes and its entry.
  const uint32_t one_chunk = layout.PayloadBytes(1);
  uint64_t filled = 0;
  const TableConfig& table = options.tables[0];
  for (uint64_t key = 1'000'000;; ++key, ++filled) {
    const uint32_t bucket = BucketOfHash(HashKey(key), table.bucket_bits);
    if (!store_->ImportRecords(0, bucket, Record(table, key, 1, 1.0F)).ok()) break;
  }
  Whole();
  const Store::Usage usage = store_->UsageOf(0, 0);
  EXPECT_EQ(usage.ddr_rows, keys.size() + filled);
  constexpr uint32_t kAux = 8 + 4 * 10;
  const uint64_t live = usage.ddr_rows * (one_chunk + kAux);
  const StoreStats stats = store_->Stats();
  // All but a twentieth of the budget is rows and index.
  EXPECT_LE(stats.ddr_payload_bytes - live, stats.ddr_payload_bytes / 20)
      << "page bytes " << stats.ddr_payload_bytes << ", rows " << live;
  EXPECT_GE(live + stats.index_bytes, stats.ddr_budget_bytes * 95 / 100)
      << "rows " << live << " index " << stats.index_bytes;
}

// Keys that are pruned leave a note until TakeChanges. The notes are of the budget (CheckIntegrity
// adds up what is charged), rows of a full store can be pruned for all that, and to prune the same
// keys over and over takes no more than to prune each once.
TEST_F(TrainingRoomTest, NotesOfPrunedKeysAreOfTheBudget) {
  StoreOptions options = Options({MakeTable("user", 1, {1, 4, DType::kFp32}, 1)}, 8 * kMiB, 0);
  Open(options);
  std::vector<int64_t> keys;
  for (int64_t key = 0; store_->EnsureRows(0, {&key, 1}).ok(); ++key) keys.push_back(key);
  ASSERT_GT(keys.size(), 50'000U);
  std::vector<std::byte> records;
  for (uint32_t b = 0; b < 2; ++b) ASSERT_TRUE(store_->TakeChanges(0, b, &records).ok());
  std::mt19937 random(3);
  std::shuffle(keys.begin(), keys.end(), random);
  const auto check = [&] {
    const Status integrity = store_->CheckIntegrity();
    ASSERT_TRUE(integrity.ok()) << integrity.ToString();
  };
  const auto prune = [&](int64_t key) {
    const Status pruned = store_->SetLive(0, static_cast<uint64_t>(key), 0);
    ASSERT_TRUE(pruned.ok()) << pruned.ToString();
  };
  for (size_t i = 0; i < keys.size(); ++i) {
    ASSERT_NO_FATAL_FAILURE(prune(keys[i])) << i << " of " << keys.size();
    if (i % 2000 != 0) continue;
    ASSERT_NO_FATAL_FAILURE(check());
  }
  const uint64_t noted = store_->UsageOf(0, 0).budget_used_bytes;
  const auto taken = [&] {
    std::set<uint64_t> pruned;
    for (uint32_t b = 0; b < 2; ++b) {
      records.clear();
      EXPECT_TRUE(store_->TakeChanges(0, b, &records).ok());
      for (std::span<const std::byte> rest = records; !rest.empty();) {
        const auto record = ReadRecord(options.tables[0].layout, &rest);
        EXPECT_EQ(record.value().kind, RecordKind::kPruned);
        EXPECT_TRUE(pruned.insert(record.value().key).second);
      }
    }
    return pruned.size();
  };
  EXPECT_EQ(taken(), keys.size());
  check();
  EXPECT_LE(store_->UsageOf(0, 0).budget_used_bytes + keys.size() * 16, noted)
      << "what the notes took";
  const uint64_t before = store_->Stats().index_bytes;
  for (int turn = 0; turn < 2000; ++turn) {
    for (int64_t key = 0; key < 10; ++key) {
      ASSERT_TRUE(store_->EnsureRows(0, {&key, 1}).ok());
      ASSERT_NO_FATAL_FAILURE(prune(key));
    }
  }
  check();
  EXPECT_LE(store_->Stats().index_bytes, before + 4 * 4096);
  EXPECT_EQ(taken(), 10U);
  EXPECT_EQ(store_->Stats().index_bytes, before);
}

}  // namespace
}  // namespace embertide
