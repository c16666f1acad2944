// BlockLog: rows come back, segments are reused, and bad blocks are found.
#include "ssd/block_log.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

namespace embertide {
namespace {

std::vector<std::byte> RowOf(uint64_t key, size_t bytes) {
  return std::vector<std::byte>(bytes, static_cast<std::byte>(key * 7 + 1));
}

// Both engines give the same answers to the same calls.
class BlockLogTest : public ::testing::TestWithParam<bool> {
 protected:
  BlockLogTest()
      : path_(std::filesystem::temp_directory_path() /
              ("embertide-log-" + std::to_string(::getpid()))) {}
  ~BlockLogTest() override { std::filesystem::remove(path_); }
  std::unique_ptr<BlockFile> File() {
    if (GetParam()) return NewMemoryBlockFile();
    return std::move(*OpenPreadBlockFile(path_, 4));
  }
  std::filesystem::path path_;
};

TEST_P(BlockLogTest, RandomWritesReadsAndFrees) {
  BlockLog log(File(), 4 * kSegmentBytes);
  std::mt19937 random(2);
  struct Row {
    uint64_t key, slot;
    uint32_t bytes;
  };
  std::vector<Row> rows;
  uint64_t next_key = 0;
  int refused = 0;
  for (int step = 0; step < 300; ++step) {
    std::vector<std::vector<std::byte>> payloads;
    std::vector<LogEntry> entries;
    for (uint32_t n = random() % 400; n > 0; --n) {
      payloads.push_back(RowOf(next_key + entries.size(), 4 + random() % 500));
      entries.push_back({next_key + entries.size(), {}});
    }
    for (size_t i = 0; i < entries.size(); ++i) entries[i].bytes = payloads[i];
    std::vector<uint64_t> slots;
    const Status appended = log.Append(entries, &slots);
    if (appended.ok()) {
      for (size_t i = 0; i < entries.size(); ++i) {
        rows.push_back({entries[i].key, slots[i], static_cast<uint32_t>(payloads[i].size())});
      }
      next_key += entries.size();
    } else {
      ASSERT_EQ(appended.code(), Code::kResourceExhausted);
      EXPECT_TRUE(slots.empty());
      ++refused;
    }
    while (rows.size() > 8000 || (!appended.ok() && rows.size() > 100)) {
      std::swap(rows[random() % rows.size()], rows.back());
      log.Free(rows.back().slot, rows.back().bytes);
      rows.pop_back();
    }
    std::vector<LogRead> reads;
    for (int i = 0; i < 40 && !rows.empty(); ++i) {
      const Row& row = rows[random() % rows.size()];
      reads.push_back({row.slot, row.key, row.bytes, nullptr});
    }
    BlockBuffers buffers;
    const Status read = log.Read(reads, &buffers);
    ASSERT_TRUE(read.ok()) << read.ToString();
    for (const LogRead& r : reads) {
      ASSERT_EQ(std::vector<std::byte>(r.row, r.row + r.bytes), RowOf(r.key, r.bytes));
    }
    std::vector<std::pair<uint64_t, uint32_t>> named;
    for (const Row& row : rows) named.emplace_back(row.slot, row.bytes);
    const Status integrity = log.CheckIntegrity(named);
    ASSERT_TRUE(integrity.ok()) << integrity.ToString();
    ASSERT_LE(log.used_bytes(), 4 * kSegmentBytes);
  }
  EXPECT_GT(refused, 0) << "the budget was never reached";
}

INSTANTIATE_TEST_SUITE_P(Engines, BlockLogTest, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "Memory" : "Pread"; });

// A pool thread once woke for a batch whose last read the caller took before it asked again.
TEST(BlockFileTest, ManyCallersShareThePool) {
  const auto path =
      std::filesystem::temp_directory_path() / ("embertide-pool-" + std::to_string(::getpid()));
  const auto file = std::move(*OpenPreadBlockFile(path, 4));
  BlockBuffers written;
  std::byte* block = written.Reserve(8);
  for (uint32_t b = 0; b < 8; ++b) {
    std::fill_n(block + size_t{b} * kBlockBytes, kBlockBytes, static_cast<std::byte>(b));
  }
  ASSERT_TRUE(file->Write(0, {block, 8 * kBlockBytes}).ok());
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&] {
      BlockBuffers buffers;
      std::byte* memory = buffers.Reserve(4);
      for (uint64_t i = 0; i < 2000; ++i) {
        std::vector<BlockRead> reads;
        for (uint64_t r = 0; r < 4; ++r) reads.push_back({(i + r) % 8, memory + r * kBlockBytes});
        if (!file->Read(reads).ok()) ++wrong;
        for (const BlockRead& read : reads) {
          if (read.buffer[9] != static_cast<std::byte>(read.block)) ++wrong;
        }
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
  std::filesystem::remove(path);
}

TEST(BlockLogFaultTest, ACorruptedBlockIsNamed) {
  const auto path =
      std::filesystem::temp_directory_path() / ("embertide-corrupt-" + std::to_string(::getpid()));
  BlockLog log(std::move(*OpenPreadBlockFile(path, 0)), 2 * kSegmentBytes);
  const auto row = RowOf(5, 64);
  const LogEntry entry{5, row};
  std::vector<uint64_t> slots;
  ASSERT_TRUE(log.Append({&entry, 1}, &slots).ok());
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(100);
    file.put('!');
  }
  LogRead read{slots[0], 5, 64, nullptr};
  BlockBuffers buffers;
  const Status status = log.Read({&read, 1}, &buffers);
  EXPECT_EQ(status.code(), Code::kCorrupt);
  EXPECT_NE(status.message().find("block 0"), std::string::npos);
  std::filesystem::remove(path);
}

TEST(BlockLogFaultTest, FailedReadsAndWritesAreReportedAndLoseNothing) {
  bool failing = false;
  BlockLog log(NewMemoryBlockFile([&](uint64_t) { return failing; }), 2 * kSegmentBytes);
  const auto row = RowOf(5, 64);
  const LogEntry entry{5, row};
  std::vector<uint64_t> slots;
  ASSERT_TRUE(log.Append({&entry, 1}, &slots).ok());
  failing = true;
  std::vector<uint64_t> none;
  EXPECT_EQ(log.Append({&entry, 1}, &none).code(), Code::kDeviceError);
  EXPECT_TRUE(none.empty());
  LogRead read{slots[0], 5, 64, nullptr};
  BlockBuffers buffers;
  EXPECT_EQ(log.Read({&read, 1}, &buffers).code(), Code::kDeviceError);
  failing = false;
  ASSERT_TRUE(log.Read({&read, 1}, &buffers).ok());
  EXPECT_TRUE(log.CheckIntegrity(std::vector<std::pair<uint64_t, uint32_t>>{{slots[0], 64}}).ok());
}

TEST(BlockLogFaultTest, AnotherKeyAtTheSlotIsCorrupt) {
  BlockLog log(NewMemoryBlockFile(), 2 * kSegmentBytes);
  const auto row = RowOf(5, 64);
  const LogEntry entry{5, row};
  std::vector<uint64_t> slots;
  ASSERT_TRUE(log.Append({&entry, 1}, &slots).ok());
  LogRead read{slots[0], 6, 64, nullptr};
  BlockBuffers buffers;
  EXPECT_EQ(log.Read({&read, 1}, &buffers).code(), Code::kCorrupt);
}

}  // namespace
}  // namespace embertide
