// The SSD tier's engines: how blocks are read, and which of them a directory would get.
//
// All functions are thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "embertide/status.h"

namespace embertide {

enum class SsdEngine : uint8_t {
  kAuto,     // the first of the following that the system lets us have
  kIoUring,  // registered buffers and file; refused by the default seccomp profile of containers
  kLibaio,   // asynchronous only with O_DIRECT
  kPread,    // a pool of threads; always there
};

// "auto", "io_uring", "libaio" or "pread".
const char* SsdEngineName(SsdEngine engine);
Result<SsdEngine> ParseSsdEngine(const std::string& name);

// The way in which a file in a directory would be read.
struct SsdProbe {
  SsdEngine engine = SsdEngine::kAuto;
  bool direct = false;  // the file system takes O_DIRECT
  std::string refused;  // the engines before it, and what the system said; empty: none
};
// Opens, and removes, a small file there. kDeviceError naming the path and errno.
Result<SsdProbe> ProbeSsd(const std::string& directory, SsdEngine engine = SsdEngine::kAuto);

}  // namespace embertide
