// The files of a seal: see the header.
#include "store/seal_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "base/file.h"
#include "base/json.h"
#include "embertide/checksum.h"

namespace embertide {
namespace {

constexpr uint32_t kFormat = 1;
constexpr uint32_t kMagic = 0x4c414553;  // "SEAL"
constexpr uint32_t kPart = 1;
constexpr uint32_t kSegments = 2;
constexpr uint32_t kEnd = 3;
// The largest frame that a reader must buffer. A part is a slice of about 1 MiB.
constexpr uint32_t kMaxFrameBytes = 64U << 20;
constexpr uint32_t kSegmentsAtOnce = 65536;
// Written pages go to the drive in steps, so that they never pile up in the page cache.
constexpr uint64_t kSyncBytes = 8ULL << 20;
constexpr size_t kMaxManifestBytes = 16 << 20;
constexpr const char* kManifest = "/seal.json";

struct FrameHeader {
  uint32_t magic;
  uint32_t kind;
  uint32_t bytes;
  uint32_t crc;
};
struct PartHeader {
  uint32_t table;
  uint32_t bucket;
  uint32_t log;
  uint32_t bucket_rows;
  uint32_t ssd_rows;
  uint32_t zero;
  uint64_t begin;
  uint64_t end;
};
struct SegmentsHeader {
  uint32_t log;
  uint32_t count;
};
static_assert(sizeof(FrameHeader) == 16 && sizeof(PartHeader) == 40 &&
              sizeof(SegmentsHeader) == 8 && sizeof(SealPart::SsdRow) == 16 &&
              sizeof(SealedSegment) == 20);

template <typename T>
void Append(const T& value, std::vector<std::byte>* out) {
  const size_t at = out->size();
  out->resize(at + sizeof(T));
  std::memcpy(out->data() + at, &value, sizeof(T));
}

// Takes a value from the front; false: there are too few bytes.
template <typename T>
bool Take(std::span<const std::byte>* bytes, T* value) {
  if (bytes->size() < sizeof(T)) return false;
  std::memcpy(value, bytes->data(), sizeof(T));
  *bytes = bytes->subspan(sizeof(T));
  return true;
}

uint32_t FrameCrc(const FrameHeader& header, std::span<const std::byte> payload) {
  const auto head = std::as_bytes(std::span(&header, 1)).first(offsetof(FrameHeader, crc));
  return Crc32c(payload, Crc32c(head));
}

Json VersionToJson(const SealedVersion& version) {
  return {{"number", version.number}, {"lineage", version.lineage}, {"proof", version.proof}};
}

SealedVersion VersionFromJson(const Json& json) {
  SealedVersion version;
  Read(json, "number", &version.number);
  Read(json, "lineage", &version.lineage);
  Read(json, "proof", &version.proof);
  return version;
}

Json ToJson(const SealInfo& info) {
  return {{"format", kFormat},
          {"sequence", info.sequence},
          {"model", info.model},
          {"schema_id", info.schema_id},
          {"first", VersionToJson(info.first)},
          {"last", VersionToJson(info.last)},
          {"tables", info.tables},
          {"logs", info.logs},
          {"rows", info.rows},
          {"ddr_rows", info.ddr_rows},
          {"written_ms", info.written_ms},
          {"file", info.file},
          {"file_bytes", info.file_bytes},
          {"segments_at", info.segments_at}};
}

uint32_t CrcOf(const Json& json) {
  const std::string text = json.dump();
  return Crc32c(std::as_bytes(std::span(text)));
}

std::string Joined(const std::vector<std::string>& parts) {
  std::string all;
  for (const std::string& part : parts) all.append(all.empty() ? "" : ", ").append(part);
  return all;
}

}  // namespace

std::vector<std::byte> EncodePart(const SealPart& part) {
  std::vector<std::byte> out;
  out.reserve(sizeof(PartHeader) + part.ssd.size() * sizeof(part.ssd[0]) + part.records.size());
  Append(PartHeader{part.table, part.bucket, part.log, part.bucket_rows,
                    static_cast<uint32_t>(part.ssd.size()), 0, part.begin, part.end},
         &out);
  const auto rows = std::as_bytes(std::span(part.ssd));
  out.insert(out.end(), rows.begin(), rows.end());
  out.insert(out.end(), part.records.begin(), part.records.end());
  return out;
}

Result<SealPart> DecodePart(std::span<const std::byte> payload) {
  PartHeader header{};
  if (!Take(&payload, &header) ||
      payload.size() / sizeof(SealPart::SsdRow) < size_t{header.ssd_rows} ||
      header.begin >= header.end || header.end > kHashEnd) {
    return Status(Code::kCorrupt, "a part cannot be as it says");
  }
  SealPart part{header.table, header.bucket, header.log, header.bucket_rows,
                header.begin, header.end,    {},         {}};
  part.ssd.resize(header.ssd_rows);
  for (SealPart::SsdRow& row : part.ssd) Take(&payload, &row);
  part.records.assign(payload.begin(), payload.end());
  return part;
}

// --- writing -------------------------------------------------------------------------------------

Result<std::unique_ptr<SealWriter>> SealWriter::Create(const std::string& path) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return FileFailed(path);
  return std::unique_ptr<SealWriter>(new SealWriter(path, fd));
}

