// Joining and leaving. What it answers is in answers.cc.
#include "node/fleet.h"

#include <arpa/inet.h>

#include <algorithm>
#include <optional>
#include <thread>

#include "access/address.h"
#include "base/thread_room.h"
#include "bus/chain.h"
#include "node/latency_meter.h"
#include "node/load_meter.h"

namespace embertide {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPeersFollow{2000};  // what peers get to reach a node that begins
constexpr int kMostFailing = 16;            // tasks that a beat names
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
  Result<RedisAddress> state = ParseRedisUrl(options.state);
  if (!state.ok()) return state.status();
  const std::optional<Address> peer = SplitAddress(options.peer_address);
  if (!peer || peer->host.empty()) {
    return {Code::kInvalidArgument,
            "peer_address \"" + options.peer_address + "\": give host:port, as peers reach it"};
  }
  const std::string listen =
      options.peer_listen.empty() ? options.peer_address : options.peer_listen;
  Result<Credentials> credentials = Credentials::Of(options.tls_folder);
  if (!credentials.ok()) return credentials.status();
  const bool here = IsOfThisMachine(listen) && AreOfThisMachine(options.control);
  if (!credentials.value().tls() && !here) {
    if (!options.plaintext) {
      return {
          Code::kInvalidArgument,
          "this node would speak plain text at " + listen +
              (options.control.empty() ? "" : " and with " + options.control) +
              ", where others can listen in: give a folder of certificates (tls_folder), or say "
              "plaintext on a network that nobody else listens to"};
    }
    if (options.log) options.log("PLAINTEXT: who listens on the network reads rows and tokens");
  }
  Result<std::shared_ptr<TokenFile>> tokens = TokenFile::Open(
      {.path = options.token_file, .examples = options.plaintext, .log = options.log});
  if (!tokens.ok()) return tokens.status();
  PeerPoolOptions pool;
  pool.name = options.name;
  pool.tokens = tokens.value();
  pool.credentials = credentials.value();
  pool.tasks = &state_->tasks();
  plan_ = std::make_unique<PlanKeeper>(
      state_, std::move(*state), [this](const Routing& routing) { SetPeers(routing); },
      [this] {
        if (control_ != nullptr) control_->BeatNow();
      });
  peers_ = std::make_unique<PeerPool>(
      std::move(pool), [this] { return Range(); }, [this] { return plan_->epoch(); });
  mover_ = std::make_unique<BucketMover>(
      state_, peers_.get(), [this] { return routing(); },
      [this] {
        if (control_ != nullptr) control_->BeatNow();
      });
  HotRows::Options hot;
  hot.bytes = options.hot_rows_bytes;
  hot.tasks = &state_->tasks();
  hot.routing = [this] { return routing(); };
  // With a guard, ordinary requests see no version before it is promoted.
  hot.served = [this]() -> HotRows::Version {
    if (!serving_) return {};
    const Result<ReadView> view = state_->PinServed();
    const auto served = view.ok() ? state_->InfoOf(view.value().version()) : nullptr;
    return served == nullptr ? HotRows::Version()
                             : HotRows::Version{served->number, served->lineage};
  };
  hot_ = std::make_unique<HotRows>(state_->manifest(), peers_.get(), std::move(hot));
  peers_->TellNews([this] { hot_->Wake(); });
  NodeServerOptions answering;
  answering.listen = listen;
  answering.health_listen = options.health_listen;
  answering.tokens = tokens.value();
  answering.credentials = credentials.value();
  answering.model = state_->manifest().model;
  answering.tasks = &state_->tasks();
  answering.waits = options.ssd_budget_bytes > 0;
  Result<std::unique_ptr<NodeServer>> server = NodeServer::Start(answering, this);
  if (!server.ok()) return server.status();
  server_ = std::move(*server);
  server_->SetServing(false);
  const std::string before_port =
      options.peer_address.substr(0, options.peer_address.size() - peer->port.size());
  address_ = options.peer_listen.empty() ? before_port + std::to_string(server_->port())
                                         : options.peer_address;
  started_ = true;

