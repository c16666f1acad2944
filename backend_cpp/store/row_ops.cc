// Which vectors this CPU adds by.
#include "store/row_ops.h"

#include <cstdlib>

namespace embertide {

// Of the files beside this one.
const RowOps* PlainRowOps();
#if defined(__x86_64__)
const RowOps* Avx2RowOps();
const RowOps* Avx512RowOps();
#endif

namespace {

constexpr std::array<const char*, 3> kLevels = {"avx512", "avx2", "plain"};

struct Level {
  const char* name;
  const RowOps* ops;
};

// The widest that this CPU has, from the one that the environment names on; chosen by hand, for an
// ifunc's resolver would run before the sanitizers are ready.
Level Choose() noexcept {
  const char* most = std::getenv("EMBERTIDE_VECTORS");
  bool allowed = most == nullptr || RowOpsOf(most) == nullptr;
  for (const char* name : kLevels) {
    allowed |= most != nullptr && std::string_view(most) == name;
    if (const RowOps* ops = allowed ? RowOpsOf(name) : nullptr) return {name, ops};
  }
  return {"plain", PlainRowOps()};
}

const Level kLevel = Choose();

}  // namespace

const RowOps* RowOpsOf(std::string_view level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("f16c") != 0;
  if (level == "avx2" && avx2) return Avx2RowOps();
  if (level == "avx512" && avx2 && __builtin_cpu_supports("avx512f") != 0 &&
      __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
      __builtin_cpu_supports("avx512dq") != 0) {
    return Avx512RowOps();
  }
#endif
  return level == "plain" ? PlainRowOps() : nullptr;
}

const RowOps* const kRowOps = kLevel.ops;

const char* VectorLevel() { return kLevel.name; }

}  // namespace embertide
