// The store with an HBM tier against the store without: the same operations, the same answers.
//
// Over twins always, and over GPUs where there are any (tests named Gpu).
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <deque>
#include <map>
#include <random>
#include <thread>

#include "embertide/hash.h"
#include "embertide/serving_store.h"
#include "embertide/training_store.h"
#include "hbm/cache.h"

namespace embertide {
namespace {

struct Case {
  HbmKind kind;
  uint32_t devices;
  friend std::ostream& operator<<(std::ostream& out, const Case& c) {
    return out << (c.kind == HbmKind::kTwin ? "twins" : "GPUs") << " " << c.devices;
  }
};

TableConfig MakeTable(uint32_t id, RowLayout layout, uint32_t bits) {
  TableConfig table;
  table.name = "t" + std::to_string(id);
  table.id = id;
  table.layout = layout;
  table.bucket_bits = bits;
  for (uint32_t d = 0; d < layout.dim(); ++d) {
    table.default_row.push_back(0.5F + static_cast<float>(d));
  }
  return table;
}

// Every dtype; chunk_dim a multiple of four and not; more than 32 lanes of four, too.
std::vector<TableConfig> Tables() {
  return {MakeTable(1, {4, 8, DType::kFp32}, 4),  MakeTable(2, {2, 16, DType::kFp16}, 3),
          MakeTable(3, {3, 5, DType::kBf16}, 3),  MakeTable(4, {2, 12, DType::kInt8}, 3),
          MakeTable(6, {2, 12, DType::kInt4}, 3), MakeTable(7, {3, 6, DType::kInt4}, 3),
          MakeTable(5, {1, 136, DType::kFp32}, 2)};
}

class HbmTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (GetParam().kind == HbmKind::kGpu && GpuCount() < GetParam().devices) {
      GTEST_SKIP() << "needs " << GetParam().devices << " GPUs; there are " << GpuCount();
    }
  }

  StoreOptions Options(uint64_t hbm_bytes) const {
    StoreOptions options;
    options.tables = tables_;
    options.devices = 2;
    options.ddr_budget_bytes = 256ULL << 20;
    options.window_versions = 3;
    options.hbm_budget_bytes = hbm_bytes;
    options.hbm_devices = GetParam().devices;
    options.hbm_kind = GetParam().kind;
    return options;
  }
  static std::unique_ptr<ServingStore> Open(const StoreOptions& options) {
    auto store = ServingStore::Open(options);
    EXPECT_TRUE(store.ok()) << store.status().ToString();
    return std::move(*store);
  }

  std::mt19937 random_{11};
  uint32_t keys_ = 6000;
  std::vector<TableConfig> tables_ = Tables();

  uint32_t Random(uint32_t below) { return static_cast<uint32_t>(random_() % below); }
  // Hot keys come often, so that rows enter HBM.
  int64_t Key() { return static_cast<int64_t>(Random(4) == 0 ? Random(keys_ + 200) : Random(300)); }

  std::vector<std::byte> Record(const TableConfig& table, uint64_t key) {
    std::vector<std::byte> record;
    if (Random(10) == 0) {
      AppendRecord({key, 0, RecordKind::kPruned, {}}, &record);
      return record;
    }
    std::vector<float> values(table.layout.dim());
    for (float& value : values) value = std::normal_distribution<float>()(random_);
    if (Random(20) == 0) values[0] = -0.0F;
    const auto live = static_cast<uint16_t>(Random(2) == 0 ? table.layout.full_mask()
                                                           : Random(table.layout.full_mask() + 1U));
    std::vector<std::byte> payload(table.layout.PayloadBytes(live));
    EncodePayload(table.layout, live, values.data(), payload.data());
    AppendRecord({key, live, RecordKind::kRow, payload}, &record);
    return record;
  }

  void Stage(std::span<ServingStore* const> stores, uint64_t version, uint32_t rows) {
    for (uint32_t i = 0; i < rows; ++i) {
      const uint32_t t = Random(static_cast<uint32_t>(tables_.size()));
      const uint64_t key = version == 1 ? Random(keys_) : static_cast<uint64_t>(Key()) % keys_;
      const std::vector<std::byte> record = Record(tables_[t], key);
      const uint32_t bucket = BucketOfHash(HashKey(key), tables_[t].bucket_bits);
      for (ServingStore* store : stores) {
        const Status staged = store->StageRecords(version, t, bucket, record);
        ASSERT_TRUE(staged.ok()) << staged.ToString();
      }
    }
  }

