// A node most of whose rows lie on an SSD, for tests of what becomes of them there.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <thread>
#include <utility>

#include "embertide/node.h"
#include "node/test_model.h"

namespace embertide {

class SsdNodeTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kDim = TestModel::kDim;
  // In DDR, beside their index, half of them have room.
  static constexpr uint64_t kKeys = 60'000;
  using Rows = TestModel::Rows;

  // `patience`: of Await.
  explicit SsdNodeTest(std::chrono::seconds patience)
      : directory_(model_.path() + "-ssd"), patience_(patience) {
    std::filesystem::remove_all(directory_);
    options_.publication = model_.path();
    options_.devices = 1;
    options_.ddr_budget_bytes = (5ULL << 20) / 2;
    options_.ssd_budget_bytes = 32ULL << 20;
    options_.ssd_directory = directory_ / "node";
  }
  ~SsdNodeTest() override {
    node_.reset();
    std::filesystem::remove_all(directory_);
  }

  // Nothing is written when a node ends: to what lies on the drive it is as a kill.
  void Open() {
    node_.reset();
    auto node = Node::Open(options_);
    ASSERT_TRUE(node.ok()) << node.status().ToString();
    node_ = std::move(*node);
  }
  template <typename Condition>
  bool Await(const Condition& condition) const {
    const auto deadline = std::chrono::steady_clock::now() + patience_;
    while (!condition()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }
  bool WaitFor(uint64_t number) const {
    return Await([&] { return node_->store().Stats().newest_version == number; });
  }
  static Rows All() {
    Rows rows;
    for (uint64_t key = 0; key < kKeys; ++key) rows[key] = static_cast<float>(key % 100);
    return rows;
  }

  TestModel model_;
  const std::filesystem::path directory_;
  const std::chrono::seconds patience_;
  NodeOptions options_;
  std::unique_ptr<Node> node_;
};

}  // namespace embertide