  if (!options.control.empty()) {
    v1::RegisterNodeRequest registration;
    *registration.mutable_node() = Self();
    registration.set_model(state_->manifest().model);
    registration.set_schema_id(state_->manifest().schema_id);
    std::vector<const TableConfig*> tables;
    tables.reserve(state_->manifest().tables.size());
    for (const TableConfig& table : state_->manifest().tables) tables.push_back(&table);
    std::ranges::sort(tables, {}, &TableConfig::id);
    std::map<std::string, uint64_t> bytes;
    for (const BucketFileInfo& bucket : state_->manifest().buckets) {
      bytes[bucket.table] += bucket.bytes;
    }
    for (const TableConfig* table : tables) {
      registration.add_table_bytes(bytes[table->name]);
      v1::PlannedTable* planned = registration.add_tables();
      planned->set_id(table->id);
      planned->set_name(table->name);
      planned->set_bucket_bits(table->bucket_bits);
      planned->set_chunks(table->layout.chunks);
    }
    ControlLinkOptions link;
    link.address = options.control;
    link.tokens = tokens.value();
    link.credentials = credentials.value();
    link.tasks = &state_->tasks();
    control_ = std::make_unique<ControlLink>(std::move(link), std::move(registration),
                                             [this](v1::HeartbeatRequest* beat) { Beat(beat); });
  }
  return plan_->Start([this] { return control_ == nullptr ? "" : control_->refusal(); });
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
    const MutexLock lock(mutex_);
    serving_ = true;
    server_->SetServing(ready_);
  }
  peers_->BeatNow();
  if (control_ != nullptr) control_->BeatNow();
}

void Fleet::SetReady(bool ready) {
  const MutexLock lock(mutex_);
  ready_ = ready;
  if (serving_) server_->SetServing(ready);
}

