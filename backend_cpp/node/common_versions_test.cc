// CommonVersions: what a node offers, and what a pin takes by what its peers have.
#include "node/common_versions.h"

#include <gtest/gtest.h>

#include "base/background_task.h"
#include "embertide/serving_store.h"
#include "node/latency_meter.h"
#include "node/load_meter.h"
#include "node/test_model.h"
#include "node/version_gate.h"

namespace embertide {
namespace {

constexpr uint64_t kLineage = 3;

// A node's versions without a node: an empty table, and peers that have what a test says.
class CommonVersionsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    StoreOptions options;
    options.tables = {TestModel().table()};
    options.devices = 1;
    options.ddr_budget_bytes = 16 << 20;
    options.window_versions = 4;
    Result<std::unique_ptr<ServingStore>> store = ServingStore::Open(std::move(options));
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    NodeState::Parts parts;
    parts.options.window_versions = 4;
    parts.tasks = std::make_unique<TaskBoard>();
    parts.store = std::move(*store);
    state_ = std::make_unique<NodeState>(std::move(parts));
    versions_ = std::make_unique<CommonVersions>(state_.get(), [this] { return peers_; });
  }
  // Commits these versions.
  void Commit(uint64_t first, uint64_t last) {
    for (uint64_t number = first; number <= last; ++number) {
      auto info = std::make_shared<VersionInfo>();
      info->number = number;
      info->lineage = kLineage;
      ASSERT_TRUE(state_->Commit(std::move(info)).ok());
    }
  }
  uint64_t Pin() {
    const Result<Pinned> pinned = versions_->Pin();
    EXPECT_TRUE(pinned.ok()) << pinned.status().ToString();
    return pinned.ok() ? pinned.value().info->number : 0;
  }

  std::vector<PeerPool::Range> peers_;
  std::unique_ptr<NodeState> state_;
  std::unique_ptr<CommonVersions> versions_;
};

TEST_F(CommonVersionsTest, APinTakesTheNewestVersionThatMostPeersHave) {
  Commit(5, 8);
  EXPECT_EQ(Pin(), 8U) << "nobody else is there";
  peers_ = {{4, 9, kLineage}, {5, 8, kLineage}};
  EXPECT_EQ(Pin(), 8U);
}

TEST_F(CommonVersionsTest, PeersThatAreBehindAreWaitedForButNotThoseBehindTheLastPin) {
  Commit(5, 7);
  peers_ = {{4, 6, kLineage}, {5, 7, kLineage}};
  EXPECT_EQ(Pin(), 6U);
  peers_ = {{4, 5, kLineage}, {5, 7, kLineage}};
  EXPECT_EQ(Pin(), 7U) << "6 was pinned before";
  EXPECT_EQ(versions_->PinnableNow(), 7U);
}

TEST_F(CommonVersionsTest, AVersionOfAnotherLineageIsAnotherVersion) {
  Commit(5, 7);
  peers_ = {{5, 7, kLineage + 1}};
  EXPECT_EQ(Pin(), 6U);
}

TEST_F(CommonVersionsTest, NoVersionIsOfferedBeforeTheNodeServes) {
  Commit(5, 7);
  EXPECT_FALSE(versions_->Range().has_newest());
  versions_->SetServing(true);
  EXPECT_EQ(versions_->Range().oldest().number(), 5U);
  EXPECT_EQ(versions_->Range().newest().number(), 7U);
  EXPECT_EQ(versions_->Range().newest().lineage(), kLineage);
}

TEST_F(CommonVersionsTest, ANodeIsBehindWhereMostPeersBeginAfterIt) {
  Commit(5, 7);
  peers_ = {{8, 9, kLineage}, {7, 9, kLineage}};
  EXPECT_FALSE(versions_->IsBehindPeers());
  peers_.push_back({8, 8, kLineage});
  EXPECT_TRUE(versions_->IsBehindPeers());
}

}  // namespace
}  // namespace embertide
