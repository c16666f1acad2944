// The server: gRPC's generic callback API, so that no thread waits for a call, and a call is known
// by its headers before its message is read.
#include "peer/node_service.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <array>
#include <atomic>
#include <chrono>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "access/call_threads.h"
#include "access/doorway.h"
#include "access/identity.h"
#include "access/limits.h"
#include "access/listener.h"
#include "access/waiting_calls.h"
#include "base/background_task.h"
#include "peer/limits.h"

namespace embertide {
namespace {

grpc::StatusCode CodeOf(Code code) {
  switch (code) {
    case Code::kOk:
      return grpc::StatusCode::OK;
    case Code::kInvalidArgument:
      return grpc::StatusCode::INVALID_ARGUMENT;
    case Code::kNotFound:
      return grpc::StatusCode::NOT_FOUND;
    case Code::kRejected:
      return grpc::StatusCode::FAILED_PRECONDITION;
    case Code::kBusy:
    case Code::kResourceExhausted:
      return grpc::StatusCode::RESOURCE_EXHAUSTED;
    case Code::kCorrupt:
      return grpc::StatusCode::DATA_LOSS;
    case Code::kVersionGone:
      return grpc::StatusCode::OUT_OF_RANGE;
    case Code::kNotOwner:
    case Code::kUnavailable:
    case Code::kDeviceError:
      return grpc::StatusCode::UNAVAILABLE;
  }
  return grpc::StatusCode::UNKNOWN;
}

// gRPC's is by the wall clock, and far away where the caller named none.
Deadline DeadlineOf(const grpc::ServerContextBase& context) {
  const auto left = context.deadline() - std::chrono::system_clock::now();
  return left > std::chrono::hours(24) ? kNoDeadline : DeadlineAfter(left);
}

// The purpose of a call, which says who may make it.
enum class Door : uint8_t { kLookup, kRead, kLook };

bool MayPass(const Identity& who, Door door) {
  if (who.role == "node") return true;
  if (who.role == "operator") return door != Door::kLookup;
  return door == Door::kLook && (who.role == "reader" || who.role == "control");
}

// Calls that have bounds of their own, so that none of these holds up another.
enum class Lane : uint8_t { kLookup, kRead, kLook, kReaders };
constexpr size_t kLanes = 4;

Lane LaneOf(Door door, bool reader) {
  if (reader) return Lane::kReaders;
  switch (door) {
    case Door::kLookup:
      return Lane::kLookup;
    case Door::kRead:
      return Lane::kRead;
    case Door::kLook:
      return Lane::kLook;
  }
  return Lane::kLook;
}

// As gRPC gives names.
constexpr std::string_view kService = "/embertide.v1.NodeService/";

class ServedCall;

// Parts are the first field of a question, and nodes write fields in their order.
bool IsBeat(const grpc::ByteBuffer& question) {
  constexpr uint8_t kPartsTag = 1U << 3 | 2U;
  std::vector<grpc::Slice> slices;
  if (!question.Dump(&slices).ok()) return false;
  for (const grpc::Slice& slice : slices) {
    if (slice.size() > 0) return *slice.begin() != kPartsTag;
  }
  return true;
}

// Answers by headers alone whoever may not call, and health; the others once their message is here,
// which is not asked for before. Lookup waits for nobody but an SSD and runs on gRPC's own threads,
// of which there may be two; Read may wait for peers, and the others are rare: they have threads.
class Service final : public grpc::CallbackGenericService {
 public:
  Service(const NodeServerOptions& options, NodeHandler* handler)
      : options_(options),
        handler_(handler),
        arrivals_(options.first_message),
        threads_(kThreads, ReportOf(options)),
        lookups_(kLookupThreads, ReportOf(options)) {}

  uint64_t refused() const { return refused_.load(); }
  void SetServing(bool serving) { serving_ = serving; }

  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override;

 private:
  friend class ServedCall;
  // Threads for calls that may wait; more such calls than these wait for one.
  static constexpr uint32_t kThreads = 64;
  // Threads for lookups, where they may wait for an SSD.
  static constexpr uint32_t kLookupThreads = 8;

