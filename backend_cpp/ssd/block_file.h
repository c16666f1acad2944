// BlockFile: 4 KiB blocks of one file, read in batches: what the SSD tier needs of a device.
//
// The engine in use is shown by name. PreadBlockFile reads with O_DIRECT through a small pool of
// threads; a file system that refuses O_DIRECT is read through the page cache, and engine() says
// so. MemoryBlockFile is the twin for tests: same contract, in memory, and it can fail on demand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "embertide/status.h"

namespace embertide {

inline constexpr uint32_t kBlockBytes = 4096;

struct BlockRead {
  uint64_t block = 0;
  std::byte* buffer = nullptr;  // kBlockBytes, aligned to kBlockBytes
};

class BlockFile {
 public:
  virtual ~BlockFile() = default;
  // Reads all blocks or fails with kDeviceError naming the block; thread-safe, also beside Write.
  virtual Status Read(std::span<const BlockRead> reads) = 0;
  // Writes `bytes` (a multiple of kBlockBytes, aligned) at `block`. One writer.
  virtual Status Write(uint64_t block, std::span<const std::byte> bytes) = 0;
  // "pread-direct", "pread-buffered" or "memory".
  virtual const char* engine() const = 0;
};

// Opens (creating or truncating) `path`. `threads` read a batch side by side.
// kDeviceError naming the path and errno.
Result<std::unique_ptr<BlockFile>> OpenPreadBlockFile(const std::string& path, uint32_t threads);

// `fail`, if set, is asked before each operation with the block number; true makes it fail.
std::unique_ptr<BlockFile> NewMemoryBlockFile(std::function<bool(uint64_t)> fail = nullptr);

}  // namespace embertide
