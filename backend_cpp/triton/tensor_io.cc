// Reading and making tensors through Triton's C API.
#include "triton/tensor_io.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>

#include "base/trace_id.h"
#include "triton/edge.h"
#include "triton/stage_names.h"

namespace embertide::triton {
namespace {

// Elements are read as int32 or int64; HTTP bodies put tensors at any offset.
constexpr uintptr_t kAlignment = 8;

Status ReadBuffers(TRITONBACKEND_Input* input, uint32_t buffers, Tensor* tensor) {
  for (uint32_t i = 0; i < buffers; ++i) {
    const void* data = nullptr;
    uint64_t bytes = 0;
    TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
    int64_t memory_id = 0;
    EMBERTIDE_RETURN_IF_ERROR(
        FromTriton(TRITONBACKEND_InputBuffer(input, i, &data, &bytes, &memory, &memory_id)));
    if (memory == TRITONSERVER_MEMORY_GPU) {
      return {Code::kInvalidArgument, tensor->name + " lies in GPU memory; send it from the CPU"};
    }
    const auto* begin = static_cast<const std::byte*>(data);
    if (buffers == 1 && reinterpret_cast<uintptr_t>(data) % kAlignment == 0) {
      tensor->data = {begin, bytes};
      return Status::Ok();
    }
    tensor->copy.insert(tensor->copy.end(), begin, begin + bytes);
  }
  tensor->data = tensor->copy;
  return Status::Ok();
}

Status ReadInput(TRITONBACKEND_Input* input, Tensor* tensor) {
  const char* name = nullptr;
  TRITONSERVER_DataType dtype = TRITONSERVER_TYPE_INVALID;
  const int64_t* shape = nullptr;
  uint32_t dims = 0;
  uint64_t bytes = 0;
  uint32_t buffers = 0;
  EMBERTIDE_RETURN_IF_ERROR(FromTriton(
      TRITONBACKEND_InputProperties(input, &name, &dtype, &shape, &dims, &bytes, &buffers)));
  tensor->name = name;
  tensor->dtype = TRITONSERVER_DataTypeString(dtype);
  tensor->shape.assign(shape, shape + dims);
  return ReadBuffers(input, buffers, tensor);
}

}  // namespace

Status ReadInputs(TRITONBACKEND_Request* request, std::vector<Tensor>* inputs) {
  uint32_t count = 0;
  EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_RequestInputCount(request, &count)));
  inputs->resize(count);
  for (uint32_t i = 0; i < count; ++i) {
    TRITONBACKEND_Input* input = nullptr;
    EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_RequestInputByIndex(request, i, &input)));
    EMBERTIDE_RETURN_IF_ERROR(ReadInput(input, &(*inputs)[i]));
  }
  return Status::Ok();
}

Status ReadParameters(TRITONBACKEND_Request* request, RequestParameters* parameters) {
  uint32_t count = 0;
  EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_RequestParameterCount(request, &count)));
  for (uint32_t i = 0; i < count; ++i) {
    const char* key = nullptr;
    TRITONSERVER_ParameterType type = TRITONSERVER_PARAMETER_STRING;
    const void* value = nullptr;
    EMBERTIDE_RETURN_IF_ERROR(
        FromTriton(TRITONBACKEND_RequestParameter(request, i, &key, &type, &value)));
    if (std::strcmp(key, kAskStages) == 0) {
      parameters->stages = type == TRITONSERVER_PARAMETER_BOOL && *static_cast<const bool*>(value);
      continue;
    }
    if (std::strcmp(key, kTraceparent) == 0) {
      if (type == TRITONSERVER_PARAMETER_STRING) {
        parameters->trace = TraceIdOf(static_cast<const char*>(value));
      }
      continue;
    }
    const bool version = std::strcmp(key, "version") == 0;
    if (!version && std::strcmp(key, "columns") != 0) continue;
    const int64_t number =
        type == TRITONSERVER_PARAMETER_INT ? *static_cast<const int64_t*>(value) : 0;
    if (number <= 0) {
      return {Code::kInvalidArgument,
              version ? "parameter version must be a positive integer; leave it out for the newest"
                      : "parameter columns must be a positive integer: how many columns KEYS has"};
    }
    (version ? parameters->version : parameters->columns) = static_cast<uint64_t>(number);
  }
  return Status::Ok();
}

Status ReadDeadline(TRITONBACKEND_Request* request, Deadline* deadline) {
  uint64_t timeout_us = 0;
  EMBERTIDE_RETURN_IF_ERROR(
      FromTriton(TRITONBACKEND_InferenceRequestTimeoutMicroseconds(request, &timeout_us)));
  constexpr uint64_t kLongest = std::numeric_limits<int64_t>::max();
  const std::chrono::microseconds timeout(std::min(timeout_us, kLongest));
  *deadline = timeout_us == 0 ? kNoDeadline : DeadlineAfter(timeout);
  return Status::Ok();
}

bool IsCancelled(TRITONBACKEND_Request* request) {
  bool cancelled = false;
  // A server that cannot tell has not cancelled it.
  return FromTriton(TRITONBACKEND_RequestIsCancelled(request, &cancelled)).ok() && cancelled;
}

Status ReadOutputNames(TRITONBACKEND_Request* request, std::vector<std::string>* names) {
  uint32_t count = 0;
  EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_RequestOutputCount(request, &count)));
  for (uint32_t i = 0; i < count; ++i) {
    const char* name = nullptr;
    EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_RequestOutputName(request, i, &name)));
    names->emplace_back(name);
  }
  return Status::Ok();
}

Status MakeOutput(TRITONBACKEND_Response* response, const std::string& name,
                  TRITONSERVER_DataType dtype, std::span<const int64_t> shape,
                  uint64_t element_bytes, void** buffer) {
  TRITONBACKEND_Output* output = nullptr;
  EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_ResponseOutput(
      response, &output, name.c_str(), dtype, shape.data(), static_cast<uint32_t>(shape.size()))));
  uint64_t bytes = element_bytes;
  for (const int64_t dim : shape) bytes *= static_cast<uint64_t>(dim);
  TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
  int64_t memory_id = 0;
  EMBERTIDE_RETURN_IF_ERROR(
      FromTriton(TRITONBACKEND_OutputBuffer(output, buffer, bytes, &memory, &memory_id)));
  if (memory == TRITONSERVER_MEMORY_GPU) {
    return {Code::kInvalidArgument, name + " was asked for in GPU memory; take it on the CPU"};
  }
  return Status::Ok();
}

}  // namespace embertide::triton