SealWriter::~SealWriter() { close(fd_); }

Status SealWriter::Write(std::span<const std::byte> bytes) {
  EMBERTIDE_RETURN_IF_ERROR(WriteAll(fd_, path_, bytes));
  bytes_ += bytes.size();
  return Status::Ok();
}

Status SealWriter::AddFrame(uint32_t kind, std::span<const std::byte> payload) {
  if (payload.size() > kMaxFrameBytes) {
    return {Code::kRejected, path_ + ": a frame of " + std::to_string(payload.size()) +
                                 " bytes exceeds " + std::to_string(kMaxFrameBytes)};
  }
  FrameHeader header{kMagic, kind, static_cast<uint32_t>(payload.size()), 0};
  header.crc = FrameCrc(header, payload);
  EMBERTIDE_RETURN_IF_ERROR(Write(std::as_bytes(std::span(&header, 1))));
  EMBERTIDE_RETURN_IF_ERROR(Write(payload));
  if (bytes_ - synced_ < kSyncBytes) return Status::Ok();
  if (fdatasync(fd_) != 0) return FileFailed(path_);
  // Only a start reads it: readers' memory is worth more.
  posix_fadvise(fd_, 0, static_cast<off_t>(bytes_), POSIX_FADV_DONTNEED);
  synced_ = bytes_;
  return Status::Ok();
}

Status SealWriter::Add(const SealPart& part) { return AddFrame(kPart, EncodePart(part)); }

Status SealWriter::Finish(std::span<const std::vector<SealedSegment>> logs, SealInfo* info) {
  info->segments_at = bytes_;
  for (uint32_t log = 0; log < logs.size(); ++log) {
    for (size_t first = 0; first < logs[log].size(); first += kSegmentsAtOnce) {
      const auto some = std::span(logs[log]).subspan(
          first, std::min<size_t>(kSegmentsAtOnce, logs[log].size() - first));
      std::vector<std::byte> payload;
      Append(SegmentsHeader{log, static_cast<uint32_t>(some.size())}, &payload);
      for (const SealedSegment& segment : some) Append(segment, &payload);
      EMBERTIDE_RETURN_IF_ERROR(AddFrame(kSegments, payload));
    }
  }
  EMBERTIDE_RETURN_IF_ERROR(AddFrame(kEnd, {}));
  info->file_bytes = bytes_;
  return fsync(fd_) == 0 ? Status::Ok() : FileFailed(path_);
}

// --- reading -------------------------------------------------------------------------------------

Result<std::unique_ptr<SealReader>> SealReader::Open(const std::string& directory,
                                                     const SealInfo& expected) {
  Result<SealInfo> info = ReadSealInfo(directory);
  if (!info.ok()) return info.status();
  const auto differs = [&](const char* what, const std::vector<std::string>& sealed,
                           const std::vector<std::string>& ours) {
    return Status(Code::kRejected, directory + kManifest + " is of " + what + " " + Joined(sealed) +
                                       "; here they are " + Joined(ours));
  };
  if (info->tables != expected.tables) return differs("tables", info->tables, expected.tables);
  if (info->logs != expected.logs) return differs("logs", info->logs, expected.logs);
  const std::string path = directory + "/" + info->file;
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return FileFailed(path);
  std::unique_ptr<SealReader> reader(new SealReader(path, fd, std::move(*info)));
  struct stat status{};
  if (fstat(fd, &status) != 0) return FileFailed(path);
  if (static_cast<uint64_t>(status.st_size) != reader->info_.file_bytes) {
    return reader->Corrupt(static_cast<uint64_t>(status.st_size), "the file ends here");
  }
  EMBERTIDE_RETURN_IF_ERROR(reader->ReadSegments());
  return reader;
}

SealReader::~SealReader() { close(fd_); }

Status SealReader::Corrupt(uint64_t at, const std::string& what) const {
  return {Code::kCorrupt, path_ + ": offset " + std::to_string(at) + ": " + what};
}

Status SealReader::ReadFrame(uint64_t* at, uint64_t end, uint32_t* kind,
                             std::vector<std::byte>* payload) {
  const auto read = [&](uint64_t from, std::span<std::byte> to) {
    while (!to.empty()) {
      const ssize_t n = pread(fd_, to.data(), to.size(), static_cast<off_t>(from));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return FileFailed(path_);
      if (n == 0) return Corrupt(from, "the file ends here");
      to = to.subspan(static_cast<size_t>(n));
      from += static_cast<uint64_t>(n);
    }
    return Status::Ok();
  };
  FrameHeader header{};
  if (end - *at < sizeof(header)) return Corrupt(*at, "no frame fits here");
  EMBERTIDE_RETURN_IF_ERROR(read(*at, std::as_writable_bytes(std::span(&header, 1))));
  if (header.magic != kMagic || header.bytes > kMaxFrameBytes ||
      header.bytes > end - *at - sizeof(header)) {
    return Corrupt(*at, "this is no frame");
  }
  payload->resize(header.bytes);
  EMBERTIDE_RETURN_IF_ERROR(read(*at + sizeof(header), *payload));
  if (header.crc != FrameCrc(header, *payload)) return Corrupt(*at, "the frame's checksum fails");
  *kind = header.kind;
  *at += sizeof(header) + header.bytes;
  return Status::Ok();
}

