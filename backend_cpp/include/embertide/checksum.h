// CRC32C (Castagnoli), the checksum of every file, block and message. Pure; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace embertide {

// The CRC32C of `bytes`; `seed` is the CRC of what came before them, 0 at the start.
uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t seed = 0);

// The CRC32C of two pieces, one behind the other, from those of each: what several writers of one
// file know together. `second_bytes`: the second one's length.
uint32_t JoinCrc32c(uint32_t first, uint32_t second, uint64_t second_bytes);

}  // namespace embertide
