// The library, its calls, and the server's life.
#include "front/core.h"

#include <dlfcn.h>

namespace embertide::front {
namespace {

constexpr uint32_t kMajor = 1;
constexpr uint32_t kMinor = 34;

// The backend's symbols are found among those of the whole process.
Result<void*> OpenLibrary(const std::string& path) {
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    return Status(Code::kInvalidArgument, path + " cannot be loaded: " + ::dlerror() +
                                              "; give the libtritonserver.so of a Triton");
  }
  return library;
}

Status FindCalls(void* library, const std::string& path, Calls* calls) {
  const char* missing = nullptr;
  const auto find = [&](const char* name) {
    void* const found = ::dlsym(library, name);
    if (found == nullptr) missing = name;
    return found;
  };
#define EMBERTIDE_TRITON_FIND(name) \
  calls->name = reinterpret_cast<decltype(calls->name)>(find("TRITONSERVER_" #name));
  EMBERTIDE_TRITON_CALLS(EMBERTIDE_TRITON_FIND)
#undef EMBERTIDE_TRITON_FIND
  if (missing == nullptr) return Status::Ok();
  return {Code::kRejected,
          path + " has no " + missing + ": give a Triton of release 24.10 or later"};
}

grpc::StatusCode CodeOf(TRITONSERVER_Error_Code code) {
  switch (code) {
    case TRITONSERVER_ERROR_UNKNOWN:
      return grpc::StatusCode::UNKNOWN;
    case TRITONSERVER_ERROR_INTERNAL:
      return grpc::StatusCode::INTERNAL;
    case TRITONSERVER_ERROR_NOT_FOUND:
      return grpc::StatusCode::NOT_FOUND;
    case TRITONSERVER_ERROR_INVALID_ARG:
      return grpc::StatusCode::INVALID_ARGUMENT;
    case TRITONSERVER_ERROR_UNAVAILABLE:
      return grpc::StatusCode::UNAVAILABLE;
    case TRITONSERVER_ERROR_UNSUPPORTED:
      return grpc::StatusCode::UNIMPLEMENTED;
    case TRITONSERVER_ERROR_ALREADY_EXISTS:
      return grpc::StatusCode::ALREADY_EXISTS;
    case TRITONSERVER_ERROR_CANCELLED:
      return grpc::StatusCode::CANCELLED;
  }
  return grpc::StatusCode::UNKNOWN;
}

}  // namespace

Result<std::unique_ptr<Core>> Core::Start(const CoreOptions& options) {
  std::unique_ptr<Core> core(new Core());
  const Result<void*> library = OpenLibrary(options.library);
  if (!library.ok()) return library.status();
  EMBERTIDE_RETURN_IF_ERROR(FindCalls(library.value(), options.library, &core->calls_));
  const Calls& calls = core->calls_;
  const auto as_status = [&](TRITONSERVER_Error* error) {
    const grpc::Status status = core->StatusOf(error);
    return status.ok() ? Status::Ok() : Status(Code::kRejected, status.error_message());
  };
  uint32_t major = 0;
  uint32_t minor = 0;
  EMBERTIDE_RETURN_IF_ERROR(as_status(calls.ApiVersion(&major, &minor)));
  if (major != kMajor || minor < kMinor) {
    return Status(Code::kRejected, options.library + " has API " + std::to_string(major) + "." +
                                       std::to_string(minor) + "; give a Triton whose API is " +
                                       std::to_string(kMajor) + "." + std::to_string(kMinor) +
                                       " or a later minor");
  }
  TRITONSERVER_ServerOptions* made = nullptr;
  EMBERTIDE_RETURN_IF_ERROR(as_status(calls.ServerOptionsNew(&made)));
  const std::unique_ptr<TRITONSERVER_ServerOptions, decltype(calls.ServerOptionsDelete)> held(
      made, calls.ServerOptionsDelete);
  EMBERTIDE_RETURN_IF_ERROR(as_status(calls.ServerOptionsSetServerId(made, "embertide")));
  EMBERTIDE_RETURN_IF_ERROR(
      as_status(calls.ServerOptionsSetModelRepositoryPath(made, options.repository.c_str())));
  EMBERTIDE_RETURN_IF_ERROR(
      as_status(calls.ServerOptionsSetBackendDirectory(made, options.backends.c_str())));
  EMBERTIDE_RETURN_IF_ERROR(as_status(calls.ServerOptionsSetStrictModelConfig(made, true)));
  EMBERTIDE_RETURN_IF_ERROR(
      as_status(calls.ServerOptionsSetExitTimeout(made, options.exit_timeout_s)));
  // Without it, a model that cannot be loaded is tried some thirty times: 2.51 leaves it unset.
  EMBERTIDE_RETURN_IF_ERROR(as_status(calls.ServerOptionsSetModelLoadRetryCount(made, 0)));
  // Our backend takes no pinned memory of Triton's.
  EMBERTIDE_RETURN_IF_ERROR(as_status(calls.ServerOptionsSetPinnedMemoryPoolByteSize(made, 0)));
  // Unset, it is to poll the folder.
  const auto control =
      options.by_name ? TRITONSERVER_MODEL_CONTROL_EXPLICIT : TRITONSERVER_MODEL_CONTROL_NONE;
  EMBERTIDE_RETURN_IF_ERROR(as_status(calls.ServerOptionsSetModelControlMode(made, control)));
  if (options.by_name) {
    for (const std::string& model : options.models) {
      EMBERTIDE_RETURN_IF_ERROR(as_status(calls.ServerOptionsSetStartupModel(made, model.c_str())));
    }
  }
  EMBERTIDE_RETURN_IF_ERROR(as_status(calls.ServerNew(&core->server_, made)));
  return core;
}

Core::~Core() {
  if (server_ != nullptr) Worked(calls_.ServerDelete(server_), "the end of the server");
}

grpc::Status Core::StatusOfBorrowed(TRITONSERVER_Error* error) const {
  if (error == nullptr) return grpc::Status::OK;
  return {CodeOf(calls_.ErrorCode(error)), calls_.ErrorMessage(error)};
}

grpc::Status Core::StatusOf(TRITONSERVER_Error* error) const {
  grpc::Status status = StatusOfBorrowed(error);
  if (error != nullptr) calls_.ErrorDelete(error);
  return status;
}

bool Core::Worked(TRITONSERVER_Error* error, const char* what) const {
  const grpc::Status status = StatusOf(error);
  if (!status.ok()) {
    Log(TRITONSERVER_LOG_ERROR, std::string(what) + ": " + status.error_message());
  }
  return status.ok();
}

void Core::Log(TRITONSERVER_LogLevel level, const std::string& line) const {
  TRITONSERVER_Error* error =
      calls_.LogMessage(level, "embertide", 0, ("embertide: " + line).c_str());
  if (error != nullptr) calls_.ErrorDelete(error);
}

bool Core::IsReady() const {
  bool ready = false;
  return Worked(calls_.ServerIsReady(server_, &ready), "readiness") && ready;
}

grpc::Status Core::TakeJson(TRITONSERVER_Message* message, std::string* json) const {
  const char* text = nullptr;
  size_t bytes = 0;
  grpc::Status status = StatusOf(calls_.MessageSerializeToJson(message, &text, &bytes));
  if (status.ok()) json->assign(text, bytes);
  Worked(calls_.MessageDelete(message), "a message");
  return status;
}

grpc::Status Core::Metrics(std::string* page) const {
  TRITONSERVER_Metrics* metrics = nullptr;
  grpc::Status status = StatusOf(calls_.ServerMetrics(server_, &metrics));
  if (!status.ok()) return status;
  const char* text = nullptr;
  size_t bytes = 0;
  status =
      StatusOf(calls_.MetricsFormatted(metrics, TRITONSERVER_METRIC_PROMETHEUS, &text, &bytes));
  if (status.ok()) page->assign(text, bytes);
  Worked(calls_.MetricsDelete(metrics), "metrics");
  return status;
}

void Core::Stop() { Worked(calls_.ServerStop(server_), "the end of the models"); }

}  // namespace embertide::front
