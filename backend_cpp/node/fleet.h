// Fleet: what makes a node one of several: the plan it acts by, its peers, what it answers them,
// its beats to the control plane, and the buckets it adds and drops as plans change
// (docs/design/0003).
//
//   state (Redis) --plan--> keeper thread --routing--> executions, calls
//                                        \-> AlignBuckets, between two versions: add, drop
//
// Thread-safe but for AlignBuckets, which belongs to the thread that applies versions.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "node/bucket_mover.h"
#include "node/hot_rows.h"
#include "node/miss_meter.h"
#include "node/node_state.h"
#include "node/plan_keeper.h"
#include "node/remote.h"
#include "node/routing.h"
#include "peer/control_link.h"
#include "peer/node_service.h"
#include "peer/peer_pool.h"

namespace embertide {

class Fleet : public NodeHandler {
 public:
  // Listens, registers, and waits for the first plan. kInvalidArgument, kDeviceError, kRejected for
  // what cannot become right; kUnavailable when no plan came in time.
  static Result<std::unique_ptr<Fleet>> Join(NodeState* state);
  ~Fleet() override;

  // The node's store is filled: calls are answered from now on. Waits first, two seconds at most,
  // until every live peer has reached the versions that this node begins with: before that they
  // would find none in common.
  void Serve();
  // What the health service says; calls are answered either way.
  void SetReady(bool ready);
  // Calls are refused from now on, and the control plane is told nothing more.
  void Leave();

  std::shared_ptr<const Routing> routing() const { return plan_->routing(); }
  // Pins, of the versions that may still be pinned, from the last one pinned on, the one that most
  // live peers have, and the newest of those. Peers that are behind what was pinned last cannot
  // hold it back.
  Result<Pinned> Pin();
  // Most live peers begin after the newest version here.
  bool IsBehindPeers() const;
  std::unique_ptr<RemoteLookup> NewRemoteLookup();
  void RefreshPlan(Deadline deadline) { plan_->RefreshPlan(deadline); }
  FleetStats stats() const;
  const std::string& address() const { return address_; }
  // Every bucket of the newest plan is held.
  bool Aligned() const { return routing()->epoch == mover_->progress().held_epoch; }
  // Why a bucket or a plan could not be taken; empty while all is well.
  std::string error() const;
  // A version was committed.
  void Committed();
  // See BucketMover::Align.
  bool AlignBuckets() { return mover_->Align(); }

  Status Lookup(const v1::LookupRequest& request, v1::LookupResponse* response) override;
  // Its latency counts in the p99 of the beats, as that of Triton's requests does.
  Status Read(const v1::ReadRequest& request, Deadline deadline,
              v1::ReadResponse* response) override;
  Status GetStatus(v1::NodeServiceGetStatusResponse* response) override;
  Status GetLoad(uint32_t hot_keys, v1::NodeServiceGetLoadResponse* response) override;
  Status Explain(const v1::ExplainRequest& request, v1::ExplainResponse* response) override;

 private:
  explicit Fleet(NodeState* state);
  Status Start();
  // What a pin takes now, where `newest` is the newest version that may be pinned here.
  uint64_t PinnableVersion(uint64_t newest) const;
  void NotePin(uint64_t version);
  void SetPeers(const Routing& routing);
  v1::Node Self() const;
  v1::VersionRange Range() const;
  void Beat(v1::HeartbeatRequest* beat);
  struct AnswerView {
    std::unique_ptr<ReadView> view;  // of the version below, once there is one
    uint64_t number = 0;
    uint64_t lineage = 0;
  };
  Status Answer(const v1::LookupPart& part, uint32_t table, AnswerView* at,
                v1::LookupResult* result);
  Result<ReadView> PinNamed(const v1::Version& version) const;
  static void FillTask(const TaskHealth& task, v1::TaskHealth* out);
  Status FillUsage(v1::NodeServiceGetStatusResponse* response) const;
  void FillTraffic(v1::NodeServiceGetLoadResponse* response) const;
  // Miss curves, made anew if they are old, and room for rows.
  void FillTiers(v1::NodeServiceGetLoadResponse* response);
  std::vector<MissCurve> MakeCurves() const;
  Status ReadBags(const v1::ReadRequest& request, Deadline deadline, v1::ReadResponse* response);
  Status Prove(const v1::LookupPart& part, uint32_t* table) const;
  std::optional<uint32_t> TableOfId(uint32_t id) const;
  // ms since a version's commit; 0 if that is not known.
  static uint64_t StalenessMs(const VersionInfo& version);

  NodeState* state_;
  std::string address_;  // where peers reach this node
  mutable RemoteStats remote_stats_;

  mutable Mutex mutex_;
  bool ready_ EMBERTIDE_GUARDED_BY(mutex_) = false;

  std::atomic<bool> started_{false};  // address_ and what follows below are there
  std::atomic<bool> serving_{false};
  std::atomic<uint64_t> floor_{0};

  Mutex curves_mutex_;
  std::vector<MissCurve> curves_ EMBERTIDE_GUARDED_BY(curves_mutex_);
  std::optional<std::chrono::steady_clock::time_point> curves_made_
      EMBERTIDE_GUARDED_BY(curves_mutex_);

  std::unique_ptr<PlanKeeper> plan_;
  std::unique_ptr<PeerPool> peers_;
  std::unique_ptr<BucketMover> mover_;
  std::unique_ptr<HotRows> hot_;
  std::unique_ptr<NodeServer> server_;
  std::unique_ptr<ControlLink> control_;
};

}  // namespace embertide
