// GroupSample: what some rows of a group of tables say of a price. Each rank of a trainer takes one
// of its own rows; those of all ranks together are the sample of a store that has all rows.
//
//   bytes   [step u64][rare u32][tables u32], then of each table
//           [scale f64][floats u32][rows u32] and floats x rows floats
//
// In this machine's byte order: it is read while ranks prune, and never kept. A row's floats are
// its chunks' utilities and, where the table has counters, the log of the count that says what they
// are worth. Nothing depends on the order of the rows. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "embertide/status.h"
#include "store/group_price.h"
#include "store/prune_price.h"

namespace embertide {

// The sample of one table's rows.
struct TableSample {
  double scale = 1.0;  // that its utilities were multiplied by
  uint32_t floats = 0;
  std::vector<float> rows;

  // The worth of the table's counts, by these rows; `before`, if none of them has a count.
  CountsWorth FindWorth(const RowCost& cost, const CountsWorth& before) const;
};

struct GroupSample {
  uint64_t step = 0;  // of training, in which it was taken
  uint32_t rare = 0;  // it has one of 2^rare rows
  std::vector<TableSample> tables;

  std::string Write() const;
  // kInvalidArgument saying what is wrong.
  static Result<GroupSample> Read(std::string_view bytes);
  // Adds the rows of another. kInvalidArgument naming what is not the same in both, which is then
  // unspecified.
  Status Add(const GroupSample& other);
};

}  // namespace embertide
