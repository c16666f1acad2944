// A device that runs the GPU's kernels, as they stand in kernels.h, on threads of the host: for
// tests of their logic where there is no GPU, under sanitizers too. Slow: 32 threads a launch.
#pragma once

#include <memory>

#include "hbm/device.h"

namespace embertide {

std::unique_ptr<HbmDevice> OpenEmulatedDevice();

}  // namespace embertide
