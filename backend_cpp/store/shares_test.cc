// Shares of tables in DDR, set while the store serves.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "store/test_residency.h"

namespace embertide {
namespace {

constexpr RowLayout kRow{1, 32, DType::kFp32};  // 128 bytes

class SharesTest : public ResidencyTest {
 protected:
  // Two tables with room for a part of their rows; the key is the value of its row.
  void Fill(uint64_t keys, uint32_t devices = 1) {
    StoreOptions options = Options({MakeTable("user", 1, kRow, 1), MakeTable("item", 2, kRow, 1)},
                                   4 * kMiB, 64 * kMiB);
    options.devices = devices;
    Open(options);
    for (uint64_t key = 0; key < keys; ++key) {
      for (uint32_t t = 0; t < 2; ++t) {
        const Status staged = Stage(1, t, key, 1, static_cast<float>(key));
        ASSERT_TRUE(staged.ok()) << staged.ToString();
      }
    }
    ASSERT_TRUE(store_->Commit(1).ok());
  }
  // Returns how many of the keys were answered wrongly.
  uint64_t Read(uint32_t table, const std::vector<int64_t>& keys) const {
    std::vector<float> out(keys.size() * 32);
    const Status read =
        store_->PinNewest()->Lookup({table, keys, Pooling::kNone, {}, out.data(), 32, nullptr});
    if (!read.ok()) return keys.size();
    uint64_t wrong = 0;
    for (size_t k = 0; k < keys.size(); ++k) wrong += out[k * 32] != static_cast<float>(keys[k]);
    return wrong;
  }
  uint64_t RowBytes(uint32_t table, uint32_t device = 0) const {
    return store_->UsageOf(table, device).ddr_row_bytes;
  }
  std::string Refused(const std::vector<DdrShare>& shares) {
    const Status status = store_->SetDdrShares(shares);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.message();
  }
  void MaintainUntilWithin(uint64_t user, uint64_t item) {
    for (int turn = 0; turn < 200 && (RowBytes(0) > user || RowBytes(1) > item); ++turn) {
      store_->Maintain();
    }
    ASSERT_LE(RowBytes(0), user);
    ASSERT_LE(RowBytes(1), item);
  }
};

TEST_F(SharesTest, AShareIsKeptAndWhatIsReadComesWithinIt) {
  Fill(20'000);
  const std::vector<DdrShare> shares = {{0, 0, 2 * kMiB}, {1, 0, 512 * 1024}};
  ASSERT_TRUE(store_->SetDdrShares(shares).ok());
  MaintainUntilWithin(2 * kMiB, 512 * 1024);
  Whole();
  // Both are read far beyond their shares, again and again.
  for (int64_t first = 0; first < 20'000; first += 500) {
    std::vector<int64_t> keys;
    for (int64_t k = first; k < first + 500; ++k) keys.push_back(k);
    for (uint32_t t = 0; t < 2; ++t) ASSERT_EQ(Read(t, keys), 0U);
    store_->Maintain();
    ASSERT_LE(RowBytes(0), 2 * kMiB);
    ASSERT_LE(RowBytes(1), 512U * 1024);
  }
  Whole();
  // The share is used, too, and the rows that were read last are there.
  EXPECT_GT(RowBytes(0), kMiB * 3 / 2);
  EXPECT_GT(RowBytes(1), 512U * 1024 * 8 / 10);
}

// Rows of one table that are written and read push out the other's, but where that has a share.
TEST_F(SharesTest, ATableWithAShareGivesNothingToAnother) {
  for (const bool shared : {false, true}) {
    Fill(4'000);
    const uint64_t begun = RowBytes(0);
    ASSERT_EQ(begun, 4'000U * 128) << "all of them are in DDR";
    if (shared) {
      ASSERT_TRUE(store_->SetDdrShares(std::vector<DdrShare>{{0, 0, kMiB}}).ok());
    }
    for (uint64_t key = 4'000; key < 24'000; ++key) {
      const Status staged = Stage(2 + key / 8'000, 1, key, 1, static_cast<float>(key));
      ASSERT_TRUE(staged.ok()) << staged.ToString();
      if (key % 8'000 == 7'999) {
        ASSERT_TRUE(store_->Commit(2 + key / 8'000).ok());
        store_->Maintain();
      }
    }
    for (int64_t first = 0; first < 24'000; first += 500) {
      std::vector<int64_t> keys;
      for (int64_t k = first; k < first + 500; ++k) keys.push_back(k);
      ASSERT_EQ(Read(1, keys), 0U);
      store_->Maintain();
    }
    if (shared) {
      EXPECT_EQ(RowBytes(0), begun);
    } else {
      EXPECT_LT(RowBytes(0), begun / 2);
    }
    EXPECT_GT(RowBytes(1), begun / 2);
    Whole();
  }
}

TEST_F(SharesTest, AShareThatIsLoweredIsEmptiedInStepsAndNeverGrowsMeanwhile) {
  Fill(12'000);
  const uint64_t begun = RowBytes(0);
  ASSERT_GT(begun, kMiB);
  ASSERT_TRUE(store_->SetDdrShares(std::vector<DdrShare>{{0, 0, 128 * 1024}}).ok());
  EXPECT_EQ(RowBytes(0), begun) << "setting it moves nothing";
  EXPECT_EQ(store_->UsageOf(0, 0).ddr_allowed_bytes, begun);
  // Rows that come meanwhile take the place of others.
  for (uint64_t key = 0; key < 500; ++key) ASSERT_TRUE(Stage(2, 0, key, 1, 1.0F).ok());
  EXPECT_LE(RowBytes(0), begun);
  ASSERT_TRUE(store_->Commit(2).ok());
  MaintainUntilWithin(128 * 1024, ~0ULL);
  EXPECT_EQ(store_->UsageOf(0, 0).ddr_allowed_bytes, 128U * 1024);
  Whole();
  // Versions go on in the little room, all of them in chains at first.
  for (uint64_t version = 3; version < 6; ++version) {
    for (uint64_t key = 0; key < 3000; ++key) {
      const Status staged = Stage(version, 0, key, 1, static_cast<float>(key));
      ASSERT_TRUE(staged.ok()) << staged.ToString();
      ASSERT_LE(RowBytes(0), 128U * 1024);
    }
    ASSERT_TRUE(store_->Commit(version).ok());
    Whole();
  }
  // Without a share it takes what there is again.
  ASSERT_TRUE(store_->SetDdrShares({}).ok());
  for (uint64_t key = 0; key < 3000; ++key) ASSERT_TRUE(Stage(6, 0, key, 1, 1.0F).ok());
  EXPECT_GT(RowBytes(0), 300U * 1024);
  ASSERT_TRUE(store_->Commit(6).ok());
  Whole();
}

// Readers and a writer all the while; each share is watched from another thread.
TEST_F(SharesTest, SharesThatChangeUnderReadersChangeNoAnswer) {
  Fill(12'000, 2);
  std::atomic<bool> done{false};
  std::atomic<uint64_t> wrong{0};
  std::atomic<uint64_t> reads{0};
  std::atomic<uint64_t> over{0};
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      std::mt19937 random(r);
      std::vector<int64_t> keys(64);
      while (!done) {
        for (int64_t& key : keys) key = random() % (random() % 2 == 0 ? 500 : 12'000);
        wrong += Read(random() % 2, keys);
        ++reads;
      }
    });
  }
  threads.emplace_back([&] {
    while (!done) {
      for (uint32_t t = 0; t < 2; ++t) {
        for (uint32_t d = 0; d < 2; ++d) {
          const Store::Usage now = store_->UsageOf(t, d);
          if (now.budget_used_bytes > now.budget_bytes) ++over;
        }
      }
    }
  });
  std::mt19937 random(9);
  for (uint64_t turn = 0; turn < 40; ++turn) {
    std::vector<DdrShare> shares;
    for (uint32_t t = 0; t < 2; ++t) {
      for (uint32_t d = 0; d < 2; ++d) {
        if (random() % 4 != 0) shares.push_back({t, d, kMiB / 8 + random() % (kMiB * 3 / 4)});
      }
    }
    ASSERT_TRUE(store_->SetDdrShares(shares).ok());
    for (int i = 0; i < 5; ++i) store_->Maintain();
    for (int i = 0; i < 200; ++i) {  // the same values again
      const uint64_t key = random() % 12'000;
      ASSERT_TRUE(Stage(turn + 2, i % 2, key, 1, static_cast<float>(key)).ok());
    }
    ASSERT_TRUE(store_->Commit(turn + 2).ok());
    for (const DdrShare& each : shares) {
      const Store::Usage now = store_->UsageOf(each.table, each.device);
      ASSERT_LE(now.ddr_row_bytes, now.ddr_allowed_bytes);
    }
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0U);
  EXPECT_EQ(over, 0U);
  EXPECT_GT(reads, 100U);
  EXPECT_GT(store_->Stats().evictions_to_ssd, 0U);
  EXPECT_GT(store_->Stats().promotions, 0U);
  Whole();
}

// The remains of a dropped bucket are no reason to refuse rows of the same table.
TEST_F(SharesTest, ABucketThatIsDroppedLeavesRoomInTheShare) {
  Fill(8'000);
  ASSERT_TRUE(store_->SetDdrShares(std::vector<DdrShare>{{0, 0, 256 * 1024}}).ok());
  MaintainUntilWithin(256 * 1024, ~0ULL);
  ASSERT_TRUE(store_->DropBucket(0, 0).ok());
  ASSERT_TRUE(store_->DropBucket(0, 1).ok());
  ASSERT_TRUE(store_->AddBucket(0, 0, 0, {}).ok());
  ASSERT_TRUE(store_->AddBucket(0, 1, 0, {}).ok());
  for (uint64_t key = 0; key < 4000; ++key) {
    const Status staged = Stage(2, 0, key, 1, 1.0F);
    ASSERT_TRUE(staged.ok()) << staged.ToString();
  }
  ASSERT_TRUE(store_->Commit(2).ok());
  EXPECT_LE(RowBytes(0), 256U * 1024);
  Whole();
}

TEST_F(SharesTest, AnImpossibleShareIsRefusedAndChangesNothing) {
  Fill(2'000);
  ASSERT_TRUE(store_->SetDdrShares(std::vector<DdrShare>{{0, 0, kMiB}}).ok());
  EXPECT_NE(Refused({{2, 0, kMiB}}).find("table 2 does not exist"), std::string::npos);
  EXPECT_NE(Refused({{0, 1, kMiB}}).find("there are 1 devices"), std::string::npos);
  EXPECT_NE(Refused({{0, 0, 100}}).find("user on device 0 = 100 is less than 65536"),
            std::string::npos);
  EXPECT_NE(Refused({{0, 0, kMiB}, {0, 0, kMiB}}).find("stands twice"), std::string::npos);
  EXPECT_NE(Refused({{0, 0, 3 * kMiB}, {1, 0, 2 * kMiB}}).find("exceeds the 4194304"),
            std::string::npos);
  EXPECT_NE(Refused({{0, 0, ~0ULL}, {1, 0, 2 * kMiB}}).find("exceeds the 4194304"),
            std::string::npos);
  EXPECT_EQ(store_->UsageOf(0, 0).ddr_share_bytes, kMiB);
  EXPECT_EQ(store_->UsageOf(1, 0).ddr_share_bytes, 0U);
  StoreOptions options = Options({MakeTable("user", 1, kRow)}, 4 * kMiB, 0);
  Open(options);
  EXPECT_NE(Refused({{0, 0, kMiB}}).find("want of an SSD tier"), std::string::npos);
}

}  // namespace
}  // namespace embertide
