// Blocks of the SSD spoilt under a node that runs: their rows come right without a restart, out of
// the snapshot and the delta files after it.
#include "node/mending.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <thread>

#include "node/test_ssd_node.h"

namespace embertide {
namespace {

class NodeMendingTest : public SsdNodeTest {
 protected:
  NodeMendingTest() : SsdNodeTest(std::chrono::seconds(120)), rows_(All()) {  // of a sanitizer
    options_.ssd_compaction_bytes_per_s = 0;
    options_.ssd_seal_interval = {};
    options_.window_versions = 1;  // so that rows that changed leave for the SSD again
    options_.log = [this](const std::string& line) {
      const std::lock_guard lock(log_mutex_);
      log_.push_back(line);
    };
    model_.WriteSnapshot({1, 1}, rows_);
  }
  // The node goes first: it logs to members of this.
  ~NodeMendingTest() override { node_.reset(); }

  // A version whose rows are new values, here and in what is expected.
  void WriteVersion(uint64_t number) {
    Rows changes;
    for (uint64_t n = 0; n < 4000; ++n) {
      changes[(number * 7919 + n * 31) % kKeys] = static_cast<float>(number);
    }
    model_.WriteDelta({number, 1}, {number - 1, 1}, changes);
    for (const auto& [key, value] : changes) rows_[key] = value;
  }
  // Flips a bit of a block, in the file itself.
  void Spoil(uint64_t block) const {
    const int file = ::open((directory_ / "node" / "device-0.log").c_str(), O_RDWR);
    ASSERT_GE(file, 0);
    char byte = 0;
    const auto at = static_cast<off_t>(block * 4096 + 100);
    ASSERT_EQ(::pread(file, &byte, 1, at), 1);
    byte = static_cast<char>(byte ^ 16);
    ASSERT_EQ(::pwrite(file, &byte, 1, at), 1);
    ASSERT_EQ(::fsync(file), 0);
    ::close(file);
  }
  // Reads all rows at the newest version, some at a time; false if some could not be read.
  bool AllRight() const {
    const auto pinned = node_->Pin();
    EXPECT_TRUE(pinned.ok());
    bool right = true;
    for (uint64_t first = 0; first < kKeys; first += 500) {
      std::array<int64_t, 500> keys;
      for (size_t k = 0; k < keys.size(); ++k) keys[k] = static_cast<int64_t>(first + k);
      std::vector<float> out(keys.size() * kDim);
      const Status read =
          pinned.value().rows.Lookup({0, keys, Pooling::kNone, {}, out.data(), kDim, nullptr});
      if (!read.ok()) {
        EXPECT_EQ(read.code(), Code::kCorrupt) << read.ToString();
        right = false;
        continue;
      }
      for (size_t k = 0; k < keys.size(); ++k) {
        const std::vector<float> row(out.begin() + static_cast<ptrdiff_t>(k * kDim),
                                     out.begin() + static_cast<ptrdiff_t>((k + 1) * kDim));
        EXPECT_EQ(row, std::vector<float>(kDim, rows_.at(first + k)));
      }
    }
    return right;
  }
  size_t Logged(const std::string& text) const {
    const std::lock_guard lock(log_mutex_);
    return static_cast<size_t>(std::ranges::count_if(
        log_, [&](const std::string& line) { return line.find(text) != std::string::npos; }));
  }

  mutable std::mutex log_mutex_;
  std::vector<std::string> log_;
  Rows rows_;  // of the newest version
};

TEST_F(NodeMendingTest, RowsOfBadBlocksComeRightWhileTheNodeServes) {
  for (uint64_t n = 2; n <= 24; ++n) WriteVersion(n);
  Open();
  ASSERT_TRUE(WaitFor(24));
  ASSERT_TRUE(AllRight());
  const uint64_t written = node_->store().Stats().ssd.bytes_written / 4096;
  ASSERT_GT(written, 150U);
  for (uint64_t block = 3; block < written; block += 5) ASSERT_NO_FATAL_FAILURE(Spoil(block));
  EXPECT_FALSE(AllRight());
  // Versions go on meanwhile.
  WriteVersion(25);
  WriteVersion(26);
  ASSERT_TRUE(WaitFor(26));
  ASSERT_TRUE(Await([&] { return AllRight(); }));
  const SsdStats ssd = node_->store().Stats().ssd;
  EXPECT_GT(ssd.bad_blocks, 20U);
  EXPECT_GT(ssd.mended_rows, 100U);
  EXPECT_EQ(node_->failed_mends(), 0U);
  // Each block was told once, and that it is done.
  const std::string file = (directory_ / "node" / "device-0.log").string();
  const size_t told = Logged(" of " + file + " is not what was written: ");
  EXPECT_GT(told, 20U);
  EXPECT_LE(told, (written + 4) / 5);
  ASSERT_TRUE(Await([&] { return Logged(" of " + file + " has no row any more") == told; }));
  const Status integrity = node_->store().CheckIntegrity();
  EXPECT_TRUE(integrity.ok()) << integrity.ToString();
}

TEST_F(NodeMendingTest, WhatCannotBeBroughtIsTriedAgainAndCounted) {
  Open();
  const auto hidden = directory_ / "hidden";
  std::filesystem::rename(model_.path() + "/snapshots", hidden);
  ASSERT_NO_FATAL_FAILURE(Spoil(3));
  EXPECT_FALSE(AllRight());
  ASSERT_TRUE(Await([&] { return node_->failed_mends() >= 2; }));
  EXPECT_FALSE(AllRight());
  EXPECT_GE(Logged("not mended, and tried again: "), 1U);
  std::filesystem::rename(hidden, model_.path() + "/snapshots");
  ASSERT_TRUE(Await([&] { return AllRight(); }));
}

TEST_F(NodeMendingTest, ANodeOfASnapshotAloneMendsFromIt) {
  options_.snapshot = model_.path() + "/snapshots/" + FolderName({1, 1});
  options_.publication = "";
  Open();
  ASSERT_NO_FATAL_FAILURE(Spoil(3));
  EXPECT_FALSE(AllRight());
  ASSERT_TRUE(Await([&] { return AllRight(); }));
  EXPECT_EQ(node_->failed_mends(), 0U);
}

}  // namespace
}  // namespace embertide
