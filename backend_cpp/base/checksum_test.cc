#include "embertide/checksum.h"

#include <gtest/gtest.h>

#include <vector>

namespace embertide {
namespace {

TEST(ChecksumTest, JoinsPiecesOfAnyLength) {
  std::vector<std::byte> bytes(5000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 31 + i / 7);
  const std::span<const std::byte> all(bytes);
  for (const size_t cut : {0U, 1U, 2U, 255U, 256U, 4096U, 4999U, 5000U}) {
    const uint32_t first = Crc32c(all.first(cut));
    const uint32_t second = Crc32c(all.subspan(cut));
    EXPECT_EQ(JoinCrc32c(first, second, bytes.size() - cut), Crc32c(all)) << cut;
  }
}

}  // namespace
}  // namespace embertide
