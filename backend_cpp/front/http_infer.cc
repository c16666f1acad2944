#include "front/http_infer.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <condition_variable>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "base/number.h"
#include "base/trace_id.h"
#include "front/budget.h"
#include "front/http_daemon.h"
#include "front/json_message.h"
#include "inference/messages.pb.h"

namespace embertide::front {
namespace {

constexpr unsigned kMaxConnections = 256;
constexpr unsigned kMaxConnectionsOfOne = 128;
constexpr size_t kConnectionBytes = 32 << 10;
constexpr std::chrono::seconds kMaxTime{60};  // of a call
constexpr unsigned kOk = MHD_HTTP_OK;

unsigned HttpCode(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::OK:
      return kOk;
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::OUT_OF_RANGE:
    case grpc::StatusCode::FAILED_PRECONDITION:
      return MHD_HTTP_BAD_REQUEST;
    case grpc::StatusCode::UNAUTHENTICATED:
      return MHD_HTTP_UNAUTHORIZED;
    case grpc::StatusCode::PERMISSION_DENIED:
      return MHD_HTTP_FORBIDDEN;
    case grpc::StatusCode::NOT_FOUND:
      return MHD_HTTP_NOT_FOUND;
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      return MHD_HTTP_TOO_MANY_REQUESTS;
    case grpc::StatusCode::UNIMPLEMENTED:
      return MHD_HTTP_NOT_IMPLEMENTED;
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::CANCELLED:
      return MHD_HTTP_SERVICE_UNAVAILABLE;
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return MHD_HTTP_GATEWAY_TIMEOUT;
    default:
      return MHD_HTTP_INTERNAL_SERVER_ERROR;
  }
}

struct Answer {
  unsigned code = kOk;
  std::string body;
};

Answer Refusal(unsigned code, const std::string& why) { return {code, ErrorJson(why)}; }
Answer Refusal(const grpc::Status& status) {
  return Refusal(HttpCode(status.error_code()), status.error_message());
}

MHD_Result ReplyJson(MHD_Connection* connection, const Answer& answer) {
  return Reply(connection, answer.code, answer.body, "application/json");
}

std::string HeaderOf(MHD_Connection* connection, const char* name) {
  const char* const value = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, name);
  return value == nullptr ? "" : value;
}

enum class Verb : uint8_t { kInfer, kDescribe, kReady };

// A path: what it asks for, and the model that it names.
struct Route {
  Verb verb;
  std::string model;
  std::string version;
};

std::optional<Route> RouteOf(std::string_view url, bool posted) {
  constexpr std::string_view kModels = "/v2/models/";
  constexpr std::string_view kVersions = "/versions/";
  constexpr std::string_view kInfer = "/infer";
  constexpr std::string_view kReady = "/ready";
  if (!url.starts_with(kModels)) return std::nullopt;
  url.remove_prefix(kModels.size());
  Route route{Verb::kDescribe, "", ""};
  if (posted) {
    if (!url.ends_with(kInfer)) return std::nullopt;
    url.remove_suffix(kInfer.size());
    route.verb = Verb::kInfer;
  } else if (url.ends_with(kReady)) {
    url.remove_suffix(kReady.size());
    route.verb = Verb::kReady;
  }
  if (const size_t at = url.find(kVersions); at != std::string_view::npos) {
    route.version = url.substr(at + kVersions.size());
    url = url.substr(0, at);
  }
  route.model = url;
  if (route.model.empty() || route.model.find('/') != std::string::npos) return std::nullopt;
  if (route.version.find('/') != std::string::npos) return std::nullopt;
  return route;
}

template <typename Message>
grpc::Status Read(grpc::ByteBuffer* bytes, Message* message) {
  return grpc::SerializationTraits<Message>::Deserialize(bytes, message);
}

template <typename Message>
grpc::ByteBuffer BytesOf(const Message& message) {
  grpc::ByteBuffer bytes;
  bool owned = false;
  grpc::SerializationTraits<Message>::Serialize(message, &bytes, &owned);
  return bytes;
}

// The answer of gRPC, as HTTP gives it.
Answer AnswerOf(Verb verb, const grpc::Status& status, grpc::ByteBuffer* bytes) {
  if (!status.ok()) return Refusal(status);
  grpc::Status read;
  Answer answer;
  if (verb == Verb::kInfer) {
    inference::ModelInferResponse response;
    read = Read(bytes, &response);
    if (read.ok()) read = ToJson(response, &answer.body);
  } else if (verb == Verb::kReady) {
    inference::ModelReadyResponse response;
    read = Read(bytes, &response);
    if (!response.ready()) answer.code = MHD_HTTP_SERVICE_UNAVAILABLE;
  } else {
    inference::ModelMetadataResponse response;
    read = Read(bytes, &response);
    if (read.ok()) answer.body = ToJson(response);
  }
  return read.ok() ? answer : Refusal(read);
}

}  // namespace

