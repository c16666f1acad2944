// Answers: what NodeService answers (peer/node_service.h): a peer's Lookup (peer_lookup.h), an
// operator's Read and Explain, and what the node tells of itself (node_report.h).
//
// Owned by Fleet. Thread-safe, without a mutex: gRPC's threads call it, many at once.
#pragma once

#include <functional>
#include <memory>

#include "node/common_versions.h"
#include "node/node_report.h"
#include "node/node_state.h"
#include "node/peer_lookup.h"
#include "node/plan_keeper.h"
#include "node/remote.h"
#include "peer/node_service.h"

namespace embertide {

class Answers : public NodeHandler {
 public:
  // All outlive it.
  struct Parts {
    const NodeState* state;
    PlanKeeper* plan;
    CommonVersions* versions;
    PeerPool* peers;
    NodeReport* report;
    std::function<std::unique_ptr<RemoteLookup>()> new_remote_lookup;
  };
  explicit Answers(Parts parts);

  Status Lookup(const v1::LookupRequest& request, v1::LookupResponse* response) override;
  // Its latency counts in the p99 of the beats, as that of Triton's requests does.
  Status Read(const v1::ReadRequest& request, Deadline deadline,
              v1::ReadResponse* response) override;
  Status GetStatus(v1::NodeServiceGetStatusResponse* response) override;
  Status GetLoad(uint32_t hot_keys, v1::NodeServiceGetLoadResponse* response) override;
  Status Explain(const v1::ExplainRequest& request, v1::ExplainResponse* response) override;

 private:
  Status ReadBags(const v1::ReadRequest& request, Deadline deadline, v1::ReadResponse* response);

  const Parts parts_;
  const NodeState& state_;
  const PeerLookup lookup_;
};

}  // namespace embertide
