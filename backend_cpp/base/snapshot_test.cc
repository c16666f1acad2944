// Snapshots: bucket files and manifests read back, and every corruption refused.
#include "embertide/snapshot.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "embertide/checksum.h"
#include "embertide/hash.h"

namespace embertide {
namespace {

namespace fs = std::filesystem;

class SnapshotTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = fs::temp_directory_path() /
                 ("embertide-snapshot-" + std::to_string(::getpid()) + "-" +
                  ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(directory_);
    table_.name = "item";
    table_.id = 3;
    table_.layout = {2, 2, DType::kFp32};
    table_.bucket_bits = 1;
  }
  void TearDown() override { fs::remove_all(directory_); }

  // Records of `n` keys of bucket 1, with payloads that follow from the key.
  std::vector<std::byte> Records(int n) const {
    std::vector<std::byte> records;
    for (uint64_t key = 0; n > 0; ++key) {
      if (BucketOfHash(HashKey(key), 1) != 1) continue;
      const std::vector<std::byte> payload(16, static_cast<std::byte>(key));
      AppendRecord({key, 3, RecordKind::kRow, payload}, &records);
      --n;
    }
    return records;
  }
  Status Read(const BucketFileInfo& info, std::vector<std::byte>* records = nullptr) const {
    return ReadBucketFile(directory_, table_, info, [&](std::span<const std::byte> block) {
      if (records != nullptr) records->insert(records->end(), block.begin(), block.end());
      return Status::Ok();
    });
  }
  std::string Slurp(const BucketFileInfo& info) const {
    std::ifstream in(directory_ / info.path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void Spill(const BucketFileInfo& info, const std::string& bytes) const {
    std::ofstream(directory_ / info.path, std::ios::binary) << bytes;
  }

  fs::path directory_;
  TableConfig table_;
};

TEST_F(SnapshotTest, BucketFileRoundTripOverManyBlocks) {
  const auto records = Records(30000);
  const auto info = WriteBucketFile(directory_, table_, 1, 9, records);
  ASSERT_TRUE(info.ok()) << info.status().ToString();
  EXPECT_EQ(info.value().rows, 30000U);
  std::vector<std::byte> back;
  const Status read = Read(info.value(), &back);
  ASSERT_TRUE(read.ok()) << read.ToString();
  EXPECT_EQ(back, records);
}

TEST_F(SnapshotTest, EmptyBucketFile) {
  const auto info = WriteBucketFile(directory_, table_, 0, 1, {});
  ASSERT_TRUE(info.ok());
  EXPECT_TRUE(Read(info.value()).ok());
}

TEST_F(SnapshotTest, EveryFlippedByteIsRefused) {
  const auto info = WriteBucketFile(directory_, table_, 1, 9, Records(5));
  ASSERT_TRUE(info.ok());
  const std::string good = Slurp(info.value());
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x10);
    Spill(info.value(), bad);
    const Status read = Read(info.value());
    ASSERT_FALSE(read.ok()) << "byte " << i;
    EXPECT_NE(read.message().find(info.value().path), std::string::npos);
  }
}

TEST_F(SnapshotTest, EveryTruncationAndAnyTailIsRefused) {
  auto info = WriteBucketFile(directory_, table_, 1, 9, Records(5));
  ASSERT_TRUE(info.ok());
  const std::string good = Slurp(info.value());
  for (size_t n = 0; n < good.size(); ++n) {
    Spill(info.value(), good.substr(0, n));
    BucketFileInfo told = info.value();
    ASSERT_FALSE(Read(told).ok()) << n;
    told.bytes = n;  // even if the manifest agreed with the cut
    ASSERT_FALSE(Read(told).ok()) << n;
  }
  Spill(info.value(), good + "x");
  info->bytes = good.size() + 1;
  EXPECT_NE(Read(info.value()).message().find("follow the footer"), std::string::npos);
}

// Where a file of several blocks was harmed: the message names the file, and the block or the part.
struct Harm {
  size_t at;  // byte of the file
  std::string says;
};

TEST_F(SnapshotTest, HarmInEachFieldOfEachBlockIsNamed) {
  const auto info = WriteBucketFile(directory_, table_, 1, 9, Records(30000));
  ASSERT_TRUE(info.ok());
  const std::string good = Slurp(info.value());
  constexpr size_t kHeader = 96;
  std::vector<Harm> harms;
  for (const size_t at : {0, 7}) harms.push_back({at, "magic differs"});
  for (const size_t at : {8, 11}) harms.push_back({at, "format version"});
  for (size_t at = 12; at < kHeader; ++at) harms.push_back({at, "the header fails its checksum"});
  size_t blocks = 0;
  std::vector<size_t> boundaries = {0, kHeader};
  size_t at = kHeader;
  for (; good.compare(at, 4, "EEND") != 0; ++blocks) {
    const std::string block = "block " + std::to_string(blocks) + ": it";
    uint32_t bytes = 0;
    std::memcpy(&bytes, good.data() + at + 8, 4);
    harms.push_back({at, block + "s magic differs"});
    harms.push_back({at + 4, block + " fails its checksum"});
    harms.push_back({at + 8, block + " fails its checksum"});  // a length that fits
    harms.push_back({at + 11, block + "s length of"});         // one that does not
    harms.push_back({at + 12, block + " fails its checksum"});
    for (const size_t in :
         {size_t{0}, size_t{8}, size_t{12}, size_t{bytes / 2}, size_t{bytes - 1}}) {
      harms.push_back({at + 16 + in, block + " fails its checksum"});
    }
    boundaries.push_back(at + 16);
    at += 16 + bytes;
    boundaries.push_back(at);
  }
  EXPECT_GT(blocks, 2U);
  harms.push_back({at, "block " + std::to_string(blocks) + ": its magic differs"});
  for (size_t in = 4; in < 20; ++in) harms.push_back({at + in, "the footer fails its checksum"});
  for (const Harm& harm : harms) {
    std::string bad = good;
    bad[harm.at] = static_cast<char>(bad[harm.at] ^ 0x10);
    Spill(info.value(), bad);
    const Status read = Read(info.value());
    ASSERT_FALSE(read.ok()) << "byte " << harm.at;
    EXPECT_NE(read.message().find(info.value().path), std::string::npos);
    EXPECT_NE(read.message().find(harm.says), std::string::npos)
        << "byte " << harm.at << ": " << read.message();
  }
  for (const size_t end : boundaries) {
    BucketFileInfo told = info.value();
    told.bytes = end;  // the manifest agrees with the cut
    Spill(info.value(), good.substr(0, end));
    const Status read = Read(told);
    EXPECT_NE(read.message().find("cut short at byte " + std::to_string(end)), std::string::npos)
        << end << ": " << read.message();
  }
}

// Behind its checksum each field of the header is compared with the manifest, and named.
TEST_F(SnapshotTest, AHeaderThatIsWholeAndOfAnotherFileNamesTheField) {
  const auto info = WriteBucketFile(directory_, table_, 1, 9, Records(5));
  ASSERT_TRUE(info.ok());
  const std::string good = Slurp(info.value());
  for (const auto& [at, says] :
       std::initializer_list<std::pair<size_t, const char*>>{{12, "header_bytes"},
                                                             {16, "hash seed"},
                                                             {24, "another hash"},
                                                             {40, "version"},
                                                             {48, "rows"},
                                                             {56, "table id"},
                                                             {60, "bucket"},
                                                             {64, "bucket_bits"},
                                                             {68, "chunks"},
                                                             {70, "chunk_dim"},
                                                             {72, "dtype"},
                                                             {73, "reserved"},
                                                             {91, "reserved"}}) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 1);
    const uint32_t crc = Crc32c(std::as_bytes(std::span(bad).first(92)));
    std::memcpy(bad.data() + 92, &crc, 4);
    Spill(info.value(), bad);
    const Status read = Read(info.value());
    EXPECT_FALSE(read.ok()) << says;
    EXPECT_NE(read.message().find(says), std::string::npos) << read.message();
  }
}

