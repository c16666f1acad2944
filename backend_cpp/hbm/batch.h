// HbmBatch: one batch of bags on its way through the devices of an HbmCache.
//
// Each device probes the keys that belong to it. The caller reads its misses below and gives them;
// then each device pools its part of every bag. A bag's home is the device of its first key: the
// others send it their fp64 sums, which it adds after its own rows and rounds once, so a bag of one
// device has the very bits that a pass over its keys gives, and any other is within 1 ulp of it.
//
// Waits: for a lane when all are taken (the devices are busy then), for answers, for the output.
// Threads: one at a time. Errors: kDeviceError; the cache is closed then and the batch of no use.
#pragma once

#include <span>
#include <vector>

#include "hbm/cache.h"

namespace embertide {

// Lanes for one to three batches of a thread, taken together so that nobody waits for half.
class HbmLanes {
 public:
  // Requires: 1 <= count <= kHbmLanes.
  HbmLanes(HbmCache* cache, uint32_t count);
  ~HbmLanes();
  HbmLanes(const HbmLanes&) = delete;
  HbmLanes& operator=(const HbmLanes&) = delete;
  const std::vector<uint32_t>& numbers() const { return numbers_; }

 private:
  HbmCache* cache_;
  std::vector<uint32_t> numbers_;
};

class HbmBatch {
 public:
  HbmBatch(HbmCache* cache, uint32_t lane);
  // Waits for what is under way.
  ~HbmBatch();
  HbmBatch(const HbmBatch&) = delete;
  HbmBatch& operator=(const HbmBatch&) = delete;

  // Empties it, for a reader at `version`.
  void Begin(uint64_t version);
  // Adds a bag. remote_of as KeyBags (null: none): those keys are given, not probed. Requires: all
  // keys of the batch are at most batch_keys().
  void Add(uint32_t table, bool mean, std::span<const int64_t> keys, const uint32_t* remote_of);
  Status Probe();
  // And counts them, by device.
  Status WaitForAnswers();

  size_t keys() const { return places_.size(); }
  bool Hit(size_t k) const { return (AnswerOf(k) & kHit) != 0; }
  // The live mask of a key that hit.
  uint16_t Live(size_t k) const { return static_cast<uint16_t>(AnswerOf(k)); }
  // Gives the answer for key k, which did not hit; copied. kRow: a payload; kSums: dim doubles;
  // kFloats: the default row, and kNothing: no payload.
  void Give(size_t k, HbmRefKind kind, uint16_t live, const std::byte* payload);
  // Requires: every key hit or was given.
  Status Pool();
  Status Collect();
  // The dim values of a bag, until Begin. Null for an empty bag.
  const float* Out(size_t bag) const;

 private:
  static constexpr uint32_t kHit = 0x10000;  // of an answer; the live mask is below it
  struct Place {
    uint32_t device;
    uint32_t position;
    uint32_t table;
  };
  struct Bag {
    uint32_t device = 0;
    uint32_t out = 0;
    bool empty = true;
  };
  // A sum that a device makes for another one.
  struct Partial {
    uint32_t bag;    // of the part's sums
    uint32_t home;   // device
    uint32_t at;     // position there
    uint32_t bytes;  // dim doubles
  };
  // A device's share.
  struct Part {
    uint32_t positions = 0;
    uint32_t floats = 0;
    uint32_t given = 0;
    uint64_t items = 0;
    std::vector<HbmBag> bags;  // whose home is here
    std::vector<HbmBag> sums;  // for other homes
    std::vector<Partial> partials;
  };
  // For all work of the batch on all devices.
  Status Wait();
  uint32_t AnswerOf(size_t k) const;
  HbmCache::Lane& LaneOf(uint32_t device) const { return cache_->shards_[device]->lanes[lane_]; }
  uint32_t AddPosition(uint32_t device, uint32_t table, uint64_t key);
  void SetRef(uint32_t device, uint32_t position, const HbmRef& ref);
  // Places the sums that devices send each other; `sent[d * devices + h]`: bytes of d for h.
  void PlacePartials(std::vector<uint64_t>* sent);
  // Copies bags to their places from `first` on, and pools them.
  Status PoolOn(uint32_t device, const std::vector<HbmBag>& bags, uint32_t first);
  Status PoolSums(uint32_t device);
  Status PoolBags(uint32_t device, const std::vector<uint64_t>& sent);
  // The status; one that is not ok closes the cache.
  Status Check(Status status);

  HbmCache* cache_;
  const uint32_t lane_;
  uint64_t version_ = 0;
  std::vector<Part> parts_;
  std::vector<Place> places_;  // by key
  std::vector<Bag> bags_;
  bool under_way_ = false;
};

}  // namespace embertide
