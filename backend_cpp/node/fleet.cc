// Making the parts of a node that is one of several, and ending them in order.
#include "node/fleet.h"

#include <arpa/inet.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "access/address.h"
#include "base/thread_room.h"
#include "node/load_meter.h"
#include "node/routing.h"

namespace embertide {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPeersFollow{2000};  // what peers get to reach a node that begins
// Threads that gRPC starts by itself: of completion queues and of its pool, as many as it takes for
// so many cores, and for timers, names and connections.
constexpr size_t kGrpcThreads = 6;
constexpr size_t kGrpcPools = 2;

// Whether nobody but this machine reaches an address, host:port.
bool IsOfThisMachine(const std::string& address) {
  const std::optional<Address> split = SplitAddress(address);
  const std::string host = split ? split->host : address;
  in_addr number{};
  return host == "localhost" || host == "::1" ||
         (::inet_pton(AF_INET, host.c_str(), &number) == 1 && ntohl(number.s_addr) >> 24 == 127);
}

bool AreOfThisMachine(const std::string& addresses) {
  for (size_t begin = 0; begin < addresses.size();) {
    const size_t end = std::min(addresses.find(',', begin), addresses.size());
    if (!IsOfThisMachine(addresses.substr(begin, end - begin))) return false;
    begin = end + 1;
  }
  return true;
}

}  // namespace

Fleet::Fleet(NodeState* state) : state_(state) {}

Result<std::unique_ptr<Fleet>> Fleet::Join(NodeState* state) {
  std::unique_ptr<Fleet> fleet(new Fleet(state));
  EMBERTIDE_RETURN_IF_ERROR(fleet->Start());
  return fleet;
}

Status Fleet::Start() {
  const NodeOptions& options = state_->options();
  // gRPC goes on without a thread that it cannot start, and never tries again: such a node would
  // answer nobody, and not end either.
  const size_t cores = std::clamp<size_t>(std::thread::hardware_concurrency(), 2, 16);
  EMBERTIDE_RETURN_IF_ERROR(CheckThreadRoom(kGrpcThreads + kGrpcPools * cores, "gRPC"));
  if (options.publication.empty()) {
    return {Code::kInvalidArgument,
            "a node with `state` needs `publication`: buckets that come to "
            "it are read from there"};
  }
  if (options.peer_address.empty()) {
    return {Code::kInvalidArgument, "a node with `state` needs `peer_address`, host:port"};
  }
  Result<RedisAddress> redis_address = ParseRedisUrl(options.state);
  if (!redis_address.ok()) return redis_address.status();
  Result<Access> access = OpenAccess();
  if (!access.ok()) return access.status();
  MakeParts(std::move(*redis_address), *access);
  EMBERTIDE_RETURN_IF_ERROR(Listen(*access));
  if (!options.control.empty()) Register(*access);
  return plan_->Start([this] { return control_ == nullptr ? "" : control_->refusal(); });
}

Result<Fleet::Access> Fleet::OpenAccess() const {
  const NodeOptions& options = state_->options();
  const std::optional<Address> peer = SplitAddress(options.peer_address);
  if (!peer || peer->host.empty()) {
    return Status(Code::kInvalidArgument, "peer_address \"" + options.peer_address +
                                              "\": give host:port, as peers reach it");
  }
  std::string listen = options.peer_listen.empty() ? options.peer_address : options.peer_listen;
  Result<Credentials> credentials = Credentials::Of(options.tls_folder);
  if (!credentials.ok()) return credentials.status();
  const bool here = IsOfThisMachine(listen) && AreOfThisMachine(options.control);
  if (!credentials.value().tls() && !here) {
    if (!options.plaintext) {
      return Status(
          Code::kInvalidArgument,
          "this node would speak plain text at " + listen +
              (options.control.empty() ? "" : " and with " + options.control) +
              ", where others can listen in: give a folder of certificates (tls_folder), or say "
              "plaintext on a network that nobody else listens to");
    }
    if (options.log) options.log("PLAINTEXT: who listens on the network reads rows and tokens");
  }
  Result<std::shared_ptr<TokenFile>> tokens = TokenFile::Open(
      {.path = options.token_file, .examples = options.plaintext, .log = options.log});
  if (!tokens.ok()) return tokens.status();
  return Access{std::move(listen), std::move(*credentials), std::move(*tokens)};
}