void Fleet::Leave() {
  serving_ = false;
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

// --- versions ------------------------------------------------------------------------------------

v1::VersionRange Fleet::Range() const {
  v1::VersionRange range;
  if (!serving_) return range;
  const Store::Window window = state_->store().window();
  const auto newest = state_->InfoOf(window.newest);
  if (newest == nullptr) return range;
  const auto oldest = state_->InfoOf(window.oldest);
  range.mutable_newest()->set_number(newest->number);
  range.mutable_newest()->set_lineage(newest->lineage);
  range.mutable_oldest()->set_number(window.oldest);
  range.mutable_oldest()->set_lineage(oldest == nullptr ? 0 : oldest->lineage);
  return range;
}

Result<Pinned> Fleet::Pin() {
  Result<Pinned> pinned = state_->Pin([this](uint64_t served) { return PinnableVersion(served); });
  if (pinned.ok()) NotePin(pinned->info->number);
  return pinned;
}

uint64_t Fleet::PinnableVersion(uint64_t newest) const {
  const std::vector<PeerPool::Range> peers = peers_->LiveRanges();
  const auto known = state_->versions();
  const auto holders_of = [&](const VersionInfo& info) {
    return static_cast<size_t>(std::ranges::count_if(
        peers, [&](const auto& range) { return range.Has(info.number, info.lineage); }));
  };
  const auto last = known->find(newest);
  if (last == known->end() || holders_of(*last->second) == peers.size()) return newest;
  const uint64_t oldest = state_->store().window().oldest;
  const uint64_t floor = std::min(floor_.load(), newest);
  uint64_t best = newest;
  size_t most = 0;
  for (auto at = known->lower_bound(std::max(floor, oldest)); at != std::next(last); ++at) {
    const size_t holders = holders_of(*at->second);
    if (holders < most) continue;
    most = holders;
    best = at->first;
  }
  return best;
}

void Fleet::NotePin(uint64_t version) {
  uint64_t floor = floor_;
  while (floor < version && !floor_.compare_exchange_weak(floor, version)) {
  }
}

bool Fleet::IsBehindPeers() const {
  const std::vector<PeerPool::Range> peers = peers_->LiveRanges();
  const uint64_t newest = state_->newest()->number;
  const auto ahead = [newest](const PeerPool::Range& range) { return range.oldest > newest; };
  return 2 * static_cast<size_t>(std::ranges::count_if(peers, ahead)) > peers.size();
}

void Fleet::Committed() {
  peers_->BeatNow();
  hot_->Wake();
}

std::unique_ptr<RemoteLookup> Fleet::NewRemoteLookup() {
  return std::make_unique<RemoteLookup>(
      state_->store(), state_->manifest(), peers_.get(), hot_.get(),
      RemoteLookup::Options{
          state_->options().max_degraded_share, state_->options().peer_timeout,
          [this] {
            const Result<ReadView> view = state_->PinServed();
            return view.ok() ? PinnableVersion(view.value().version()) : 0;
          },
          [this] { return routing(); },
          [this](uint64_t epoch, uint64_t version) { return mover_->Holds(epoch, version); },
          state_->load()},
      &remote_stats_);
}

// --- the control plane ---------------------------------------------------------------------------

v1::Node Fleet::Self() const {
  const NodeOptions& options = state_->options();
  v1::Node node;
  node.set_name(options.name);
  node.set_address(address_);
  node.set_group(options.group);
  for (uint32_t d = 0; d < options.devices; ++d) {
    v1::Device* device = node.add_devices();
    device->set_index(d);
    device->set_kind(v1::DEVICE_KIND_CPU);
    v1::TierBudget* ddr = device->add_budgets();
    ddr->set_tier(v1::TIER_DDR);
    ddr->set_budget_bytes(options.ddr_budget_bytes / options.devices);
    if (options.ssd_budget_bytes == 0) continue;
    v1::TierBudget* ssd = device->add_budgets();
    ssd->set_tier(v1::TIER_SSD);
    ssd->set_budget_bytes(options.ssd_budget_bytes / options.devices);
  }
  return node;
}

void Fleet::Beat(v1::HeartbeatRequest* beat) {
  *beat->mutable_versions() = Range();
  beat->set_plan_epoch(plan_->epoch());
  if (state_->versions() != nullptr) beat->set_staleness_ms(StalenessMs(*state_->served()));
  const BucketMover::Progress& moved = mover_->progress();
  if (serving_) {
    beat->set_held_epoch(moved.held_epoch);
    beat->set_held_since(moved.held_since);
  }
  beat->set_buckets_left(moved.left);
  beat->set_full(moved.full);
  for (const TaskHealth& task : state_->AllTasks()) {
    if (task.failing && beat->failing_size() < kMostFailing) FillTask(task, beat->add_failing());
  }
  beat->set_p99_us(state_->latency()->P99Us());
}

FleetStats Fleet::stats() const {
  FleetStats stats;
  stats.remote_keys = remote_stats_.keys;
  const HotStats& hot = hot_->stats();
  stats.hot_reads = hot.reads;
  stats.hot_stale = hot.stale;
  stats.hot_entered = hot.entered;
  stats.hot_left = hot.left;
  stats.hot_unchanged = hot.unchanged;
  stats.hot_changed = hot.changed;
  stats.hot_failed = hot.failed;
  stats.hot_dropped = hot.dropped;
  stats.hot_clipped = hot.clipped;
  stats.hot_rows = hot.rows;
  stats.hot_bytes = hot.bytes;
  stats.next_owners = remote_stats_.next_owners;
  std::ranges::copy(remote_stats_.degraded_keys, stats.degraded_keys.begin());
  stats.started_over = remote_stats_.version_gone + remote_stats_.not_owner;
  stats.remote_calls = peers_->stats().calls;
  stats.peer_failures = peers_->stats().failed;
  stats.peer_deaths = peers_->stats().deaths;
  stats.redials = peers_->stats().redials;
  stats.refused_calls = server_ == nullptr ? 0 : server_->refused();
  stats.refused_plans = plan_->refused_plans();
  const BucketMover::Progress& moved = mover_->progress();
  stats.refused_shares = moved.refused_shares;
  stats.buckets_added = moved.added;
  stats.buckets_dropped = moved.dropped;
  stats.failed_adds = moved.failed_adds;
  stats.peers_alive = peers_->Alive();
  stats.buckets_held = moved.held;
  stats.buckets_left = moved.left;
  return stats;
}

}  // namespace embertide
