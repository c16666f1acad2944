// HotRows: the rows of other nodes' buckets that this node reads most, kept here at every version
// (docs/design/0013-hot-rows.md).
//
//   execution --Find--> sets (no lock)          miss: its owner is asked, as ever
//       \--Note: what was asked for, what came--> keeper thread: a policy chooses who enters
//   version committed --> keeper: asks the owners which of the rows changed, and for those
//
// A copy is used at versions at which it is known to be the owner's row, and at no other: until the
// owner has said so for a new version, its key is asked for like any other. So nothing that fails
// here changes an answer. Rows that nobody read over two versions are no longer kept up to date.
//
// Bounded: the sets, their policies and what waits for the keeper take `bytes` at most, and a table
// that the plan limits so many rows. Where more is read than the keeper can follow, it hears of a
// part, chosen by chance.
//
// Thread-safe. Requires: what it is made of outlives it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <stop_token>
#include <vector>

#include "base/background_task.h"
#include "base/mutex.h"
#include "embertide/snapshot.h"
#include "embertide/v1/node.pb.h"
#include "node/hot_set.h"
#include "node/routing.h"
#include "peer/peer_pool.h"
#include "policy/policy.h"

namespace embertide {

// Counters since the start, and sizes now.
struct HotStats {
  std::atomic<uint64_t> reads{0};      // keys answered by a copy
  std::atomic<uint64_t> stale{0};      // keys with a copy of another version: asked for
  std::atomic<uint64_t> entered{0};    // rows
  std::atomic<uint64_t> left{0};       // rows: for others, or as their bucket came here
  std::atomic<uint64_t> unchanged{0};  // rows that a version left as they were
  std::atomic<uint64_t> changed{0};    // rows that it did not
  std::atomic<uint64_t> failed{0};     // rows that no owner could say so of; tried again
  std::atomic<uint64_t> dropped{0};    // reads that the keeper was to hear of and did not
  std::atomic<uint64_t> clipped{0};    // plans whose limits need more than `bytes`
  std::atomic<uint64_t> rows{0};
  std::atomic<uint64_t> bytes{0};
};

class HotRows {
 public:
  using Name = HotSet::Name;
  using Row = HotSet::Row;
  using Version = HotSet::Version;
  struct Options {
    uint64_t bytes = 0;  // 0: nothing is kept
    std::string policy = "reuse-density";
    // The plan and the version that it goes by, asked from its thread.
    std::function<std::shared_ptr<const Routing>()> routing;
    std::function<Version()> served;  // newest that requests are answered at; number 0: none yet
    TaskBoard* tasks = nullptr;       // OPTIONAL: told how the thread is doing
  };
  HotRows(const Manifest& manifest, PeerPool* peers, Options options);
  ~HotRows();
  HotRows(const HotRows&) = delete;
  HotRows& operator=(const HotRows&) = delete;

  // The sets that executions look into: a picture of them, which change under it.
  class Sets {
   public:
    HotSet::Found Find(const Name& name, Version version, Row* row,
                       std::vector<std::byte>* payloads) const {
      const HotSet* set = by_table_[name.table];
      return set == nullptr ? HotSet::Found::kNo : set->Find(name, version, row, payloads);
    }

   private:
    friend class HotRows;
    struct Part;
    std::vector<const HotSet*> by_table_;
    std::vector<Part*> part_of_;  // by table
    std::vector<std::shared_ptr<Part>> parts_;
  };
  std::shared_ptr<const Sets> sets() const {
    const MutexLock lock(mutex_);
    return sets_;
  }

  // A key that was asked for: answered from here, by its row from the owner, or in a sum.
  struct Asked {
    enum class How : uint8_t { kHere, kRow, kSum };
    Name name;
    Version version;
    How how = How::kSum;
    Row row = {};                        // of kRow
    const std::byte* payload = nullptr;  // of `row`, during the call
  };
  // Tells the keeper of some of the keys that were asked for; never waits. `met`: of how many.
  void Note(std::span<const Asked> asked, size_t met);
  // One key in so many is to be told of.
  uint32_t every() const { return every_.load(std::memory_order_relaxed); }
  // A version was committed, or a peer has one.
  void Wake();
  HotStats& stats() { return stats_; }

 private:
  using Part = Sets::Part;
  // Keys of one table to be asked of one peer.
  struct Question {
    uint16_t peer = 0;
    uint32_t table = 0;
    Version since;  // number 0: not known here yet
    std::vector<uint64_t> keys;
  };
  struct Log {
    std::vector<Asked> asked;
    std::vector<size_t> payload_at;  // of each, in payloads
    std::vector<std::byte> payloads;
    bool empty() const { return asked.empty(); }
  };

  static constexpr uint32_t kNoLimit = 1U << 28;  // what a policy can have

  Status Round(const std::stop_token& stop);
  void FollowPlan();
  std::map<uint32_t, uint32_t> LimitsOf(const Routing& routing) const;
  // `keep`: rows of the sets before.
  void MakeSets(const std::map<uint32_t, uint32_t>& limits, bool keep = true);
  void TakeOver(const Sets& before);
  std::shared_ptr<Part> MakePart(uint64_t bytes, uint32_t slots, uint32_t payload_bytes);
  Part* PartOf(uint32_t table);
  void Replay();
  void Take(const Asked& asked);
  void Enter(Part* part, const Name& name, const Row& row, const std::byte* payload,
             Version version);
  void Leave(Part* part, uint32_t slot);
  // Brings the sets to the version that is served, and says when to look again.
  std::chrono::milliseconds Refresh();
  // Rows are of an older version: look at them in a while.
  void NoteBehind();
  // Puts what is to be brought to a version to questions; false: some owner is not there yet.
  bool Collect(const Routing& routing, Version to, std::vector<Question>* questions);
  // Puts a key to a question of its first owner that has the version; false: none has.
  bool Put(const Routing& routing, const Name& name, Version since, Version at,
           std::vector<Question>* questions);
  // False: some owner did not answer.
  bool Ask(const Routing& routing, Version at, const std::vector<Question>& questions);
  void TakeAnswer(const Question& question, Version at, const v1::LookupResult& result);

  const Manifest& manifest_;
  PeerPool* const peers_;
  const Options options_;
  HotStats stats_;
  std::atomic<uint32_t> every_{1};
  std::atomic<uint64_t> met_{0};

  // Changed by the keeper alone, which reads it without the mutex.
  mutable Mutex mutex_;
  std::shared_ptr<const Sets> sets_;

  Mutex log_mutex_;
  std::condition_variable_any wake_;
  bool woken_ EMBERTIDE_GUARDED_BY(log_mutex_) = false;
  Log log_ EMBERTIDE_GUARDED_BY(log_mutex_);

  // --- the keeper's
  Log taken_;
  uint64_t epoch_ = 0;                   // of the plan whose limits hold
  std::map<uint32_t, uint32_t> limits_;  // rows by table's place
  std::vector<Name> wishes_;             // that were chosen, and whose rows are to be asked for
  Version aged_;                         // at which rows were last looked at for reads
  bool behind_ = false;                  // some row is of an older version
  std::chrono::steady_clock::time_point look_again_;  // at those, not before
  std::chrono::milliseconds back_off_{0};
  std::vector<std::byte> scratch_;
  std::chrono::steady_clock::time_point rated_;
  std::chrono::milliseconds again_{0};    // until the next round
  bool broken_ = false;                   // a round ended halfway: the sets may not fit together
  std::unique_ptr<BackgroundTask> task_;  // last: it uses the members above
};

}  // namespace embertide
