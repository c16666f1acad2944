// PeerLookup: what a node answers a peer that asks for rows or sums of buckets held here, at the
// version that each part names. It proves every part before it reads anything.
//
// Owned by Answers. Thread-safe, without a mutex: gRPC's threads call it, many at once.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "embertide/v1/node.pb.h"
#include "node/common_versions.h"
#include "node/node_state.h"
#include "node/plan_keeper.h"
#include "peer/peer_pool.h"

namespace embertide {

class PeerLookup {
 public:
  // All outlive it.
  PeerLookup(const NodeState* state, const PlanKeeper* plan, const CommonVersions* versions,
             PeerPool* peers);

  // A request without parts is a beat. A part at a version, or of a bucket, that is not held here
  // gets a refusal in its result. kUnavailable: the node does not serve; kInvalidArgument naming
  // what breaks a rule, or is too large.
  // A look-up that is slow is kept for whoever asks for the node's load.
  Status Lookup(const v1::LookupRequest& request, v1::LookupResponse* response) const;

 private:
  using Clock = std::chrono::steady_clock;
  // The view of the last part: parts of one call are mostly of one version.
  struct View {
    std::unique_ptr<ReadView> rows;  // of the version below, once there is one
    uint64_t number = 0;
    uint64_t lineage = 0;
  };
  // Keeps its keys for the next start, if they are among those that are. `tables`: by part.
  void NoteLookup(const v1::LookupRequest& request, std::span<const uint32_t> tables) const;
  Status AnswerParts(const v1::LookupRequest& request, v1::LookupResponse* response) const;
  // Keeps it once for each trace, if it is among the slowest.
  void NoteSlow(const v1::LookupRequest& request, Clock::time_point began) const;
  std::optional<uint32_t> TableOfId(uint32_t id) const;
  // Sets the table's place in the manifest.
  Status Prove(const v1::LookupPart& part, uint32_t* table) const;
  Result<ReadView> PinNamed(const v1::Version& version) const;
  Status Answer(const v1::LookupPart& part, uint32_t table, View* at,
                v1::LookupResult* result) const;

  const NodeState& state_;
  const PlanKeeper* const plan_;
  const CommonVersions* const versions_;
  PeerPool* const peers_;
};

}  // namespace embertide
