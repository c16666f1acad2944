// Bucket files: what is read can be written and read again; no byte of a valid file may differ.
//
//   input: [u8 mend][u16 flip][file]    mend: checksums are put right before the file is read
#include <sys/mman.h>
#include <unistd.h>

#include "embertide/checksum.h"
#include "embertide/hash.h"
#include "embertide/snapshot.h"
#include "fuzz/fuzz.h"

namespace embertide::fuzz {
namespace {

constexpr size_t kHeader = 96;
constexpr uint64_t kVersion = 9;
constexpr uint32_t kBucket = 1;

const TableConfig& Table() {
  static const TableConfig table = [] {
    TableConfig made;
    made.name = "item";
    made.id = 3;
    made.layout = {2, 2, DType::kFp16};
    made.bucket_bits = 1;
    return made;
  }();
  return table;
}

std::vector<std::byte> Records(int rows) {
  std::vector<std::byte> records;
  for (uint64_t key = 0; rows > 0; ++key) {
    if (BucketOfHash(HashKey(key), 1) != kBucket) continue;
    const auto live = static_cast<uint16_t>(key % 4);
    const std::vector<std::byte> payload(Table().layout.PayloadBytes(live),
                                         static_cast<std::byte>(key));
    AppendRecord({key, live, RecordKind::kRow, payload}, &records);
    --rows;
  }
  return records;
}

uint32_t CrcOf(std::string_view bytes) { return Crc32c(std::as_bytes(std::span(bytes))); }

void Put(std::string* file, size_t at, uint32_t value) {
  std::memcpy(file->data() + at, &value, sizeof(value));
}

uint32_t Get(const std::string& file, size_t at) {
  uint32_t value = 0;
  std::memcpy(&value, file.data() + at, sizeof(value));
  return value;
}

// Header, then blocks [magic][rows][bytes][crc][records] as far as they can be followed, then the
// footer.
void MendChecksums(std::string* file) {
  if (file->size() < kHeader) return;
  Put(file, kHeader - 4, CrcOf(std::string_view(*file).substr(0, kHeader - 4)));
  size_t at = kHeader;
  while (file->size() - at >= 20) {
    const uint32_t bytes = Get(*file, at + 8);
    if (std::string_view(*file).substr(at, 4) == "EEND") {
      Put(file, at + 16, CrcOf(std::string_view(*file).substr(at, 16)));
      return;
    }
    if (bytes > file->size() - at - 16) return;
    const std::string_view records = std::string_view(*file).substr(at + 16, bytes);
    const std::string_view header = std::string_view(*file).substr(at, 12);
    Put(file, at + 12, Crc32c(std::as_bytes(std::span(records)), CrcOf(header)));
    at += 16 + bytes;
  }
}

// Reads `bytes` as a bucket file that the manifest vouches for, with this many rows.
Status Read(std::string_view bytes, uint64_t rows, uint32_t crc, std::vector<std::byte>* records) {
  static const int fd = memfd_create("bucket", MFD_CLOEXEC);
  EMBERTIDE_CHECK(ftruncate(fd, 0) == 0);
  EMBERTIDE_CHECK(pwrite(fd, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  BucketFileInfo info;
  info.path = std::to_string(fd);
  info.table = Table().name;
  info.bucket = kBucket;
  info.version = kVersion;
  info.rows = rows;
  info.bytes = bytes.size();
  info.crc32c = crc;
  return ReadBucketFile("/proc/self/fd", Table(), info, [&](std::span<const std::byte> block) {
    records->insert(records->end(), block.begin(), block.end());
    return Status::Ok();
  });
}

}  // namespace

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  for (const int rows : {0, 1, 5}) {
    const auto info = WriteBucketFile(Folder(), Table(), kBucket, kVersion, Records(rows));
    EMBERTIDE_CHECK(info.ok());
    std::string file(info.value().bytes, '\0');
    FILE* in = std::fopen((Folder() + "/" + info.value().path).c_str(), "rb");
    EMBERTIDE_CHECK(in != nullptr && std::fread(file.data(), 1, file.size(), in) == file.size());
    std::fclose(in);
    seeds.push_back(Raw<uint8_t>(1) + Raw<uint16_t>(40) + file);
  }
  return seeds;
}

void Run(std::string_view input) {
  const bool mend = Take<uint8_t>(&input) != 0;
  const auto flip = Take<uint16_t>(&input);
  std::string file(input);
  if (mend) MendChecksums(&file);
  uint64_t rows = 0;
  if (file.size() >= kHeader) std::memcpy(&rows, file.data() + 56 - 8, sizeof(rows));
  std::vector<std::byte> records;
  if (!Read(file, rows, CrcOf(file), &records).ok()) return;

  const auto again = WriteBucketFile(Folder(), Table(), kBucket, kVersion, records);
  EMBERTIDE_CHECK(again.ok() && again.value().rows == rows);
  std::vector<std::byte> back;
  EMBERTIDE_CHECK(ReadBucketFile(Folder(), Table(), again.value(), [&](auto block) {
                    back.insert(back.end(), block.begin(), block.end());
                    return Status::Ok();
                  }).ok());
  EMBERTIDE_CHECK(back == records);
  // Harmed after the manifest was written.
  const uint32_t crc = CrcOf(file);
  file[flip % file.size()] ^= static_cast<char>(1U << flip % 8);
  EMBERTIDE_CHECK(!Read(file, rows, crc, &back).ok());
}

}  // namespace embertide::fuzz
