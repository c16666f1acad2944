// Core: Triton's own server inside this process. Its scheduler, batcher, backends, statistics and
// metrics are Triton's; connections and messages are ours (service.h).
//
// The library is opened by its path, and its calls are found by name: this program links nothing of
// Triton's, so that any server of API 1.34 or later does. Thread-safe.
#pragma once

#include <grpcpp/support/status.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "embertide/status.h"
#include "front/server_abi.h"

namespace embertide::front {

// The calls, each under its name without TRITONSERVER_.
struct Calls {
#define EMBERTIDE_TRITON_CALLS(X)             \
  X(ApiVersion)                               \
  X(StringToDataType)                         \
  X(DataTypeByteSize)                         \
  X(DataTypeString)                           \
  X(ErrorNew)                                 \
  X(ErrorCode)                                \
  X(ErrorMessage)                             \
  X(ErrorDelete)                              \
  X(LogMessage)                               \
  X(MessageSerializeToJson)                   \
  X(MessageDelete)                            \
  X(ServerOptionsNew)                         \
  X(ServerOptionsDelete)                      \
  X(ServerOptionsSetServerId)                 \
  X(ServerOptionsSetModelRepositoryPath)      \
  X(ServerOptionsSetModelControlMode)         \
  X(ServerOptionsSetStartupModel)             \
  X(ServerOptionsSetStrictModelConfig)        \
  X(ServerOptionsSetExitTimeout)              \
  X(ServerOptionsSetModelLoadRetryCount)      \
  X(ServerOptionsSetPinnedMemoryPoolByteSize) \
  X(ServerOptionsSetBackendDirectory)         \
  X(ServerNew)                                \
  X(ServerDelete)                             \
  X(ServerStop)                               \
  X(ServerIsLive)                             \
  X(ServerIsReady)                            \
  X(ServerModelIsReady)                       \
  X(ServerMetadata)                           \
  X(ServerModelMetadata)                      \
  X(ServerModelStatistics)                    \
  X(ServerModelConfig)                        \
  X(ServerModelIndex)                         \
  X(ServerLoadModel)                          \
  X(ServerUnloadModel)                        \
  X(ServerUnloadModelAndDependents)           \
  X(ServerMetrics)                            \
  X(MetricsFormatted)                         \
  X(MetricsDelete)                            \
  X(ParameterNew)                             \
  X(ParameterDelete)                          \
  X(MetricFamilyNew)                          \
  X(MetricFamilyDelete)                       \
  X(MetricNewWithArgs)                        \
  X(MetricArgsNew)                            \
  X(MetricArgsSetHistogram)                   \
  X(MetricArgsDelete)                         \
  X(MetricDelete)                             \
  X(MetricIncrement)                          \
  X(MetricSet)                                \
  X(MetricObserve)                            \
  X(ServerInferAsync)                         \
  X(ResponseAllocatorNew)                     \
  X(ResponseAllocatorDelete)                  \
  X(InferenceRequestNew)                      \
  X(InferenceRequestDelete)                   \
  X(InferenceRequestSetId)                    \
  X(InferenceRequestSetFlags)                 \
  X(InferenceRequestSetCorrelationId)         \
  X(InferenceRequestSetCorrelationIdString)   \
  X(InferenceRequestSetPriorityUInt64)        \
  X(InferenceRequestSetTimeoutMicroseconds)   \
  X(InferenceRequestAddInput)                 \
  X(InferenceRequestAppendInputData)          \
  X(InferenceRequestAddRequestedOutput)       \
  X(InferenceRequestSetStringParameter)       \
  X(InferenceRequestSetIntParameter)          \
  X(InferenceRequestSetBoolParameter)         \
  X(InferenceRequestSetDoubleParameter)       \
  X(InferenceRequestSetReleaseCallback)       \
  X(InferenceRequestSetResponseCallback)      \
  X(InferenceRequestCancel)                   \
  X(InferenceResponseDelete)                  \
  X(InferenceResponseError)                   \
  X(InferenceResponseModel)                   \
  X(InferenceResponseId)                      \
  X(InferenceResponseParameterCount)          \
  X(InferenceResponseParameter)               \
  X(InferenceResponseOutputCount)             \
  X(InferenceResponseOutput)
// NOLINTNEXTLINE(bugprone-macro-parentheses): a name that is declared
#define EMBERTIDE_TRITON_CALL(name) decltype(&TRITONSERVER_##name) name = nullptr;
  EMBERTIDE_TRITON_CALLS(EMBERTIDE_TRITON_CALL)
#undef EMBERTIDE_TRITON_CALL
};

struct CoreOptions {
  std::string library;              // libtritonserver.so
  std::string repository;           // of models
  std::string backends;             // folder of the backends
  bool by_name = false;             // models are loaded by name, in place of all there are
  std::vector<std::string> models;  // by name: loaded at the start
  uint32_t exit_timeout_s = 3;      // for requests at work, once it stops
};

class Core {
 public:
  // Loads the models, and waits for them. The error names what of the library, the folder or a
  // model is wrong; Triton's log has more.
  static Result<std::unique_ptr<Core>> Start(const CoreOptions& options);
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  const Calls& calls() const { return calls_; }
  TRITONSERVER_Server* server() const { return server_; }
  // Why a call has failed, as gRPC says it; frees the error. OK for nullptr.
  grpc::Status StatusOf(TRITONSERVER_Error* error) const;
  // As above, of an error that stays its owner's.
  grpc::Status StatusOfBorrowed(TRITONSERVER_Error* error) const;
  // Whether a call has gone well; an error is written into the log.
  bool Worked(TRITONSERVER_Error* error, const char* what) const;
  void Log(TRITONSERVER_LogLevel level, const std::string& line) const;

  bool IsReady() const;
  // A message of Triton about something, as JSON. `ask` calls one of its calls that make a message.
  template <typename Ask>
  grpc::Status Json(const Ask& ask, std::string* json) const {
    TRITONSERVER_Message* message = nullptr;
    const grpc::Status status = StatusOf(ask(&message));
    return status.ok() ? TakeJson(message, json) : status;
  }
  // The page of metrics, in Prometheus' text.
  grpc::Status Metrics(std::string* page) const;
  // Stops taking requests, finishes those at work within the exit timeout, unloads the models.
  void Stop();

 private:
  Core() = default;
  grpc::Status TakeJson(TRITONSERVER_Message* message, std::string* json) const;

  Calls calls_;
  TRITONSERVER_Server* server_ = nullptr;
};

}  // namespace embertide::front
