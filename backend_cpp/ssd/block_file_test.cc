// Every engine gives the same answers to the same calls, and says what the system refused it.
#include "ssd/block_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <new>
#include <set>
#include <thread>
#include <vector>

namespace embertide {
namespace {

constexpr uint32_t kBlocks = 1000;

std::byte ByteOf(uint64_t block) { return static_cast<std::byte>(block * 7 + 3); }

class TestFolder {
 public:
  TestFolder()
      : path_(std::filesystem::temp_directory_path() /
              ("embertide-blocks-" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(path_);
  }
  ~TestFolder() { std::filesystem::remove_all(path_); }
  std::string File() const { return path_ / "blocks"; }
  std::string Name() const { return path_; }

 private:
  std::filesystem::path path_;
};

void Fill(BlockFile* file, uint32_t blocks) {
  BlockBuffers buffers;
  std::byte* memory = buffers.Reserve(blocks);
  for (uint32_t b = 0; b < blocks; ++b) {
    std::fill_n(memory + size_t{b} * kBlockBytes, kBlockBytes, ByteOf(b));
  }
  const Status written = file->Write(0, {memory, size_t{blocks} * kBlockBytes});
  ASSERT_TRUE(written.ok()) << written.ToString();
}

Status IsWhole(uint64_t number, const std::byte* block) {
  const bool whole = std::all_of(block, block + kBlockBytes,
                                 [&](std::byte byte) { return byte == ByteOf(number); });
  return whole ? Status::Ok() : Status(Code::kCorrupt, "block " + std::to_string(number));
}

bool Allowed(SsdEngine engine) {
  return ProbeSsd(std::filesystem::temp_directory_path(), engine).ok();
}

class BlockFileTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    auto engine = ParseSsdEngine(GetParam());
    if (engine.ok() && !Allowed(*engine)) GTEST_SKIP() << GetParam() << " is refused here";
  }
  std::unique_ptr<BlockFile> File() {
    if (GetParam() == std::string("memory")) return NewMemoryBlockFile();
    auto file = OpenBlockFile(folder_.File(), *ParseSsdEngine(GetParam()));
    EXPECT_TRUE(file.ok()) << file.status().ToString();
    EXPECT_STREQ((*file)->engine(), GetParam());
    return std::move(*file);
  }
  TestFolder folder_;
};

class CutFileTest : public BlockFileTest {};  // of the engines that have a file

// Batches of no, one, as many reads as a ring has, and many more; each read is given once.
TEST_P(BlockFileTest, EachBlockOfABatchIsGivenOnce) {
  const auto file = File();
  Fill(file.get(), kBlocks);
  for (const size_t count : {size_t{0}, size_t{1}, size_t{3}, size_t{31}, size_t{kReadDepth},
                             size_t{kReadDepth + 1}, size_t{5000}}) {
    std::vector<uint64_t> blocks;
    for (size_t i = 0; i < count; ++i) blocks.push_back(i * 7919 % kBlocks);
    std::vector<std::atomic<int>> given(count);
    const Status read = file->Read(blocks, [&](size_t i, const std::byte* block) {
      ++given[i];
      return IsWhole(blocks[i], block);
    });
    ASSERT_TRUE(read.ok()) << read.ToString();
    for (const auto& times : given) ASSERT_EQ(times, 1);
  }
}

// More callers than there are rings, and a writer beside them. A pool thread once woke for a batch
// whose last read the caller took before it asked again.
TEST_P(BlockFileTest, ManyCallersReadBesideAWriter) {
  const auto file = File();
  Fill(file.get(), kBlocks);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (uint32_t c = 0; c < 20; ++c) {
    callers.emplace_back([&, c] {
      for (uint64_t i = 0; i < 60; ++i) {
        std::vector<uint64_t> blocks;
        for (uint64_t r = 0; r < 1 + (c + i) % 40; ++r) {
          blocks.push_back((c * 131 + i * 17 + r) % kBlocks);
        }
        const Status read = file->Read(
            blocks, [&](size_t b, const std::byte* block) { return IsWhole(blocks[b], block); });
        if (!read.ok()) ++wrong;
      }
    });
  }
  BlockBuffers buffers;
  std::byte* memory = buffers.Reserve(1);
  for (uint64_t i = 0; i < 100; ++i) {
    if (!file->Write(kBlocks + i, {memory, kBlockBytes}).ok()) ++wrong;
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

TEST_P(BlockFileTest, WhatTheSinkRefusesEndsTheBatchAndTheNextOneIsGood) {
  const auto file = File();
  Fill(file.get(), kBlocks);
  std::vector<uint64_t> blocks(2000);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = i % kBlocks;
  std::atomic<int> given{0};
  const Status read = file->Read(blocks, [&](size_t i, const std::byte*) {
    ++given;
    return i == 700 ? Status(Code::kCorrupt, "the 700th") : Status::Ok();
  });
  EXPECT_EQ(read.code(), Code::kCorrupt);
  EXPECT_EQ(read.message(), "the 700th");
  EXPECT_LT(given, 2000);
  const Status next = file->Read(
      blocks, [&](size_t b, const std::byte* block) { return IsWhole(blocks[b], block); });
  EXPECT_TRUE(next.ok()) << next.ToString();
}

// Before, reads beside it were on their way into buffers that had gone, or the process ended.
TEST_P(CutFileTest, WhatTheSinkThrowsEndsTheBatchAndTheNextOneIsGood) {
  const auto file = File();
  Fill(file.get(), kBlocks);
  std::vector<uint64_t> blocks(2000);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = i % kBlocks;
  for (int round = 0; round < 20; ++round) {
    const Status read = file->Read(blocks, [&](size_t i, const std::byte*) -> Status {
      if (i % 100 == 99) throw std::bad_alloc();
      return Status::Ok();
    });
    EXPECT_EQ(read.code(), Code::kResourceExhausted) << read.ToString();
    const Status next = file->Read(
        blocks, [&](size_t b, const std::byte* block) { return IsWhole(blocks[b], block); });
    EXPECT_TRUE(next.ok()) << next.ToString();
  }
}

// The kernel gives a short read at the end of a file: what is missing is asked for, and is not
// there.
TEST_P(CutFileTest, AFileCutInsideABlockIsReportedByThatBlock) {
  const auto file = File();
  Fill(file.get(), 20);
  ASSERT_EQ(truncate(folder_.File().c_str(), 9 * kBlockBytes + 1536), 0);
  std::vector<uint64_t> blocks;
  for (uint64_t b = 0; b < 10; ++b) blocks.push_back(b);
  const auto good = [&](size_t b, const std::byte* block) { return IsWhole(blocks[b], block); };
  const Status read = file->Read(blocks, good);
  EXPECT_EQ(read.code(), Code::kDeviceError);
  EXPECT_NE(read.message().find("SSD block 9:"), std::string::npos) << read.ToString();
  blocks.pop_back();
  EXPECT_TRUE(file->Read(blocks, good).ok());
}

INSTANTIATE_TEST_SUITE_P(Engines, BlockFileTest,
                         ::testing::Values("io_uring", "libaio", "pread", "memory"),
                         [](const auto& info) { return std::string(info.param); });

INSTANTIATE_TEST_SUITE_P(Engines, CutFileTest, ::testing::Values("io_uring", "libaio", "pread"),
                         [](const auto& info) { return std::string(info.param); });

// Runs `body` in a thread (and those that it starts) for which a system call fails: with `flags`,
// only where its third argument has them.
template <typename Body>
void WithRefusal(const std::vector<std::pair<int, uint32_t>>& calls, int error, Body body) {
  std::thread([&] {
    std::vector<sock_filter> program;
    for (const auto& [call, flags] : calls) {
      program.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)));
      const uint8_t skipped = flags != 0 ? 3 : 1;
      program.push_back(
          BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call), 0, skipped));
      if (flags != 0) {
        program.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[2])));
        program.push_back(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, flags, 0, 1));
      }
      program.push_back(
          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error)));
    }
    program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    const sock_fprog filter{static_cast<uint16_t>(program.size()), program.data()};
    ASSERT_EQ(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
    ASSERT_EQ(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter), 0);
    body();
  }).join();
}

