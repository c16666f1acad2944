// Files, and whole ones read and written so that a reader never sees half of one. Private to the
// backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "embertide/status.h"

namespace embertide {

// The status for errno of a path: kNotFound if there is none, else kDeviceError.
Status FileFailed(const std::string& path);

// Writes all of them, where `fd` stands. FileFailed, naming `path`; some may be written then.
Status WriteAll(int fd, const std::string& path, std::span<const std::byte> bytes);

// Writes under a temporary name, fsyncs, renames, fsyncs the folder; makes missing folders.
// kDeviceError naming the path and errno; the old file, if any, is then still there. `mode`: who
// may read it, before the umask.
Status WriteFileAtomically(const std::string& path, std::span<const std::byte> bytes,
                           uint32_t mode = 0644);

// kNotFound, or kDeviceError; kCorrupt when it is longer than `max_bytes`.
Result<std::string> ReadWholeFile(const std::string& path, size_t max_bytes);

// As ReadWholeFile; kCorrupt, naming the path and what differs, unless the file has this length and
// this CRC32C.
Result<std::string> ReadProvedFile(const std::string& path, uint64_t bytes, uint32_t crc32c);

// A file that stays readable when its name is gone, by another path. Not copied; thread-safe.
class HeldFile {
 public:
  // FileFailed if it cannot be opened.
  static Result<std::unique_ptr<HeldFile>> Open(const std::string& path);
  ~HeldFile();
  HeldFile(const HeldFile&) = delete;
  HeldFile& operator=(const HeldFile&) = delete;

  // Another name of it, which this process alone has, while this lives.
  std::string path() const;

 private:
  explicit HeldFile(int fd) : fd_(fd) {}
  const int fd_;
};

}  // namespace embertide
