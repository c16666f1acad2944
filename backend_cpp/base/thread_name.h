// NameThread: the name of a thread in `top -H`, `perf` and core files.
#pragma once

#include <pthread.h>

#include <string>

namespace embertide {

// Names the calling thread after its work; Linux keeps 15 bytes.
inline void NameThread(const std::string& name) noexcept {
  constexpr size_t kKept = 15;
  char kept[kKept + 1] = {};
  name.copy(kept, kKept);
  pthread_setname_np(pthread_self(), kept);
}

}  // namespace embertide
