// The store against a plain map: random operations, every invariant after each.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <random>

#include "embertide/hash.h"
#include "embertide/numa.h"
#include "embertide/serving_store.h"
#include "store/test_rows.h"

namespace embertide {
namespace {

namespace fs = std::filesystem;

TableConfig MakeTable(const std::string& name, uint32_t id, RowLayout layout, uint32_t bits) {
  TableConfig table;
  table.name = name;
  table.id = id;
  table.layout = layout;
  table.bucket_bits = bits;
  table.init_seed = 11;
  for (uint32_t d = 0; d < layout.dim(); ++d) table.default_row.push_back(0.5F + d);
  return table;
}

uint32_t BucketOf(const TableConfig& table, uint64_t key) {
  return BucketOfHash(HashKey(key), table.bucket_bits);
}

// Exact in every dtype but int8, so that answers compare bit for bit.
float ValueOf(uint64_t key, uint32_t d, float salt) {
  return salt + static_cast<float>((key * 16 + d) % 500) * 0.25F;
}

// One row's record; its values follow from (key, salt).
std::vector<std::byte> Record(const TableConfig& table, uint64_t key, uint16_t live, float salt) {
  std::vector<float> values(table.layout.dim());
  for (uint32_t d = 0; d < values.size(); ++d) values[d] = ValueOf(key, d, salt);
  std::vector<std::byte> payload(table.layout.PayloadBytes(live));
  EncodePayload(table.layout, live, values.data(), payload.data());
  std::vector<std::byte> record;
  AppendRecord({key, live, RecordKind::kRow, payload}, &record);
  return record;
}

std::vector<float> Want(const TableConfig& table, uint64_t key, uint16_t live, float salt) {
  std::vector<float> values(table.layout.dim(), 0.0F);
  for (uint32_t d = 0; d < values.size(); ++d) {
    if ((live >> (d / table.layout.chunk_dim) & 1) != 0) {
      values[d] = ValueOf(key, d, salt);
    }
  }
  return values;
}

std::vector<float> Read(const ReadView& view, const TableConfig& table, uint32_t t,
                        const std::vector<int64_t>& keys, std::vector<uint8_t>* source = nullptr) {
  std::vector<float> out(keys.size() * table.layout.dim(), -1.0F);
  LookupRequest request;
  request.table = t;
  request.keys = keys;
  request.out = out.data();
  request.out_stride = table.layout.dim();
  if (source != nullptr) {
    source->resize(keys.size());
    request.source = source->data();
  }
  const Status status = view.Lookup(request);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return out;
}

class StoreTest : public ::testing::Test {
 protected:
  StoreTest()
      : directory_(fs::temp_directory_path() / ("embertide-store-" + std::to_string(::getpid()))) {}
  ~StoreTest() override { fs::remove_all(directory_); }