  static TaskReport* ReportOf(const NodeServerOptions& options) {
    return (options.tasks == nullptr ? TaskBoard::OfProcess() : *options.tasks).Of("answers");
  }
  grpc::Status Admit(const grpc::ServerContextBase& context, Door door, Lane* lane) const;
  grpc::Status Take(Lane lane);
  void RunLookup(ServedCall* call);
  grpc::Status Answer(const std::string& method, const grpc::ServerContextBase& context,
                      grpc::ByteBuffer* question, grpc::ByteBuffer* answer);
  template <typename Request, typename Response, typename Ask>
  Status With(grpc::ByteBuffer* question, grpc::ByteBuffer* answer, const char* name,
              const Ask& ask);

  const NodeServerOptions options_;
  NodeHandler* const handler_;
  std::array<std::atomic<uint32_t>, kLanes> at_work_{};
  std::atomic<uint64_t> refused_{0};
  std::atomic<bool> serving_{false};
  WaitingCalls arrivals_;                   // calls whose message is on its way
  std::atomic<bool> looks_up_here_{false};  // a lookup runs on a thread of gRPC's
  // Last: they use the members above.
  CallThreads threads_;
  CallThreads lookups_;  // apart: reads wait for the lookups of peers
};

// One call; it deletes itself.
class ServedCall final : public grpc::ServerGenericBidiReactor {
 public:
  // Refused, or answered without a message.
  ServedCall(const grpc::Status& status, const std::optional<grpc::ByteBuffer>& answer) {
    if (answer) {
      answer_ = *answer;  // slices that are counted
      StartWriteAndFinish(&answer_, grpc::WriteOptions(), status);
    } else {
      Finish(status);
    }
  }
  // To be answered once its message is here. Requires: it has its place in `lane`.
  ServedCall(Service* service, grpc::GenericCallbackServerContext* context, Door door, Lane lane)
      : service_(service), context_(context), door_(door), lane_(lane) {
    service_->arrivals_.Enter(context, &arrival_);
    StartRead(&question_);
  }

  void OnReadDone(bool ok) override {
    service_->arrivals_.Leave(&arrival_);
    if (!ok) {
      Leave();
      Finish({grpc::StatusCode::CANCELLED, "no message came"});
      return;
    }
    if (door_ != Door::kLookup) {
      service_->threads_.Run([this] { Answer(); });
    } else if (!service_->options_.waits || IsBeat(question_)) {
      Answer();
    } else {
      service_->RunLookup(this);
    }
  }
  void OnDone() override { delete this; }

 private:
  friend class Service;
  void Answer() {
    const grpc::Status status =
        service_->Answer(context_->method(), *context_, &question_, &answer_);
    Leave();
    if (status.ok()) {
      StartWriteAndFinish(&answer_, grpc::WriteOptions(), status);
    } else {
      Finish(status);
    }
  }
  void Leave() { --service_->at_work_[static_cast<size_t>(lane_)]; }

