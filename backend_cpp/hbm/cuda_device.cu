// The GPU as an HbmDevice: CUDA's runtime, and the launches of the kernels.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstring>
#include <initializer_list>
#include <mutex>
#include <vector>

#include "hbm/device.h"
#include "hbm/kernels.h"

namespace embertide {
namespace {

class CudaDevice : public HbmDevice {
 public:
  CudaDevice(int ordinal, std::string name) : ordinal_(ordinal), name_(std::move(name)) {}

  ~CudaDevice() override {
    // Errors change nothing any more.
    static_cast<void>(cudaSetDevice(ordinal_));
    static_cast<void>(cudaDeviceSynchronize());
    for (cudaStream_t stream : streams_) static_cast<void>(cudaStreamDestroy(stream));
    for (std::byte* memory : memory_) static_cast<void>(cudaFree(memory));
    for (std::byte* memory : host_memory_) static_cast<void>(cudaFreeHost(memory));
  }

  std::string name() const override { return name_; }

  Result<std::byte*> Allocate(uint64_t bytes) override {
    void* memory = nullptr;
    const Status status = Ok({cudaSetDevice(ordinal_), cudaMalloc(&memory, bytes)});
    if (!status.ok()) return OutOfMemory(bytes, "of the device", status);
    memory_.push_back(static_cast<std::byte*>(memory));
    // Streams do not wait for the one that clears.
    EMBERTIDE_RETURN_IF_ERROR(Ok({cudaMemset(memory, 0, bytes), cudaDeviceSynchronize()}));
    return memory_.back();
  }

  Result<std::byte*> AllocateHost(uint64_t bytes) override {
    void* memory = nullptr;
    const Status status =
        Ok({cudaSetDevice(ordinal_), cudaHostAlloc(&memory, bytes, cudaHostAllocPortable)});
    if (!status.ok()) return OutOfMemory(bytes, "pinned in the host", status);
    host_memory_.push_back(static_cast<std::byte*>(memory));
    std::memset(memory, 0, bytes);
    return host_memory_.back();
  }

  Result<uint32_t> AddStream() override {
    cudaStream_t stream = nullptr;
    EMBERTIDE_RETURN_IF_ERROR(
        Ok({cudaSetDevice(ordinal_), cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)}));
    streams_.push_back(stream);
    return static_cast<uint32_t>(streams_.size() - 1);
  }

  Status After(uint32_t stream, HbmDevice* other, uint32_t before) override {
    auto* device = static_cast<CudaDevice*>(other);
    cudaEvent_t event = nullptr;
    EMBERTIDE_RETURN_IF_ERROR(
        device->Ok({cudaSetDevice(device->ordinal_),
                    cudaEventCreateWithFlags(&event, cudaEventDisableTiming)}));
    const Status recorded = device->Ok({cudaEventRecord(event, device->streams_[before])});
    const Status waits =
        recorded.ok()
            ? Ok({cudaSetDevice(ordinal_), cudaStreamWaitEvent(streams_[stream], event, 0)})
            : recorded;
    // The driver keeps it until it has come to pass.
    static_cast<void>(cudaEventDestroy(event));
    return waits;
  }

  Status Wait(uint32_t stream) override {
    return Ok({cudaSetDevice(ordinal_), cudaStreamSynchronize(streams_[stream])});
  }

