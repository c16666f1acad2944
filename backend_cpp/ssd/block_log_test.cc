// BlockLog: rows come back, segments are reused, and bad blocks are found.
#include "ssd/block_log.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <set>

#include "ssd/faulty_file.h"

namespace embertide {
namespace {

constexpr uint32_t kTable = 3;

std::vector<std::byte> RowOf(uint64_t key, size_t bytes) {
  return std::vector<std::byte>(bytes, static_cast<std::byte>(key * 7 + 1));
}

std::vector<std::byte> BytesOf(uint32_t bytes) { return std::vector<std::byte>(bytes); }

class BlockLogTest : public ::testing::TestWithParam<const char*> {
 protected:
  BlockLogTest()
      : path_(std::filesystem::temp_directory_path() /
              ("embertide-log-" + std::to_string(::getpid()))) {}
  ~BlockLogTest() override { std::filesystem::remove(path_); }
  void SetUp() override {
    auto engine = ParseSsdEngine(GetParam());
    if (engine.ok() && !ProbeSsd(path_.parent_path(), *engine).ok()) {
      GTEST_SKIP() << GetParam() << " is refused here";
    }
  }
  std::unique_ptr<BlockFile> File() {
    if (GetParam() == std::string("memory")) return NewMemoryBlockFile();
    return std::move(*OpenBlockFile(path_, *ParseSsdEngine(GetParam())));
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
      entries.push_back({next_key + entries.size(), kTable, {}});
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
    std::vector<std::vector<std::byte>> got;
    got.reserve(40);
    for (int i = 0; i < 40 && !rows.empty(); ++i) {
      const Row& row = rows[random() % rows.size()];
      got.push_back(BytesOf(row.bytes));
      reads.push_back({row.slot, row.key, kTable, row.bytes, got.back().data()});
    }
    const Status read = log.Read(reads);
    ASSERT_TRUE(read.ok()) << read.ToString();
    for (const LogRead& r : reads) {
      ASSERT_EQ(std::vector<std::byte>(r.to, r.to + r.bytes), RowOf(r.key, r.bytes));
    }
    std::vector<std::pair<uint64_t, uint32_t>> named;
    for (const Row& row : rows) named.emplace_back(row.slot, row.bytes);
    const Status integrity = log.CheckIntegrity(named);
    ASSERT_TRUE(integrity.ok()) << integrity.ToString();
    ASSERT_LE(log.used_bytes(), 4 * kSegmentBytes);
  }
  EXPECT_GT(refused, 0) << "the budget was never reached";
}

INSTANTIATE_TEST_SUITE_P(Engines, BlockLogTest,
                         ::testing::Values("io_uring", "libaio", "pread", "memory"),
                         [](const auto& info) { return std::string(info.param); });

// A log over the twin, with faults between, and rows of 200 bytes in it.
class BlockLogFaultTest : public ::testing::Test {
 protected:
  BlockLogFaultTest()
      : log_(std::make_unique<FaultyBlockFile>(NewMemoryBlockFile(), &faults_), 4 * kSegmentBytes) {
  }

  Status Write(uint64_t first_key, size_t count) {
    std::vector<std::vector<std::byte>> rows;
    std::vector<LogEntry> entries;
    for (size_t i = 0; i < count; ++i) rows.push_back(RowOf(first_key + i, kBytes));
    for (size_t i = 0; i < count; ++i) entries.push_back({first_key + i, kTable, rows[i]});
    return log_.Append(entries, &slots_);
  }
  Status Read(uint64_t key) {
    row_ = BytesOf(kBytes);
    LogRead read{slots_[key], key, kTable, kBytes, row_.data()};
    const Status status = log_.Read({&read, 1});
    if (status.ok()) {
      EXPECT_EQ(row_, RowOf(key, kBytes));
    }
    return status;
  }
  uint64_t BlockOf(uint64_t key) const { return slots_[key] >> kSsdOffsetBits; }
  Status Integrity() const {
    std::vector<std::pair<uint64_t, uint32_t>> rows;
    for (const uint64_t slot : slots_) rows.emplace_back(slot, kBytes);
    return log_.CheckIntegrity(rows);
  }

