// The GPU as an HbmDevice, and the six kernels. Decisions are the host's: no kernel allocates,
// evicts or waits for another one, and no two of a launch write the same bytes but for the mark
// "used" and an entry's `until`, which are atomics.
//
// Why fp64 sums cost little here, on paper: a pooled gather waits for DRAM. An element is converted
// and added once. An H100 adds 17e12 doubles/s and converts 3.7e12 (16 a clock and SM, by the
// programming guide): 15 TB/s of fp32 elements, 7 of fp16 and 3.7 of int8, beside 3.35 TB/s of
// DRAM. A consumer GPU does both at 1/64 of its fp32 rate (AD102: 0.6e12/s): fp32 rows are held to
// about 1.3 TB/s, near its DRAM's 1 TB/s, and fp16 and int8 rows to a half and a quarter: there
// arithmetic is the bound.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstring>
#include <mutex>
#include <vector>

#include "hbm/device.h"

namespace embertide {
namespace {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffffU;
constexpr uint32_t kBlockThreads = 128;
constexpr uint32_t kBlockWarps = kBlockThreads / kWarp;
// Rows of a bag asked for before the first is added.
constexpr uint32_t kRowsAhead = 4;

static_assert(kHbmWays == kWarp, "a lane looks at one way");
static_assert(sizeof(unsigned long long) == sizeof(uint64_t));

// Every kernel below gives one warp, or thread, to one item, and returns beyond the last: whole
// warps at a time where a warp works together, so that its votes meet all lanes.
__device__ uint32_t WarpIndex() { return blockIdx.x * kBlockWarps + threadIdx.x / kWarp; }
__device__ uint32_t ThreadIndex() { return blockIdx.x * kBlockThreads + threadIdx.x; }
__device__ uint32_t Lane() { return threadIdx.x % kWarp; }

// --- the directory

__global__ void LookupKernel(HbmDirectory cache, HbmDevice::LookupArgs args) {
  const uint32_t i = WarpIndex();
  if (i >= args.count) return;
  const uint32_t table = args.tables[i];
  const uint64_t key = args.keys[i];
  const uint64_t hash = HbmHash(table, key);
  // A position that is not to be looked for probes as well, for a table that no entry has.
  const uint64_t way = uint64_t{HbmSetOf(hash, cache.sets)} * kHbmWays + Lane();
  HbmEntry entry;
  bool found = false;
  if (cache.tags[way] == HbmTagOf(hash)) {
    entry = cache.entries[way];
    found = entry.key == key && HbmTableOf(entry.meta) == table && args.version >= entry.since &&
            args.version < entry.until;
  }
  const uint32_t finders = __ballot_sync(kAllLanes, found);
  if (found) {  // A key stands in one way.
    if ((entry.meta & kHbmUsed) == 0) atomicOr(&cache.entries[way].meta, kHbmUsed);
    HbmRef ref;
    ref.payload = cache.pages + uint64_t{entry.slot} * kHbmSlotUnit;
    ref.live = HbmLiveOf(entry.meta);
    ref.kind = HbmRefKind::kRow;
    args.refs[i] = ref;
    args.answers[i] = 0x10000U | ref.live;
  } else if (finders == 0 && Lane() == 0) {
    args.answers[i] = 0;
  }
}

__global__ void PlaceKernel(HbmDirectory cache, const HbmPlacement* placements, uint32_t count,
                            const std::byte* payloads) {
  const uint32_t i = WarpIndex();
  if (i >= count) return;
  const HbmPlacement& placement = placements[i];
  const HbmEntry entry = placement.entry;
  const auto* from = reinterpret_cast<const uint4*>(payloads + placement.from);
  auto* to = reinterpret_cast<uint4*>(cache.pages + uint64_t{entry.slot} * kHbmSlotUnit);
  for (uint32_t v = Lane(); v * sizeof(uint4) < placement.bytes; v += kWarp) to[v] = from[v];
  if (Lane() != 0) return;
  cache.entries[placement.way] = entry;
  const uint64_t hash = HbmHash(HbmTableOf(entry.meta), entry.key);
  cache.tags[placement.way] = entry.until == 0 ? uint16_t{0} : HbmTagOf(hash);
}

__global__ void EndKernel(HbmDirectory cache, const HbmEnding* endings, uint32_t count) {
  const uint32_t i = ThreadIndex();
  if (i >= count) return;
  // The earliest end holds, in whatever order two of one row come.
  atomicMin(reinterpret_cast<unsigned long long*>(&cache.entries[endings[i].way].until),
            static_cast<unsigned long long>(endings[i].until));
}

__global__ void SurveyKernel(HbmDirectory cache, const uint32_t* sets, uint32_t count,
                             uint32_t* used) {
  const uint32_t i = WarpIndex();
  if (i >= count) return;
  HbmEntry& entry = cache.entries[uint64_t{sets[i]} * kHbmWays + Lane()];
  const uint32_t meta = entry.meta;
  const uint32_t ways = __ballot_sync(kAllLanes, (meta & kHbmUsed) != 0);
  if ((meta & kHbmUsed) != 0) entry.meta = meta & ~kHbmUsed;
  if (Lane() == 0) used[i] = ways;
}

// --- pooling

__global__ void SetRefsKernel(HbmRef* refs, const uint32_t* at, const HbmRef* given,
                              uint32_t count) {
  const uint32_t i = ThreadIndex();
  if (i < count) refs[at[i]] = given[i];
}

// A ref in one load of 16 bytes.
static_assert(offsetof(HbmRef, live) == 8 && offsetof(HbmRef, kind) == 10);
__device__ HbmRef LoadRef(const HbmRef* from) {
  const uint4 raw = *reinterpret_cast<const uint4*>(from);
  HbmRef ref;
  ref.payload = reinterpret_cast<const std::byte*>(uint64_t{raw.y} << 32 | raw.x);
  ref.live = static_cast<uint16_t>(raw.z);
  ref.kind = static_cast<HbmRefKind>(raw.z >> 16 & 0xffU);
  return ref;
}

// kWidth neighbouring elements; `at` is aligned to all of them.
template <DType kDType, int kWidth>
__device__ void LoadElements(const std::byte* at, float (&values)[kWidth]) {
  static_assert(kWidth == 1 || kWidth == 4);
  if constexpr (kDType == DType::kFp32 && kWidth == 4) {
    const float4 raw = *reinterpret_cast<const float4*>(at);
    values[0] = raw.x;
    values[1] = raw.y;
    values[2] = raw.z;
    values[3] = raw.w;
  } else if constexpr (kDType == DType::kFp32) {
    values[0] = *reinterpret_cast<const float*>(at);
  } else if constexpr (kDType == DType::kInt8 && kWidth == 4) {
    const char4 raw = *reinterpret_cast<const char4*>(at);
    values[0] = static_cast<float>(raw.x);
    values[1] = static_cast<float>(raw.y);
    values[2] = static_cast<float>(raw.z);
    values[3] = static_cast<float>(raw.w);
  } else if constexpr (kDType == DType::kInt8) {
    values[0] = static_cast<float>(*reinterpret_cast<const int8_t*>(at));
  } else {
    uint16_t raw[kWidth];
    if constexpr (kWidth == 4) {
      const ushort4 four = *reinterpret_cast<const ushort4*>(at);
      raw[0] = four.x;
      raw[1] = four.y;
      raw[2] = four.z;
      raw[3] = four.w;
    } else {
      raw[0] = *reinterpret_cast<const uint16_t*>(at);
    }
#pragma unroll
    for (int w = 0; w < kWidth; ++w) {
      values[w] = kDType == DType::kBf16 ? __uint_as_float(uint32_t{raw[w]} << 16)
                                         : __half2float(__ushort_as_half(raw[w]));
    }
  }
}

// What one lane reads of every row: kWidth dimensions of one chunk.
struct Place {
  uint32_t dimension;
  uint32_t chunk;
  uint32_t in_chunk;
};

// The values of a payload of `live` chunks there; zeros in a dead chunk.
template <DType kDType, int kWidth>
__device__ void LoadRow(const HbmTable& table, const Place& place, const std::byte* payload,
                        uint32_t live, float (&values)[kWidth]) {
#pragma unroll
  for (int w = 0; w < kWidth; ++w) values[w] = 0.0F;
  if ((live >> place.chunk & 1U) == 0) return;
  const uint32_t before = __popc(live & ((1U << place.chunk) - 1U));
  const uint32_t element = before * table.chunk_dim + place.in_chunk;
  if constexpr (kDType == DType::kInt8) {
    const float scale = *reinterpret_cast<const float*>(payload);
    LoadElements<kDType, kWidth>(payload + 4 + element, values);
#pragma unroll
    for (int w = 0; w < kWidth; ++w) values[w] = scale * values[w];
  } else {
    LoadElements<kDType, kWidth>(payload + uint64_t{element} * DTypeBytes(kDType), values);
  }
}

// Adds what is no row of the table.
template <DType kDType, int kWidth>
__device__ void AddAny(const HbmTable& table, const Place& place, const HbmRef& ref,
                       double (&sums)[kWidth]) {
  if (ref.kind == HbmRefKind::kNothing) return;
  float values[kWidth];
  if (ref.kind == HbmRefKind::kSums) {
    const auto* others = reinterpret_cast<const double*>(ref.payload) + place.dimension;
#pragma unroll
    for (int w = 0; w < kWidth; ++w) sums[w] += others[w];
    return;
  }
  if (ref.kind == HbmRefKind::kFloats) {
    LoadElements<DType::kFp32, kWidth>(ref.payload + uint64_t{place.dimension} * sizeof(float),
                                       values);
  } else {
    LoadRow<kDType, kWidth>(table, place, ref.payload, ref.live, values);
  }
#pragma unroll
  for (int w = 0; w < kWidth; ++w) sums[w] += static_cast<double>(values[w]);
}

// Lanes share the dimensions of a bag and nothing else: they need no votes. Rows are added in
// order.
template <DType kDType, int kWidth>
__device__ void PoolBag(const HbmDevice::PoolArgs& args, const HbmBag& bag, const HbmTable& table) {
  const HbmRef* refs = args.refs + bag.first;
  for (uint32_t d = Lane() * kWidth; d < table.dim; d += kWarp * kWidth) {
    const Place place{d, d / table.chunk_dim, d % table.chunk_dim};
    float* out = args.out + bag.out + d;
    if (bag.count == 1 && !bag.partial) {
      const HbmRef ref = LoadRef(refs);
      float values[kWidth];
      const bool row = ref.kind == HbmRefKind::kRow;
      if (row) LoadRow<kDType, kWidth>(table, place, ref.payload, ref.live, values);
      if (ref.kind == HbmRefKind::kFloats) {
        LoadElements<DType::kFp32, kWidth>(ref.payload + uint64_t{d} * sizeof(float), values);
      }
      if (row || ref.kind == HbmRefKind::kFloats) {
#pragma unroll
        for (int w = 0; w < kWidth; ++w) out[w] = values[w];
        continue;
      }
    }
    double sums[kWidth] = {};
    for (uint32_t k = 0; k < bag.count; k += kRowsAhead) {
      HbmRef group[kRowsAhead];
      bool rows = true;
#pragma unroll
      for (uint32_t u = 0; u < kRowsAhead; ++u) {
        if (k + u < bag.count) group[u] = LoadRef(refs + k + u);
        const bool nothing = group[u].kind == HbmRefKind::kNothing;
        if (nothing) group[u].live = 0;  // reads as zeros
        rows = rows && (nothing || group[u].kind == HbmRefKind::kRow);
      }
      if (rows) {
        float values[kRowsAhead][kWidth];
#pragma unroll
        for (uint32_t u = 0; u < kRowsAhead; ++u) {
          LoadRow<kDType, kWidth>(table, place, group[u].payload, group[u].live, values[u]);
        }
#pragma unroll
        for (uint32_t u = 0; u < kRowsAhead; ++u) {
#pragma unroll
          for (int w = 0; w < kWidth; ++w) sums[w] += static_cast<double>(values[u][w]);
        }
      } else {
#pragma unroll
        for (uint32_t u = 0; u < kRowsAhead; ++u) {
          AddAny<kDType, kWidth>(table, place, group[u], sums);
        }
      }
    }
    double* partials = args.partials + bag.out + d;
#pragma unroll
    for (int w = 0; w < kWidth; ++w) {
      if (bag.partial) {
        partials[w] = sums[w];
      } else {
        out[w] = static_cast<float>(bag.divisor == 1 ? sums[w] : sums[w] / bag.divisor);
      }
    }
  }
}

template <DType kDType>
__device__ void PoolBagOf(const HbmDevice::PoolArgs& args, const HbmBag& bag,
                          const HbmTable& table) {
  // Four elements of a chunk lie side by side, aligned, where chunks hold multiples of four.
  if (table.chunk_dim % 4 == 0) {
    PoolBag<kDType, 4>(args, bag, table);
  } else {
    PoolBag<kDType, 1>(args, bag, table);
  }
}

__global__ void __launch_bounds__(kBlockThreads) PoolKernel(HbmDevice::PoolArgs args) {
  const uint32_t i = WarpIndex();
  if (i >= args.count) return;
  const HbmBag bag = args.bags[i];
  const HbmTable table = args.tables[bag.table];
  switch (table.dtype) {
    case DType::kFp32:
      return PoolBagOf<DType::kFp32>(args, bag, table);
    case DType::kFp16:
      return PoolBagOf<DType::kFp16>(args, bag, table);
    case DType::kBf16:
      return PoolBagOf<DType::kBf16>(args, bag, table);
    case DType::kInt8:
      return PoolBagOf<DType::kInt8>(args, bag, table);
  }
}

// --- the device

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
    const Status status = Ok(cudaSetDevice(ordinal_), cudaMalloc(&memory, bytes));
    if (!status.ok()) return OutOfMemory(bytes, "of the device", status);
    memory_.push_back(static_cast<std::byte*>(memory));
    // Streams do not wait for the one that clears.
    EMBERTIDE_RETURN_IF_ERROR(Ok(cudaMemset(memory, 0, bytes), cudaDeviceSynchronize()));
    return memory_.back();
  }

