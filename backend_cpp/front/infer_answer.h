// The answer of Triton to an inference, as the caller gets it.
#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>
#include <grpcpp/support/status.h>

#include <cstdint>
#include <vector>

#include "front/core.h"
#include "front/stages.h"

namespace embertide::front {

struct InferAnswer {
  grpc::ByteBuffer bytes;  // the message
  BackendStages stages;
  int64_t version = 0;  // of the model's rows; 0: the answer does not say
};

// Reads a response into a message. `tensors` are where the backend has written the outputs, which
// the message shares. Returns what the response failed with, if it did.
grpc::Status ReadAnswer(const Core& core, TRITONSERVER_InferenceResponse* response,
                        const std::vector<grpc::Slice>& tensors, InferAnswer* answer);

}  // namespace embertide::front