struct HttpInfer::Impl {
  // A request, from its headers to the end of its connection's interest in it.
  struct Call {
    MHD_Connection* connection = nullptr;
    Route route{Verb::kInfer, "", ""};
    std::string authorization;
    std::string traceparent;
    std::string body;
    uint64_t reserved = 0;  // bytes of the budget
    grpc::ClientContext context;
    grpc::ByteBuffer question;
    grpc::ByteBuffer bytes;
    bool sent = false;             // to gRPC; by the reading thread alone
    std::optional<Answer> answer;  // written before the connection is resumed
  };

  Impl(HttpInferOptions given, std::shared_ptr<grpc::Channel> channel)
      : options(std::move(given)), stub(std::move(channel)), bodies(options.max_bodies_bytes) {}

  // The headers are here. An answer in `refused` ends the request; its body is not read.
  std::unique_ptr<Call> Begin(MHD_Connection* connection, std::string_view url,
                              std::string_view method, std::optional<Answer>* refused);
  // The body is here. Answers, or suspends the connection until there is an answer.
  MHD_Result Finish(Call* call);
  // Suspends the connection, unless this ends.
  MHD_Result Send(Call* call, const char* method);
  void Done(Call* call, const grpc::Status& status);
  MHD_Result Handle(MHD_Connection* connection, const char* url, const char* method,
                    const char* upload, size_t* upload_bytes, void** seen);
  void Forget(Call* call);

  const HttpInferOptions options;
  grpc::GenericStub stub;
  Budget bodies;
  std::mutex mutex;
  std::condition_variable idle;
  std::unordered_set<Call*> at_work;  // under mutex
  bool ending = false;                // under mutex
  HttpDaemon daemon;                  // last: it uses the members above
};

std::unique_ptr<HttpInfer::Impl::Call> HttpInfer::Impl::Begin(MHD_Connection* connection,
                                                              std::string_view url,
                                                              std::string_view method,
                                                              std::optional<Answer>* refused) {
  const auto refuse = [&](Refused why, unsigned code, const std::string& text) {
    options.tally->AddRefused(why);
    *refused = Refusal(code, text);
    return nullptr;
  };
  const bool posted = method == MHD_HTTP_METHOD_POST;
  if (!posted && method != MHD_HTTP_METHOD_GET) {
    return refuse(Refused::kMethod, MHD_HTTP_METHOD_NOT_ALLOWED, "GET and POST are answered here");
  }
  const std::optional<Route> route = RouteOf(url, posted);
  if (!route) {
    return refuse(Refused::kMethod, MHD_HTTP_NOT_FOUND,
                  "there are POST /v2/models/NAME/infer, GET /v2/models/NAME and "
                  "/v2/models/NAME/ready; all else of the protocol is asked over gRPC");
  }
  const std::string authorization = HeaderOf(connection, MHD_HTTP_HEADER_AUTHORIZATION);
  if (const grpc::Status may = options.admission->CheckToken(authorization); !may.ok()) {
    *refused = Refusal(may);
    return nullptr;
  }
  const std::string length = HeaderOf(connection, MHD_HTTP_HEADER_CONTENT_LENGTH);
  uint64_t bytes = 0;
  if (posted && length.empty()) {
    return refuse(Refused::kMessage, MHD_HTTP_LENGTH_REQUIRED,
                  "Content-Length is needed: no chunks are taken");
  }
  if (!length.empty() && !ParseNumber(length, 0, options.max_body_bytes, &bytes).empty()) {
    return refuse(Refused::kMessage, MHD_HTTP_CONTENT_TOO_LARGE,
                  "a body has at most " + std::to_string(options.max_body_bytes) +
                      " bytes here; ask for more over gRPC");
  }
  if (!HeaderOf(connection, MHD_HTTP_HEADER_CONTENT_ENCODING).empty()) {
    return refuse(Refused::kMessage, MHD_HTTP_UNSUPPORTED_MEDIA_TYPE,
                  "a compressed body is not taken");
  }
  if (!HeaderOf(connection, "Inference-Header-Content-Length").empty()) {
    return refuse(Refused::kMessage, MHD_HTTP_UNSUPPORTED_MEDIA_TYPE,
                  "tensors are not taken in binary here; send them as \"data\"");
  }
  if (!bodies.Take(bytes)) {
    return refuse(Refused::kBytes, MHD_HTTP_TOO_MANY_REQUESTS,
                  "too many bodies are at work; ask again later");
  }
  auto call = std::make_unique<Call>();
  call->connection = connection;
  call->route = *route;
  call->authorization = authorization;
  // Nothing else may become metadata.
  const std::string traceparent = HeaderOf(connection, kTraceparent);
  if (!TraceIdOf(traceparent).empty() && traceparent.size() == kTraceparentBytes) {
    call->traceparent = traceparent;
  }
  call->reserved = bytes;
  return call;
}

