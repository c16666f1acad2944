// HbmTier: the HBM tier of a store: rows of DDR copied to GPUs, where lookups find them first.
//
//   lookup   the devices are asked for every key; what they lack is found below, batch by batch,
//            while they are at the batches before and after (hbm/batch.h)
//   commit   rows that a version changes end there before it can be pinned
//   fill     rows that missed, as often as StoreOptions::hbm_policy says, are copied there
//
// The tiers below hold every row, so nothing depends on this one: if its devices fail, or a sample
// has more keys than a batch takes, a lookup is answered without it, and that is counted.
//
// Threads: Lookup by any number of readers, under their pins; the rest as the comments say.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "embertide/store.h"
#include "hbm/batch.h"
#include "hbm/cache.h"

namespace embertide {

// The lookup below the tier (lookup.cc), as far as a lookup through the tier needs it. One thread.
class BelowHbm {
 public:
  virtual ~BelowHbm() = default;
  struct Row {
    HbmRefKind kind = HbmRefKind::kNothing;
    uint16_t live = 0;
    Source source = Source::kDefault;
    const std::byte* payload = nullptr;  // until the next Find
  };
  // Finds keys as BagReader::Lookup does, but their answers, and counts them.
  virtual Status Find(std::span<const BagFeature> features, const KeyBags& keys) = 0;
  // The row that the i-th of those keys found.
  virtual Row At(size_t i) const = 0;
  // Counts a key that was found in HBM.
  virtual void CountHit(uint32_t table, uint64_t key, uint16_t live) = 0;
};

class HbmTier {
 public:
  // As the options say. kInvalidArgument, kResourceExhausted, kNotFound (no such GPU) naming what.
  static Result<std::unique_ptr<HbmTier>> Open(const StoreOptions& options);

  // Answers the requests at a version; kUnavailable if they are to be answered without the tier
  // (outputs are unspecified then, nothing has been counted but keys found). Other errors are those
  // of BelowHbm.
  Status Lookup(uint64_t version, std::span<const BagFeature> features,
                std::span<const KeyBags> requests, BelowHbm* below);

  HbmCache& cache() { return *cache_; }
  // Reads of late at which a row of the table enters; 0: none of its rows does.
  uint32_t AccessesToEnter(uint32_t table) const { return accesses_to_enter_[table]; }
  uint64_t fallbacks() const { return fallbacks_.load(); }
  uint64_t wishes_dropped() const { return wishes_dropped_.load(); }
  // The part of the host's bytes that one arena of the store is charged for.
  uint64_t HostBytesOfArena() const { return arena_bytes_; }

  // Rows that readers missed since the last call, each once, by device; empty if another thread is
  // at it. At most one fill.
  std::vector<std::vector<HbmRow>> TakeWishes();
  std::mutex& filling() { return filling_; }

 private:
  struct Piece {
    size_t request;
    size_t first;  // bags, whole samples
    size_t end;
  };
  using Pieces = std::vector<Piece>;
  // A batch and what it answers.
  struct Flight;
  HbmTier() = default;
  // The samples of all requests in order, in batches that fit; false if a sample does not.
  bool Cut(size_t features, std::span<const KeyBags> requests, std::vector<Pieces>* batches) const;
  Status AnswerAll(std::span<const Pieces> batches, Flight* flight);
  void RequestAdmission(const std::vector<std::pair<uint32_t, uint64_t>>& missed);

  std::unique_ptr<HbmCache> cache_;
  uint64_t arena_bytes_ = 0;
  std::vector<uint32_t> accesses_to_enter_;  // by table
  std::atomic<uint64_t> fallbacks_{0};
  std::atomic<uint64_t> wishes_dropped_{0};
  std::mutex filling_;
  std::mutex wishes_mutex_;
  std::vector<std::pair<uint32_t, uint64_t>> wishes_;  // table, key
};

}  // namespace embertide
