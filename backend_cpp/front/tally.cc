#include "front/tally.h"

#include <algorithm>

namespace embertide::front {

size_t MethodOf(std::string_view name) {
  const auto found = std::ranges::find(kMethods, name);
  return found == kMethods.end() ? kOther : static_cast<size_t>(found - kMethods.begin());
}

std::string_view CodeName(size_t code) {
  static constexpr std::array<std::string_view, kCodes> kNames = {"OK",
                                                                  "CANCELLED",
                                                                  "UNKNOWN",
                                                                  "INVALID_ARGUMENT",
                                                                  "DEADLINE_EXCEEDED",
                                                                  "NOT_FOUND",
                                                                  "ALREADY_EXISTS",
                                                                  "PERMISSION_DENIED",
                                                                  "RESOURCE_EXHAUSTED",
                                                                  "FAILED_PRECONDITION",
                                                                  "ABORTED",
                                                                  "OUT_OF_RANGE",
                                                                  "UNIMPLEMENTED",
                                                                  "INTERNAL",
                                                                  "UNAVAILABLE",
                                                                  "DATA_LOSS",
                                                                  "UNAUTHENTICATED"};
  return kNames[code];
}

}  // namespace embertide::front
