// HbmDevice: what the cache asks of a device: memory, streams, copies, six kernels.
//
// Two kinds: a GPU (cuda_device.cu) and the twin in host memory (twin_device.cc), which runs the
// cache's tests, and the whole tier, where there is no GPU. Work is given to a numbered stream and
// done later, in the order of its stream; what a call points to must stay until then. The twin does
// it at once or when someone waits, by chance, so that a wait which is missing shows.
//
// Threads: any thread may give work to any stream; AddStream and the allocations are for the time
// before. Errors: kDeviceError with the driver's text, which of a GPU may belong to work given
// earlier; after one nothing on the device is to be trusted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "embertide/status.h"
#include "hbm/layout.h"

namespace embertide {

class HbmDevice {
 public:
  virtual ~HbmDevice() = default;
  virtual std::string name() const = 0;

  // Zeroed memory of the device, or of the host where the device copies from it at full speed. 256
  // bytes aligned; freed with the device. kResourceExhausted if there is none.
  virtual Result<std::byte*> Allocate(uint64_t bytes) = 0;
  virtual Result<std::byte*> AllocateHost(uint64_t bytes) = 0;

  // A new stream's number.
  virtual Result<uint32_t> AddStream() = 0;
  // Work that `stream` is given from now on starts after all that `before` of `other` was given
  // until now. `other` is of the same kind.
  virtual Status After(uint32_t stream, HbmDevice* other, uint32_t before) = 0;
  // Returns when all that the stream was given is done.
  virtual Status Wait(uint32_t stream) = 0;
  virtual Status Upload(uint32_t stream, std::byte* to, const std::byte* from, uint64_t bytes) = 0;
  virtual Status Download(uint32_t stream, std::byte* to, const std::byte* from,
                          uint64_t bytes) = 0;
  // From the memory of `other`, a device of the same kind: directly where the two have peer access.
  virtual Status CopyFrom(uint32_t stream, std::byte* to, HbmDevice* other, const std::byte* from,
                          uint64_t bytes) = 0;

  // All pointers below are the device's. Lookup, Place, End and Survey of one cache must be ordered
  // among each other by the caller: the entries are plain data.

  // For each position: refs[i] and answers[i] = 0x10000 | live mask if the row of keys[i] is there
  // at `version`; answers[i] = 0 if not. A row found is marked as used.
  struct LookupArgs {
    const uint64_t* keys = nullptr;
    const uint16_t* tables = nullptr;  // kHbmNoTable: answers[i] = 0
    uint32_t count = 0;
    uint64_t version = 0;
    HbmRef* refs = nullptr;
    uint32_t* answers = nullptr;
  };
  virtual Status Lookup(uint32_t stream, const HbmDirectory& cache, const LookupArgs& args) = 0;
  // Copies payloads to their slots and writes entries. Requires: ways are distinct; no work that is
  // under way reads the slots.
  virtual Status Place(uint32_t stream, const HbmDirectory& cache, const HbmPlacement* placements,
                       uint32_t count, const std::byte* payloads) = 0;
  // Rows end; of several ends of a row the earliest holds.
  virtual Status End(uint32_t stream, const HbmDirectory& cache, const HbmEnding* endings,
                     uint32_t count) = 0;
  // used[i]: a bit for each way of sets[i] that was used since it was surveyed last. Requires: sets
  // are distinct.
  virtual Status Survey(uint32_t stream, const HbmDirectory& cache, const uint32_t* sets,
                        uint32_t count, uint32_t* used) = 0;
  // refs[at[i]] = given[i].
  virtual Status SetRefs(uint32_t stream, HbmRef* refs, const uint32_t* at, const HbmRef* given,
                         uint32_t count) = 0;
  // Pools every bag: in fp64 in the order of its refs, rounded once; a bag of one row of floats is
  // that row bit for bit. Requires: payloads are 16 bytes aligned (kSums too).
  struct PoolArgs {
    const HbmBag* bags = nullptr;
    uint32_t count = 0;
    const HbmRef* refs = nullptr;
    const HbmTable* tables = nullptr;
    float* out = nullptr;
    double* partials = nullptr;
  };
  virtual Status Pool(uint32_t stream, const PoolArgs& args) = 0;
};

// The twin, in host memory.
std::unique_ptr<HbmDevice> OpenTwinDevice();

// GPUs that this build can use: 0 also when it was made without CUDA.
uint32_t GpuCount();
// kNotFound saying why when there is no such GPU.
Result<std::unique_ptr<HbmDevice>> OpenGpu(uint32_t ordinal);

}  // namespace embertide
