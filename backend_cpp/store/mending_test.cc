// Rows of bad SSD blocks are brought again: each reads as what it is at its version, the others
// stay where they are.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <random>

#include "embertide/hash.h"
#include "embertide/serving_store.h"
#include "ssd/bad_blocks.h"
#include "ssd/faulty_file.h"

namespace embertide {
namespace {

constexpr uint32_t kDim = 32;
constexpr uint64_t kKeys = 20'000;
constexpr uint32_t kBits = 2;

class MendingTest : public ::testing::TestWithParam<const char*> {
 protected:
  using Rows = std::map<uint64_t, float>;  // key -> its value at dimension 0

  MendingTest()
      : directory_(std::filesystem::temp_directory_path() /
                   ("embertide-mending-" + std::to_string(::getpid()))) {
    StoreOptions options;
    options.tables.resize(1);
    options.tables[0].name = "item";
    options.tables[0].id = 1;
    options.tables[0].layout = {1, kDim, DType::kFp32};
    options.tables[0].bucket_bits = kBits;
    options.ddr_budget_bytes = 2ULL << 20;
    options.ssd_budget_bytes = 32ULL << 20;
    options.ssd_directory = directory_;
    options.ssd_compaction_bytes_per_s = 0;
    options.ddr_policy = GetParam();
    options.window_versions = 2;
    options.wrap_ssd = [this](std::unique_ptr<BlockFile> file) {
      return std::make_unique<FaultyBlockFile>(std::move(file), &faults_);
    };
    store_ = std::move(*ServingStore::Open(options));
  }
  ~MendingTest() override { std::filesystem::remove_all(directory_); }

  static std::vector<std::byte> Records(const Rows& rows, uint32_t bucket) {
    std::vector<std::byte> records;
    for (const auto& [key, value] : rows) {
      if (BucketOfHash(HashKey(key), kBits) != bucket) continue;
      std::vector<float> values(kDim);
      for (uint32_t d = 0; d < kDim; ++d) values[d] = value + static_cast<float>(d);
      std::vector<std::byte> payload(sizeof(float) * kDim);
      EncodePayload({1, kDim, DType::kFp32}, 1, values.data(), payload.data());
      AppendRecord({key, 1, RecordKind::kRow, payload}, &records);
    }
    return records;
  }
  // Makes the next version, of which these rows are new.
  void Write(const Rows& changes) {
    Rows rows = versions_.empty() ? Rows() : versions_.rbegin()->second;
    const uint64_t version = versions_.empty() ? 1 : versions_.rbegin()->first + 1;
    for (const auto& [key, value] : changes) rows[key] = value;
    for (uint32_t b = 0; b < 1U << kBits; ++b) {
      const Status staged = store_->StageRecords(version, 0, b, Records(changes, b));
      ASSERT_TRUE(staged.ok()) << staged.ToString();
    }
    ASSERT_TRUE(store_->Commit(version).ok());
    versions_[version] = std::move(rows);
  }
  void WriteAll() {
    Rows rows;
    for (uint64_t key = 0; key < kKeys; ++key) rows[key] = static_cast<float>(key % 1000);
    Write(rows);
  }
  Status Check(const ReadView& view, std::span<const int64_t> keys) const {
    std::vector<float> out(keys.size() * kDim);
    const Status read = view.Lookup({0, keys, Pooling::kNone, {}, out.data(), kDim, nullptr});
    for (size_t i = 0; read.ok() && i < out.size(); ++i) {
      const auto key = static_cast<uint64_t>(keys[i / kDim]);
      EXPECT_EQ(out[i], versions_.at(view.version()).at(key) + static_cast<float>(i % kDim)) << key;
    }
    return read;
  }
  // Reads every key; how many could not be read for a bad block.
  uint64_t CountBad(const ReadView& view) const {
    std::vector<int64_t> keys;
    for (const auto& row : versions_.at(view.version())) {
      keys.push_back(static_cast<int64_t>(row.first));
    }
    uint64_t bad = 0;
    for (std::span<const int64_t> rest(keys); !rest.empty();) {
      const auto some = rest.first(std::min<size_t>(rest.size(), 250));
      rest = rest.subspan(some.size());
      if (Check(view, some).ok()) continue;
      for (const int64_t key : some) {
        const Status read = Check(view, {&key, 1});
        if (read.ok()) continue;
        EXPECT_EQ(read.code(), Code::kCorrupt) << read.ToString();
        ++bad;
      }
    }
    return bad;
  }
  ReadView Newest() const { return std::move(*store_->PinNewest()); }
  void MendAll(const ReadView& view) {
    for (uint32_t b = 0; b < 1U << kBits; ++b) {
      const Status mended = store_->Mend(view, 0, b, Records(versions_.at(view.version()), b));
      ASSERT_TRUE(mended.ok()) << mended.ToString();
    }
  }
  void ExpectWhole() const {
    const Status integrity = store_->CheckIntegrity();
    EXPECT_TRUE(integrity.ok()) << integrity.ToString();
  }

