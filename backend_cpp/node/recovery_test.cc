// A node opened from the seal of its SSD tier: the rows of one that was never stopped, or those of
// the snapshot and a reason.
#include "node/recovery.h"

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <span>
#include <string>
#include <thread>

#include "base/file.h"
#include "base/json.h"
#include "embertide/checksum.h"
#include "node/test_ssd_node.h"

namespace embertide {
namespace {

class NodeRecoveryTest : public SsdNodeTest {
 protected:
  NodeRecoveryTest() : SsdNodeTest(std::chrono::seconds(30)) {
    options_.ssd_seal_interval = std::chrono::milliseconds(1);
  }

  bool WaitForSeal(uint64_t number) const {
    return Await([&] { return node_->store().Stats().seal.version == number; });
  }
  static Rows Some(uint64_t version, uint64_t keys = 500) {
    Rows rows;
    for (uint64_t n = 0; n < keys; ++n) {
      rows[(version * 7919 + n * 31) % (kKeys + 100)] = static_cast<float>(version);
    }
    return rows;
  }
  void WriteVersions(uint64_t first, uint64_t last, uint64_t lineage = 1) {
    for (uint64_t n = first; n <= last; ++n) {
      model_.WriteDelta({n, lineage}, {n - 1, lineage}, Some(n));
    }
  }
  std::vector<std::byte> RecordsOf(const Node& node) const {
    std::vector<std::byte> records;
    auto view = node.store().PinNewest();
    for (uint32_t b = 0; b < model_.table().buckets(); ++b) {
      const Status exported = node.store().ExportBucket(*view, 0, b, &records);
      EXPECT_TRUE(exported.ok()) << exported.ToString();
    }
    EXPECT_GT(records.size(), kKeys * (kRecordHeaderBytes + 4 * kDim) / 2);
    return records;
  }
  // Compares with a node that never saw a seal, at this one's version.
  void ExpectRowsOfAFreshNode() {
    NodeOptions fresh = options_;
    fresh.ssd_directory = directory_ / "fresh";
    fresh.ssd_seal_interval = {};
    const auto other = Node::Open(fresh);
    ASSERT_TRUE(other.ok()) << other.status().ToString();
    const auto newest = [](const Node& node) { return node.store().Stats().newest_version; };
    ASSERT_TRUE(Await([&] { return newest(*other.value()) == newest(*node_); }));
    EXPECT_TRUE(RecordsOf(*node_) == RecordsOf(*other.value()));
    EXPECT_EQ(node_->newest()->proof, other.value()->newest()->proof);
    EXPECT_EQ(node_->newest()->watermark_ms, other.value()->newest()->watermark_ms);
    EXPECT_FALSE(std::filesystem::exists(directory_ / "fresh" / "seal.json"));
  }
};

TEST_F(NodeRecoveryTest, ANodeGoesOnFromItsSeal) {
  model_.WriteSnapshot({1, 1}, All());
  WriteVersions(2, 5);
  Open();
  EXPECT_FALSE(node_->opened_from_seal());
  EXPECT_EQ(node_->seal_refusal(), "");
  ASSERT_TRUE(WaitFor(5));
  ASSERT_TRUE(WaitForSeal(5));
  ASSERT_GT(node_->store().Stats().ssd_bytes, 0U);
  WriteVersions(6, 9);
  Open();
  EXPECT_TRUE(node_->opened_from_seal()) << node_->seal_refusal();
  ASSERT_TRUE(WaitFor(9));
  ASSERT_NO_FATAL_FAILURE(ExpectRowsOfAFreshNode());
  // And again, with a snapshot meanwhile that is newer than the seal: delta files lead past it.
  ASSERT_TRUE(WaitForSeal(9));
  WriteVersions(10, 12);
  Rows then = All();
  for (uint64_t n = 2; n <= 11; ++n) {
    for (const auto& [key, value] : Some(n)) then[key] = value;
  }
  model_.WriteSnapshot({11, 1}, then);
  Open();
  EXPECT_TRUE(node_->opened_from_seal()) << node_->seal_refusal();
  ASSERT_TRUE(WaitFor(12));
  ASSERT_NO_FATAL_FAILURE(ExpectRowsOfAFreshNode());
}

TEST_F(NodeRecoveryTest, SealsThatAreTakenWhileVersionsPassLoseNone) {
  model_.WriteSnapshot({1, 1}, All());
  Open();
  uint64_t newest = 1;
  for (int round = 0; round < 4; ++round) {
    WriteVersions(newest + 1, newest + 10);
    newest += 10;
    const uint64_t sealed = node_->store().Stats().seal.written;
    ASSERT_TRUE(Await([&] { return node_->store().Stats().seal.written > sealed; }))
        << node_->seal_error();
    Open();
    EXPECT_TRUE(node_->opened_from_seal()) << node_->seal_refusal();
    ASSERT_TRUE(WaitFor(newest)) << node_->follower_error();
    ASSERT_NO_FATAL_FAILURE(ExpectRowsOfAFreshNode());
  }
}

TEST_F(NodeRecoveryTest, ASealThatNoDeltaFileLeadsOnFromIsRefused) {
  model_.WriteSnapshot({1, 1}, All());
  WriteVersions(2, 3);
  Open();
  ASSERT_TRUE(WaitFor(3));
  ASSERT_TRUE(WaitForSeal(3));
  node_.reset();
  model_.WriteSnapshot({20, 1}, All());
  WriteVersions(21, 22);
  Open();
  EXPECT_FALSE(node_->opened_from_seal());
  EXPECT_NE(node_->seal_refusal().find("version 22"), std::string::npos) << node_->seal_refusal();
  ASSERT_TRUE(WaitFor(22));
  ASSERT_NO_FATAL_FAILURE(ExpectRowsOfAFreshNode());
}

TEST_F(NodeRecoveryTest, APublicationMadeAnewIsNotTakenForTheOneThatWasSealed) {
  model_.WriteSnapshot({1, 1}, All());
  WriteVersions(2, 4);
  Open();
  ASSERT_TRUE(WaitFor(4));
  ASSERT_TRUE(WaitForSeal(4));
  node_.reset();
  std::filesystem::remove_all(model_.path());
  model_.WriteSnapshot({1, 1}, Some(1, kKeys));
  for (uint64_t n = 2; n <= 6; ++n) model_.WriteDelta({n, 1}, {n - 1, 1}, Some(n + 50));
  Open();
  EXPECT_FALSE(node_->opened_from_seal());
  EXPECT_NE(node_->seal_refusal().find("not the one that was sealed"), std::string::npos)
      << node_->seal_refusal();
  ASSERT_TRUE(WaitFor(6));
  ASSERT_NO_FATAL_FAILURE(ExpectRowsOfAFreshNode());
}

TEST_F(NodeRecoveryTest, AHarmedSealIsRefusedAndTheSnapshotServed) {
  model_.WriteSnapshot({1, 1}, All());
  Open();
  ASSERT_TRUE(WaitForSeal(1));
  node_.reset();
  const auto info = ReadSealInfo(options_.ssd_directory);
  ASSERT_TRUE(info.ok());
  const auto rows = std::filesystem::path(options_.ssd_directory) / info.value().file;
  std::filesystem::resize_file(rows, info.value().file_bytes - 1);
  Open();
  EXPECT_FALSE(node_->opened_from_seal());
  EXPECT_NE(node_->seal_refusal().find(info.value().file), std::string::npos)
      << node_->seal_refusal();
  ASSERT_NO_FATAL_FAILURE(ExpectRowsOfAFreshNode());
}

TEST_F(NodeRecoveryTest, ASealOfAnotherFormatIsRefusedAndTheSnapshotServed) {
  model_.WriteSnapshot({1, 1}, All());
  Open();
  ASSERT_TRUE(WaitForSeal(1));
  node_.reset();
  const std::string path = options_.ssd_directory + "/seal.json";
  const Result<std::string> text = ReadWholeFile(path, 1 << 20);
  ASSERT_TRUE(text.ok()) << text.status().ToString();
  Json json = Json::parse(text.value());
  json["seal"]["format"] = 2;
  const std::string seal = json["seal"].dump();
  json["crc32c"] = Crc32c(std::as_bytes(std::span(seal)));
  const std::string newer = json.dump();
  ASSERT_TRUE(WriteFileAtomically(path, std::as_bytes(std::span(newer))).ok());
  Open();
  EXPECT_FALSE(node_->opened_from_seal());
  EXPECT_NE(node_->seal_refusal().find("format 2; this reads 1"), std::string::npos)
      << node_->seal_refusal();
  ASSERT_NO_FATAL_FAILURE(ExpectRowsOfAFreshNode());
  // It seals again, in the format that it reads.
  ASSERT_TRUE(WaitForSeal(1));
  node_.reset();
  EXPECT_TRUE(ReadSealInfo(options_.ssd_directory).ok());
}

TEST_F(NodeRecoveryTest, ASnapshotAloneIsSealedForItself) {
  model_.WriteSnapshot({1, 0}, All());
  options_.publication = "";
  options_.snapshot = model_.path() + "/snapshots/" + FolderName({1, 0});
  Open();
  ASSERT_TRUE(WaitForSeal(1));
  Open();
  EXPECT_TRUE(node_->opened_from_seal()) << node_->seal_refusal();
  ASSERT_NO_FATAL_FAILURE(ExpectRowsOfAFreshNode());
  ASSERT_TRUE(WaitForSeal(1));
  // Imported anew under the same name.
  Rows others = All();
  others[5] = 77;
  node_.reset();
  model_.WriteSnapshot({1, 0}, others);
  Open();
  EXPECT_FALSE(node_->opened_from_seal());
  EXPECT_NE(node_->seal_refusal(), "");
  ASSERT_NO_FATAL_FAILURE(ExpectRowsOfAFreshNode());
}

}  // namespace
}  // namespace embertide
