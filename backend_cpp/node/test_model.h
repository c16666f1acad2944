// A model of one table for tests of a node: snapshots and delta files of rows whose values are all
// alike.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <string>
#include <vector>

#include "bus/test_publication.h"
#include "embertide/hash.h"
#include "embertide/snapshot.h"

namespace embertide {

class TestModel {
 public:
  static constexpr uint32_t kDim = 4;
  using Rows = std::map<uint64_t, float>;  // key -> the value of every dimension

  explicit TestModel(uint32_t bucket_bits = 1, uint16_t dim = kDim) {
    table_.name = "item";
    table_.layout = {1, dim, DType::kFp32};
    table_.bucket_bits = bucket_bits;
    table_.default_row.assign(dim, -1.0F);
  }
  // The type of rows, before the first is written: values of four bits are what they are in fp32,
  // as all of a row are alike.
  void UseDType(DType dtype) { table_.layout.dtype = dtype; }
  std::vector<FeatureConfig> features = {{"cand", "item", "sum"}};  // of snapshots from now on
  std::string path() const { return publication_.path(); }
  const TableConfig& table() const { return table_; }
  uint32_t BucketOf(uint64_t key) const {
    return BucketOfHash(HashKey(key), static_cast<int>(table_.bucket_bits));
  }

  void WriteSnapshot(VersionId id, const Rows& rows, int64_t committed_ms = 0) const {
    Manifest manifest;
    manifest.model = "news";
    manifest.lineage = id.lineage;
    manifest.version = id.number;
    manifest.schema_id = 1;
    manifest.committed_ms = committed_ms;
    manifest.tables = {table_};
    manifest.features = features;
    const std::string path = publication_.path() + "/snapshots/" + FolderName(id);
    for (uint32_t bucket = 0; bucket < table_.buckets(); ++bucket) {
      const auto file = WriteBucketFile(path, table_, bucket, id.number, Records(rows, bucket));
      ASSERT_TRUE(file.ok()) << file.status().ToString();
      manifest.buckets.push_back(file.value());
    }
    ASSERT_TRUE(WriteManifest(path, manifest).ok());
  }
  // `rollback_to`: the version whose state it restores.
  void WriteDelta(VersionId id, VersionId previous, const Rows& rows, uint64_t rollback_to = 0,
                  int64_t committed_ms = 0) {
    std::vector<TestChange> changes;
    for (uint32_t bucket = 0; bucket < table_.buckets(); ++bucket) {
      const std::vector<std::byte> records = Records(rows, bucket);
      if (records.empty()) continue;
      const auto* text = reinterpret_cast<const char*>(records.data());
      changes.push_back({0, bucket, {std::string(text, records.size())}});
    }
    TestVersion version = TestPublication::Make(id, previous, changes);
    version.file.mutable_commit()->set_rollback_to(rollback_to);
    version.file.mutable_commit()->set_committed_ms(committed_ms);
    publication_.Write(&version);
  }
  // The promotion record; `lists` is the JSON of its other fields.
  void WritePromotion(
      uint64_t revision, uint64_t promoted,
      const std::string& lists = R"("withdrawn":[],"undone":[],"totals":{})") const {
    std::string json = R"({"revision":)" + std::to_string(revision) + R"(,"promoted":)";
    json += std::to_string(promoted) + "," + lists + "}\n";
    std::array<char, 16> crc{};
    std::snprintf(crc.data(), crc.size(), "%08x", CrcOf(json));
    TestPublication::Put(path() + "/promoted.json",
                         "EMPRM001 " + std::to_string(revision) + " " + crc.data() + "\n" + json);
  }

 private:
  std::vector<std::byte> Records(const Rows& rows, uint32_t bucket) const {
    std::vector<std::byte> records;
    for (const auto& [key, value] : rows) {
      if (BucketOf(key) != bucket) continue;
      const std::vector<float> values(table_.layout.dim(), value);
      std::vector<std::byte> payload(table_.layout.PayloadBytes(1));
      EncodePayload(table_.layout, 1, values.data(), payload.data());
      AppendRecord({key, 1, RecordKind::kRow, payload}, &records);
    }
    return records;
  }

  TableConfig table_;
  TestPublication publication_;
};

}  // namespace embertide
