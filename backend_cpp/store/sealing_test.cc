// Seals: a store opened from one has the rows of the store that was killed, or refuses it.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <new>
#include <thread>

#include "embertide/serving_store.h"
#include "ssd/faulty_file.h"
#include "store/test_rows.h"

namespace embertide {
namespace {

constexpr uint64_t kKeys = 1200;  // of each table: some 5 MB of rows
constexpr int kChanges = 150;     // of a version

// The changes of version n: rows, and tombstones where there is none. Version 1 has all rows.
std::vector<std::pair<std::pair<uint32_t, uint64_t>, std::optional<TestRow>>> ChangesOf(
    const std::vector<TableConfig>& tables, uint64_t version) {
  std::mt19937 random(static_cast<uint32_t>(version));
  std::vector<std::pair<std::pair<uint32_t, uint64_t>, std::optional<TestRow>>> changes;
  if (version == 1) {
    for (uint32_t t = 0; t < tables.size(); ++t) {
      for (uint64_t key = 0; key < kKeys; ++key) {
        changes.push_back({{t, key}, RandomRow(tables[t], &random)});
      }
    }
    return changes;
  }
  for (int n = 0; n < kChanges; ++n) {
    const auto t = static_cast<uint32_t>(random() % tables.size());
    const uint64_t key = random() % (kKeys + kKeys / 8);
    std::optional<TestRow> row;
    if (random() % 8 != 0) row = RandomRow(tables[t], &random);
    changes.push_back({{t, key}, std::move(row)});
  }
  return changes;
}

class SealingTest : public ::testing::Test {
 protected:
  SealingTest()
      : directory_(std::filesystem::temp_directory_path() /
                   ("embertide-seal-" + std::to_string(::getpid()))) {
    std::filesystem::remove_all(directory_);
    options_.tables = ServedTables();
    options_.devices = 2;
    options_.ddr_budget_bytes = 2ULL << 20;
    options_.ssd_budget_bytes = 64ULL << 20;
    options_.ssd_directory = directory_;
    options_.window_versions = 2;
    seal_.model = "news";
    seal_.name = [](uint64_t number) { return SealedVersion{number, 1, 0}; };
  }
  ~SealingTest() override { std::filesystem::remove_all(directory_); }

