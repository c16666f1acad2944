// The files of a seal (docs/formats.md, "Seal"), written and read frame by frame in bounded memory.
//
//   seal-N.rows:  part ... part | segments ... segments | end
//   frame:        [u32 magic][u32 kind][u32 bytes][u32 crc32c of all but itself][payload]
//
// A reader refuses a seal of which one byte is not what was written. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "embertide/seal.h"
#include "ssd/block_log.h"

namespace embertide {

// One past the largest low half of a hash, by which a bucket is cut into parts.
inline constexpr uint64_t kHashEnd = 1ULL << 32;

// The rows of one bucket whose hashes' low halves are begin, ..., end - 1.
struct SealPart {
  uint32_t table = 0;  // its place in SealInfo::tables
  uint32_t bucket = 0;
  uint32_t log = 0;          // the place of its device in SealInfo::logs
  uint32_t bucket_rows = 0;  // of the whole bucket, about: parts are in the order of hashes, for
                             // which the index needs its room from the first on
  uint64_t begin = 0;
  uint64_t end = 0;
  struct SsdRow {
    uint64_t key = 0;
    uint64_t place = 0;  // live mask, and below it the slot of 38 bits
  };
  std::vector<SsdRow> ssd;
  std::vector<std::byte> records;  // of the rows of DDR
};

std::vector<std::byte> EncodePart(const SealPart& part);
// kCorrupt: the payload is no part.
Result<SealPart> DecodePart(std::span<const std::byte> payload);

// Writes DIR/FILE, which is not looked at before a manifest names it.
class SealWriter {
 public:
  static Result<std::unique_ptr<SealWriter>> Create(const std::string& path);
  ~SealWriter();
  SealWriter(const SealWriter&) = delete;
  SealWriter& operator=(const SealWriter&) = delete;

  // kDeviceError naming the path and errno; kRejected: the part is too large to be read again.
  Status Add(const SealPart& part);
  // After the last part: adds the segments that parts name of each log, ends and syncs the file.
  Status Finish(std::span<const std::vector<SealedSegment>> logs, SealInfo* info);
  uint64_t bytes() const { return bytes_; }

 private:
  SealWriter(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  Status AddFrame(uint32_t kind, std::span<const std::byte> payload);
  Status Write(std::span<const std::byte> bytes);

  const std::string path_;
  const int fd_;
  uint64_t bytes_ = 0;
  uint64_t synced_ = 0;
};

class SealReader {
 public:
  // Opens the seal that DIR/seal.json names. `expected`: its tables and logs are what the seal's
  // must be. Errors are those of ServingStore::Open.
  static Result<std::unique_ptr<SealReader>> Open(const std::string& directory,
                                                  const SealInfo& expected);
  ~SealReader();
  SealReader(const SealReader&) = delete;
  SealReader& operator=(const SealReader&) = delete;

  const SealInfo& info() const { return info_; }
  // The segments that the seal names of each log.
  const std::vector<std::vector<SealedSegment>>& segments() const { return segments_; }
  // Gives every part to `consume`, whose error is passed on. kCorrupt, kDeviceError naming the
  // file.
  Status ReadParts(const std::function<Status(const SealPart&)>& consume);

 private:
  SealReader(std::string path, int fd, SealInfo info)
      : path_(std::move(path)), fd_(fd), info_(std::move(info)) {}
  Status ReadSegments();
  Status ReadFrame(uint64_t* at, uint64_t end, uint32_t* kind, std::vector<std::byte>* payload);
  Status Corrupt(uint64_t at, const std::string& what) const;

  const std::string path_;
  const int fd_;
  const SealInfo info_;
  std::vector<std::vector<SealedSegment>> segments_;
};

// Makes `info` the directory's seal, by rename; the one before it is then none.
Status WriteSealInfo(const std::string& directory, const SealInfo& info);
// There is no seal any more. kDeviceError naming the file.
Status RemoveSeal(const std::string& directory);
// Removes files of rows that are not `kept`: of seals that were superseded, or never complete.
void RemoveStrays(const std::string& directory, const std::string& kept);

}  // namespace embertide
