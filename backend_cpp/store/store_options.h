// What a store's options must be, and what they say of budgets.
#pragma once

#include <cstdint>

#include "embertide/store.h"

namespace embertide {

// kInvalidArgument naming the option, its value and what to give.
Status ValidateOptions(const StoreOptions& options);
// What the tables with budgets of their own leave to the others, of DDR or of the SSD.
uint64_t LeftToShare(const StoreOptions& options, bool ssd);

}  // namespace embertide
