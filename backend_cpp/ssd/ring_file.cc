// RingBlockFile: see the header. A batch takes a ring, keeps it full, and gives it back empty.
#include "ssd/ring_file.h"

#include <array>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <vector>

namespace embertide {
namespace {

// Batches that are read side by side; more wait. 2,048 reads in flight are more than a drive takes,
// and the buffers of all rings are 8 MiB.
constexpr uint32_t kMaxRings = 16;
// Reads that are waited for at a time: the queue stays three quarters full, and a system call is
// shared by as many.
constexpr uint32_t kRefill = kReadDepth / 4;

class RingBlockFile : public BlockFile {
 public:
  RingBlockFile(const char* engine, MakeRing make, std::unique_ptr<BlockDescriptor> file,
                std::unique_ptr<ReadRing> first)
      : engine_(engine), make_(make), file_(std::move(file)) {
    idle_.reserve(kMaxRings);  // giving a ring back takes no memory
    idle_.push_back(std::move(first));
  }

  Status Read(std::span<const uint64_t> blocks, const BlockSink& sink) override {
    if (blocks.empty()) return Status::Ok();
    std::unique_ptr<ReadRing> ring = Take();
    const Status status = ReadThrough(ring.get(), blocks, sink);
    {
      const std::lock_guard lock(mutex_);
      idle_.push_back(std::move(ring));
    }
    returned_.notify_one();
    return status;
  }

  Status Write(uint64_t block, std::span<const std::byte> bytes) override {
    return file_->Write(block, bytes);
  }
  Status Sync() override { return file_->Sync(); }
  const char* engine() const override { return engine_; }
  bool direct() const override { return file_->direct(); }

 private:
  // An idle ring, a new one up to the bound, or the first that is given back.
  std::unique_ptr<ReadRing> Take() {
    std::unique_lock lock(mutex_);
    if (idle_.empty() && made_ < kMaxRings) {
      // A system that refuses one more is asked again the next time none is idle.
      if (auto ring = make_(file_->fd()); ring.ok()) {
        ++made_;
        return std::move(*ring);
      }
    }
    returned_.wait(lock, [this] { return !idle_.empty(); });
    std::unique_ptr<ReadRing> ring = std::move(idle_.back());
    idle_.pop_back();
    return ring;
  }

  // The result of a read, its bytes made whole where the system stopped short.
  Status Finish(const ReadRing::Done& done, uint64_t block, std::byte* buffer) const {
    if (done.result == static_cast<int>(kBlockBytes)) return Status::Ok();
    const bool short_of_it = done.result >= 0 || done.result == -EINTR || done.result == -EAGAIN;
    return short_of_it ? file_->Read(block, buffer) : ReadFailed(block, -done.result);
  }

  Status ReadThrough(ReadRing* ring, std::span<const uint64_t> blocks, const BlockSink& sink) {
    Status status;
    std::array<uint32_t, kReadDepth> free;
    std::array<size_t, kReadDepth> reads;  // by buffer: its place in `blocks`
    std::array<ReadRing::Done, kReadDepth> done;
    for (uint32_t b = 0; b < kReadDepth; ++b) free[b] = b;
    uint32_t in_flight = 0;
    size_t next = 0;
    // After a failure nothing is begun, but what is in flight still writes to the ring's buffers.
    while (in_flight > 0 || (status.ok() && next < blocks.size())) {
      for (; status.ok() && next < blocks.size() && in_flight < kReadDepth; ++in_flight) {
        const uint32_t buffer = free[kReadDepth - 1 - in_flight];
        reads[buffer] = next;
        ring->Queue(buffer, blocks[next++]);
      }
      const uint32_t came = ring->Wait(std::min(in_flight, kRefill), done);
      for (uint32_t d = 0; d < came; ++d) {
        const uint32_t buffer = done[d].buffer;
        const size_t read = reads[buffer];
        free[kReadDepth - in_flight--] = buffer;
        if (!status.ok()) continue;
        status = Guarded([&] {
          EMBERTIDE_RETURN_IF_ERROR(Finish(done[d], blocks[read], ring->Buffer(buffer)));
          return sink(read, ring->Buffer(buffer));
        });
      }
    }
    return status;
  }

  const char* const engine_;
  const MakeRing make_;
  const std::unique_ptr<BlockDescriptor> file_;
  std::mutex mutex_;  // never held while a read is waited for
  std::condition_variable returned_;
  std::vector<std::unique_ptr<ReadRing>> idle_;  // the last used on top: its buffers are near
  uint32_t made_ = 1;
};

}  // namespace

Result<std::unique_ptr<BlockFile>> NewRingBlockFile(const char* engine, MakeRing make,
                                                    std::unique_ptr<BlockDescriptor>* file) {
  Result<std::unique_ptr<ReadRing>> first = make((*file)->fd());
  if (!first.ok()) return first.status();
  return std::unique_ptr<BlockFile>(
      new RingBlockFile(engine, make, std::move(*file), std::move(*first)));
}

}  // namespace embertide
