// An open file of blocks: what all engines but the twin share. Private to this folder.
#pragma once

#include <cstdint>

#include "ssd/block_file.h"

namespace embertide {

// Owns the descriptor. Thread-safe.
class BlockDescriptor {
 public:
  BlockDescriptor(int fd, bool direct) : fd_(fd), direct_(direct) {}
  ~BlockDescriptor();
  BlockDescriptor(const BlockDescriptor&) = delete;
  BlockDescriptor& operator=(const BlockDescriptor&) = delete;

  int fd() const { return fd_; }
  bool direct() const { return direct_; }
  // As BlockFile::Write.
  Status Write(uint64_t block, std::span<const std::byte> bytes) const;
  // As BlockFile::Sync.
  Status Sync() const;
  // Reads one block into an aligned buffer, waiting for it. kDeviceError naming block and errno.
  Status Read(uint64_t block, std::byte* buffer) const;

 private:
  const int fd_;
  const bool direct_;
};

// The status that `work` gives a read; an exception is kResourceExhausted: reads beside it are
// still on their way to buffers that are to stay.
template <typename Work>
Status Guarded(const Work& work) noexcept {
  try {
    return work();
  } catch (...) {
    return {Code::kResourceExhausted, {}};
  }
}

// kDeviceError naming the block; `error` is errno, 0: the file ends before the block does.
Status ReadFailed(uint64_t block, int error);

std::unique_ptr<BlockFile> NewPreadBlockFile(std::unique_ptr<BlockDescriptor> file);

}  // namespace embertide
