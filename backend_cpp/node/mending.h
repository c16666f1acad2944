// The thread that brings rows of bad SSD blocks again, from where the node got them
// (docs/design/0006-seals.md). Private to this folder.
#pragma once

#include <chrono>
#include <set>
#include <stop_token>
#include <string>
#include <vector>

#include "base/background_task.h"
#include "node/node_state.h"

namespace embertide {

// Thread-safe.
class Mender {
 public:
  // `state` outlives it.
  explicit Mender(NodeState* state);
  // Its end waits for the bucket at hand.
  Mender(const Mender&) = delete;
  Mender& operator=(const Mender&) = delete;

 private:
  Status Look(const std::stop_token& stop);
  // Says which blocks are bad, and which no longer are; each once.
  void Tell(const std::vector<BadBlock>& blocks);
  void Say(const std::string& line) const;
  // Brings a bucket's rows in bad blocks again, as the newest version has them.
  Status MendBucket(uint32_t table, uint32_t bucket) const;

  NodeState* const state_;
  std::set<std::string> told_;  // blocks that are bad
  std::string error_;           // the last that was told
  std::chrono::milliseconds wait_;
  std::chrono::milliseconds again_;
  BackgroundTask task_;  // last: it uses the members above
};

}  // namespace embertide
