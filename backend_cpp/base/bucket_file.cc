// Bucket files: docs/formats.md, "Bucket file".
//
//   [header 96][block]...[footer 20]      block: [EBLK][rows][bytes][crc32c][records]
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>

#include "base/file.h"
#include "embertide/checksum.h"
#include "embertide/hash.h"
#include "embertide/snapshot.h"

namespace embertide {
namespace {

constexpr char kMagic[9] = "EMBKT001";
constexpr uint32_t kBlockMagic = 0x4b4c4245;   // "EBLK"
constexpr uint32_t kFooterMagic = 0x444e4545;  // "EEND"

// The byte layout is the struct's: all fields are aligned to their size, without padding.
struct Header {
  char magic[8];
  uint32_t format_version;
  uint32_t header_bytes;
  uint64_t hash_seed;
  char hash_name[16];
  uint64_t version;
  uint64_t rows;
  uint32_t table_id;
  uint32_t bucket;
  uint32_t bucket_bits;
  uint16_t chunks;
  uint16_t chunk_dim;
  uint8_t dtype;
  uint8_t zero[19];
  uint32_t crc32c;  // of all before it
};
static_assert(sizeof(Header) == 96 && offsetof(Header, crc32c) == 92);

struct BlockHeader {
  uint32_t magic;
  uint32_t rows;
  uint32_t bytes;
  uint32_t crc32c;  // of the three fields above, then of the records
};

struct Footer {
  uint32_t magic;
  uint32_t blocks;
  uint32_t rows_low;
  uint32_t rows_high;
  uint32_t crc32c;  // of all before it
};

template <typename T>
std::span<const std::byte> BytesOf(const T& value, size_t n = sizeof(T)) {
  return {reinterpret_cast<const std::byte*>(&value), n};
}

uint32_t BlockCrc(const BlockHeader& header, std::span<const std::byte> records) {
  return Crc32c(records, Crc32c(BytesOf(header, 12)));
}

Header MakeHeader(const TableConfig& table, uint32_t bucket, uint64_t version, uint64_t rows) {
  Header header{};
  std::memcpy(header.magic, kMagic, 8);
  header.format_version = kFormatVersion;
  header.header_bytes = sizeof(Header);
  header.hash_seed = kHashSeed;
  std::strncpy(header.hash_name, kHashName, sizeof(header.hash_name) - 1);
  header.version = version;
  header.rows = rows;
  header.table_id = table.id;
  header.bucket = bucket;
  header.bucket_bits = table.bucket_bits;
  header.chunks = table.layout.chunks;
  header.chunk_dim = table.layout.chunk_dim;
  header.dtype = static_cast<uint8_t>(table.layout.dtype);
  header.crc32c = Crc32c(BytesOf(header, sizeof(Header) - 4));
  return header;
}

// Names the first field in which a header is not the one expected.
Status CompareHeader(const std::string& path, const Header& got, const Header& want) {
  if (std::memcmp(got.magic, want.magic, 8) != 0) {
    return {Code::kCorrupt, path + ": not a bucket file (magic differs)"};
  }
  if (got.format_version != want.format_version) {
    return {Code::kRejected, path + ": format version " + std::to_string(got.format_version) +
                                 ", this build reads " + std::to_string(want.format_version)};
  }
  if (got.crc32c != Crc32c(BytesOf(got, sizeof(Header) - 4))) {
    return {Code::kCorrupt, path + ": the header fails its checksum"};
  }
  const auto differs = [&](const char* field, uint64_t is, uint64_t should) {
    return Status(Code::kRejected, path + ": " + field + " is " + std::to_string(is) +
                                       ", the manifest says " + std::to_string(should));
  };
  const struct {
    const char* name;
    uint64_t got, want;
  } fields[] = {
      {"header_bytes", got.header_bytes, want.header_bytes},
      {"hash seed", got.hash_seed, want.hash_seed},
      {"version", got.version, want.version},
      {"rows", got.rows, want.rows},
      {"table id", got.table_id, want.table_id},
      {"bucket", got.bucket, want.bucket},
      {"bucket_bits", got.bucket_bits, want.bucket_bits},
      {"chunks", got.chunks, want.chunks},
      {"chunk_dim", got.chunk_dim, want.chunk_dim},
      {"dtype", got.dtype, want.dtype},
  };
  for (const auto& field : fields) {
    if (field.got != field.want) return differs(field.name, field.got, field.want);
  }
  if (std::memcmp(got.zero, want.zero, sizeof(got.zero)) != 0) {
    return {Code::kCorrupt, path + ": the reserved bytes of the header are not zero"};
  }
  if (std::memcmp(got.hash_name, want.hash_name, sizeof(got.hash_name)) != 0) {
    return {Code::kRejected, path + ": another hash than " + kHashName};
  }
  return Status::Ok();
}

// Cuts records into blocks of at most kMaxBlockBytes; keys must ascend and be of the bucket.
struct Block {
  size_t begin = 0;
  size_t bytes = 0;
  uint32_t rows = 0;
};
Result<std::vector<Block>> CutBlocks(const TableConfig& table, uint32_t bucket,
                                     std::span<const std::byte> records) {
  std::vector<Block> blocks;
  size_t at = 0;
  uint64_t last_key = 0;
  bool first = true;
  for (auto rest = records; !rest.empty();) {
    const size_t before = rest.size();
    const Result<RowRecord> record = ReadRecord(table.layout, &rest);
    if (!record.ok()) return record.status();
    const uint64_t key = record.value().key;
    if (BucketOfHash(HashKey(key), table.bucket_bits) != bucket || (!first && key <= last_key)) {
      return Status(Code::kCorrupt, "key " + std::to_string(key) + " of table " + table.name +
                                        " is not of bucket " + std::to_string(bucket) +
                                        " or does not ascend");
    }
    const size_t bytes = before - rest.size();
    if (blocks.empty() || blocks.back().bytes + bytes > kMaxBlockBytes)
      blocks.push_back({at, 0, 0});
    blocks.back().bytes += bytes;
    ++blocks.back().rows;
    at += bytes;
    last_key = key;
    first = false;
  }
  return blocks;
}

// Reads a file front to back, counting bytes and their checksum.
class Reader {
 public:
  Reader(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  ~Reader() { close(fd_); }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // The next `n` bytes, or kCorrupt if the file ends before.
  Status Read(std::byte* to, size_t n) {
    size_t done = 0;
    while (done < n) {
      const ssize_t got = read(fd_, to + done, n - done);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return {Code::kDeviceError, path_ + ": " + strerror(errno)};
      if (got == 0) {
        return {Code::kCorrupt, path_ + ": cut short at byte " + std::to_string(offset_ + done) +
                                    ", " + std::to_string(n - done) + " more were expected"};
      }
      done += static_cast<size_t>(got);
    }
    offset_ += n;
    crc_ = Crc32c({to, n}, crc_);
    return Status::Ok();
  }
  Status Fail(const std::string& what) const {
    return {Code::kCorrupt, path_ + " at byte " + std::to_string(offset_) + ": " + what};
  }
  uint64_t offset() const { return offset_; }
  uint32_t crc() const { return crc_; }

 private:
  std::string path_;
  int fd_;
  uint64_t offset_ = 0;
  uint32_t crc_ = 0;
};

template <typename T>
Status ReadStruct(Reader* reader, T* value) {
  return reader->Read(reinterpret_cast<std::byte*>(value), sizeof(T));
}

Status ReadBlocks(Reader* reader, const TableConfig& table, const BucketFileInfo& info,
                  const std::function<Status(std::span<const std::byte>)>& consume) {
  std::vector<std::byte> records;
  uint64_t rows = 0;
  for (uint32_t blocks = 0;; ++blocks) {
    const auto fail = [&](const std::string& what) {
      return reader->Fail("block " + std::to_string(blocks) + ": " + what);
    };
    BlockHeader header;
    EMBERTIDE_RETURN_IF_ERROR(reader->Read(reinterpret_cast<std::byte*>(&header), 16));
    if (header.magic == kFooterMagic) {
      Footer footer;
      std::memcpy(&footer, &header, 16);
      EMBERTIDE_RETURN_IF_ERROR(
          reader->Read(reinterpret_cast<std::byte*>(&footer.crc32c), sizeof(footer.crc32c)));
      if (footer.crc32c != Crc32c(BytesOf(footer, 16)))
        return reader->Fail("the footer fails its checksum");
      const uint64_t footer_rows = uint64_t{footer.rows_high} << 32 | footer.rows_low;
      if (footer.blocks != blocks || footer_rows != rows || rows != info.rows) {
        return reader->Fail("the footer counts " + std::to_string(footer_rows) + " rows, " +
                            std::to_string(rows) + " were read");
      }
      return Status::Ok();
    }
    if (header.magic != kBlockMagic) return fail("its magic differs");
    if (header.bytes > kMaxBlockBytes) {
      return fail("its length of " + std::to_string(header.bytes) + " bytes is too long");
    }
    records.resize(header.bytes);
    EMBERTIDE_RETURN_IF_ERROR(reader->Read(records.data(), records.size()));
    if (header.crc32c != BlockCrc(header, records)) return fail("it fails its checksum");
    const Result<std::vector<Block>> proved = CutBlocks(table, info.bucket, records);
    if (!proved.ok()) return fail(proved.status().message());
    if (proved.value().size() != 1 || proved.value()[0].rows != header.rows) {
      return fail("it does not hold the rows that it counts");
    }
    rows += header.rows;
    EMBERTIDE_RETURN_IF_ERROR(consume(records));
  }
}

}  // namespace

std::string BucketPath(const std::string& table, uint32_t bucket) {
  std::string number = std::to_string(bucket);
  number.insert(0, 6 - std::min<size_t>(6, number.size()), '0');
  return "tables/" + table + "/bucket-" + number + ".emb";
}

Result<BucketFileInfo> WriteBucketFile(const std::string& directory, const TableConfig& table,
                                       uint32_t bucket, uint64_t version,
                                       std::span<const std::byte> records) {
  EMBERTIDE_RETURN_IF_ERROR(table.Validate());
  const Result<std::vector<Block>> blocks = CutBlocks(table, bucket, records);
  if (!blocks.ok()) return blocks.status();
  BucketFileInfo info;
  info.path = BucketPath(table.name, bucket);
  info.table = table.name;
  info.bucket = bucket;
  info.version = version;
  for (const Block& block : blocks.value()) info.rows += block.rows;

  std::vector<std::byte> bytes;
  const auto append = [&](std::span<const std::byte> more) {
    bytes.insert(bytes.end(), more.begin(), more.end());
  };
  append(BytesOf(MakeHeader(table, bucket, version, info.rows)));
  for (const Block& block : blocks.value()) {
    const auto part = records.subspan(block.begin, block.bytes);
    BlockHeader header{kBlockMagic, block.rows, static_cast<uint32_t>(block.bytes), 0};
    header.crc32c = BlockCrc(header, part);
    append(BytesOf(header));
    append(part);
  }
  Footer footer{kFooterMagic, static_cast<uint32_t>(blocks.value().size()),
                static_cast<uint32_t>(info.rows), static_cast<uint32_t>(info.rows >> 32), 0};
  footer.crc32c = Crc32c(BytesOf(footer, 16));
  append(BytesOf(footer));
  info.bytes = bytes.size();
  info.crc32c = Crc32c(bytes);
  EMBERTIDE_RETURN_IF_ERROR(WriteFileAtomically(directory + "/" + info.path, bytes));
  return info;
}

Status ReadBucketFile(const std::string& directory, const TableConfig& table,
                      const BucketFileInfo& info,
                      const std::function<Status(std::span<const std::byte>)>& consume) {
  const std::string path = directory + "/" + info.path;
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return {errno == ENOENT ? Code::kNotFound : Code::kDeviceError, path + ": " + strerror(errno)};
  }
  Reader reader(path, fd);
  struct stat status{};
  if (fstat(fd, &status) != 0) return {Code::kDeviceError, path + ": " + strerror(errno)};
  if (static_cast<uint64_t>(status.st_size) != info.bytes) {
    return {Code::kCorrupt, path + ": " + std::to_string(status.st_size) +
                                " bytes, the manifest says " + std::to_string(info.bytes)};
  }
  Header header;
  EMBERTIDE_RETURN_IF_ERROR(ReadStruct(&reader, &header));
  EMBERTIDE_RETURN_IF_ERROR(
      CompareHeader(path, header, MakeHeader(table, info.bucket, info.version, info.rows)));
  EMBERTIDE_RETURN_IF_ERROR(ReadBlocks(&reader, table, info, consume));
  if (reader.offset() != info.bytes) return reader.Fail("bytes follow the footer");
  if (reader.crc() != info.crc32c) return reader.Fail("the file's checksum is not the manifest's");
  return Status::Ok();
}

}  // namespace embertide
