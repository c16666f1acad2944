// Whole files: see the header.
#include "base/file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "embertide/checksum.h"

namespace embertide {
namespace {

Status WriteAndSync(const std::string& path, std::span<const std::byte> bytes, uint32_t mode) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, mode);
  if (fd < 0) return FileFailed(path);
  Status status = WriteAll(fd, path, bytes);
  if (status.ok() && fsync(fd) != 0) status = FileFailed(path);
  close(fd);
  return status;
}

}  // namespace

Status FileFailed(const std::string& path) {
  return {errno == ENOENT ? Code::kNotFound : Code::kDeviceError, path + ": " + strerror(errno)};
}

Status WriteAll(int fd, const std::string& path, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return FileFailed(path);
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return Status::Ok();
}

Status WriteFileAtomically(const std::string& path, std::span<const std::byte> bytes,
                           uint32_t mode) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return {Code::kDeviceError, folder.string() + ": " + error.message()};
  // One name a process: writers of one path in one process are serialised by their owner.
  const std::string temporary = path + ".tmp" + std::to_string(getpid());
  Status status = WriteAndSync(temporary, bytes, mode);
  if (status.ok() && rename(temporary.c_str(), path.c_str()) != 0) status = FileFailed(path);
  if (!status.ok()) {
    unlink(temporary.c_str());
    return status;
  }
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return FileFailed(folder.string());
  if (fsync(fd) != 0) status = FileFailed(folder.string());
  close(fd);
  return status;
}

Result<std::string> ReadWholeFile(const std::string& path, size_t max_bytes) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return FileFailed(path);
  std::string text;
  char buffer[65536];
  Status status = Status::Ok();
  while (status.ok()) {
    const ssize_t n = read(fd, buffer, sizeof(buffer));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) status = FileFailed(path);
    if (n <= 0) break;
    text.append(buffer, static_cast<size_t>(n));
    if (text.size() > max_bytes) {
      status = {Code::kCorrupt, path + ": longer than " + std::to_string(max_bytes) + " bytes"};
    }
  }
  close(fd);
  if (!status.ok()) return status;
  return text;
}

Result<std::string> ReadProvedFile(const std::string& path, uint64_t bytes, uint32_t crc32c) {
  Result<std::string> text = ReadWholeFile(path, bytes);
  if (!text.ok()) return text;
  const auto differs = [&](const char* what, uint64_t is, uint64_t want) {
    return Status(Code::kCorrupt, path + ": " + what + " is " + std::to_string(is) +
                                      ", its manifest says " + std::to_string(want));
  };
  if (text.value().size() != bytes) return differs("length", text.value().size(), bytes);
  const uint32_t crc = Crc32c(std::as_bytes(std::span(text.value())));
  if (crc != crc32c) return differs("CRC32C", crc, crc32c);
  return text;
}

Result<std::unique_ptr<HeldFile>> HeldFile::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return FileFailed(path);
  return std::unique_ptr<HeldFile>(new HeldFile(fd));
}

HeldFile::~HeldFile() { close(fd_); }

std::string HeldFile::path() const { return "/proc/self/fd/" + std::to_string(fd_); }

}  // namespace embertide
