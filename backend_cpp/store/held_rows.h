// HeldRows: the rows of one pool that must stay in DDR until they are let go, and how often each is
// held.
//
//   slots   [ key | table | count ] ...   open addressing; count 0: empty
//           home = low half of the key's hash mixed with the table; a removed entry is closed over
//
// A hold is of a key, whether it has a row or not: a row that comes later is held from its first
// moment, and one that goes and comes again is held again. The bytes counted are those that a whole
// row would take in pages, so they bound what held rows take.
//
// Invariants
//   1. An entry is reachable from its home without an empty slot between; at most 3/4 are used.
//   2. bytes() is the sum of what was given for each entry; the slots' memory is charged.
//
// Threads: the pool's writer; rows(), row_bytes() and bytes() on any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "ddr/byte_budget.h"
#include "embertide/status.h"

namespace embertide {

class HeldRows {
 public:
  // `budget` must outlive it.
  explicit HeldRows(ByteBudget* budget) : budget_(budget) {}
  HeldRows(const HeldRows&) = delete;
  HeldRows& operator=(const HeldRows&) = delete;
  ~HeldRows() { budget_->Release(bytes()); }

  bool Has(uint32_t table, uint64_t key) const {
    return rows() > 0 && slots_[Find(table, key)].count > 0;
  }
  // Asks for the memory that Hold and Release of a key are about to read.
  void AskFor(uint32_t table, uint64_t key) const {
    if (!slots_.empty()) __builtin_prefetch(&slots_[HomeOf(table, key)], 1, 3);
  }
  // Room for so many keys more. False: the budget has none; nothing has changed.
  bool Reserve(size_t keys);
  // Holds a key once more; true: it was not held. `bytes`: of a whole row of the table.
  // Requires: Reserve.
  bool Hold(uint32_t table, uint64_t key, uint64_t bytes);
  // Lets go of a key once; false: it was not held. `bytes`: as of Hold.
  bool Release(uint32_t table, uint64_t key, uint64_t bytes);

  // Keys that are held, and what whole rows of them take.
  uint64_t rows() const { return rows_.load(std::memory_order_relaxed); }
  uint64_t row_bytes() const { return row_bytes_.load(std::memory_order_relaxed); }
  // Bytes of the slots, charged to the budget.
  uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }
  // kCorrupt naming what does not hold.
  Status CheckIntegrity() const;

 private:
  struct Slot {
    uint64_t key = 0;
    uint32_t table = 0;
    uint32_t count = 0;
  };
  size_t HomeOf(uint32_t table, uint64_t key) const;
  size_t Next(size_t slot) const { return (slot + 1) & (slots_.size() - 1); }
  // The slot of the key, or the empty one where it would stand. Requires: there are slots.
  size_t Find(uint32_t table, uint64_t key) const;

  ByteBudget* const budget_;
  std::vector<Slot> slots_;  // a power of two, or none
  std::atomic<uint64_t> rows_{0};
  std::atomic<uint64_t> row_bytes_{0};
  std::atomic<uint64_t> bytes_{0};
};

}  // namespace embertide
