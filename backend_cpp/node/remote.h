// RemoteLookup: the keys of one execution that this node does not hold, asked of their owners.
//
// Keys are deduplicated by owner and table. A bag with several keys at one owner comes back as
// their fp64 sum, all else as rows. An owner that does not answer is passed over for the next one;
// without any, the policy says whether the key reads as the default row. Used by one thread; keeps
// its memory between executions.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "embertide/snapshot.h"
#include "embertide/store.h"
#include "node/routing.h"
#include "peer/peer_pool.h"

namespace embertide {

// Counters since the start, over all executions of a node.
struct RemoteStats {
  std::atomic<uint64_t> keys{0};          // asked of peers, after deduplication
  std::atomic<uint64_t> next_owners{0};   // keys asked of another owner, as one did not answer
  std::atomic<uint64_t> dead_owners{0};   // keys that no owner answered
  std::atomic<uint64_t> version_gone{0};  // executions to be started over: a peer lacks the version
  std::atomic<uint64_t> not_owner{0};     // executions to be started over: a peer lacks a bucket
};

class RemoteLookup {
 public:
  // Requires: all outlive it. `default_rows`: a dead owner's keys read as default rows.
  RemoteLookup(const Store& store, const Manifest& manifest, PeerPool* peers, bool default_rows,
               std::chrono::milliseconds deadline, RemoteStats* stats)
      : store_(store),
        manifest_(manifest),
        peers_(peers),
        default_rows_(default_rows),
        deadline_(deadline),
        stats_(stats) {}

  // Asks for what is not held at the version, and sets `remote_of` and `remote` of each request,
  // which hold until the next call. kVersionGone, kNotOwner: pin again, with the newest plan, and
  // start over; kUnavailable: an owner is dead, and the policy says error.
  Status Fetch(const Routing& routing, uint64_t version, uint64_t lineage,
               std::span<const BagFeature> features, std::span<KeyBags> requests);

 private:
  // A key in a request that waits for a row.
  struct Wanted {
    uint32_t request;
    uint32_t key;  // place in the request's keys
    uint32_t table;
  };
  struct Part {
    uint16_t peer = 0;  // place in Routing::peers
    uint32_t table = 0;
    bool sums = false;
    std::vector<int64_t> keys;
    std::vector<Wanted> users;         // who gets an answer from it
    std::vector<uint32_t> user_place;  // place in keys of each
    std::vector<uint32_t> offsets;     // of sums; empty for rows
  };
  struct Parts {
    std::vector<Part> all;
    // The one that further keys of a peer and table go to, by whether sums are wanted; -1: none
    // yet.
    std::vector<int32_t> open;
  };
  // A key that is in a part. Of an older round: free.
  struct Seen {
    int64_t key = 0;
    uint32_t part = 0;
    uint32_t place = 0;
    uint64_t round = 0;
  };

  int OwnerOf(const Routing& routing, uint32_t table, int64_t key, uint64_t version,
              std::span<const bool> excluded) const;
  void Split(const Routing& routing, uint64_t version, std::span<const BagFeature> features,
             std::span<KeyBags> requests, std::span<const bool> excluded, Parts* parts,
             std::vector<Wanted>* ownerless);
  void BeginParts(const Routing& routing, size_t keys, Parts* parts);
  uint32_t OpenPart(uint16_t peer, uint32_t table, bool sums, Parts* parts) const;
  void AddUser(const Wanted& wanted, int64_t key, uint32_t number, Parts* parts);
  void Ask(const Routing& routing, uint64_t version, uint64_t lineage, Parts* parts);
  Status Take(const Parts& parts, std::vector<Wanted>* failed, std::span<bool> excluded);
  Status TakeRows(const Part& part, const v1::LookupResult& result);
  Status TakeSums(const Part& part, const v1::LookupResult& result);
  RemoteRow* RowOf(const Wanted& wanted) { return &rows_[row_of_[wanted.request][wanted.key] - 1]; }

  const Store& store_;
  const Manifest& manifest_;
  PeerPool* peers_;
  const bool default_rows_;
  const std::chrono::milliseconds deadline_;
  RemoteStats* stats_;
  std::vector<std::vector<uint32_t>> row_of_;  // by request, by key
  std::vector<RemoteRow> rows_;
  std::vector<Seen> seen_;  // a table with open addressing, a power of two long
  uint64_t round_ = 0;
  std::vector<std::vector<PartCall>> calls_;  // by round; answers lie here while rows are read
};

}  // namespace embertide
