// RemoteLookup: the keys of one execution that this node does not hold, asked of their owners.
//
// Rows that are read often are kept here (hot_rows.h). The other keys are deduplicated by owner and
// table; a bag with several keys at one owner comes back as their fp64 sum, all else as rows.
// An owner that does not answer, or lacks the version or the bucket, is passed over for the next
// one. Where all owners lack the version, and one is but a version behind, it is waited for, for
// half of the time that is left at most. A key that no owner answers reads as the default row,
// marked Source::kUnanswered; a request with more of them than max_degraded_share of its keys fails
// alone. The caller's deadline holds for all of it: while keys have a next owner, the one asked
// gets half of what is left. Used by one thread; keeps its memory between executions.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "embertide/deadline.h"
#include "embertide/node.h"
#include "embertide/serving_store.h"
#include "embertide/snapshot.h"
#include "node/hot_rows.h"
#include "node/routing.h"
#include "peer/peer_pool.h"
#include "store/gap_sampler.h"

namespace embertide {

// Counters since the start, over all executions of a node.
struct RemoteStats {
  std::atomic<uint64_t> keys{0};          // asked of peers, after deduplication
  std::atomic<uint64_t> next_owners{0};   // keys asked of another owner, as one had no answer
  std::atomic<uint64_t> version_gone{0};  // executions to be started over: a peer lacks the version
  std::atomic<uint64_t> not_owner{0};     // the same: all owners lack a bucket
  std::array<std::atomic<uint64_t>, kNoAnswers> degraded_keys{};  // no owner answered, by reason
};

class RemoteLookup {
 public:
  struct Options {
    double max_degraded_share = 0;
    // For the peers of a request whose caller names no deadline.
    std::chrono::milliseconds peer_timeout{100};
    // The version that would be pinned now.
    std::function<uint64_t()> pinnable;
    // The plan that would be used now.
    std::function<std::shared_ptr<const Routing>()> routing;
    // Whether all that the plan of an epoch gives this node is held, at a version and later ones.
    std::function<bool(uint64_t epoch, uint64_t version)> holds;
    ReadObserver* observer = nullptr;  // OPTIONAL: told of keys that are not read here
  };
  // Requires: all outlive it.
  RemoteLookup(const ServingStore& store, const Manifest& manifest, PeerPool* peers, HotRows* hot,
               Options options, RemoteStats* stats)
      : store_(store),
        manifest_(manifest),
        peers_(peers),
        hot_(hot),
        options_(std::move(options)),
        stats_(stats) {}

  // Asks for what is not held at the pin, and sets `remote_of` and `remote` of each request, which
  // hold until the next call. Peers get nine tenths of the time until `deadline`, or peer_timeout
  // where there is none. kVersionGone, kNotOwner, if `terms` allow them: pin again, with the newest
  // plan, and start over. kResourceExhausted: the answers would be too large for one execution.
  // Else ResultOf says what became of each request.
  Status Fetch(const Pinned& pinned, std::span<const BagFeature> features,
               std::span<KeyBags> requests, Deadline deadline, FetchTerms terms);
  // The result of one request of the last Fetch that was Ok.
  const FetchedRequest& ResultOf(size_t request) const { return results_[request]; }
  // The answers of the last Fetch were used: frees them, and all memory beyond what a usual
  // execution needs.
  void Release();

 private:
  // A key in a request that waits for a row.
  struct Wanted {
    uint32_t request;
    uint32_t key;  // place in the request's keys
    uint32_t table;
    int32_t refused_by = kNobody;  // a peer that does not hold its bucket, or one asked for with it
    NoAnswer why = NoAnswer::kDead;  // of a key that no owner answers
    bool noted = false;              // whoever keeps hot rows is told of it
  };
  static constexpr int32_t kNobody = -1;
  // A key in a request of whose row a copy is here.
  struct HotKey {
    Wanted wanted;
    HotSet::Row row;
    size_t payload;  // where it begins in payloads_
  };
  struct Part {
    uint16_t peer = 0;  // place in Routing::peers
    uint32_t table = 0;
    v1::PartPooling pooling = v1::PART_POOLING_ROWS;
    std::vector<int64_t> keys;
    std::vector<Wanted> users;         // who gets an answer from it
    std::vector<uint32_t> user_place;  // place in keys of each
    std::vector<uint32_t> offsets;     // of sums; empty for rows
    std::vector<float> weights;        // of weighed sums, one a user; else empty

    bool sums() const { return pooling != v1::PART_POOLING_ROWS; }
  };
  struct Parts {
    std::vector<Part> all;
    // The one that further keys of a peer and table go to, by what is wanted; -1: none yet.
    std::vector<int32_t> open;
    bool more = false;        // a key has a next owner
    size_t answer_bytes = 0;  // at most
  };
  // A key that is in a part. One of an older round is free.
  struct Seen {
    int64_t key = 0;
    uint32_t part = 0;
    uint32_t place = 0;
    uint64_t round = 0;
  };

