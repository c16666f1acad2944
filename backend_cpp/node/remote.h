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
#include <map>
#include <span>
#include <string>
#include <unordered_map>
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
    std::unordered_map<int64_t, uint32_t> place_of;
    std::vector<Wanted> users;         // who gets an answer from it
    std::vector<uint32_t> user_place;  // place in keys of each
    std::vector<uint32_t> offsets;     // of sums; empty for rows
  };
  struct Parts {
    std::vector<Part> all;
    // The one that further keys of a peer and table go to, by whether sums are wanted.
    std::map<std::tuple<uint16_t, uint32_t, bool>, size_t> open;
  };

  int OwnerOf(const Routing& routing, uint32_t table, int64_t key, uint64_t version,
              std::span<const bool> excluded) const;
  void Split(const Routing& routing, uint64_t version, std::span<const BagFeature> features,
             std::span<KeyBags> requests, std::span<const bool> excluded, Parts* parts,
             std::vector<Wanted>* ownerless) const;
  Part* OpenPart(uint16_t peer, uint32_t table, bool sums, Parts* parts) const;
  static void AddUser(const Wanted& wanted, int64_t key, Part* part);
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
  std::vector<std::vector<PartCall>> calls_;  // by round; answers lie here while rows are read
};

}  // namespace embertide
