// TaskHealth: how a task in the background of a process is doing.
#pragma once

#include <cstdint>
#include <string>

namespace embertide {

struct TaskHealth {
  std::string name;
  bool failing = false;          // since its last good round; its thread may be missing
  bool no_thread = false;        // a thread of it could not be started
  uint64_t failures = 0;         // rounds, since the process began
  uint64_t failed_starts = 0;    // attempts to start its thread
  int64_t failing_since_ms = 0;  // Unix time; 0: it is not failing
  std::string last_error;        // kept once it works again; at most 255 bytes
};

}  // namespace embertide
