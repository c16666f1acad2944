// Fleet: what makes a node one of several. It makes the parts below, joins them, and ends them
// (docs/design/0003-moves.md).
//
//   state store --plan--> PlanKeeper --routing--> RemoteLookup, Answers, HotRows
//                                    \--routing--> BucketMover: add, drop, between two versions
//   peers <--> PeerPool --ranges--> CommonVersions --pin--> executions
//   peers, operators --calls--> NodeServer --> Answers --> PeerLookup, NodeReport
//   control plane <--beats-- ControlLink <-- NodeReport
//
// Owned by Node. Thread-safe, but for mover().Align, which belongs to the thread that applies
// versions.
//
// Order of the end: no call is answered and no version offered (Leave); then the plan's keeper, the
// control link, the server of peers' calls, the keeper of hot rows, and the peers' pool. Who calls
// ends before what is called.
//
// Order of the locks, each before those on its right:
//   ready_mutex_              NodeServer's
//   PlanKeeper::adopt_mutex_  PeerPool's, PlanKeeper::mutex_, ControlLink's
//   PeerPool's of TellNews    HotRows::log_mutex_
//   NodeReport's curves       the store's, those of the load meter
// PlanKeeper::mutex_, BucketMover::mutex_ and NodeState's versions_mutex_ are leaves: nothing is
// locked under them. The pool asks for ranges and epochs without a lock of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "access/credentials.h"
#include "access/token_file.h"
#include "base/mutex.h"
#include "bus/redis.h"
#include "node/answers.h"
#include "node/bucket_mover.h"
#include "node/common_versions.h"
#include "node/hot_rows.h"
#include "node/node_report.h"
#include "node/node_state.h"
#include "node/plan_keeper.h"
#include "node/remote.h"
#include "peer/control_link.h"
#include "peer/node_service.h"
#include "peer/peer_pool.h"

namespace embertide {

class Fleet {
 public:
  // Listens, registers, and waits for the first plan. kInvalidArgument, kDeviceError, kRejected for
  // what cannot become right; kUnavailable when no plan came in time. `state` outlives it.
  static Result<std::unique_ptr<Fleet>> Join(NodeState* state);
  ~Fleet();
  Fleet(const Fleet&) = delete;
  Fleet& operator=(const Fleet&) = delete;

  // The node's store is filled: calls are answered from now on. Waits first, two seconds at most,
  // until every live peer has reached the versions that this node begins with: before that they
  // would find none in common.
  void Serve();
  // Sets what the health service says; calls are answered either way.
  void SetReady(bool ready);
  // Calls are refused from now on, and the control plane is told nothing more.
  void Leave();
  // A version was committed.
  void Committed();

  PlanKeeper& plan() { return *plan_; }
  CommonVersions& versions() { return *versions_; }
  BucketMover& mover() { return *mover_; }
  const NodeReport& report() const { return *report_; }
  std::unique_ptr<RemoteLookup> NewRemoteLookup();
  // Every bucket of the newest plan is held.
  bool Aligned() const { return plan_->routing()->epoch == mover_->progress().held_epoch; }
  // Why a bucket or a plan could not be taken; empty while all is well.
  std::string error() const;

 private:
  // How this node speaks to others.
  struct Access {
    std::string listen;  // host:port
    Credentials credentials;
    std::shared_ptr<TokenFile> tokens;
  };

  explicit Fleet(NodeState* state);
  Status Start();
  Result<Access> OpenAccess() const;
  void MakeParts(RedisAddress redis_address, const Access& access);
  Status Listen(const Access& access);
  void Register(const Access& access);
  void SetPeers(const Routing& routing);
  void BeatNow();

  NodeState* const state_;
  RemoteStats remote_stats_;

  Mutex ready_mutex_;
  bool ready_ EMBERTIDE_GUARDED_BY(ready_mutex_) = false;

  // Each uses those above it.
  std::unique_ptr<PlanKeeper> plan_;
  std::unique_ptr<CommonVersions> versions_;
  std::unique_ptr<PeerPool> peers_;
  std::unique_ptr<BucketMover> mover_;
  std::unique_ptr<HotRows> hot_;
  std::unique_ptr<NodeReport> report_;
  std::unique_ptr<Answers> answers_;
  std::unique_ptr<NodeServer> server_;
  std::unique_ptr<ControlLink> control_;  // null without a control plane
};

}  // namespace embertide
