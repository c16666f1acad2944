// Node: loading a snapshot into a store, and the worker that maintains it.
#include "embertide/node.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <span>
#include <stop_token>
#include <utility>

#include "base/background_task.h"
#include "base/file.h"
#include "base/sleep.h"
#include "bus/chain.h"
#include "embertide/numa.h"
#include "embertide/v1/update.pb.h"
#include "node/fleet.h"
#include "node/former_layouts.h"
#include "node/latency_meter.h"
#include "node/load_meter.h"
#include "node/made_columns.h"
#include "node/mending.h"
#include "node/node_state.h"
#include "node/readiness.h"
#include "node/recovery.h"
#include "node/remote.h"
#include "node/served_reduced.h"
#include "node/version_gate.h"
#include "node/warm_up.h"

namespace embertide {
namespace {

// How often the worker promotes, evicts and frees; a millisecond of work at most each time.
constexpr std::chrono::milliseconds kMaintainEvery{10};
constexpr std::chrono::milliseconds kLookAtSsd{500};
constexpr size_t kSnapshotsTried = 4;  // of a publication, at a start

Status Ending() { return {Code::kUnavailable, "the node is ending"}; }

Result<Pooling> ParsePooling(const std::string& name) {
  if (name == "sum") return Pooling::kSum;
  if (name == "mean") return Pooling::kMean;
  if (name == "none") return Pooling::kNone;
  return Status(Code::kInvalidArgument, "pooling \"" + name + "\"; use sum, mean or none");
}

Result<std::vector<Feature>> ResolveFeatures(const Manifest& manifest) {
  std::map<std::string, uint32_t> tables;
  for (uint32_t t = 0; t < manifest.tables.size(); ++t) tables[manifest.tables[t].name] = t;
  std::vector<Feature> features;
  for (const FeatureConfig& config : manifest.features) {
    const auto table = tables.find(config.table);
    if (table == tables.end()) {
      return Status(Code::kCorrupt, "feature \"" + config.name + "\" names table \"" +
                                        config.table + "\", which the manifest does not have");
    }
    if (manifest.tables[table->second].layout.is_keys()) {
      return Status(Code::kCorrupt, "feature \"" + config.name + "\" names table \"" +
                                        config.table + "\", whose rows are keys and no values");
    }
    const Result<Pooling> pooling = ParsePooling(config.pooling);
    if (!pooling.ok()) return pooling.status();
    features.push_back({config.name, table->second, manifest.tables[table->second].layout.dim(),
                        pooling.value(), config.weighed});
  }
  if (features.empty()) return Status(Code::kCorrupt, "the manifest has no feature");
  return features;
}

// The version of a snapshot. Older snapshots do not say when it was committed; its delta does, as
// long as that is kept.
VersionInfo SnapshotVersion(const std::string& publication, const Manifest& manifest) {
  VersionInfo info = VersionInfoOf(manifest);
  if (info.committed_ms > 0 || publication.empty()) return info;
  const Result<v1::CommitFile> commit = ReadCommitFile(publication, {info.number, info.lineage});
  if (commit.ok()) info.committed_ms = commit.value().commit().committed_ms();
  return info;
}

// The one dense file of a role.
Result<DenseFileInfo> DenseFile(const Manifest& manifest, const std::string& role) {
  for (const DenseFileInfo& file : manifest.dense) {
    if (file.role == role) return file;
  }
  return Status(Code::kRejected, "the snapshot has no dense " + role +
                                     ": it serves kind lookup only, or must be published with one");
}

}  // namespace

Result<std::unique_ptr<Node>> Node::Open(NodeOptions options) {
  Promotion promotion;
  if (options.guard) {
    if (options.publication.empty() || options.window_versions < 2) {
      return Status(Code::kInvalidArgument,
                    "a guard needs a publication, and a window of 2 versions or more");
    }
    Result<Promotion> read = ReadPromotion(options.publication);
    if (!read.ok()) return read.status();
    promotion = std::move(*read);
  }
  if (!options.snapshot.empty()) return OpenSnapshot(options, promotion);
  Status failure = Status::Ok();
  std::set<std::string> tried;
  while (tried.size() < kSnapshotsTried) {
    const auto listed = SnapshotsToTry(options.publication, promotion, options.first_version);
    if (!listed.ok()) return listed.status();
    const std::vector<std::string>& paths = listed.value();
    const auto next =
        std::ranges::find_if(paths, [&](const auto& path) { return !tried.contains(path); });
    if (next == paths.end()) break;
    tried.insert(*next);
    options.snapshot = *next;
    Result<std::unique_ptr<Node>> node = OpenSnapshot(options, promotion);
    if (node.ok()) return node;
    failure = node.status();
    if (failure.code() != Code::kCorrupt && failure.code() != Code::kNotFound) break;
    if (options.log) options.log(*next + " is passed over: " + failure.ToString());
  }
  return failure;
}

Result<std::unique_ptr<Node>> Node::OpenSnapshot(const NodeOptions& options,
                                                 const Promotion& promotion) {
  Result<Manifest> manifest = ReadManifest(options.snapshot);
  if (!manifest.ok()) return manifest.status();
  if (manifest->version == 0) return Status(Code::kCorrupt, "manifest.json: version is 0");
  Result<std::vector<Feature>> features = ResolveFeatures(*manifest);
  if (!features.ok()) return features.status();
  Result<MadeColumns> made_columns = MadeColumns::Resolve(*manifest);
  if (!made_columns.ok()) return made_columns.status();
  Result<FormerLayouts> former = FormerLayouts::Resolve(*manifest, *made_columns);
  if (!former.ok()) return former.status();
  StoreOptions store_options;
  store_options.tables = manifest->tables;
  store_options.devices = options.devices;
  Result<std::vector<uint32_t>> numa_nodes = ParseNumaNodes(options.numa_nodes);
  if (!numa_nodes.ok()) return numa_nodes.status();
  store_options.numa_nodes = std::move(*numa_nodes);
  store_options.ddr_budget_bytes = options.ddr_budget_bytes;
  store_options.ssd_budget_bytes = options.ssd_budget_bytes;
  store_options.ssd_directory = options.ssd_directory;
  store_options.hbm_budget_bytes = options.hbm_budget_bytes;
  store_options.hbm_devices = options.hbm_devices;
  store_options.hbm_kind = options.hbm_kind;
  store_options.hbm_policy = options.hbm_policy;
  store_options.ddr_policy = options.ddr_policy;
  store_options.table_budgets = options.table_budgets;
  store_options.index = options.index;
  store_options.ssd_engine = options.ssd_engine;
  store_options.ssd_compaction_bytes_per_s = options.ssd_compaction_bytes_per_s;
  store_options.window_versions = options.window_versions;
  store_options.hold_all = options.state.empty();
  std::unique_ptr<LoadMeter> load;
  if (!options.state.empty()) load = std::make_unique<LoadMeter>(manifest->tables);
  store_options.observer = load.get();
  const bool seals = options.ssd_budget_bytes > 0 && options.ssd_seal_interval.count() > 0;
  std::unique_ptr<Node> node(new Node());
  std::optional<Recovered> recovered;
  if (seals) {
    auto opened = OpenFromSeal(options, *manifest, store_options);
    if (opened.ok()) recovered = std::move(*opened);
    if (!opened.ok()) node->seal_refusal_ = opened.status().ToString();
    if (recovered && options.guard && promotion.promoted > 0 &&
        !promotion.MaySee(recovered->version.number)) {
      node->seal_refusal_ = "it is of version " + std::to_string(recovered->version.number) +
                            ", which no guard has promoted";
      recovered.reset();
    }
  }
  node->opened_from_seal_ = recovered.has_value();
  NodeState::Parts parts;
  if (recovered) {
    parts.store = std::move(recovered->store);
  } else {
    Result<std::unique_ptr<ServingStore>> store = ServingStore::Open(std::move(store_options));
    if (!store.ok()) return store.status();
    parts.store = std::move(*store);
  }
  parts.options = options;
  parts.tasks = std::make_unique<TaskBoard>(options.log);
  parts.manifest = std::move(*manifest);
  parts.features = std::move(*features);
  if (options.guard) {
    parts.gate =
        std::make_unique<VersionGate>(promotion, options.window_versions, options.guard_timeout);
  }
  parts.load = std::move(load);
  if (!options.state.empty()) parts.latency = std::make_unique<LatencyMeter>();
  if (options.warm_up_bytes > 0) parts.sample = std::make_unique<KeySample>(options.warm_up_bytes);
  for (const Feature& feature : parts.features) node->total_dim_ += feature.dim;
  node->state_ = std::make_unique<NodeState>(std::move(parts));
  node->made_columns_ = std::make_unique<const MadeColumns>(std::move(*made_columns));
  node->former_layouts_ = std::make_unique<const FormerLayouts>(std::move(*former));
  if (!options.dense_plugin.empty()) EMBERTIDE_RETURN_IF_ERROR(node->LoadDense());
  if (!options.state.empty()) {
    Result<std::unique_ptr<Fleet>> fleet = Fleet::Join(node->state_.get());
    if (!fleet.ok()) return fleet.status();
    node->fleet_ = std::move(*fleet);
  }
  if (recovered) {
    EMBERTIDE_RETURN_IF_ERROR(node->DropUnplanned());
    std::shared_ptr<const DenseWeights> weights;
    if (node->program_ != nullptr) {
      auto loaded = node->LoadWeights(std::as_bytes(std::span(recovered->tensors)));
      if (!loaded.ok()) return loaded.status();
      weights = std::move(*loaded);
    }
    EMBERTIDE_RETURN_IF_ERROR(
        node->AddFirstVersion(std::move(recovered->version), std::move(weights)));
  } else {
    node->state_->store().FillAtOnce(true);
    EMBERTIDE_RETURN_IF_ERROR(node->LoadBuckets());
    node->state_->store().FillAtOnce(false);
    EMBERTIDE_RETURN_IF_ERROR(node->AddSnapshotVersion());
  }
  node->StartUpkeep();
  if (!options.publication.empty()) EMBERTIDE_RETURN_IF_ERROR(node->Follow());
  if (seals) node->sealer_ = std::make_unique<Sealer>(node->state_.get());
  if (options.ssd_budget_bytes > 0) node->mender_ = std::make_unique<Mender>(node->state_.get());
  if (node->state_->sample() != nullptr) {
    node->warm_up_ = std::make_unique<WarmUp>(node->state_.get(), options.stop);
  }
  if (!options.publication.empty()) node->BecomeReady();
  if (options.stop.stop_requested()) return Ending();
  return node;
}

// Starts one thread for all devices, or one for each on its NUMA node.
void Node::StartUpkeep() {
  const std::vector<uint32_t>& numa = state_->store().options().numa_nodes;
  // Upkeep and writers both write to the SSD tier; this task only reports their health.
  if (options().ssd_budget_bytes > 0) {
    upkeep_.push_back(std::make_unique<BackgroundTask>(
        TaskOptions{.name = "ssd-writes", .board = &state_->tasks(), .own_pace = true},
        [this](const std::stop_token& stop) {
          SleepFor(stop, kLookAtSsd);
          const std::string failure = state_->store().SsdFailure();
          return failure.empty() ? Status::Ok() : Status(Code::kDeviceError, SsdFull(failure));
        }));
  }
  if (numa.empty()) {
    upkeep_.push_back(
        std::make_unique<BackgroundTask>(TaskOptions{.name = "upkeep", .board = &state_->tasks()},
                                         [this](const std::stop_token& stop) {
                                           if (SleepFor(stop, kMaintainEvery))
                                             state_->store().Maintain();
                                           return Status::Ok();
                                         }));
    return;
  }
  for (uint32_t d = 0; d < options().devices; ++d) {
    upkeep_.push_back(std::make_unique<BackgroundTask>(
        TaskOptions{.name = "upkeep-" + std::to_string(d), .board = &state_->tasks()},
        [this, d, numa_node = numa[d % numa.size()],
         bound = false](const std::stop_token& stop) mutable {
          if (!std::exchange(bound, true)) {
            // A thread that may not be bound runs where it can.
            const Status status = BindThread(numa_node);
            if (!status.ok() && options().log) {
              options().log("upkeep of device " + std::to_string(d) + ": " + status.ToString());
            }
          }
          if (SleepFor(stop, kMaintainEvery)) state_->store().Maintain(d);
          return Status::Ok();
        }));
  }
}

std::string Node::SsdFull(const std::string& failure) const {
  return failure + " in " + options().ssd_directory +
         "; rows stay in DDR until it takes writes: free room there";
}

// A version finds no room because rows cannot leave: that, and not the budget, is to be told.
Status Node::Explained(Status status) const {
  if (status.code() != Code::kResourceExhausted) return status;
  const std::string failure = state_->store().SsdFailure();
  if (failure.empty()) return status;
  return {status.code(), SsdFull(failure) + " (" + status.message() + ")"};
}

// Waits until the node is ready, for a bounded time: one that cannot be answers what it has.
void Node::BecomeReady() {
  const std::vector<VersionId> newer =
      Newer(ListVersions(options().publication + "/deltas", "commit.pb"), {});
  const VersionId at_start = newer.empty() ? VersionId() : newer.front();
  readiness_ = std::make_unique<Readiness>(
      &state_->tasks(), [this, at_start] { return FindWhyNotReady(at_start); },
      [this](bool ready) {
        if (fleet_ != nullptr) fleet_->SetReady(ready);
      });
  const bool ready = readiness_->Await(DeadlineAfter(options().plan_wait), options().stop);
  begun_ = true;
  if (!ready && options().log) options().log("begins before it is ready: " + why_not_ready());
  if (fleet_ == nullptr) return;
  // The thread looks again only later, and has not asked whether the group is whole.
  fleet_->SetReady(FindWhyNotReady(at_start).empty());
  fleet_->Serve();
}

std::string Node::why_not_ready() const {
  return readiness_ == nullptr ? "" : readiness_->why_not();
}

// Files are written before the bus is told, and name every version: what is newest there is what is
// published. Without a trainer it does not change, and the node catches up with it.
std::string Node::FindWhyNotReady(const VersionId& at_start) const {
  if (!follower_->stats().caught_up) return "it takes the versions that were there at its start";
  // A seal may lack buckets that came after it; they are added as those of a new plan are.
  if (fleet_ != nullptr && opened_from_seal_ && !begun_ && !fleet_->Aligned()) {
    return "it takes buckets that its seal lacks";
  }
  const std::shared_ptr<const VersionInfo> held = newest();
  const VersionId have{held->number, held->lineage};
  if (IsBehindPeers()) {
    return "most peers have no version as old as " + std::to_string(have.number) +
           ", the newest here";
  }
  // No reason to wait with beginning: its group becomes whole only once it takes part.
  if (begun_ && fleet_ != nullptr && !IsWhole(fleet_->plan().routing()->plan, options().group)) {
    return "group " + std::to_string(options().group) + " does not own every bucket";
  }
  const std::vector<VersionId> newer =
      Newer(ListVersions(options().publication + "/deltas", "commit.pb"), have);
  if (newer.empty()) return "";
  // It may have answered at this one before it was killed, though the file is harmed since.
  if (!begun_ && state_->gate() == nullptr && !Newer({at_start}, have).empty()) {
    return "it lacks " + Text(at_start) + ", which was there at its start";
  }
  const Result<v1::CommitFile> published = ReadCommitFile(options().publication, newer.front());
  if (!published.ok()) return "";  // it was pruned meanwhile, or is harmed: nobody can take it
  const int64_t behind_ms = published.value().commit().committed_ms() - held->committed_ms;
  if (behind_ms <= options().ready_staleness.count()) return "";
  return "version " + std::to_string(newer.front().number) + " was committed " +
         std::to_string(behind_ms) + " ms after version " + std::to_string(held->number) +
         ", the newest here; ready_staleness_ms is " +
         std::to_string(options().ready_staleness.count());
}

Node::Node() = default;

const NodeOptions& Node::options() const { return state_->options(); }
const Manifest& Node::manifest() const { return state_->manifest(); }
const std::vector<Feature>& Node::features() const { return state_->features(); }
const ServingStore& Node::store() const { return state_->store(); }
std::shared_ptr<const VersionInfo> Node::newest() const { return state_->newest(); }
std::shared_ptr<const VersionInfo> Node::served() const { return state_->served(); }
uint64_t Node::failed_mends() const { return state_->failed_mends(); }
std::vector<TaskHealth> Node::tasks() const { return state_->AllTasks(); }
TaskBoard& Node::task_board() const { return state_->tasks(); }
bool Node::IsSlow(double whole_us) const {
  return state_->load() != nullptr &&
         state_->slow().IsSlow(whole_us, std::chrono::steady_clock::now());
}

void Node::NoteSlow(const SlowRequest& request) const {
  state_->slow().Add(request, std::chrono::steady_clock::now());
}

void Node::NoteLookups(std::span<const BagFeature> features,
                       std::span<const KeyBags> requests) const {
  KeySample* sample = state_->sample();
  if (sample == nullptr) return;
  for (const KeyBags& request : requests) {
    if (sample->Takes()) sample->Add(KeySample::KeysOf(features, request));
  }
}

WarmUpStats Node::warm_up_stats() const {
  return warm_up_ == nullptr ? WarmUpStats() : warm_up_->stats();
}

void Node::NoteLatency(std::chrono::nanoseconds latency, size_t requests) const {
  state_->NoteLatency(latency, requests);
}

// Who calls ends before what is called: peers' calls, versions, upkeep.
Node::~Node() {
  warm_up_.reset();
  readiness_.reset();
  mender_.reset();
  sealer_.reset();
  if (fleet_ != nullptr) fleet_->Leave();
  follower_.reset();
  fleet_.reset();
  upkeep_.clear();
}

Status Node::DropUnplanned() {
  if (fleet_ == nullptr) return Status::Ok();
  const auto plan = fleet_->plan().routing();
  for (uint32_t t = 0; t < plan->buckets.size(); ++t) {
    for (uint32_t b = 0; b < plan->buckets[t].size(); ++b) {
      if (plan->buckets[t][b].device >= 0) continue;
      EMBERTIDE_RETURN_IF_ERROR(state_->store().DropBucket(t, b));
    }
  }
  return Status::Ok();
}

// The buckets of the snapshot that this node holds.
Status Node::LoadBuckets() {
  std::map<std::string, uint32_t> tables;
  for (uint32_t t = 0; t < manifest().tables.size(); ++t) tables[manifest().tables[t].name] = t;
  if (fleet_ != nullptr) {
    const auto plan = fleet_->plan().routing();
    for (uint32_t t = 0; t < plan->buckets.size(); ++t) {
      for (uint32_t b = 0; b < plan->buckets[t].size(); ++b) {
        const int32_t device = plan->buckets[t][b].device;
        if (device < 0) continue;
        EMBERTIDE_RETURN_IF_ERROR(
            state_->store().AddBucket(t, b, static_cast<uint32_t>(device), {}));
      }
    }
  }
  for (const BucketFileInfo& info : manifest().buckets) {
    if (options().stop.stop_requested()) return Ending();
    const auto table = tables.find(info.table);
    if (table == tables.end()) {
      return {Code::kCorrupt,
              info.path + " is of table \"" + info.table + "\", which the manifest does not have"};
    }
    if (info.bucket < manifest().tables[table->second].buckets() &&
        !state_->store().HeldSince(table->second, info.bucket)) {
      continue;
    }
    EMBERTIDE_RETURN_IF_ERROR(ReadBucketFile(options().snapshot, manifest().tables[table->second],
                                             info, [&](std::span<const std::byte> records) {
                                               if (options().stop.stop_requested()) return Ending();
                                               return state_->store().StageRecords(
                                                   manifest().version, table->second, info.bucket,
                                                   records);
                                             }));
  }
  return Status::Ok();
}

// The program that proves weights, and that it fits the features.
Status Node::LoadDense() {
  const Result<DenseFileInfo> file = DenseFile(manifest(), "program");
  if (!file.ok()) return file.status();
  EMBERTIDE_RETURN_IF_ERROR(CheckCpu(manifest().dense_cpu));
  program_path_ = options().snapshot + "/" + file.value().path;
  // Instances open it later, when the snapshot may have been removed for newer ones.
  Result<std::unique_ptr<HeldFile>> held = HeldFile::Open(program_path_);
  if (!held.ok()) return held.status();
  program_file_ = std::move(*held);
  const auto proved = ReadProvedFile(program_path_, file.value().bytes, file.value().crc32c);
  if (!proved.ok()) return proved.status();
  Result<std::unique_ptr<DenseProgram>> program = OpenProgram();
  if (!program.ok()) return program.status();
  program_ = std::move(*program);
  if (program_->reduced() != DenseProgram::Reduced::kNone) {
    served_reduced_ = std::make_unique<ServedReduced>(program_->reduced_type(), options().log);
  }
  EMBERTIDE_RETURN_IF_ERROR(LoadTransforms());
  const size_t dense = transforms_ ? transforms_->outputs() : manifest().dense_features;
  if (program_->embedding_dim() != total_dim_ || program_->dense_features() != dense) {
    return {Code::kRejected, "the dense program takes " +
                                 std::to_string(program_->dense_features()) + " + " +
                                 std::to_string(program_->embedding_dim()) +
                                 " inputs, the snapshot's features give " + std::to_string(dense) +
                                 " + " + std::to_string(total_dim_)};
  }
  if (program_->heads() != manifest().scores()) {
    return {Code::kRejected, "the dense program gives " + std::to_string(program_->heads()) +
                                 " scores a sample, the manifest has " +
                                 std::to_string(manifest().scores()) + " heads: export it again"};
  }
  return Status::Ok();
}

// A snapshot without them has none. They are a part of the schema: no later version has others.
Status Node::LoadTransforms() {
  const Result<DenseFileInfo> file = DenseFile(manifest(), "transforms");
  if (!file.ok()) return Status::Ok();
  const std::string path = options().snapshot + "/" + file.value().path;
  const auto text = ReadProvedFile(path, file.value().bytes, file.value().crc32c);
  if (!text.ok()) return text.status();
  Result<Transforms> transforms = Transforms::Parse(text.value());
  if (!transforms.ok()) {
    return {transforms.status().code(), path + ": " + transforms.status().message()};
  }
  if (transforms->inputs() != manifest().dense_features) {
    return {Code::kRejected, path + " takes " + std::to_string(transforms->inputs()) +
                                 " columns, the manifest says " +
                                 std::to_string(manifest().dense_features)};
  }
  transforms_ = std::move(*transforms);
  return Status::Ok();
}

Result<std::unique_ptr<DenseProgram>> Node::OpenProgram() const {
  return DenseProgram::Open(options().dense_plugin, program_file_->path(), program_path_);
}

Result<std::shared_ptr<const DenseWeights>> Node::LoadWeights(
    std::span<const std::byte> tensors) const {
  const Result<std::vector<DenseTensor>> parsed = ParseTensors(tensors);
  if (!parsed.ok()) return parsed.status();
  if (served_reduced_ == nullptr) return program_->Load(parsed.value());
  const Result<std::optional<ReducedMeasurement>> measured = ParseReduced(tensors);
  if (!measured.ok()) return measured.status();
  const bool taken = served_reduced_->Take(program_->reduced(), measured.value());
  return program_->Load(parsed.value(), taken);
}

// Null for a node that leaves the dense part alone.
Result<std::shared_ptr<const DenseWeights>> Node::SnapshotWeights(const std::string& directory,
                                                                  const Manifest& manifest) const {
  if (program_ == nullptr) return std::shared_ptr<const DenseWeights>();
  const Result<DenseFileInfo> file = DenseFile(manifest, "tensors");
  if (!file.ok()) return file.status();
  const Result<std::string> bytes =
      ReadProvedFile(directory + "/" + file.value().path, file.value().bytes, file.value().crc32c);
  if (!bytes.ok()) return bytes.status();
  return LoadWeights(std::as_bytes(std::span(bytes.value())));
}

Status Node::AddSnapshotVersion() {
  auto weights = SnapshotWeights(options().snapshot, manifest());
  if (!weights.ok()) return weights.status();
  return AddFirstVersion(SnapshotVersion(options().publication, manifest()), std::move(*weights));
}

Status Node::AddFirstVersion(VersionInfo info, std::shared_ptr<const DenseWeights> weights) {
  info.weights = std::move(weights);
  return state_->Commit(std::make_shared<VersionInfo>(std::move(info)));
}

std::string Node::seal_error() const { return sealer_ == nullptr ? "" : sealer_->error(); }

Result<Pinned> Node::Pin() const {
  return fleet_ == nullptr ? state_->Pin() : fleet_->versions().Pin();
}

Result<Pinned> Node::Pin(uint64_t version) const {
  Result<ReadView> view = state_->store().Pin(version);
  if (!view.ok()) return view.status();
  std::shared_ptr<const VersionInfo> info = state_->InfoOf(version);
  if (info == nullptr) {  // a number that no version has: they may have holes
    return Status(Code::kVersionGone, "there is no version " + std::to_string(version));
  }
  return Pinned{std::move(*view), std::move(info)};
}

// --- following -----------------------------------------------------------------------------------

// Turns the follower's versions into the node's: rows into the store, tensors into weights.
class Node::Sink : public VersionSink {
 public:
  explicit Sink(Node* node) : node_(node), state_(*node->state_) {
    const std::vector<TableConfig>& tables = state_.manifest().tables;
    for (uint32_t t = 0; t < tables.size(); ++t) table_of_id_[tables[t].id] = t;
    newest_ = state_.newest();
  }
  uint64_t newest_number() const override { return newest_->number; }
  uint64_t newest_lineage() const override { return newest_->lineage; }
  uint64_t schema_id() const override { return state_.manifest().schema_id; }
  Status Stage(uint64_t version, uint32_t table_id, uint32_t bucket,
               const std::string& records) override;
  Status Commit(const v1::GlobalCommit& commit, const std::string& tensors) override;
  void DropStaged() override { state_.store().DropStaged(); }
  Status Load(const std::string& snapshot, const std::stop_token& stop) override;
  bool MayFit() const override;
  bool Holds(uint32_t table_id, uint32_t bucket) const override;
  bool OnIdle() override {
    if (state_.gate() != nullptr) state_.gate()->Tick(std::chrono::steady_clock::now());
    return node_->fleet_ != nullptr && node_->fleet_->mover().Align();
  }
  void SetPromotion(const Promotion& record) override { state_.gate()->SetRecord(record); }
  bool MayTake(uint64_t number) override {
    return state_.gate() == nullptr || state_.gate()->MayTake(number);
  }
  bool MayLoad(uint64_t number) const override {
    return state_.gate() == nullptr || state_.gate()->MaySee(number);
  }

