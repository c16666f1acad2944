// The SSD log over a device that gives back other bytes than it was given: every byte of every
// block counts, and the block is named.
#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "ssd/block_log.h"

namespace embertide {
namespace {

constexpr uint64_t kBlocks = 3;
constexpr uint32_t kRowBytes = 500;
constexpr uint32_t kTable = 3;

// Changes the bytes that a read of a block gets.
using Harm = std::function<void(uint64_t block, std::byte* bytes)>;

class HarmfulFile : public BlockFile {
 public:
  explicit HarmfulFile(const Harm* harm) : harm_(harm) {}
  Status Read(std::span<const uint64_t> blocks, const BlockSink& sink) override {
    return file_->Read(blocks, [&](size_t read, const std::byte* block) {
      std::vector<std::byte> bytes(block, block + kBlockBytes);
      (*harm_)(blocks[read], bytes.data());
      return sink(read, bytes.data());
    });
  }
  Status Write(uint64_t block, std::span<const std::byte> bytes) override {
    return file_->Write(block, bytes);
  }
  Status Sync() override { return file_->Sync(); }
  const char* engine() const override { return "harmful"; }
  bool direct() const override { return false; }

 private:
  std::unique_ptr<BlockFile> file_ = NewMemoryBlockFile();
  const Harm* harm_;
};

class BlockCorruptionTest : public ::testing::Test {
 protected:
  BlockCorruptionTest() : log_(std::make_unique<HarmfulFile>(&harm_), 2 * kSegmentBytes) {
    std::vector<std::byte> row(kRowBytes, std::byte{7});
    std::vector<LogEntry> entries;
    for (uint64_t key = 0; key < 7 * kBlocks; ++key) entries.push_back({key, kTable, row});
    EXPECT_TRUE(log_.Append(entries, &slots_).ok());
    EXPECT_EQ(slots_.back() >> kSsdOffsetBits, kBlocks - 1);
  }
  Status Read(uint64_t key) {
    std::array<std::byte, kRowBytes> row;
    LogRead read{slots_[key], key, kTable, kRowBytes, row.data()};
    return log_.Read({&read, 1});
  }
  // The last row of a block.
  static uint64_t KeyIn(uint64_t block) { return 7 * block + 6; }
  void ExpectOnlyBlockRefused(uint64_t harmed, const std::string& how) {
    for (uint64_t block = 0; block < kBlocks; ++block) {
      const Status status = Read(KeyIn(block));
      if (block != harmed) {
        ASSERT_TRUE(status.ok()) << how << ": " << status.ToString();
        continue;
      }
      ASSERT_EQ(status.code(), Code::kCorrupt) << how;
      ASSERT_NE(status.message().find("block " + std::to_string(harmed)), std::string::npos)
          << how << ": " << status.message();
    }
  }

  Harm harm_ = [](uint64_t, std::byte*) {};
  BlockLog log_;
  std::vector<uint64_t> slots_;
};

TEST_F(BlockCorruptionTest, EveryByteOfEveryBlock) {
  for (uint64_t block = 0; block < kBlocks; ++block) {
    for (uint32_t at = 0; at < kBlockBytes; ++at) {
      harm_ = [=](uint64_t read, std::byte* bytes) {
        if (read == block) bytes[at] ^= static_cast<std::byte>(1U << at % 8);
      };
      ASSERT_NO_FATAL_FAILURE(ExpectOnlyBlockRefused(block, "byte " + std::to_string(at)));
    }
  }
}

// A write that was torn: what follows is what was there before.
TEST_F(BlockCorruptionTest, EveryTearAtASector) {
  for (uint64_t block = 0; block < kBlocks; ++block) {
    for (uint32_t from = 0; from < kBlockBytes; from += 512) {
      harm_ = [=](uint64_t read, std::byte* bytes) {
        if (read == block) std::memset(bytes + from, 0, kBlockBytes - from);
      };
      ASSERT_NO_FATAL_FAILURE(ExpectOnlyBlockRefused(block, "torn at " + std::to_string(from)));
    }
  }
}

// A whole block of another place, with a checksum that holds.
TEST_F(BlockCorruptionTest, ABlockInThePlaceOfAnother) {
  std::vector<std::byte> other(kBlockBytes);
  harm_ = [&](uint64_t, std::byte* bytes) { std::memcpy(other.data(), bytes, kBlockBytes); };
  ASSERT_TRUE(Read(KeyIn(2)).ok());
  harm_ = [&](uint64_t read, std::byte* bytes) {
    if (read == 1) std::memcpy(bytes, other.data(), kBlockBytes);
  };
  ExpectOnlyBlockRefused(1, "another block");
}

}  // namespace
}  // namespace embertide
