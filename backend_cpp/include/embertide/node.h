// Node: a model loaded for serving: the store filled from a snapshot, its versions, its dense net.
//
// Knows no Triton. Bus, plan and peers join it here, behind the same Pin(). A node alone holds
// every bucket; one that is given a state store holds what the plan says and asks its peers for the
// rest. Thread-safe: any thread may pin and look up; one background thread applies and maintains.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "embertide/deadline.h"
#include "embertide/dense.h"
#include "embertide/follower.h"
#include "embertide/no_answer.h"
#include "embertide/serving_store.h"
#include "embertide/settings.h"
#include "embertide/slow_request.h"
#include "embertide/snapshot.h"
#include "embertide/task_health.h"
#include "embertide/transform.h"

namespace embertide {

// The options of a node: those of proto/embertide/v1/options.proto, and those that only who embeds
// one can give.
struct NodeOptions : NodeSettings {
  std::string dense_plugin;  // libembertide_dense.so; empty: the dense part is left alone (lookup)
  // OPTIONAL: told, a line at a time, of what an operator is to know and no request says: blocks of
  // the SSD that are bad. From any thread of the node; must not call the node.
  std::function<void(const std::string& line)> log;
  // OPTIONAL: Open gives up soon after it asks for it, with kUnavailable.
  std::stop_token stop;
  // At the start, for the first plan; then to be ready.
  std::chrono::milliseconds plan_wait{120'000};
};

// One feature as lookups need it, resolved from the manifest.
struct Feature {
  std::string name;
  uint32_t table = 0;  // index into Manifest::tables
  uint32_t dim = 0;
  Pooling pooling = Pooling::kSum;
  bool weighed = false;  // a request has a weight for each key
};

// The facts of a version beside its rows. Immutable.
struct VersionInfo {
  uint64_t lineage = 0;
  uint64_t number = 0;
  int64_t watermark_ms = 0;  // event time; the version has learned from no event after it
  int64_t committed_ms = 0;  // wall clock of the publisher; 0: unknown (an old snapshot)
  std::string dense_id;
  uint32_t proof = 0;  // checksum of the commit or manifest that announced it
  std::shared_ptr<const DenseWeights> weights;  // null without a dense net
};

// One version, sparse and dense together: what every answer is made from.
struct Pinned {
  ReadView rows;
  std::shared_ptr<const VersionInfo> info;
};

// Why versions are withdrawn: label `reason` of embertide_versions_withdrawn_total.
inline constexpr std::array<const char*, 6> kWithdrawReasons = {
    "not_finite", "auc", "calibration", "latency", "rollback", "operator"};

// The guard's decisions, as far as a node knows them.
struct GuardStats {
  uint64_t served = 0;     // to ordinary requests
  uint64_t promoted = 0;   // by the guard; 0: it has not decided yet
  uint64_t candidate = 0;  // newest version held that ordinary requests do not see; 0: none
  bool holding = false;    // newer versions wait, as the window is full of candidates
  uint64_t unguarded = 0;  // versions served though nobody promoted them
  std::array<uint64_t, kWithdrawReasons.size()> withdrawn{};  // by reason
};

// How an execution asks its peers.
struct FetchTerms {
  // Its requests name the version: one that needs a live peer without it fails with kVersionGone.
  bool named = false;
  // It may be started over with another pin, before keys go unanswered.
  bool may_start_over = false;
  // The trace of each request's caller (base/trace_id.h), which peers are told; empty: no request
  // has one. Valid until Fetch returns.
  std::span<const std::string_view> traces = {};
};

// The result of a request of an execution.
struct FetchedRequest {
  uint32_t degraded_keys = 0;  // that read as default rows, as no owner answered
  // kUnavailable: too many of them. kVersionGone: peers lack the version that it names. Such a
  // request is not to be answered; those beside it are.
  Status status;
};

class BackgroundTask;
class Fleet;
class KeySample;
class LatencyMeter;
class LoadMeter;
class FormerLayouts;
class HeldFile;
class MadeColumns;
class Mender;
class NodeState;
class Readiness;
class RemoteLookup;
class Sealer;
class ServedReduced;
class TaskBoard;
class VersionGate;
class WarmUp;
struct VersionId;
// Opaque outside of node.
using RemoteLookupPtr = std::unique_ptr<RemoteLookup, void (*)(RemoteLookup*)>;

// Lookups that are made again when a node starts (node/warm_up.h). All zeros without.
struct WarmUpStats {
  uint64_t lookups = 0;         // of the sample, that were made again
  uint64_t keys = 0;            // looked up by them, in all passes
  uint64_t first_from_ssd = 0;  // keys that the first pass read from the SSD
  uint64_t last_from_ssd = 0;   // and the last one
  uint64_t took_ms = 0;
  uint64_t sampled_lookups = 0;  // kept for the next start, now
  uint64_t sampled_bytes = 0;
  uint64_t too_large = 0;     // lookups that were left out of the sample
  uint64_t failed_files = 0;  // samples that could not be read, or written
};

// Counters of a node that has peers, since the start.
struct FleetStats {
  uint64_t remote_keys = 0;  // asked of peers, after deduplication
  uint64_t remote_calls = 0;
  uint64_t next_owners = 0;  // keys asked of another owner, as one did not answer
  std::array<uint64_t, kNoAnswers> degraded_keys{};  // that no owner answered, by reason
  uint64_t started_over = 0;   // executions, for a version or a bucket that a peer lacked
  uint64_t peer_failures = 0;  // calls without an answer, beats included
  uint64_t peer_deaths = 0;
  uint64_t redials = 0;         // connections to dead peers that were made anew
  uint64_t refused_calls = 0;   // of peers and operators
  uint64_t refused_plans = 0;   // that broke a rule
  uint64_t refused_shares = 0;  // of DDR, that a plan gives and the store cannot
  uint64_t buckets_added = 0;
  uint64_t buckets_dropped = 0;
  uint64_t failed_adds = 0;  // tried again
  uint64_t peers_alive = 0;  // that answer now
  uint64_t buckets_held = 0;
  uint64_t buckets_left = 0;  // of the plan, not held yet
  // Counts of hot rows, as HotStats (node/hot_rows.h).
  uint64_t hot_reads = 0;
  uint64_t hot_stale = 0;
  uint64_t hot_entered = 0;
  uint64_t hot_left = 0;
  uint64_t hot_unchanged = 0;
  uint64_t hot_changed = 0;
  uint64_t hot_failed = 0;
  uint64_t hot_dropped = 0;
  uint64_t hot_clipped = 0;
  uint64_t hot_rows = 0;   // now
  uint64_t hot_bytes = 0;  // what they take now
};

// One count of a node with peers, by the name that /metrics (label `event` of
// embertide_fleet_events_total) and NodeService.GetStatus give it.
struct FleetEvent {
  const char* name;
  uint64_t FleetStats::* count;
};
inline constexpr std::array kFleetEvents = {
    FleetEvent{"remote_key", &FleetStats::remote_keys},
    FleetEvent{"remote_call", &FleetStats::remote_calls},
    FleetEvent{"next_owner", &FleetStats::next_owners},
    FleetEvent{"started_over", &FleetStats::started_over},
    FleetEvent{"peer_failure", &FleetStats::peer_failures},
    FleetEvent{"peer_death", &FleetStats::peer_deaths},
    FleetEvent{"redial", &FleetStats::redials},
    FleetEvent{"refused_call", &FleetStats::refused_calls},
    FleetEvent{"refused_plan", &FleetStats::refused_plans},
    FleetEvent{"refused_share", &FleetStats::refused_shares},
    FleetEvent{"bucket_added", &FleetStats::buckets_added},
    FleetEvent{"bucket_dropped", &FleetStats::buckets_dropped},
    FleetEvent{"failed_add", &FleetStats::failed_adds},
    FleetEvent{"hot_read", &FleetStats::hot_reads},
    FleetEvent{"hot_stale", &FleetStats::hot_stale},
    FleetEvent{"hot_entered", &FleetStats::hot_entered},
    FleetEvent{"hot_left", &FleetStats::hot_left},
    FleetEvent{"hot_unchanged", &FleetStats::hot_unchanged},
    FleetEvent{"hot_changed", &FleetStats::hot_changed},
    FleetEvent{"hot_failed", &FleetStats::hot_failed},
    FleetEvent{"hot_dropped", &FleetStats::hot_dropped},
    FleetEvent{"hot_clipped", &FleetStats::hot_clipped},
};

class Node {
 public:
  // Loads the whole snapshot, then follows the publication, if there is one. Where the publication
  // is to say which snapshot: the newest that is whole; one that is harmed, or pruned while the
  // node waited for its plan, is passed over. Errors are those of ReadManifest, ReadBucketFile,
  // ServingStore::Open and DenseProgram::Open; nothing is left behind when it fails.
  static Result<std::unique_ptr<Node>> Open(NodeOptions options);
  ~Node();

