// Service: each call of the protocol, who may make it, and its answer.
#include "front/service.h"

#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "access/limits.h"
#include "access/listener.h"
#include "base/background_task.h"
#include "inference/messages.pb.h"

namespace embertide::front {
namespace {

constexpr std::string_view kPrefix = "/inference.GRPCInferenceService/";
constexpr std::string_view kInfer = "ModelInfer";
constexpr uint32_t kMaxLooks = 32;  // at work at once
constexpr uint32_t kMaxLooksOfOne = kMaxLooks / 2;
constexpr uint32_t kThreads = 4;
constexpr int kMaxLookBytes = 1 << 20;
// Largest messages that may be on their way beside requests at work, before gRPC ends streams: it
// knows of neither's caller, so requests should be refused first.
constexpr size_t kArriving = 4;

// Calls that are answered here beside ModelInfer, and who may make them.
struct Look {
  std::string_view name;
  Right right;
};
constexpr std::array<Look, 10> kLooks = {{{"ServerLive", Right::kAsk},
                                          {"ServerReady", Right::kAsk},
                                          {"ModelReady", Right::kAsk},
                                          {"ServerMetadata", Right::kAsk},
                                          {"ModelMetadata", Right::kAsk},
                                          {"ModelConfig", Right::kAsk},
                                          {"ModelStatistics", Right::kAsk},
                                          {"RepositoryIndex", Right::kOperate},
                                          {"RepositoryModelLoad", Right::kOperate},
                                          {"RepositoryModelUnload", Right::kOperate}}};

// Whether an extension is one that Triton's core names but this server does not have.
bool IsAbsent(const std::string& extension) {
  constexpr std::array<std::string_view, 5> kAbsent = {"classification", "system_shared_memory",
                                                       "cuda_shared_memory", "trace", "logging"};
  return std::ranges::find(kAbsent, extension) != kAbsent.end();
}

// Reads JSON of Triton as a message. Fields that the message lacks are left out: a newer
// Triton may say more.
grpc::Status FromJson(const std::string& json, google::protobuf::Message* message) {
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;
  const auto status = google::protobuf::util::JsonStringToMessage(json, message, options);
  if (status.ok()) return grpc::Status::OK;
  return {grpc::StatusCode::INTERNAL, "Triton's answer cannot be read: " + status.ToString()};
}

// The model that a request is of; null: it is of none.
template <typename Request>
const std::string* ModelOf(const Request& request) {
  if constexpr (requires { request.model_name(); }) {
    return &request.model_name();
  } else if constexpr (requires { request.name(); }) {
    return &request.name();
  } else {
    return nullptr;
  }
}

// `check` is told of the model that the request is of.
template <typename Request, typename Response, typename Check, typename Ask>
grpc::Status With(grpc::ByteBuffer* question, grpc::ByteBuffer* answer, const Check& check,
                  const Ask& ask) {
  Request request;
  if (!grpc::SerializationTraits<Request>::Deserialize(question, &request).ok()) {
    return {grpc::StatusCode::INVALID_ARGUMENT,
            "the message is no " + Request::descriptor()->name()};
  }
  if (const std::string* const model = ModelOf(request); model != nullptr) {
    if (grpc::Status status = check(*model); !status.ok()) return status;
  }
  Response response;
  grpc::Status status = ask(request, &response);
  if (!status.ok()) return status;
  bool owned = false;
  return grpc::SerializationTraits<Response>::Serialize(response, answer, &owned);
}

}  // namespace

// A call that is no inference; it deletes itself.
class LookCall final : public grpc::ServerGenericBidiReactor {
 public:
  // Refused, or answered without a message.
  LookCall(Tally* tally, size_t method, const grpc::Status& status, const grpc::ByteBuffer* answer)
      : tally_(*tally), method_(method), code_(status.error_code()) {
    if (answer == nullptr) {
      Finish(status);
    } else {
      answer_ = *answer;  // slices that are counted
      StartWriteAndFinish(&answer_, grpc::WriteOptions(), status);
    }
  }
  // To be answered once its message is here. Requires: it is counted in looks_, and has a place.
  LookCall(Service* service, grpc::GenericCallbackServerContext* context, std::string_view method,
           Guest guest, Callers::Caller* caller)
      : tally_(service->tally_),
        method_(MethodOf(method)),
        service_(service),
        guest_(std::move(guest)),
        caller_(caller) {
    service_->arrivals_.Enter(context, &place_);
    StartRead(&question_);
  }

