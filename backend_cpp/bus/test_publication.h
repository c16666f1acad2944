// A publication that tests write version by version, as files and as messages of the bus.
//
// Written from docs/formats.md and update.proto a second time: the reader's code is not used.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "bus/delta.h"
#include "embertide/checksum.h"

namespace embertide {

inline uint32_t CrcOf(const std::string& text) { return Crc32c(std::as_bytes(std::span(text))); }

template <typename T>
std::string Raw(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

// The change of one version in one bucket; `records` need not be real ones.
struct TestChange {
  uint32_t table = 0;
  uint32_t bucket = 0;
  std::vector<std::string> records;  // a batch each
};

inline v1::RowBatch MakeBatch(VersionId id, uint32_t table, uint32_t bucket, uint64_t sequence,
                              const std::string& records) {
  v1::RowBatch batch;
  batch.set_lineage(id.lineage);
  batch.set_version(id.number);
  batch.set_table_id(table);
  batch.set_bucket(bucket);
  batch.set_sequence(sequence);
  batch.set_records(records);
  batch.set_rows(1);
  batch.set_schema_id(1);
  batch.set_crc32c(
      CrcOf(Raw(id.lineage) + Raw(id.number) + Raw(table) + Raw(bucket) + Raw(sequence) + records));
  return batch;
}

// The messages of one version.
struct TestVersion {
  v1::CommitFile file;
  std::vector<std::vector<v1::RowBatch>> batches;  // of each partition
};

class TestPublication {
 public:
  TestPublication()
      : path_(std::filesystem::temp_directory_path() /
              ("embertide-bus-" + std::to_string(::getpid()))) {
    std::filesystem::remove_all(path_);
  }
  ~TestPublication() { std::filesystem::remove_all(path_); }
  TestPublication(const TestPublication&) = delete;
  TestPublication& operator=(const TestPublication&) = delete;

  std::string path() const { return path_.string(); }
  std::filesystem::path Delta(VersionId id) const { return path_ / "deltas" / FolderName(id); }

  // A version's messages; each bucket's sequences begin at `first`.
  static TestVersion Make(VersionId id, VersionId previous, const std::vector<TestChange>& changes,
                          uint64_t first = 1) {
    TestVersion made;
    v1::GlobalCommit* commit = made.file.mutable_commit();
    commit->mutable_version()->set_number(id.number);
    commit->mutable_version()->set_lineage(id.lineage);
    commit->mutable_previous()->set_number(previous.number);
    commit->mutable_previous()->set_lineage(previous.lineage);
    commit->set_schema_id(1);
    for (uint32_t p = 0; p < 64; ++p) {
      v1::PartitionCommit partition;
      std::vector<v1::RowBatch> batches;
      for (const TestChange& change : changes) {
        if (change.bucket % 64 != p) continue;
        uint64_t sequence = first;
        for (const std::string& records : change.records) {
          batches.push_back(MakeBatch(id, change.table, change.bucket, sequence++, records));
        }
        v1::BucketSequence* bucket = partition.add_buckets();
        bucket->set_table_id(change.table);
        bucket->set_bucket(change.bucket);
        bucket->set_sequence(sequence - 1);
        bucket->set_batches(static_cast<uint32_t>(change.records.size()));
      }
      if (batches.empty()) continue;
      partition.set_lineage(id.lineage);
      partition.set_version(id.number);
      partition.set_partition(p);
      *made.file.add_partitions() = partition;
      made.batches.push_back(batches);
    }
    return made;
  }

  static std::string DeltaBytes(const std::vector<v1::RowBatch>& batches) {
    std::string bytes = "EMDLT001";
    for (const v1::RowBatch& batch : batches) {
      const std::string message = batch.SerializeAsString();
      bytes += Raw(static_cast<uint32_t>(message.size())) + message;
    }
    return bytes;
  }
  static std::string CommitBytes(const v1::CommitFile& file) {
    const std::string message = file.SerializeAsString();
    return "EMCMT001" + Raw(static_cast<uint32_t>(message.size())) + Raw(CrcOf(message)) + message;
  }

  // Writes the files and completes the messages with their names and checksums.
  void Write(TestVersion* version) {
    v1::GlobalCommit* commit = version->file.mutable_commit();
    const VersionId id = IdOf(commit->version());
    std::filesystem::create_directories(Delta(id));
    commit->clear_partitions();
    for (int i = 0; i < version->file.partitions_size(); ++i) {
      v1::PartitionCommit* partition = version->file.mutable_partitions(i);
      WriteDelta(id, partition, DeltaBytes(version->batches[static_cast<size_t>(i)]));
      v1::PartitionCommitRef* ref = commit->add_partitions();
      ref->set_partition(partition->partition());
      ref->set_crc32c(CrcOf(partition->SerializeAsString()));
    }
    Put(Delta(id) / "commit.pb", CommitBytes(version->file));
  }
  TestVersion Write(VersionId id, VersionId previous, const std::vector<TestChange>& changes,
                    uint64_t first = 1) {
    TestVersion version = Make(id, previous, changes, first);
    Write(&version);
    return version;
  }
  // One delta file with any bytes, and a partition commit that vouches for them.
  void WriteDelta(VersionId id, v1::PartitionCommit* partition, const std::string& bytes) {
    partition->set_delta_path("p-" + std::to_string(partition->partition()) + ".delta");
    partition->set_delta_bytes(bytes.size());
    partition->set_delta_crc32c(CrcOf(bytes));
    Put(Delta(id) / partition->delta_path(), bytes);
  }
  void WriteSnapshot(VersionId id) { Put(path_ / "snapshots" / FolderName(id) / "manifest.json"); }

  static void Put(const std::filesystem::path& path, const std::string& bytes = "") {
    std::filesystem::create_directories(path.parent_path());
    const std::filesystem::path temporary = path.string() + ".tmp";
    std::ofstream(temporary, std::ios::binary) << bytes;
    std::filesystem::rename(temporary, path);  // a follower may be looking
  }
  static std::string Get(const std::filesystem::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

 private:
  std::filesystem::path path_;
};

}  // namespace embertide
