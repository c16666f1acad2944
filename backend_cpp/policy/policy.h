// Policy: which rows a tier of bounded room holds. One object decides admission and eviction for
// the rows of one table in one tier, from nothing but the order in which keys are asked for.
//
// The caller owns the rows and the map from key to slot; a slot is the number of a place for a row,
// 0 to capacity - 1. The caller does this at each access:
//
//   row is in slot s      policy.Touch(s)
//   row is not resident   if (!policy.Admit(key, full)) -> leave it where it lies
//                         while (no room) slot = policy.Evict()     the row in `slot` leaves
//                         policy.Insert(slot, key)
//   row is removed        policy.Erase(s)
//
// `Simulate` (simulation/simulate.h) is this loop. A store runs it under the row pool's writer
// lock: readers append the slots and keys that they met to a buffer, and the writer replays it, so
// that a policy needs no lock and a lookup pays no more than the append.
//
// Memory is fixed at construction and reported by bytes(): at most what `Policies()` states, for
// each slot its own state and the history of rows that are not resident (ghosts, a sketch).
//
// Threads: none; the caller serialises. Deterministic: equal calls give equal answers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "embertide/status.h"

namespace embertide {

class Policy {
 public:
  virtual ~Policy() = default;
  // The row in `slot` was asked for. Requires: it was inserted, and not evicted or erased since.
  virtual void Touch(uint32_t slot) = 0;
  // A row that is not resident was asked for: whether it shall enter. `full` says that another must
  // leave for it. Counts as an access, whatever the answer.
  virtual bool Admit(uint64_t key, bool full) = 0;
  // The slot of the row that leaves next; the policy has forgotten it by then, but for its history.
  // Requires: at least one row is resident.
  virtual uint32_t Evict() = 0;
  // A row entered. Requires: `slot` is free and below the capacity.
  virtual void Insert(uint32_t slot, uint64_t key) = 0;
  // The row in `slot` is gone for good (pruned, moved away): no history is kept of it.
  virtual void Erase(uint32_t slot) = 0;
  // Memory held, constant.
  virtual uint64_t bytes() const = 0;
};

// The key of the row in a slot, from its Insert until it has left.
using KeyOf = std::function<uint64_t(uint32_t slot)>;

struct PolicyOptions {
  // One of `Policies()`. An ending ":n" lets a key enter at its n-th access of late (2 to 15),
  // counted in a sketch of 8 bytes a slot: "lru:2".
  std::string name = "reuse-density";
  uint32_t capacity = 0;  // slots; 1 to 2^28
  // The caller's keys; called during Touch, Admit and Evict, and never after the policy's end.
  KeyOf key_of;
};

struct PolicyInfo {
  const char* name;
  const char* about;
  // Bounds of memory: bytes for each slot, and for all slots together whatever their number.
  uint32_t slot_bytes;
  uint32_t history_bytes;
  uint32_t fixed_bytes;
};

// Every policy, the one recommended first.
std::span<const PolicyInfo> Policies();

// A name and the access at which a key enters, which stands after a colon; 1 without one.
struct PolicyName {
  std::string name;
  uint32_t accesses = 1;
};
// kInvalidArgument if `known` has no such policy, or what follows the colon is none of 2 to 15.
Result<PolicyName> ParsePolicyName(const std::string& text,
                                   std::span<const PolicyInfo> known = Policies());
// A bound of bytes() of a policy by this name. Requires: there is one.
uint64_t MostPolicyBytes(const std::string& name, uint32_t capacity);

// kInvalidArgument naming both, if no policy has so many slots.
Status CheckCapacity(const std::string& name, uint32_t capacity);
// kInvalidArgument naming what is wrong: a name that does not exist, a capacity out of range, no
// `key_of`.
Result<std::unique_ptr<Policy>> MakePolicy(const PolicyOptions& options);
// Lets `inner` be asked only at a key's `accesses`-th access of late.
std::unique_ptr<Policy> MakeFrequencyAdmission(std::unique_ptr<Policy> inner, uint32_t capacity,
                                               uint32_t accesses);

}  // namespace embertide
