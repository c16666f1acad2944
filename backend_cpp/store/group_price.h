// GroupPrice: what pruning keeps of a group of tables beside their rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "base/mutex.h"
#include "embertide/prune.h"
#include "store/decay.h"
#include "store/distinct_keys.h"
#include "store/waiting_keys.h"

namespace embertide {

// The utility of a row's counters: in proportion to one of its counts, so that those of all rows
// of the table are worth PrunedCounts::worth times what the rows have learned. Computed anew in
// each pass; 0 before the first.
struct CountsWorth {
  PrunedCounts of;            // of.worth 0: the table's counts are worth nothing, or it has none
  float reference = 0.0F;     // the log of a count ...
  float of_reference = 0.0F;  // ... that is worth so much

  // The utility of a row with this log of a count; 0: it never counted.
  float Of(float log) const {
    return log == 0.0F || of_reference == 0.0F ? 0.0F : of_reference * std::exp2(log - reference);
  }
};

// The scale of a table's utilities, which makes those of all tables of a group comparable.
struct UtilityScale {
  double at_stake = 0.0;  // sums of Store::RecordSensitivity, which decay as utilities do
  double squares = 0.0;
  uint64_t step = 0;   // the newest of them
  double scale = 1.0;  // what the last pass made of them

  void Add(double stake, double square, uint64_t now, const Decay& decay) {
    const double kept =
        decay.Over(static_cast<uint32_t>(std::min<uint64_t>(now - step, UINT32_MAX)));
    at_stake = at_stake * kept + stake;
    squares = squares * kept + square;
    step = now;
  }
  double ratio() const { return squares > 0.0 ? at_stake / squares : 0.0; }
};

struct GroupPrice {
  // `row_bytes`: of a whole row of each of its tables.
  GroupPrice(const PruneGroup& group, const std::vector<uint64_t>& row_bytes, const Decay* decay)
      : tables(group.tables),
        waiting(group.waiting_bytes, decay),
        counts(tables.size()),
        scales(tables.size()) {
    for (const uint64_t bytes : row_bytes) {
      auto same = std::ranges::find(seen, bytes, &SeenKeys::row_bytes);
      if (same == seen.end()) same = seen.insert(same, {bytes, {}});
      seen_of.push_back(static_cast<size_t>(same - seen.begin()));
    }
    for (const PrunedCounts& each : group.counts) {
      for (size_t i = 0; i < tables.size(); ++i) {
        if (tables[i] == each.table) counts[i].of = each;
      }
    }
  }
  uint64_t bytes() const {
    const MutexLock lock(mutex);
    return waiting.bytes() + seen.size() * sizeof(SeenKeys) +
           tables.size() * (sizeof(CountsWorth) + sizeof(UtilityScale) + sizeof(size_t));
  }
  // Makes the scales anew: the table whose utilities say most has 1.
  void Scale() {
    double most = 0.0;
    for (const UtilityScale& each : scales) most = std::max(most, each.ratio());
    for (UtilityScale& each : scales) {
      if (each.squares == 0.0 || most == 0.0) continue;
      each.scale = std::max(each.ratio() / most, kMinScale);
    }
  }
  // No table is worth less: what it is worth once more could not be seen.
  static constexpr double kMinScale = 1e-3;
  // Keys of all tables whose rows take as many bytes.
  struct SeenKeys {
    uint64_t row_bytes = 0;
    DistinctKeys keys;
  };
  const std::vector<uint32_t> tables;
  std::vector<size_t> seen_of;  // by place in `tables`: which of `seen`
  mutable Mutex mutex;          // taken after any writer lock
  std::vector<SeenKeys> seen EMBERTIDE_GUARDED_BY(mutex);
  WaitingKeys waiting EMBERTIDE_GUARDED_BY(mutex);
  // The next three are written under the mutex: by a pass and by who loads a saved state, which do
  // not run at once, and the scales' sums by RecordSensitivity. So a pass may read the others
  // without it.
  std::vector<CountsWorth> counts;   // by place in `tables`
  std::vector<UtilityScale> scales;  // by place in `tables`
  float price = 0.0F;
  // Bytes that new rows may take until the next pass.
  uint64_t room EMBERTIDE_GUARDED_BY(mutex) = ~0ULL;
  // Steps that were begun.
  uint64_t step EMBERTIDE_GUARDED_BY(mutex) = 0;
};

}  // namespace embertide
