// Triton's entry points of the benchmark's backends.
#include "backends/backend.h"

#include <chrono>
#include <memory>

#include "base/json.h"

namespace embertide::bench {

using triton::FromTriton;
using triton::Guard;
using triton::LogIfError;

namespace {

Status ReadParameters(TRITONBACKEND_Model* model, Parameters* parameters) {
  TRITONSERVER_Message* message = nullptr;
  EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_ModelConfig(model, 1, &message)));
  const std::unique_ptr<TRITONSERVER_Message, void (*)(TRITONSERVER_Message*)> owned(
      message, [](auto* each) { LogIfError(TRITONSERVER_MessageDelete(each), "config"); });
  const char* text = nullptr;
  size_t bytes = 0;
  EMBERTIDE_RETURN_IF_ERROR(
      FromTriton(TRITONSERVER_MessageSerializeToJson(message, &text, &bytes)));
  const Json config = Json::parse(text, text + bytes);
  for (const auto& [key, value] : config.at("parameters").items()) {
    (*parameters)[key] = value.at("string_value").get<std::string>();
  }
  return Status::Ok();
}

}  // namespace

uint64_t NowNs() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

void Finish(TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request* request,
            TRITONBACKEND_Response* response, const Status& status, const Times& times) {
  LogIfError(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL,
                                        triton::ToTriton(status)),
             "response");
  LogIfError(
      TRITONBACKEND_ModelInstanceReportStatistics(instance, request, status.ok(), times.start_ns,
                                                  times.start_ns, times.end_ns, NowNs()),
      "statistics");
  LogIfError(TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_ALL), "release");
}

void ReportBatch(TRITONBACKEND_ModelInstance* instance, uint64_t samples, const Times& times) {
  LogIfError(TRITONBACKEND_ModelInstanceReportBatchStatistics(
                 instance, samples, times.start_ns, times.start_ns, times.end_ns, NowNs()),
             "statistics");
}

}  // namespace embertide::bench

using embertide::Status;
using embertide::bench::FromTriton;
using embertide::bench::Guard;

extern "C" {

TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  return Guard([&]() -> Status {
    embertide::bench::Parameters parameters;
    void* state = nullptr;
    EMBERTIDE_RETURN_IF_ERROR(embertide::bench::ReadParameters(model, &parameters));
    EMBERTIDE_RETURN_IF_ERROR(embertide::bench::Load(parameters, &state));
    return FromTriton(TRITONBACKEND_ModelSetState(model, state));
  });
}

TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
  return Guard([&]() -> Status {
    void* state = nullptr;
    EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_ModelState(model, &state)));
    embertide::bench::Delete(state);
    return Status::Ok();
  });
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance* instance,
                                                       TRITONBACKEND_Request** requests,
                                                       const uint32_t request_count) {
  return Guard([&]() -> Status {
    TRITONBACKEND_Model* model = nullptr;
    void* state = nullptr;
    EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_ModelInstanceModel(instance, &model)));
    EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_ModelState(model, &state)));
    return embertide::bench::Execute(state, instance, requests, request_count);
  });
}

}  // extern "C"