void Fleet::MakeParts(RedisAddress redis_address, const Access& access) {
  const NodeOptions& options = state_->options();
  plan_ = std::make_unique<PlanKeeper>(
      state_, std::move(redis_address), [this](const Routing& routing) { SetPeers(routing); },
      [this] { BeatNow(); });
  versions_ = std::make_unique<CommonVersions>(state_, [this] { return peers_->LiveRanges(); });
  PeerPoolOptions pool;
  pool.name = options.node;
  pool.tokens = access.tokens;
  pool.credentials = access.credentials;
  pool.tasks = &state_->tasks();
  peers_ = std::make_unique<PeerPool>(
      std::move(pool), [this] { return versions_->Range(); }, [this] { return plan_->epoch(); });
  mover_ = std::make_unique<BucketMover>(
      state_, peers_.get(), [this] { return plan_->routing(); }, [this] { BeatNow(); });
  HotRows::Options hot;
  hot.bytes = options.hot_rows_bytes;
  hot.tasks = &state_->tasks();
  hot.routing = [this] { return plan_->routing(); };
  // With a guard, ordinary requests see no version before it is promoted.
  hot.served = [this]() -> HotRows::Version {
    if (!versions_->serving()) return {};
    const Result<ReadView> view = state_->PinServed();
    const auto served = view.ok() ? state_->InfoOf(view.value().version()) : nullptr;
    return served == nullptr ? HotRows::Version()
                             : HotRows::Version{served->number, served->lineage};
  };
  hot_ = std::make_unique<HotRows>(state_->manifest(), peers_.get(), std::move(hot));
  peers_->TellNews([this] { hot_->Wake(); });
  report_ = std::make_unique<NodeReport>(NodeReport::Sources{
      .state = state_,
      .plan = plan_.get(),
      .versions = versions_.get(),
      .mover = mover_.get(),
      .peers = peers_.get(),
      .hot = &hot_->stats(),
      .remote = &remote_stats_,
      .refused_calls = [this] { return server_ == nullptr ? 0 : server_->refused(); },
  });
  answers_ = std::make_unique<Answers>(Answers::Parts{
      .state = state_,
      .plan = plan_.get(),
      .versions = versions_.get(),
      .peers = peers_.get(),
      .report = report_.get(),
      .new_remote_lookup = [this] { return NewRemoteLookup(); },
  });
}

// Calls come from here on.
Status Fleet::Listen(const Access& access) {
  const NodeOptions& options = state_->options();
  NodeServerOptions answering;
  answering.listen = access.listen;
  answering.health_listen = options.health_listen;
  answering.tokens = access.tokens;
  answering.credentials = access.credentials;
  answering.model = state_->manifest().model;
  answering.tasks = &state_->tasks();
  answering.waits = options.ssd_budget_bytes > 0;
  Result<std::unique_ptr<NodeServer>> server = NodeServer::Start(answering, answers_.get());
  if (!server.ok()) return server.status();
  server_ = std::move(*server);
  server_->SetServing(false);
  const std::string& address = options.peer_address;
  report_->SetAddress(options.peer_listen.empty() ? address.substr(0, address.rfind(':') + 1) +
                                                        std::to_string(server_->port())
                                                  : address);
  return Status::Ok();
}

void Fleet::Register(const Access& access) {
  ControlLinkOptions link;
  link.address = state_->options().control;
  link.tokens = access.tokens;
  link.credentials = access.credentials;
  link.tasks = &state_->tasks();
  control_ =
      std::make_unique<ControlLink>(std::move(link), report_->Registration(),
                                    [this](v1::HeartbeatRequest* beat) { report_->Beat(beat); });
}

void Fleet::BeatNow() {
  if (control_ != nullptr) control_->BeatNow();
}

void Fleet::SetPeers(const Routing& routing) {
  std::vector<PeerPool::Address> peers;
  peers.reserve(routing.peers.size());
  for (const Routing::Peer& peer : routing.peers) {
    peers.push_back({peer.name, peer.address, peer.spare});
  }
  peers_->SetPeers(peers);
}

void Fleet::Serve() {
  const auto until = std::chrono::steady_clock::now() + kPeersFollow;
  while (!peers_->HaveReached(state_->store().window().oldest) &&
         std::chrono::steady_clock::now() < until && !state_->options().stop.stop_requested()) {
    std::this_thread::sleep_for(milliseconds(5));
  }
  {
    const MutexLock lock(ready_mutex_);
    versions_->SetServing(true);
    server_->SetServing(ready_);
  }
  peers_->BeatNow();
  BeatNow();
}

void Fleet::SetReady(bool ready) {
  const MutexLock lock(ready_mutex_);
  ready_ = ready;
  if (versions_->serving()) server_->SetServing(ready);
}

void Fleet::Leave() {
  if (versions_ != nullptr) versions_->SetServing(false);
  if (server_ != nullptr) server_->SetServing(false);
}

// Who calls ends before what is called.
Fleet::~Fleet() {
  Leave();
  if (plan_ != nullptr) plan_->Stop();
  control_.reset();
  server_.reset();
  if (peers_ != nullptr) peers_->TellNews(nullptr);
  hot_.reset();
  peers_.reset();
}

std::string Fleet::error() const {
  std::string bucket_error = mover_->bucket_error();
  if (!bucket_error.empty()) return bucket_error;
  std::string plan_error = plan_->error();
  return plan_error.empty() ? mover_->share_error() : plan_error;
}

void Fleet::Committed() {
  peers_->BeatNow();
  hot_->Wake();
}

std::unique_ptr<RemoteLookup> Fleet::NewRemoteLookup() {
  RemoteLookup::Options options;
  options.max_degraded_share = state_->options().max_degraded_share;
  options.peer_timeout = state_->options().peer_timeout;
  options.pinnable = [this] { return versions_->PinnableNow(); };
  options.routing = [this] { return plan_->routing(); };
  options.holds = [this](uint64_t epoch, uint64_t version) {
    return mover_->Holds(epoch, version);
  };
  options.observer = state_->load();
  return std::make_unique<RemoteLookup>(state_->store(), state_->manifest(), peers_.get(),
                                        hot_.get(), std::move(options), &remote_stats_);
}

}  // namespace embertide