  Status Open(bool seal) {
    store_.reset();
    StoreOptions options = options_;
    options.open_seal = seal;
    auto opened = ServingStore::Open(options);
    if (!opened.ok()) return opened.status();
    store_ = std::move(*opened);
    return Status::Ok();
  }
  void Stage(uint64_t as, uint64_t changes_of) {
    for (const auto& [where, row] : ChangesOf(options_.tables, changes_of)) {
      const auto& [t, key] = where;
      std::vector<std::byte> record;
      if (row) {
        AppendRow(key, *row, &record);
      } else {
        AppendRecord({key, 0, RecordKind::kPruned, {}}, &record);
      }
      const Status staged =
          store_->StageRecords(as, t, BucketOfKey(options_.tables[t], key), record);
      ASSERT_TRUE(staged.ok()) << staged.ToString();
    }
  }
  void Version(uint64_t number) {
    Stage(number, number);
    ASSERT_TRUE(store_->Commit(number).ok());
    store_->Maintain();
  }
  // Brings a store that was opened from a seal to its last version.
  void Replay() {
    const auto info = ReadSealInfo(directory_);
    ASSERT_TRUE(info.ok()) << info.status().ToString();
    const uint64_t last = info.value().last.number;
    for (uint64_t n = info.value().first.number + 1; n <= last; ++n) Stage(last, n);
    ASSERT_TRUE(store_->Commit(last).ok());
  }
  // Reads rows of the SSD often enough that some come to DDR.
  void Read(uint64_t seed) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    for (int n = 0; n < 100; ++n) {
      const auto t = static_cast<uint32_t>(random() % options_.tables.size());
      const std::vector<int64_t> keys(3, static_cast<int64_t>(random() % kKeys));
      const uint32_t dim = options_.tables[t].layout.dim();
      std::vector<float> out(3 * size_t{dim});
      auto view = store_->PinNewest();
      ASSERT_TRUE(view->Lookup({t, keys, Pooling::kNone, {}, out.data(), dim, nullptr}).ok());
    }
    store_->Maintain();
  }
  // The rows of a store that takes all versions up to this one.
  const TestRows& RowsAt(uint64_t version) {
    if (version < rows_version_) rows_version_ = 0;
    if (rows_version_ == 0) rows_.clear();
    while (rows_version_ < version) {
      for (const auto& [where, row] : ChangesOf(options_.tables, ++rows_version_)) {
        rows_.erase(where);
        if (row) rows_[where] = *row;
      }
    }
    return rows_;
  }
  size_t SealFiles() const {
    size_t files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      files += entry.path().extension() == ".rows" ? 1 : 0;
    }
    return files;
  }
  // Every row is that of a store that took all versions up to the newest and was never killed.
  void ExpectAllRows() {
    const uint64_t newest = store_->Stats().newest_version;
    const TestRows& rows = RowsAt(newest);
    auto view = store_->PinNewest();
    for (uint32_t t = 0; t < options_.tables.size(); ++t) {
      for (uint32_t b = 0; b < options_.tables[t].buckets(); ++b) {
        std::vector<std::byte> records;
        const Status exported = store_->ExportBucket(*view, t, b, &records);
        ASSERT_TRUE(exported.ok()) << exported.ToString();
        ASSERT_EQ(records, BucketRecords(options_.tables, rows, t, b))
            << "table " << t << ", bucket " << b << ", version " << newest;
      }
    }
    const Status integrity = store_->CheckIntegrity();
    ASSERT_TRUE(integrity.ok()) << integrity.ToString();
  }

  const std::filesystem::path directory_;
  StoreOptions options_;
  SealOptions seal_;
  std::unique_ptr<ServingStore> store_;
  TestRows rows_;
  uint64_t rows_version_ = 0;
};

TEST_F(SealingTest, AStoreOpenedFromASealHasItsRows) {
  ASSERT_TRUE(Open(false).ok());
  EXPECT_EQ(store_->Seal(seal_).code(), Code::kRejected) << "nothing is committed";
  for (uint64_t n = 1; n <= 6; ++n) Version(n);
  ASSERT_GT(store_->Stats().ssd_bytes, 0U);
  const Status sealed = store_->Seal(seal_);
  ASSERT_TRUE(sealed.ok()) << sealed.ToString();
  EXPECT_EQ(store_->Stats().seal.written, 1U);
  EXPECT_EQ(store_->Stats().seal.version, 6U);
  // Versions after the seal are lost with the process.
  for (uint64_t n = 7; n <= 20; ++n) Version(n);
  ASSERT_NO_FATAL_FAILURE(ExpectAllRows());
  const Status opened = Open(true);
  ASSERT_TRUE(opened.ok()) << opened.ToString();
  Replay();
  ASSERT_NO_FATAL_FAILURE(ExpectAllRows());
  // And it goes on, and is sealed again.
  for (uint64_t n = 7; n <= 40; ++n) Version(n);
  ASSERT_NO_FATAL_FAILURE(ExpectAllRows());
  ASSERT_TRUE(store_->Seal(seal_).ok());
  ASSERT_TRUE(Open(true).ok());
  Replay();
  ASSERT_NO_FATAL_FAILURE(ExpectAllRows());
  // A store that is opened without it ends it.
  ASSERT_TRUE(Open(false).ok());
  EXPECT_EQ(Open(true).code(), Code::kNotFound);
}

