// NodeState: what a node serves and by what options: its model, its store, the versions that it
// knows, its meters. It knows neither peers nor the publication.
//
// Owned by Node, which hands it to all that works for the node: Fleet and its parts, Sealer,
// Mender. It outlives them.
//
// Thread-safe, with one exception: Commit belongs to the thread that applies versions, which is the
// one that opens the node and later the follower's. versions_mutex_ guards the versions known; no
// other lock is taken under it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/slowest.h"
#include "embertide/node.h"
#include "node/key_sample.h"
#include "node/slow_lookup.h"

namespace embertide {

class NodeState {
 public:
  // Versions that a pin may name, and a few before them, by number.
  using Versions = std::map<uint64_t, std::shared_ptr<const VersionInfo>>;
  struct Parts {
    NodeOptions options;
    std::unique_ptr<TaskBoard> tasks;
    Manifest manifest;
    std::vector<Feature> features;
    std::unique_ptr<VersionGate> gate;      // null without a guard
    std::unique_ptr<LoadMeter> load;        // null for a node alone
    std::unique_ptr<LatencyMeter> latency;  // the same
    std::unique_ptr<KeySample> sample;      // null without warm_up_bytes
    std::unique_ptr<ServingStore> store;    // after load, which it tells of reads
  };
  explicit NodeState(Parts parts);
  ~NodeState();
  NodeState(const NodeState&) = delete;
  NodeState& operator=(const NodeState&) = delete;

  const NodeOptions& options() const { return parts_.options; }
  const Manifest& manifest() const { return parts_.manifest; }
  const std::vector<Feature>& features() const { return parts_.features; }
  ServingStore& store() const { return *parts_.store; }
  TaskBoard& tasks() const { return *parts_.tasks; }
  VersionGate* gate() const { return parts_.gate.get(); }         // null without a guard
  LoadMeter* load() const { return parts_.load.get(); }           // null for a node alone
  LatencyMeter* latency() const { return parts_.latency.get(); }  // the same
  KeySample* sample() const { return parts_.sample.get(); }       // null without warm_up_bytes

  // Null before the first version.
  std::shared_ptr<const Versions> versions() const {
    const MutexLock lock(versions_mutex_);
    return versions_;
  }
  // Null for a version that is not known (any more).
  std::shared_ptr<const VersionInfo> InfoOf(uint64_t number) const;
  // The newest version held. Requires: there is one, here and below.
  std::shared_ptr<const VersionInfo> newest() const { return versions()->rbegin()->second; }
  // The version that ordinary requests are answered at; with a guard, not the newest by far.
  std::shared_ptr<const VersionInfo> served() const;
  // Pins the version that ordinary requests are answered at.
  Result<ReadView> PinServed() const {
    return parts_.gate == nullptr ? store().PinNewest() : PinGated();
  }
  Result<Pinned> Pin() const {
    return PinChosen([](uint64_t served) { return served; });
  }
  // Pins the version that `choose` makes of the number of that one. On the path of every request,
  // so it is no std::function.
  template <typename Choose>
  Result<Pinned> PinChosen(const Choose& choose) const {
    // Once round: a version is made known before it can be pinned, and is kept for two windows.
    for (int attempt = 0; attempt < 2; ++attempt) {
      Result<ReadView> view = PinServed();
      if (!view.ok()) return view.status();
      const std::shared_ptr<const Versions> known = versions();
      auto found = known->find(view->version());
      if (found == known->end()) continue;
      const uint64_t version = choose(found->first);
      if (version != found->first) {
        Result<ReadView> older = store().Pin(version);
        if (!older.ok()) continue;  // it left the window meanwhile
        view = std::move(older);
        found = known->find(version);
        if (found == known->end()) continue;
      }
      return Pinned{std::move(*view), found->second};
    }
    return Status(Code::kVersionGone, "the newest version left the window while it was pinned");
  }
  // Makes a version known, and the newest of the store.
  Status Commit(std::shared_ptr<const VersionInfo> info);

  // `requests` were answered together, `latency` after work on them began. Never waits; counts
  // nothing for a node alone.
  void NoteLatency(std::chrono::nanoseconds latency, size_t requests) const;
  // The slowest requests, of a node that somebody asks for its load.
  Slowest<SlowRequest>& slow() const { return slow_; }
  // The slowest look-ups for peers, of such a node.
  Slowest<SlowLookup>& slow_lookups() const { return slow_lookups_; }
  // How the tasks of the node and those of the process are doing, by name.
  std::vector<TaskHealth> AllTasks() const;
  // Buckets, an attempt each, whose rows in bad blocks of the SSD could not be brought again.
  uint64_t failed_mends() const { return failed_mends_; }
  void NoteFailedMend() { ++failed_mends_; }

 private:
  Result<ReadView> PinGated() const;
  // Makes `info` known; must come before the store's commit of it.
  void AddVersion(std::shared_ptr<const VersionInfo> info);

  Parts parts_;
  // Under a mutex, and not std::atomic: that of libstdc++ 12 ends a load without release, and so
  // races with the next store (ThreadSanitizer finds it).
  mutable Mutex versions_mutex_;
  std::shared_ptr<const Versions> versions_ EMBERTIDE_GUARDED_BY(versions_mutex_);
  std::atomic<uint64_t> failed_mends_{0};
  mutable Slowest<SlowRequest> slow_;
  mutable Slowest<SlowLookup> slow_lookups_;
};

}  // namespace embertide
