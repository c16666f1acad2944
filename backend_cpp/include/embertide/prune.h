// Pruning: what chunks are worth, which tables share what there is, what a pass did.
// TrainingStore::Prune says how; docs/design/0008-pruning.md why.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "embertide/status.h"

namespace embertide {

// The amount that a step adds to the utility of each chunk of a row that it updates, dead chunks
// too. g is the sum of the chunk's gradients, of all occurrences of the key in the batch.
enum class UtilityKind : uint8_t {
  kSquares,   // |g|^2
  kNorms,     // occurrences x |g|: FIITED (arXiv:2401.04408)
  kAccesses,  // occurrences
};
// "squares", "norms" or "accesses".
const char* UtilityKindName(UtilityKind kind);
// kInvalidArgument naming the text and the names there are.
Result<UtilityKind> ParseUtilityKind(const std::string& name);

// The worth of the counts of a table with counters (Store::AddCounts), in utility.
struct PrunedCounts {
  uint32_t table = 0;    // index into StoreOptions::tables; of the group
  uint32_t counter = 0;  // of a row, whose count says what its counters are worth
  float worth = 0.0F;    // all of them together, of all that the table's rows have learned
};

// Tables whose rows are pruned together: one price a byte for all of them.
struct PruneGroup {
  std::vector<uint32_t> tables;  // index into StoreOptions::tables; a table is of one group at most
  // Bytes of the DDR budget that remember keys without a row, 4 each; kept to a power of two.
  uint64_t waiting_bytes = 256 << 10;
  // Counts of tables that are not here are worth nothing, and go with what their row has learned.
  std::vector<PrunedCounts> counts = {};
};

// The result of a pass of pruning.
struct PruneOutcome {
  float price = 0.0F;  // of a byte, in utility; 0: all that is of use fits
  uint64_t rows = 0;   // that are left
  uint64_t bytes = 0;  // that they take: see TrainingStore::Prune
  uint64_t rows_pruned = 0;
  uint64_t rows_expired = 0;
  uint64_t chunks_pruned = 0;  // of rows that are left
  uint64_t chunks_regrown = 0;
  uint64_t rows_unchanged = 0;  // that found no room for what they should have become
};

}  // namespace embertide