  // Until a write is tried again after one that failed.
  void AwaitRetry() const {
    while (log_.paused()) std::this_thread::yield();
  }

  static constexpr uint32_t kBytes = 200;
  Faults faults_;
  BlockLog log_;
  std::vector<uint64_t> slots_;  // by key
  std::vector<std::byte> row_;
};

// Each fault on each block in turn: the rows of that block fail, by its number, and no other does.
TEST_F(BlockLogFaultTest, AFaultOnAnyBlockIsFoundAndFailsItsRowsAlone) {
  constexpr uint64_t kKeys = 300;
  ASSERT_TRUE(Write(0, kKeys).ok());
  const uint64_t blocks = BlockOf(kKeys - 1) + 1;
  ASSERT_GT(blocks, 10U);
  uint64_t corrupt = 0;
  uint64_t read_errors = 0;
  for (uint64_t bad = 0; bad < blocks; ++bad) {
    for (const Fault fault : {Fault::kIoError, Fault::kShortRead, Fault::kBitFlip}) {
      // Another bit of each block, the checksum's among them, and the unused tail's.
      faults_.Put(bad, fault, static_cast<uint32_t>(bad * 4099 % (kBlockBytes * 8)));
      for (uint64_t key = 0; key < kKeys; ++key) {
        const Status read = Read(key);
        if (BlockOf(key) != bad) {
          ASSERT_TRUE(read.ok()) << read.ToString();
          continue;
        }
        ASSERT_EQ(read.code(), fault == Fault::kIoError ? Code::kDeviceError : Code::kCorrupt);
        ASSERT_NE(read.message().find("SSD block " + std::to_string(bad)), std::string::npos)
            << read.ToString();
        ++(fault == Fault::kIoError ? read_errors : corrupt);
      }
      faults_.Clear();
    }
  }
  EXPECT_EQ(log_.Stats().corrupt, corrupt);
  EXPECT_EQ(log_.Stats().read_errors, read_errors);
  EXPECT_GE(corrupt, 2 * kKeys);
}

// Every bit of one block.
TEST_F(BlockLogFaultTest, AnyBitOfABlockCounts) {
  ASSERT_TRUE(Write(0, 5).ok());
  for (uint32_t bit = 0; bit < kBlockBytes * 8; ++bit) {
    faults_.Put(0, Fault::kBitFlip, bit);
    ASSERT_EQ(Read(2).code(), Code::kCorrupt) << bit;
  }
}

TEST_F(BlockLogFaultTest, AFullDiskIsReportedAndLosesNothing) {
  ASSERT_TRUE(Write(0, 100).ok());
  faults_.FillDisk();
  const Status full = Write(100, 100);
  EXPECT_EQ(full.code(), Code::kDeviceError);
  EXPECT_NE(full.message().find("No space left on device"), std::string::npos) << full.ToString();
  EXPECT_EQ(slots_.size(), 100U);
  EXPECT_EQ(log_.Stats().write_errors, 1U);
  EXPECT_NE(log_.failure().find("No space left on device"), std::string::npos);
  faults_.Clear();
  AwaitRetry();
  ASSERT_TRUE(Write(100, 100).ok());
  EXPECT_EQ(log_.failure(), "");
  for (uint64_t key = 0; key < 200; ++key) ASSERT_TRUE(Read(key).ok());
  EXPECT_TRUE(Integrity().ok());
}

// A full disk is tried a few times a second at first, and nothing of the log is read or written
// meanwhile; blocks that nobody wrote are no part of it.
TEST_F(BlockLogFaultTest, AFullDiskIsLeftAloneForAWhile) {
  ASSERT_TRUE(Write(0, 100).ok());
  const LogStats before = log_.Stats();
  faults_.FillDisk();
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(Write(100, 100).code(), Code::kDeviceError);
  EXPECT_TRUE(log_.paused());
  EXPECT_EQ(log_.NextToCompact(16, 0), std::nullopt);
  EXPECT_LE(log_.Stats().write_errors, 3U);
  EXPECT_EQ(log_.Stats().bytes_written, before.bytes_written);
  faults_.Clear();
  AwaitRetry();
  ASSERT_TRUE(Write(100, 100).ok());
  std::vector<LogRow> rows;
  std::vector<std::byte> bytes;
  const LogStats healed = log_.Stats();
  log_.Scan({0, static_cast<uint32_t>(healed.bytes_written / kBlockBytes), 0}, &rows, &bytes);
  EXPECT_EQ(log_.Stats().read_errors, 0U);
}

// A disk that stays full burns the segments' blocks, and gives them back.
TEST_F(BlockLogFaultTest, AnyNumberOfFailedWritesLeavesTheLogUsable) {
  ASSERT_TRUE(Write(0, 100).ok());
  faults_.FillDisk();
  for (int i = 0; i < 50; ++i) EXPECT_EQ(Write(100, 1000).code(), Code::kDeviceError);
  faults_.Clear();
  AwaitRetry();
  ASSERT_TRUE(Write(100, 1000).ok());
  EXPECT_TRUE(Integrity().ok()) << Integrity().ToString();
}

TEST_F(BlockLogFaultTest, AnotherRowAtTheSlotIsCorrupt) {
  ASSERT_TRUE(Write(0, 2).ok());
  row_ = BytesOf(kBytes);
  for (LogRead read : {LogRead{slots_[0], 1, kTable, kBytes, row_.data()},
                       LogRead{slots_[0], 0, kTable + 1, kBytes, row_.data()},
                       LogRead{slots_[0], 0, kTable, kBytes + 1, row_.data()},
                       LogRead{slots_[0] + 3, 0, kTable, kBytes, row_.data()}}) {
    EXPECT_EQ(log_.Read({&read, 1}).code(), Code::kCorrupt);
  }
}

// The live rows of the deadest segment are given run by run; bad blocks are passed over.
TEST_F(BlockLogFaultTest, CompactionMeetsTheRowsOfTheDeadestSegment) {
  uint64_t keys = 0;
  for (; log_.used_bytes() < 3 * kSegmentBytes; keys += 50) ASSERT_TRUE(Write(keys, 50).ok());
  EXPECT_FALSE(log_.NextToCompact(64, 0.5).has_value()) << "nothing is dead";
  std::vector<std::pair<uint64_t, uint32_t>> left;
  std::set<uint64_t> live;
  for (uint64_t key = 0; key < keys; ++key) {
    if (BlockLog::SegmentOf(slots_[key]) == 1 && key % 4 != 0) {
      log_.Free(slots_[key], kBytes);
      continue;
    }
    left.emplace_back(slots_[key], kBytes);
    if (BlockLog::SegmentOf(slots_[key]) == 1) live.insert(key);
  }
  const uint64_t bad = kSegmentBlocks + 70;
  faults_.Put(bad, Fault::kBitFlip, 99);
  std::set<uint64_t> met;
  uint32_t blocks = 0;
  while (const auto run = log_.NextToCompact(64, 0.5)) {
    ASSERT_EQ(run->first, kSegmentBlocks + blocks);
    std::vector<LogRow> rows;
    std::vector<std::byte> bytes;
    log_.Scan(*run, &rows, &bytes);
    for (const LogRow& row : rows) {
      EXPECT_EQ(row.slot, slots_[row.key]);
      EXPECT_EQ(row.table, kTable);
      const auto at = bytes.begin() + static_cast<ptrdiff_t>(row.at);
      EXPECT_EQ(std::vector<std::byte>(at, at + row.bytes), RowOf(row.key, kBytes));
      EXPECT_TRUE(met.insert(row.key).second);
    }
    blocks += run->blocks;
    log_.Compacted(*run, /*moved=*/true);
  }
  EXPECT_EQ(blocks, kSegmentBlocks);
  EXPECT_EQ(log_.Stats().corrupt, 1U);
  for (const uint64_t key : live) EXPECT_EQ(met.count(key), BlockOf(key) == bad ? 0U : 1U);
  // The segment is free when its last row is.
  const uint64_t before = log_.used_bytes();
  for (const uint64_t key : live) log_.Free(slots_[key], kBytes);
  EXPECT_EQ(log_.used_bytes(), before - kSegmentBytes);
}

TEST_F(BlockLogFaultTest, TheLastFreeSegmentIsCompactions) {
  uint64_t keys = 0;
  Status written;
  for (; (written = Write(keys, 50)).ok(); keys += 50) {
  }
  EXPECT_EQ(written.code(), Code::kResourceExhausted);
  EXPECT_EQ(log_.used_bytes(), 3 * kSegmentBytes);
  const auto row = RowOf(keys, kBytes);
  std::vector<LogEntry> entries(200, {keys, kTable, row});
  EXPECT_TRUE(log_.Append(entries, &slots_, /*moved=*/true).ok());
  EXPECT_EQ(log_.used_bytes(), 4 * kSegmentBytes);
}

TEST_F(BlockLogFaultTest, ASealThatNamesAllSegmentsIsRefused) {
  uint64_t keys = 0;
  for (; Write(keys, 50).ok(); keys += 50) {
  }
  const auto row = RowOf(keys, kBytes);
  const std::vector<LogEntry> entry(1, {keys, kTable, row});
  ASSERT_TRUE(log_.Append(entry, &slots_, /*moved=*/true).ok());
  for (uint32_t segment = 0; segment < 3; ++segment) {
    log_.Name(*std::ranges::find(slots_, segment, BlockLog::SegmentOf));
  }
  EXPECT_TRUE(log_.CheckSealed(log_.Named().size()).ok());
  log_.Name(slots_.back());
  const auto named = log_.Named();
  EXPECT_EQ(log_.CheckSealed(named.size()).code(), Code::kResourceExhausted);
  BlockLog other(NewMemoryBlockFile(), 4 * kSegmentBytes);
  EXPECT_EQ(other.Reopen(named).code(), Code::kResourceExhausted);
}

// Two writers' rows share a segment; which of them is written first, and that one fails, is nothing
// to the other.
TEST_F(BlockLogFaultTest, RoomIsTakenInOneOrderAndWrittenInAnother) {
  std::vector<std::vector<std::byte>> rows;
  for (uint64_t key = 0; key < 120; ++key) rows.push_back(RowOf(key, kBytes));
  std::vector<std::vector<LogEntry>> entries(3);
  std::vector<LogBatch> batches;
  for (uint64_t b = 0; b < 3; ++b) {
    for (uint64_t key = 40 * b; key < 40 * b + 40; ++key) {
      entries[b].push_back({key, kTable, rows[key]});
    }
    batches.push_back(*log_.Take(entries[b]));
    slots_.insert(slots_.end(), batches[b].slots.begin(), batches[b].slots.end());
  }
  EXPECT_TRUE(Integrity().ok()) << "rows that have room are live: " << Integrity().ToString();
  EXPECT_EQ(std::set<uint64_t>(slots_.begin(), slots_.end()).size(), 120U);
  for (const uint64_t b : {2, 0, 1}) {
    if (b == 0) faults_.FillDisk();
    const Status written = log_.Write(entries[b], batches[b]);
    EXPECT_EQ(written.ok(), b != 0);
    log_.Finish(entries[b], batches[b], written);
    faults_.Clear();
  }
  for (uint64_t key = 40; key < 120; ++key) EXPECT_TRUE(Read(key).ok()) << key;
  slots_.erase(slots_.begin(), slots_.begin() + 40);
  EXPECT_TRUE(Integrity().ok()) << Integrity().ToString();
  EXPECT_EQ(log_.Stats().row_bytes, 80U * kBytes);
}

// Compaction reads without the writer: what it reads is not written over, though all its rows go.
TEST_F(BlockLogFaultTest, ASegmentThatIsScannedIsNotUsedAgain) {
  uint64_t keys = 0;
  for (; log_.used_bytes() < 3 * kSegmentBytes; keys += 50) ASSERT_TRUE(Write(keys, 50).ok());
  const auto in_second = [&](uint64_t key) { return BlockLog::SegmentOf(slots_[key]) == 1; };
  for (uint64_t key = 0; key < keys; ++key) {
    if (in_second(key) && key % 4 != 0) log_.Free(slots_[key], kBytes);
  }
  const auto run = log_.NextToCompact(64, 0.5);
  ASSERT_TRUE(run.has_value());
  for (uint64_t key = 0; key < keys; ++key) {
    if (in_second(key) && key % 4 == 0) log_.Free(slots_[key], kBytes);
  }
  EXPECT_EQ(log_.used_bytes(), 3 * kSegmentBytes);
  while (Write(keys, 50).ok()) keys += 50;
  std::vector<LogRow> rows;
  std::vector<std::byte> bytes;
  log_.Scan(*run, &rows, &bytes);
  EXPECT_GT(rows.size(), 500U);
  for (const LogRow& row : rows) EXPECT_EQ(row.slot, slots_[row.key]);
  EXPECT_EQ(log_.Stats().corrupt, 0U);
  log_.Compacted(*run, /*moved=*/false);
  EXPECT_EQ(log_.used_bytes(), 2 * kSegmentBytes);
}

// Rows are read without the writer: where they lie nothing is written over, though all are freed.
TEST_F(BlockLogFaultTest, ASegmentWithAPinnedSlotIsNotUsedAgain) {
  uint64_t keys = 0;
  for (; log_.used_bytes() < 3 * kSegmentBytes; keys += 50) ASSERT_TRUE(Write(keys, 50).ok());
  const auto in_second = [&](uint64_t key) { return BlockLog::SegmentOf(slots_[key]) == 1; };
  uint64_t pinned = 0;
  while (!in_second(pinned)) ++pinned;
  log_.Pin(slots_[pinned]);
  log_.Pin(slots_[pinned + 1]);
  for (uint64_t key = 0; key < keys; ++key) {
    if (in_second(key)) log_.Free(slots_[key], kBytes);
  }
  while (Write(keys, 50).ok()) keys += 50;
  EXPECT_TRUE(Read(pinned).ok());
  log_.Unpin(slots_[pinned]);
  EXPECT_EQ(log_.used_bytes(), 3 * kSegmentBytes) << "the other slot is still pinned";
  log_.Unpin(slots_[pinned + 1]);
  EXPECT_EQ(log_.used_bytes(), 2 * kSegmentBytes);
}

TEST_F(BlockLogFaultTest, ASegmentThatASealNamesWaitsForTheNext) {
  uint64_t keys = 0;
  for (; log_.used_bytes() < 3 * kSegmentBytes; keys += 50) ASSERT_TRUE(Write(keys, 50).ok());
  const auto free_segment = [&](uint32_t segment) {
    for (uint64_t key = 0; key < keys; ++key) {
      if (BlockLog::SegmentOf(slots_[key]) == segment) log_.Free(slots_[key], kBytes);
    }
  };
  // The first seal names segments 0 and 1; the second, which is given up, segment 2.
  log_.Name(slots_[1]);
  log_.Name(slots_[1000]);
  log_.Name(*std::ranges::find(slots_, uint64_t{1}, BlockLog::SegmentOf));
  const auto sealed = log_.Named();
  ASSERT_EQ(sealed.size(), 2U);
  EXPECT_EQ(sealed[0].first_block, BlockOf(1));
  EXPECT_EQ(sealed[0].last_block, BlockOf(1000));
  log_.CompleteSeal();
  EXPECT_TRUE(log_.Named().empty());
  free_segment(0);
  free_segment(1);
  EXPECT_EQ(log_.used_bytes(), 3 * kSegmentBytes) << "both are kept";
  EXPECT_EQ(log_.kept_bytes(), 2 * kSegmentBytes);
  EXPECT_FALSE(log_.NextToCompact(64, 0.5).has_value()) << "there is nothing to gain of them";
  EXPECT_EQ(Write(keys, 8000).code(), Code::kResourceExhausted);
  log_.Name(*std::ranges::find(slots_, uint64_t{2}, BlockLog::SegmentOf));
  log_.AbandonSeal();
  EXPECT_EQ(log_.kept_bytes(), 2 * kSegmentBytes) << "the complete one is the newest still";
  log_.CompleteSeal();  // one that names nothing
  EXPECT_EQ(log_.kept_bytes(), 0U);
  EXPECT_EQ(log_.used_bytes(), kSegmentBytes);
  EXPECT_TRUE(Write(keys, 8000).ok());
}

}  // namespace
}  // namespace embertide
