// BucketMover: brings what a node holds in line with its newest plan, a few buckets at a time, and
// gives tables the shares of DDR that the plan says (docs/design/0003-moves.md).
//
// A bucket that the plan gives here is read from the publication's files at exactly the newest
// version of the node, or copied from another device of it; one that the plan does not give here is
// dropped. JoinPace says how many at once. Adding runs on a thread of low priority, which the
// caller waits for.
//
// Owned by Fleet. Align belongs to the thread that applies versions, between two of them; any
// thread may call the rest. mutex_ guards the errors alone; no other lock is taken under it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "bus/chain.h"
#include "node/join_pace.h"
#include "node/node_state.h"
#include "node/routing.h"
#include "peer/peer_pool.h"

namespace embertide {

class BucketMover {
 public:
  // The buckets that are held, and the work that is done; counters since the start.
  struct Progress {
    std::atomic<uint64_t> held{0};
    std::atomic<uint64_t> left{0};  // of the plan, not held yet
    std::atomic<uint64_t> added{0};
    std::atomic<uint64_t> dropped{0};
    std::atomic<uint64_t> failed_adds{0};  // tried again
    std::atomic<uint64_t> refused_shares{0};
    std::atomic<bool> full{false};  // the last bucket found no room
    // The newest plan whose buckets are all held, and the first version at which they are.
    std::atomic<uint64_t> held_epoch{0};
    std::atomic<uint64_t> held_since{0};
  };

  // `routing` gives the newest plan. `tell_held` is called once all of a plan is held. All that it
  // is given outlives it.
  BucketMover(NodeState* state, const PeerPool* peers,
              std::function<std::shared_ptr<const Routing>()> routing,
              std::function<void()> tell_held);
  BucketMover(const BucketMover&) = delete;
  BucketMover& operator=(const BucketMover&) = delete;

  // Adds or drops a few buckets towards what the plan says; true if there is more to do. Also frees
  // copies of buckets that moved between devices here, once no node can pin what they answer.
  // Requires: there is a plan.
  bool Align();
  const Progress& progress() const { return progress_; }
  // Whether all that the plan of an epoch gives this node is held, at a version and later ones.
  bool Holds(uint64_t epoch, uint64_t version) const {
    return progress_.held_epoch == epoch && progress_.held_since <= version;
  }
  // Why the last bucket could not be added; empty once all are held.
  std::string bucket_error() const;
  // Why the newest plan's shares of DDR were refused; empty: they were not.
  std::string share_error() const;

 private:
  struct Change {
    uint32_t table;
    uint32_t bucket;
    uint32_t device;
    bool here;   // from another device of this node
    bool owned;  // here, by the plan; else it joins
  };

  void FreeSuperseded();
  // Gives the shares that a plan says, once a plan. A refusal is noted and counted; the shares
  // given before hold on.
  void ShareDdr(const Routing& routing);
  // The buckets to be added. Drops those that are not to be held.
  std::vector<Change> Missing(const Routing& routing);
  // Both tell how many bytes of rows they brought.
  uint64_t Add(const std::vector<Change>& changes);
  uint64_t AddHere(const Change& change);
  Status Hold(const Change& change, std::span<const std::byte> records);
  void Note(const Status& status);

  NodeState* const state_;
  const PeerPool* const peers_;
  const std::function<std::shared_ptr<const Routing>()> routing_;
  const std::function<void()> tell_held_;
  Progress progress_;
  mutable Mutex mutex_;
  std::string bucket_error_ EMBERTIDE_GUARDED_BY(mutex_);
  std::string share_error_ EMBERTIDE_GUARDED_BY(mutex_);

  // --- of the thread that calls Align
  JoinPace pace_;
  LastManifest snapshot_manifest_;
  uint64_t shared_epoch_ = 0;                          // plan whose shares were looked at
  std::chrono::steady_clock::time_point add_again_;    // after a failure
  std::chrono::steady_clock::time_point not_reached_;  // a peer was seen below SupersededUntil
};

}  // namespace embertide
