// Table: what a store knows of one table beside its rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "embertide/store.h"
#include "store/bucket.h"
#include "store/prune_price.h"

namespace embertide {

struct GroupPrice;

struct Table {
  TableConfig config;
  uint32_t ordinal = 0;            // index into StoreOptions::tables
  std::vector<float> default_row;  // dim values
  std::vector<BucketSlot> buckets;
  uint32_t part = 0;  // its rows lie in pools[part * options.devices ...]
  RowCost cost{};
  GroupPrice* pruned_with = nullptr;  // null: its rows are not pruned
  size_t place_in_group = 0;          // among its tables
};

}  // namespace embertide
