// Reading delta folders: every harm to a file is found, and the file named.
#include "bus/delta.h"

#include <gtest/gtest.h>

#include "bus/test_publication.h"

namespace embertide {
namespace {

constexpr VersionId kId{7, 3};
constexpr VersionId kBefore{6, 3};

class DeltaTest : public ::testing::Test {
 protected:
  // Two partitions; the bucket 65 of the second has two batches.
  void SetUp() override {
    version_ = publication_.Write(
        kId, kBefore, {{0, 0, {"aaaa"}}, {0, 65, {"bbbb", "cc"}}, {1, 1, {"dddddd"}}}, 5);
  }
  std::filesystem::path File(const std::string& name) const {
    return publication_.Delta(kId) / name;
  }
  Status ReadCommit() { return StatusOf(ReadCommitFile(publication_.path(), kId)); }
  Status ReadDelta(const v1::PartitionCommit& partition) {
    seen_.clear();
    return ReadDeltaFile(publication_.path(), kId, partition, [&](const v1::RowBatch& batch) {
      seen_.push_back(batch.records());
      return Status::Ok();
    });
  }
  template <typename T>
  static Status StatusOf(const Result<T>& result) {
    return result.ok() ? Status::Ok() : result.status();
  }
  // kCorrupt, and the message begins with the file.
  static void ExpectCorrupt(const Status& status, const std::filesystem::path& path) {
    EXPECT_EQ(status.code(), Code::kCorrupt) << status.ToString();
    EXPECT_EQ(status.message().find(path.string()), 0U) << status.message();
  }
  // Reads `path` with each byte flipped, cut at each length and with a byte more.
  template <typename Read>
  void Harm(const std::filesystem::path& path, Read read) {
    const std::string whole = TestPublication::Get(path);
    ASSERT_GT(whole.size(), 16U);
    for (size_t at = 0; at < whole.size(); ++at) {
      std::string bytes = whole;
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << at % 8));
      TestPublication::Put(path, bytes);
      ExpectCorrupt(read(), path);
      TestPublication::Put(path, whole.substr(0, at));
      ExpectCorrupt(read(), path);
    }
    TestPublication::Put(path, whole + '\0');
    ExpectCorrupt(read(), path);
    TestPublication::Put(path, whole);
    EXPECT_TRUE(read().ok());
    std::filesystem::remove(path);
    EXPECT_EQ(read().code(), Code::kNotFound);
  }
  // Reads the second partition's file, made of `bytes`, with a commit that vouches for them.
  Status Vouched(const std::string& bytes) {
    v1::PartitionCommit partition = version_.file.partitions(1);
    publication_.WriteDelta(kId, &partition, bytes);
    const Status status = ReadDelta(partition);
    if (!status.ok()) ExpectCorrupt(status, File(partition.delta_path()));
    return status;
  }

  TestPublication publication_;
  TestVersion version_;
  std::vector<std::string> seen_;
};

TEST_F(DeltaTest, ReadsWhatWasWritten) {
  const auto file = ReadCommitFile(publication_.path(), kId);
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  EXPECT_EQ(file.value().SerializeAsString(), version_.file.SerializeAsString());
  ASSERT_TRUE(ReadDelta(version_.file.partitions(0)).ok());
  EXPECT_EQ(seen_, std::vector<std::string>({"aaaa"}));
  ASSERT_TRUE(ReadDelta(version_.file.partitions(1)).ok());
  EXPECT_EQ(seen_, std::vector<std::string>({"bbbb", "cc", "dddddd"}));
}

TEST_F(DeltaTest, EveryHarmToACommitFileIsFound) {
  Harm(File("commit.pb"), [&] { return ReadCommit(); });
}

TEST_F(DeltaTest, EveryHarmToADeltaFileIsFound) {
  Harm(File("p-1.delta"), [&] { return ReadDelta(version_.file.partitions(1)); });
}

TEST_F(DeltaTest, ACommitFileOfAnotherVersionOrWithOtherPartitionsIsRefused) {
  const auto with = [&](auto change) {
    v1::CommitFile file = version_.file;
    change(&file);
    TestPublication::Put(File("commit.pb"), TestPublication::CommitBytes(file));
    return ReadCommit();
  };
  EXPECT_TRUE(with([](v1::CommitFile*) {}).ok());
  const std::vector<std::function<void(v1::CommitFile*)>> wrong = {
      [](auto* file) { file->mutable_commit()->mutable_version()->set_number(8); },
      [](auto* file) { file->mutable_commit()->mutable_version()->set_lineage(2); },
      [](auto* file) { file->mutable_partitions()->RemoveLast(); },
      [](auto* file) { file->mutable_commit()->mutable_partitions()->RemoveLast(); },
      [](auto* file) { file->mutable_partitions(0)->set_partition(9); },
      [](auto* file) { file->mutable_partitions(1)->set_lineage(2); },
      [](auto* file) { file->mutable_partitions(1)->set_version(6); },
  };
  for (const auto& change : wrong) ExpectCorrupt(with(change), File("commit.pb"));
}

TEST_F(DeltaTest, AFileThatItsCommitVouchesForIsProvedAllTheSame) {
  const std::vector<v1::RowBatch>& batches = version_.batches[1];
  const std::string whole = TestPublication::DeltaBytes(batches);
  EXPECT_TRUE(Vouched(whole).ok());
  EXPECT_FALSE(Vouched("EMDLT002" + whole.substr(8)).ok());
  EXPECT_FALSE(Vouched("").ok());
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_FALSE(Vouched(whole.substr(0, length)).ok()) << length;
  }
  // A length that reaches beyond the file, by a byte and by far.
  for (const uint32_t length : {static_cast<uint32_t>(whole.size()) - 11, 0x7fffffffU, ~0U}) {
    EXPECT_FALSE(Vouched(whole.substr(0, 8) + Raw(length) + whole.substr(12)).ok()) << length;
  }
}

