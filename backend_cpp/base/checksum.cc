// CRC32C by ISA-L, which picks the fastest code for the CPU at run time.
#include "embertide/checksum.h"

#include <isa-l/crc.h>

#include <algorithm>

namespace embertide {
namespace {

// Polynomials over GF(2) modulo Castagnoli's, the highest power in the lowest bit.
constexpr uint32_t kPolynomial = 0x82f63b78U;
constexpr uint32_t kOne = 1U << 31;         // x^0
constexpr uint32_t kByte = 1U << (31 - 8);  // x^8: what a byte more multiplies by

uint32_t Product(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (; a != 0; a <<= 1) {
    if ((a & kOne) != 0) product ^= b;
    b = (b & 1U) != 0 ? b >> 1 ^ kPolynomial : b >> 1;
  }
  return product;
}

}  // namespace

uint32_t JoinCrc32c(uint32_t first, uint32_t second, uint64_t second_bytes) {
  uint32_t shift = kOne;
  for (uint32_t power = kByte; second_bytes != 0; second_bytes >>= 1) {
    if ((second_bytes & 1U) != 0) shift = Product(shift, power);
    power = Product(power, power);
  }
  return Product(shift, first) ^ second;
}

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
