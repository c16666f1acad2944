// Hit rates of policies on a recorded trace, and the two bounds to compare them with.
//
// Threads: a Trace is immutable; any number of threads may simulate on one.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "embertide/status.h"
#include "policy/policy.h"

namespace embertide {

// Keys in the order in which they were asked for, numbered 0 to distinct() - 1.
class Trace {
 public:
  // kInvalidArgument if there is no key, or more than 2^32 - 2.
  static Result<Trace> FromKeys(std::span<const int64_t> keys);
  uint32_t distinct() const { return static_cast<uint32_t>(counts_.size()); }
  std::span<const uint32_t> numbers() const { return numbers_; }
  // Accesses of each number.
  std::span<const uint32_t> counts() const { return counts_; }

 private:
  std::vector<uint32_t> numbers_;
  std::vector<uint32_t> counts_;
};

// Those of a tier, and "utility" last.
std::vector<PolicyInfo> SimulatedPolicies();

struct SimulationOptions {
  std::string policy;     // as PolicyOptions::name, of SimulatedPolicies()
  uint32_t capacity = 0;  // rows of the tier, all of one size
  // The stand-in for training, for "utility": after so many accesses a version is published, in
  // which utility = decay * utility before + accesses since.
  uint32_t version_accesses = 50'000;
  float utility_decay = 0.9F;
};

struct SimulationResult {
  uint64_t hits = 0;
  uint64_t inserted = 0;
  uint64_t evicted = 0;
  uint64_t refused = 0;  // misses that did not enter: hits + inserted + refused = accesses
  uint64_t policy_bytes = 0;
};

// Runs a policy over a trace, from an empty tier. As MakePolicy for errors; kInvalidArgument also
// if `version_accesses` is 0.
Result<SimulationResult> Simulate(const Trace& trace, const SimulationOptions& options);

// Hits of Belady's MIN with bypass, the most that any policy can have: of the rows and the one
// asked for, that which is asked for last is the one left out.
uint64_t OptimalHits(const Trace& trace, uint32_t capacity);

// Hits of the `capacity` keys of most accesses, held from the beginning.
uint64_t BestFixedHits(const Trace& trace, uint32_t capacity);

}  // namespace embertide