  StoreOptions Options(uint64_t ddr, uint64_t ssd) const {
    StoreOptions options;
    options.tables = {MakeTable("user", 1, {4, 4, DType::kFp32}, 3),
                      MakeTable("item", 2, {2, 8, DType::kFp16}, 2)};
    options.devices = 2;
    options.ddr_budget_bytes = ddr;
    options.ssd_budget_bytes = ssd;
    options.ssd_directory = directory_;
    options.window_versions = 3;
    return options;
  }
  template <typename Face = ServingStore>
  std::unique_ptr<Face> Open(const StoreOptions& options) {
    auto store = Face::Open(options);
    EXPECT_TRUE(store.ok()) << store.status().ToString();
    return std::move(*store);
  }
  fs::path directory_;
};

// The rows at a version, each by its live mask and salt, or nothing.
using Model = std::map<std::pair<uint32_t, uint64_t>, std::optional<std::pair<uint16_t, float>>>;

// Invariants 2, 3 and 7: whatever was staged, evicted, promoted and folded, every pin reads its own
// version, budgets hold, and each key's source is true.
TEST_F(StoreTest, RandomVersionsUnderPinsEqualAMap) {
  const StoreOptions options = Options(8ULL << 19, 16ULL << 20);
  auto store = Open(options);
  std::mt19937 random(7);
  std::map<uint64_t, Model> versions;
  std::vector<std::pair<uint64_t, ReadView>> pins;
  Model model;
  constexpr uint64_t kKeys = 40000;
  for (uint64_t version = 1; version <= 30; ++version) {
    const int changes = version == 1 ? 60000 : 1500;
    for (int i = 0; i < changes; ++i) {
      const uint32_t t = random() % 2;
      const TableConfig& table = options.tables[t];
      const uint64_t key = random() % kKeys;
      std::vector<std::byte> record;
      if (version > 1 && random() % 8 == 0) {
        AppendRecord({key, 0, RecordKind::kPruned, {}}, &record);
        model[{t, key}] = std::nullopt;
      } else {
        const auto live = static_cast<uint16_t>(1 + random() % table.layout.full_mask());
        const auto salt = static_cast<float>(version % 4);
        record = Record(table, key, live, salt);
        model[{t, key}] = {live, salt};
      }
      const Status staged = store->StageRecords(version, t, BucketOf(table, key), record);
      ASSERT_TRUE(staged.ok()) << staged.ToString();
    }
    ASSERT_TRUE(store->Commit(version).ok());
    versions[version] = model;
    if (version % 3 == 0) pins.emplace_back(version, std::move(*store->Pin(version)));
    if (pins.size() > 2) pins.erase(pins.begin());
    store->Maintain();
    const Status integrity = store->CheckIntegrity();
    ASSERT_TRUE(integrity.ok()) << "version " << version << ": " << integrity.ToString();

    auto newest = store->PinNewest();
    ASSERT_TRUE(newest.ok());
    ASSERT_EQ(newest->version(), version);
    for (uint32_t t = 0; t < 2; ++t) {
      const TableConfig& table = options.tables[t];
      std::vector<int64_t> keys;
      for (int i = 0; i < 500; ++i) keys.push_back(static_cast<int64_t>(random() % (kKeys + 500)));
      const auto check = [&](const ReadView& view, uint64_t at) {
        std::vector<uint8_t> source;
        const auto got = Read(view, table, t, keys, &source);
        for (size_t k = 0; k < keys.size(); ++k) {
          const auto row = versions[at].find({t, static_cast<uint64_t>(keys[k])});
          const bool known = row != versions[at].end() && row->second.has_value();
          const auto want = known ? Want(table, keys[k], row->second->first, row->second->second)
                                  : table.default_row;
          const uint32_t dim = table.layout.dim();
          ASSERT_EQ(std::vector<float>(&got[k * dim], &got[k * dim] + dim), want)
              << "key " << keys[k] << " at version " << at << ", newest " << version;
          ASSERT_EQ(source[k] == static_cast<uint8_t>(Source::kDefault) ||
                        source[k] == static_cast<uint8_t>(Source::kPruned),
                    !known);
        }
      };
      check(*newest, version);
      for (const auto& [at, view] : pins) check(view, at);
    }
  }
  const StoreStats stats = store->Stats();
  EXPECT_GT(stats.hits[static_cast<size_t>(Source::kSsd)], 0U) << "the SSD tier was never used";
  EXPECT_GT(stats.evictions_to_ssd, 0U);
  EXPECT_GT(stats.promotions, 0U);
  EXPECT_EQ(stats.refused_rows, 0U);
}

// The pages of this process, in use, whose memory is bound to a NUMA node.
uint64_t PagesBoundTo(uint32_t node) {
  uint64_t pages = 0;
  std::ifstream maps("/proc/self/numa_maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t anon = line.find(" anon=");
    const bool bound = line.find(" bind:" + std::to_string(node) + " ") != std::string::npos;
    if (bound && anon != std::string::npos) pages += std::stoull(line.substr(anon + 6));
  }
  return pages;
}

TEST_F(StoreTest, RowsAndTheirIndexLieAtTheNumaNodeThatIsNamed) {
  const std::vector<uint32_t> nodes = NumaNodes();
  if (nodes.empty()) GTEST_SKIP() << "the system lets this process bind no memory";
  StoreOptions options;
  options.tables = {MakeTable("item", 1, {1, 8, DType::kFp32}, 0)};
  options.ddr_budget_bytes = 16ULL << 20;
  options.numa_nodes = {1000};
  const Status refused = ServingStore::Open(options).status();
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_NE(refused.message().find("NUMA node 1000 does not exist"), std::string::npos);
  options.numa_nodes = {nodes.back()};
  const uint64_t before = PagesBoundTo(nodes.back());
  const auto store = std::move(*ServingStore::Open(options));
  constexpr uint64_t kRows = 40'000;
  for (uint64_t key = 0; key < kRows; ++key) {
    ASSERT_TRUE(store->StageRecords(1, 0, 0, Record(options.tables[0], key, 1, 0)).ok());
  }
  ASSERT_TRUE(store->Commit(1).ok());
  EXPECT_GE(PagesBoundTo(nodes.back()) - before, kRows * (32 + 16) / 4096);
}

TEST_F(StoreTest, PinsOutsideTheWindowAreRefusedWithItsRange) {
  auto store = Open(Options(8ULL << 20, 0));
  for (uint64_t version = 1; version <= 6; ++version) ASSERT_TRUE(store->Commit(version).ok());
  EXPECT_TRUE(store->Pin(4).ok());
  const auto gone = store->Pin(3);
  ASSERT_FALSE(gone.ok());
  EXPECT_EQ(gone.status().code(), Code::kVersionGone);
  EXPECT_NE(gone.status().message().find("4 to 6"), std::string::npos);
  EXPECT_EQ(store->Pin(7).status().code(), Code::kVersionGone);
  EXPECT_FALSE(store->Commit(6).ok());
}

TEST_F(StoreTest, UncommittedRowsAreInvisibleAndStagingTwiceChangesNothing) {
  const StoreOptions options = Options(8ULL << 20, 0);
  auto store = Open(options);
  const TableConfig& table = options.tables[0];
  const uint32_t bucket = BucketOf(table, 5);
  ASSERT_TRUE(store->StageRecords(1, 0, bucket, Record(table, 5, 15, 1)).ok());
  ASSERT_TRUE(store->Commit(1).ok());
  ASSERT_TRUE(store->StageRecords(2, 0, bucket, Record(table, 5, 15, 2)).ok());
  EXPECT_EQ(Read(*store->PinNewest(), table, 0, {5}), Want(table, 5, 15, 1));
  ASSERT_TRUE(store->StageRecords(2, 0, bucket, Record(table, 5, 15, 2)).ok());
  ASSERT_TRUE(store->Commit(2).ok());
  EXPECT_EQ(Read(*store->PinNewest(), table, 0, {5}), Want(table, 5, 15, 2));
  EXPECT_EQ(Read(*store->Pin(1), table, 0, {5}), Want(table, 5, 15, 1));
  EXPECT_FALSE(store->StageRecords(2, 0, bucket, Record(table, 5, 15, 9)).ok());
  EXPECT_TRUE(store->CheckIntegrity().ok());
  const RowLocation where = store->PinNewest()->Explain(0, 5);
  EXPECT_TRUE(where.resident);
  EXPECT_EQ(where.version, 2U);
  EXPECT_EQ(where.payload_bytes, 64U);
}

// Before: rows of a version that failed while it was staged showed in the next one.
TEST_F(StoreTest, WhatIsStagedAndDroppedLeavesNothing) {
  const StoreOptions options = Options(8ULL << 20, 0);
  auto store = Open(options);
  const TableConfig& table = options.tables[0];
  const auto stage = [&](uint64_t version, uint64_t key, float salt) {
    const auto records = Record(table, static_cast<int64_t>(key), 15, salt);
    ASSERT_TRUE(store->StageRecords(version, 0, BucketOf(table, key), records).ok());
  };
  stage(1, 5, 1);
  store->DropStaged();  // what the base is staged with stays
  ASSERT_TRUE(store->Commit(1).ok());
  stage(2, 6, 2);
  ASSERT_TRUE(store->Commit(2).ok());
  const auto rows_in_ddr = [&] {
    store->Maintain();  // frees what no pin reads
    return store->UsageOf(0, 0).ddr_rows + store->UsageOf(0, 1).ddr_rows;
  };
  const uint64_t before = rows_in_ddr();
  for (const uint64_t version : {5, 4, 7}) {  // a node's newest snapshot, then delta files
    for (const uint64_t key : {5, 6, 8}) stage(version, key, 9);
  }
  store->DropStaged();
  EXPECT_TRUE(store->CheckIntegrity().ok()) << store->CheckIntegrity().ToString();
  EXPECT_EQ(rows_in_ddr(), before);
  EXPECT_EQ(store->Stats().rows, 2U);
  stage(3, 5, 3);
  ASSERT_TRUE(store->Commit(3).ok());
  const auto read = [&](uint64_t version, int64_t key) {
    return Read(*store->Pin(version), table, 0, {key});
  };
  EXPECT_EQ(read(3, 5), Want(table, 5, 15, 3));
  EXPECT_EQ(read(3, 6), Want(table, 6, 15, 2));
  EXPECT_EQ(read(3, 8), table.default_row);
  EXPECT_EQ(read(1, 5), Want(table, 5, 15, 1));
  EXPECT_EQ(read(1, 6), table.default_row);
  EXPECT_TRUE(store->CheckIntegrity().ok());
}

TEST_F(StoreTest, BadRecordsChangeNothing) {
  const StoreOptions options = Options(8ULL << 20, 0);
  auto store = Open(options);
  const TableConfig& table = options.tables[0];
  auto records = Record(table, 5, 15, 1);
  const auto more = Record(table, 6, 15, 1);
  records.insert(records.end(), more.begin(), more.end() - 1);
  EXPECT_EQ(store->StageRecords(1, 0, BucketOf(table, 5), records).code(), Code::kCorrupt);
  EXPECT_EQ(store->StageRecords(1, 0, BucketOf(table, 5) ^ 1, Record(table, 5, 15, 1)).code(),
            Code::kCorrupt);
  EXPECT_EQ(store->StageRecords(1, 9, 0, {}).code(), Code::kInvalidArgument);
  EXPECT_EQ(store->StageRecords(1, 0, 99, {}).code(), Code::kInvalidArgument);
  EXPECT_EQ(store->Stats().rows, 0U);
}

TEST_F(StoreTest, AFullDdrTierWithoutSsdRefusesAndCounts) {
  const StoreOptions options = Options(2ULL << 20, 0);
  auto store = Open(options);
  const TableConfig& table = options.tables[0];
  Status status;
  uint64_t key = 0;
  for (; status.ok() && key < 100000; ++key) {
    status = store->StageRecords(1, 0, BucketOf(table, key), Record(table, key, 15, 1));
  }
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_EQ(store->Stats().refused_rows, 1U);
  EXPECT_TRUE(store->CheckIntegrity().ok());
}

TEST_F(StoreTest, PoolingSumsInFp64AndRoundsOnce) {
  const StoreOptions options = Options(8ULL << 20, 0);
  auto store = Open(options);
  const TableConfig& table = options.tables[0];
  for (uint64_t key = 0; key < 40; ++key) {
    ASSERT_TRUE(store->StageRecords(1, 0, BucketOf(table, key), Record(table, key, 15, 0.1F)).ok());
  }
  ASSERT_TRUE(store->Commit(1).ok());
  std::vector<int64_t> keys;
  for (int64_t k = 0; k < 42; ++k) keys.push_back(k);  // 40 and 41 read as the default row
  const std::vector<uint32_t> offsets = {0, 1, 1, 20, 42};
  std::vector<float> out(4 * 16);
  for (const Pooling pooling : {Pooling::kSum, Pooling::kMean}) {
    ASSERT_TRUE(
        store->PinNewest()->Lookup({0, keys, pooling, offsets, out.data(), 16, nullptr}).ok());
    for (size_t bag = 0; bag < 4; ++bag) {
      for (uint32_t d = 0; d < 16; ++d) {
        double sum = 0;
        for (uint32_t i = offsets[bag]; i < offsets[bag + 1]; ++i) {
          sum += i < 40 ? Want(table, i, 15, 0.1F)[d] : table.default_row[d];
        }
        const uint32_t n = offsets[bag + 1] - offsets[bag];
        if (pooling == Pooling::kMean && n > 0) sum /= n;
        ASSERT_EQ(out[bag * 16 + d], static_cast<float>(sum));
      }
    }
  }
  const std::vector<uint32_t> wrong = {0, 5, 3, 42};
  EXPECT_EQ(
      store->PinNewest()->Lookup({0, keys, Pooling::kSum, wrong, out.data(), 16, nullptr}).code(),
      Code::kInvalidArgument);
}

// Several requests over several tables in one pass, whole or cut into parts, answer as lookups of
// each feature alone do.
TEST_F(StoreTest, RequestsOverTablesEqualLookupsOfEachFeature) {
  const StoreOptions options = Options(8ULL << 20, 0);
  auto store = Open(options);
  for (uint32_t t = 0; t < 2; ++t) {
    const TableConfig& table = options.tables[t];
    for (uint64_t key = 0; key < 300; ++key) {
      const auto live = key % 3 == 0 ? table.layout.full_mask() : uint16_t{1};
      ASSERT_TRUE(
          store->StageRecords(1, t, BucketOf(table, key), Record(table, key, live, 0.1F)).ok());
    }
  }
  ASSERT_TRUE(store->Commit(1).ok());
  const std::vector<BagFeature> features = {
      {0, Pooling::kSum, 0}, {1, Pooling::kMean, 16}, {0, Pooling::kMean, 32}};
  constexpr size_t kSamples = 70;
  constexpr size_t kBags = kSamples * 3;
  constexpr size_t kStride = 48;
  std::mt19937 random(3);
  std::vector<int64_t> keys;
  std::vector<uint32_t> offsets = {0};
  for (size_t bag = 0; bag < kBags; ++bag) {
    for (uint32_t n = random() % 4; n > 0; --n) keys.push_back(random() % 320);
    offsets.push_back(static_cast<uint32_t>(keys.size()));
  }
  const ReadView view = std::move(*store->PinNewest());
  std::vector<float> want(2 * kSamples * kStride);
  std::vector<uint8_t> want_source(keys.size() + kBags);
  for (size_t bag = 0; bag < kBags; ++bag) {
    const BagFeature& feature = features[bag % 3];
    float* out = want.data() + bag / 3 * kStride + feature.column;
    const auto mine = std::span(keys).subspan(offsets[bag], offsets[bag + 1] - offsets[bag]);
    const std::vector<uint32_t> ends = {0, static_cast<uint32_t>(mine.size())};
    ASSERT_TRUE(view.Lookup({feature.table, mine, feature.pooling, ends, out, 16,
                             want_source.data() + offsets[bag]})
                    .ok());
    ASSERT_TRUE(view.Lookup({feature.table,
                             std::span(keys).subspan(bag, 1),
                             Pooling::kNone,
                             {},
                             out + kSamples * kStride,
                             16,
                             want_source.data() + keys.size() + bag})
                    .ok());
  }
  for (const size_t cut : {size_t{0}, size_t{1}, size_t{33}, kSamples}) {
    std::vector<float> out(want.size(), -1.0F);
    std::vector<uint8_t> source(want_source.size(), 99);
    std::vector<SourceCounts> counts(2);
    const BagReader reader(view);
    for (const auto& [first, end] : {std::pair(size_t{0}, cut), std::pair(cut, kSamples)}) {
      const std::vector<KeyBags> parts = {
          {keys, std::span(offsets).subspan(first * 3, (end - first) * 3 + 1),
           out.data() + first * kStride, kStride, source.data()},
          {std::span(keys).subspan(first * 3, (end - first) * 3),
           {},
           out.data() + (kSamples + first) * kStride,
           kStride,
           source.data() + keys.size() + first * 3}};
      ASSERT_TRUE(reader.Lookup(features, parts, counts).ok());
    }
    EXPECT_EQ(out, want) << "cut at " << cut;
    EXPECT_EQ(source, want_source) << "cut at " << cut;
    uint64_t counted = 0;
    for (const SourceCounts& table : counts) {
      for (const uint64_t count : table) counted += count;
    }
    EXPECT_EQ(counted, source.size());
  }
}

// Invariant 4: the answer is the same whatever the tier and the number of devices.
TEST_F(StoreTest, AnswersDoNotDependOnTiersOrDevices) {
  std::vector<std::vector<float>> answers;
  for (const uint32_t devices : {1U, 2U, 3U}) {
    StoreOptions options = Options(devices == 3 ? 64ULL << 20 : 5ULL << 20, 16ULL << 20);
    options.devices = devices;
    auto store = Open(options);
    for (uint64_t key = 0; key < 100000; ++key) {
      ASSERT_TRUE(store
                      ->StageRecords(1, 0, BucketOf(options.tables[0], key),
                                     Record(options.tables[0], key, 1 + key % 15, 0.3F))
                      .ok());
    }
    ASSERT_TRUE(store->Commit(1).ok());
    std::vector<int64_t> keys;
    std::vector<uint32_t> offsets = {0};
    std::mt19937 random(3);
    for (int bag = 0; bag < 400; ++bag) {
      for (uint32_t n = random() % 30; n > 0; --n) keys.push_back(random() % 100100);
      offsets.push_back(static_cast<uint32_t>(keys.size()));
    }
    std::vector<float> out(400 * 16);
    ASSERT_TRUE(store->PinNewest()
                    ->Lookup({0, keys, Pooling::kSum, offsets, out.data(), 16, nullptr})
                    .ok());
    EXPECT_EQ(store->Stats().hits[static_cast<size_t>(Source::kSsd)] > 0, devices != 3);
    answers.push_back(out);
  }
  EXPECT_EQ(answers[0], answers[1]);
  EXPECT_EQ(answers[0], answers[2]);
}

class TrainingStoreTest : public StoreTest {
 protected:
  StoreOptions Options(uint64_t ddr, uint64_t ssd) const {
    StoreOptions options = StoreTest::Options(ddr, ssd);
    options.tables.resize(1);
    return options;
  }
};

TEST_F(TrainingStoreTest, RowwiseAdagradEqualsAReferenceWithDuplicatesAndEviction) {
  const StoreOptions options = Options(2ULL << 20, 16ULL << 20);
  auto store = Open<TrainingStore>(options);
  const TableConfig& table = options.tables[0];
  std::map<int64_t, std::pair<std::vector<float>, float>> reference;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (int step = 0; step < 60; ++step) {
    std::vector<int64_t> keys;
    for (int i = 0; i < 1000; ++i) keys.push_back(static_cast<int64_t>(random() % 30000));
    keys.push_back(keys.front());
    ASSERT_TRUE(store->EnsureRows(0, keys).ok());
    std::vector<float> gradients(keys.size() * 16);
    for (float& g : gradients) g = normal(random);
    std::map<int64_t, std::vector<double>> sums;
    for (size_t i = 0; i < keys.size(); ++i) {
      auto& sum = sums[keys[i]];
      sum.resize(16);
      for (int d = 0; d < 16; ++d) sum[d] += gradients[i * 16 + d];
    }
    for (const auto& [key, sum] : sums) {
      auto& [values, state] = reference[key];
      if (values.empty()) {
        for (uint32_t d = 0; d < 16; ++d) values.push_back(InitialValue(11, 1, key, d, 0.01F));
      }
      double squares = 0;
      for (const double s : sum) squares += s * s;
      state += static_cast<float>(squares / 16);
      for (int d = 0; d < 16; ++d) {
        values[d] -= static_cast<float>(0.1F / (std::sqrt(state) + 1e-8) * sum[d]);
      }
    }
    const auto updated = ApplyRows(store.get(), 0, keys, gradients, {0.1F, 1e-8F, 0.0F});
    ASSERT_TRUE(updated.ok()) << updated.status().ToString();
    EXPECT_EQ(updated.value(), sums.size());
    if (step % 10 == 0) {
      const Status integrity = store->CheckIntegrity();
      ASSERT_TRUE(integrity.ok()) << integrity.ToString();
    }
  }
  EXPECT_GT(store->Stats().evictions_to_ssd, 0U);
  for (const auto& [key, row] : reference) {
    const auto got = Read(*store->PinNewest(), table, 0, {key});
    for (int d = 0; d < 16; ++d) ASSERT_NEAR(got[d], row.first[d], 1e-5);
    ASSERT_NEAR(store->StateOf(0, key)->accumulator, row.second, 1e-4 * row.second);
  }
}

TEST_F(TrainingStoreTest, ChangesAreTakenOnceAndRebuildTheStore) {
  StoreOptions options = Options(16ULL << 20, 0);
  auto store = Open<TrainingStore>(options);
  auto served = Open(options);
  std::mt19937 random(9);
  for (uint64_t version = 1; version < 8; ++version) {
    std::vector<int64_t> keys;
    for (int i = 0; i < 500; ++i) keys.push_back(static_cast<int64_t>(random() % 2000));
    ASSERT_TRUE(store->EnsureRows(0, keys).ok());
    const std::vector<float> gradients(keys.size() * 16, 0.5F);
    ASSERT_TRUE(ApplyRows(store.get(), 0, keys, gradients, {}).ok());
    for (int i = 0; i < 50; ++i) {
      const Status set = store->SetLive(0, random() % 2000, random() % 16);
      ASSERT_TRUE(set.ok() || set.code() == Code::kNotFound) << set.ToString();
    }
    for (uint32_t b = 0; b < 8; ++b) {
      std::vector<std::byte> records;
      ASSERT_TRUE(store->TakeChanges(0, b, &records).ok());
      std::vector<std::byte> again;
      ASSERT_TRUE(store->TakeChanges(0, b, &again).ok());
      EXPECT_TRUE(again.empty());
      const Status staged = served->StageRecords(version, 0, b, records);
      ASSERT_TRUE(staged.ok()) << staged.ToString();
    }
    ASSERT_TRUE(served->Commit(version).ok());
    ASSERT_TRUE(store->CheckIntegrity().ok());
    for (uint32_t b = 0; b < 8; ++b) {
      std::vector<std::byte> trained;
      std::vector<std::byte> there;
      ASSERT_TRUE(store->ExportBucket(*store->PinNewest(), 0, b, &trained).ok());
      ASSERT_TRUE(served->ExportBucket(*served->PinNewest(), 0, b, &there).ok());
      ASSERT_EQ(trained, there) << "bucket " << b << " version " << version;
    }
  }
}

TEST_F(TrainingStoreTest, ChunksThatComeBackAreZero) {
  const StoreOptions options = Options(8ULL << 20, 0);
  auto store = Open<TrainingStore>(options);
  ASSERT_TRUE(store->EnsureRows(0, std::vector<int64_t>{3}).ok());
  ASSERT_TRUE(store->SetLive(0, 3, 0b0101).ok());
  ASSERT_TRUE(store->SetLive(0, 3, 0b0111).ok());
  const auto got = Read(*store->PinNewest(), options.tables[0], 0, {3});
  for (uint32_t d = 0; d < 16; ++d) {
    const bool kept = d / 4 == 0 || d / 4 == 2;
    EXPECT_EQ(got[d], kept ? InitialValue(11, 1, 3, d, 0.01F) : 0.0F);
  }
  EXPECT_EQ(store->SetLive(0, 3, 16).code(), Code::kInvalidArgument);
  EXPECT_EQ(store->SetLive(0, 4, 1).code(), Code::kNotFound);
}

// Prune most chunks, then fill with one-chunk rows up to the budget: freed pages must serve the
// new size class, so waste may not hold the budget.
TEST_F(TrainingStoreTest, PrunedPagesServeAnotherSizeClass) {
  const StoreOptions options = Options(80ULL << 20, 0);
  auto store = Open<TrainingStore>(options);
  std::vector<int64_t> keys(400000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
  ASSERT_TRUE(store->EnsureRows(0, keys).ok());
  const uint64_t full = store->Stats().ddr_payload_bytes;
  for (const int64_t key : keys) ASSERT_TRUE(store->SetLive(0, key, key % 10 == 0 ? 15 : 1).ok());
  for (int i = 0; i < 300; ++i) store->Maintain();
  ASSERT_TRUE(store->CheckIntegrity().ok());
  // Payload goes from 64 to 0.1 * 64 + 0.9 * 16 bytes a row; its aux of 24 stays: 0.51 of the
  // whole.
  const auto pages = static_cast<double>(store->Stats().ddr_payload_bytes);
  EXPECT_LT(pages, 0.56 * static_cast<double>(full));
  // And what was freed is room again: as many one-chunk rows as the bytes given back allow.
  uint64_t more = 0;
  for (uint64_t key = 1000000;; ++key, ++more) {
    if (!store->EnsureRows(0, std::vector<int64_t>{static_cast<int64_t>(key)}).ok()) break;
    if (!store->SetLive(0, key, 1).ok()) break;
  }
  EXPECT_GT(more, 300000U);
  ASSERT_TRUE(store->CheckIntegrity().ok());
}

TEST(IndexKindTest, ALeanIndexNeedsRowsThatStayInDdr) {
  StoreOptions options;
  options.tables = TestTables();
  options.index = IndexKind::kLean;
  EXPECT_TRUE(ServingStore::Open(options).ok());
  options.ssd_budget_bytes = 64ULL << 20;
  options.ssd_directory = "/nowhere";
  const Status ssd = ServingStore::Open(options).status();
  EXPECT_EQ(ssd.code(), Code::kInvalidArgument);
  EXPECT_NE(ssd.message().find("no SSD tier (ssd_budget_bytes = 0)"), std::string::npos)
      << ssd.message();
  options.ssd_budget_bytes = 0;
  options.hbm_budget_bytes = 64ULL << 20;
  options.hbm_kind = HbmKind::kTwin;
  const Status hbm = ServingStore::Open(options).status();
  EXPECT_EQ(hbm.code(), Code::kInvalidArgument);
  EXPECT_NE(hbm.message().find("no HBM tier"), std::string::npos) << hbm.message();
  const Result<IndexKind> other = ParseIndexKind("thin");
  ASSERT_FALSE(other.ok());
  EXPECT_EQ(other.status().message(), "index \"thin\"; use plain or lean");
}

// A row none of whose chunks is live reads as zeros, from either index, also as the first row that
// there is, whatever its hash, and after it had chunks or before it gets some. Before, the lean
// index ended the process.
TEST(StoreIndexKindTest, ARowWithoutALiveChunkIsTakenByEitherIndex) {
  for (const IndexKind kind : {IndexKind::kPlain, IndexKind::kLean}) {
    for (const uint16_t chunk_dim : {1, 8, 40}) {
      StoreOptions options;
      options.tables.resize(1);
      options.tables[0].name = "item";
      options.tables[0].layout = {2, chunk_dim, DType::kFp32};
      options.tables[0].bucket_bits = 1;
      options.ddr_budget_bytes = 16ULL << 20;
      options.index = kind;
      options.window_versions = 2;
      const TableConfig& table = options.tables[0];
      const uint32_t dim = table.layout.dim();
      auto store = std::move(*ServingStore::Open(options));
      constexpr uint64_t kKeys = 3000;
      const auto live_of = [](uint64_t key, uint64_t version) {
        return static_cast<uint16_t>((key + version) % 4 == 0 ? 0 : (key + version) % 3 + 1);
      };
      for (uint64_t version = 1; version <= 4; ++version) {
        for (uint64_t key = 0; key < kKeys; ++key) {
          // The first row of all has no chunk.
          const uint16_t live = key == 0 && version == 1 ? 0 : live_of(key, version);
          const std::vector<float> values(dim, static_cast<float>(key + version));
          std::vector<std::byte> payload(table.layout.PayloadBytes(live));
          EncodePayload(table.layout, live, values.data(), payload.data());
          std::vector<std::byte> record;
          AppendRecord({key, live, RecordKind::kRow, payload}, &record);
          ASSERT_TRUE(store->StageRecords(version, 0, BucketOfHash(HashKey(key), 1), record).ok());
        }
        ASSERT_TRUE(store->Commit(version).ok());
        store->Maintain();
        auto view = store->PinNewest();
        ASSERT_TRUE(view.ok());
        for (uint64_t key = 0; key < kKeys; ++key) {
          const uint16_t live = key == 0 && version == 1 ? 0 : live_of(key, version);
          const std::vector<int64_t> keys = {static_cast<int64_t>(key)};
          std::vector<float> out(dim);
          uint8_t source = 255;
          ASSERT_TRUE(view->Lookup({0, keys, Pooling::kNone, {}, out.data(), dim, &source}).ok());
          ASSERT_EQ(static_cast<Source>(source), Source::kDdr) << key;
          for (uint32_t d = 0; d < dim; ++d) {
            const bool is_live = (live >> (d / chunk_dim) & 1U) != 0;
            ASSERT_EQ(out[d], is_live ? static_cast<float>(key + version) : 0.0F) << key;
          }
        }
        ASSERT_TRUE(store->CheckIntegrity().ok());
      }
    }
  }
}

}  // namespace
}  // namespace embertide