  // Answers of peers for some keys of a request: rows, default rows, or a sum of several keys.
  struct Remote {
    std::vector<uint32_t> of;
    std::vector<RemoteRow> rows;
    std::deque<std::vector<std::byte>> payloads;
    std::deque<std::vector<double>> sums;

    void AddBag(HbmTest* test, const RowLayout& layout, size_t bag_keys) {
      of.resize(of.size() + bag_keys, 0);
      if (bag_keys == 0 || test->Random(3) != 0) return;
      uint32_t* of_bag = &of[of.size() - bag_keys];
      RemoteRow row;
      if (bag_keys > 2 && test->Random(2) == 0) {
        sums.emplace_back(layout.dim());
        for (double& sum : sums.back()) sum = std::normal_distribution<double>()(test->random_);
        row.sums = sums.back().data();
        rows.push_back(row);
        of_bag[0] = static_cast<uint32_t>(rows.size());
        row = {};
        row.summed = true;
        rows.push_back(row);
        of_bag[2] = static_cast<uint32_t>(rows.size());
        return;
      }
      if (test->Random(4) != 0) {
        std::vector<float> values(layout.dim());
        for (float& value : values) value = std::normal_distribution<float>()(test->random_);
        row.live = static_cast<uint16_t>(1 + test->Random(layout.full_mask()));
        payloads.emplace_back(layout.PayloadBytes(row.live));
        EncodePayload(layout, row.live, values.data(), payloads.back().data());
        row.payload = payloads.back().data();
      }
      rows.push_back(row);
      of_bag[test->Random(static_cast<uint32_t>(bag_keys))] = static_cast<uint32_t>(rows.size());
    }
  };

  // Bit for bit the same; with several devices sums within 1 ulp, for bags of more than one key.
  static void ExpectEqual(float got, float want, bool exact, const std::string& what) {
    const auto bits = [](float value) { return std::bit_cast<int32_t>(value); };
    if (bits(got) == bits(want)) return;
    ASSERT_FALSE(exact) << what << ": " << got << " is not " << want;
    ASSERT_LE(std::abs(int64_t{bits(got)} - bits(want)), 1) << what << ": " << got << ", " << want;
  }

  // One request over all tables, and one without pooling, at a version; both stores.
  void Compare(const ReadView& with, const ReadView& without, size_t samples) {
    std::vector<BagFeature> features;
    uint32_t width = 0;
    for (uint32_t t = 0; t < tables_.size(); ++t) {
      features.push_back({t, t % 2 == 0 ? Pooling::kSum : Pooling::kMean, width});
      width += tables_[t].layout.dim();
    }
    std::vector<int64_t> keys;
    std::vector<uint32_t> offsets = {0};
    Remote remote;
    for (size_t bag = 0; bag < samples * features.size(); ++bag) {
      for (uint32_t n = Random(6); n > 0; --n) keys.push_back(Key());
      remote.AddBag(this, tables_[bag % features.size()].layout, keys.size() - offsets.back());
      offsets.push_back(static_cast<uint32_t>(keys.size()));
    }
    std::vector<float> got(2 * samples * width, -1);
    std::vector<float> want(got.size(), -2);
    std::vector<uint8_t> got_source(keys.size() + samples * features.size(), 99);
    std::vector<uint8_t> want_source(got_source.size(), 99);
    const auto answer = [&](const ReadView& view, std::vector<float>* out,
                            std::vector<uint8_t>* source) {
      const KeyBags jagged{keys,           offsets,          out->data(),       width,
                           source->data(), remote.of.data(), remote.rows.data()};
      const std::span<const int64_t> first = std::span(keys).first(samples * features.size());
      const KeyBags single{
          first, {}, out->data() + samples * width, width, source->data() + keys.size()};
      const std::array<KeyBags, 2> requests = {jagged, single};
      std::vector<SourceCounts> counts(tables_.size());
      const Status status = BagReader(view).Lookup(features, requests, counts);
      ASSERT_TRUE(status.ok()) << status.ToString();
      uint64_t counted = 0;
      for (const SourceCounts& table : counts) {
        for (const uint64_t count : table) counted += count;
      }
      EXPECT_EQ(counted, source->size());
    };
    answer(with, &got, &got_source);
    answer(without, &want, &want_source);
    const bool one_device = GetParam().devices == 1;
    for (size_t i = 0; i < got.size(); ++i) {
      const size_t row = i / width;
      const uint32_t column = static_cast<uint32_t>(i % width);
      size_t f = features.size() - 1;
      while (features[f].column > column) --f;
      const size_t bag = row * features.size() + f;
      const bool single = row >= samples || offsets[bag + 1] - offsets[bag] <= 1;
      ExpectEqual(got[i], want[i], one_device || single,
                  "sample " + std::to_string(row) + " column " + std::to_string(column));
      if (HasFatalFailure()) return;
    }
    for (size_t k = 0; k < got_source.size(); ++k) {
      // A copy in HBM is a row below.
      if (got_source[k] == static_cast<uint8_t>(Source::kHbm)) {
        ASSERT_EQ(want_source[k], static_cast<uint8_t>(Source::kDdr));
      } else {
        ASSERT_EQ(got_source[k], want_source[k]);
      }
    }
  }
};