TEST_F(SnapshotTest, ADifferentTableNamesTheField) {
  const auto info = WriteBucketFile(directory_, table_, 1, 9, Records(5));
  ASSERT_TRUE(info.ok());
  const auto message = [&](auto change) {
    const TableConfig kept = table_;
    change(&table_);
    const std::string text = Read(info.value()).message();
    table_ = kept;
    return text;
  };
  EXPECT_NE(message([](auto* t) { t->layout.chunks = 1; }).find("chunks"), std::string::npos);
  EXPECT_NE(message([](auto* t) { t->layout.chunk_dim = 4; }).find("chunk_dim"), std::string::npos);
  EXPECT_NE(message([](auto* t) { t->layout.dtype = DType::kFp16; }).find("dtype"),
            std::string::npos);
  EXPECT_NE(message([](auto* t) { t->bucket_bits = 2; }).find("bucket_bits"), std::string::npos);
  EXPECT_NE(message([](auto* t) { t->id = 4; }).find("table id"), std::string::npos);
}

TEST_F(SnapshotTest, KeysThatDoNotAscendOrBelongElsewhereAreRefused) {
  auto records = Records(2);
  std::vector<std::byte> swapped(records.begin() + 28, records.end());
  swapped.insert(swapped.end(), records.begin(), records.begin() + 28);
  EXPECT_FALSE(WriteBucketFile(directory_, table_, 1, 9, swapped).ok());
  EXPECT_FALSE(WriteBucketFile(directory_, table_, 0, 9, records).ok());
}

