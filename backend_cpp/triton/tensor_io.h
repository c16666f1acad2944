// Tensors of Triton's requests and responses as plain memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "embertide/deadline.h"
#include "triton/request.h"
#include "triton/triton_abi.h"

namespace embertide::triton {

// All inputs of a request. Data points into the request unless it came in pieces or unaligned.
// kInvalidArgument for memory that is not the CPU's.
Status ReadInputs(TRITONBACKEND_Request* request, std::vector<Tensor>* inputs);

// The request parameter `version`: the version that the caller wants its answer from, 0 if it names
// none. kInvalidArgument for one that is no positive integer.
Status ReadWantedVersion(TRITONBACKEND_Request* request, uint64_t* version);

// When the caller's `timeout` has passed, counted from now: how long Triton has held the request is
// not told. kNoDeadline if the caller names none.
Status ReadDeadline(TRITONBACKEND_Request* request, Deadline* deadline);

// Whether the caller has gone away or has cancelled the request, or its gRPC deadline has passed.
bool IsCancelled(TRITONBACKEND_Request* request);

// Names of the outputs that the caller asked for.
Status ReadOutputNames(TRITONBACKEND_Request* request, std::vector<std::string>* names);

// Makes an output of `shape` in `response` and gives its memory.
Status MakeOutput(TRITONBACKEND_Response* response, const std::string& name,
                  TRITONSERVER_DataType dtype, std::span<const int64_t> shape,
                  uint64_t element_bytes, void** buffer);

}  // namespace embertide::triton