TEST_P(HbmTest, AnswersEqualThoseOfTheStoreWithoutIt) {
  const auto with = Open(Options(16ULL << 20));
  const auto without = Open(Options(0));
  const std::array<ServingStore*, 2> stores = {with.get(), without.get()};
  std::vector<std::pair<ReadView, ReadView>> pins;
  for (uint64_t version = 1; version <= 25; ++version) {
    // Staged rows are seen by nobody, also if their keys enter now; and they may be staged again.
    for (int round = 0; round < (version == 1 ? 1 : 3); ++round) {
      Stage(stores, version, version == 1 ? 40000 : 200);
      if (HasFatalFailure()) return;
      if (version == 1) break;
      Compare(*with->PinNewest(), *without->PinNewest(), 40);
      if (HasFatalFailure()) return;
      with->Maintain();
    }
    for (ServingStore* store : stores) ASSERT_TRUE(store->Commit(version).ok());
    pins.emplace_back(std::move(*with->PinNewest()), std::move(*without->PinNewest()));
    if (pins.size() > 5) pins.erase(pins.begin());  // longer than the window
    for (int round = 0; round < 3; ++round) {
      for (const auto& [pin, other] : pins) {
        Compare(pin, other, 60);
        if (HasFatalFailure()) return;
      }
      with->Maintain();
      const Status integrity = with->CheckIntegrity();
      ASSERT_TRUE(integrity.ok()) << integrity.ToString();
    }
  }
  const StoreStats stats = with->Stats();
  EXPECT_GT(stats.hits[static_cast<size_t>(Source::kHbm)],
            stats.hits[static_cast<size_t>(Source::kDdr)]);
  ASSERT_EQ(stats.hbm.size(), GetParam().devices);
  uint64_t hits = 0;
  for (const HbmDeviceStats& device : stats.hbm) {
    hits += device.hits;
    EXPECT_GT(device.misses, 0U);
    EXPECT_GT(device.placed, 100U);
    EXPECT_GT(device.ended, 30U);
    EXPECT_LE(device.used_bytes, 16ULL << 20);
  }
  EXPECT_EQ(hits, stats.hits[static_cast<size_t>(Source::kHbm)]);
  EXPECT_FALSE(stats.hbm_failed);
  EXPECT_EQ(stats.hbm_fallbacks, 0U);
}

