// Shares of DDR come with plans and are followed while a node serves.
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <random>
#include <thread>

#include "node/test_fleet.h"

namespace embertide {
namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr uint16_t kDim = 32;  // rows of 128 bytes

class TierSharesTest : public testing::Test {
 protected:
  static constexpr uint64_t kKeys = 30'000;

  TierSharesTest() : directory_(fleet.model.path() + "-shares") {
    std::filesystem::remove_all(directory_);
  }
  ~TierSharesTest() override {
    fleet.Stop(0);
    std::filesystem::remove_all(directory_);
  }
  v1::Plan Plan(uint64_t epoch, uint64_t bytes) const {
    v1::Plan plan = fleet.MakePlan(epoch);
    v1::Device* device = plan.mutable_topology()->mutable_nodes(0)->mutable_devices(0);
    for (const auto& [tier, budget] :
         {std::pair(v1::TIER_DDR, 8 * kMiB), std::pair(v1::TIER_SSD, 64 * kMiB)}) {
      v1::TierBudget* added = device->add_budgets();
      added->set_tier(tier);
      added->set_budget_bytes(budget);
    }
    if (bytes > 0) {
      v1::TierShare* share = plan.add_tier_shares();
      share->mutable_device();
      share->set_tier(v1::TIER_DDR);
      share->set_table_id(fleet.model.table().id);
      share->set_bytes(bytes);
    }
    return plan;
  }
  void Begin(uint64_t bytes) {
    TestModel::Rows rows;
    for (uint64_t key = 0; key < kKeys; ++key) rows[key] = static_cast<float>(key);
    fleet.model.WriteSnapshot({1, 1}, rows);
    fleet.Write(Plan(1, bytes));
    NodeOptions options = fleet.Options(0);
    options.ddr_budget_bytes = 8 * kMiB;
    options.ssd_budget_bytes = 64 * kMiB;
    options.ssd_directory = directory_;
    fleet.Start(0, options);
  }
  uint64_t RowBytes() { return fleet.node(0).store().UsageOf(0, 0).ddr_row_bytes; }

  TestFleet fleet{1, 2, 1, kDim};
  const std::filesystem::path directory_;
};

TEST_F(TierSharesTest, AShareOfANewPlanIsKeptUnderReadsAndNoAnswerChanges) {
  Begin(0);
  const uint64_t begun = RowBytes();
  ASSERT_GT(begun, 3 * kMiB);
  std::atomic<bool> done{false};
  std::atomic<uint64_t> wrong{0};
  std::thread reader([&] {
    std::mt19937 random(1);
    while (!done) {
      std::vector<uint64_t> keys(50);
      for (uint64_t& key : keys) key = random() % kKeys;
      v1::ReadResponse response;
      if (!fleet.Read(0, keys, &response).ok()) ++wrong;
      for (size_t k = 0; k < keys.size(); ++k) {
        if (response.embeddings(static_cast<int>(k * kDim)) != static_cast<float>(keys[k])) ++wrong;
      }
    }
  });
  for (const auto& [epoch, bytes] :
       {std::pair<uint64_t, uint64_t>(2, kMiB), {3, kMiB / 4}, {4, 2 * kMiB}}) {
    fleet.Write(Plan(epoch, bytes));
    EXPECT_TRUE(Await([&] {
      return fleet.node(0).store().UsageOf(0, 0).ddr_share_bytes == bytes && RowBytes() <= bytes;
    })) << bytes;
  }
  // It fills its share by what is read.
  EXPECT_TRUE(Await([&] { return RowBytes() > kMiB; }));
  EXPECT_LE(RowBytes(), 2 * kMiB);
  done = true;
  reader.join();
  EXPECT_EQ(wrong, 0U);
  EXPECT_EQ(fleet.node(0).fleet_stats().refused_shares, 0U);
  const v1::NodeServiceGetLoadResponse load = fleet.Load(0);
  ASSERT_EQ(load.row_rooms_size(), 1);
  EXPECT_GT(load.row_rooms(0).bytes(), 4 * kMiB);
  EXPECT_LT(load.row_rooms(0).bytes(), 8 * kMiB);
  // Away with it.
  fleet.Write(Plan(5, 0));
  EXPECT_TRUE(Await([&] { return fleet.node(0).store().UsageOf(0, 0).ddr_share_bytes == 0; }));
}

TEST_F(TierSharesTest, AnImpossibleShareLeavesTheNodeAtThePlanThatItHas) {
  Begin(kMiB);
  ASSERT_TRUE(Await([&] { return fleet.node(0).store().UsageOf(0, 0).ddr_share_bytes == kMiB; }));
  fleet.Write(Plan(2, 9 * kMiB));
  ASSERT_TRUE(Await([&] { return fleet.node(0).fleet_stats().refused_plans > 0; }));
  EXPECT_EQ(fleet.node(0).store().UsageOf(0, 0).ddr_share_bytes, kMiB);
  // One that the plan's topology allows, and the node's own budget does not.
  v1::Plan plan = Plan(3, 9 * kMiB);
  plan.mutable_topology()
      ->mutable_nodes(0)
      ->mutable_devices(0)
      ->mutable_budgets(0)
      ->set_budget_bytes(16 * kMiB);
  fleet.Write(plan);
  ASSERT_TRUE(Await([&] { return fleet.node(0).fleet_stats().refused_shares == 1; }));
  EXPECT_EQ(fleet.node(0).store().UsageOf(0, 0).ddr_share_bytes, kMiB);
}

}  // namespace
}  // namespace embertide
