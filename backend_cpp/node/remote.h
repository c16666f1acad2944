// RemoteLookup: the keys of one execution that this node does not hold, asked of their owners.
//
// Keys are deduplicated by owner and table. A bag with several keys at one owner comes back as
// their fp64 sum, all else as rows, which a cache keeps for small executions at the same version.
// An owner that does not answer, or does not hold the bucket, is passed over for the next one;
// without any, the policy says whether the key reads as the default row. The caller's deadline
// holds for all of it: while keys have a next owner, the one asked gets half of what is left. Used
// by one thread; keeps its memory between executions.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "embertide/deadline.h"
#include "embertide/snapshot.h"
#include "embertide/store.h"
#include "node/remote_cache.h"
#include "node/routing.h"
#include "peer/peer_pool.h"

namespace embertide {

// Counters since the start, over all executions of a node.
struct RemoteStats {
  std::atomic<uint64_t> keys{0};          // asked of peers, after deduplication
  std::atomic<uint64_t> hits{0};          // keys not asked, as the cache had them
  std::atomic<uint64_t> next_owners{0};   // keys asked of another owner, as one had no answer
  std::atomic<uint64_t> dead_owners{0};   // keys that no owner answered
  std::atomic<uint64_t> version_gone{0};  // executions to be started over: a peer lacks the version
  std::atomic<uint64_t> not_owner{0};     // the same: all owners lack a bucket
};

class RemoteLookup {
 public:
  // Requires: all outlive it. `default_rows`: a dead owner's keys read as default rows.
  RemoteLookup(const Store& store, const Manifest& manifest, PeerPool* peers, RemoteCache* cache,
               bool default_rows, RemoteStats* stats)
      : store_(store),
        manifest_(manifest),
        peers_(peers),
        cache_(cache),
        default_rows_(default_rows),
        stats_(stats) {}

  // Asks for what is not held at the version, until `deadline`, and sets `remote_of` and `remote`
  // of each request, which hold until the next call. kVersionGone, kNotOwner: pin again, with the
  // newest plan, and start over; kUnavailable: an owner is dead, and the policy says error.
  // Requests that then do not lack a row are whole.
  Status Fetch(const Routing& routing, uint64_t version, uint64_t lineage,
               std::span<const BagFeature> features, std::span<KeyBags> requests,
               Deadline deadline);
  // Whether no owner of one of its keys answered, at the last Fetch that was kUnavailable.
  bool Lacks(size_t request) const { return lacks_[request]; }

 private:
  // A key in a request that waits for a row.
  struct Wanted {
    uint32_t request;
    uint32_t key;  // place in the request's keys
    uint32_t table;
    int32_t refused_by = kNobody;  // a peer that does not hold its bucket, or one asked for with it
  };
  static constexpr int32_t kNobody = -1;
  // A key in a request whose row the cache had.
  struct Cached {
    Wanted wanted;
    RemoteCache::Row row;
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
    bool more = false;  // a key has a next owner
  };
  // A key that is in a part. Of an older round: free.
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
    int32_t peer = kNone;  // place in Routing::peers, or one of the above
    bool more = false;     // there is another one
  };
  using Clock = std::chrono::steady_clock;

  Owner OwnerOf(const Routing& routing, const Wanted& wanted, int64_t key, uint64_t version,
                std::span<const bool> excluded) const;
  bool TakeCached(const Wanted& wanted, int64_t key, uint64_t version, uint64_t lineage);
  void Split(const Routing& routing, uint64_t version, uint64_t lineage,
             std::span<const BagFeature> features, std::span<KeyBags> requests,
             std::span<const bool> excluded, Parts* parts, std::vector<Wanted>* ownerless);
  void Number(std::span<const KeyBags> requests, const Parts& parts,
              std::span<const Wanted> ownerless);
  void BeginParts(const Routing& routing, size_t keys, Parts* parts);
  uint32_t OpenPart(uint16_t peer, uint32_t table, v1::PartPooling pooling, Parts* parts) const;
  void AddUser(const Wanted& wanted, int64_t key, uint32_t number, Parts* parts);
  void Ask(const Routing& routing, uint64_t version, uint64_t lineage, Clock::time_point deadline,
           Parts* parts);
  Status Take(const Parts& parts, uint64_t version, uint64_t lineage, std::vector<Wanted>* failed,
              std::span<bool> excluded);
  Status TakeRows(const Part& part, uint64_t version, uint64_t lineage,
                  const v1::LookupResult& result);
  Status TakeSums(const Part& part, const v1::LookupResult& result);
  Status TakeDefaults(std::span<const Wanted> ownerless, size_t requests);
  RemoteRow* RowOf(const Wanted& wanted) { return &rows_[row_of_[wanted.request][wanted.key] - 1]; }

  const Store& store_;
  const Manifest& manifest_;
  PeerPool* peers_;
  RemoteCache* cache_;
  const bool default_rows_;
  RemoteStats* stats_;
  std::vector<std::vector<uint32_t>> row_of_;  // by request, by key
  std::vector<RemoteRow> rows_;
  bool use_cache_ = false;  // by the execution at hand
  std::vector<Cached> cached_;
  std::vector<std::byte> payloads_;  // of cached_
  std::vector<bool> lacks_;          // by request
  std::vector<Seen> seen_;           // a table with open addressing, a power of two long
  uint64_t round_ = 0;
  std::vector<std::vector<PartCall>> calls_;  // by round; answers lie here while rows are read
};

}  // namespace embertide
