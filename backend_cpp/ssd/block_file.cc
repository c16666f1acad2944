// BlockFile engines: a pool of pread threads, and the in-memory twin.
#include "ssd/block_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace embertide {
namespace {

// Below this many reads a caller is quicker alone than by waking a thread (some 10 us).
constexpr size_t kReadsToShare = 4;

class PreadBlockFile : public BlockFile {
 public:
  PreadBlockFile(int fd, bool direct, uint32_t threads) : fd_(fd), direct_(direct) {
    for (uint32_t t = 0; t < threads; ++t) pool_.emplace_back([this] { Work(); });
  }
  ~PreadBlockFile() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : pool_) thread.join();
    close(fd_);
  }

  Status Read(std::span<const BlockRead> reads) override {
    Batch batch{reads, {}, {}, {}};
    if (reads.size() >= kReadsToShare && !pool_.empty()) {
      {
        const std::lock_guard lock(mutex_);
        open_.push_back(&batch);
      }
      wake_.notify_all();
      Drain(&batch);
      std::unique_lock lock(mutex_);
      std::erase(open_, &batch);
      idle_.wait(lock, [&] { return batch.helpers == 0; });
    } else {
      Drain(&batch);
    }
    if (const uint64_t failed = batch.failed.load(); failed != 0) {
      return {Code::kDeviceError, "read of SSD block " + std::to_string(failed - 1) + " failed"};
    }
    return Status::Ok();
  }

  Status Write(uint64_t block, std::span<const std::byte> bytes) override {
    size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t n = pwrite(fd_, bytes.data() + done, bytes.size() - done,
                               static_cast<off_t>(block * kBlockBytes + done));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) {
        return {Code::kDeviceError, "write of SSD block " + std::to_string(block) + ": " +
                                        std::string(strerror(n < 0 ? errno : ENOSPC))};
      }
      done += static_cast<size_t>(n);
    }
    return Status::Ok();
  }

  const char* engine() const override { return direct_ ? "pread-direct" : "pread-buffered"; }

 private:
  struct Batch {
    std::span<const BlockRead> reads;
    std::atomic<size_t> next;
    std::atomic<uint64_t> failed;  // block + 1 of a failed read
    uint32_t helpers;              // pool threads at work on it; guarded by mutex_
  };

  void Drain(Batch* batch) {
    for (size_t i; (i = batch->next.fetch_add(1)) < batch->reads.size();) {
      const BlockRead& read = batch->reads[i];
      size_t done = 0;
      while (done < kBlockBytes) {
        const ssize_t n = pread(fd_, read.buffer + done, kBlockBytes - done,
                                static_cast<off_t>(read.block * kBlockBytes + done));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        done += static_cast<size_t>(n);
      }
      if (done < kBlockBytes) batch->failed.store(read.block + 1);
    }
  }

  void Work() {
    std::unique_lock lock(mutex_);
    while (true) {
      // Asked once: the caller may take the batch's last read at any moment.
      Batch* batch = nullptr;
      wake_.wait(lock, [&] { return stop_ || (batch = Unfinished()) != nullptr; });
      if (stop_) return;
      ++batch->helpers;
      lock.unlock();
      Drain(batch);
      lock.lock();
      if (--batch->helpers == 0) idle_.notify_all();
    }
  }
  // Requires: mutex_ held.
  Batch* Unfinished() {
    for (Batch* batch : open_) {
      if (batch->next.load() < batch->reads.size()) return batch;
    }
    return nullptr;
  }

  const int fd_;
  const bool direct_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::vector<Batch*> open_;  // at most one a reading thread
  bool stop_ = false;
  std::vector<std::thread> pool_;
};

class MemoryBlockFile : public BlockFile {
 public:
  explicit MemoryBlockFile(std::function<bool(uint64_t)> fail) : fail_(std::move(fail)) {}

  Status Read(std::span<const BlockRead> reads) override {
    const std::lock_guard lock(mutex_);
    for (const BlockRead& read : reads) {
      const auto found = blocks_.find(read.block);
      if (found == blocks_.end() || (fail_ && fail_(read.block))) {
        return {Code::kDeviceError, "read of SSD block " + std::to_string(read.block) + " failed"};
      }
      std::memcpy(read.buffer, found->second.data(), kBlockBytes);
    }
    return Status::Ok();
  }
  Status Write(uint64_t block, std::span<const std::byte> bytes) override {
    const std::lock_guard lock(mutex_);
    for (size_t at = 0; at < bytes.size(); at += kBlockBytes, ++block) {
      if (fail_ && fail_(block)) {
        return {Code::kDeviceError, "write of SSD block " + std::to_string(block) + " failed"};
      }
      blocks_[block].assign(bytes.begin() + static_cast<ptrdiff_t>(at),
                            bytes.begin() + static_cast<ptrdiff_t>(at + kBlockBytes));
    }
    return Status::Ok();
  }
  const char* engine() const override { return "memory"; }

 private:
  std::mutex mutex_;
  std::function<bool(uint64_t)> fail_;
  std::map<uint64_t, std::vector<std::byte>> blocks_;
};

}  // namespace

Result<std::unique_ptr<BlockFile>> OpenPreadBlockFile(const std::string& path, uint32_t threads) {
  bool direct = true;
  constexpr int kFlags = O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC;
  int fd = open(path.c_str(), kFlags | O_DIRECT, 0644);
  if (fd < 0 && errno == EINVAL) {
    direct = false;
    fd = open(path.c_str(), kFlags, 0644);
  }
  if (fd < 0) return Status(Code::kDeviceError, path + ": " + strerror(errno));
  return std::unique_ptr<BlockFile>(new PreadBlockFile(fd, direct, threads));
}

std::unique_ptr<BlockFile> NewMemoryBlockFile(std::function<bool(uint64_t)> fail) {
  return std::make_unique<MemoryBlockFile>(std::move(fail));
}

}  // namespace embertide
