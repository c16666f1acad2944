// CRC32C by ISA-L, which picks the fastest code for the CPU at run time.
#include "embertide/checksum.h"

#include <isa-l/crc.h>

#include <algorithm>

namespace embertide {

uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t seed) {
  // ISA-L takes an int length and leaves both inversions to the caller.
  constexpr size_t kMaxStep = 1U << 30;
  uint32_t crc = ~seed;
  while (!bytes.empty()) {
    const size_t step = std::min(bytes.size(), kMaxStep);
    // The C signature lacks a const; the bytes are only read.
    auto* data = reinterpret_cast<unsigned char*>(const_cast<std::byte*>(bytes.data()));
    crc = crc32_iscsi(data, static_cast<int>(step), crc);
    bytes = bytes.subspan(step);
  }
  return ~crc;
}

}  // namespace embertide
