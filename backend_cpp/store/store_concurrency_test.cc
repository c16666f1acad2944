// Readers beside a writer: every row of every answer is of the pinned version (run under TSan too).
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <random>
#include <thread>

#include "embertide/hash.h"
#include "embertide/serving_store.h"
#include "store/test_rows.h"

namespace embertide {
namespace {

// Two versions of the window alone are 3 MB: the budget below does not hold them.
constexpr uint64_t kKeys = 6000;

// Every value of every row is the version, so a row of another version shows in one number.
std::vector<std::byte> RowOfVersion(const TableConfig& table, uint64_t key, uint64_t version) {
  const std::vector<float> values(table.layout.dim(), static_cast<float>(version));
  std::vector<std::byte> payload(table.layout.PayloadBytes(3));
  EncodePayload(table.layout, 3, values.data(), payload.data());
  std::vector<std::byte> record;
  AppendRecord({key, 3, RecordKind::kRow, payload}, &record);
  return record;
}

class ConcurrencyTest : public ::testing::TestWithParam<IndexKind> {
 protected:
  ConcurrencyTest()
      : directory_(std::filesystem::temp_directory_path() /
                   ("embertide-race-" + std::to_string(::getpid()))) {
    StoreOptions options;
    table_.name = "item";
    table_.layout = {2, 32, DType::kFp32};
    table_.bucket_bits = 3;
    options.tables = {table_};
    options.devices = 2;
    options.ddr_budget_bytes = 7ULL << 19;
    options.ssd_budget_bytes = 64ULL << 20;
    options.ssd_directory = directory_;
    options.window_versions = 2;
    if (Lean()) MakeLean(&options);
    store_ = std::move(*ServingStore::Open(options));
  }
  ~ConcurrencyTest() override {
    store_.reset();
    std::filesystem::remove_all(directory_);
  }
  static bool Lean() { return GetParam() == IndexKind::kLean; }
  void Publish(uint64_t version) {
    for (uint64_t key = 0; key < kKeys; ++key) {
      const uint32_t bucket = BucketOfHash(HashKey(key), table_.bucket_bits);
      const Status staged =
          store_->StageRecords(version, 0, bucket, RowOfVersion(table_, key, version));
      ASSERT_TRUE(staged.ok()) << staged.ToString();
    }
    ASSERT_TRUE(store_->Commit(version).ok());
  }
  // Looks up a batch and counts rows that are not of the view's version.
  uint64_t MixedRows(const ReadView& view, std::mt19937* random) const {
    std::vector<int64_t> keys(256);
    for (int64_t& key : keys) key = static_cast<int64_t>((*random)() % kKeys);
    std::vector<float> out(keys.size() * 64);
    const Status status = view.Lookup({0, keys, Pooling::kNone, {}, out.data(), 64, nullptr});
    EXPECT_TRUE(status.ok()) << status.ToString();
    uint64_t mixed = 0;
    for (const float value : out) mixed += value == static_cast<float>(view.version()) ? 0 : 1;
    return mixed;
  }
  std::filesystem::path directory_;
  TableConfig table_;
  std::unique_ptr<ServingStore> store_;
};

TEST_P(ConcurrencyTest, NoAnswerMixesVersionsAndNoneGoesBack) {
  Publish(1);
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> mixed{0};
  std::atomic<uint64_t> back{0};
  std::atomic<uint64_t> answers{0};
  std::vector<std::thread> readers;
  for (uint32_t r = 0; r < 3; ++r) {
    readers.emplace_back([&, r] {
      std::mt19937 random(r);
      uint64_t last = 0;
      while (!stop) {
        const auto view = store_->PinNewest();
        ASSERT_TRUE(view.ok());
        if (view.value().version() < last) ++back;
        last = view.value().version();
        mixed += MixedRows(view.value(), &random);
        ++answers;
      }
    });
  }
  std::thread maintainer([&] {
    while (!stop) store_->Maintain();
  });
  for (uint64_t version = 2; version <= 12; ++version) Publish(version);
  stop = true;
  for (std::thread& reader : readers) reader.join();
  maintainer.join();
  EXPECT_EQ(mixed, 0U);
  EXPECT_EQ(back, 0U);
  EXPECT_GT(answers, 10U);
  const Status integrity = store_->CheckIntegrity();
  EXPECT_TRUE(integrity.ok()) << integrity.ToString();
  const StoreStats stats = store_->Stats();
  EXPECT_EQ(stats.hits[static_cast<size_t>(Source::kSsd)] + stats.evictions_to_ssd > 0U, !Lean());
}

// The check above can fail: one row that carries another version is found.
TEST_P(ConcurrencyTest, OneRowAppliedEarlyIsFound) {
  Publish(1);
  const uint32_t bucket = BucketOfHash(HashKey(17), table_.bucket_bits);
  ASSERT_TRUE(store_->StageRecords(2, 0, bucket, RowOfVersion(table_, 17, 3)).ok());
  for (uint64_t key = 0; key < kKeys; ++key) {
    if (key == 17) continue;
    const uint32_t b = BucketOfHash(HashKey(key), table_.bucket_bits);
    ASSERT_TRUE(store_->StageRecords(2, 0, b, RowOfVersion(table_, key, 2)).ok());
  }
  ASSERT_TRUE(store_->Commit(2).ok());
  std::mt19937 random(1);
  uint64_t mixed = 0;
  for (int i = 0; i < 200; ++i) mixed += MixedRows(*store_->PinNewest(), &random);
  EXPECT_GT(mixed, 0U);
}

TEST_P(ConcurrencyTest, ALongPinKeepsItsVersionWhileTheWindowMovesOn) {
  Publish(1);
  auto pinned = store_->Pin(1);
  ASSERT_TRUE(pinned.ok());
  for (uint64_t version = 2; version <= 4; ++version) Publish(version);
  std::mt19937 random(1);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(MixedRows(pinned.value(), &random), 0U);
  EXPECT_EQ(store_->Pin(1).status().code(), Code::kVersionGone);
}

INSTANTIATE_TEST_SUITE_P(Index, ConcurrencyTest,
                         ::testing::Values(IndexKind::kPlain, IndexKind::kLean), IndexNameOf);

}  // namespace
}  // namespace embertide
