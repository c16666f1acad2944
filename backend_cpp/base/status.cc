// Names of status codes.
#include "embertide/status.h"

namespace embertide {

const char* CodeName(Code code) {
  switch (code) {
    case Code::kOk:
      return "OK";
    case Code::kInvalidArgument:
      return "INVALID_ARGUMENT";
    case Code::kNotFound:
      return "NOT_FOUND";
    case Code::kRejected:
      return "REJECTED";
    case Code::kBusy:
      return "BUSY";
    case Code::kResourceExhausted:
      return "RESOURCE_EXHAUSTED";
    case Code::kCorrupt:
      return "CORRUPT";
    case Code::kDeviceError:
      return "DEVICE_ERROR";
    case Code::kVersionGone:
      return "VERSION_GONE";
    case Code::kNotOwner:
      return "NOT_OWNER";
    case Code::kUnavailable:
      return "UNAVAILABLE";
  }
  return "UNKNOWN";
}

std::string Status::ToString() const {
  return ok() ? "OK" : std::string(CodeName(code_)) + ": " + message_;
}

}  // namespace embertide
