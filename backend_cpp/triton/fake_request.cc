// Triton's C functions over a FakeRequest.
#include "triton/fake_request.h"

namespace {

using embertide::triton::FakeInput;
using embertide::triton::FakeRequest;

FakeRequest& Of(TRITONBACKEND_Request* request) { return *reinterpret_cast<FakeRequest*>(request); }

// Tells what a test that comes here has done wrong.
TRITONSERVER_Error* Impossible() {
  EMBERTIDE_CHECK(!"a fake request makes no outputs and no errors");
  return nullptr;
}

}  // namespace

TRITONSERVER_Error* TRITONSERVER_ErrorNew(TRITONSERVER_Error_Code, const char*) {
  return Impossible();
}
void TRITONSERVER_ErrorDelete(TRITONSERVER_Error*) {}
const char* TRITONSERVER_ErrorMessage(TRITONSERVER_Error*) { return ""; }
TRITONSERVER_Error* TRITONSERVER_LogMessage(TRITONSERVER_LogLevel, const char*, int, const char*) {
  return nullptr;
}

const char* TRITONSERVER_DataTypeString(TRITONSERVER_DataType datatype) {
  switch (datatype) {
    case TRITONSERVER_TYPE_INT64:
      return "INT64";
    case TRITONSERVER_TYPE_INT32:
      return "INT32";
    case TRITONSERVER_TYPE_FP32:
      return "FP32";
    default:
      return "<invalid>";
  }
}

TRITONSERVER_Error* TRITONBACKEND_RequestInputCount(TRITONBACKEND_Request* request,
                                                    uint32_t* count) {
  *count = static_cast<uint32_t>(Of(request).inputs.size());
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_RequestInputByIndex(TRITONBACKEND_Request* request,
                                                      uint32_t index, TRITONBACKEND_Input** input) {
  *input = reinterpret_cast<TRITONBACKEND_Input*>(&Of(request).inputs[index]);
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_InputProperties(TRITONBACKEND_Input* input, const char** name,
                                                  TRITONSERVER_DataType* datatype,
                                                  const int64_t** shape, uint32_t* dims_count,
                                                  uint64_t* byte_size, uint32_t* buffer_count) {
  const auto& of = *reinterpret_cast<FakeInput*>(input);
  *name = of.name.c_str();
  *datatype = of.dtype;
  *shape = of.shape.data();
  *dims_count = static_cast<uint32_t>(of.shape.size());
  *byte_size = 0;
  for (const std::string& buffer : of.buffers) *byte_size += buffer.size();
  *buffer_count = static_cast<uint32_t>(of.buffers.size());
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_InputBuffer(TRITONBACKEND_Input* input, uint32_t index,
                                              const void** buffer, uint64_t* buffer_byte_size,
                                              TRITONSERVER_MemoryType* memory_type,
                                              int64_t* memory_type_id) {
  const auto& of = *reinterpret_cast<FakeInput*>(input);
  *buffer = of.buffers[index].data();
  *buffer_byte_size = of.buffers[index].size();
  *memory_type = of.memory;
  *memory_type_id = 0;
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_RequestParameterCount(TRITONBACKEND_Request* request,
                                                        uint32_t* count) {
  *count = Of(request).version ? 1 : 0;
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_RequestParameter(TRITONBACKEND_Request* request, uint32_t,
                                                   const char** key,
                                                   TRITONSERVER_ParameterType* type,
                                                   const void** vvalue) {
  *key = "version";
  *type = TRITONSERVER_PARAMETER_INT;
  *vvalue = &*Of(request).version;
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_InferenceRequestTimeoutMicroseconds(
    TRITONBACKEND_Request* request, uint64_t* timeout) {
  *timeout = Of(request).timeout_us;
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_RequestIsCancelled(TRITONBACKEND_Request* request,
                                                     bool* is_cancelled) {
  *is_cancelled = Of(request).cancelled;
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_RequestOutputCount(TRITONBACKEND_Request*, uint32_t* count) {
  *count = 0;
  return nullptr;
}
TRITONSERVER_Error* TRITONBACKEND_RequestOutputName(TRITONBACKEND_Request*, uint32_t,
                                                    const char**) {
  return Impossible();
}
TRITONSERVER_Error* TRITONBACKEND_ResponseOutput(TRITONBACKEND_Response*, TRITONBACKEND_Output**,
                                                 const char*, TRITONSERVER_DataType, const int64_t*,
                                                 uint32_t) {
  return Impossible();
}
TRITONSERVER_Error* TRITONBACKEND_OutputBuffer(TRITONBACKEND_Output*, void**, uint64_t,
                                               TRITONSERVER_MemoryType*, int64_t*) {
  return Impossible();
}