Status SealReader::ReadSegments() {
  segments_.resize(info_.logs.size());
  if (info_.segments_at > info_.file_bytes) return Corrupt(info_.segments_at, "past the end");
  uint64_t at = info_.segments_at;
  uint32_t kind = 0;
  std::vector<std::byte> payload;
  while (true) {
    EMBERTIDE_RETURN_IF_ERROR(ReadFrame(&at, info_.file_bytes, &kind, &payload));
    if (kind == kEnd) break;
    std::span<const std::byte> rest = payload;
    SegmentsHeader header{};
    if (kind != kSegments || !Take(&rest, &header) || header.log >= segments_.size() ||
        info_.logs[header.log].empty() ||
        rest.size() != size_t{header.count} * sizeof(SealedSegment)) {
      return Corrupt(at, "before it stand no segments");
    }
    for (SealedSegment segment; Take(&rest, &segment);) segments_[header.log].push_back(segment);
  }
  return at == info_.file_bytes ? Status::Ok() : Corrupt(at, "something follows the end");
}

Status SealReader::ReadParts(const std::function<Status(const SealPart&)>& consume) {
  uint32_t kind = 0;
  std::vector<std::byte> payload;
  posix_fadvise(fd_, 0, static_cast<off_t>(info_.segments_at), POSIX_FADV_SEQUENTIAL);
  for (uint64_t at = 0; at < info_.segments_at;) {
    const uint64_t begin = at;
    EMBERTIDE_RETURN_IF_ERROR(ReadFrame(&at, info_.segments_at, &kind, &payload));
    if (kind != kPart) return Corrupt(begin, "this is no part");
    const Result<SealPart> part = DecodePart(payload);
    if (!part.ok()) return Corrupt(begin, part.status().message());
    const Status consumed = consume(part.value());
    if (consumed.code() == Code::kCorrupt) return Corrupt(begin, consumed.message());
    EMBERTIDE_RETURN_IF_ERROR(consumed);
  }
  return Status::Ok();
}

// --- the manifest --------------------------------------------------------------------------------

Status WriteSealInfo(const std::string& directory, const SealInfo& info) {
  const Json seal = ToJson(info);
  const std::string text = Json{{"seal", seal}, {"crc32c", CrcOf(seal)}}.dump();
  return WriteFileAtomically(directory + kManifest, std::as_bytes(std::span(text)));
}

Result<SealInfo> ReadSealInfo(const std::string& directory) {
  const std::string path = directory + kManifest;
  const Result<std::string> text = ReadWholeFile(path, kMaxManifestBytes);
  if (!text.ok()) return text.status();
  const auto corrupt = [&](const std::string& what) {
    return Status(Code::kCorrupt, path + ": " + what);
  };
  try {
    const Json json = Json::parse(text.value());
    const Json& seal = json.at("seal");
    if (json.at("crc32c").get<uint32_t>() != CrcOf(seal)) return corrupt("its checksum fails");
    if (seal.at("format") != kFormat) {
      return Status(Code::kRejected, path + ": format " + seal.at("format").dump() +
                                         "; this reads " + std::to_string(kFormat));
    }
    SealInfo info;
    Read(seal, "sequence", &info.sequence);
    Read(seal, "model", &info.model);
    Read(seal, "schema_id", &info.schema_id);
    info.first = VersionFromJson(seal.at("first"));
    info.last = VersionFromJson(seal.at("last"));
    Read(seal, "tables", &info.tables);
    Read(seal, "logs", &info.logs);
    Read(seal, "rows", &info.rows);
    Read(seal, "ddr_rows", &info.ddr_rows);
    Read(seal, "written_ms", &info.written_ms);
    Read(seal, "file", &info.file);
    Read(seal, "file_bytes", &info.file_bytes);
    Read(seal, "segments_at", &info.segments_at);
    if (info.file.find('/') != std::string::npos) return corrupt("the file lies elsewhere");
    return info;
  } catch (const std::exception& error) {  // of nlohmann's, or memory
    return corrupt(error.what());
  }
}

Status RemoveSeal(const std::string& directory) {
  const std::string path = directory + kManifest;
  if (unlink(path.c_str()) != 0 && errno != ENOENT) return FileFailed(path);
  return Status::Ok();
}

void RemoveStrays(const std::string& directory, const std::string& kept) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename();
    const bool rows = name.starts_with("seal-") && name.ends_with(".rows");
    if (rows && name != kept) std::filesystem::remove(entry.path(), error);
  }
}

}  // namespace embertide
