// Rows of every dtype for tests that hold a store against a map, or vectors against scalars.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "embertide/hash.h"
#include "embertide/training_store.h"

namespace embertide {

// The name of a kind of vectors; the dtype of a row; its chunks and dimensions a chunk.
using VectorCase = std::tuple<const char*, DType, std::pair<uint16_t, uint16_t>>;

// A store whose rows all stay in DDR and are found by lean entries, where it else has an SSD tier.
inline void MakeLean(StoreOptions* options) {
  options->index = IndexKind::kLean;
  options->ssd_budget_bytes = 0;
  options->ddr_budget_bytes = uint64_t{options->devices} * (24ULL << 20);
}
inline std::string IndexNameOf(const testing::TestParamInfo<IndexKind>& each) {
  return IndexKindName(each.param);
}

// Every kind of vectors over rows that fill none of them, one, several, and with a rest.
inline auto VectorCases() {
  using Shape = std::pair<uint16_t, uint16_t>;
  return testing::Combine(testing::Values("plain", "avx2", "avx512"),
                          testing::Values(DType::kFp32, DType::kFp16, DType::kBf16, DType::kInt8),
                          testing::Values(Shape{1, 3}, Shape{4, 4}, Shape{4, 16}, Shape{4, 32},
                                          Shape{3, 20}, Shape{16, 16}));
}

// The same of int4, which has two values a byte and is never trained.
inline auto Int4Cases() {
  using Shape = std::pair<uint16_t, uint16_t>;
  return testing::Combine(
      testing::Values("plain", "avx2", "avx512"), testing::Values(DType::kInt4),
      testing::Values(Shape{1, 2}, Shape{1, 6}, Shape{4, 4}, Shape{4, 16}, Shape{4, 32},
                      Shape{3, 20}, Shape{3, 22}, Shape{16, 16}, Shape{2, 80}));
}

// One row as its record stands in files.
struct TestRow {
  uint16_t live = 0;
  std::vector<std::byte> payload;
  bool operator==(const TestRow&) const = default;
};

using TestRows = std::map<std::pair<uint32_t, uint64_t>, TestRow>;  // (table, key)

// A table of each layout, with rows so long that some thousands fill several pages.
inline std::vector<TableConfig> TablesOf(const std::vector<RowLayout>& layouts) {
  std::vector<TableConfig> tables;
  for (const RowLayout& layout : layouts) {
    TableConfig table;
    table.name = std::string("of_") + DTypeName(layout.dtype);
    table.id = static_cast<uint32_t>(tables.size()) * 3 + 1;
    table.layout = layout;
    table.bucket_bits = 2;
    table.init_seed = 11;
    for (uint32_t d = 0; d < layout.dim(); ++d) {
      table.default_row.push_back(0.5F + static_cast<float>(d));
    }
    tables.push_back(table);
  }
  return tables;
}

// A table of each dtype that is trained.
inline std::vector<TableConfig> TestTables() {
  return TablesOf({{4, 128, DType::kFp32},
                   {2, 256, DType::kFp16},
                   {3, 128, DType::kBf16},
                   {2, 400, DType::kInt8}});
}

// And of that which is only served.
inline std::vector<TableConfig> ServedTables() {
  std::vector<RowLayout> layouts;
  for (const TableConfig& table : TestTables()) layouts.push_back(table.layout);
  layouts.push_back({3, 270, DType::kInt4});
  return TablesOf(layouts);
}

inline uint32_t BucketOfKey(const TableConfig& table, uint64_t key) {
  return BucketOfHash(HashKey(key), table.bucket_bits);
}

inline TestRow RandomRow(const TableConfig& table, std::mt19937* random) {
  TestRow row;
  row.live = static_cast<uint16_t>(1 + (*random)() % table.layout.full_mask());
  std::vector<float> values(table.layout.dim());
  for (float& value : values) value = static_cast<float>((*random)() % 2000) * 0.01F - 10;
  row.payload.resize(table.layout.PayloadBytes(row.live));
  EncodePayload(table.layout, row.live, values.data(), row.payload.data());
  return row;
}

inline void AppendRow(uint64_t key, const TestRow& row, std::vector<std::byte>* records) {
  AppendRecord({key, row.live, RecordKind::kRow, row.payload}, records);
}

// The rows of a bucket as records, ascending by key.
inline std::vector<std::byte> BucketRecords(const std::vector<TableConfig>& tables,
                                            const TestRows& rows, uint32_t table, uint32_t bucket) {
  std::vector<std::byte> records;
  for (auto row = rows.lower_bound({table, 0}); row != rows.end() && row->first.first == table;
       ++row) {
    const uint64_t key = row->first.second;
    if (BucketOfKey(tables[table], key) == bucket) AppendRow(key, row->second, &records);
  }
  return records;
}

// The values that a key reads as.
inline std::vector<float> ValuesOf(const TableConfig& table, const TestRow* row) {
  if (row == nullptr) return table.default_row;
  std::vector<float> values(table.layout.dim());
  DecodePayload(table.layout, row->live, row->payload.data(), values.data());
  return values;
}

// A step in which each key is a bag of its own: `gradients` is keys x dim.
inline Result<uint64_t> ApplyRows(TrainingStore* store, uint32_t table,
                                  std::span<const int64_t> keys,
                                  const std::vector<float>& gradients, const StepOptions& options) {
  const BagGradients bags{
      table, keys, {}, gradients.data(), store->options().tables[table].learned().dim()};
  return store->ApplyGradients({&bags, 1}, options);
}

}  // namespace embertide
