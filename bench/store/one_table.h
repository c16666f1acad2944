// A serving store of one table of fp32 rows, for the programs beside this file.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>

#include "embertide/serving_store.h"

namespace embertide {

// Ends the program with the message if the status is an error.
inline void ExitIfError(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

// `spare_bytes`: of DDR, beside the payload of `rows` rows.
inline std::unique_ptr<ServingStore> OpenOneTable(uint32_t dim, uint32_t bucket_bits, uint64_t rows,
                                                  uint64_t spare_bytes) {
  TableConfig table;
  table.name = "table";
  table.layout = {1, static_cast<uint16_t>(dim), DType::kFp32};
  table.bucket_bits = bucket_bits;
  StoreOptions options;
  options.tables = {table};
  options.ddr_budget_bytes = rows * 4 * dim + spare_bytes;
  auto opened = ServingStore::Open(options);
  if (!opened.ok()) ExitIfError(opened.status());
  return std::move(*opened);
}

}  // namespace embertide
