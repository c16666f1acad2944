// Rows of DDR copied to HBM, and ended there.
#pragma once

#include <cstdint>

#include "store/bucket.h"
#include "store/store_state.h"

namespace embertide {

// Copies rows that readers missed to HBM. Any thread; of two at once, one does nothing. Requires:
// there is an HBM tier.
void FillHbm(const StoreState& store);
// No pin finds the bucket's rows in HBM any more. Requires: nobody can reach the bucket from now on
// but readers that have it.
void EndInHbm(const StoreState& store, uint32_t table, const Bucket& bucket);

}  // namespace embertide
