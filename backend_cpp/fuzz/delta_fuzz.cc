// A version's delta folder: commit.pb, a delta file and dense tensors, each with right checksums
// around any bytes. A version that is read is the same when it is written again.
//
//   input: [u8 what][message or batches]
#include "bus/test_publication.h"
#include "fuzz/fuzz.h"

namespace embertide::fuzz {
namespace {

constexpr VersionId kId{7, 3};

enum What : uint8_t { kCommit, kBatches, kTensors, kWhats };

TestVersion Example() {
  TestVersion version = TestPublication::Make(
      kId, {6, 3}, {{0, 1, {"aaaa"}}, {0, 65, {"bbbb", "cc"}}, {1, 1, {"dddddd"}}}, 5);
  for (const v1::PartitionCommit& partition : version.file.partitions()) {
    version.file.mutable_commit()->add_partitions()->set_partition(partition.partition());
  }
  return version;
}

std::string Path(const std::string& name) { return "deltas/" + FolderName(kId) + "/" + name; }

void RunCommit(std::string_view message) {
  const auto read = [](const std::string& bytes) {
    Write(Path("commit.pb"),
          "EMCMT001" + Raw(static_cast<uint32_t>(bytes.size())) + Raw(CrcOf(bytes)) + bytes);
    return ReadCommitFile(Folder(), kId);
  };
  const auto file = read(std::string(message));
  if (!file.ok()) {
    EMBERTIDE_CHECK(file.status().code() == Code::kCorrupt);
    return;
  }
  const std::string written = file.value().SerializeAsString();
  const auto again = read(written);
  EMBERTIDE_CHECK(again.ok() && again.value().SerializeAsString() == written);
}

Status ReadDelta(const std::string& bytes, std::vector<v1::RowBatch>* batches) {
  v1::PartitionCommit partition = Example().file.partitions(0);
  partition.set_delta_path("p-1.delta");
  partition.set_delta_bytes(bytes.size());
  partition.set_delta_crc32c(CrcOf(bytes));
  Write(Path("p-1.delta"), bytes);
  return ReadDeltaFile(Folder(), kId, partition, [&](const v1::RowBatch& batch) {
    batches->push_back(batch);
    return Status::Ok();
  });
}

// Batches have right checksums, as far as they can be followed.
std::string Mended(std::string_view bytes) {
  std::string file;
  while (bytes.size() >= 4) {
    const auto length = Take<uint32_t>(&bytes);
    v1::RowBatch batch;
    if (length > bytes.size() || !batch.ParseFromArray(bytes.data(), static_cast<int>(length))) {
      return file + Raw(length) + std::string(bytes);
    }
    batch.set_crc32c(CrcOf(Raw(batch.lineage()) + Raw(batch.version()) + Raw(batch.table_id()) +
                           Raw(batch.bucket()) + Raw(batch.sequence()) + batch.records()));
    const std::string message = batch.SerializeAsString();
    file += Raw(static_cast<uint32_t>(message.size())) + message;
    bytes.remove_prefix(length);
  }
  return file + std::string(bytes);
}

void RunBatches(std::string_view bytes) {
  std::vector<v1::RowBatch> batches;
  if (!ReadDelta("EMDLT001" + Mended(bytes), &batches).ok()) return;
  // The commit counts four batches: these and no others.
  EMBERTIDE_CHECK(batches.size() == 4);
  const std::string written = TestPublication::DeltaBytes(batches);
  std::vector<v1::RowBatch> again;
  EMBERTIDE_CHECK(ReadDelta(written, &again).ok());
  EMBERTIDE_CHECK(TestPublication::DeltaBytes(again) == written);
}

void RunTensors(std::string_view bytes) {
  v1::GlobalCommit commit;
  if (!commit.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
  *commit.mutable_version() = Example().file.commit().version();
  Write(Path("dense.safetensors"), "tensors");
  const auto tensors = ReadDenseTensors(Folder(), commit);
  if (!tensors.ok()) return;
  const bool proved = CrcOf(tensors.value()) == commit.dense_crc32c();
  EMBERTIDE_CHECK(proved || (commit.dense().empty() && commit.dense_path().empty()));
}

}  // namespace

std::vector<std::string> Seeds() {
  google::protobuf::SetLogHandler(nullptr);  // of strings that are no UTF-8
  const TestVersion version = Example();
  v1::GlobalCommit commit = version.file.commit();
  commit.set_dense_path("dense.safetensors");
  commit.set_dense_bytes(7);
  commit.set_dense_crc32c(CrcOf("tensors"));
  return {Raw(kCommit) + version.file.SerializeAsString(),
          Raw(kBatches) + TestPublication::DeltaBytes(version.batches[0]).substr(8),
          Raw(kTensors) + commit.SerializeAsString()};
}

void Run(std::string_view input) {
  switch (Take<uint8_t>(&input) % kWhats) {
    case kCommit:
      return RunCommit(input);
    case kBatches:
      return RunBatches(input);
    default:
      return RunTensors(input);
  }
}

}  // namespace embertide::fuzz