  // Whom to ask for a key.
  struct Owner {
    static constexpr int32_t kHere = -1;
    static constexpr int32_t kNone = -2;
    int32_t peer = kNone;            // place in Routing::peers, or one of the above
    bool more = false;               // there is another one
    NoAnswer why = NoAnswer::kDead;  // of kNone
  };
  // By place in Routing::peers: why one is not asked (any more).
  using PassedOver = std::vector<std::optional<NoAnswer>>;
  using Clock = std::chrono::steady_clock;

  bool IsHere(const Routing::Bucket& planned, uint32_t table, uint32_t bucket,
              uint64_t version) const;
  Owner OwnerOf(const Routing& routing, const Wanted& wanted, int64_t key, uint64_t version) const;
  // Whether there is a copy of the row of a key that is not held here.
  bool TakeHot(Wanted* wanted, uint64_t key, HotSet::Version version);
  void Observe(uint32_t table, uint64_t key, uint64_t hash, uint32_t bucket, bool hot);
  // Tells of the keys of the Fetch so far, and forgets them.
  void Tell();
  void Split(const Routing& routing, uint64_t version, uint64_t lineage,
             std::span<const BagFeature> features, std::span<KeyBags> requests, Parts* parts);
  void Number(std::span<const KeyBags> requests, const Parts& parts);
  void BeginParts(const Routing& routing, size_t keys, Parts* parts);
  uint32_t OpenPart(uint16_t peer, uint32_t table, v1::PartPooling pooling, Parts* parts) const;
  void AddUser(const Wanted& wanted, int64_t key, uint32_t number, Parts* parts);
  // Splits what failed by their next owners; a key whose bucket is here by now is read here.
  void SplitAgain(const Routing& routing, uint64_t version, std::span<const KeyBags> requests,
                  std::span<const Wanted> failed, Parts* parts);
  static bool LacksVersion(const Wanted& wanted) { return wanted.why == NoAnswer::kVersion; }
  // Waits, until `until` at the longest, for an owner that is about to have the version that is
  // wanted for some key without an answer. False: there is none, or it does not have it in time.
  bool AwaitVersion(const Routing& routing, uint64_t version, uint64_t lineage,
                    Clock::time_point until);
  void Ask(const Routing& routing, uint64_t version, uint64_t lineage, Clock::time_point deadline,
           FetchTerms terms, Parts* parts);
  // Adds those of the requests that use the part; `traces`: by request.
  static void AddTraces(const Part& part, std::span<const std::string_view> traces,
                        v1::LookupPart* out);
  Status Take(const Parts& parts, uint64_t version, uint64_t lineage, FetchTerms terms,
              std::vector<Wanted>* failed);
  Status TakeRows(const Part& part, HotSet::Version version, const v1::LookupResult& result);
  Status TakeSums(const Part& part, HotSet::Version version, const v1::LookupResult& result);
  // Whether another pin would do better than one that a live peer lacks.
  bool MayStartOver(uint64_t version, FetchTerms terms) const {
    return terms.may_start_over && !terms.named && options_.pinnable() != version;
  }
  void Degrade(const Routing& routing, uint64_t version, std::span<const KeyBags> requests,
               FetchTerms terms);
  Status Refusal(const Routing& routing, uint64_t version, size_t request, size_t keys,
                 FetchTerms terms) const;
  RemoteRow* RowOf(const Wanted& wanted) { return &rows_[row_of_[wanted.request][wanted.key] - 1]; }

  const ServingStore& store_;
  const Manifest& manifest_;
  PeerPool* peers_;
  HotRows* hot_;
  const Options options_;
  RemoteStats* stats_;
  std::vector<std::vector<uint32_t>> row_of_;  // by request, by key
  std::vector<RemoteRow> rows_;
  bool all_held_ = false;  // here, of what the plan says; for the execution at hand
  std::shared_ptr<const HotRows::Sets> sets_;  // the same
  std::vector<HotKey> hot_keys_;
  std::vector<std::byte> payloads_;    // of hot_keys_
  std::vector<HotRows::Asked> asked_;  // to be told of
  std::vector<ObservedRead> observed_;
  std::vector<WatchedKey> watched_;
  size_t met_ = 0;    // keys that are not held here
  size_t stale_ = 0;  // of these, keys with a copy of another version
  GapSampler gaps_;
  uint32_t until_noted_ = 0;
  uint32_t until_observed_ = 0;
  PassedOver passed_over_;
  std::vector<Wanted> unanswered_;
  std::vector<FetchedRequest> results_;
  std::vector<Seen> seen_;  // a table with open addressing, a power of two long
  uint64_t round_ = 0;
  std::vector<std::vector<PartCall>> calls_;  // by round; answers lie here while rows are read
};

}  // namespace embertide
