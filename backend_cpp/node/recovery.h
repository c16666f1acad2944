// Opening a node from the seal of its SSD tier, and writing seals while it runs
// (docs/design/0006-seals.md). Private to this folder.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>

#include "base/background_task.h"
#include "base/mutex.h"
#include "node/node_state.h"

namespace embertide {

namespace v1 {
class GlobalCommit;
}

// The facts of a version beside its rows and weights, as its commit or its snapshot says.
VersionInfo VersionInfoOf(const v1::GlobalCommit& commit);
VersionInfo VersionInfoOf(const Manifest& manifest);

// A store as of `version`, which is not committed yet.
struct Recovered {
  std::unique_ptr<ServingStore> store;
  VersionInfo version;  // without weights
  std::string tensors;  // its dense tensors; empty for a node that leaves the dense part alone
};

// Opens the store from the seal in the SSD directory, if that is of this model and delta files lead
// from it to the publication's newest version; without a publication, if it is of this snapshot.
// nullopt: there is no seal. Otherwise the error says why it cannot be used: nothing is lost, the
// snapshot has all rows. `manifest` is that of options.snapshot.
Result<std::optional<Recovered>> OpenFromSeal(const NodeOptions& options, const Manifest& manifest,
                                              StoreOptions store_options);

// A thread that seals the store again and again. Thread-safe.
class Sealer {
 public:
  // `state` outlives it.
  explicit Sealer(const NodeState* state);
  // Its end gives up the seal at hand; it waits for a slice of it at most.
  Sealer(const Sealer&) = delete;
  Sealer& operator=(const Sealer&) = delete;

  // Why the last seal failed, empty if it did not.
  std::string error() const;

 private:
  Status SealOnce(const std::stop_token& stop);
  // Whether there is more room than when the last seal found none.
  bool HasMoreRoom() const;

  const NodeState* const state_;
  mutable Mutex mutex_;
  std::string error_ EMBERTIDE_GUARDED_BY(mutex_);
  // --- the thread's
  Status last_ = Status::Ok();  // of the last seal
  uint64_t room_ = 0;           // of the folder, once that had failed
  std::chrono::steady_clock::time_point due_;
  BackgroundTask task_;  // last: it uses the members above
};

}  // namespace embertide