TEST_F(DeltaTest, BatchesThatAreNotThoseTheCommitCountsAreRefused) {
  const std::vector<v1::RowBatch>& b = version_.batches[1];
  const auto one = [&](VersionId id, uint32_t table, uint32_t bucket, uint64_t sequence) {
    return TestPublication::DeltaBytes({b[0], b[1], MakeBatch(id, table, bucket, sequence, "x")});
  };
  EXPECT_TRUE(Vouched(one(kId, 1, 1, 5)).ok());
  EXPECT_FALSE(Vouched(one({8, 3}, 1, 1, 5)).ok());  // of another version
  EXPECT_FALSE(Vouched(one({7, 2}, 1, 1, 5)).ok());  // of another lineage
  EXPECT_FALSE(Vouched(one(kId, 2, 1, 5)).ok());     // of a table that is not named
  EXPECT_FALSE(Vouched(one(kId, 1, 2, 5)).ok());     // of a bucket of another partition
  EXPECT_FALSE(Vouched(one(kId, 1, 1, 4)).ok());     // a sequence too early
  EXPECT_FALSE(Vouched(one(kId, 1, 1, 6)).ok());     // a sequence skipped
  EXPECT_FALSE(Vouched(TestPublication::DeltaBytes({b[0], b[2]})).ok());              // one less
  EXPECT_FALSE(Vouched(TestPublication::DeltaBytes({b[0], b[1], b[1], b[2]})).ok());  // one twice
  EXPECT_FALSE(Vouched(TestPublication::DeltaBytes({b[1], b[0], b[2]})).ok());        // no order
  v1::RowBatch flipped = b[2];
  flipped.set_records("dddddc");
  EXPECT_FALSE(Vouched(TestPublication::DeltaBytes({b[0], b[1], flipped})).ok());
}

TEST_F(DeltaTest, ABatchesChecksumCoversItsHeader) {
  const v1::RowBatch good = MakeBatch(kId, 1, 2, 3, "records");
  EXPECT_TRUE(CheckBatch(good).ok());
  const std::vector<std::function<void(v1::RowBatch*)>> wrong = {
      [](auto* batch) { batch->set_lineage(4); },  [](auto* batch) { batch->set_version(8); },
      [](auto* batch) { batch->set_table_id(2); }, [](auto* batch) { batch->set_bucket(1); },
      [](auto* batch) { batch->set_sequence(4); }, [](auto* batch) { batch->set_records("r"); },
  };
  for (const auto& change : wrong) {
    v1::RowBatch batch = good;
    change(&batch);
    EXPECT_EQ(CheckBatch(batch).code(), Code::kCorrupt);
  }
}

TEST_F(DeltaTest, ANameThatLeavesTheFolderIsRefused) {
  v1::PartitionCommit partition = version_.file.partitions(0);
  partition.set_delta_path("../" + FolderName(kId) + "/p-0.delta");
  EXPECT_EQ(ReadDelta(partition).code(), Code::kCorrupt);
  v1::GlobalCommit commit = version_.file.commit();
  for (const std::string name : {"/etc/hostname", "..", ".commit.pb", "a/b", "A"}) {
    commit.set_dense_path(name);
    EXPECT_EQ(StatusOf(ReadDenseTensors(publication_.path(), commit)).code(), Code::kCorrupt);
  }
}

TEST_F(DeltaTest, DenseTensorsAreProvedInlineAndAsAFile) {
  v1::GlobalCommit commit = version_.file.commit();
  const auto none = ReadDenseTensors(publication_.path(), commit);
  ASSERT_TRUE(none.ok());
  EXPECT_TRUE(none.value().empty());
  commit.set_dense_path("dense.safetensors");
  commit.set_dense_bytes(24);
  commit.set_dense_crc32c(CrcOf("tensors, as many as two!"));
  TestPublication::Put(File("dense.safetensors"), "tensors, as many as two!");
  const auto found = ReadDenseTensors(publication_.path(), commit);
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found.value(), "tensors, as many as two!");
  Harm(File("dense.safetensors"),
       [&] { return StatusOf(ReadDenseTensors(publication_.path(), commit)); });
  commit.set_dense("tensors, as many as two!");  // the bus carries them: the file is not needed
  EXPECT_TRUE(ReadDenseTensors(publication_.path(), commit).ok());
  commit.set_dense("tensors, as many as one!");
  EXPECT_EQ(StatusOf(ReadDenseTensors(publication_.path(), commit)).code(), Code::kCorrupt);
}

TEST_F(DeltaTest, VersionsAreTheFoldersThatAreWhole) {
  publication_.Write({12, 3}, kId, {});
  publication_.Write({100, 4}, {12, 3}, {});
  std::filesystem::create_directories(publication_.Delta({13, 3}));  // its commit is not there
  for (const char* name : {"13-3", "000000000014-000003.tmp", ".000000000015-000003.partial",
                           "000000000016", "000000000017-", "00000000001x-000003", "-000003"}) {
    TestPublication::Put(publication_.Delta(kId).parent_path() / name / "commit.pb");
  }
  const std::string deltas = publication_.path() + "/deltas";
  EXPECT_EQ(ListVersions(deltas, "commit.pb"), std::vector<VersionId>({kId, {12, 3}, {100, 4}}));
  EXPECT_TRUE(ListVersions(publication_.path() + "/none", "commit.pb").empty());
}

}  // namespace
}  // namespace embertide
