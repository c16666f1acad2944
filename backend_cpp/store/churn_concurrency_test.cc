// Readers beside everything that a store does at once: buckets that grow from nothing, versions
// that are staged, committed and folded, rows that are pruned, evicted and promoted, segments that
// are compacted, buckets that move between devices (run under TSan too).
//
// The key and the version alone determine what a key reads as, so that each answer is checked
// where it is read.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <optional>
#include <random>
#include <thread>

#include "embertide/hash.h"
#include "embertide/serving_store.h"
#include "store/test_rows.h"

namespace embertide {
namespace {

constexpr uint64_t kBorn = 150;  // keys that each version adds
constexpr uint64_t kVersions = 24;
constexpr uint32_t kDim = 512;
constexpr uint32_t kDevices = 2;

TableConfig MakeTable() {
  TableConfig table;
  table.name = "item";
  table.layout = {2, kDim / 2, DType::kFp32};
  table.bucket_bits = 3;
  table.default_row.assign(kDim, -1.0F);
  return table;
}

// The version that changed a key last: its first one, and every fourth from there on.
uint64_t LastChange(uint64_t key, uint64_t version) {
  const uint64_t born = 1 + key / kBorn;
  return born + (version - born) / 4 * 4;
}

// The live mask of a key at a version; 0: it has no row.
uint16_t LiveAt(uint64_t key, uint64_t version) {
  if (version < 1 + key / kBorn) return 0;
  return static_cast<uint16_t>(HashKey(key * 64 + LastChange(key, version)) % 4);
}

std::vector<float> ValuesAt(uint64_t key, uint64_t version) {
  const uint16_t live = LiveAt(key, version);
  if (live == 0) return std::vector<float>(kDim, -1.0F);
  std::vector<float> values(kDim, 0.0F);
  for (uint32_t d = 0; d < kDim; ++d) {
    if ((live >> (d / (kDim / 2)) & 1U) != 0) {
      values[d] = static_cast<float>(key % 1000 + LastChange(key, version) * 1000);
    }
  }
  return values;
}

class ChurnConcurrencyTest : public ::testing::TestWithParam<IndexKind> {
 protected:
  ChurnConcurrencyTest()
      : directory_(std::filesystem::temp_directory_path() /
                   ("embertide-churn-" + std::to_string(::getpid()))) {
    StoreOptions options;
    options.tables = {table_};
    options.devices = kDevices;
    options.hold_all = false;
    options.ddr_budget_bytes = 7ULL << 20;
    options.ssd_budget_bytes = 64ULL << 20;
    options.ssd_directory = directory_;
    options.window_versions = 3;
    if (Lean()) MakeLean(&options);
    store_ = std::move(*ServingStore::Open(options));
    for (uint32_t b = 0; b < table_.buckets(); ++b) {
      EXPECT_TRUE(store_->AddBucket(0, b, b % kDevices, {}).ok());
    }
  }
  ~ChurnConcurrencyTest() override {
    store_.reset();
    std::filesystem::remove_all(directory_);
  }

  static bool Lean() { return GetParam() == IndexKind::kLean; }
  void Append(uint64_t key, uint64_t version, std::vector<std::byte>* records) const {
    const uint16_t live = LiveAt(key, version);
    std::vector<std::byte> payload(table_.layout.PayloadBytes(live));
    EncodePayload(table_.layout, live, ValuesAt(key, version).data(), payload.data());
    AppendRecord({key, live, live == 0 ? RecordKind::kPruned : RecordKind::kRow, payload}, records);
  }
  void Publish(uint64_t version) {
    std::vector<std::vector<std::byte>> records(table_.buckets());
    for (uint64_t key = 0; key < version * kBorn; ++key) {
      if (LastChange(key, version) != version) continue;
      Append(key, version, &records[BucketOfHash(HashKey(key), table_.bucket_bits)]);
    }
    for (uint32_t b = 0; b < table_.buckets(); ++b) {
      const Status staged = store_->StageRecords(version, 0, b, records[b]);
      ASSERT_TRUE(staged.ok()) << staged.ToString();
    }
    ASSERT_TRUE(store_->Commit(version).ok());
  }
  // Between versions, a bucket goes to the other device.
  void Move(uint32_t bucket, uint64_t version) {
    std::vector<std::byte> records;
    for (uint64_t key = 0; key < version * kBorn; ++key) {
      if (BucketOfHash(HashKey(key), table_.bucket_bits) != bucket) continue;
      if (LiveAt(key, version) != 0) Append(key, version, &records);
    }
    const Status moved = store_->AddBucket(0, bucket, 1 - *store_->DeviceOf(0, bucket), records);
    if (moved.ok()) ++moves_;
    ASSERT_TRUE(moved.ok() || moved.code() == Code::kBusy) << moved.ToString();
  }