TEST(SsdEngineTest, TheBestEngineIsTaken) {
  const TestFolder folder;
  const auto probe = ProbeSsd(folder.Name());
  ASSERT_TRUE(probe.ok()) << probe.status().ToString();
  SsdEngine best = SsdEngine::kIoUring;
  while (!Allowed(best)) best = static_cast<SsdEngine>(static_cast<int>(best) + 1);
  EXPECT_EQ(probe.value().engine, best) << probe.value().refused;
  EXPECT_EQ(probe.value().refused.empty(), best == SsdEngine::kIoUring);
  EXPECT_TRUE(std::filesystem::is_empty(folder.Name()));
}

// The default profile of a container refuses io_uring in this way.
TEST(SsdEngineTest, WithoutIoUringLibaioIsTaken) {
  if (!Allowed(SsdEngine::kLibaio)) GTEST_SKIP() << "libaio is refused here";
  const TestFolder folder;
  WithRefusal({{SYS_io_uring_setup, 0}}, EPERM, [&] {
    const auto probe = ProbeSsd(folder.Name());
    ASSERT_TRUE(probe.ok()) << probe.status().ToString();
    EXPECT_EQ(probe.value().engine, SsdEngine::kLibaio);
    EXPECT_EQ(probe.value().refused, "io_uring: Operation not permitted");
    const auto forced = OpenBlockFile(folder.File(), SsdEngine::kIoUring);
    ASSERT_FALSE(forced.ok());
    EXPECT_EQ(forced.status().code(), Code::kDeviceError);
    EXPECT_NE(forced.status().message().find("io_uring: Operation not permitted"),
              std::string::npos);
  });
}