  const NodeOptions& options() const;
  const Manifest& manifest() const;
  const std::vector<Feature>& features() const;
  // The columns of a request that it can make itself (node/made_columns.h).
  const MadeColumns& made_columns() const { return *made_columns_; }
  // The columns that requests carried before the model was changed (node/former_layouts.h).
  const FormerLayouts& former_layouts() const { return *former_layouts_; }
  // Sum of the features' dims: the width of a `lookup` answer when all features are pooled.
  uint32_t total_dim() const { return total_dim_; }
  const ServingStore& store() const;
  // Epoch of the plan that it acts by; 1 for a node alone.
  uint64_t plan_epoch() const;
  // Pins the version that most live peers hold, not older than the last one pinned; the newest of
  // those. With a guard, of the versions that ordinary requests may see.
  Result<Pinned> Pin() const;
  // Pins this version. kVersionGone, naming what is held, if it is not of the window; that peers
  // hold it, only Fetch finds out.
  Result<Pinned> Pin(uint64_t version) const;
  // A finder of the keys that are not held here, for one thread; null for a node alone.
  RemoteLookupPtr NewRemoteLookup() const;
  // Asks peers for what is not held here at the pin, and sets `remote_of` and `remote` of the
  // requests. Peers get nine tenths of the time until `deadline`, or peer_timeout where the caller
  // has none. kVersionGone, kNotOwner, if the terms allow them: start over with a new pin. Else
  // ResultOf says which requests may be answered.
  Status Fetch(const Pinned& pinned, std::span<const BagFeature> features,
               std::span<KeyBags> requests, Deadline deadline, RemoteLookup* remote,
               FetchTerms terms) const;
  // The result of a request of the last Fetch that was Ok.
  static const FetchedRequest& ResultOf(const RemoteLookup& remote, size_t request);
  // The answers of its last Fetch were used: frees them.
  static void Release(RemoteLookup* remote);
  // Most live peers begin after this node's newest version: it has to catch up before it can
  // answer for their keys.
  bool IsBehindPeers() const;
  // `requests` were answered together, `latency` after work on them began: for the p99 that the
  // control plane is told. Never waits; does nothing for a node alone.
  void NoteLatency(std::chrono::nanoseconds latency, size_t requests) const;
  // Whether a request that took so long is to be told to NoteSlow: one of the slowest of its time.
  bool IsSlow(double whole_us) const;
  // Keeps it, for whoever asks for the node's load. Requires: IsSlow.
  void NoteSlow(const SlowRequest& request) const;
  // The rows of `requests` are looked up: some of these lookups are kept, for the next start.
  void NoteLookups(std::span<const BagFeature> features, std::span<const KeyBags> requests) const;
  WarmUpStats warm_up_stats() const;
  // Waits, a quarter of a second and until the deadline at most, for a look at the newest plan.
  void RefreshPlan(Deadline deadline) const;
  // Where peers reach it; empty for a node alone.
  std::string address() const;
  // All zeros for a node alone.
  FleetStats fleet_stats() const;
  // The newest version that this node holds.
  std::shared_ptr<const VersionInfo> newest() const;
  // The version that ordinary requests are answered at; with a guard, not the newest by far.
  std::shared_ptr<const VersionInfo> served() const;
  // Nullopt without a guard.
  std::optional<GuardStats> guard_stats() const;
  // Whether its rows came from the seal of its SSD tier; else from the snapshot's files.
  bool opened_from_seal() const { return opened_from_seal_; }
  // Why the seal that lay there was not used; empty if it was, or if none lay there.
  const std::string& seal_refusal() const { return seal_refusal_; }
  // Why the last seal could not be written; empty if it could.
  std::string seal_error() const;
  // Buckets, an attempt each, whose rows in bad blocks of the SSD could not be brought again.
  uint64_t failed_mends() const;
  // Why it should not be sent requests: it has not caught up with what is published, or fell
  // behind; empty: it is ready. Looked at twice a second; one that is not ready answers all the
  // same.
  std::string why_not_ready() const;
  // Counters of the follower; null without a publication.
  const FollowerStats* follower_stats() const;
  // Why the follower could not take the last version it saw; empty if it could, or follows nothing.
  std::string follower_error() const;
  // How its tasks in the background are doing, by name; those of the process that belong to no node
  // are among them.
  std::vector<TaskHealth> tasks() const;
  // Where who works for the node says how it is doing. Outlives all that the node has.
  TaskBoard& task_board() const;
  // A program of one's own, for one thread. Errors are those of DenseProgram::Open.
  Result<std::unique_ptr<DenseProgram>> OpenProgram() const;
  // Which versions are computed in reduced precision (node/served_reduced.h); null: the package has
  // no such program.
  const ServedReduced* served_reduced() const { return served_reduced_.get(); }
  // The steps applied to DENSE before the program; null: the program gets it as it is.
  const Transforms* transforms() const { return transforms_ ? &*transforms_ : nullptr; }