// A cache that holds a fraction: rows of all size classes leave for others all the time.
TEST_P(HbmTest, AFullCacheLetsRowsLeaveAndStaysRight) {
  tables_.pop_back();
  keys_ = 30000;
  constexpr uint64_t kBudget = 3ULL << 19;
  const auto with = Open(Options(kBudget));
  const auto without = Open(Options(0));
  const std::array<ServingStore*, 2> stores = {with.get(), without.get()};
  Stage(stores, 1, 4 * keys_);
  for (ServingStore* store : stores) ASSERT_TRUE(store->Commit(1).ok());
  const ReadView pin = std::move(*with->PinNewest());
  const ReadView other = std::move(*without->PinNewest());
  for (int round = 0; round < 300; ++round) {
    // Stretches of keys, each asked for twice: the sizes of rows come in waves.
    const uint32_t t = round / 20 % 4;
    const uint32_t dim = tables_[t].layout.dim();
    std::vector<int64_t> keys;
    const uint32_t first = Random(keys_);
    for (uint32_t i = 0; i < 400; ++i) keys.push_back((first + i) % keys_);
    std::vector<float> out(keys.size() * dim);
    std::vector<float> want(out.size());
    ASSERT_TRUE(other.Lookup({t, keys, Pooling::kNone, {}, want.data(), dim, nullptr}).ok());
    for (int twice = 0; twice < 2; ++twice) {
      ASSERT_TRUE(pin.Lookup({t, keys, Pooling::kNone, {}, out.data(), dim, nullptr}).ok());
      ASSERT_EQ(out, want);
      with->Maintain();
    }
    const Status integrity = with->CheckIntegrity();
    ASSERT_TRUE(integrity.ok()) << integrity.ToString();
  }
  const StoreStats stats = with->Stats();
  uint64_t rows = 0;
  uint64_t evictions = 0;
  for (const HbmDeviceStats& device : stats.hbm) {
    rows += device.rows;
    evictions += device.evictions;
    EXPECT_LE(device.used_bytes, kBudget);
  }
  EXPECT_GT(rows, 5000U);
  EXPECT_GT(evictions, 5000U);
}

TEST_P(HbmTest, RowsOfADroppedBucketAreNotFoundAndComeBackAsTheyAreNow) {
  const StoreOptions options = Options(16ULL << 20);
  const auto store = Open(options);
  const TableConfig& table = options.tables[0];
  const int64_t key = 77;
  const uint32_t bucket = BucketOfHash(HashKey(key), table.bucket_bits);
  const auto record = [&](float value) {
    const std::vector<float> values(table.layout.dim(), value);
    std::vector<std::byte> payload(table.layout.PayloadBytes(15));
    EncodePayload(table.layout, 15, values.data(), payload.data());
    std::vector<std::byte> bytes;
    AppendRecord({key, 15, RecordKind::kRow, payload}, &bytes);
    return bytes;
  };
  const auto read = [&](float* value, Source* source) {
    std::vector<float> out(table.layout.dim());
    uint8_t from = 99;
    const Status status =
        store->PinNewest()->Lookup({0, {&key, 1}, Pooling::kNone, {}, out.data(), 32, &from});
    *value = out[31];
    *source = static_cast<Source>(from);
    return status;
  };
  float value = 0;
  Source source = Source::kDefault;
  ASSERT_TRUE(store->StageRecords(1, 0, bucket, record(1)).ok());
  ASSERT_TRUE(store->Commit(1).ok());
  const auto warm = [&] {
    for (int i = 0; i < 4 && source != Source::kHbm; ++i) {
      ASSERT_TRUE(read(&value, &source).ok());
      store->Maintain();
    }
    ASSERT_EQ(source, Source::kHbm);
  };
  warm();
  ASSERT_TRUE(store->DropBucket(0, bucket).ok());
  EXPECT_EQ(read(&value, &source).code(), Code::kNotOwner);
  ASSERT_TRUE(store->Commit(2).ok());
  ASSERT_TRUE(store->AddBucket(0, bucket, 1, record(2)).ok());
  ASSERT_TRUE(read(&value, &source).ok());
  EXPECT_EQ(value, 2.0F);
  source = Source::kDefault;
  warm();
  EXPECT_EQ(value, 2.0F);
  // A copy on another device of the store changes nothing; a version does.
  ASSERT_TRUE(store->AddBucket(0, bucket, 0, record(2)).ok());
  ASSERT_TRUE(store->StageRecords(3, 0, bucket, record(3)).ok());
  ASSERT_TRUE(store->Commit(3).ok());
  ASSERT_TRUE(read(&value, &source).ok());
  EXPECT_EQ(value, 3.0F);
}

