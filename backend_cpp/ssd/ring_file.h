// ReadRing: one thread's reads in flight, by the kernel's asynchronous interfaces. RingBlockFile: a
// file read through a bounded pool of them. Private to this folder.
#pragma once

#include <memory>
#include <span>

#include "ssd/file_descriptor.h"

namespace embertide {

// kReadDepth buffers, each of which one read at a time fills. One thread at a time. Requires: no
// read is in flight when it is destroyed.
class ReadRing {
 public:
  ReadRing() : memory_(buffers_.Reserve(kReadDepth)) {}
  virtual ~ReadRing() = default;
  ReadRing(const ReadRing&) = delete;
  ReadRing& operator=(const ReadRing&) = delete;

  struct Done {
    uint32_t buffer = 0;
    int result = 0;  // bytes that came, or -errno
  };
  std::byte* Buffer(uint32_t buffer) const { return memory_ + size_t{buffer} * kBlockBytes; }
  // Notes a read of `block` into a buffer that no other read fills.
  virtual void Queue(uint32_t buffer, uint64_t block) = 0;
  // Starts what was noted and waits until `least` reads are done, or more; returns how many it put
  // into `done` (kReadDepth places); it may be fewer, for the caller to ask again.
  virtual uint32_t Wait(uint32_t least, std::span<Done> done) = 0;

 private:
  BlockBuffers buffers_;
  std::byte* const memory_;
};

// A ring for the file, or kDeviceError with what the system said (or that it was not built in).
Result<std::unique_ptr<ReadRing>> MakeUringRing(int fd);
Result<std::unique_ptr<ReadRing>> MakeAioRing(int fd);

using MakeRing = Result<std::unique_ptr<ReadRing>> (*)(int fd);

// Makes the first ring to learn whether the system lets us; `file` is taken only if it does.
Result<std::unique_ptr<BlockFile>> NewRingBlockFile(const char* engine, MakeRing make,
                                                    std::unique_ptr<BlockDescriptor>* file);

}  // namespace embertide