  Service* service_ = nullptr;
  grpc::GenericCallbackServerContext* context_ = nullptr;
  Door door_ = Door::kLook;
  Lane lane_ = Lane::kLook;
  WaitingCalls::Place arrival_;
  grpc::ByteBuffer question_;
  grpc::ByteBuffer answer_;
};

// Without load no thread is woken; and one of gRPC's at most waits for an SSD that stalls.
void Service::RunLookup(ServedCall* call) {
  if (looks_up_here_.exchange(true)) return lookups_.Run([call] { call->Answer(); });
  call->Answer();
  looks_up_here_ = false;
}

grpc::ServerGenericBidiReactor* Service::CreateReactor(
    grpc::GenericCallbackServerContext* context) {
  const std::string& method = context->method();
  if (method == kHealthCheck) return new ServedCall(grpc::Status::OK, HealthAnswer(serving_));
  std::optional<Door> door;
  if (method.starts_with(kService)) {
    const std::string_view name = std::string_view(method).substr(kService.size());
    if (name == "Lookup") door = Door::kLookup;
    if (name == "Read") door = Door::kRead;
    if (name == "GetStatus" || name == "GetLoad" || name == "Explain") door = Door::kLook;
  }
  if (!door || handler_ == nullptr) {
    return new ServedCall({grpc::StatusCode::UNIMPLEMENTED, "there is no such call here"},
                          std::nullopt);
  }
  Lane lane = Lane::kLook;
  grpc::Status status = Admit(*context, *door, &lane);
  if (status.ok()) status = Take(lane);
  if (!status.ok()) {
    ++refused_;
    return new ServedCall(status, std::nullopt);
  }
  return new ServedCall(this, context, *door, lane);
}

// Who may not is told so before what it sent is looked at.
grpc::Status Service::Admit(const grpc::ServerContextBase& context, Door door, Lane* lane) const {
  *lane = LaneOf(door, false);
  const bool tokens = options_.tokens != nullptr && options_.tokens->asked();
  if (!tokens && !options_.credentials.tls()) return grpc::Status::OK;
  const auto given = context.client_metadata().find("authorization");
  if (tokens && given != context.client_metadata().end()) {
    if (options_.tokens->Knows({given->second.data(), given->second.size()})) {
      return grpc::Status::OK;
    }
    return {grpc::StatusCode::UNAUTHENTICATED, "token missing or wrong"};
  }
  const std::optional<Identity> who = IdentityOf(context.auth_context().get());
  if (!who) {
    return {grpc::StatusCode::UNAUTHENTICATED,
            tokens ? "token missing or wrong" : "the certificate says no role"};
  }
  if (!who->model.empty() && !options_.model.empty() && who->model != options_.model) {
    return {grpc::StatusCode::PERMISSION_DENIED, "this is a node of another model"};
  }
  *lane = LaneOf(door, who->role == "reader");
  if (MayPass(*who, door)) return grpc::Status::OK;
  return {grpc::StatusCode::PERMISSION_DENIED, "role " + who->role + " may not call this"};
}

// A place in a lane, until the call leaves it.
grpc::Status Service::Take(Lane lane) {
  const bool looks = lane == Lane::kLook || lane == Lane::kReaders;
  const uint32_t most = looks ? options_.max_looks : options_.max_calls;
  std::atomic<uint32_t>& at_work = at_work_[static_cast<size_t>(lane)];
  if (++at_work <= most) return grpc::Status::OK;
  --at_work;
  // Nobody else may come who would end those whose message never does.
  arrivals_.EndLate();
  return {grpc::StatusCode::RESOURCE_EXHAUSTED, std::to_string(most) + " calls are at work"};
}

template <typename Request, typename Response, typename Ask>
Status Service::With(grpc::ByteBuffer* question, grpc::ByteBuffer* answer, const char* name,
                     const Ask& ask) {
  Request request;
  if (!grpc::SerializationTraits<Request>::Deserialize(question, &request).ok()) {
    return {Code::kInvalidArgument, std::string("the message is no ") + name};
  }
  Response response;
  EMBERTIDE_RETURN_IF_ERROR(ask(request, &response));
  bool owned = false;
  if (!grpc::SerializationTraits<Response>::Serialize(response, answer, &owned).ok()) {
    return {Code::kResourceExhausted, "the answer is too large"};
  }
  return Status::Ok();
}

grpc::Status Service::Answer(const std::string& method, const grpc::ServerContextBase& context,
                             grpc::ByteBuffer* question, grpc::ByteBuffer* answer) {
  const std::string_view name = std::string_view(method).substr(kService.size());
  const auto run = [&]() -> Status {
    if (name == "Lookup") {
      return With<v1::LookupRequest, v1::LookupResponse>(
          question, answer, "LookupRequest",
          [&](const auto& request, auto* response) { return handler_->Lookup(request, response); });
    }
    if (name == "Read") {
      return With<v1::ReadRequest, v1::ReadResponse>(
          question, answer, "ReadRequest", [&](const auto& request, auto* response) {
            return handler_->Read(request, DeadlineOf(context), response);
          });
    }
    if (name == "GetStatus") {
      return With<v1::NodeServiceGetStatusRequest, v1::NodeServiceGetStatusResponse>(
          question, answer, "GetStatusRequest",
          [&](const auto&, auto* response) { return handler_->GetStatus(response); });
    }
    if (name == "GetLoad") {
      return With<v1::NodeServiceGetLoadRequest, v1::NodeServiceGetLoadResponse>(
          question, answer, "GetLoadRequest", [&](const auto& request, auto* response) {
            return handler_->GetLoad(request.hot_keys(), response);
          });
    }
    return With<v1::ExplainRequest, v1::ExplainResponse>(
        question, answer, "ExplainRequest",
        [&](const auto& request, auto* response) { return handler_->Explain(request, response); });
  };
  try {
    const Status status = run();
    return {CodeOf(status.code()), status.message()};
  } catch (const std::exception& error) {
    return {grpc::StatusCode::RESOURCE_EXHAUSTED, error.what()};
  }
}

}  // namespace

struct NodeServer::Impl {
  Impl(const NodeServerOptions& options, NodeHandler* handler)
      : service(options, handler), probes(options, nullptr) {}
  Service service;
  Service probes;  // answers health alone
  // A server and where its connections come in; null: probes ask `peers`.
  struct Port {
    std::unique_ptr<Doorway> doorway;
    std::unique_ptr<grpc::Server> server;
  };
  Port peers;
  Port health;
};

namespace {

// `what` cannot be done there.
Status CannotListen(const std::string& what, const Status& why) {
  return {why.code(), what + ": " + why.message() + "; end what listens there, or give another"};
}

}  // namespace

Result<std::unique_ptr<NodeServer>> NodeServer::Start(const NodeServerOptions& options,
                                                      NodeHandler* handler) {
  grpc::EnableDefaultHealthCheckService(false);
  auto impl = std::make_unique<Impl>(options, handler);
  const auto start = [&](const std::string& listen,
                         const std::shared_ptr<grpc::ServerCredentials>& credentials,
                         Service* service, grpc::ServerBuilder* builder, Impl::Port* port) {
    SetListenerBounds(builder);
    Result<std::unique_ptr<Doorway>> doorway =
        Doorway::Of({.listen = listen, .tasks = options.tasks}, credentials, builder);
    if (!doorway.ok()) return doorway.status();
    builder->RegisterCallbackGenericService(service);
    port->server = builder->BuildAndStart();
    if (port->server == nullptr) return Status(Code::kDeviceError, "gRPC starts no server");
    port->doorway = std::move(*doorway);
    port->doorway->Open();
    return Status::Ok();
  };
  grpc::ServerBuilder peers;
  peers.SetMaxReceiveMessageSize(kMaxRequestBytes);
  peers.SetMaxSendMessageSize(kMaxMessageBytes);
  grpc::ResourceQuota quota("embertide_node");
  peers.SetResourceQuota(quota.Resize(kMaxReceivedBytes));
  const Status started =
      start(options.listen, options.credentials.server(), &impl->service, &peers, &impl->peers);
  if (!started.ok()) return CannotListen("peers cannot be answered", started);
  if (!options.health_listen.empty()) {
    grpc::ServerBuilder health;
    health.SetMaxReceiveMessageSize(kMaxProbeBytes);
    grpc::ResourceQuota probes("embertide_health");
    health.SetResourceQuota(probes.Resize(kMaxProbesBytes));
    // Kubernetes' probes have no certificate.
    const Status probed = start(options.health_listen, grpc::InsecureServerCredentials(),
                                &impl->probes, &health, &impl->health);
    if (!probed.ok()) return CannotListen("probes cannot be answered", probed);
  }
  return std::unique_ptr<NodeServer>(new NodeServer(std::move(impl)));
}

NodeServer::NodeServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

NodeServer::~NodeServer() {
  const auto until = std::chrono::system_clock::now() + std::chrono::seconds(1);
  for (Impl::Port* port : {&impl_->health, &impl_->peers}) {
    if (port->server == nullptr) continue;
    port->doorway->Close();
    port->server->Shutdown(until);
    port->server->Wait();
  }
}

int NodeServer::port() const { return impl_->peers.doorway->port(); }

void NodeServer::SetServing(bool serving) {
  impl_->service.SetServing(serving);
  impl_->probes.SetServing(serving);
}

uint64_t NodeServer::refused() const { return impl_->service.refused(); }

}  // namespace embertide