TEST_F(SealingTest, ASealTakenWhileVersionsAreCommittedAndRowsMove) {
  ASSERT_TRUE(Open(false).ok());
  for (uint64_t n = 1; n <= 3; ++n) Version(n);
  uint64_t next = 4;
  SealOptions seal = seal_;
  seal.wait = [&](std::chrono::nanoseconds) {
    Version(next++);
    Read(next);
    return true;
  };
  for (int round = 0; round < 3; ++round) {
    const uint64_t before = next;
    ASSERT_TRUE(store_->Seal(seal).ok());
    const auto info = ReadSealInfo(directory_);
    ASSERT_TRUE(info.ok());
    EXPECT_EQ(info.value().first.number, before - 1);
    EXPECT_EQ(info.value().last.number, next - 1);
    EXPECT_GT(next - before, 16U) << "a slice a bucket at least";
    ASSERT_NO_FATAL_FAILURE(ExpectAllRows());
    ASSERT_GT(store_->Stats().evictions_to_ssd, 0U);
    ASSERT_GT(store_->Stats().promotions, 0U);
    ASSERT_GT(store_->Stats().ssd.compacted_rows, 0U);
    // Long after the seal, its segments still hold what it names.
    for (uint64_t n = next; n < next + 60; ++n) Version(n);
    const Status opened = Open(true);
    ASSERT_TRUE(opened.ok()) << opened.ToString();
    Replay();
    ASSERT_NO_FATAL_FAILURE(ExpectAllRows());
  }
}

TEST_F(SealingTest, BucketsThatLeaveAndComeAreThoseOfTheSeal) {
  options_.hold_all = false;
  ASSERT_TRUE(Open(false).ok());
  const auto add = [&](uint32_t t, uint32_t b, uint32_t device, uint64_t version) {
    return store_->AddBucket(t, b, device, BucketRecords(options_.tables, RowsAt(version), t, b));
  };
  for (uint32_t t = 0; t < 4; ++t) ASSERT_TRUE(add(t, t, t % 2, 0).ok());
  ASSERT_TRUE(store_->Commit(1).ok());
  ASSERT_TRUE(add(0, 1, 0, 1).ok());
  ASSERT_TRUE(add(0, 2, 1, 1).ok());
  ASSERT_TRUE(add(0, 3, 1, 1).ok());
  SealOptions seal = seal_;
  int slices = 0;
  seal.wait = [&](std::chrono::nanoseconds) {
    // (0, 1) has begun: it moves; (0, 2) is gone before its turn, (1, 1) was no part of it.
    if (++slices == 2) {
      EXPECT_TRUE(add(0, 1, 1, 1).ok());
      EXPECT_TRUE(store_->DropBucket(0, 2).ok());
    }
    return true;
  };
  ASSERT_TRUE(store_->Seal(seal).ok());
  ASSERT_GT(slices, 4);
  const Status opened = Open(true);
  ASSERT_TRUE(opened.ok()) << opened.ToString();
  ASSERT_TRUE(store_->Commit(1).ok());
  EXPECT_TRUE(store_->CheckIntegrity().ok());
  EXPECT_FALSE(store_->HeldSince(0, 2).has_value());
  EXPECT_FALSE(store_->HeldSince(1, 2).has_value());
  for (uint32_t t = 0; t < 4; ++t) EXPECT_EQ(store_->DeviceOf(t, t), t % 2);
  auto view = store_->PinNewest();
  std::vector<std::byte> records;
  ASSERT_TRUE(store_->ExportBucket(*view, 0, 3, &records).ok());
  EXPECT_EQ(records, BucketRecords(options_.tables, RowsAt(1), 0, 3));
}

