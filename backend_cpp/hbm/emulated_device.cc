// The words of CUDA that kernels.h uses, on host threads: a thread is a lane of every warp in turn.
#include "hbm/emulated_device.h"

#include <array>
#include <atomic>
#include <barrier>
#include <bit>
#include <mutex>
#include <thread>

#include "base/float16.h"

// NOLINTBEGIN: the names are CUDA's.
#define __global__
#define __device__
#define __launch_bounds__(threads)

namespace {

struct Index {
  unsigned x;
};
thread_local Index threadIdx;
thread_local Index blockIdx;

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(4) char4 {
  signed char x, y, z, w;
};
struct alignas(8) ushort4 {
  unsigned short x, y, z, w;
};

int __popc(unsigned bits) { return std::popcount(bits); }
int __ffs(unsigned bits) { return bits == 0 ? 0 : std::countr_zero(bits) + 1; }
float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
embertide::Float16 __ushort_as_half(unsigned short bits) {
  return std::bit_cast<embertide::Float16>(bits);
}
float __half2float(embertide::Float16 value) { return static_cast<float>(value); }

unsigned atomicOr(unsigned* to, unsigned bits) {
  return std::atomic_ref<unsigned>(*to).fetch_or(bits);
}
unsigned long long atomicMin(unsigned long long* to, unsigned long long value) {
  const std::atomic_ref<unsigned long long> at(*to);
  unsigned long long before = at.load();
  while (before > value && !at.compare_exchange_weak(before, value)) {
  }
  return before;
}

// One warp at a time; a lane that does not vote stops the test for ever, as it would a GPU.
std::barrier<> vote_barrier{32};
std::atomic<unsigned> votes;
unsigned __ballot_sync(unsigned lanes, bool vote) {
  EMBERTIDE_CHECK(lanes == 0xffffffffU);
  const unsigned lane = threadIdx.x % 32;
  if (lane == 0) votes = 0;
  vote_barrier.arrive_and_wait();
  if (vote) votes |= 1U << lane;
  vote_barrier.arrive_and_wait();
  const unsigned all = votes;
  vote_barrier.arrive_and_wait();
  return all;
}

}  // namespace
// NOLINTEND

#include "hbm/kernels.h"

namespace embertide {
namespace {

template <typename Kernel>
void Run(uint32_t count, uint32_t a_block, const Kernel& kernel) {
  static std::mutex one_launch;
  const std::lock_guard lock(one_launch);
  const uint32_t blocks = (count + a_block - 1) / a_block;
  std::array<std::thread, kWarp> lanes;
  for (uint32_t lane = 0; lane < kWarp; ++lane) {
    lanes[lane] = std::thread([blocks, lane, &kernel] {
      for (uint32_t warp = 0; warp < blocks * kBlockWarps; ++warp) {
        blockIdx.x = warp / kBlockWarps;
        threadIdx.x = warp % kBlockWarps * kWarp + lane;
        kernel();
      }
    });
  }
  for (std::thread& lane : lanes) lane.join();
}

// Memory, streams and copies are a twin's; a kernel runs when it is given, after what its stream
// had.
class EmulatedDevice : public HbmDevice {
 public:
  std::string name() const override { return "emulated GPU"; }
  Result<std::byte*> Allocate(uint64_t bytes) override { return twin_->Allocate(bytes); }
  Result<std::byte*> AllocateHost(uint64_t bytes) override { return twin_->AllocateHost(bytes); }
  Result<uint32_t> AddStream() override { return twin_->AddStream(); }
  Status After(uint32_t stream, HbmDevice* other, uint32_t before) override {
    return twin_->After(stream, static_cast<EmulatedDevice*>(other)->twin_.get(), before);
  }
  Status Wait(uint32_t stream) override { return twin_->Wait(stream); }
  Status Upload(uint32_t stream, std::byte* to, const std::byte* from, uint64_t bytes) override {
    return twin_->Upload(stream, to, from, bytes);
  }
  Status Download(uint32_t stream, std::byte* to, const std::byte* from, uint64_t bytes) override {
    return twin_->Download(stream, to, from, bytes);
  }
  Status CopyFrom(uint32_t stream, std::byte* to, HbmDevice* other, const std::byte* from,
                  uint64_t bytes) override {
    return twin_->CopyFrom(stream, to, other, from, bytes);
  }
  Status Lookup(uint32_t stream, const HbmDirectory& cache, const LookupArgs& args) override {
    return Launch(stream, args.count, kBlockKeys, [&] { LookupKernel(cache, args); });
  }
  Status Place(uint32_t stream, const HbmDirectory& cache, const HbmPlacement* placements,
               uint32_t count, const std::byte* payloads) override {
    return Launch(stream, count, kBlockWarps,
                  [&] { PlaceKernel(cache, placements, count, payloads); });
  }
  Status End(uint32_t stream, const HbmDirectory& cache, const HbmEnding* endings,
             uint32_t count) override {
    return Launch(stream, count, kBlockThreads, [&] { EndKernel(cache, endings, count); });
  }
  Status Survey(uint32_t stream, const HbmDirectory& cache, const uint32_t* sets, uint32_t count,
                uint32_t* used) override {
    return Launch(stream, count, kBlockWarps, [&] { SurveyKernel(cache, sets, count, used); });
  }
  Status SetRefs(uint32_t stream, HbmRef* refs, const uint32_t* at, const HbmRef* given,
                 uint32_t count) override {
    return Launch(stream, count, kBlockThreads, [&] { SetRefsKernel(refs, at, given, count); });
  }
  Status Pool(uint32_t stream, const PoolArgs& args) override {
    return Launch(stream, args.count, kBlockWarps, [&] { PoolKernel(args); });
  }

 private:
  template <typename Kernel>
  Status Launch(uint32_t stream, uint32_t count, uint32_t a_block, const Kernel& kernel) {
    EMBERTIDE_RETURN_IF_ERROR(twin_->Wait(stream));
    Run(count, a_block, kernel);
    return Status::Ok();
  }
  const std::unique_ptr<HbmDevice> twin_ = OpenTwinDevice();
};

}  // namespace

std::unique_ptr<HbmDevice> OpenEmulatedDevice() { return std::make_unique<EmulatedDevice>(); }

}  // namespace embertide