  Result<std::byte*> AllocateHost(uint64_t bytes) override {
    void* memory = nullptr;
    const Status status =
        Ok(cudaSetDevice(ordinal_), cudaHostAlloc(&memory, bytes, cudaHostAllocPortable));
    if (!status.ok()) return OutOfMemory(bytes, "pinned in the host", status);
    host_memory_.push_back(static_cast<std::byte*>(memory));
    std::memset(memory, 0, bytes);
    return host_memory_.back();
  }

  Result<uint32_t> AddStream() override {
    cudaStream_t stream = nullptr;
    EMBERTIDE_RETURN_IF_ERROR(
        Ok(cudaSetDevice(ordinal_), cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)));
    streams_.push_back(stream);
    return static_cast<uint32_t>(streams_.size() - 1);
  }

  Status After(uint32_t stream, HbmDevice* other, uint32_t before) override {
    auto* device = static_cast<CudaDevice*>(other);
    cudaEvent_t event = nullptr;
    EMBERTIDE_RETURN_IF_ERROR(device->Ok(cudaSetDevice(device->ordinal_),
                                         cudaEventCreateWithFlags(&event, cudaEventDisableTiming)));
    const Status recorded = device->Ok(cudaEventRecord(event, device->streams_[before]));
    const Status waits =
        recorded.ok() ? Ok(cudaSetDevice(ordinal_), cudaStreamWaitEvent(streams_[stream], event, 0))
                      : recorded;
    // The driver keeps it until it has come to pass.
    static_cast<void>(cudaEventDestroy(event));
    return waits;
  }

  Status Wait(uint32_t stream) override {
    return Ok(cudaSetDevice(ordinal_), cudaStreamSynchronize(streams_[stream]));
  }

  Status Upload(uint32_t stream, std::byte* to, const std::byte* from, uint64_t bytes) override {
    return Ok(cudaSetDevice(ordinal_),
              cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, streams_[stream]));
  }
  Status Download(uint32_t stream, std::byte* to, const std::byte* from, uint64_t bytes) override {
    return Ok(cudaSetDevice(ordinal_),
              cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, streams_[stream]));
  }
  Status CopyFrom(uint32_t stream, std::byte* to, HbmDevice* other, const std::byte* from,
                  uint64_t bytes) override {
    const auto* device = static_cast<CudaDevice*>(other);
    EMBERTIDE_RETURN_IF_ERROR(Ok(cudaSetDevice(ordinal_)));
    EMBERTIDE_RETURN_IF_ERROR(EnablePeer(device->ordinal_));
    // Without peer access the driver goes through the host.
    return Ok(cudaMemcpyPeerAsync(to, ordinal_, from, device->ordinal_, bytes, streams_[stream]));
  }

  Status Lookup(uint32_t stream, const HbmDirectory& cache, const LookupArgs& args) override {
    return Launch(args.count, kBlockWarps, [&](uint32_t blocks) {
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
  // The first error of calls made one after the other.
  template <typename... Errors>
  Status Ok(Errors... errors) const {
    for (const cudaError_t error : {errors...}) {
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
    EMBERTIDE_RETURN_IF_ERROR(Ok(cudaSetDevice(ordinal_)));
    start((count - 1) / a_block + 1);
    return Ok(cudaGetLastError());
  }

  // Requires: this device is the thread's.
  Status EnablePeer(int peer) {
    const std::lock_guard lock(peers_mutex_);
    if (peers_.size() <= static_cast<size_t>(peer)) peers_.resize(peer + 1, false);
    if (peers_[peer]) return Status::Ok();
    peers_[peer] = true;
    int can = 0;
    EMBERTIDE_RETURN_IF_ERROR(Ok(cudaDeviceCanAccessPeer(&can, ordinal_, peer)));
    if (can == 0) return Status::Ok();
    const cudaError_t enabled = cudaDeviceEnablePeerAccess(peer, 0);
    if (enabled != cudaErrorPeerAccessAlreadyEnabled) return Ok(enabled);
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
