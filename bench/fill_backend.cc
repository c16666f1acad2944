// libtriton_fill.so: the ceiling of a lookup. It reads no key and fills an output of the right
// size.
//
// For KEYS [B,F] it answers EMBEDDING [B,W] of zeros, W being the model's parameter "width". It
// reports Triton's statistics, without which perf_analyzer refuses a model. Only the benchmark
// builds it (bench/servers.py); errors of Triton's calls end in the request's error or the log.
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "triton/triton_abi.h"

namespace {

uint64_t NowNs() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

void LogAndDelete(TRITONSERVER_Error* error) {
  if (error == nullptr) return;
  TRITONSERVER_ErrorDelete(TRITONSERVER_LogMessage(TRITONSERVER_LOG_ERROR, __FILE__, __LINE__,
                                                   TRITONSERVER_ErrorMessage(error)));
  TRITONSERVER_ErrorDelete(error);
}

#define FILL_RETURN_IF_ERROR(call) \
  if (TRITONSERVER_Error* failed = (call); failed != nullptr) return failed

TRITONSERVER_Error* ReadWidth(TRITONBACKEND_Model* model, int64_t* width) {
  TRITONSERVER_Message* message = nullptr;
  FILL_RETURN_IF_ERROR(TRITONBACKEND_ModelConfig(model, 1, &message));
  const char* text = nullptr;
  size_t bytes = 0;
  FILL_RETURN_IF_ERROR(TRITONSERVER_MessageSerializeToJson(message, &text, &bytes));
  const auto json = nlohmann::json::parse(text, text + bytes, nullptr, false);
  LogAndDelete(TRITONSERVER_MessageDelete(message));
  try {
    const auto& parameter = json.at("parameters").at("width").at("string_value");
    *width = std::stoll(parameter.get<std::string>());
    return nullptr;
  } catch (const std::exception& error) {
    const std::string why = std::string("parameter \"width\" is wrong: ") + error.what();
    return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INVALID_ARG, why.c_str());
  }
}

TRITONSERVER_Error* Fill(TRITONBACKEND_Request* request, int64_t width,
                         TRITONBACKEND_Response* response, int64_t* batch) {
  TRITONBACKEND_Input* input = nullptr;
  FILL_RETURN_IF_ERROR(TRITONBACKEND_RequestInputByIndex(request, 0, &input));
  const char* name = nullptr;
  TRITONSERVER_DataType dtype = TRITONSERVER_TYPE_INVALID;
  const int64_t* keys = nullptr;
  uint32_t dims = 0;
  uint64_t bytes = 0;
  uint32_t buffers = 0;
  FILL_RETURN_IF_ERROR(
      TRITONBACKEND_InputProperties(input, &name, &dtype, &keys, &dims, &bytes, &buffers));
  *batch = keys[0];
  const std::array<int64_t, 2> shape = {*batch, width};
  TRITONBACKEND_Output* output = nullptr;
  FILL_RETURN_IF_ERROR(TRITONBACKEND_ResponseOutput(
      response, &output, "EMBEDDING", TRITONSERVER_TYPE_FP32, shape.data(), shape.size()));
  const uint64_t size = static_cast<uint64_t>(*batch * width) * sizeof(float);
  void* buffer = nullptr;
  TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
  int64_t memory_id = 0;
  FILL_RETURN_IF_ERROR(TRITONBACKEND_OutputBuffer(output, &buffer, size, &memory, &memory_id));
  std::memset(buffer, 0, size);
  return nullptr;
}

// Answers, reports and releases one request; returns its samples.
uint64_t Answer(TRITONBACKEND_ModelInstance* instance, int64_t width,
                TRITONBACKEND_Request* request) {
  const uint64_t start_ns = NowNs();
  int64_t batch = 1;
  TRITONBACKEND_Response* response = nullptr;
  LogAndDelete(TRITONBACKEND_ResponseNew(&response, request));
  TRITONSERVER_Error* error = Fill(request, width, response, &batch);
  const uint64_t end_ns = NowNs();
  LogAndDelete(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, error));
  LogAndDelete(TRITONBACKEND_ModelInstanceReportStatistics(instance, request, error == nullptr,
                                                           start_ns, start_ns, end_ns, NowNs()));
  if (error != nullptr) TRITONSERVER_ErrorDelete(error);
  LogAndDelete(TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_ALL));
  return static_cast<uint64_t>(batch);
}

}  // namespace

extern "C" {

TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  auto width = std::make_unique<int64_t>(0);
  FILL_RETURN_IF_ERROR(ReadWidth(model, width.get()));
  return TRITONBACKEND_ModelSetState(model, width.release());
}

TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
  void* state = nullptr;
  FILL_RETURN_IF_ERROR(TRITONBACKEND_ModelState(model, &state));
  delete static_cast<int64_t*>(state);
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance* instance,
                                                       TRITONBACKEND_Request** requests,
                                                       const uint32_t request_count) {
  TRITONBACKEND_Model* model = nullptr;
  void* width = nullptr;
  FILL_RETURN_IF_ERROR(TRITONBACKEND_ModelInstanceModel(instance, &model));
  FILL_RETURN_IF_ERROR(TRITONBACKEND_ModelState(model, &width));
  const uint64_t start_ns = NowNs();
  uint64_t samples = 0;
  for (uint32_t i = 0; i < request_count; ++i) {
    samples += Answer(instance, *static_cast<int64_t*>(width), requests[i]);
  }
  const uint64_t end_ns = NowNs();
  LogAndDelete(TRITONBACKEND_ModelInstanceReportBatchStatistics(instance, samples, start_ns,
                                                                start_ns, end_ns, end_ns));
  return nullptr;
}

}  // extern "C"
