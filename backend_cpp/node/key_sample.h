// KeySample: the keys of some of the lookups of late, for a node that starts to look up.
//
// One of each kOneIn lookups is taken, drawn at random, as clients may ask in circles. While there
// is room it is added; then it takes the places of others, drawn at random, so that what stays is
// from the last few times as many lookups (Aggarwal, VLDB 2006, has the ages). A lookup of more
// than a kLargest-th of the bytes is left out, and counted. Nothing but keys is kept.
//
// Thread-safe; a lookup that is not taken costs one addition.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "embertide/hash.h"
#include "embertide/status.h"
#include "embertide/store_reads.h"
#include "embertide/table.h"

namespace embertide {

class KeySample {
 public:
  static constexpr uint64_t kOneIn = 16;
  static constexpr uint64_t kLargest = 8;

  // Keys of one table; those of a sampled lookup are distinct, and ascend.
  struct Keys {
    uint32_t table = 0;
    std::vector<int64_t> keys;
  };
  using Lookup = std::vector<Keys>;  // tables ascend
  struct Figures {
    uint64_t lookups = 0;  // kept now
    uint64_t bytes = 0;    // that they take, with what it takes to keep them
    uint64_t taken = 0;    // since the start
    uint64_t too_large = 0;
  };

  explicit KeySample(uint64_t max_bytes) : max_bytes_(max_bytes) {}

  // Counts a lookup, and returns whether it is to be added.
  bool Takes() {
    const uint64_t asked = asked_.fetch_add(1, std::memory_order_relaxed);
    return asked % kOneIn == HashKey(asked / kOneIn) % kOneIn;
  }
  // The keys of a request over features, but for those that came from elsewhere.
  static Lookup KeysOf(std::span<const BagFeature> features, const KeyBags& request);
  // Sorts them, and takes what stands twice away.
  void Add(Lookup lookup);
  Figures figures() const;

  // As a message KeySample; tables by their names.
  std::string Serialized(std::span<const TableConfig> tables) const;
  // Keys of tables that are not among `tables` are left out. kCorrupt: it is no such message, or it
  // has more than `max_bytes` of keys.
  static Result<std::vector<Lookup>> Parse(const std::string& text,
                                           std::span<const TableConfig> tables, uint64_t max_bytes);

 private:
  static uint64_t BytesOf(const Lookup& lookup);

  const uint64_t max_bytes_;
  std::atomic<uint64_t> asked_{0};
  mutable Mutex mutex_;
  std::vector<Lookup> lookups_ EMBERTIDE_GUARDED_BY(mutex_);
  uint64_t bytes_ EMBERTIDE_GUARDED_BY(mutex_) = 0;
  uint64_t taken_ EMBERTIDE_GUARDED_BY(mutex_) = 0;
  uint64_t too_large_ EMBERTIDE_GUARDED_BY(mutex_) = 0;
  uint64_t drawn_ EMBERTIDE_GUARDED_BY(mutex_) = 0;  // lookups that gave up their places
};

}  // namespace embertide
