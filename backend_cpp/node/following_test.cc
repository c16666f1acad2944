// Node following a publication: a pin is of one version, a snapshot takes away what it lacks.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "embertide/node.h"
#include "node/test_model.h"

namespace embertide {
namespace {

constexpr uint32_t kDim = TestModel::kDim;
using Rows = TestModel::Rows;

class NodeFollowingTest : public ::testing::Test {
 protected:
  void Open(bool guard = false, uint32_t window = 8) {
    NodeOptions options;
    options.plan_wait = plan_wait_;
    options.log = [this](const std::string& line) {
      const std::lock_guard lock(log_mutex_);
      logged_ += line + "\n";
    };
    options.publication = model_.path();
    options.ddr_budget_bytes = ddr_budget_;
    options.guard = guard;
    options.window_versions = window;
    auto node = Node::Open(options);
    ASSERT_TRUE(node.ok()) << node.status().ToString();
    node_ = std::move(*node);
  }
  // Key's value at a pin; the value is the same in all dimensions.
  static float ValueAt(Pinned* pin, int64_t key) {
    std::vector<float> out(kDim);
    const std::vector<int64_t> keys = {key};
    EXPECT_TRUE(pin->rows.Lookup({0, keys, Pooling::kNone, {}, out.data(), kDim, nullptr}).ok());
    for (const float value : out) EXPECT_EQ(value, out[0]);
    return out[0];
  }
  Rows Served(const std::vector<int64_t>& keys) {
    auto pin = node_->Pin();
    EXPECT_TRUE(pin.ok());
    Rows rows;
    for (const int64_t key : keys) rows[static_cast<uint64_t>(key)] = ValueAt(&*pin, key);
    return rows;
  }
  static bool Await(const std::function<bool()>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }
  // Waits until pins are of version `number`.
  bool WaitFor(uint64_t number) const {
    return Await([&] {
      const auto pin = node_->Pin();
      return pin.ok() && pin.value().info->number == number;
    });
  }

  static bool Eventually(const std::function<bool()>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }

  std::chrono::milliseconds plan_wait_ = NodeOptions().plan_wait;
  uint64_t ddr_budget_ = 16ULL << 20;
  std::string logged() {
    const std::lock_guard lock(log_mutex_);
    return logged_;
  }

