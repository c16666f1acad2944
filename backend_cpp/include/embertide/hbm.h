// The HBM tier's devices: what they are, and what each counts.
#pragma once

#include <cstdint>
#include <string>

#include "embertide/status.h"

namespace embertide {

// The kinds of devices of the HBM tier.
enum class HbmKind : uint8_t {
  kGpu,   // GPUs 0 to hbm_devices - 1 of this process
  kTwin,  // host memory, through the same code: for tests and for machines without a GPU
};
// "gpu" or "twin"; kInvalidArgument naming what it is instead. Thread-safe.
Result<HbmKind> ParseHbmKind(const std::string& name);

// Counters of one device since it was opened, and sizes now. Rows that did not enter for want of a
// place: in_use + deferred.
struct HbmDeviceStats {
  uint64_t budget_bytes = 0;
  uint64_t used_bytes = 0;  // of it: pages with rows, and all that is no page
  uint64_t rows = 0;
  uint64_t hits = 0;       // keys that it was asked for and held at their version
  uint64_t misses = 0;     // keys that it was asked for in vain
  uint64_t placed = 0;     // rows that entered
  uint64_t evictions = 0;  // rows that left, also those that had ended
  uint64_t ended = 0;      // rows that a version changed
  uint64_t in_use = 0;     // rows not admitted, as their sets' rows were all in use
  uint64_t deferred = 0;   // rows put off: no slot of their size, or no room to copy them through
};

// The rows of one table that all devices hold now.
struct HbmTableStats {
  uint64_t rows = 0;   // those that a version ended and nobody took the place of among them
  uint64_t bytes = 0;  // of their slots
  bool operator==(const HbmTableStats&) const = default;
};

}  // namespace embertide
