// WarmUp: the rows of a sample of lookups come to where they are read fastest, before a node is
// asked for anything; and the sample of today is written for the next start. Private to this
// folder.
//
// A node that starts has its rows where its seal or its snapshot put them, not where readers had
// brought them: the first requests would read the SSD. Each lookup of the sample is made again, as
// requests make it, until hardly one key is read from the SSD, kMaxPasses times or kFor at most.
// In a fleet these are the keys whose buckets the node holds.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stop_token>

#include "base/background_task.h"
#include "embertide/node.h"
#include "embertide/status.h"
#include "node/key_sample.h"
#include "node/node_state.h"

namespace embertide {

// Thread-safe.
class WarmUp {
 public:
  static constexpr int kMaxPasses = 3;
  static constexpr std::chrono::seconds kFor{10};
  static constexpr std::chrono::seconds kWriteEvery{60};

  // Makes the lookups of the file, if there is one; what is wrong with it is counted and logged,
  // and the node starts without. Ends early when `stop` asks for it. Requires: the state has a
  // sample and a version. `state` outlives it.
  WarmUp(const NodeState* state, const std::stop_token& stop);
  // Writes the sample a last time.
  ~WarmUp();
  WarmUp(const WarmUp&) = delete;
  WarmUp& operator=(const WarmUp&) = delete;

  WarmUpStats stats() const;

 private:
  void LookUpAgain(const std::stop_token& stop);
  // Makes one lookup; adds to `from_ssd` the keys that were read from the SSD.
  Status LookUp(const KeySample::Lookup& lookup, uint64_t* from_ssd);
  Status Write();

  const NodeState* const state_;
  WarmUpStats stats_;                      // of the start; constant then
  std::atomic<uint64_t> failed_files_{0};  // that could not be read or written
  uint64_t written_ = 0;                   // lookups taken when the file was written last
  BackgroundTask task_;                    // last: it uses the members above
};

}  // namespace embertide