// A table may keep its rows out, and each says at which read they enter.
TEST_P(HbmTest, APolicyATableSaysWhichRowsEnter) {
  StoreOptions options = Options(16ULL << 20);
  options.hbm_policy = "clock:3,t1=none,t2=clock";
  const auto store = Open(options);
  const std::array<ServingStore*, 1> stores = {store.get()};
  Stage(stores, 1, 4 * keys_);
  ASSERT_TRUE(store->Commit(1).ok());
  std::vector<int64_t> keys(200);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
  // Keys of a table that HBM answers when they are read for the `reads`-th time.
  const auto found_at = [&](uint32_t t, int reads) {
    const uint32_t dim = tables_[t].layout.dim();
    std::vector<float> out(keys.size() * dim);
    std::vector<uint8_t> sources(keys.size());
    for (int i = 0; i < reads; ++i) {
      EXPECT_TRUE(store->PinNewest()
                      ->Lookup({t, keys, Pooling::kNone, {}, out.data(), dim, sources.data()})
                      .ok());
      store->Maintain();
    }
    return std::count(sources.begin(), sources.end(), static_cast<uint8_t>(Source::kHbm));
  };
  EXPECT_EQ(found_at(0, 20), 0);
  EXPECT_GT(found_at(1, 2), 50);
  // That it came counts as a read.
  EXPECT_EQ(found_at(2, 2), 0);
  EXPECT_GT(found_at(2, 1), 50);
}

TEST_P(HbmTest, ASampleThatFitsNoBatchIsAnsweredWithoutIt) {
  const auto store = Open(Options(16ULL << 20));
  const std::array<ServingStore*, 1> stores = {store.get()};
  Stage(stores, 1, 2000);
  ASSERT_TRUE(store->Commit(1).ok());
  const std::vector<int64_t> keys(40000, 5);
  const std::vector<uint32_t> offsets = {0, 40000};
  std::vector<float> out(32);
  ASSERT_TRUE(
      store->PinNewest()->Lookup({0, keys, Pooling::kMean, offsets, out.data(), 32, nullptr}).ok());
  EXPECT_EQ(store->Stats().hbm_fallbacks, 1U);
  uint64_t hits = 0;
  for (const uint64_t of : store->Stats().hits) hits += of;
  EXPECT_EQ(hits, keys.size());
}

// Readers beside versions and fills: every value of every row is its version (run under TSan, too).
// Their rows are multiplied below it.
TEST_P(HbmTest, WeighedBagsAreAnsweredWithoutIt) {
  const auto store = Open(Options(16ULL << 20));
  const std::array<ServingStore*, 1> stores = {store.get()};
  Stage(stores, 1, 4 * keys_);
  ASSERT_TRUE(store->Commit(1).ok());
  const std::array<int64_t, 2> keys = {1, 2};
  const std::array<uint32_t, 2> offsets = {0, 2};
  const std::array<float, 2> weights = {2, -0.5F};
  const uint32_t dim = tables_[0].layout.dim();
  const BagFeature feature{0, Pooling::kSum, 0};
  const ReadView pin = std::move(*store->PinNewest());
  std::vector<float> rows(2 * dim);
  for (int twice = 0; twice < 2; ++twice) {  // the second time, HBM has them
    ASSERT_TRUE(pin.Lookup({0, keys, Pooling::kNone, {}, rows.data(), dim, nullptr}).ok());
    store->Maintain();
  }
  std::vector<float> out(dim);
  KeyBags bags{keys, offsets, out.data(), dim};
  bags.weights = weights.data();
  ASSERT_TRUE(BagReader(pin).Lookup({&feature, 1}, {&bags, 1}, {}).ok());
  for (uint32_t d = 0; d < dim; ++d) {
    const double want = 2 * double{rows[d]} - 0.5 * double{rows[dim + d]};
    EXPECT_EQ(out[d], static_cast<float>(want));
  }
  EXPECT_EQ(store->Stats().hbm_fallbacks, 1U);
}