Manifest Example(const TableConfig& table, const BucketFileInfo& info) {
  Manifest manifest;
  manifest.model = "news";
  manifest.lineage = 1;
  manifest.version = 9;
  manifest.watermark_ms = -5;
  manifest.tables = {table};
  manifest.features = {{"cand", "item", "mean"}};
  manifest.dense_features = 13;
  manifest.buckets = {info};
  manifest.dense = {{"program", "dense/model.pt2", 12, 34}};
  return manifest;
}

TEST_F(SnapshotTest, ManifestRoundTrip) {
  table_.default_row = {0.5F, 1e-20F, -3.0F, 0.1F};
  table_.init_seed = ~0ULL;
  const auto info = WriteBucketFile(directory_, table_, 1, 9, Records(5));
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(ReadManifest(directory_).status().code(), Code::kNotFound);
  Manifest manifest = Example(table_, info.value());
  manifest.features.push_back({"both", "item", "sum", false, {"cand", "tags"}});
  manifest.features.push_back({"tags", "item", "mean", true});
  ASSERT_TRUE(WriteManifest(directory_, manifest).ok());
  const auto back = ReadManifest(directory_);
  ASSERT_TRUE(back.ok()) << back.status().ToString();
  EXPECT_EQ(ManifestToJson(back.value()), ManifestToJson(manifest));
  EXPECT_EQ(back.value().tables[0].default_row, table_.default_row);
  EXPECT_EQ(back.value().tables[0].init_seed, ~0ULL);
  EXPECT_FALSE(back.value().features.front().weighed);
  EXPECT_TRUE(back.value().features.back().weighed);
  EXPECT_EQ(back.value().features[1].crossed, manifest.features[1].crossed);
  EXPECT_TRUE(back.value().features.back().crossed.empty());
  size_t files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(directory_)) {
    files += entry.is_regular_file() ? 1 : 0;
  }
  EXPECT_EQ(files, 2U) << "a temporary file was left";
}

