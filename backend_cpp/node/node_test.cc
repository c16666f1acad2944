// Node: a snapshot loaded and served; every damaged one refused with the reason.
#include "embertide/node.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "ddr/test_huge_pages.h"
#include "embertide/hash.h"
#include "embertide/numa.h"

namespace embertide {
namespace {

namespace fs = std::filesystem;

class NodeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = fs::temp_directory_path() / ("embertide-node-" + std::to_string(::getpid()));
    fs::remove_all(directory_);
    manifest_.model = "news";
    manifest_.lineage = 1;
    manifest_.version = 5;
    TableConfig table;
    table.name = "item";
    table.id = 1;
    table.layout = {2, 4, DType::kFp32};
    table.bucket_bits = 1;
    table.default_row.assign(8, 0.25F);
    manifest_.tables = {table};
    manifest_.features = {{"prev", "item", "sum"}, {"cand", "item", "mean"}};
    WriteRows(1000);
  }
  void TearDown() override { fs::remove_all(directory_); }

  void WriteRows(uint64_t rows) {
    const TableConfig& table = manifest_.tables[0];
    manifest_.buckets.clear();
    for (uint32_t bucket = 0; bucket < 2; ++bucket) {
      std::vector<std::byte> records;
      for (uint64_t key = 0; key < rows; ++key) {
        if (BucketOfHash(HashKey(key), 1) != bucket) continue;
        const std::vector<float> values(8, static_cast<float>(key));
        std::vector<std::byte> payload(32);
        EncodePayload(table.layout, 3, values.data(), payload.data());
        AppendRecord({key, 3, RecordKind::kRow, payload}, &records);
      }
      manifest_.buckets.push_back(*WriteBucketFile(directory_, table, bucket, 5, records));
    }
    Write();
  }
  void Write() { ASSERT_TRUE(WriteManifest(directory_, manifest_).ok()); }
  Result<std::unique_ptr<Node>> Open() {
    options_.snapshot = directory_;
    options_.ddr_budget_bytes = 16ULL << 20;
    return Node::Open(options_);
  }

  fs::path directory_;
  Manifest manifest_;
  NodeOptions options_;
};

TEST_F(NodeTest, DevicesAreBoundToTheNumaNodesThatAreNamed) {
  const std::vector<uint32_t> nodes = NumaNodes();
  if (nodes.empty()) GTEST_SKIP() << "the system lets this process bind no memory";
  options_.numa_nodes = std::to_string(nodes.back());
  const auto node = Open();
  ASSERT_TRUE(node.ok()) << node.status().ToString();
  EXPECT_EQ(node.value()->store().options().numa_nodes, std::vector<uint32_t>{nodes.back()});
  for (const char* wrong : {"1000", "0,x"}) {
    options_.numa_nodes = wrong;
    const Status refused = Open().status();
    EXPECT_EQ(refused.code(), Code::kInvalidArgument);
    EXPECT_NE(refused.message().find("NUMA node"), std::string::npos) << refused.ToString();
  }
}

TEST_F(NodeTest, ServesASnapshotAlone) {
  const auto node = Open();
  ASSERT_TRUE(node.ok()) << node.status().ToString();
  EXPECT_EQ(node.value()->total_dim(), 16U);
  EXPECT_EQ(node.value()->features()[1].pooling, Pooling::kMean);
  auto view = node.value()->Pin();
  ASSERT_TRUE(view.ok());
  EXPECT_EQ(view->info->number, 5U);
  const std::vector<int64_t> keys = {7, 5000};
  std::vector<float> out(16);
  uint8_t source[2];
  ASSERT_TRUE(view->rows.Lookup({0, keys, Pooling::kNone, {}, out.data(), 8, source}).ok());
  EXPECT_EQ(out[0], 7.0F);
  EXPECT_EQ(out[8], 0.25F);
  EXPECT_EQ(source[0], static_cast<uint8_t>(Source::kDdr));
  EXPECT_EQ(source[1], static_cast<uint8_t>(Source::kDefault));
}

TEST_F(NodeTest, RowsOfASnapshotLieInHugePagesFromTheStart) {
  WriteRows(100'000);
  options_.devices = 1;
  uint64_t huge = 0;
  // A system under load may have none for a moment.
  for (int tries = 0; tries < 20 && huge == 0; ++tries) {
    const auto node = Open();
    ASSERT_TRUE(node.ok()) << node.status().ToString();
    huge = node.value()->store().Stats().huge_bytes;
  }
  EXPECT_EQ(huge, SystemHasHugePages() ? 2U << 20 : 0U) << "of 3.2 MB of rows";
}

TEST_F(NodeTest, RefusesWhatItCannotProve) {
  const fs::path file = directory_ / manifest_.buckets[0].path;
  fs::resize_file(file, fs::file_size(file) - 1);
  EXPECT_EQ(Open().status().code(), Code::kCorrupt);
  fs::remove(file);
  EXPECT_EQ(Open().status().code(), Code::kNotFound);
  fs::remove(directory_ / "manifest.json");
  EXPECT_EQ(Open().status().code(), Code::kNotFound);
}

TEST_F(NodeTest, RefusesAManifestThatContradictsItself) {
  manifest_.features[0].table = "user";
  Write();
  EXPECT_NE(Open().status().message().find("\"user\""), std::string::npos);
  manifest_.features[0] = {"prev", "item", "max"};
  Write();
  EXPECT_NE(Open().status().message().find("\"max\""), std::string::npos);
  manifest_.features.clear();
  Write();
  EXPECT_FALSE(Open().ok());
}

}  // namespace
}  // namespace embertide