 private:
  Status StageBucket(const std::string& snapshot, const Manifest& manifest, uint32_t table,
                     uint32_t bucket, const std::stop_token& stop);
  // kResourceExhausted: what the snapshot has more than the node cannot fit.
  Status Reckon(const Manifest& snapshot) const;
  Status Publish(std::shared_ptr<const VersionInfo> info);

  Node* node_;
  NodeState& state_;  // the node's
  std::map<uint32_t, uint32_t> table_of_id_;
  std::shared_ptr<const VersionInfo> newest_;
  std::optional<uint64_t> lacked_at_;  // free bytes when a snapshot did not fit
  bool ssd_failed_ = false;            // then
};

Status Node::Sink::Stage(uint64_t version, uint32_t table_id, uint32_t bucket,
                         const std::string& records) {
  const auto table = table_of_id_.find(table_id);
  if (table == table_of_id_.end()) {
    return {Code::kCorrupt, "table " + std::to_string(table_id) + " is not in the manifest"};
  }
  return node_->Explained(state_.store().StageRecords(version, table->second, bucket,
                                                      std::as_bytes(std::span(records))));
}

Status Node::Sink::Commit(const v1::GlobalCommit& commit, const std::string& tensors) {
  auto info = std::make_shared<VersionInfo>(VersionInfoOf(commit));
  info->weights = newest_->weights;
  if (node_->program_ != nullptr && commit.dense_id() != newest_->dense_id) {
    auto weights = node_->LoadWeights(std::as_bytes(std::span(tensors)));
    if (!weights.ok()) return weights.status();
    info->weights = std::move(*weights);
  }
  return Publish(std::move(info));
}

Status Node::Sink::Publish(std::shared_ptr<const VersionInfo> info) {
  EMBERTIDE_RETURN_IF_ERROR(state_.Commit(info));
  newest_ = std::move(info);
  if (node_->fleet_ != nullptr) node_->fleet_->Committed();
  return Status::Ok();
}

bool Node::Sink::Holds(uint32_t table_id, uint32_t bucket) const {
  const auto table = table_of_id_.find(table_id);
  // A table or bucket that is unknown goes on, to be refused by name.
  if (table == table_of_id_.end() || bucket >= state_.manifest().tables[table->second].buckets()) {
    return true;
  }
  return state_.store().HeldSince(table->second, bucket).has_value();
}

// Brings one bucket to what the snapshot's file says: its records where they differ from what is
// held, tombstones for the keys that it lacks. Memory: one bucket, twice.
Status Node::Sink::StageBucket(const std::string& snapshot, const Manifest& manifest,
                               uint32_t table, uint32_t bucket, const std::stop_token& stop) {
  const TableConfig& config = state_.manifest().tables[table];
  std::vector<std::byte> held;
  {
    Result<ReadView> view = state_.store().PinNewest();
    if (!view.ok()) return view.status();
    EMBERTIDE_RETURN_IF_ERROR(state_.store().ExportBucket(*view, table, bucket, &held));
  }
  std::map<uint64_t, std::span<const std::byte>> rows;
  for (std::span<const std::byte> rest = held; !rest.empty();) {
    const std::byte* begin = rest.data();
    const Result<RowRecord> record = ReadRecord(config.layout, &rest);
    if (!record.ok()) return record.status();
    rows[record.value().key] = {begin, rest.data()};
  }
  std::vector<std::byte> changes;
  for (const BucketFileInfo& info : manifest.buckets) {
    if (info.table != config.name || info.bucket != bucket) continue;
    EMBERTIDE_RETURN_IF_ERROR(
        ReadBucketFile(snapshot, config, info, [&](std::span<const std::byte> rest) -> Status {
          if (stop.stop_requested()) return Ending();
          while (!rest.empty()) {
            const std::byte* begin = rest.data();
            const Result<RowRecord> record = ReadRecord(config.layout, &rest);
            if (!record.ok()) return record.status();
            const std::span<const std::byte> bytes(begin, rest.data());
            const auto found = rows.find(record.value().key);
            const bool same = found != rows.end() && std::ranges::equal(found->second, bytes);
            if (found != rows.end()) rows.erase(found);
            if (!same) changes.insert(changes.end(), bytes.begin(), bytes.end());
          }
          return Status::Ok();
        }));
  }
  for (const auto& [key, bytes] : rows) {
    AppendRecord({key, 0, RecordKind::kExpired, {}}, &changes);
  }
  return node_->Explained(state_.store().StageRecords(manifest.version, table, bucket, changes));
}

// Old rows stay until the version is whole, since they are answered until then; so a snapshot needs
// room for what it changes. Only reading it says how much that is; its manifest says what it has
// more than the node.
Status Node::Sink::Reckon(const Manifest& snapshot) const {
  std::map<std::string, uint32_t> tables;
  for (uint32_t t = 0; t < state_.manifest().tables.size(); ++t) {
    tables[state_.manifest().tables[t].name] = t;
  }
  Result<ReadView> view = state_.store().PinNewest();
  if (!view.ok()) return view.status();
  uint64_t lacking = 0;
  uint64_t rows = 0;
  for (const BucketFileInfo& info : snapshot.buckets) {
    const auto table = tables.find(info.table);
    if (table == tables.end() || info.rows == 0) continue;
    const auto held = state_.store().BucketSizeOf(*view, table->second, info.bucket);
    if (!held || held->rows >= info.rows) continue;
    rows += info.rows - held->rows;
    lacking +=
        (info.rows - held->rows) *
        (info.bytes / info.rows - std::min<uint64_t>(kRecordHeaderBytes, info.bytes / info.rows));
  }
  const uint64_t free = state_.store().FreeBytes();
  if (lacking <= free) return Status::Ok();
  return {Code::kResourceExhausted,
          "version " + std::to_string(snapshot.version) + " has " + std::to_string(rows) +
              " rows more than are held: " + std::to_string(lacking) + " bytes at least, and " +
              std::to_string(free) + " are free; raise ddr_budget_bytes"};
}

bool Node::Sink::MayFit() const {
  if (!lacked_at_) return true;
  if (ssd_failed_ && state_.store().SsdFailure().empty()) return true;
  // A sixteenth more than there was: a bucket that left, a larger share.
  return state_.store().FreeBytes() > *lacked_at_ + *lacked_at_ / 16;
}

Status Node::Sink::Load(const std::string& snapshot, const std::stop_token& stop) {
  const Result<Manifest> manifest = ReadManifest(snapshot);
  if (!manifest.ok()) return manifest.status();
  const Manifest& found = manifest.value();
  if (found.schema_id != state_.manifest().schema_id) {
    return {Code::kRejected, snapshot + " has another schema than the one that is loaded"};
  }
  lacked_at_ = state_.store().FreeBytes();
  ssd_failed_ = !state_.store().SsdFailure().empty();
  EMBERTIDE_RETURN_IF_ERROR(Reckon(found));
  auto info = std::make_shared<VersionInfo>(SnapshotVersion(state_.options().publication, found));
  auto weights = node_->SnapshotWeights(snapshot, found);
  if (!weights.ok()) return weights.status();
  info->weights = std::move(*weights);
  const auto take = [&]() -> Status {
    for (uint32_t table = 0; table < state_.manifest().tables.size(); ++table) {
      for (uint32_t bucket = 0; bucket < state_.manifest().tables[table].buckets(); ++bucket) {
        if (!state_.store().HeldSince(table, bucket)) continue;
        if (stop.stop_requested()) return Ending();
        EMBERTIDE_RETURN_IF_ERROR(StageBucket(snapshot, found, table, bucket, stop));
      }
    }
    return Publish(std::move(info));
  };
  Status taken = take();
  if (taken.ok()) {
    lacked_at_.reset();
    return taken;
  }
  DropStaged();
  if (taken.code() != Code::kResourceExhausted) return taken;
  return {Code::kResourceExhausted,
          "version " + std::to_string(found.version) + " does not fit beside the one that is " +
              "answered, with " + std::to_string(lacked_at_.value_or(0)) +
              " bytes free: " + taken.message() +
              "; raise ddr_budget_bytes, or restart the node, which then loads it alone"};
}

Status Node::Follow() {
  sink_ = std::make_unique<Sink>(this);
  FollowerOptions options;
  options.bus = state_->options().bus;
  options.publication = state_->options().publication;
  options.model = manifest().model;
  options.node = state_->options().node;
  options.guard = state_->options().guard;
  options.tasks = &state_->tasks();
  Result<std::unique_ptr<Follower>> follower = Follower::Start(options, sink_.get());
  if (!follower.ok()) return follower.status();
  follower_ = std::move(*follower);
  return Status::Ok();
}

std::optional<GuardStats> Node::guard_stats() const {
  if (state_->gate() == nullptr) return std::nullopt;
  return state_->gate()->stats();
}

std::string Node::follower_error() const {
  std::string error = follower_ == nullptr ? std::string() : follower_->last_error();
  return error.empty() && fleet_ != nullptr ? fleet_->error() : error;
}

uint64_t Node::plan_epoch() const {
  return fleet_ == nullptr ? 1 : fleet_->plan().routing()->epoch;
}

RemoteLookupPtr Node::NewRemoteLookup() const {
  return {fleet_ == nullptr ? nullptr : fleet_->NewRemoteLookup().release(),
          [](RemoteLookup* remote) { delete remote; }};
}

Status Node::Fetch(const Pinned& pinned, std::span<const BagFeature> features,
                   std::span<KeyBags> requests, Deadline deadline, RemoteLookup* remote,
                   FetchTerms terms) const {
  return remote->Fetch(pinned, features, requests, deadline, terms);
}

const FetchedRequest& Node::ResultOf(const RemoteLookup& remote, size_t request) {
  return remote.ResultOf(request);
}

void Node::Release(RemoteLookup* remote) { remote->Release(); }

bool Node::IsBehindPeers() const { return fleet_ != nullptr && fleet_->versions().IsBehindPeers(); }

void Node::RefreshPlan(Deadline deadline) const {
  if (fleet_ != nullptr) fleet_->plan().RefreshPlan(deadline);
}

std::string Node::address() const { return fleet_ == nullptr ? "" : fleet_->report().address(); }

FleetStats Node::fleet_stats() const {
  return fleet_ == nullptr ? FleetStats() : fleet_->report().Counters();
}

const FollowerStats* Node::follower_stats() const {
  return follower_ == nullptr ? nullptr : &follower_->stats();
}

}  // namespace embertide