MHD_Result HttpInfer::Impl::Send(Call* call, const char* method) {
  call->context.set_deadline(std::chrono::system_clock::now() + kMaxTime);
  if (!call->authorization.empty()) {
    call->context.AddMetadata("authorization", call->authorization);
  }
  if (!call->traceparent.empty()) call->context.AddMetadata(kTraceparent, call->traceparent);
  {
    const std::lock_guard lock(mutex);
    if (ending) {
      return ReplyJson(call->connection, Refusal(MHD_HTTP_SERVICE_UNAVAILABLE, "the server ends"));
    }
    at_work.insert(call);
  }
  call->sent = true;
  MHD_suspend_connection(call->connection);
  stub.UnaryCall(&call->context, std::string("/inference.GRPCInferenceService/") + method,
                 grpc::StubOptions(), &call->question, &call->bytes,
                 [this, call](const grpc::Status& status) { Done(call, status); });
  return MHD_YES;
}

void HttpInfer::Impl::Done(Call* call, const grpc::Status& status) {
  try {
    call->answer = AnswerOf(call->route.verb, status, &call->bytes);
  } catch (const std::exception&) {
    call->answer = Answer{MHD_HTTP_SERVICE_UNAVAILABLE, ""};  // no memory
  }
  call->bytes.Clear();
  // Once it is resumed the call may be gone, and another one may have its address; that one is not
  // at work before this lock is free.
  const std::lock_guard lock(mutex);
  MHD_resume_connection(call->connection);
  at_work.erase(call);
  if (at_work.empty()) idle.notify_all();
}

MHD_Result HttpInfer::Impl::Finish(Call* call) {
  if (call->answer) return ReplyJson(call->connection, *call->answer);
  if (call->sent) return MHD_YES;
  const Route& route = call->route;
  if (route.verb == Verb::kInfer) {
    inference::ModelInferRequest request;
    request.set_model_name(route.model);
    request.set_model_version(route.version);
    const grpc::Status read = FromJson(call->body, &request);
    call->body = {};
    if (!read.ok()) {
      options.tally->AddRefused(Refused::kMessage);
      return ReplyJson(call->connection, Refusal(read));
    }
    call->question = BytesOf(request);
    return Send(call, "ModelInfer");
  }
  if (route.verb == Verb::kReady) {
    inference::ModelReadyRequest request;
    request.set_name(route.model);
    request.set_version(route.version);
    call->question = BytesOf(request);
    return Send(call, "ModelReady");
  }
  inference::ModelMetadataRequest request;
  request.set_name(route.model);
  request.set_version(route.version);
  call->question = BytesOf(request);
  return Send(call, "ModelMetadata");
}

void HttpInfer::Impl::Forget(Call* call) {
  bodies.Give(call->reserved);
  delete call;
}

MHD_Result HttpInfer::Impl::Handle(MHD_Connection* connection, const char* url, const char* method,
                                   const char* upload, size_t* upload_bytes, void** seen) {
  if (*seen == nullptr) {
    std::optional<Answer> refused;
    std::unique_ptr<Call> call = Begin(connection, url, method, &refused);
    if (refused) return ReplyJson(connection, *refused);
    *seen = call.release();
    return MHD_YES;
  }
  auto* const call = static_cast<Call*>(*seen);
  if (*upload_bytes > 0) {
    call->body.append(upload, *upload_bytes);
    *upload_bytes = 0;
    return MHD_YES;
  }
  return Finish(call);
}

Result<std::unique_ptr<HttpInfer>> HttpInfer::Start(const HttpInferOptions& options,
                                                    std::shared_ptr<grpc::Channel> channel) {
  auto impl = std::make_unique<Impl>(options, std::move(channel));
  const auto handle = [](void* self, MHD_Connection* connection, const char* url,
                         const char* method, const char* /*version*/, const char* upload,
                         size_t* upload_bytes, void** seen) -> MHD_Result {
    try {
      return static_cast<Impl*>(self)->Handle(connection, url, method, upload, upload_bytes, seen);
    } catch (const std::exception&) {
      return MHD_NO;  // no memory: the connection ends
    }
  };
  const auto completed = [](void* self, MHD_Connection* /*connection*/, void** seen,
                            MHD_RequestTerminationCode /*why*/) {
    if (*seen != nullptr) static_cast<Impl*>(self)->Forget(static_cast<Impl::Call*>(*seen));
    *seen = nullptr;
  };
  Result<HttpDaemon> daemon = StartHttpDaemon({.listen = options.listen,
                                               .what = "inferences cannot be answered over HTTP",
                                               .flags = MHD_ALLOW_SUSPEND_RESUME,
                                               .max_connections = kMaxConnections,
                                               .max_connections_of_one = kMaxConnectionsOfOne,
                                               .connection_bytes = kConnectionBytes,
                                               .answer = +handle,
                                               .completed = +completed,
                                               .self = impl.get()});
  if (!daemon.ok()) return daemon.status();
  impl->daemon = std::move(daemon.value());
  return std::unique_ptr<HttpInfer>(new HttpInfer(std::move(impl)));
}

HttpInfer::HttpInfer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

HttpInfer::~HttpInfer() {
  std::unique_lock lock(impl_->mutex);
  impl_->ending = true;
  for (Impl::Call* const call : impl_->at_work) call->context.TryCancel();
  // No connection may be suspended when the daemon ends.
  impl_->idle.wait(lock, [this] { return impl_->at_work.empty(); });
}

}  // namespace embertide::front
