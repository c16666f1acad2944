// CommonVersions: which versions this node offers its peers, and which one a pin takes, so that
// most live peers can answer at it too.
//
//   this node's window      5   6   7   8
//   live peers have         5 - 7, 4 - 7, 7 - 8
//   last pinned (floor)         6
//   a pin takes                     7        from the floor on, what most peers have, then newest
//
// Owned by Fleet. Thread-safe; it has no mutex.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "node/node_state.h"
#include "peer/peer_pool.h"

namespace embertide {

class CommonVersions {
 public:
  // `live_ranges` gives what the peers that answer can answer at. All that it is given outlives it.
  CommonVersions(const NodeState* state, std::function<std::vector<PeerPool::Range>()> live_ranges);
  CommonVersions(const CommonVersions&) = delete;
  CommonVersions& operator=(const CommonVersions&) = delete;

  // Whether calls are answered. Until they are, no version is offered.
  bool serving() const { return serving_; }
  void SetServing(bool serving) { serving_ = serving; }

  // The versions that this node can answer at, for peers and the control plane; empty: not serving.
  v1::VersionRange Range() const;
  // Pins, of the versions that may still be pinned, from the last one pinned on, the one that most
  // live peers have, and the newest of those. Peers that are behind what was pinned last cannot
  // hold it back. Requires, here and below: there is a version.
  Result<Pinned> Pin();
  // The version that a pin takes now; 0: nothing can be pinned.
  uint64_t PinnableNow() const;
  // Most live peers begin after the newest version here.
  bool IsBehindPeers() const;

 private:
  // The version that a pin takes, where `served` is the newest that may be pinned here.
  uint64_t PinnableVersion(uint64_t served) const;
  void NotePin(uint64_t version);

  const NodeState* const state_;
  const std::function<std::vector<PeerPool::Range>()> live_ranges_;
  std::atomic<bool> serving_{false};
  std::atomic<uint64_t> floor_{0};  // the last version pinned
};

}  // namespace embertide
