// TrainingRows: rows of a TrainingStore beside its step (training_step.cc): made and taken
// away, chunks that live and die, changes taken for a version, state for checkpoints. Rows change
// in place.
//
// Threads: methods that name a pool require its writer; the others take it themselves. Errors are
// those of Store.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "embertide/row.h"
#include "embertide/training_store.h"
#include "store/reclaimer.h"
#include "store/residency.h"
#include "store/row_pool.h"
#include "store/store_state.h"
#include "store/train_ops.h"

namespace embertide {

// Requires: ReserveEntry was called for the row, and the pool's writer is held.
inline void MarkRowChanged(const Table& table, uint64_t hash, RowAux* aux) {
  if (aux->changed != 0) return;
  aux->changed = 1;
  table.NewestOf(hash)->changed.Set(hash);
}

class TrainingRows {
 public:
  TrainingRows(StoreState& store, Reclaimer& reclaimer, Residency& residency)
      : store_(store), reclaimer_(reclaimer), residency_(residency) {}

  // A row for a key that has none. kResourceExhausted when the budgets are full.
  Result<Location> AddRow(RowPool* pool, const Table& table, Bucket* bucket, uint64_t key,
                          uint16_t live, std::span<const std::byte> payload);
  // Gives the row of a key another live mask; 0 removes it, as `kind`. Errors as Store::SetLive.
  Status ChangeLive(RowPool* pool, const Table& table, uint32_t bucket, uint64_t key, uint16_t live,
                    RecordKind kind);
  // The state that training keeps of a row whose aux stands at `bytes`, aligned or not.
  RowState StateIn(const Table& table, const std::byte* bytes) const;

  // As Store's methods of these names.
  Status SetLive(uint32_t table, uint64_t key, uint16_t live);
  Status TakeChanges(uint32_t table, uint32_t bucket, std::vector<std::byte>* records);
  Status MarkChanged(uint32_t table, uint32_t bucket, std::span<const uint64_t> keys);
  Result<RowState> StateOf(uint32_t table, uint64_t key);
  Status SetState(uint32_t table, uint64_t key, const RowState& state);
  Status Import(uint32_t table, uint32_t bucket, std::span<const std::byte> records);
  Status ExportRows(uint32_t table, std::span<const uint64_t> keys, std::vector<std::byte>* records,
                    std::vector<RowState>* states);
  Status PutRows(uint32_t table, std::span<const std::byte> records,
                 std::span<const RowState> states);

 private:
  // Takes away the row of a key, whatever its tier. kNotFound; kResourceExhausted: there is no room
  // to note that it is gone.
  Status RemoveRow(RowPool* pool, Bucket* bucket, uint64_t key, RecordKind kind);
  // Room to note one more key as removed. kResourceExhausted as ReserveEntry; nothing is changed.
  Status FitRemoved(RowPool* pool, Bucket* bucket);
  // Nothing is left of what the optimizer keeps of a row as a whole.
  void ForgetMoments(const Table& table, RowAux* aux) const;
  // Forgets all that the optimizer keeps of the elements of those chunks
  // that are not in `kept`.
  void ForgetElements(const Table& table, uint32_t kept, RowAux* aux) const;

  StoreState& store_;
  Reclaimer& reclaimer_;
  Residency& residency_;
};

}  // namespace embertide
