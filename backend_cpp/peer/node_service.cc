// The server: callback API, so that no thread waits for a call.
#include "peer/node_service.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <atomic>
#include <chrono>
#include <optional>

#include "embertide/v1/node.grpc.pb.h"
#include "peer/identity.h"
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
Deadline DeadlineOf(const grpc::ServerContext& context) {
  const auto left = context.deadline() - std::chrono::system_clock::now();
  return left > std::chrono::hours(24) ? kNoDeadline : DeadlineAfter(left);
}

// What a call is for, and so who may make it.
enum class Door : uint8_t { kLookup, kRead, kLook };

bool MayPass(const Identity& who, Door door) {
  if (who.role == "node") return true;
  if (who.role == "operator") return door != Door::kLookup;
  return door == Door::kLook && (who.role == "reader" || who.role == "control");
}

// Lookup waits for nobody and runs on gRPC's own threads; Read may wait for peers, and the others
// are rare: they have a pool. A LookupRequest is parsed once its token was found right; gRPC has
// parsed those of the others, which are at most kMaxRequestBytes, before a method is called.
class Service final
    : public v1::NodeService::WithRawCallbackMethod_Lookup<v1::NodeService::Service> {
 public:
  Service(const NodeServerOptions& options, NodeHandler* handler)
      : options_(options), handler_(handler) {}

  uint64_t refused() const { return refused_.load(); }

  grpc::ServerUnaryReactor* Lookup(grpc::CallbackServerContext* context,
                                   const grpc::ByteBuffer* question,
                                   grpc::ByteBuffer* answer) override {
    auto* reactor = context->DefaultReactor();
    reactor->Finish(
        Guarded(*context, Door::kLookup, [&] { return AnswerLookup(*question, answer); }));
    return reactor;
  }
  grpc::Status Read(grpc::ServerContext* context, const v1::ReadRequest* request,
                    v1::ReadResponse* response) override {
    return Guarded(*context, Door::kRead,
                   [&] { return handler_->Read(*request, DeadlineOf(*context), response); });
  }
  grpc::Status GetStatus(grpc::ServerContext* context, const v1::NodeServiceGetStatusRequest*,
                         v1::NodeServiceGetStatusResponse* response) override {
    return Guarded(*context, Door::kLook, [&] { return handler_->GetStatus(response); });
  }
  grpc::Status GetLoad(grpc::ServerContext* context, const v1::NodeServiceGetLoadRequest* request,
                       v1::NodeServiceGetLoadResponse* response) override {
    return Guarded(*context, Door::kLook,
                   [&] { return handler_->GetLoad(request->hot_keys(), response); });
  }
  grpc::Status Explain(grpc::ServerContext* context, const v1::ExplainRequest* request,
                       v1::ExplainResponse* response) override {
    return Guarded(*context, Door::kLook, [&] { return handler_->Explain(*request, response); });
  }

 private:
  Status AnswerLookup(grpc::ByteBuffer question, grpc::ByteBuffer* answer) {
    v1::LookupRequest request;
    if (!grpc::SerializationTraits<v1::LookupRequest>::Deserialize(&question, &request).ok()) {
      return {Code::kInvalidArgument, "the message is no LookupRequest"};
    }
    v1::LookupResponse response;
    EMBERTIDE_RETURN_IF_ERROR(handler_->Lookup(request, &response));
    bool owned = false;
    if (!grpc::SerializationTraits<v1::LookupResponse>::Serialize(response, answer, &owned).ok()) {
      return {Code::kResourceExhausted, "the answer is too large"};
    }
    return Status::Ok();
  }

  // Who may not is told so before what it sent is looked at.
  grpc::Status Admit(const grpc::ServerContextBase& context, Door door) const {
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
    if (MayPass(*who, door)) return grpc::Status::OK;
    return {grpc::StatusCode::PERMISSION_DENIED, "role " + who->role + " may not call this"};
  }

  template <typename Call>
  grpc::Status Guarded(const grpc::ServerContextBase& context, Door door, const Call& call) {
    if (grpc::Status admitted = Admit(context, door); !admitted.ok()) {
      ++refused_;
      return admitted;
    }
    const bool looks = door == Door::kLook;
    const AtWork at_work(looks ? &looking_ : &at_work_);
    const uint32_t most = looks ? options_.max_looks : options_.max_calls;
    if (at_work.count > most) {
      ++refused_;
      return {grpc::StatusCode::RESOURCE_EXHAUSTED, std::to_string(most) + " calls are at work"};
    }
    try {
      const Status status = call();
      return {CodeOf(status.code()), status.message()};
    } catch (const std::exception& error) {
      return {grpc::StatusCode::RESOURCE_EXHAUSTED, error.what()};
    }
  }

  struct AtWork {
    explicit AtWork(std::atomic<uint32_t>* counter) : of(counter), count(++*counter) {}
    ~AtWork() { --*of; }
    AtWork(const AtWork&) = delete;
    AtWork& operator=(const AtWork&) = delete;
    std::atomic<uint32_t>* of;
    uint32_t count;
  };

  const NodeServerOptions options_;
  NodeHandler* handler_;
  std::atomic<uint32_t> at_work_{0};
  std::atomic<uint32_t> looking_{0};
  std::atomic<uint64_t> refused_{0};
};

}  // namespace

