// Routing: what a plan means for one node: what it is to hold, and whom to ask for the rest.
// Immutable; shared by the executions that use it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "embertide/snapshot.h"
#include "embertide/status.h"
#include "embertide/store.h"
#include "embertide/v1/plan.pb.h"

namespace embertide {

struct Routing {
  struct Peer {
    std::string name;
    std::string address;  // of its NodeService
    bool spare = false;   // of another group: asked for what nobody of the own answers for
  };
  // One bucket as this node sees it.
  struct Bucket {
    // Places in `peers`, in the order in which they are asked: owners of the own group, nodes of it
    // that the bucket leaves, owners of the other group.
    std::vector<uint16_t> owners;
    int32_t device = -1;  // where it is to be held here; -1: not
    bool owned = false;   // here; what joins or leaves is held, and not relied upon
  };

  uint64_t epoch = 0;
  // The peers of this node's group, itself excluded, and those of one other whole group.
  std::vector<Peer> peers;
  std::vector<std::vector<Bucket>> buckets;  // by table's place in the manifest, by bucket
  std::vector<bool> all_owned;               // by table: every bucket of it is owned here
  std::vector<DdrShare> shares;              // of tables on this node's devices
  v1::Plan plan;
};

// Owners of a bucket share its load: each asker has an order of its own, by rendezvous hashing
// (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998) of asker,
// owner, table and bucket. So each owner gets its part of every asker's keys, and when one dies the
// others share what it had.
//
// Proves a plan by the rules of plan.proto against the model's tables, and reads it for the node
// named. kRejected naming the rule that it breaks. A node that the plan does not name holds nothing
// and asks the owners of the first whole group.
//
// Nodes that a bucket leaves hold it until the plan names them no more. They are asked where no
// owner of the group answers, as while a target that was started again loads what it took over.
//
// Where nobody of its own group answers, a node asks owners of one other whole group: the next one
// by number, after the last the first. A node of a partial group (plan.proto) asks the first whole
// group, also for what nobody of its own group owns.
Result<std::shared_ptr<const Routing>> MakeRouting(const v1::Plan& plan, const Manifest& manifest,
                                                   const std::string& node);

// Whether a group owns every bucket by the plan of a routing.
bool IsWhole(const v1::Plan& plan, uint32_t group);

}  // namespace embertide
