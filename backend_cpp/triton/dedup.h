// Dedup: gives each distinct key of a batch a dense number, in order of first appearance.
//
// Kept between batches: a batch costs no clearing of the table. Not thread-safe.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "embertide/hash.h"

namespace embertide::triton {

class Dedup {
 public:
  // Starts a batch of at most `keys` keys.
  void Start(size_t keys) {
    const size_t size = std::bit_ceil(keys * 2 + 2);
    // Smaller batches use the front of the table only, which then stays in the cache.
    if (slots_.size() < size) slots_.resize(size);
    shift_ = 64 - static_cast<uint32_t>(std::countr_zero(size));
    mask_ = size - 1;
    keys_.clear();
    if (++batch_ == 0) {  // stamps of 2^32 batches ago would look new
      for (Slot& slot : slots_) slot.batch = 0;
      batch_ = 1;
    }
  }

  // The number of `key`. Requires: no more calls than Start() was told.
  uint32_t Add(int64_t key) {
    size_t at = HashKey(static_cast<uint64_t>(key)) >> shift_;
    while (slots_[at].batch == batch_) {
      if (slots_[at].key == key) return slots_[at].number;
      at = (at + 1) & mask_;
    }
    slots_[at] = {key, static_cast<uint32_t>(keys_.size()), batch_};
    keys_.push_back(key);
    return slots_[at].number;
  }

  const std::vector<int64_t>& keys() const { return keys_; }

 private:
  struct Slot {
    int64_t key = 0;
    uint32_t number = 0;
    uint32_t batch = 0;
  };
  std::vector<Slot> slots_;
  std::vector<int64_t> keys_;
  uint32_t shift_ = 63;
  size_t mask_ = 1;
  uint32_t batch_ = 0;
};

}  // namespace embertide::triton
