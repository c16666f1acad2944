// Faults on purpose in threads: what tests set off. Nothing that we ship sets a hook.
#pragma once

#include <cstdint>

namespace embertide {

enum class FaultPoint : uint8_t {
  kStart,  // a thread is about to be started: throw std::system_error
  kRound,  // a round of work is about to begin: throw anything
};

// Called with the name of each task at its points; may throw.
using FaultHook = void (*)(const char* task, FaultPoint point);

// For test programs. Null: none. Thread-safe.
void SetFaultHook(FaultHook hook) noexcept;
// Calls the hook, if one is set.
void FaultAt(const char* task, FaultPoint point);

}  // namespace embertide