TEST_F(SnapshotTest, AManifestWithATableOfKeysRequiresReadersThatKnowThem) {
  Manifest manifest = Example(table_, {"p", "item", 1, 9, 5, 10, 1});
  EXPECT_EQ(ManifestToJson(manifest).find("requires"), std::string::npos);
  TableConfig histories;
  histories.name = "liked_of_user";
  histories.id = 7;
  histories.layout = {3, 1, DType::kKeys};
  manifest.tables.push_back(histories);
  manifest.sequences = {{"liked", "user", "cand", "liked_of_user", {"liked0", "liked1"}, 11}};
  const std::string text = ManifestToJson(manifest);
  EXPECT_EQ(nlohmann::json::parse(text)["requires"], nlohmann::json::array({"keys"}));
  const auto back = ManifestFromJson(text);
  ASSERT_TRUE(back.ok()) << back.status().ToString();
  EXPECT_EQ(ManifestToJson(back.value()), text);
  ASSERT_EQ(back.value().sequences.size(), 1U);
  EXPECT_EQ(back.value().sequences[0].columns, manifest.sequences[0].columns);
  EXPECT_EQ(back.value().sequences[0].dense, 11U);
  for (const std::string field : {"user", "item", "table", "columns", "dense"}) {
    auto bad = nlohmann::json::parse(text);
    bad["sequences"][0].erase(field);
    const Status status = ManifestFromJson(bad.dump()).status();
    EXPECT_NE(status.message().find("'" + field + "'"), std::string::npos) << status.message();
  }
  manifest.sequences[0].times = true;
  const std::string timed = ManifestToJson(manifest);
  EXPECT_EQ(nlohmann::json::parse(timed)["requires"], nlohmann::json::array({"keys", "times"}));
  EXPECT_TRUE(ManifestFromJson(timed).value().sequences[0].times);
  EXPECT_FALSE(back.value().sequences[0].times);
  auto bad = nlohmann::json::parse(text);
  bad["sequences"][0]["dense"] = -1;
  EXPECT_NE(ManifestFromJson(bad.dump()).status().message().find("field \"dense\": -1 is no"),
            std::string::npos);
}

TEST_F(SnapshotTest, AManifestWithRowsOfInt4RequiresReadersThatKnowThem) {
  Manifest manifest = Example(table_, {"p", "item", 1, 9, 5, 10, 1});
  TableConfig small = table_;
  small.name = "small";
  small.id = 9;
  small.layout = {2, 4, DType::kInt4};
  small.default_row.clear();
  manifest.tables.push_back(small);
  const std::string text = ManifestToJson(manifest);
  const auto said = nlohmann::json::parse(text);
  EXPECT_EQ(said["requires"], nlohmann::json::array({"int4"}));
  EXPECT_EQ(said["tables"].back()["dtype"], "int4");
  const auto back = ManifestFromJson(text);
  ASSERT_TRUE(back.ok()) << back.status().ToString();
  EXPECT_EQ(back.value().tables.back().layout, small.layout);
}

TEST_F(SnapshotTest, AManifestNamesTheHeadsWhereThereAreSeveral) {
  Manifest manifest = Example(table_, {"p", "item", 1, 9, 5, 10, 1});
  const std::string one = ManifestToJson(manifest);
  EXPECT_EQ(one.find("heads"), std::string::npos);
  EXPECT_EQ(ManifestFromJson(one).value().scores(), 1U);
  manifest.heads = {"click", "buy"};
  const std::string text = ManifestToJson(manifest);
  const auto back = ManifestFromJson(text);
  ASSERT_TRUE(back.ok()) << back.status().ToString();
  EXPECT_EQ(ManifestToJson(back.value()), text);
  EXPECT_EQ(back.value().heads, manifest.heads);
  EXPECT_EQ(back.value().scores(), 2U);
  auto bad = nlohmann::ordered_json::parse(text);
  for (const auto& [heads, says] :
       {std::pair{nlohmann::json({"buy", "click", "buy"}), "head \"buy\" is there twice"},
        std::pair{nlohmann::json({"click", ""}), "a head has no name"},
        std::pair{nlohmann::json(3), "heads"},
        std::pair{nlohmann::json(std::vector<std::string>(kMaxHeads + 1, "h")), "at most"}}) {
    bad["heads"] = heads;
    const Status status = ManifestFromJson(bad.dump()).status();
    EXPECT_EQ(status.code(), Code::kCorrupt) << says;
    EXPECT_NE(status.message().find(says), std::string::npos) << status.message();
  }
}

