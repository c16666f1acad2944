// PeerPool: the other nodes of a group: who lives, which versions they have, and lookups there.
//
// Every reply and every call from a peer says which versions it can answer; a beat (an empty
// lookup) goes to each peer when nothing else does. Parts for one peer are put together: a call
// leaves at once while fewer than two are under way, else when 64 KiB wait, a call returns or 200
// us passed.
//
// Thread-safe. Private to peer and node.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "embertide/status.h"
#include "embertide/v1/node.pb.h"

namespace embertide {

struct PeerPoolOptions {
  std::string name;   // of this node
  std::string token;  // sent with every call; empty: none
  std::chrono::milliseconds beat_every{100};
  uint32_t dead_after_beats = 5;
  std::chrono::microseconds coalesce{200};
};

// A part of a request on its way to a peer. Filled in by the pool; its owner keeps it until it is
// told.
struct PartCall {
  v1::LookupPart part;
  size_t answer_bytes = 0;  // of its result, at most
  v1::LookupResult result;
  uint64_t epoch = 0;  // of the peer, when it answered
  Status status;       // of the call that carried it: kUnavailable, kInvalidArgument, kCorrupt
  size_t bytes = 0;    // encoded, about
};

// Counters since the start.
struct PeerStats {
  std::atomic<uint64_t> calls{0};   // lookups sent, beats excluded
  std::atomic<uint64_t> parts{0};   // in them
  std::atomic<uint64_t> failed{0};  // calls without an answer, beats included
  std::atomic<uint64_t> deaths{0};  // times that a peer was found dead
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
  };
  // The peers from now on. Those that stay keep their connection and what is known of them.
  void SetPeers(std::span<const Address> peers);
  // A peer that lives called, and has these versions.
  void Heard(const std::string& name, const v1::VersionRange& versions);
  // Beats all peers now: a version was committed here.
  void BeatNow();

  // Sends parts to a peer and calls `done` when all are answered or have failed, from another
  // thread, at most shortly after the deadline. A peer that is not there fails them with
  // kUnavailable.
  void Lookup(const std::string& peer, std::span<PartCall> parts, uint64_t epoch,
              std::chrono::steady_clock::time_point deadline, std::function<void()> done);

  // True while the peer answers and has the version, or was never heard of yet.
  bool Lives(const std::string& peer, uint64_t version, uint64_t lineage) const;
  // The newest version, at most `newest`, that all peers have that live and have reached `floor`.
  // Peers below it, or below what another one still has, are behind, and do not count.
  // `begin`: the newest version that a peer which answers begins at, as a node that restarted lacks
  // those before; 0: none answers.
  struct Common {
    uint64_t newest = 0;
    uint64_t begin = 0;
  };
  Common CommonVersions(uint64_t newest, uint64_t floor) const;
  // Whether all peers that answer have this version, or a newer one.
  bool HaveReached(uint64_t version) const;
  uint32_t Alive() const;  // peers that answer
  const PeerStats& stats() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace embertide