  void OnReadDone(bool ok) override {
    const bool in_time = service_->arrivals_.Leave(&place_);
    if (!ok || question_.Length() > kMaxLookBytes) {
      if (in_time) tally_.AddRefused(Refused::kMessage);
      return End({grpc::StatusCode::INVALID_ARGUMENT,
                  ok ? "the message has more than " + std::to_string(kMaxLookBytes) + " bytes"
                     : "no message came"});
    }
    service_->threads_.Run([this] { Answer(); });
  }
  void OnDone() override {
    tally_.AddCall(method_, code_);
    delete this;
  }

 private:
  void Answer() {
    grpc::Status status;
    try {
      status = service_->Answer(kMethods[method_], guest_, &question_, &answer_);
    } catch (const std::exception& error) {
      status = {grpc::StatusCode::RESOURCE_EXHAUSTED, error.what()};
    }
    End(status);
  }
  void End(const grpc::Status& status) {
    service_->lookers_.Leave(caller_);
    --service_->looks_;
    code_ = status.error_code();
    if (!status.ok()) return Finish(status);
    StartWriteAndFinish(&answer_, grpc::WriteOptions(), status);
  }

  Tally& tally_;
  const size_t method_;  // of kMethods
  grpc::StatusCode code_ = grpc::StatusCode::UNKNOWN;
  Service* service_ = nullptr;
  Guest guest_;
  Callers::Caller* caller_ = nullptr;
  WaitingCalls::Place place_;
  grpc::ByteBuffer question_;
  grpc::ByteBuffer answer_;
};

Service::Service(const ServiceOptions& options, const Core& core)
    : options_(options),
      core_(core),
      admission_(options.admission, &tally_),
      lookers_({.calls = kMaxLooksOfOne, .bytes = 0}),
      arrivals_(kFirstMessage),
      inferences_(core, options.infer, admission_, &tally_),
      threads_(kThreads, TaskBoard::OfProcess().Of("answers")) {}

grpc::ServerGenericBidiReactor* Service::CreateReactor(
    grpc::GenericCallbackServerContext* context) {
  const std::string& method = context->method();
  if (method == kHealthCheck) {
    const grpc::ByteBuffer answer = HealthAnswer(IsServing());
    return new LookCall(&tally_, MethodOf("Health"), grpc::Status::OK, &answer);
  }
  const std::string_view name =
      method.starts_with(kPrefix) ? std::string_view(method).substr(kPrefix.size()) : "";
  const auto refuse = [&](const grpc::Status& status) {
    return new LookCall(&tally_, MethodOf(name), status, nullptr);
  };
  if (name == kInfer) {
    Guest guest;
    grpc::Status status = admission_.Admit(*context, name, Right::kAsk, &guest);
    if (!status.ok()) return refuse(status);
    return new InferCall(&inferences_, context, std::move(guest));
  }
  for (const Look& look : kLooks) {
    if (look.name != name) continue;
    Guest guest;
    grpc::Status status = admission_.Admit(*context, name, look.right, &guest);
    if (!status.ok()) return refuse(status);
    if (++looks_ > kMaxLooks) {
      --looks_;
      tally_.AddRefused(Refused::kLooks);
      return refuse({grpc::StatusCode::RESOURCE_EXHAUSTED,
                     std::to_string(kMaxLooks) + " calls are at work; ask again later"});
    }
    Callers::Caller* const caller = lookers_.Enter(guest.name);
    if (caller == nullptr) {
      --looks_;
      tally_.AddRefused(Refused::kCallerLooks);
      return refuse(
          {grpc::StatusCode::RESOURCE_EXHAUSTED,
           std::to_string(kMaxLooksOfOne) + " calls of this caller are at work; ask again later"});
    }
    return new LookCall(this, context, look.name, std::move(guest), caller);
  }
  tally_.AddRefused(Refused::kMethod);
  return refuse({grpc::StatusCode::UNIMPLEMENTED,
                 name.empty() ? "there is no such call here"
                              : "this server has no " + std::string(name.substr(0, 64))});
}

grpc::Status Service::Answer(std::string_view method, const Guest& guest,
                             grpc::ByteBuffer* question, grpc::ByteBuffer* answer) const {
  using namespace inference;  // NOLINT(google-build-using-namespace): the protocol's messages
  const Calls& calls = core_.calls();
  TRITONSERVER_Server* const server = core_.server();
  const auto check = [&](const std::string& model) { return admission_.CheckModel(guest, model); };
  // Turns the JSON of a call of Triton's into a message.
  const auto told = [&](const auto& ask, google::protobuf::Message* response) {
    std::string json;
    grpc::Status status = core_.Json(ask, &json);
    return status.ok() ? FromJson(json, response) : status;
  };
  if (method == "ServerLive") {
    return With<ServerLiveRequest, ServerLiveResponse>(
        question, answer, check, [&](const auto&, auto* response) {
          bool live = false;
          grpc::Status status = core_.StatusOf(calls.ServerIsLive(server, &live));
          response->set_live(live);
          return status;
        });
  }
  if (method == "ServerReady") {
    return With<ServerReadyRequest, ServerReadyResponse>(question, answer, check,
                                                         [&](const auto&, auto* response) {
                                                           response->set_ready(IsServing());
                                                           return grpc::Status::OK;
                                                         });
  }
  if (method == "ModelReady") {
    return With<ModelReadyRequest, ModelReadyResponse>(
        question, answer, check, [&](const auto& request, auto* response) {
          int64_t version = 0;
          grpc::Status status = ReadVersion("version", request.version(), &version);
          bool ready = false;
          if (status.ok()) {
            status = core_.StatusOf(
                calls.ServerModelIsReady(server, request.name().c_str(), version, &ready));
          }
          response->set_ready(ready);
          return status;
        });
  }
  if (method == "ServerMetadata") {
    return With<ServerMetadataRequest, ServerMetadataResponse>(
        question, answer, check, [&](const auto&, auto* response) {
          grpc::Status status = told(
              [&](TRITONSERVER_Message** message) { return calls.ServerMetadata(server, message); },
              response);
          auto* const extensions = response->mutable_extensions();
          extensions->erase(std::remove_if(extensions->begin(), extensions->end(), IsAbsent),
                            extensions->end());
          return status;
        });
  }
  // Asks Triton about one version of a model.
  const auto of_model = [&](const auto& request, const auto& call, auto* response) {
    int64_t version = 0;
    grpc::Status status = ReadVersion("version", request.version(), &version);
    if (!status.ok()) return status;
    return told(
        [&](TRITONSERVER_Message** message) {
          return call(server, request.name().c_str(), version, message);
        },
        response);
  };
  if (method == "ModelMetadata") {
    return With<ModelMetadataRequest, ModelMetadataResponse>(
        question, answer, check, [&](const auto& request, auto* response) {
          return of_model(request, calls.ServerModelMetadata, response);
        });
  }
  if (method == "ModelConfig") {
    const auto config = [&](auto* of, const char* name, int64_t version, auto** message) {
      return calls.ServerModelConfig(of, name, version, 1, message);
    };
    return With<ModelConfigRequest, ModelConfigResponse>(
        question, answer, check, [&](const auto& request, auto* response) {
          return of_model(request, config, response->mutable_config());
        });
  }
  if (method == "ModelStatistics") {
    return With<ModelStatisticsRequest, ModelStatisticsResponse>(
        question, answer, check, [&](const auto& request, auto* response) {
          return of_model(request, calls.ServerModelStatistics, response);
        });
  }
  if (method == "RepositoryIndex") {
    return With<RepositoryIndexRequest, RepositoryIndexResponse>(
        question, answer, check, [&](const auto& request, auto* response) -> grpc::Status {
          if (!request.repository_name().empty()) {
            return {grpc::StatusCode::UNIMPLEMENTED,
                    "there is one repository: leave repository_name out"};
          }
          std::string json;
          const uint32_t flags = request.ready() ? TRITONSERVER_INDEX_FLAG_READY : 0;
          grpc::Status status = core_.Json(
              [&](TRITONSERVER_Message** message) {
                return calls.ServerModelIndex(server, flags, message);
              },
              &json);
          return status.ok() ? FromJson("{\"models\":" + json + "}", response) : status;
        });
  }
  if (method == "RepositoryModelLoad") {
    return With<RepositoryModelLoadRequest, RepositoryModelLoadResponse>(
        question, answer, check, [&](const auto& request, auto*) -> grpc::Status {
          if (request.parameters_size() > 0) {
            return {grpc::StatusCode::UNIMPLEMENTED,
                    "a model is loaded as its folder is: parameters of a load are not taken"};
          }
          return core_.StatusOf(calls.ServerLoadModel(server, request.model_name().c_str()));
        });
  }
  return With<RepositoryModelUnloadRequest, RepositoryModelUnloadResponse>(
      question, answer, check, [&](const auto& request, auto*) {
        const auto dependents = request.parameters().find("unload_dependents");
        const bool all =
            dependents != request.parameters().end() && dependents->second.bool_param();
        const char* const name = request.model_name().c_str();
        return core_.StatusOf(all ? calls.ServerUnloadModelAndDependents(server, name)
                                  : calls.ServerUnloadModel(server, name));
      });
}

void Service::EndLate() {
  arrivals_.EndLate();
  inferences_.EndLate();
}

Result<std::unique_ptr<Service>> Service::Start(const ServiceOptions& options, const Core& core) {
  grpc::EnableDefaultHealthCheckService(false);
  std::unique_ptr<Service> service(new Service(options, core));
  grpc::ServerBuilder builder;
  SetListenerBounds(&builder);
  if (options.max_connection_age_ms > 0) {
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS,
                               static_cast<int>(options.max_connection_age_ms));
  }
  Result<std::unique_ptr<Doorway>> doorway =
      Doorway::Of({.listen = options.listen, .max_connections = options.max_connections},
                  options.credentials.server(), &builder);
  if (!doorway.ok()) {
    return Status(doorway.status().code(), "requests: " + doorway.status().message());
  }
  service->doorway_ = std::move(*doorway);
  if (!options.own_socket.empty()) {
    builder.AddListeningPort("unix:" + options.own_socket, grpc::InsecureServerCredentials());
  }
  builder.SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  builder.SetMaxSendMessageSize(-1);  // the model's max_output_bytes bounds it
  grpc::ResourceQuota quota("embertide_front");
  builder.SetResourceQuota(
      quota.Resize(options.infer.max_bytes + kArriving * options.max_message_bytes));
  builder.RegisterCallbackGenericService(service.get());
  service->server_ = builder.BuildAndStart();
  if (service->server_ == nullptr) {
    return Status(Code::kDeviceError, "gRPC cannot start a server for " + options.listen);
  }
  return service;
}

std::shared_ptr<grpc::Channel> Service::InProcess() const {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);  // the model's max_output_bytes bounds it
  return server_->InProcessChannel(arguments);
}

void Service::Drain(std::chrono::milliseconds most) {
  leaving_ = true;
  if (server_ == nullptr) return;
  doorway_->Close();
  server_->Shutdown(std::chrono::system_clock::now() + most);
  server_->Wait();
  server_.reset();
}

Service::~Service() { Drain(std::chrono::seconds(1)); }

}  // namespace embertide::front