TEST_F(SnapshotTest, AManifestNamesTheColumnsThatAreTheUsers) {
  Manifest manifest = Example(table_, {"p", "item", 1, 9, 5, 10, 1});
  EXPECT_EQ(ManifestToJson(manifest).find("context"), std::string::npos);
  const std::string feature = manifest.features.front().name;
  manifest.dense_features = 2;
  manifest.dense_names = {"price", "age"};
  manifest.context = {feature, "age"};
  const std::string text = ManifestToJson(manifest);
  const auto back = ManifestFromJson(text);
  ASSERT_TRUE(back.ok()) << back.status().ToString();
  EXPECT_EQ(ManifestToJson(back.value()), text);
  EXPECT_EQ(back.value().context, manifest.context);
  auto bad = nlohmann::ordered_json::parse(text);
  for (const auto& [context, says] :
       {std::pair{nlohmann::json({feature, "age", feature}), "twice"},
        std::pair{nlohmann::json({feature, "height"}), "names \"height\", which is no feature"},
        std::pair{nlohmann::json({"age"}), "context names no feature"},
        std::pair{nlohmann::json({feature, ""}), "names \"\""},
        std::pair{nlohmann::json(3), "context"}}) {
    bad["context"] = context;
    const Status status = ManifestFromJson(bad.dump()).status();
    EXPECT_EQ(status.code(), Code::kCorrupt) << says;
    EXPECT_NE(status.message().find(says), std::string::npos) << status.message();
  }
  // Without names, a column of DENSE cannot be proved here.
  bad.erase("dense_names");
  bad["context"] = {feature, "height"};
  EXPECT_TRUE(ManifestFromJson(bad.dump()).ok());
}

TEST_F(SnapshotTest, ManifestRefusesWhatItCannotProve) {
  const std::string good = ManifestToJson(Example(table_, {"p", "item", 1, 9, 5, 10, 1}));
  ASSERT_TRUE(ManifestFromJson(good).ok());
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string bad = good;
    bad.replace(bad.find(from), from.size(), to);
    return ManifestFromJson(bad).status();
  };
  EXPECT_EQ(with("\"format_version\": 1", "\"format_version\": 2").code(), Code::kRejected);
  EXPECT_EQ(with("splitmix64", "murmur").code(), Code::kRejected);
  EXPECT_NE(with("\"lineage\"", "\"linage\"").message().find("lineage"), std::string::npos);
  EXPECT_NE(with("\"dim\": 4", "\"dim\": 5").message().find("dim"), std::string::npos);
  EXPECT_NE(with("\"dtype\": \"fp32\"", "\"dtype\": \"fp8\"").message().find("fp8"),
            std::string::npos);
  EXPECT_NE(with("dense/model.pt2", "../../etc/passwd").message().find("leaves"),
            std::string::npos);
  // Numbers that would be cut to fit.
  for (const auto& [from, to, says] :
       {std::array{"\"bucket_bits\": 1", "\"bucket_bits\": 4294967297", "bucket_bits"},
        std::array{"\"version\": 9", "\"version\": -9", "version"},
        std::array{"\"rows\": 5", "\"rows\": 5.5", "rows"},
        std::array{"\"crc32c\": 1", "\"crc32c\": true", "crc32c"},
        std::array{"\"dense_features\": 13", "\"dense_features\": 1e99", "dense_features"},
        std::array{"\"role\": \"program\"", "\"role\": \"magic\"", "magic"},
        std::array{"\"pooling\"", "\"weighed\": 1, \"pooling\"", "weighed"},
        std::array{"\"pooling\"", "\"crossed\": \"cand\", \"pooling\"", "must be array"},
        std::array{"\"lineage\"", "\"requires\": 1, \"lineage\"", "requires"},
        std::array{"\"init_scale\"", "\"init_scale\": 1e99, \"x\"", "init_scale"}}) {
    const Status status = with(from, to);
    EXPECT_EQ(status.code(), Code::kCorrupt) << to;
    EXPECT_NE(status.message().find(says), std::string::npos) << status.message();
  }
  EXPECT_EQ(ManifestFromJson(good.substr(0, good.size() / 2)).status().code(), Code::kCorrupt);
  EXPECT_EQ(ManifestFromJson("[]").status().code(), Code::kCorrupt);
}

