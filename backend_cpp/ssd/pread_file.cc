// PreadBlockFile: a pool of threads that read a batch side by side with its caller.
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "base/background_task.h"
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
    for (uint32_t t = 0; t < kThreads; ++t) {
      pool_.push_back(std::make_unique<BackgroundTask>(TaskOptions{.name = "ssd-reads"},
                                                       [this](const std::stop_token& stop) {
                                                         Work(stop);
                                                         return Status::Ok();
                                                       }));
    }
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

  void Drain(Batch* batch) noexcept {
    thread_local BlockBuffers buffers;
    std::byte* buffer = nullptr;
    try {
      buffer = buffers.Reserve(1);
    } catch (const std::bad_alloc&) {
      // Others may have memory for it; the caller, who is last, says so.
      const std::lock_guard lock(mutex_);
      if (batch->failed.ok()) batch->failed = {Code::kResourceExhausted, {}};
      batch->next.store(batch->blocks.size());
      return;
    }
    for (size_t i; (i = batch->next.fetch_add(1)) < batch->blocks.size();) {
      Status status = Guarded([&] {
        EMBERTIDE_RETURN_IF_ERROR(file_->Read(batch->blocks[i], buffer));
        return batch->sink(i, buffer);
      });
      if (status.ok()) continue;
      batch->next.store(batch->blocks.size());
      const std::lock_guard lock(mutex_);
      if (batch->failed.ok()) batch->failed = std::move(status);
      return;
    }
  }

  void Work(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    // Asked once: the caller may take the batch's last read at any moment.
    Batch* batch = nullptr;
    if (!wake_.wait(lock, stop, [&] { return (batch = Unfinished()) != nullptr; })) return;
    ++batch->helpers;
    lock.unlock();
    Drain(batch);
    lock.lock();
    if (--batch->helpers == 0) idle_.notify_all();
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
  std::condition_variable_any wake_;
  std::condition_variable idle_;
  std::vector<Batch*> open_;  // at most one a reading thread
  // Last: they use the members above. One that is missing leaves its reads to the others.
  std::vector<std::unique_ptr<BackgroundTask>> pool_;
};

}  // namespace

std::unique_ptr<BlockFile> NewPreadBlockFile(std::unique_ptr<BlockDescriptor> file) {
  return std::make_unique<PreadBlockFile>(std::move(file));
}

}  // namespace embertide