TEST_F(SealingTest, RowsNeedTheRoomMoreThanASeal) {
  options_.devices = 1;
  options_.ssd_budget_bytes = 6ULL << 20;
  ASSERT_TRUE(Open(false).ok());
  Version(1);
  ASSERT_TRUE(store_->Seal(seal_).ok());
  uint64_t n = 2;
  while (store_->Stats().seal.dropped == 0 && n < 300) Version(n++);
  ASSERT_EQ(store_->Stats().seal.dropped, 1U);
  EXPECT_EQ(store_->Stats().seal.version, 0U);
  EXPECT_EQ(store_->Stats().refused_rows, 0U);
  EXPECT_EQ(ReadSealInfo(directory_).status().code(), Code::kNotFound);
  ASSERT_NO_FATAL_FAILURE(ExpectAllRows());
  // One that is being written is given up with the one before; rows are never refused for it.
  SealOptions seal = seal_;
  seal.wait = [&](std::chrono::nanoseconds) {
    for (int more = 0; more < 20; ++more) Version(n++);
    return true;
  };
  EXPECT_EQ(store_->Seal(seal).code(), Code::kRejected);
  EXPECT_EQ(store_->Stats().seal.failed, 1U);
  EXPECT_EQ(store_->Stats().seal.kept_bytes, 0U);
  EXPECT_EQ(store_->Stats().refused_rows, 0U);
  EXPECT_EQ(Open(true).code(), Code::kNotFound);
}

TEST_F(SealingTest, ASealGivenUpLeavesTheOneBefore) {
  Faults faults;
  options_.wrap_ssd = [&](std::unique_ptr<BlockFile> file) {
    return std::make_unique<FaultyBlockFile>(std::move(file), &faults);
  };
  ASSERT_TRUE(Open(false).ok());
  for (uint64_t n = 1; n <= 3; ++n) Version(n);
  ASSERT_TRUE(store_->Seal(seal_).ok());
  for (uint64_t n = 4; n <= 30; ++n) Version(n);
  SealOptions seal = seal_;
  int left = 7;
  seal.wait = [&](std::chrono::nanoseconds) { return --left > 0; };
  EXPECT_EQ(store_->Seal(seal).code(), Code::kRejected);
  EXPECT_EQ(SealFiles(), 1U);
  // The log cannot be brought to the drive.
  faults.FillDisk();
  EXPECT_EQ(store_->Seal(seal_).code(), Code::kDeviceError);
  EXPECT_EQ(SealFiles(), 1U);
  faults.Clear();
  // There is no memory for it.
  left = 7;
  seal.wait = [&](std::chrono::nanoseconds) { return --left > 0 ? true : throw std::bad_alloc(); };
  EXPECT_EQ(store_->Seal(seal).code(), Code::kResourceExhausted);
  EXPECT_EQ(SealFiles(), 1U) << "half a seal takes the room that it lacked";
  EXPECT_EQ(store_->Stats().seal.failed, 3U);
  EXPECT_EQ(store_->Stats().seal.version, 3U);
  EXPECT_TRUE(store_->CheckIntegrity().ok());
  const Status opened = Open(true);
  ASSERT_TRUE(opened.ok()) << opened.ToString();
  Replay();
  ASSERT_NO_FATAL_FAILURE(ExpectAllRows());
}

// Bytes of a file, and one of them changed for the time of a test.
class Harm {
 public:
  Harm(std::filesystem::path path, uint64_t at, uint8_t bits) : path_(std::move(path)), at_(at) {
    std::fstream file(path_, std::ios::binary | std::ios::in | std::ios::out);
    file.seekg(static_cast<std::streamoff>(at_));
    was_ = static_cast<char>(file.get());
    Put(static_cast<char>(was_ ^ static_cast<char>(bits)));
  }
  ~Harm() { Put(was_); }
  Harm(const Harm&) = delete;
  Harm& operator=(const Harm&) = delete;

 private:
  void Put(char byte) {
    std::fstream file(path_, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(at_));
    file.put(byte);
  }
  std::filesystem::path path_;
  uint64_t at_;
  char was_ = 0;
};

