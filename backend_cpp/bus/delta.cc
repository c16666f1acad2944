// Reading delta folders, and the proofs of messages.
#include "bus/delta.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string_view>
#include <utility>

#include "base/file.h"
#include "embertide/checksum.h"

namespace embertide {
namespace {

constexpr std::array<char, 8> kDeltaMagic = {'E', 'M', 'D', 'L', 'T', '0', '0', '1'};
constexpr std::array<char, 8> kCommitMagic = {'E', 'M', 'C', 'M', 'T', '0', '0', '1'};
// A commit names at most 64 partitions of 2^17 buckets in some tens of tables.
constexpr size_t kMaxCommitFileBytes = size_t{64} << 20;
constexpr size_t kMaxDenseBytes = size_t{1} << 30;
constexpr uint32_t kPartitions = 64;

Status Corrupt(const std::string& path, const std::string& what) {
  return {Code::kCorrupt, path + ": " + what};
}

template <typename T>
T Load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

std::string DeltaFolder(const std::string& publication, VersionId id) {
  return publication + "/deltas/" + FolderName(id) + "/";
}

// A plain name inside the folder: 1 to 64 of a-z 0-9 _ - and, not first, the dot.
Status CheckName(const std::string& name) {
  const bool plain = std::ranges::all_of(name, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '-' || c == '.';
  });
  if (plain && !name.empty() && name.size() <= 64 && name[0] != '.') return Status::Ok();
  return {Code::kCorrupt, "file name \"" + name + "\" of a commit"};
}

// A number of `digits` to 19 digits.
bool ParseDigits(std::string_view text, size_t digits, uint64_t* number) {
  const bool all = std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
  return all && text.size() >= digits && text.size() <= 19 &&
         std::from_chars(text.begin(), text.end(), *number).ptr == text.end();
}

// Holds the batches of a file against what its partition commit says of their buckets.
class BatchCounts {
 public:
  explicit BatchCounts(const v1::PartitionCommit& partition) {
    for (const v1::BucketSequence& each : partition.buckets()) {
      valid_ = valid_ && each.batches() > 0 && each.batches() <= each.sequence();
      wanted_[{each.table_id(), each.bucket()}] = {each.sequence() - each.batches() + 1,
                                                   each.sequence()};
    }
  }
  // Whether `batch` is the next of its bucket.
  bool Take(const v1::RowBatch& batch) {
    const auto found = wanted_.find({batch.table_id(), batch.bucket()});
    if (found == wanted_.end() || batch.sequence() != found->second.first ||
        batch.sequence() > found->second.second) {
      return false;
    }
    ++found->second.first;
    return true;
  }
  bool Complete() const {
    return valid_ && std::ranges::all_of(wanted_, [](const auto& each) {
             return each.second.first == each.second.second + 1;
           });
  }

 private:
  // (table, bucket) -> the sequences that come next and last
  std::map<std::pair<uint32_t, uint32_t>, std::pair<uint64_t, uint64_t>> wanted_;
  bool valid_ = true;
};

}  // namespace

VersionId IdOf(const v1::Version& version) { return {version.number(), version.lineage()}; }

std::string FolderName(VersionId id) {
  std::array<char, 64> name{};
  std::snprintf(name.data(), name.size(), "%012llu-%06llu",
                static_cast<unsigned long long>(id.number),
                static_cast<unsigned long long>(id.lineage));
  return name.data();
}

std::string Text(VersionId id) {
  return "version " + std::to_string(id.number) + " of lineage " + std::to_string(id.lineage);
}

std::vector<VersionId> ListVersions(const std::string& parent, const std::string& file) {
  std::vector<VersionId> ids;
  std::error_code error;
  for (std::filesystem::directory_iterator it(parent, error), end; !error && it != end;
       it.increment(error)) {
    const std::string name = it->path().filename().string();
    const size_t dash = std::min(name.find('-'), name.size());
    VersionId id;
    std::error_code none;
    if (ParseDigits(std::string_view(name).substr(0, dash), 12, &id.number) && dash < name.size() &&
        ParseDigits(std::string_view(name).substr(dash + 1), 6, &id.lineage) &&
        std::filesystem::exists(it->path() / file, none)) {
      ids.push_back(id);
    }
  }
  std::sort(ids.begin(), ids.end());
  return ids;
}

// Magic, u32 length, u32 CRC32C of the message, the message; nothing follows.
Result<v1::CommitFile> ReadCommitFile(const std::string& publication, VersionId id) {
  const std::string path = DeltaFolder(publication, id) + "commit.pb";
  const Result<std::string> bytes = ReadWholeFile(path, kMaxCommitFileBytes);
  if (!bytes.ok()) return bytes.status();
  const std::string& text = bytes.value();
  if (text.size() < 16 || std::memcmp(text.data(), kCommitMagic.data(), 8) != 0) {
    return Corrupt(path, "no commit file");
  }
  const auto length = Load<uint32_t>(text.data() + 8);
  const std::span<const char> message(text.data() + 16, text.size() - 16);
  if (length != message.size()) return Corrupt(path, "its length is not what it says");
  if (Load<uint32_t>(text.data() + 12) != Crc32c(std::as_bytes(message))) {
    return Corrupt(path, "its checksum is not what it says");
  }
  v1::CommitFile file;
  if (!file.ParseFromArray(message.data(), static_cast<int>(message.size())) ||
      IdOf(file.commit().version()) != id) {
    return Corrupt(path, "it is no commit of " + Text(id));
  }
  if (file.partitions_size() != file.commit().partitions_size()) {
    return Corrupt(path, "it holds " + std::to_string(file.partitions_size()) +
                             " partition commits and names " +
                             std::to_string(file.commit().partitions_size()));
  }
  for (int i = 0; i < file.partitions_size(); ++i) {
    const v1::PartitionCommit& partition = file.partitions(i);
    if (partition.partition() != file.commit().partitions(i).partition() ||
        VersionId{partition.version(), partition.lineage()} != id) {
      return Corrupt(path, "partition commit " + std::to_string(i) + " is not the one it names");
    }
  }
  return file;
}

