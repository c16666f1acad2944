// The inference protocol's JSON (KServe v2 over HTTP), as the messages of its gRPC twin and back.
//
// Tensors are lists, nested by their shape or flat; `null` in a tensor of floating point is NaN,
// and NaN is written as `null`, as JSON has neither. Tensors in binary after the JSON, which Triton
// adds to the protocol, are refused. Thread-safe.
#pragma once

#include <grpcpp/support/status.h>

#include <string>
#include <string_view>

#include "inference/messages.pb.h"

namespace embertide::front {

// Adds what the body says to a request whose model is known. INVALID_ARGUMENT, which names the
// tensor and what is wrong with it. Needs memory for some twenty times the body.
grpc::Status FromJson(std::string_view body, inference::ModelInferRequest* request);

// INTERNAL if a tensor is not of its shape and type.
grpc::Status ToJson(const inference::ModelInferResponse& response, std::string* body);
std::string ToJson(const inference::ModelMetadataResponse& response);
// The answer to a refused caller.
std::string ErrorJson(const std::string& why);

}  // namespace embertide::front