TEST_F(SealingTest, AHarmedSealIsRefused) {
  ASSERT_TRUE(Open(false).ok());
  for (uint64_t n = 1; n <= 4; ++n) Version(n);
  ASSERT_TRUE(store_->Seal(seal_).ok());
  const auto info = ReadSealInfo(directory_);
  ASSERT_TRUE(info.ok());
  store_.reset();
  const auto expect_refused = [&](const std::filesystem::path& path, uint64_t at) {
    const Harm harm(path, at, static_cast<uint8_t>(1U << at % 8));
    const Status opened = Open(true);
    ASSERT_FALSE(opened.ok()) << path << " at " << at;
    ASSERT_TRUE(opened.code() == Code::kCorrupt || opened.code() == Code::kRejected ||
                opened.code() == Code::kNotFound)
        << opened.ToString();
  };
  const auto manifest = directory_ / "seal.json";
  for (uint64_t at = 0; at < std::filesystem::file_size(manifest); ++at) {
    ASSERT_NO_FATAL_FAILURE(expect_refused(manifest, at));
  }
  // Every block of the file of rows, and every byte of what is not rows of DDR at its end.
  const auto rows = directory_ / info.value().file;
  const uint64_t bytes = std::filesystem::file_size(rows);
  ASSERT_EQ(bytes, info.value().file_bytes);
  std::mt19937 random(3);
  for (uint64_t block = 0; block < bytes; block += kBlockBytes) {
    const uint64_t at = block + random() % std::min<uint64_t>(kBlockBytes, bytes - block);
    ASSERT_NO_FATAL_FAILURE(expect_refused(rows, at));
  }
  for (uint64_t at = info.value().segments_at; at < bytes; ++at) {
    ASSERT_NO_FATAL_FAILURE(expect_refused(rows, at));
  }
  // Torn anywhere.
  std::filesystem::copy_file(rows, directory_ / "whole");
  for (const uint64_t length : {uint64_t{0}, bytes / 2, info.value().segments_at, bytes - 1}) {
    std::filesystem::resize_file(rows, length);
    EXPECT_EQ(Open(true).code(), Code::kCorrupt);
    std::filesystem::copy_file(directory_ / "whole", rows,
                               std::filesystem::copy_options::overwrite_existing);
  }
  std::filesystem::remove(rows);
  EXPECT_EQ(Open(true).code(), Code::kNotFound);
  std::filesystem::rename(directory_ / "whole", rows);
  ASSERT_TRUE(Open(true).ok()) << "as it was, it is good";
  Replay();
  ASSERT_NO_FATAL_FAILURE(ExpectAllRows());
}

// A block of the log that is not what was sealed: refused at once, or by the reads of its rows.
TEST_F(SealingTest, AHarmedBlockOfTheLogIsNeverRead) {
  options_.devices = 1;
  ASSERT_TRUE(Open(false).ok());
  for (uint64_t n = 1; n <= 4; ++n) Version(n);
  ASSERT_TRUE(store_->Seal(seal_).ok());
  store_.reset();
  const auto log = directory_ / "device-0.log";
  const uint64_t blocks = std::filesystem::file_size(log) / kBlockBytes;
  ASSERT_GT(blocks, 500U);
  uint64_t refused = 0;
  uint64_t failed = 0;
  uint64_t unused = 0;
  for (uint64_t block = 0; block < blocks; ++block) {
    const Harm harm(log, block * kBlockBytes + block % kBlockBytes, 1);
    const Status opened = Open(true);
    if (!opened.ok()) {
      ASSERT_EQ(opened.code(), Code::kCorrupt);
      ++refused;
      continue;
    }
    ASSERT_NO_FATAL_FAILURE(Replay());
    bool bad = false;
    auto view = store_->PinNewest();
    for (uint32_t t = 0; t < options_.tables.size() && !bad; ++t) {
      for (uint32_t b = 0; b < options_.tables[t].buckets(); ++b) {
        std::vector<std::byte> records;
        bad = bad || !store_->ExportBucket(*view, t, b, &records).ok();
      }
    }
    failed += bad ? 1 : 0;
    if (bad) continue;
    ++unused;
    if (unused % 16 != 1) continue;
    ASSERT_NO_FATAL_FAILURE(ExpectAllRows());
  }
  EXPECT_GE(refused, 4U) << "the first and the last block of each segment";
  EXPECT_GT(failed, 100U);
  std::printf("of %d blocks: %d refused at once, %d by reads, %d not in use\n",
              static_cast<int>(blocks), static_cast<int>(refused), static_cast<int>(failed),
              static_cast<int>(unused));
}

