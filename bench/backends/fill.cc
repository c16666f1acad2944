// libtriton_fill.so: the ceiling of a lookup. It reads no key and fills an output of the right
// size.
//
// For KEYS [B,F] it answers EMBEDDING [B,W] of zeros, W being the model's parameter "width".
#include <array>
#include <cstring>
#include <memory>

#include "backends/backend.h"
#include "triton/tensor_io.h"

namespace embertide::bench {
namespace {

using triton::FromTriton;

Status Fill(TRITONBACKEND_Request* request, int64_t width, TRITONBACKEND_Response* response,
            int64_t* batch) {
  TRITONBACKEND_Input* input = nullptr;
  EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_RequestInputByIndex(request, 0, &input)));
  const char* name = nullptr;
  TRITONSERVER_DataType dtype = TRITONSERVER_TYPE_INVALID;
  const int64_t* keys = nullptr;
  uint32_t dims = 0;
  uint64_t bytes = 0;
  uint32_t buffers = 0;
  EMBERTIDE_RETURN_IF_ERROR(FromTriton(
      TRITONBACKEND_InputProperties(input, &name, &dtype, &keys, &dims, &bytes, &buffers)));
  *batch = keys[0];
  void* buffer = nullptr;
  EMBERTIDE_RETURN_IF_ERROR(triton::MakeOutput(response, "EMBEDDING", TRITONSERVER_TYPE_FP32,
                                               std::array{*batch, width}, sizeof(float), &buffer));
  std::memset(buffer, 0, static_cast<size_t>(*batch * width) * sizeof(float));
  return Status::Ok();
}

}  // namespace

Status Load(const Parameters& parameters, void** state) {
  *state = std::make_unique<int64_t>(std::stoll(parameters.at("width"))).release();
  return Status::Ok();
}

void Delete(void* state) { delete static_cast<int64_t*>(state); }

Status Execute(void* state, TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests,
               uint32_t count) {
  Times all{NowNs(), 0};
  uint64_t samples = 0;
  for (uint32_t i = 0; i < count; ++i) {
    Times times{NowNs(), 0};
    int64_t batch = 1;
    TRITONBACKEND_Response* response = nullptr;
    triton::LogIfError(TRITONBACKEND_ResponseNew(&response, requests[i]), "response");
    const Status status = Fill(requests[i], *static_cast<int64_t*>(state), response, &batch);
    times.end_ns = NowNs();
    Finish(instance, requests[i], response, status, times);
    samples += static_cast<uint64_t>(batch);
  }
  all.end_ns = NowNs();
  ReportBatch(instance, samples, all);
  return Status::Ok();
}

}  // namespace embertide::bench