TEST_P(HbmTest, ConcurrencyNoAnswerMixesVersions) {
  StoreOptions options = Options(16ULL << 20);
  options.window_versions = 2;
  const auto store = Open(options);
  const TableConfig& table = options.tables[0];
  const auto publish = [&](uint64_t version) {
    for (uint64_t key = 0; key < 500; ++key) {
      const std::vector<float> values(table.layout.dim(), static_cast<float>(version));
      std::vector<std::byte> payload(table.layout.PayloadBytes(15));
      EncodePayload(table.layout, 15, values.data(), payload.data());
      std::vector<std::byte> record;
      AppendRecord({key, 15, RecordKind::kRow, payload}, &record);
      const uint32_t bucket = BucketOfHash(HashKey(key), table.bucket_bits);
      ASSERT_TRUE(store->StageRecords(version, 0, bucket, record).ok());
    }
    ASSERT_TRUE(store->Commit(version).ok());
  };
  publish(1);
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> mixed{0};
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < kHbmLanes + 2; ++r) {  // some wait for a lane
    threads.emplace_back([&, r] {
      std::mt19937 random(r);
      std::vector<int64_t> keys(128);
      std::vector<float> out(keys.size() * 32);
      while (!stop) {
        auto view = store->PinNewest();
        for (int64_t& key : keys) key = static_cast<int64_t>(random() % 500);
        ASSERT_TRUE(view->Lookup({0, keys, Pooling::kNone, {}, out.data(), 32, nullptr}).ok());
        for (const float value : out) {
          mixed += value == static_cast<float>(view->version()) ? 0 : 1;
        }
      }
    });
  }
  threads.emplace_back([&] {
    while (!stop) store->Maintain();
  });
  const auto hits = [&] { return store->Stats().hits[static_cast<size_t>(Source::kHbm)]; };
  for (uint64_t version = 2; version <= 20; ++version) {
    const uint64_t before = hits();
    publish(version);
    // The version's rows were in HBM before the next comes.
    while (hits() < before + 2000 && !store->Stats().hbm_failed) std::this_thread::yield();
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(mixed, 0U);
  EXPECT_FALSE(store->Stats().hbm_failed);
  const Status integrity = store->CheckIntegrity();
  EXPECT_TRUE(integrity.ok()) << integrity.ToString();
}

INSTANTIATE_TEST_SUITE_P(Twin, HbmTest,
                         ::testing::Values(Case{HbmKind::kTwin, 1}, Case{HbmKind::kTwin, 3}));
INSTANTIATE_TEST_SUITE_P(Gpu, HbmTest,
                         ::testing::Values(Case{HbmKind::kGpu, 1}, Case{HbmKind::kGpu, 2}));

TEST(HbmOptionsTest, WhatCannotBeIsRefusedAndSaysWhy) {
  StoreOptions options;
  options.tables = Tables();
  options.hbm_kind = HbmKind::kTwin;
  options.hbm_budget_bytes = 1ULL << 20;
  const auto small = ServingStore::Open(options);
  ASSERT_FALSE(small.ok());
  EXPECT_EQ(small.status().code(), Code::kInvalidArgument);
  EXPECT_NE(small.status().message().find("at least"), std::string::npos);
  options.hbm_budget_bytes = 16ULL << 20;
  options.hbm_devices = 0;
  EXPECT_EQ(ServingStore::Open(options).status().code(), Code::kInvalidArgument);
  options.hbm_devices = 1;
  EXPECT_EQ(TrainingStore::Open(options).status().code(), Code::kInvalidArgument);
  options.hbm_kind = HbmKind::kGpu;
  options.hbm_devices = GpuCount() + 1;
  EXPECT_EQ(ServingStore::Open(options).status().code(), Code::kNotFound);
}

TEST(HbmOptionsTest, APolicyThatCannotBeIsRefusedAndSaysWhy) {
  StoreOptions options;
  options.tables = Tables();
  options.hbm_kind = HbmKind::kTwin;
  options.hbm_budget_bytes = 16ULL << 20;
  for (const auto& [policy, why] :
       std::map<std::string, std::string>{{"lru", "chooses among all rows of a tier"},
                                          {"clock:16", "the access at which a key enters, 2 to 15"},
                                          {"clock,t9=none", "there is no table t9"},
                                          {"clock,t1=none,t1=clock", "table t1 is named twice"},
                                          {"t1=none", "give POLICY[,TABLE=POLICY...]"},
                                          {"", "give POLICY[,TABLE=POLICY...]"}}) {
    options.hbm_policy = policy;
    const auto store = ServingStore::Open(options);
    ASSERT_FALSE(store.ok()) << policy;
    EXPECT_NE(store.status().message().find(why), std::string::npos) << store.status().message();
  }
}

}  // namespace
}  // namespace embertide
