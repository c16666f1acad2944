// PeerPool: the other nodes of a group: who lives, which versions they have, and lookups there.
//
// Every reply says which versions the peer can answer; a beat (an empty lookup) goes to each peer
// when nothing else does. Only replies to this node's own calls teach it anything: whoever calls
// here may give any name and any versions, and can at most bring about a beat. A peer that says
// nothing for five beats is dead; its connection is then made anew every second, which resolves its
// name again.
//
// Parts for one peer are put together: a call leaves at once while fewer than two are under way,
// else when 64 KiB wait, a call returns or 200 us passed.
//
// Thread-safe. Private to peer and node.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "access/credentials.h"
#include "access/token_file.h"
#include "embertide/no_answer.h"
#include "embertide/status.h"
#include "embertide/v1/node.pb.h"

namespace embertide {

class TaskBoard;

struct PeerPoolOptions {
  std::string name;                             // of this node
  std::shared_ptr<TokenFile> tokens = nullptr;  // OPTIONAL: what is sent with every call
  Credentials credentials = Credentials::PlainText();
  std::chrono::milliseconds beat_every{100};
  uint32_t dead_after_beats = 5;
  std::chrono::microseconds coalesce{200};
  // Bytes of questions and the answers they may get, waiting or under way; further parts fail. A
  // part that finds nothing before it is always sent.
  size_t max_bytes_a_peer = 256 << 20;
  TaskBoard* tasks = nullptr;  // OPTIONAL: told how the thread of the beats is doing
};

// A part of a request on its way to a peer. Filled in by the pool; its owner keeps it until it is
// told.
struct PartCall {
  v1::LookupPart part;
  size_t answer_bytes = 0;  // of its result, at most
  v1::LookupResult result;
  uint64_t epoch = 0;              // of the peer, when it answered
  Status status;                   // of the call that carried it: kUnavailable, kInvalidArgument
  NoAnswer why = NoAnswer::kDead;  // where status is kUnavailable
  size_t bytes = 0;                // encoded, about
};

// Counters since the start.
struct PeerStats {
  std::atomic<uint64_t> calls{0};    // lookups sent, beats excluded
  std::atomic<uint64_t> parts{0};    // in them
  std::atomic<uint64_t> failed{0};   // calls without an answer, beats included
  std::atomic<uint64_t> deaths{0};   // times that a peer was found dead
  std::atomic<uint64_t> redials{0};  // connections made anew, as the peer was dead
};

// The questions to one peer, and its answers, since the start; beats excluded.
struct PeerTraffic {
  struct Table {
    uint64_t keys = 0;
    uint64_t sum_keys = 0;    // of `keys`, those in parts for sums
    uint64_t sums = 0;        // of these parts
    uint64_t since_keys = 0;  // of `keys`, those in parts that say `since`
    uint64_t bytes = 0;       // of the parts and their results
  };
  uint64_t calls = 0;
  uint64_t failed = 0;
  std::chrono::microseconds round_trip{0};  // of all calls together
  std::map<uint32_t, Table> tables;         // by id
};

class PeerPool {
 public:
  // `versions` says what this node can answer, `epoch` which plan it acts by; called from threads
  // of the pool.
  PeerPool(PeerPoolOptions options, std::function<v1::VersionRange()> versions,
           std::function<uint64_t()> epoch);
  // Ends calls under way.
  ~PeerPool();
  PeerPool(const PeerPool&) = delete;
  PeerPool& operator=(const PeerPool&) = delete;

  struct Address {
    std::string name;
    std::string address;
    // Not counted as alive; and its versions are waited for only while a peer that is no spare one
    // does not answer.
    bool spare = false;
  };
  // The peers from now on. Those that stay keep their connection and what is known of them.
  void SetPeers(std::span<const Address> peers);
  // Calls `news` whenever a peer is known to have a newer version, from threads of the pool; it
  // must not call the pool. Null: nobody; once that returns, no call is under way.
  void TellNews(std::function<void()> news);
  // A call came that names a peer as its sender and says which versions that has. Believed only as
  // far as the peer is asked, at most every millisecond, where this is not what is known of it.
  void OnVersionHint(const std::string& name, const v1::VersionRange& versions);
  // Beats all peers now: a version was committed here.
  void BeatNow();

  // Parts for one peer.
  struct Ask {
    std::string peer;
    std::span<PartCall> parts;
  };
  // Sends them all and waits until each part is answered or has failed, at most shortly after the
  // deadline; `spin`: so long awake. Throws nothing: what cannot be sent has failed.
  void LookupAll(std::span<const Ask> asks, uint64_t epoch,
                 std::chrono::steady_clock::time_point deadline,
                 std::chrono::microseconds spin = {}) noexcept;
  // Sends parts to a peer and calls `done` when all are answered or have failed, from another
  // thread, at most shortly after the deadline. A peer that is not there fails them with
  // kUnavailable. If this throws, nothing was sent and `done` is not called; that may not throw.
  void Lookup(const std::string& peer, std::span<PartCall> parts, uint64_t epoch,
              std::chrono::steady_clock::time_point deadline, std::function<void()> done);

  // The versions that a peer which answers can answer at.
  struct Range {
    uint64_t oldest = 0;
    uint64_t newest = 0;
    uint64_t lineage = 0;  // of newest

    // A version of the same number and another lineage is another version.
    bool Has(uint64_t version, uint64_t of_lineage) const {
      if (version < oldest || version > newest) return false;
      return version < newest || of_lineage == lineage;
    }
  };
  std::vector<Range> LiveRanges() const;  // of those whose versions are waited for
  // Why a peer is not to be asked at a version: kDead or kVersion. Nothing: it is to be; so is one
  // that was never heard of yet.
  std::optional<NoAnswer> WhyNot(const std::string& peer, uint64_t version, uint64_t lineage) const;
  // Whether a peer that answers has the version before this one as its newest.
  bool IsJustBehind(const std::string& peer, uint64_t version) const;
  // "node-1 holds versions 5 to 12", for messages.
  std::string Describe(const std::string& peer) const;
  // Whether all of those that answer have this version, or a newer one; false while one of them was
  // not heard of yet.
  bool HaveReached(uint64_t version) const;
  uint32_t Alive() const;  // peers that answer, but spare ones
  const PeerStats& stats() const;
  // By name.
  std::map<std::string, PeerTraffic> Traffic() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace embertide
