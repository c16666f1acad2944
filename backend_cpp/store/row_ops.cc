// Which vectors this CPU adds by.
#include "store/row_ops.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>

namespace embertide {

// The functions of the files beside this one.
const RowOps* PlainRowOps();
#if defined(__x86_64__)
const RowOps* Avx2RowOps();
const RowOps* Avx512RowOps();
#endif

namespace {

constexpr std::array<const char*, 3> kLevels = {"avx512", "avx2", "plain"};
constexpr const char* kVariable = "EMBERTIDE_VECTORS";

// The names of the levels, or of those that this CPU has.
std::string Names(bool here) {
  std::string names;
  for (const char* name : kLevels) {
    if (here && RowOpsOf(name) == nullptr) continue;
    names += (names.empty() ? "" : ", ") + std::string(name);
  }
  return names;
}

struct Level {
  const char* name;
  const RowOps* ops;
};

// The one that the environment names, else the widest that this CPU has; chosen by hand, for an
// ifunc's resolver would run before the sanitizers are ready. A wrong name is VectorStatus's to
// tell.
Level Choose() noexcept {
  const char* named = std::getenv(kVariable);
  if (named != nullptr && RowOpsOf(named) == nullptr) named = nullptr;
  for (const char* name : kLevels) {
    if (named != nullptr && std::string_view(named) != name) continue;
    if (const RowOps* ops = RowOpsOf(name)) return {name, ops};
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

const Status& VectorStatus() {
  static const Status status = [] {
    const char* named = std::getenv(kVariable);
    if (named == nullptr || RowOpsOf(named) != nullptr) return Status::Ok();
    const bool known = std::ranges::any_of(
        kLevels, [=](const char* level) { return std::string_view(named) == level; });
    return Status(Code::kInvalidArgument,
                  std::string(kVariable) + "=" + named +
                      (known ? ": this CPU has no such vectors; it has " : ": use one of ") +
                      Names(known) + ", or unset it");
  }();
  return status;
}

}  // namespace embertide
