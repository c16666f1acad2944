// BlockFile: 4 KiB blocks of one file, read in batches: what the SSD tier needs of a device.
//
//   io_uring, libaio   ring_file.h: a batch keeps up to kReadDepth reads in flight
//   pread              a pool of threads, one read each
//   memory             the twin for tests: same contract, in memory
//
// A file is opened with O_DIRECT; a file system that refuses it is read through the page cache, and
// direct() says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "embertide/ssd.h"
#include "embertide/status.h"

namespace embertide {

inline constexpr uint32_t kBlockBytes = 4096;
// Why 128: network and cloud drives give all they have at 64, an NVMe drive near all at 128.
inline constexpr uint32_t kReadDepth = 128;

// Takes blocks[read] when it has come, and says whether its bytes are right. The bytes are gone
// when it returns. It may be called from several threads at a time, for different reads.
using BlockSink = std::function<Status(size_t read, const std::byte* block)>;

class BlockFile {
 public:
  virtual ~BlockFile() = default;
  // Reads all blocks and gives each to `sink` once, in any order; other reads are in flight
  // meanwhile. The first failure ends it: kDeviceError naming the block and errno, or what `sink`
  // said. Thread-safe, also beside Write.
  virtual Status Read(std::span<const uint64_t> blocks, const BlockSink& sink) = 0;
  // Writes `bytes` (a multiple of kBlockBytes, aligned) at `block`. Thread-safe, for different
  // blocks. kDeviceError naming the block and errno; what the blocks then hold is unspecified.
  virtual Status Write(uint64_t block, std::span<const std::byte> bytes) = 0;
  // Waits until what was written is on the drive and would outlive a loss of power. Any thread,
  // also beside Read and Write. kDeviceError naming errno.
  virtual Status Sync() = 0;
  // "io_uring", "libaio", "pread" or "memory".
  virtual const char* engine() const = 0;
  virtual bool direct() const = 0;
};

// Opens `path`, making it if need be; what it holds goes unless `keep`. kDeviceError naming the
// path and errno, or an `engine` that was asked for and that the system refuses; what kAuto passed
// over is added to `refused`.
Result<std::unique_ptr<BlockFile>> OpenBlockFile(const std::string& path, SsdEngine engine,
                                                 std::string* refused = nullptr, bool keep = false);

std::unique_ptr<BlockFile> NewMemoryBlockFile();

// Memory for blocks, aligned for O_DIRECT; grows and is kept by its owner for the next use.
class BlockBuffers {
 public:
  // Room for `blocks` blocks; earlier contents are lost.
  std::byte* Reserve(size_t blocks);

 private:
  std::unique_ptr<std::byte[]> memory_;
  size_t blocks_ = 0;
};

}  // namespace embertide