  // Rows and bags of random keys, some not born yet.
  void Check(const ReadView& view, std::mt19937* random) {
    const uint64_t version = view.version();
    std::vector<int64_t> keys(24);
    std::vector<uint32_t> offsets = {0};
    for (int64_t& key : keys) key = static_cast<int64_t>((*random)() % (version * kBorn + 50));
    for (uint32_t at = 0; at < keys.size();) {
      at = std::min<uint32_t>(at + (*random)() % 7, static_cast<uint32_t>(keys.size()));
      offsets.push_back(at);
    }
    std::vector<float> rows(keys.size() * kDim);
    std::vector<float> sums((offsets.size() - 1) * kDim);
    const Status read = view.Lookup({0, keys, Pooling::kNone, {}, rows.data(), kDim, nullptr});
    const Status pooled =
        view.Lookup({0, keys, Pooling::kSum, offsets, sums.data(), kDim, nullptr});
    if (!read.ok() || !pooled.ok()) {
      ++wrong_;
      return;
    }
    for (size_t k = 0; k < keys.size(); ++k) {
      const auto want = ValuesAt(static_cast<uint64_t>(keys[k]), version);
      if (!std::equal(want.begin(), want.end(), &rows[k * kDim])) ++wrong_;
    }
    for (size_t bag = 0; bag + 1 < offsets.size(); ++bag) {
      for (uint32_t d = 0; d < kDim; d += 9) {
        double sum = 0;
        for (uint32_t k = offsets[bag]; k < offsets[bag + 1]; ++k) sum += rows[k * kDim + d];
        if (sums[bag * kDim + d] != static_cast<float>(sum)) ++wrong_;
      }
    }
    const RowLocation at = view.Explain(0, static_cast<uint64_t>(keys[0]));
    if (at.resident != (LiveAt(static_cast<uint64_t>(keys[0]), version) != 0)) ++wrong_;
    ++answers_;
  }

  void ReadUntilStopped(uint32_t seed) {
    std::mt19937 random(seed);
    std::optional<ReadView> held;  // for some reads, while versions pass it by
    uint64_t last = 0;
    while (!stop_) {
      auto view = store_->PinNewest();
      if (!view.ok() || view.value().version() < last) {
        ++wrong_;
        continue;
      }
      last = view.value().version();
      Check(view.value(), &random);
      if (held) Check(*held, &random);
      if (random() % 16 == 0) held = std::move(*view);
      if (random() % 64 == 0) held.reset();
    }
  }

  const TableConfig table_ = MakeTable();
  std::filesystem::path directory_;
  std::unique_ptr<ServingStore> store_;
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> wrong_{0};
  std::atomic<uint64_t> answers_{0};
  uint64_t moves_ = 0;
};

TEST_P(ChurnConcurrencyTest, EveryAnswerIsThatOfItsVersion) {
  Publish(1);
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < 3; ++r) threads.emplace_back([this, r] { ReadUntilStopped(r); });
  threads.emplace_back([this] {  // what a node does beside its executions
    while (!stop_) {
      store_->Maintain();
      uint64_t rows = 0;
      for (uint32_t d = 0; d < kDevices; ++d) rows += store_->UsageOf(0, d).ssd_rows;
      const auto view = store_->PinNewest();
      const auto size = store_->BucketSizeOf(view.value(), 0, 1);
      if (!size || store_->Stats().ddr_budget_bytes == rows) ++wrong_;
    }
  });
  for (uint64_t version = 2; version <= kVersions; ++version) {
    Publish(version);
    Move(version % table_.buckets(), version);
    if (version % 5 == 0) store_->Forget(version);
    if (HasFatalFailure()) break;
  }
  stop_ = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong_, 0U);
  EXPECT_GT(answers_, 30U);
  EXPECT_GT(moves_, 3U);
  EXPECT_EQ(store_->Stats().evictions_to_ssd > 0U, !Lean());
  EXPECT_EQ(store_->Stats().promotions > 0U, !Lean());
  EXPECT_EQ(store_->Stats().refused_rows, 0U);
  const Status integrity = store_->CheckIntegrity();
  EXPECT_TRUE(integrity.ok()) << integrity.ToString();
}

INSTANTIATE_TEST_SUITE_P(Index, ChurnConcurrencyTest,
                         ::testing::Values(IndexKind::kPlain, IndexKind::kLean), IndexNameOf);

}  // namespace
}  // namespace embertide
