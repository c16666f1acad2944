// Reads by io_uring: registered buffers and file, so that a read costs the kernel no look-ups.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "ssd/ring_file.h"

#ifdef EMBERTIDE_HAVE_URING
#include <liburing.h>
#endif

namespace embertide {

#ifdef EMBERTIDE_HAVE_URING
namespace {

class UringRing : public ReadRing {
 public:
  // Takes over an initialised ring.
  UringRing(const io_uring& ring, int fd) : ring_(ring), fd_(fd) {
    const iovec memory{Buffer(0), size_t{kReadDepth} * kBlockBytes};
    // Either is refused where locked memory is short; reads then name memory and file themselves.
    fixed_buffers_ = io_uring_register_buffers(&ring_, &memory, 1) == 0;
    fixed_file_ = io_uring_register_files(&ring_, &fd_, 1) == 0;
  }
  ~UringRing() override { io_uring_queue_exit(&ring_); }

  void Queue(uint32_t buffer, uint64_t block) override {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    EMBERTIDE_CHECK(sqe != nullptr);  // as many entries as buffers
    const int fd = fixed_file_ ? 0 : fd_;
    if (fixed_buffers_) {
      io_uring_prep_read_fixed(sqe, fd, Buffer(buffer), kBlockBytes, block * kBlockBytes, 0);
    } else {
      io_uring_prep_read(sqe, fd, Buffer(buffer), kBlockBytes, block * kBlockBytes);
    }
    if (fixed_file_) sqe->flags |= IOSQE_FIXED_FILE;
    sqe->user_data = buffer;
  }

  uint32_t Wait(uint32_t least, std::span<Done> done) override {
    const int submitted = io_uring_submit_and_wait(&ring_, least);
    if (submitted < 0) {
      // For want of memory or room nothing was taken: the caller takes what is done, and asks
      // again.
      EMBERTIDE_CHECK(submitted == -EINTR || submitted == -EAGAIN || submitted == -EBUSY);
      std::this_thread::yield();
    }
    io_uring_cqe* cqe = nullptr;
    unsigned head = 0;
    uint32_t count = 0;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      done[count++] = {static_cast<uint32_t>(cqe->user_data), cqe->res};
    }
    io_uring_cq_advance(&ring_, count);
    return count;
  }

 private:
  io_uring ring_;
  const int fd_;
  bool fixed_buffers_ = false;
  bool fixed_file_ = false;
};

}  // namespace

Result<std::unique_ptr<ReadRing>> MakeUringRing(int fd) {
  io_uring ring;
  // Completions without an interrupt of the waiting thread, where the kernel (5.19) knows it.
  int error = io_uring_queue_init(kReadDepth, &ring, IORING_SETUP_COOP_TASKRUN);
  if (error == -EINVAL) error = io_uring_queue_init(kReadDepth, &ring, 0);
  if (error < 0) return Status(Code::kDeviceError, std::string("io_uring: ") + strerror(-error));
  return std::unique_ptr<ReadRing>(new UringRing(ring, fd));
}

#else

Result<std::unique_ptr<ReadRing>> MakeUringRing(int /*fd*/) {
  return Status(Code::kDeviceError, "io_uring: built without liburing");
}

#endif

}  // namespace embertide
