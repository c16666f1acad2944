#include "front/infer_answer.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "front/infer_message.h"

namespace embertide::front {

grpc::Status ReadAnswer(const Core& core, TRITONSERVER_InferenceResponse* response,
                        const std::vector<grpc::Slice>& tensors, InferAnswer* answer) {
  const Calls& calls = core.calls();
  grpc::Status status = core.StatusOfBorrowed(calls.InferenceResponseError(response));
  if (!status.ok()) return status;
  google::protobuf::Arena arena;
  auto* const head = google::protobuf::Arena::CreateMessage<inference::ModelInferResponse>(&arena);
  const char* name = nullptr;
  int64_t version = 0;
  status = core.StatusOf(calls.InferenceResponseModel(response, &name, &version));
  if (!status.ok()) return status;
  head->set_model_name(name);
  head->set_model_version(std::to_string(version));
  status = core.StatusOf(calls.InferenceResponseId(response, &name));
  if (!status.ok()) return status;
  if (name != nullptr) head->set_id(name);

  uint32_t count = 0;
  status = core.StatusOf(calls.InferenceResponseParameterCount(response, &count));
  for (uint32_t i = 0; status.ok() && i < count; ++i) {
    TRITONSERVER_ParameterType type{};
    const void* value = nullptr;
    status = core.StatusOf(calls.InferenceResponseParameter(response, i, &name, &type, &value));
    if (!status.ok()) break;
    if (TakeStage(name, type, value, &answer->stages)) continue;
    if (type == TRITONSERVER_PARAMETER_INT && std::string_view(name) == "version") {
      answer->version = *static_cast<const int64_t*>(value);
    }
    inference::InferParameter& parameter = (*head->mutable_parameters())[name];
    switch (type) {
      case TRITONSERVER_PARAMETER_BOOL:
        parameter.set_bool_param(*static_cast<const bool*>(value));
        break;
      case TRITONSERVER_PARAMETER_INT:
        parameter.set_int64_param(*static_cast<const int64_t*>(value));
        break;
      case TRITONSERVER_PARAMETER_DOUBLE:
        parameter.set_double_param(*static_cast<const double*>(value));
        break;
      case TRITONSERVER_PARAMETER_STRING:
        parameter.set_string_param(static_cast<const char*>(value));
        break;
      case TRITONSERVER_PARAMETER_BYTES:
        break;
    }
  }
  if (!status.ok()) return status;
  status = core.StatusOf(calls.InferenceResponseOutputCount(response, &count));
  std::vector<grpc::Slice> raw;
  raw.reserve(count);
  for (uint32_t i = 0; status.ok() && i < count; ++i) {
    TRITONSERVER_DataType type{};
    const int64_t* shape = nullptr;
    uint64_t dims = 0;
    const void* base = nullptr;
    size_t bytes = 0;
    TRITONSERVER_MemoryType memory{};
    int64_t memory_id = 0;
    void* held = nullptr;
    status = core.StatusOf(calls.InferenceResponseOutput(
        response, i, &name, &type, &shape, &dims, &base, &bytes, &memory, &memory_id, &held));
    if (!status.ok()) break;
    auto* const output = head->add_outputs();
    output->set_name(name);
    output->set_datatype(calls.DataTypeString(type));
    output->mutable_shape()->Add(shape, shape + dims);
    const auto made = std::ranges::find_if(
        tensors, [&](const grpc::Slice& tensor) { return tensor.begin() == base; });
    raw.push_back(made == tensors.end() ? grpc::Slice() : *made);
  }
  if (status.ok()) answer->bytes = AnswerOf(*head, raw);
  return status;
}

}  // namespace embertide::front