  std::mutex log_mutex_;
  std::string logged_;
  TestModel model_;
  std::unique_ptr<Node> node_;  // ends before what it follows
};

TEST_F(NodeFollowingTest, APinNamesTheVersionOfItsRowsWhileVersionsPass) {
  constexpr uint64_t kVersions = 500;
  constexpr uint64_t kKeys = 20;
  const auto all = [](uint64_t n) {
    Rows rows;
    for (uint64_t key = 0; key < kKeys; ++key) rows[key] = static_cast<float>(n);
    return rows;
  };
  model_.WriteSnapshot({1, 1}, all(1));
  for (uint64_t n = 2; n <= kVersions; ++n) model_.WriteDelta({n, 1}, {n - 1, 1}, all(n));
  Open();
  std::atomic<uint64_t> pins{0};
  std::vector<std::thread> readers;
  for (int reader = 0; reader < 3; ++reader) {
    readers.emplace_back([&] {
      uint64_t last = 0;
      while (last < kVersions) {
        auto pin = node_->Pin();
        if (!pin.ok()) {  // the version left the window meanwhile; a caller starts over
          ASSERT_EQ(pin.status().code(), Code::kVersionGone);
          continue;
        }
        ASSERT_EQ(pin->info->number, pin->rows.version());
        ASSERT_GE(pin->info->number, last) << "a version goes back";
        ++pins;
        if (pin->info->number == last) continue;  // pin as often as can be: the moment is short
        last = pin->info->number;
        ASSERT_EQ(ValueAt(&*pin, static_cast<int64_t>(last % kKeys)), static_cast<float>(last));
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_GT(pins, 2U);
}

TEST_F(NodeFollowingTest, ASnapshotTakesAwayTheRowsThatItLacks) {
  model_.WriteSnapshot({1, 1}, {{1, 1}, {2, 1}, {3, 1}, {4, 1}});
  model_.WriteDelta({2, 1}, {1, 1}, {{2, 2}, {5, 2}, {6, 2}});
  Open();
  ASSERT_TRUE(WaitFor(2));
  const std::vector<int64_t> keys = {1, 2, 3, 4, 5, 6, 7};
  EXPECT_EQ(Served(keys), Rows({{1, 1}, {2, 2}, {3, 1}, {4, 1}, {5, 2}, {6, 2}, {7, -1}}));
  // Another lineage, whose deltas are pruned: no chain leads there from version 2.
  model_.WriteSnapshot({9, 2}, {{1, 1}, {2, 9}, {4, 9}, {6, 2}, {7, 9}});
  ASSERT_TRUE(WaitFor(9));
  EXPECT_EQ(Served(keys), Rows({{1, 1}, {2, 9}, {3, -1}, {4, 9}, {5, -1}, {6, 2}, {7, 9}}));
  EXPECT_EQ(node_->newest()->lineage, 2U);
  model_.WriteDelta({10, 2}, {9, 2}, {{3, 10}});
  ASSERT_TRUE(WaitFor(10));
  EXPECT_EQ(Served({3, 5}), Rows({{3, 10}, {5, -1}}));
}

TEST_F(NodeFollowingTest, WithAGuardACandidateAnswersThoseWhoNameItAlone) {
  model_.WriteSnapshot({1, 1}, {{1, 1}});
  model_.WritePromotion(1, 1);
  Open(/*guard=*/true);
  model_.WriteDelta({2, 1}, {1, 1}, {{1, 2}});
  ASSERT_TRUE(Eventually([&] { return node_->newest()->number == 2; }));
  EXPECT_EQ(Served({1}), Rows({{1, 1}}));
  auto candidate = node_->Pin(2);
  ASSERT_TRUE(candidate.ok());
  EXPECT_EQ(ValueAt(&*candidate, 1), 2);
  EXPECT_EQ(node_->guard_stats()->candidate, 2U);
  model_.WritePromotion(2, 2);
  ASSERT_TRUE(WaitFor(2));
  EXPECT_EQ(Served({1}), Rows({{1, 2}}));
}

TEST_F(NodeFollowingTest, TheServedVersionStaysWhileCandidatesFillTheWindow) {
  model_.WriteSnapshot({1, 1}, {{1, 1}});
  model_.WritePromotion(1, 1);
  for (uint64_t n = 2; n <= 9; ++n) {
    model_.WriteDelta({n, 1}, {n - 1, 1}, {{1, static_cast<float>(n)}});
  }
  Open(/*guard=*/true, /*window=*/4);
  ASSERT_TRUE(Eventually([&] { return node_->guard_stats()->holding; }));
  EXPECT_EQ(node_->newest()->number, 4U);
  EXPECT_EQ(Served({1}), Rows({{1, 1}}));
  EXPECT_GT(node_->follower_stats()->held, 0U);
  model_.WritePromotion(2, 9);
  ASSERT_TRUE(WaitFor(9));
  EXPECT_FALSE(node_->guard_stats()->holding);
}

TEST_F(NodeFollowingTest, ARollbackLeadsPastTheVersionsThatItUndid) {
  model_.WriteSnapshot({1, 1}, {{1, 1}, {2, 1}});
  model_.WritePromotion(1, 1);
  for (uint64_t n = 2; n <= 9; ++n) {
    model_.WriteDelta({n, 1}, {n - 1, 1}, {{1, static_cast<float>(n)}});
  }
  Open(/*guard=*/true, /*window=*/4);
  ASSERT_TRUE(Eventually([&] { return node_->guard_stats()->holding; }));
  model_.WriteDelta({10, 2}, {9, 1}, {{1, 1}}, /*rollback_to=*/1);
  model_.WritePromotion(2, 10, R"("withdrawn":[{"first":2,"last":9}],
      "undone":[{"number":10,"to":1}],"totals":{"rollback":1})");
  ASSERT_TRUE(WaitFor(10));
  EXPECT_EQ(Served({1, 2}), Rows({{1, 1}, {2, 1}}));
  EXPECT_EQ(node_->follower_stats()->skipped, 5U) << "versions 5 to 9 never were applied";
  EXPECT_EQ(node_->guard_stats()->withdrawn[4], 1U);
}

TEST_F(NodeFollowingTest, ANodeThatStartsOpensTheSnapshotThatMayBeSeen) {
  model_.WriteSnapshot({1, 1}, {{1, 1}});
  model_.WriteDelta({2, 1}, {1, 1}, {{1, 2}});
  model_.WriteDelta({3, 1}, {2, 1}, {{1, 3}});
  model_.WriteSnapshot({3, 1}, {{1, 3}});
  model_.WritePromotion(1, 2);
  Open(/*guard=*/true);
  ASSERT_TRUE(WaitFor(2));
  EXPECT_EQ(Served({1}), Rows({{1, 2}}));
  EXPECT_EQ(node_->guard_stats()->unguarded, 0U);
}

TEST_F(NodeFollowingTest, ARecordThatFailsItsChecksumChangesNothing) {
  model_.WriteSnapshot({1, 1}, {{1, 1}});
  model_.WritePromotion(1, 1);
  Open(/*guard=*/true);
  model_.WriteDelta({2, 1}, {1, 1}, {{1, 2}});
  TestPublication::Put(model_.path() + "/promoted.json", "EMPRM001 2 00000000\n{}\n");
  ASSERT_TRUE(Eventually([&] { return node_->follower_stats()->corrupt > 0; }));
  ASSERT_TRUE(Eventually([&] { return node_->newest()->number == 2; }));
  EXPECT_EQ(Served({1}), Rows({{1, 1}}));
}

TEST_F(NodeFollowingTest, ANodeThatStartsTakesTheSnapshotOfTheLatestLineage) {
  model_.WriteSnapshot({5, 1}, {{1, 5}});
  model_.WriteSnapshot({4, 2}, {{1, 4}});  // 5 was written by a publisher that was superseded
  model_.WriteDelta({6, 2}, {4, 2}, {{2, 6}});
  Open();
  ASSERT_TRUE(WaitFor(6));
  EXPECT_EQ(Served({1, 2}), Rows({{1, 4}, {2, 6}}));
}

// Before: CORRUPT, or NOT_FOUND, and the node did not start, or stayed at version 3; the rows of
// the bucket that was whole showed in a later version.
TEST_F(NodeFollowingTest, ASnapshotThatIsHarmedOrGoneIsPassedOver) {
  uint64_t first = 1;  // in the bucket that is read first
  while (model_.BucketOf(first) != 0) ++first;
  uint64_t second = 1;
  while (model_.BucketOf(second) == 0) ++second;
  const auto bucket_file = [&](VersionId id, uint32_t bucket) {
    std::vector<std::filesystem::path> files;
    for (const auto& each : std::filesystem::recursive_directory_iterator(
             std::filesystem::path(model_.path()) / "snapshots" / FolderName(id))) {
      if (each.is_regular_file() && each.path().filename() != "manifest.json") {
        files.push_back(each.path());
      }
    }
    std::ranges::sort(files);
    EXPECT_EQ(files.size(), 2U);
    return files.at(bucket);
  };
  model_.WriteSnapshot({3, 1}, {{first, 3}, {second, 3}});
  model_.WriteDelta({4, 1}, {3, 1}, {{second, 4}});
  model_.WriteSnapshot({5, 1}, {{first, 5}, {second, 5}});
  model_.WriteSnapshot({6, 1}, {{first, 6}, {second, 6}});
  std::filesystem::resize_file(bucket_file({5, 1}, 1), 20);
  std::filesystem::remove(bucket_file({6, 1}, 1));
  Open();
  ASSERT_TRUE(WaitFor(4));
  const auto served = [&] {
    return Served({static_cast<int64_t>(first), static_cast<int64_t>(second)});
  };
  EXPECT_EQ(served(), (Rows{{first, 3}, {second, 4}}));
  model_.WriteDelta({7, 1}, {4, 1}, {{second, 7}});
  ASSERT_TRUE(WaitFor(7));
  EXPECT_EQ(served(), (Rows{{first, 3}, {second, 7}}));
}

// It may have answered at version 2 before it was killed. Before: it was ready with version 1.
TEST_F(NodeFollowingTest, ANodeThatLacksWhatWasThereAtItsStartIsNotReady) {
  model_.WriteSnapshot({1, 1}, {{1, 1}});
  model_.WriteDelta({2, 1}, {1, 1}, {{1, 2}});
  for (const auto& each : std::filesystem::directory_iterator(std::filesystem::path(model_.path()) /
                                                              "deltas" / FolderName({2, 1}))) {
    if (each.path().extension() == ".delta") std::filesystem::resize_file(each.path(), 20);
  }
  plan_wait_ = std::chrono::milliseconds(200);
  Open();
  EXPECT_NE(logged().find("it lacks version 2 of lineage 1, which was there at its start"),
            std::string::npos)
      << logged();
  plan_wait_ = std::chrono::seconds(20);
  std::thread trainer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    model_.WriteSnapshot({2, 1}, {{1, 2}});
  });
  {
    const std::lock_guard lock(log_mutex_);
    logged_.clear();
  }
  Open();
  trainer.join();
  EXPECT_EQ(logged().find("begins before"), std::string::npos) << logged();
  EXPECT_EQ(Served({1}), (Rows{{1, 2}}));
}

TEST_F(NodeFollowingTest, ReadyIsANodeThatIsNotFarBehindWhatIsPublished) {
  model_.WriteSnapshot({1, 1}, {{1, 1}});
  model_.WriteDelta({2, 1}, {1, 1}, {{2, 2}}, 0, 5000);
  Open();
  ASSERT_TRUE(WaitFor(2));
  EXPECT_EQ(node_->why_not_ready(), "") << "no trainer runs, and it has all that was published";
  const auto awaits = [&](bool ready) {
    return Await([&] { return node_->why_not_ready().empty() == ready; });
  };
  // A version that no chain leads to, committed a moment later; then one that is far ahead.
  model_.WriteDelta({4, 1}, {3, 1}, {{2, 4}}, 0, 5000 + 60'000);
  model_.WriteDelta({6, 1}, {5, 1}, {{2, 6}}, 0, 5000 + 60'001);
  ASSERT_TRUE(awaits(false));
  EXPECT_NE(node_->why_not_ready().find("version 6 was committed 60001 ms after version 2"),
            std::string::npos)
      << node_->why_not_ready();
  model_.WriteSnapshot({6, 1}, {{1, 1}, {2, 6}}, 5000 + 60'001);
  EXPECT_TRUE(awaits(true));
  EXPECT_EQ(node_->newest()->committed_ms, 5000 + 60'001);
}

TEST_F(NodeFollowingTest, ASnapshotThatDoesNotSayWhenItWasCommittedHasItFromItsDelta) {
  model_.WriteSnapshot({2, 1}, {{1, 1}});
  model_.WriteDelta({2, 1}, {1, 1}, {{1, 1}}, 0, 7000);
  Open();
  EXPECT_EQ(node_->newest()->number, 2U);
  EXPECT_EQ(node_->newest()->committed_ms, 7000);
}

// The manifest lists more rows than fit: the node reads none of its files, and logs that once.
TEST_F(NodeFollowingTest, ASnapshotThatDoesNotFitIsRefusedByItsManifestWithTheNumbers) {
  Rows few;
  for (uint64_t key = 0; key < 100; ++key) few[key] = 1;
  model_.WriteSnapshot({1, 1}, few);
  ddr_budget_ = 4ULL << 20;
  Open();
  ASSERT_TRUE(WaitFor(1));
  Rows many;
  for (uint64_t key = 0; key < 400'000; ++key) many[key] = 2;
  model_.WriteSnapshot({5, 2}, many);
  ASSERT_TRUE(Await([&] { return node_->follower_stats()->backed_off >= 3; }));
  const std::string error = node_->follower_error();
  EXPECT_NE(error.find("version 5 has 399900 rows more than are held"), std::string::npos) << error;
  EXPECT_NE(error.find("raise ddr_budget_bytes"), std::string::npos) << error;
  EXPECT_LE(node_->follower_stats()->refused, 4U);
  EXPECT_EQ(Served({1}), Rows({{1, 1}}));
  EXPECT_NE(logged().find("task follower fails"), std::string::npos) << logged();
}

TEST_F(NodeFollowingTest, WithAGuardTheWatermarkIsThatOfTheAnswers) {
  model_.WriteSnapshot({1, 1}, {{1, 1}});
  model_.WritePromotion(1, 1);
  Open(true);
  model_.WriteDelta({2, 1}, {1, 1}, {{1, 2}});
  ASSERT_TRUE(Await([&] { return node_->newest()->number == 2; }));
  EXPECT_EQ(node_->served()->number, 1U);
  model_.WritePromotion(2, 2);
  EXPECT_TRUE(Await([&] { return node_->served()->number == 2; }));
}

}  // namespace
}  // namespace embertide
