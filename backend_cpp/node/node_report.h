// NodeReport: what a node tells of itself: its registration and beats to the control plane, its
// status and load to whoever asks, and the counters of /metrics.
//
// Owned by Fleet. Thread-safe: beats come from the control link's thread, status and load from
// gRPC's, counters from any. curves_mutex_ guards the miss curves; a pin of the store and the locks
// of the load meter are taken under it, and none of the node's other parts.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "embertide/v1/control.pb.h"
#include "embertide/v1/node.pb.h"
#include "node/bucket_mover.h"
#include "node/common_versions.h"
#include "node/hot_rows.h"
#include "node/load_meter.h"
#include "node/miss_meter.h"
#include "node/node_state.h"
#include "node/plan_keeper.h"
#include "node/remote.h"
#include "peer/peer_pool.h"

namespace embertide {

class NodeReport {
 public:
  // The parts that it tells of; all outlive it.
  struct Sources {
    const NodeState* state;
    const PlanKeeper* plan;
    const CommonVersions* versions;
    const BucketMover* mover;
    const PeerPool* peers;
    const HotStats* hot;
    const RemoteStats* remote;
    std::function<uint64_t()> refused_calls;  // of peers and operators
  };
  explicit NodeReport(Sources sources);
  NodeReport(const NodeReport&) = delete;
  NodeReport& operator=(const NodeReport&) = delete;

  // Where peers reach this node. Called once, when all sources are there: GetStatus answers from
  // then on.
  void SetAddress(std::string address);
  const std::string& address() const { return address_; }

  // Requires: the address is set.
  v1::RegisterNodeRequest Registration() const;
  // Fills in a heartbeat.
  void Beat(v1::HeartbeatRequest* beat) const;
  // kUnavailable before the address is set.
  Status GetStatus(v1::NodeServiceGetStatusResponse* response) const;
  // The load of the last whole window, with as many of the keys read most as wanted; 0: a hundred.
  // Requires: there is a version.
  Status GetLoad(uint32_t hot_keys, v1::NodeServiceGetLoadResponse* response);
  FleetStats Counters() const;

 private:
  v1::Node Self() const;
  Status FillUsage(v1::NodeServiceGetStatusResponse* response) const;
  void FillBuckets(const LoadWindow& window, const ReadView& view,
                   v1::NodeServiceGetLoadResponse* response) const;
  void FillTraffic(v1::NodeServiceGetLoadResponse* response) const;
  void FillSlow(v1::NodeServiceGetLoadResponse* response) const;
  // Miss curves, made anew if they are old, and room for rows.
  void FillTiers(v1::NodeServiceGetLoadResponse* response);
  std::vector<MissCurve> MakeCurves() const;

  const Sources from_;
  const NodeState& state_;
  std::string address_;
  std::atomic<bool> started_{false};  // address_ is there

  Mutex curves_mutex_;
  std::vector<MissCurve> curves_ EMBERTIDE_GUARDED_BY(curves_mutex_);
  std::optional<std::chrono::steady_clock::time_point> curves_made_
      EMBERTIDE_GUARDED_BY(curves_mutex_);
};

}  // namespace embertide