 private:
  Node();
  Status LoadBuckets();
  // Brings the rows that were taken from the seal in line with the plan.
  Status DropUnplanned();
  Status LoadDense();
  Status LoadTransforms();
  Status Follow();
  Result<std::shared_ptr<const DenseWeights>> LoadWeights(std::span<const std::byte> tensors) const;
  Status AddSnapshotVersion();
  void StartUpkeep();
  std::string SsdFull(const std::string& failure) const;
  Status Explained(Status status) const;
  void BecomeReady();
  // Opens `options.snapshot`, which is not empty.
  static Result<std::unique_ptr<Node>> OpenSnapshot(const NodeOptions& options,
                                                    const Promotion& promotion);
  std::string FindWhyNotReady(const VersionId& at_start) const;
  // The version that the store is filled with; commits it.
  Status AddFirstVersion(VersionInfo info, std::shared_ptr<const DenseWeights> weights);
  Result<std::shared_ptr<const DenseWeights>> SnapshotWeights(const std::string& directory,
                                                              const Manifest& manifest) const;

  std::unique_ptr<const MadeColumns> made_columns_;
  std::unique_ptr<const FormerLayouts> former_layouts_;
  uint32_t total_dim_ = 0;
  std::string program_path_;
  std::unique_ptr<HeldFile> program_file_;  // the same, for as long as instances may open it
  std::unique_ptr<DenseProgram> program_;   // proves weights; runs nothing
  std::unique_ptr<ServedReduced> served_reduced_;
  std::optional<Transforms> transforms_;
  std::unique_ptr<NodeState> state_;                     // all that follows uses it
  std::vector<std::unique_ptr<BackgroundTask>> upkeep_;  // of the store
  class Sink;
  std::unique_ptr<Sink> sink_;
  std::string seal_refusal_;
  bool opened_from_seal_ = false;
  std::atomic<bool> begun_{false};        // to answer
  std::unique_ptr<Fleet> fleet_;          // null: a node alone
  std::unique_ptr<Follower> follower_;    // it feeds the sink
  std::unique_ptr<Sealer> sealer_;        // null without an SSD tier, or without seals
  std::unique_ptr<Mender> mender_;        // null without an SSD tier
  std::unique_ptr<Readiness> readiness_;  // null without a publication
  std::unique_ptr<WarmUp> warm_up_;       // null without warm_up_bytes
};

}  // namespace embertide
