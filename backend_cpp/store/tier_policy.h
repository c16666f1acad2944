// TierPolicy: a Policy (policy/policy.h) over the rows of one table in one tier of a pool, told
// of by key.
//
//   keys   [ key of slot 0 ][ slot 1 ] ...            a free slot holds the number of the next
//   table  open addressing: 1 + slot, 0 where empty   home = low half of the key's hash, scaled
//
// The number of slots follows the rows: a quarter more when they are full, fewer when half of them
// are empty. The rows then enter a new policy in the order in which they would have left the old
// one; what that knew beyond the order is gone.
//
// Invariants
//   1. A key has at most one slot; free + used = capacity.
//   2. All memory, that of two policies while rows change over, is charged to the budget.
//
// Threads: the pool's writer, but for bytes().
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ddr/byte_budget.h"
#include "embertide/status.h"
#include "policy/policy.h"

namespace embertide {

class TierPolicy {
 public:
  // `budget` must outlive it. As MakePolicy for errors; kResourceExhausted if it has no room.
  static Result<std::unique_ptr<TierPolicy>> Make(const std::string& name, ByteBudget* budget);
  ~TierPolicy();
  TierPolicy(const TierPolicy&) = delete;
  TierPolicy& operator=(const TierPolicy&) = delete;

  bool Holds(uint64_t key) const { return slots_.Find(key) != kNone; }
  // A row was asked for: true if the tier holds it.
  bool Touch(uint64_t key);
  // A row was asked for that it does not hold: whether it shall enter. As Policy::Admit.
  bool Admit(uint64_t key, bool full) { return slots_.policy->Admit(key, full); }
  // Whether there is a slot for one more row; false: some must leave first.
  bool Reserve();
  // A row entered. Nothing changes if it is there. Requires: Reserve, and no other Enter since.
  void Enter(uint64_t key);
  // A row is gone from the tier. Nothing changes if it is not there.
  void Leave(uint64_t key);
  // The row that leaves next; it has left, but may Enter again as long as it is not settled, for
  // its slot is kept. Nothing: there is none.
  std::optional<uint64_t> Evict();
  // So many of the rows that Evict gave have gone, or are back.
  void Settle(uint32_t rows) { leaving_ -= rows; }
  // Gives back slots that the rows no longer need, if many.
  void Fit();

  uint32_t rows() const { return slots_.used; }
  // Charged to the budget. Any thread.
  uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  static constexpr uint32_t kNone = ~0U;
  // The slots of one capacity.
  struct Slots {
    std::vector<uint64_t> keys;  // moved, never copied: the policy knows where they lie
    std::vector<uint32_t> table;
    std::unique_ptr<Policy> policy;
    uint32_t used = 0;
    uint32_t free = kNone;
    uint32_t capacity() const { return static_cast<uint32_t>(keys.size()); }
    uint32_t HomeOf(uint64_t key) const;
    uint32_t Next(uint32_t place) const { return place + 1 == table.size() ? 0 : place + 1; }
    uint32_t Find(uint64_t key) const;
    void Link(uint64_t key);
    void Unlink(uint64_t key);
  };
  TierPolicy(std::string name, ByteBudget* budget) : name_(std::move(name)), budget_(budget) {}
  uint64_t BytesFor(uint32_t capacity) const;
  Status Make(uint32_t capacity, Slots* slots) const;
  bool Resize(uint32_t capacity);
  std::optional<uint64_t> Pop();

  const std::string name_;
  ByteBudget* const budget_;
  std::atomic<uint64_t> bytes_{0};
  Slots slots_;
  uint32_t leaving_ = 0;  // rows that Evict gave and that are not settled
};

}  // namespace embertide