struct NodeServer::Impl {
  Impl(const NodeServerOptions& options, NodeHandler* handler) : service(options, handler) {}
  Service service;
  int port = 0;
  std::unique_ptr<grpc::Server> server;
  grpc::CallbackGenericService others;   // UNIMPLEMENTED for all that is not health
  std::unique_ptr<grpc::Server> health;  // null: probes ask `server`
};

Status CannotListen(const std::string& what, const std::string& address) {
  return {Code::kDeviceError, what + address + ": the address is in use or not of this machine"};
}

// Kubernetes' probes have no certificate.
Result<std::unique_ptr<grpc::Server>> StartHealth(const std::string& listen,
                                                  grpc::CallbackGenericService* others) {
  int port = 0;
  grpc::ServerBuilder builder;
  builder.RegisterCallbackGenericService(others);
  builder.AddListeningPort(listen, grpc::InsecureServerCredentials(), &port);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreams);
  builder.SetMaxReceiveMessageSize(kMaxProbeBytes);
  grpc::ResourceQuota quota("embertide_health");
  builder.SetResourceQuota(quota.Resize(kMaxProbesBytes));
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr || port == 0) return CannotListen("probes cannot be answered at ", listen);
  return server;
}

Result<std::unique_ptr<NodeServer>> NodeServer::Start(const NodeServerOptions& options,
                                                      NodeHandler* handler) {
  grpc::EnableDefaultHealthCheckService(true);
  auto impl = std::make_unique<Impl>(options, handler);
  grpc::ServerBuilder builder;
  builder.AddListeningPort(options.listen, options.credentials.server(), &impl->port);
  // A connection that never says anything, and one that would have as many calls as it likes.
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMs);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreams);
  // Two processes on one port would each get a part of the calls.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // Else who was let in once would be for ever, whatever became of his certificate.
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, kMaxConnectionAgeMs);
  builder.SetMaxReceiveMessageSize(kMaxRequestBytes);
  builder.SetMaxSendMessageSize(kMaxMessageBytes);
  grpc::ResourceQuota quota("embertide_node");
  builder.SetResourceQuota(quota.Resize(kMaxReceivedBytes));
  builder.RegisterService(&impl->service);
  impl->server = builder.BuildAndStart();
  if (impl->server == nullptr || impl->port == 0) {
    return CannotListen("peers cannot be answered at ", options.listen);
  }
  if (!options.health_listen.empty()) {
    Result<std::unique_ptr<grpc::Server>> health =
        StartHealth(options.health_listen, &impl->others);
    if (!health.ok()) return health.status();
    impl->health = std::move(*health);
  }
  return std::unique_ptr<NodeServer>(new NodeServer(std::move(impl)));
}

NodeServer::NodeServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

NodeServer::~NodeServer() {
  const auto until = std::chrono::system_clock::now() + std::chrono::seconds(1);
  for (grpc::Server* server : {impl_->health.get(), impl_->server.get()}) {
    if (server == nullptr) continue;
    server->Shutdown(until);
    server->Wait();
  }
}

int NodeServer::port() const { return impl_->port; }

void NodeServer::SetServing(bool serving) {
  impl_->server->GetHealthCheckService()->SetServingStatus(serving);
  if (impl_->health != nullptr) impl_->health->GetHealthCheckService()->SetServingStatus(serving);
}

uint64_t NodeServer::refused() const { return impl_->service.refused(); }

}  // namespace embertide
