// Admission: whether a key without a row gets one, in training. A key must have occurred often
// enough (StoreOptions::new_row_accesses), and in a table that is pruned it must have earned the
// price of a row for which there is room.
//
// Threads: any, but as said.
#pragma once

#include <cstdint>
#include <optional>

#include "base/mutex.h"
#include "embertide/hash.h"
#include "store/group_price.h"
#include "store/row_pool.h"
#include "store/store_state.h"
#include "store/table.h"

namespace embertide {

// The hash by which pruning knows a key of a table: a key of several tables is several keys.
inline uint64_t PruneHash(const Table& table, uint64_t key) {
  return HashKey(HashKey(key) + table.config.id);
}

class Admission {
 public:
  explicit Admission(StoreState& store) : store_(store) {}

  // An occurrence of a key without a row: whether it gets one now. Requires: the pool's writer.
  bool EntersNow(RowPool* pool, const Table& table, uint64_t key) {
    if (pool->new_keys == nullptr) return true;
    // A key of several tables is several keys.
    const uint64_t counted = HashKey(key) ^ (uint64_t{table.ordinal} << 32);
    if (pool->new_keys->Add(counted) >= store_.options.new_row_accesses) return true;
    ++store_.counters.new_keys_waiting;
    return false;
  }
  // A key of a table that is pruned, without a row, has earned so much in this step: what it has
  // earned in all, if that is worth a row for which there is room.
  std::optional<float> Worth(const Table& table, uint64_t key, float earned);
  // Such a key has counted so much: whether a row of counters alone is worth that.
  bool WorthCounting(const Table& table, uint64_t key, const float* logs);

 private:
  // Takes a row of so many bytes off the room, if what its key earned is worth that and it fits.
  bool Admit(GroupPrice* group, uint64_t hash, float utility, uint64_t bytes)
      EMBERTIDE_REQUIRES(group->mutex);

  StoreState& store_;
};

}  // namespace embertide
