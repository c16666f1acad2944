// Checks of a store's options, and the budgets that follow from them.
#pragma once

#include <cstdint>

#include "embertide/store_options.h"

namespace embertide {

enum class Profile : uint8_t {
  kServe,  // index, payload and versions; nothing else
  kTrain,  // beside each payload an aux slot: optimizer state, utility per chunk, decay epoch
};

// kInvalidArgument naming the option, its value and what to give.
Status ValidateOptions(const StoreOptions& options, Profile profile);
// Bytes of DDR or of the SSD that the tables with budgets of their own leave to the others.
uint64_t LeftToShare(const StoreOptions& options, bool ssd);

}  // namespace embertide
