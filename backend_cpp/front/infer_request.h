// The request of a ModelInfer, as Triton takes it.
#pragma once

#include <grpcpp/support/status.h>

#include <cstdint>
#include <string>
#include <vector>

#include "front/core.h"
#include "front/infer_message.h"

namespace embertide::front {

// Gives a new request of Triton's what a message asks for: id, parameters, inputs and outputs.
// INVALID_ARGUMENT names what is wrong with the message, UNIMPLEMENTED what this server lacks.
//
// `timeout_us`: until the caller's deadline, 0 for none; a parameter of the message may shorten it.
// `typed` takes the tensors that came as lists of numbers. Requires: message and `typed` outlive
// the request, which points to their bytes.
grpc::Status FillRequest(const Core& core, const InferMessage& message, uint64_t timeout_us,
                         std::vector<std::string>* typed, TRITONSERVER_InferenceRequest* request);

}  // namespace embertide::front
