// Errors and log lines across Triton's C API.
#include "triton/edge.h"

namespace embertide::triton {
namespace {

TRITONSERVER_Error_Code ToTritonCode(Code code) {
  switch (code) {
    case Code::kOk:
    case Code::kCorrupt:
    case Code::kDeviceError:
      return TRITONSERVER_ERROR_INTERNAL;
    case Code::kInvalidArgument:
      return TRITONSERVER_ERROR_INVALID_ARG;
    case Code::kNotFound:
      return TRITONSERVER_ERROR_NOT_FOUND;
    case Code::kRejected:
      return TRITONSERVER_ERROR_UNSUPPORTED;
    case Code::kBusy:
    case Code::kResourceExhausted:
    case Code::kVersionGone:
    case Code::kNotOwner:
    case Code::kUnavailable:
      return TRITONSERVER_ERROR_UNAVAILABLE;
  }
  return TRITONSERVER_ERROR_UNKNOWN;
}

}  // namespace

TRITONSERVER_Error* ToTriton(const Status& status) {
  if (status.ok()) return nullptr;
  return TRITONSERVER_ErrorNew(ToTritonCode(status.code()),
                               ("embertide: " + status.ToString()).c_str());
}

TRITONSERVER_Error* CancelledError() {
  return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_CANCELLED,
                               "embertide: the caller no longer waits for the answer");
}

Status FromTriton(TRITONSERVER_Error* error) {
  if (error == nullptr) return Status::Ok();
  Status status(Code::kDeviceError, std::string("Triton: ") + TRITONSERVER_ErrorMessage(error));
  TRITONSERVER_ErrorDelete(error);
  return status;
}

void Log(TRITONSERVER_LogLevel level, const std::string& message) {
  TRITONSERVER_Error* error =
      TRITONSERVER_LogMessage(level, "embertide", 0, ("embertide: " + message).c_str());
  if (error != nullptr) TRITONSERVER_ErrorDelete(error);
}

void LogIfError(TRITONSERVER_Error* error, const char* what) {
  const Status status = FromTriton(error);
  if (!status.ok()) Log(TRITONSERVER_LOG_ERROR, std::string(what) + ": " + status.message());
}

}  // namespace embertide::triton
