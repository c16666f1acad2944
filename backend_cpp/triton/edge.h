// The edge to Triton's C API: errors in both directions, and the log.
#pragma once

#include <exception>
#include <string>

#include "embertide/status.h"
#include "triton/triton_abi.h"

namespace embertide::triton {

// Our Status as an error that Triton takes over; nullptr for ok.
TRITONSERVER_Error* ToTriton(const Status& status);
// The error of a request whose caller no longer waits; Triton takes it over.
TRITONSERVER_Error* CancelledError();
// Triton's error as a Status (kDeviceError); frees it.
Status FromTriton(TRITONSERVER_Error* error);

void Log(TRITONSERVER_LogLevel level, const std::string& message);

// Drops an error of a call whose failure leaves nothing to do but say so.
void LogIfError(TRITONSERVER_Error* error, const char* what);

// Runs the body of a C entry point (returns Status): no exception leaves it.
template <typename Body>
TRITONSERVER_Error* Guard(const Body& body) {
  try {
    return ToTriton(body());
  } catch (const std::exception& error) {
    return ToTriton(Status(Code::kResourceExhausted, error.what()));
  } catch (...) {
    return ToTriton(Status(Code::kDeviceError, "unknown exception"));
  }
}

}  // namespace embertide::triton