// Magic, then batches, each u32 length and message; its CRC32C stands in the partition commit.
Status ReadDeltaFile(const std::string& publication, VersionId id,
                     const v1::PartitionCommit& partition,
                     const std::function<Status(const v1::RowBatch&)>& consume) {
  EMBERTIDE_RETURN_IF_ERROR(CheckName(partition.delta_path()));
  const std::string path = DeltaFolder(publication, id) + partition.delta_path();
  std::error_code error;
  const uint64_t size = std::filesystem::file_size(path, error);
  std::ifstream file(path, std::ios::binary);
  if (error || !file) return FileFailed(path);
  if (size != partition.delta_bytes()) {
    return Corrupt(path, std::to_string(size) + " bytes, its commit says " +
                             std::to_string(partition.delta_bytes()));
  }
  uint32_t crc = 0;
  std::string text;
  const auto read = [&](uint64_t count) {
    text.resize(count);
    file.read(text.data(), static_cast<std::streamsize>(count));
    crc = Crc32c(std::as_bytes(std::span(text)), crc);
    return file.good();
  };
  if (!read(8) || std::memcmp(text.data(), kDeltaMagic.data(), 8) != 0) {
    return Corrupt(path, "no delta file");
  }
  BatchCounts counts(partition);
  v1::RowBatch batch;
  for (uint64_t at = 8; at < size;) {
    if (size - at < 4 || !read(4)) return Corrupt(path, "cut at byte " + std::to_string(at));
    const auto length = Load<uint32_t>(text.data());
    at += 4;
    if (length > size - at || length > kMaxBatchBytes || !read(length) ||
        !batch.ParseFromString(text) || batch.lineage() != id.lineage ||
        batch.version() != id.number) {
      return Corrupt(path, "no batch of " + Text(id) + " at byte " + std::to_string(at));
    }
    if (const Status proved = CheckBatch(batch); !proved.ok()) {
      return Corrupt(path, proved.message());
    }
    if (batch.bucket() % kPartitions != partition.partition() || !counts.Take(batch)) {
      return Corrupt(path, "its commit names no batch " + std::to_string(batch.sequence()) +
                               " of table " + std::to_string(batch.table_id()) + ", bucket " +
                               std::to_string(batch.bucket()) + " here");
    }
    EMBERTIDE_RETURN_IF_ERROR(consume(batch));
    at += length;
  }
  if (!counts.Complete()) return Corrupt(path, "it lacks batches that its commit names");
  if (crc != partition.delta_crc32c()) {
    return Corrupt(path, "its checksum is not the one that its commit says");
  }
  return Status::Ok();
}

Result<std::string> ReadDenseTensors(const std::string& publication,
                                     const v1::GlobalCommit& commit) {
  if (!commit.dense().empty()) {
    if (Crc32c(std::as_bytes(std::span(commit.dense()))) != commit.dense_crc32c()) {
      return Status(Code::kCorrupt, "the dense tensors of " + Text(IdOf(commit.version())) +
                                        " have another checksum than their commit says");
    }
    return commit.dense();
  }
  if (commit.dense_path().empty()) return std::string();
  EMBERTIDE_RETURN_IF_ERROR(CheckName(commit.dense_path()));
  if (commit.dense_bytes() > kMaxDenseBytes) {
    return Status(Code::kCorrupt, "dense tensors of " + std::to_string(commit.dense_bytes()) +
                                      " bytes are too many");
  }
  return ReadProvedFile(DeltaFolder(publication, IdOf(commit.version())) + commit.dense_path(),
                        commit.dense_bytes(), commit.dense_crc32c());
}

Status CheckBatch(const v1::RowBatch& batch) {
  std::array<std::byte, 32> header{};
  const std::array<uint64_t, 2> longs = {batch.lineage(), batch.version()};
  const std::array<uint32_t, 2> ints = {batch.table_id(), batch.bucket()};
  const uint64_t sequence = batch.sequence();
  std::memcpy(header.data(), longs.data(), 16);
  std::memcpy(header.data() + 16, ints.data(), 8);
  std::memcpy(header.data() + 24, &sequence, 8);
  const uint32_t crc = Crc32c(std::as_bytes(std::span(batch.records())), Crc32c(header));
  if (crc == batch.crc32c()) return Status::Ok();
  return {Code::kCorrupt, "batch " + std::to_string(sequence) + " of table " +
                              std::to_string(batch.table_id()) + ", bucket " +
                              std::to_string(batch.bucket()) + " fails its checksum"};
}

}  // namespace embertide
