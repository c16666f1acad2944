// PreadBlockFile: a pool of threads that read a batch side by side with its caller.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "ssd/file_descriptor.h"

namespace embertide {
namespace {

// Reads of a batch in flight, the caller's aside: where neither ring is to be had, what a cloud
// drive needs; a thread costs more than an entry of a queue.
constexpr uint32_t kThreads = 15;
// Below this many reads a caller is quicker alone than by waking a thread (some 10 us).
constexpr size_t kReadsToShare = 4;

class PreadBlockFile : public BlockFile {
 public:
  explicit PreadBlockFile(std::unique_ptr<BlockDescriptor> file) : file_(std::move(file)) {
    for (uint32_t t = 0; t < kThreads; ++t) pool_.emplace_back([this] { Work(); });
  }
  ~PreadBlockFile() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : pool_) thread.join();
  }

  Status Read(std::span<const uint64_t> blocks, const BlockSink& sink) override {
    Batch batch{blocks, sink, {}, {}, {}};
    if (blocks.size() >= kReadsToShare) {
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
    return batch.failed;
  }

  Status Write(uint64_t block, std::span<const std::byte> bytes) override {
    return file_->Write(block, bytes);
  }
  Status Sync() override { return file_->Sync(); }
  const char* engine() const override { return "pread"; }
  bool direct() const override { return file_->direct(); }

 private:
  struct Batch {
    std::span<const uint64_t> blocks;
    const BlockSink& sink;
    std::atomic<size_t> next;
    uint32_t helpers;  // pool threads at work on it; guarded by mutex_
    Status failed;     // the first failure; guarded by mutex_
  };

  void Drain(Batch* batch) {
    thread_local BlockBuffers buffers;
    std::byte* buffer = buffers.Reserve(1);
    for (size_t i; (i = batch->next.fetch_add(1)) < batch->blocks.size();) {
      Status status = file_->Read(batch->blocks[i], buffer);
      if (status.ok()) status = batch->sink(i, buffer);
      if (status.ok()) continue;
      batch->next.store(batch->blocks.size());
      const std::lock_guard lock(mutex_);
      if (batch->failed.ok()) batch->failed = std::move(status);
      return;
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
      if (batch->next.load() < batch->blocks.size()) return batch;
    }
    return nullptr;
  }

  const std::unique_ptr<BlockDescriptor> file_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::vector<Batch*> open_;  // at most one a reading thread
  bool stop_ = false;
  std::vector<std::thread> pool_;
};

}  // namespace

std::unique_ptr<BlockFile> NewPreadBlockFile(std::unique_ptr<BlockDescriptor> file) {
  return std::make_unique<PreadBlockFile>(std::move(file));
}

}  // namespace embertide