  Status Upload(uint32_t stream, std::byte* to, const std::byte* from, uint64_t bytes) override {
    return Ok({cudaSetDevice(ordinal_),
               cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, streams_[stream])});
  }
  Status Download(uint32_t stream, std::byte* to, const std::byte* from, uint64_t bytes) override {
    return Ok({cudaSetDevice(ordinal_),
               cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, streams_[stream])});
  }
  Status CopyFrom(uint32_t stream, std::byte* to, HbmDevice* other, const std::byte* from,
                  uint64_t bytes) override {
    const auto* device = static_cast<CudaDevice*>(other);
    EMBERTIDE_RETURN_IF_ERROR(Ok({cudaSetDevice(ordinal_)}));
    EMBERTIDE_RETURN_IF_ERROR(EnablePeer(device->ordinal_));
    // Without peer access the driver goes through the host.
    return Ok({cudaMemcpyPeerAsync(to, ordinal_, from, device->ordinal_, bytes, streams_[stream])});
  }

  Status Lookup(uint32_t stream, const HbmDirectory& cache, const LookupArgs& args) override {
    return Launch(args.count, kBlockKeys, [&](uint32_t blocks) {
      LookupKernel<<<blocks, kBlockThreads, 0, streams_[stream]>>>(cache, args);
    });
  }
  Status Place(uint32_t stream, const HbmDirectory& cache, const HbmPlacement* placements,
               uint32_t count, const std::byte* payloads) override {
    return Launch(count, kBlockWarps, [&](uint32_t blocks) {
      PlaceKernel<<<blocks, kBlockThreads, 0, streams_[stream]>>>(cache, placements, count,
                                                                  payloads);
    });
  }
  Status End(uint32_t stream, const HbmDirectory& cache, const HbmEnding* endings,
             uint32_t count) override {
    return Launch(count, kBlockThreads, [&](uint32_t blocks) {
      EndKernel<<<blocks, kBlockThreads, 0, streams_[stream]>>>(cache, endings, count);
    });
  }
  Status Survey(uint32_t stream, const HbmDirectory& cache, const uint32_t* sets, uint32_t count,
                uint32_t* used) override {
    return Launch(count, kBlockWarps, [&](uint32_t blocks) {
      SurveyKernel<<<blocks, kBlockThreads, 0, streams_[stream]>>>(cache, sets, count, used);
    });
  }
  Status SetRefs(uint32_t stream, HbmRef* refs, const uint32_t* at, const HbmRef* given,
                 uint32_t count) override {
    return Launch(count, kBlockThreads, [&](uint32_t blocks) {
      SetRefsKernel<<<blocks, kBlockThreads, 0, streams_[stream]>>>(refs, at, given, count);
    });
  }
  Status Pool(uint32_t stream, const PoolArgs& args) override {
    return Launch(args.count, kBlockWarps, [&](uint32_t blocks) {
      PoolKernel<<<blocks, kBlockThreads, 0, streams_[stream]>>>(args);
    });
  }

 private:
  // The first error of calls made one after the other, in the order of the braces: the arguments of
  // a function would be evaluated in any order.
  Status Ok(std::initializer_list<cudaError_t> errors) const {
    for (const cudaError_t error : errors) {
      if (error == cudaSuccess) continue;
      static_cast<void>(cudaGetLastError());  // said once is enough
      return {Code::kDeviceError, name_ + ": " + cudaGetErrorString(error)};
    }
    return Status::Ok();
  }

  static Status OutOfMemory(uint64_t bytes, const char* where, const Status& status) {
    return {Code::kResourceExhausted,
            std::to_string(bytes) + " bytes " + where + " cannot be had: " + status.message()};
  }

  template <typename Start>
  Status Launch(uint32_t count, uint32_t a_block, const Start& start) const {
    if (count == 0) return Status::Ok();
    EMBERTIDE_RETURN_IF_ERROR(Ok({cudaSetDevice(ordinal_)}));
    start((count - 1) / a_block + 1);
    return Ok({cudaGetLastError()});
  }

  // Requires: this device is the thread's.
  Status EnablePeer(int peer) {
    const std::lock_guard lock(peers_mutex_);
    if (peers_.size() <= static_cast<size_t>(peer)) peers_.resize(peer + 1, false);
    if (peers_[peer]) return Status::Ok();
    peers_[peer] = true;
    int can = 0;
    EMBERTIDE_RETURN_IF_ERROR(Ok({cudaDeviceCanAccessPeer(&can, ordinal_, peer)}));
    if (can == 0) return Status::Ok();
    const cudaError_t enabled = cudaDeviceEnablePeerAccess(peer, 0);
    if (enabled != cudaErrorPeerAccessAlreadyEnabled) return Ok({enabled});
    static_cast<void>(cudaGetLastError());
    return Status::Ok();
  }

  const int ordinal_;
  const std::string name_;
  std::vector<std::byte*> memory_;
  std::vector<std::byte*> host_memory_;
  std::vector<cudaStream_t> streams_;
  std::mutex peers_mutex_;
  std::vector<bool> peers_;  // asked for, by ordinal
};

}  // namespace

uint32_t GpuCount() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return static_cast<uint32_t>(count);
  static_cast<void>(cudaGetLastError());
  return 0;
}

Result<std::unique_ptr<HbmDevice>> OpenGpu(uint32_t ordinal) {
  if (ordinal >= GpuCount()) {
    return Status(Code::kNotFound, "GPU " + std::to_string(ordinal) +
                                       " does not exist: the driver shows " +
                                       std::to_string(GpuCount()));
  }
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, static_cast<int>(ordinal));
      error != cudaSuccess) {
    return Status(Code::kDeviceError,
                  "GPU " + std::to_string(ordinal) + ": " + cudaGetErrorString(error));
  }
  return std::unique_ptr<HbmDevice>(new CudaDevice(
      static_cast<int>(ordinal), "GPU " + std::to_string(ordinal) + " (" + properties.name + ")"));
}

}  // namespace embertide
