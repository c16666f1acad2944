// "utility": a policy by what training finds of rows. Versions do not carry that
// (docs/design/0007-utilities.md), so no tier has it: simulations compare the others with it.
#pragma once

#include <functional>
#include <memory>

#include "policy/policy.h"

namespace embertide {

inline constexpr PolicyInfo kUtilityPolicy = {"utility", "what training finds most useful stays", 1,
                                              0, 64};

// The utility that training gave to a key's row, larger is better; 0 for one that it does not know.
using UtilityOf = std::function<float(uint64_t key)>;

// Both are called during Admit and Evict, and never after the policy's end. kInvalidArgument as
// CheckCapacity.
Result<std::unique_ptr<Policy>> MakeUtility(uint32_t capacity, KeyOf key_of, UtilityOf utility_of);

}  // namespace embertide
