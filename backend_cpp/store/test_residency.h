// A store with tiers on a directory of its own, for tests of what they hold.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "embertide/hash.h"
#include "embertide/serving_store.h"

namespace embertide {

inline constexpr uint64_t kMiB = 1ULL << 20;

inline TableConfig MakeTable(const std::string& name, uint32_t id, RowLayout layout,
                             uint32_t bits = 0) {
  TableConfig table;
  table.name = name;
  table.id = id;
  table.layout = layout;
  table.bucket_bits = bits;
  return table;
}

// The record of a row whose every value is `value`.
inline std::vector<std::byte> Record(const TableConfig& table, uint64_t key, uint16_t live,
                                     float value) {
  const std::vector<float> values(table.layout.dim(), value);
  std::vector<std::byte> payload(table.layout.PayloadBytes(live));
  EncodePayload(table.layout, live, values.data(), payload.data());
  std::vector<std::byte> record;
  AppendRecord({key, live, RecordKind::kRow, payload}, &record);
  return record;
}

template <typename Face>
class TieredStoreTest : public ::testing::Test {
 protected:
  TieredStoreTest()
      : directory_(std::filesystem::temp_directory_path() /
                   ("embertide-residency-" + std::to_string(::getpid()))) {}
  ~TieredStoreTest() override { std::filesystem::remove_all(directory_); }

  StoreOptions Options(std::vector<TableConfig> tables, uint64_t ddr, uint64_t ssd) const {
    StoreOptions options;
    options.tables = std::move(tables);
    options.ddr_budget_bytes = ddr;
    options.ssd_budget_bytes = ssd;
    options.ssd_directory = directory_;
    return options;
  }
  void Open(const StoreOptions& options) {
    auto store = Face::Open(options);
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    store_ = std::move(*store);
  }
  Status Stage(uint64_t version, uint32_t t, uint64_t key, uint16_t live, float value) {
    const TableConfig& table = store_->options().tables[t];
    return store_->StageRecords(version, t, BucketOfHash(HashKey(key), table.bucket_bits),
                                Record(table, key, live, value));
  }
  std::string Refusal(const StoreOptions& options) {
    const auto store = Face::Open(options);
    EXPECT_FALSE(store.ok());
    EXPECT_EQ(store.status().code(), Code::kInvalidArgument);
    return store.status().message();
  }
  void Whole() {
    const Status whole = store_->CheckIntegrity();
    ASSERT_TRUE(whole.ok()) << whole.ToString();
  }

  std::filesystem::path directory_;
  std::unique_ptr<Face> store_;
};

class ResidencyTest : public TieredStoreTest<ServingStore> {};

}  // namespace embertide
