// A build without CUDA has no GPUs.
#include "hbm/device.h"

namespace embertide {

uint32_t GpuCount() { return 0; }

Result<std::unique_ptr<HbmDevice>> OpenGpu(uint32_t ordinal) {
  return Status(Code::kNotFound,
                "GPU " + std::to_string(ordinal) +
                    ": this build has no CUDA (nvcc was not there); build it where "
                    "nvcc is, or set no HBM budget");
}

}  // namespace embertide
