// BlockFile: opening one with the best engine that the system lets us have; the in-memory twin.
#include "ssd/block_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "ssd/file_descriptor.h"
#include "ssd/ring_file.h"

namespace embertide {
namespace {

constexpr std::array<const char*, 4> kEngineNames = {"auto", "io_uring", "libaio", "pread"};

class MemoryBlockFile : public BlockFile {
 public:
  Status Read(std::span<const uint64_t> blocks, const BlockSink& sink) override {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < blocks.size(); ++i) {
      const auto found = blocks_.find(blocks[i]);
      if (found == blocks_.end()) return ReadFailed(blocks[i], 0);
      EMBERTIDE_RETURN_IF_ERROR(sink(i, found->second.data()));
    }
    return Status::Ok();
  }
  Status Write(uint64_t block, std::span<const std::byte> bytes) override {
    const std::lock_guard lock(mutex_);
    for (size_t at = 0; at < bytes.size(); at += kBlockBytes, ++block) {
      const auto part = bytes.subspan(at, kBlockBytes);
      blocks_[block].assign(part.begin(), part.end());
    }
    return Status::Ok();
  }
  Status Sync() override { return Status::Ok(); }
  const char* engine() const override { return "memory"; }
  bool direct() const override { return false; }

 private:
  std::mutex mutex_;
  std::map<uint64_t, std::vector<std::byte>> blocks_;
};

}  // namespace

const char* SsdEngineName(SsdEngine engine) { return kEngineNames[static_cast<size_t>(engine)]; }

Result<SsdEngine> ParseSsdEngine(const std::string& name) {
  for (size_t e = 0; e < kEngineNames.size(); ++e) {
    if (name == kEngineNames[e]) return static_cast<SsdEngine>(e);
  }
  return Status(Code::kInvalidArgument,
                "SSD engine \"" + name + "\"; use auto, io_uring, libaio or pread");
}

std::byte* BlockBuffers::Reserve(size_t blocks) {
  // One block more than asked, so that the start can be aligned.
  if (blocks > blocks_) {
    memory_.reset(new std::byte[(blocks + 1) * kBlockBytes]);
    blocks_ = blocks;
  }
  const auto address = reinterpret_cast<uintptr_t>(memory_.get());
  return memory_.get() + (kBlockBytes - address % kBlockBytes) % kBlockBytes;
}

Status ReadFailed(uint64_t block, int error) {
  return {Code::kDeviceError, "read of SSD block " + std::to_string(block) + ": " +
                                  (error == 0 ? "the file ends before it" : strerror(error))};
}

BlockDescriptor::~BlockDescriptor() { close(fd_); }

Status BlockDescriptor::Write(uint64_t block, std::span<const std::byte> bytes) const {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = pwrite(fd_, bytes.data() + done, bytes.size() - done,
                             static_cast<off_t>(block * kBlockBytes + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      return {Code::kDeviceError, "write of SSD block " +
                                      std::to_string(block + done / kBlockBytes) + ": " +
                                      strerror(n < 0 ? errno : ENOSPC)};
    }
    done += static_cast<size_t>(n);
  }
  return Status::Ok();
}

Status BlockDescriptor::Sync() const {
  if (fdatasync(fd_) == 0) return Status::Ok();
  return {Code::kDeviceError, std::string("sync of the SSD log: ") + strerror(errno)};
}

Status BlockDescriptor::Read(uint64_t block, std::byte* buffer) const {
  size_t done = 0;
  while (done < kBlockBytes) {
    const ssize_t n = pread(fd_, buffer + done, kBlockBytes - done,
                            static_cast<off_t>(block * kBlockBytes + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return ReadFailed(block, n < 0 ? errno : 0);
    done += static_cast<size_t>(n);
  }
  return Status::Ok();
}

Result<std::unique_ptr<BlockFile>> OpenBlockFile(const std::string& path, SsdEngine engine,
                                                 std::string* refused, bool keep) {
  bool direct = true;
  const int flags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | (keep ? 0 : O_TRUNC);
  int fd = open(path.c_str(), flags | O_DIRECT, 0600);
  if (fd < 0 && errno == EINVAL) {
    direct = false;
    fd = open(path.c_str(), flags, 0600);
  }
  if (fd < 0) return Status(Code::kDeviceError, path + ": " + strerror(errno));
  auto file = std::make_unique<BlockDescriptor>(fd, direct);
  struct Candidate {
    SsdEngine engine;
    MakeRing make;
    bool needs_direct;  // through the page cache its reads wait for one another
  };
  constexpr std::array<Candidate, 2> kRings = {
      {{SsdEngine::kIoUring, MakeUringRing, false}, {SsdEngine::kLibaio, MakeAioRing, true}}};
  for (const Candidate& each : kRings) {
    if (engine != each.engine && engine != SsdEngine::kAuto) continue;
    const char* name = SsdEngineName(each.engine);
    Result<std::unique_ptr<BlockFile>> opened =
        each.needs_direct && !direct
            ? Status(Code::kDeviceError, std::string(name) + ": the file system refuses O_DIRECT")
            : NewRingBlockFile(name, each.make, &file);
    if (opened.ok()) return opened;
    if (engine != SsdEngine::kAuto) {
      return Status(Code::kDeviceError,
                    path + ": " + opened.status().message() + "; leave the SSD engine to auto");
    }
    if (refused == nullptr) continue;
    if (!refused->empty()) *refused += ", ";
    *refused += opened.status().message();
  }
  return NewPreadBlockFile(std::move(file));
}

Result<SsdProbe> ProbeSsd(const std::string& directory, SsdEngine engine) {
  const std::string path = directory + "/.embertide-probe-" + std::to_string(getpid());
  SsdProbe probe;
  const auto file = OpenBlockFile(path, engine, &probe.refused);
  if (!file.ok()) return file.status();
  unlink(path.c_str());
  probe.engine = *ParseSsdEngine(file.value()->engine());
  probe.direct = file.value()->direct();
  return probe;
}

std::unique_ptr<BlockFile> NewMemoryBlockFile() { return std::make_unique<MemoryBlockFile>(); }

}  // namespace embertide