TEST_F(SnapshotTest, FieldsOfANewerBuildArePassedOverUnlessTheyAreRequired) {
  const std::string good = ManifestToJson(Example(table_, {"p", "item", 1, 9, 5, 10, 1}));
  std::string newer = good;
  // At the top, and in a table, a feature, a bucket and a dense file.
  for (const std::string at :
       {"\"lineage\"", "\"init_scale\"", "\"pooling\"", "\"rows\"", "\"role\""}) {
    ASSERT_NE(newer.find(at), std::string::npos) << at;
    newer.insert(newer.find(at), "\"since_tomorrow\": {\"a\": [1, -2]}, ");
  }
  const auto read = ManifestFromJson(newer);
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  EXPECT_EQ(ManifestToJson(read.value()), good);

  const auto requiring = [&](const std::string& names) {
    std::string text = good;
    text.insert(text.find("\"lineage\""), "\"requires\": [" + names + "], ");
    return ManifestFromJson(text);
  };
  EXPECT_TRUE(requiring("").ok());
  EXPECT_TRUE(requiring("\"weighed\"").ok());
  const Status refused = requiring("\"weighed\", \"since_tomorrow\"").status();
  EXPECT_EQ(refused.code(), Code::kRejected);
  EXPECT_NE(refused.message().find("\"since_tomorrow\""), std::string::npos) << refused.message();
}

// Each field of each object, absent: it is named.
TEST_F(SnapshotTest, AManifestThatLacksAFieldNamesIt) {
  Manifest manifest = Example(table_, {"p", "item", 1, 9, 5, 10, 1});
  table_.default_row = {1, 2, 3, 4};
  manifest.tables = {table_};
  const auto good = nlohmann::json::parse(ManifestToJson(manifest));
  const auto refused = [](const nlohmann::json& bad, const std::string& name) {
    const Status status = ManifestFromJson(bad.dump()).status();
    EXPECT_EQ(status.code(), Code::kCorrupt) << name;
    EXPECT_NE(status.message().find("'" + name + "'"), std::string::npos) << status.message();
  };
  size_t fields = 0;
  for (const auto& [name, value] : good.items()) {
    nlohmann::json bad = good;
    bad.erase(name);
    refused(bad, name);
    ++fields;
    if (!value.is_array()) continue;
    ASSERT_EQ(value.size(), 1U) << name;
    for (const auto& field : value[0].items()) {
      bad = good;
      bad[name][0].erase(field.key());
      refused(bad, field.key());
      ++fields;
    }
  }
  EXPECT_EQ(fields, 15U + 9 + 3 + 7 + 4);
  const std::string text = ManifestToJson(manifest);
  for (size_t end = 0; end + 1 < text.size(); ++end) {
    ASSERT_EQ(ManifestFromJson(text.substr(0, end)).status().code(), Code::kCorrupt) << end;
  }
}

}  // namespace
}  // namespace embertide
