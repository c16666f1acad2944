#include "front/infer_request.h"

#include <algorithm>

#include "triton/stage_names.h"

namespace embertide::front {
namespace {

grpc::Status Invalid(const std::string& why) { return {grpc::StatusCode::INVALID_ARGUMENT, why}; }

// Whether as many bytes are a tensor of the shape. Sizes of BYTES are the tensor's own.
grpc::Status CheckShape(const Calls& calls,
                        const inference::ModelInferRequest::InferInputTensor& input,
                        TRITONSERVER_DataType type, uint64_t bytes) {
  uint64_t elements = 1;
  for (const int64_t dim : input.shape()) {
    if (dim < 0) {
      return Invalid("input " + input.name() + " has a dimension of " + std::to_string(dim) +
                     "; it must not be negative");
    }
    if (__builtin_mul_overflow(elements, static_cast<uint64_t>(dim), &elements)) {
      return Invalid("input " + input.name() + " has a shape of more elements than there can be");
    }
  }
  const uint32_t element = calls.DataTypeByteSize(type);
  uint64_t want = 0;
  if (element == 0) return grpc::Status::OK;
  if (!__builtin_mul_overflow(elements, uint64_t{element}, &want) && want == bytes) {
    return grpc::Status::OK;
  }
  return Invalid("input " + input.name() + " has " + std::to_string(bytes) +
                 " bytes; its shape has " + std::to_string(elements) + " elements of " +
                 input.datatype());
}

bool IsSharedMemory(const std::string& parameter) {
  return parameter.starts_with("shared_memory_");
}

grpc::Status NoSharedMemory(const std::string& tensor) {
  return {grpc::StatusCode::UNIMPLEMENTED,
          "tensor " + tensor + ": this server maps no shared memory; send it in the message"};
}

grpc::Status SetParameters(const Core& core, const inference::ModelInferRequest& head,
                           uint64_t timeout_us, TRITONSERVER_InferenceRequest* request) {
  const Calls& calls = core.calls();
  uint32_t flags = 0;
  for (const auto& [name, value] : head.parameters()) {
    using Parameter = inference::InferParameter;
    if (name == triton::kAskStages) continue;  // it is ours to ask
    TRITONSERVER_Error* error = nullptr;
    const bool number = value.parameter_choice_case() == Parameter::kInt64Param ||
                        value.parameter_choice_case() == Parameter::kUint64Param;
    const uint64_t unsigned_value = value.parameter_choice_case() == Parameter::kUint64Param
                                        ? value.uint64_param()
                                        : static_cast<uint64_t>(value.int64_param());
    const auto wrong = [&name = name](const char* kind) {
      return Invalid("parameter " + name + " must be " + kind);
    };
    if (name == "timeout") {
      if (!number ||
          (value.parameter_choice_case() == Parameter::kInt64Param && value.int64_param() < 0)) {
        return wrong("a whole number of microseconds");
      }
      if (unsigned_value > 0) {
        timeout_us = timeout_us == 0 ? unsigned_value : std::min(timeout_us, unsigned_value);
      }
    } else if (name == "priority") {
      if (!number) return wrong("a whole number");
      error = calls.InferenceRequestSetPriorityUInt64(request, unsigned_value);
    } else if (name == "sequence_id") {
      if (value.parameter_choice_case() == Parameter::kStringParam) {
        error = calls.InferenceRequestSetCorrelationIdString(request, value.string_param().c_str());
      } else if (number) {
        error = calls.InferenceRequestSetCorrelationId(request, unsigned_value);
      } else {
        return wrong("a whole number or a text");
      }
    } else if (name == "sequence_start" || name == "sequence_end") {
      if (value.parameter_choice_case() != Parameter::kBoolParam) return wrong("true or false");
      if (value.bool_param()) {
        flags |= name == "sequence_start" ? TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
                                          : TRITONSERVER_REQUEST_FLAG_SEQUENCE_END;
      }
    } else {
      switch (value.parameter_choice_case()) {
        case Parameter::kBoolParam:
          error = calls.InferenceRequestSetBoolParameter(request, name.c_str(), value.bool_param());
          break;
        case Parameter::kInt64Param:
          error = calls.InferenceRequestSetIntParameter(request, name.c_str(), value.int64_param());
          break;
        case Parameter::kStringParam:
          error = calls.InferenceRequestSetStringParameter(request, name.c_str(),
                                                           value.string_param().c_str());
          break;
        case Parameter::kDoubleParam:
          error =
              calls.InferenceRequestSetDoubleParameter(request, name.c_str(), value.double_param());
          break;
        default:
          return wrong("true or false, a whole number up to 2^63 - 1, a text or a number");
      }
    }
    if (grpc::Status status = core.StatusOf(error); !status.ok()) return status;
  }
  TRITONSERVER_Error* error =
      calls.InferenceRequestSetBoolParameter(request, triton::kAskStages, true);
  if (error == nullptr && flags != 0) error = calls.InferenceRequestSetFlags(request, flags);
  if (error == nullptr && timeout_us != 0) {
    error = calls.InferenceRequestSetTimeoutMicroseconds(request, timeout_us);
  }
  return core.StatusOf(error);
}

grpc::Status AddInputs(const Core& core, const InferMessage& message,
                       std::vector<std::string>* typed, TRITONSERVER_InferenceRequest* request) {
  const Calls& calls = core.calls();
  const auto& inputs = message.head().inputs();
  const bool raw = message.raw_tensors() > 0;
  if (raw && message.raw_tensors() != static_cast<size_t>(inputs.size())) {
    return Invalid("the request has " + std::to_string(inputs.size()) + " inputs and " +
                   std::to_string(message.raw_tensors()) +
                   " raw_input_contents; each input needs one");
  }
  typed->reserve(raw ? 0 : static_cast<size_t>(inputs.size()));
  for (int i = 0; i < inputs.size(); ++i) {
    const auto& input = inputs[i];
    for (const auto& [name, value] : input.parameters()) {
      if (IsSharedMemory(name)) return NoSharedMemory(input.name());
    }
    const TRITONSERVER_DataType type = calls.StringToDataType(input.datatype().c_str());
    if (type == TRITONSERVER_TYPE_INVALID) {
      return Invalid("input " + input.name() + " has the unknown type \"" +
                     input.datatype().substr(0, 40) + "\"");
    }
    if (input.has_contents() && raw) {
      return Invalid("input " + input.name() +
                     " has contents beside raw_input_contents; send one of them");
    }
    std::vector<Bytes> pieces;
    uint64_t bytes = 0;
    if (raw) {
      const auto number = static_cast<size_t>(i);
      pieces.assign(message.raw(number).begin(), message.raw(number).end());
      bytes = message.raw_bytes(number);
    } else {
      std::string& bytes_of_numbers = typed->emplace_back();
      if (grpc::Status status = TypedBytes(input, &bytes_of_numbers); !status.ok()) return status;
      pieces = {
          {reinterpret_cast<const uint8_t*>(bytes_of_numbers.data()), bytes_of_numbers.size()}};
      bytes = bytes_of_numbers.size();
    }
    if (grpc::Status status = CheckShape(calls, input, type, bytes); !status.ok()) return status;
    grpc::Status status = core.StatusOf(
        calls.InferenceRequestAddInput(request, input.name().c_str(), type, input.shape().data(),
                                       static_cast<uint64_t>(input.shape_size())));
    for (const Bytes piece : pieces) {
      if (!status.ok()) break;
      status = core.StatusOf(calls.InferenceRequestAppendInputData(
          request, input.name().c_str(), piece.data(), piece.size(), TRITONSERVER_MEMORY_CPU, 0));
    }
    if (!status.ok()) return status;
  }
  return grpc::Status::OK;
}

grpc::Status AddOutputs(const Core& core, const inference::ModelInferRequest& head,
                        TRITONSERVER_InferenceRequest* request) {
  for (const auto& output : head.outputs()) {
    for (const auto& [name, value] : output.parameters()) {
      if (IsSharedMemory(name)) return NoSharedMemory(output.name());
      if (name == "classification") {
        return {grpc::StatusCode::UNIMPLEMENTED,
                "output " + output.name() +
                    ": this server has no classification; sort the scores where they are read"};
      }
    }
    if (grpc::Status status = core.StatusOf(
            core.calls().InferenceRequestAddRequestedOutput(request, output.name().c_str()));
        !status.ok()) {
      return status;
    }
  }
  return grpc::Status::OK;
}

}  // namespace

grpc::Status FillRequest(const Core& core, const InferMessage& message, uint64_t timeout_us,
                         std::vector<std::string>* typed, TRITONSERVER_InferenceRequest* request) {
  const inference::ModelInferRequest& head = message.head();
  grpc::Status status =
      core.StatusOf(core.calls().InferenceRequestSetId(request, head.id().c_str()));
  if (status.ok()) status = SetParameters(core, head, timeout_us, request);
  if (status.ok()) status = AddInputs(core, message, typed, request);
  if (status.ok()) status = AddOutputs(core, head, request);
  return status;
}

}  // namespace embertide::front
