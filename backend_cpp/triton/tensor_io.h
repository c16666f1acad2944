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

// Request parameters; 0: the caller does not give it.
struct RequestParameters {
  uint64_t version = 0;  // the version that the answer is wanted from
  uint64_t columns = 0;  // of KEYS, of a jagged request
  bool stages = false;   // how long its stages took is wanted (stage_names.h)
  std::string trace;     // the trace-id of `traceparent` (base/trace_id.h)
};

// kInvalidArgument naming a parameter that is no positive integer.
Status ReadParameters(TRITONBACKEND_Request* request, RequestParameters* parameters);

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
