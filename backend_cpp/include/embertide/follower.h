// Follower: brings a node from version to version: stream tail, and one catch-up path from files.
//
//   commit on the bus, its `previous` is the node's newest   -> fetch its batches, stage, commit
//   anything else (gap, bad checksum, trimmed, Redis away    -> catch up: bucket files where the
//   or silent)                                                  chain of commits does not reach or
//                                                               is harmed, delta files, then the
//                                                               stream again
//
// A thread of its own; the node is told nothing but whole versions, in ascending order. Every wait
// is bounded, every drop counted.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "embertide/status.h"

namespace embertide {

namespace v1 {
class GlobalCommit;
}
struct Promotion;
class TaskBoard;

// The sink that a follower feeds. Called from the follower's thread alone.
class VersionSink {
 public:
  virtual ~VersionSink() = default;
  // The newest version held: number and lineage.
  virtual uint64_t newest_number() const = 0;
  virtual uint64_t newest_lineage() const = 0;
  virtual uint64_t schema_id() const = 0;
  // Rows of a version not yet committed.
  virtual Status Stage(uint64_t version, uint32_t table_id, uint32_t bucket,
                       const std::string& records) = 0;
  // Makes the version the newest. `tensors`: safetensors, empty if the dense net did not change.
  virtual Status Commit(const v1::GlobalCommit& commit, const std::string& tensors) = 0;
  // Forgets what is staged and not committed: the version has failed.
  virtual void DropStaged() = 0;
  // Brings the node to the state of a snapshot newer than its own. Nothing is left staged if it
  // fails. kUnavailable soon after `stop` asks for it; kResourceExhausted with the bytes that are
  // lacking, before the snapshot is read where that can be known.
  virtual Status Load(const std::string& snapshot, const std::stop_token& stop) = 0;
  // Since rows found no room there is more of it: trying again need not wait.
  virtual bool MayFit() const { return false; }
  // Whether rows of a bucket are wanted; the others are neither read nor staged.
  virtual bool Holds(uint32_t table_id, uint32_t bucket) const {
    static_cast<void>(table_id);
    static_cast<void>(bucket);
    return true;
  }
  // A newer revision of the promotion record; only with FollowerOptions::guard.
  virtual void SetPromotion(const Promotion& record) { static_cast<void>(record); }
  // False: the version is not to be taken before the promotion record says more.
  virtual bool MayTake(uint64_t number) {
    static_cast<void>(number);
    return true;
  }
  // Whether a snapshot of this version may be taken where no chain of commits leads on.
  virtual bool MayLoad(uint64_t number) const {
    static_cast<void>(number);
    return true;
  }
  // Called between versions, at least every 100 ms: the time to add and drop buckets. True: there
  // is more to do; it is called again soon.
  virtual bool OnIdle() { return false; }
};

struct FollowerOptions {
  std::string bus;          // Redis URL; empty: versions come from the publication's files alone
  std::string publication;  // REQUIRED: the folder that the trainer publishes to
  std::string model;        // REQUIRED with a bus: the manifest's name of the model; its keys' part
  std::string node = "node";  // part of the name under which Redis is told what is applied
  // Between attempts to reach Redis, and between looks at the files while it is away.
  std::chrono::milliseconds retry_every{500};
  // A bus that is silent this long says nothing of a publisher that cannot reach it: look at files.
  std::chrono::milliseconds look_every{2000};
  // After a file that could not be taken, until the same files are tried again: twice as long each
  // time, from `retry_every` on. New files are tried at once.
  std::chrono::milliseconds longest_back_off{300'000};
  bool guard = false;          // read the promotion record: its copy before each wait for a commit
  TaskBoard* tasks = nullptr;  // OPTIONAL: told how the thread is doing
};

// Counters since the start; any thread may read them.
struct FollowerStats {
  std::atomic<uint64_t> versions{0};       // applied
  std::atomic<uint64_t> rows{0};           // records applied, tombstones included
  std::atomic<uint64_t> repeats{0};        // messages at or below what was applied: dropped
  std::atomic<uint64_t> stale_lineage{0};  // messages of an older publisher: dropped
  std::atomic<uint64_t> gaps{0};           // batches or commits missing
  std::atomic<uint64_t> corrupt{0};        // messages or files that failed a proof
  std::atomic<uint64_t> other_schema{0};   // commits of a schema that is not loaded
  std::atomic<uint64_t> catch_ups{0};      // versions or snapshots taken from files
  std::atomic<uint64_t> reconnects{0};     // attempts to reach Redis
  std::atomic<uint64_t> refused{0};        // versions that the store had no room for
  std::atomic<uint64_t> backed_off{0};     // looks at files that failed before, put off
  std::atomic<uint64_t> held{0};           // attempts to take a version that the guard holds back
  std::atomic<uint64_t> skipped{0};        // versions that a rollback undid, never taken
  std::atomic<uint64_t> unnoted{0};        // times that Redis refused to note what is applied
  std::atomic<bool> connected{false};      // to Redis, now
  std::atomic<bool> caught_up{false};      // with the files and the bus as they were at the start
  // Wall clock from the publisher's commit of the newest version to its answers here.
  std::atomic<uint64_t> freshness_ms{0};
};

class Follower {
 public:
  // kInvalidArgument for a bad URL. Redis need not be there.
  static Result<std::unique_ptr<Follower>> Start(const FollowerOptions& options, VersionSink* sink);
  // Stops the thread; waits at most a few hundred ms, whatever it reads.
  ~Follower();
  Follower(const Follower&) = delete;
  Follower& operator=(const Follower&) = delete;

  const FollowerStats& stats() const;
  // Why the last version could not be taken, empty if it could: for logs and `doctor`.
  std::string last_error() const;

 private:
  struct Impl;
  explicit Follower(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The snapshots of a publication, in the order in which a node that starts tries them: the newest
// first, those that ordinary requests may see before the others. Those of versions before
// `first_version` are left out. kNotFound if there is none.
Result<std::vector<std::string>> SnapshotsToTry(const std::string& publication,
                                                const Promotion& promotion,
                                                uint64_t first_version = 0);

}  // namespace embertide