  std::filesystem::path directory_;
  Faults faults_;
  std::unique_ptr<ServingStore> store_;
  std::map<uint64_t, Rows> versions_;
};

TEST_P(MendingTest, RowsOfABadBlockComeAgainAndNoOther) {
  WriteAll();
  faults_.Put(5, Fault::kBitFlip, 12345);
  const uint64_t bad = CountBad(Newest());
  ASSERT_GT(bad, 10U);
  auto blocks = store_->FindBadBlocks();
  ASSERT_EQ(blocks.size(), 1U);
  EXPECT_EQ(blocks[0].file, (directory_ / "device-0.log").string());
  EXPECT_EQ(blocks[0].offset, 5U * 4096);
  EXPECT_EQ(blocks[0].rows.size(), bad);
  for (const BadBlock::Row& row : blocks[0].rows) {
    EXPECT_EQ(row.bucket, BucketOfHash(HashKey(row.key), kBits));
  }
  EXPECT_EQ(store_->Stats().ssd.bad_blocks, 1U);
  MendAll(Newest());
  // The block is bad still, and nothing lies in it.
  EXPECT_EQ(CountBad(Newest()), 0U);
  EXPECT_TRUE(store_->FindBadBlocks().empty());
  EXPECT_EQ(store_->Stats().ssd.mended_rows, bad);
  ExpectWhole();
  MendAll(Newest());
  EXPECT_EQ(store_->Stats().ssd.mended_rows, bad);
}

// Rows change while they are mended: a pin gets its own version's bytes, the newest its own.
TEST_P(MendingTest, VersionsThatComeMeanwhileKeepTheirRows) {
  WriteAll();
  std::mt19937 random(3);
  for (uint64_t round = 0; round < 6; ++round) {
    for (uint32_t n = 0; n < 8; ++n) faults_.Put(random() % 300, Fault::kBitFlip, random() % 32768);
    const ReadView before = Newest();
    const uint64_t bad = CountBad(before);
    ASSERT_GT(bad, 0U);
    const auto blocks = store_->FindBadBlocks();
    Rows changes;
    for (size_t n = 0; n < blocks[0].rows.size() / 2; ++n) {
      changes[blocks[0].rows[n].key] = 2000 + static_cast<float>(round);
    }
    for (uint32_t n = 0; n < 500; ++n) changes[random() % kKeys] = 3000 + static_cast<float>(round);
    Write(changes);
    const ReadView after = Newest();
    MendAll(before);
    EXPECT_EQ(CountBad(before), 0U);
    EXPECT_EQ(CountBad(after), 0U);
    EXPECT_EQ(CountBad(Newest()), 0U);
    ExpectWhole();
  }
  EXPECT_TRUE(store_->FindBadBlocks().empty());
}

TEST_P(MendingTest, WhatCannotBeProvedIsRefused) {
  WriteAll();
  faults_.Put(5, Fault::kShortRead);
  ASSERT_GT(CountBad(Newest()), 0U);
  const BadBlock::Row row = store_->FindBadBlocks()[0].rows[0];
  Rows lacking = versions_.at(1);
  lacking.erase(row.key);
  const Status mended = store_->Mend(Newest(), 0, row.bucket, Records(lacking, row.bucket));
  EXPECT_EQ(mended.code(), Code::kNotFound);
  EXPECT_NE(mended.message().find("key " + std::to_string(row.key) + " of table item"),
            std::string::npos)
      << mended.ToString();
  // A bucket that came after the pin has other rows than the pin's version.
  const ReadView before = Newest();
  Write({{1, 1.0F}});
  ASSERT_TRUE(store_->DropBucket(0, row.bucket).ok());
  ASSERT_TRUE(store_->AddBucket(0, row.bucket, 0, Records(versions_.at(2), row.bucket)).ok());
  EXPECT_EQ(store_->Mend(before, 0, row.bucket, {}).code(), Code::kNotOwner);
  ExpectWhole();
}

TEST_P(MendingTest, ASegmentThatIsUsedAgainIsNotTakenForBad) {
  WriteAll();
  faults_.Put(5, Fault::kBitFlip, 12345);
  ASSERT_GT(CountBad(Newest()), 0U);
  faults_.Clear();
  const auto bad = store_->FindBadBlocks();
  ASSERT_EQ(bad.size(), 1U);
  // All rows change until the first segment is free, and taken again.
  for (uint64_t n = 0; n < 30; ++n) {
    Rows rows;
    for (uint64_t key = n % 10; key < kKeys; key += 10) rows[key] = static_cast<float>(n);
    ASSERT_NO_FATAL_FAILURE(Write(rows));
  }
  EXPECT_TRUE(store_->FindBadBlocks().empty());
  EXPECT_EQ(CountBad(Newest()), 0U);
  EXPECT_EQ(store_->Stats().ssd.mended_rows, 0U);
}

INSTANTIATE_TEST_SUITE_P(Policies, MendingTest, ::testing::Values("clock", "lru"));

TEST(BadBlocksTest, TheyAreBoundedAndWhatFindsNoRoomIsCounted) {
  BadBlocks bad;
  for (uint64_t n = 0; n < BadBlocks::kMost + 3; ++n) {
    bad.Note(n);
    bad.Note(0);
  }
  EXPECT_EQ(bad.blocks().size(), BadBlocks::kMost);
  EXPECT_EQ(bad.found(), BadBlocks::kMost);
  EXPECT_EQ(bad.dropped(), 3U);
  bad.Forget(0, 10);
  EXPECT_EQ(*bad.blocks().begin(), 10U);
  bad.Note(3);
  EXPECT_EQ(bad.blocks().size(), BadBlocks::kMost - 9);
}

}  // namespace
}  // namespace embertide