// A copy of the directory, or a drive that lost power, may bring this back: a seal whose segments
// hold other rows by now, under the same keys.
TEST_F(SealingTest, AnOldSealIsNotReadFromSegmentsThatWereUsedAgain) {
  options_.devices = 1;
  options_.ssd_budget_bytes = 10ULL << 20;
  ASSERT_TRUE(Open(false).ok());
  for (uint64_t n = 1; n <= 3; ++n) Version(n);
  ASSERT_TRUE(store_->Seal(seal_).ok());
  const auto old = directory_ / "old";
  std::filesystem::create_directory(old);
  for (const char* name : {"seal.json", "seal-1.rows"}) {
    std::filesystem::copy_file(directory_ / name, old / name);
  }
  uint64_t n = 4;
  uint64_t refused = 0;
  uint64_t failed = 0;
  for (int round = 0; round < 40; ++round) {
    for (const uint64_t last = n + 3; n < last; ++n) Version(n);
    static_cast<void>(store_->Seal(seal_));  // or it was given up for room
    const auto now = directory_ / "now";
    std::filesystem::remove_all(now);
    std::filesystem::create_directory(now);
    store_.reset();
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      if (!entry.is_directory()) std::filesystem::copy(entry.path(), now / entry.path().filename());
    }
    for (const char* name : {"seal.json", "seal-1.rows"}) {
      std::filesystem::copy_file(old / name, directory_ / name,
                                 std::filesystem::copy_options::overwrite_existing);
    }
    if (const Status opened = Open(true); !opened.ok()) {
      ASSERT_EQ(opened.code(), Code::kCorrupt) << opened.ToString();
      ++refused;
    } else {
      ASSERT_NO_FATAL_FAILURE(Replay());
      auto view = store_->PinNewest();
      for (uint32_t t = 0; t < options_.tables.size(); ++t) {
        for (uint32_t b = 0; b < options_.tables[t].buckets(); ++b) {
          std::vector<std::byte> records;
          if (store_->ExportBucket(*view, t, b, &records).ok()) {
            ASSERT_EQ(records, BucketRecords(options_.tables, RowsAt(3), t, b));
          } else {
            ++failed;
          }
        }
      }
    }
    store_.reset();
    for (const auto& entry : std::filesystem::directory_iterator(now)) {
      std::filesystem::copy(entry.path(), directory_ / entry.path().filename(),
                            std::filesystem::copy_options::overwrite_existing);
    }
    if (!std::filesystem::exists(now / "seal.json")) break;
    ASSERT_TRUE(Open(true).ok());
    ASSERT_NO_FATAL_FAILURE(Replay());
    n = store_->Stats().newest_version + 1;
  }
  EXPECT_GT(refused, 0U);
  std::printf("%d times refused at once, %d buckets by their reads\n", static_cast<int>(refused),
              static_cast<int>(failed));
}