TEST(SsdEngineTest, WithoutEitherThreadsRead) {
  const TestFolder folder;
  WithRefusal({{SYS_io_uring_setup, 0}, {SYS_io_setup, 0}}, EPERM, [&] {
    const auto probe = ProbeSsd(folder.Name());
    ASSERT_TRUE(probe.ok()) << probe.status().ToString();
    EXPECT_EQ(probe.value().engine, SsdEngine::kPread);
    EXPECT_EQ(probe.value().refused,
              "io_uring: Operation not permitted, libaio: Operation not permitted");
  });
}

// libaio would read one block after the other there.
TEST(SsdEngineTest, AFileSystemWithoutDirectReadsIsReadThroughThePageCache) {
  const TestFolder folder;
  WithRefusal({{SYS_openat, O_DIRECT}}, EINVAL, [&] {
    const auto file = OpenBlockFile(folder.File(), SsdEngine::kAuto);
    ASSERT_TRUE(file.ok()) << file.status().ToString();
    EXPECT_STREQ(file.value()->engine(), Allowed(SsdEngine::kIoUring) ? "io_uring" : "pread");
    EXPECT_FALSE(file.value()->direct());
    Fill(file.value().get(), 4);
    const uint64_t block = 3;
    EXPECT_TRUE(
        file.value()
            ->Read({&block, 1}, [](size_t, const std::byte* bytes) { return IsWhole(3, bytes); })
            .ok());
    const auto forced = OpenBlockFile(folder.File(), SsdEngine::kLibaio);
    ASSERT_FALSE(forced.ok());
    EXPECT_NE(forced.status().message().find("O_DIRECT"), std::string::npos);
  });
}

TEST(SsdEngineTest, NamesAreReadAndOthersRefused) {
  for (const char* name : {"auto", "io_uring", "libaio", "pread"}) {
    EXPECT_STREQ(SsdEngineName(*ParseSsdEngine(name)), name);
  }
  EXPECT_EQ(ParseSsdEngine("uring").status().code(), Code::kInvalidArgument);
  EXPECT_FALSE(ProbeSsd("/nowhere").ok());
}

}  // namespace
}  // namespace embertide
