// Reads by Linux's older asynchronous interface, through libaio.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "ssd/ring_file.h"

#ifdef EMBERTIDE_HAVE_AIO
#include <libaio.h>
#endif

namespace embertide {

#ifdef EMBERTIDE_HAVE_AIO
namespace {

class AioRing : public ReadRing {
 public:
  // Takes over a context of kReadDepth events.
  AioRing(io_context_t context, int fd) : context_(context), fd_(fd) {}
  ~AioRing() override { io_destroy(context_); }

  void Queue(uint32_t buffer, uint64_t block) override {
    iocb* read = &reads_[buffer];
    io_prep_pread(read, fd_, Buffer(buffer), kBlockBytes, static_cast<off_t>(block) * kBlockBytes);
    queued_[queued_count_++] = read;
  }

  uint32_t Wait(uint32_t least, std::span<Done> done) override {
    uint32_t count = 0;
    uint32_t started = 0;
    while (started < queued_count_) {
      const int taken = io_submit(context_, queued_count_ - started, &queued_[started]);
      if (taken > 0) {
        started += static_cast<uint32_t>(taken);
      } else if (taken != -EINTR) {
        // The first of them was refused: it is done, and the others go on.
        done[count++] = {NumberOf(queued_[started++]), taken};
      }
    }
    in_kernel_ += queued_count_ - count;
    queued_count_ = 0;
    const auto wanted = static_cast<long>(least > count ? std::min(least - count, in_kernel_) : 0);
    std::array<io_event, kReadDepth> events;
    int came = -EINTR;
    while (came == -EINTR) {
      came = io_getevents(context_, wanted, static_cast<long>(kReadDepth - count), events.data(),
                          nullptr);
    }
    EMBERTIDE_CHECK(came >= 0);
    for (int e = 0; e < came; ++e) {
      done[count++] = {NumberOf(events[e].obj), static_cast<int>(events[e].res)};
    }
    in_kernel_ -= static_cast<uint32_t>(came);
    return count;
  }

 private:
  uint32_t NumberOf(const iocb* read) const { return static_cast<uint32_t>(read - reads_.data()); }

  const io_context_t context_;
  const int fd_;
  std::array<iocb, kReadDepth> reads_;  // by buffer
  std::array<iocb*, kReadDepth> queued_;
  uint32_t queued_count_ = 0;
  uint32_t in_kernel_ = 0;
};

}  // namespace

Result<std::unique_ptr<ReadRing>> MakeAioRing(int fd) {
  io_context_t context = nullptr;
  const int error = io_setup(kReadDepth, &context);
  if (error < 0) return Status(Code::kDeviceError, std::string("libaio: ") + strerror(-error));
  return std::unique_ptr<ReadRing>(new AioRing(context, fd));
}

#else

Result<std::unique_ptr<ReadRing>> MakeAioRing(int /*fd*/) {
  return Status(Code::kDeviceError, "libaio: built without it");
}

#endif

}  // namespace embertide