TEST_F(SealingTest, AnotherTableOrBudgetIsNamed) {
  ASSERT_TRUE(Open(false).ok());
  for (uint64_t n = 1; n <= 12; ++n) Version(n);
  ASSERT_TRUE(store_->Seal(seal_).ok());
  const StoreOptions as_it_was = options_;
  options_.tables[2].bucket_bits = 3;
  EXPECT_EQ(Open(true).code(), Code::kRejected);
  options_ = as_it_was;
  options_.devices = 1;
  const Status fewer = Open(true);
  EXPECT_EQ(fewer.code(), Code::kRejected);
  EXPECT_NE(fewer.message().find("device-1.log"), std::string::npos) << fewer.message();
  options_ = as_it_was;
  options_.ssd_budget_bytes = 4ULL << 20;
  EXPECT_EQ(Open(true).code(), Code::kRejected);
  options_ = as_it_was;
  EXPECT_TRUE(Open(true).ok());
}

// A process that stages, commits, evicts, promotes, compacts and seals, killed at any moment; the
// next goes on from what it left.
class KilledSealingTest : public SealingTest {
 protected:
  // Goes on from the seal, or makes the first one, until it is killed. Writes a byte once it is at
  // work, and one a version from then on.
  [[noreturn]] void RunUntilKilled(int told) {
    bool at_work = false;
    const auto next = [&] {
      Version(store_->Stats().newest_version + 1);
      if (at_work && write(told, "v", 1) != 1) _exit(4);
    };
    seal_.wait = [&](std::chrono::nanoseconds) {
      next();
      return true;
    };
    if (!Open(ReadSealInfo(directory_).ok()).ok()) _exit(3);
    if (store_->options().open_seal) {
      Replay();
    } else {
      Version(1);
      if (!store_->Seal(seal_).ok()) _exit(5);
    }
    at_work = true;
    if (write(told, "r", 1) != 1) _exit(4);
    while (!HasFailure()) {
      for (int n = 0; n < 3; ++n) {
        next();
        Read(store_->Stats().newest_version);
      }
      if (!store_->Seal(seal_).ok()) _exit(5);
    }
    _exit(6);
  }
};

TEST_F(KilledSealingTest, WhatIsOpenedAfterAKillAtAnyMomentIsWhatANodeNeverKilledHas) {
  constexpr int kKills = 60;
  constexpr uint32_t kMaxVersions = 32;  // that a process makes; a seal takes some ten
  for (TableConfig& table : options_.tables) table.bucket_bits = 1;  // few slices: many seals
  std::mt19937 random(11);
  uint64_t newest = 0;
  for (int kill = 0; kill < kKills; ++kill) {
    std::array<int, 2> told{};
    ASSERT_EQ(pipe(told.data()), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) RunUntilKilled(told[1]);
    close(told[1]);
    auto last = std::chrono::steady_clock::now();
    std::chrono::microseconds step{};
    for (uint32_t versions = random() % kMaxVersions, n = 0; n <= versions; ++n) {
      char byte = 0;
      ASSERT_EQ(read(told[0], &byte, 1), 1) << "the process ended by itself";
      const auto now = std::chrono::steady_clock::now();
      step = std::chrono::duration_cast<std::chrono::microseconds>(now - last);
      last = now;
    }
    // Not to wait for anything: the moment is to be any, between two versions or later.
    std::this_thread::sleep_for(std::chrono::microseconds(random() % (2 * step.count() + 1)));
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    close(told[0]);
    ASSERT_TRUE(WIFSIGNALED(status)) << "it ended with " << WEXITSTATUS(status);
    const auto info = ReadSealInfo(directory_);
    ASSERT_TRUE(info.ok()) << info.status().ToString();
    EXPECT_GE(info.value().last.number, newest) << "a seal never goes back";
    newest = info.value().last.number;
    const Status opened = Open(true);
    ASSERT_TRUE(opened.ok()) << opened.ToString();
    Replay();
    ASSERT_NO_FATAL_FAILURE(ExpectAllRows()) << "after kill " << kill;
    store_.reset();
  }
  EXPECT_GT(newest, uint64_t{kKills} / 2) << "no seal was completed between kills";
  std::printf("%d kills, the last at version %d\n", kKills, static_cast<int>(newest));
}

}  // namespace
}  // namespace embertide
