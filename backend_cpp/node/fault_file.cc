// Faults by a file, for tests: a part of embertide_faulty_node alone, which is never installed.
//
// EMBERTIDE_FAULTS names the file. A line "TASK KIND" has each round of a task throw: `exception`,
// `bad_alloc` or `unknown`; or has its threads refused: `start`. It is read at each point, so that
// a fault comes and goes while the node runs.
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#include "base/task_faults.h"

namespace embertide {
namespace {

void Throw(const std::string& kind, FaultPoint point) {
  if (point == FaultPoint::kStart) {
    if (kind == "start") throw std::system_error(EAGAIN, std::generic_category());
    return;
  }
  if (kind == "exception") throw std::runtime_error("a fault on purpose");
  if (kind == "bad_alloc") throw std::bad_alloc();
  if (kind == "unknown") throw 7;  // NOLINT(bugprone-std-exception-baseclass): that is the point
}

void Hook(const char* task, FaultPoint point) {
  const char* const path = std::getenv("EMBERTIDE_FAULTS");
  if (path == nullptr) return;
  std::ifstream file(path);
  std::string name;
  std::string kind;
  while (file >> name >> kind) {
    if (name == task) Throw(kind, point);
  }
}

[[maybe_unused]] const bool installed = []() noexcept {
  SetFaultHook(Hook);
  return true;
}();

}  // namespace
}  // namespace embertide
