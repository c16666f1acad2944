// Buckets that come, move between devices and go: each pin reads its own version or is told that
// the bucket is not held; what peers are sent adds up to what one store answers.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <map>
#include <random>
#include <thread>

#include "embertide/hash.h"
#include "embertide/serving_store.h"

namespace embertide {
namespace {

constexpr uint64_t kKeys = 4000;
constexpr uint32_t kBuckets = 8;
constexpr uint32_t kDim = 8;

using Rows = std::map<uint64_t, float>;  // key -> what its values are made from

class HoldingTest : public ::testing::Test {
 protected:
  HoldingTest()
      : directory_(std::filesystem::temp_directory_path() /
                   ("embertide-holding-" + std::to_string(::getpid()))) {
    table_.name = "item";
    table_.layout = {2, 4, DType::kFp32};
    table_.bucket_bits = 3;
    for (uint32_t d = 0; d < kDim; ++d) table_.default_row.push_back(0.5F + d);
    store_ = Open(/*hold_all=*/false);
  }
  ~HoldingTest() override {
    store_.reset();
    std::filesystem::remove_all(directory_);
  }
  std::unique_ptr<ServingStore> Open(bool hold_all) const {
    StoreOptions options;
    options.tables = {table_};
    options.devices = 2;
    options.hold_all = hold_all;
    options.ddr_budget_bytes = 5ULL << 19;
    options.ssd_budget_bytes = 32ULL << 20;
    options.ssd_directory = directory_ / (hold_all ? "all" : "some");
    options.window_versions = 3;
    auto store = ServingStore::Open(options);
    EXPECT_TRUE(store.ok()) << store.status().ToString();
    return std::move(*store);
  }
  uint32_t BucketOf(uint64_t key) const { return BucketOfHash(HashKey(key), table_.bucket_bits); }
  static std::vector<float> Values(uint64_t key, float salt) {
    std::vector<float> values(kDim);
    for (uint32_t d = 0; d < kDim; ++d) values[d] = salt + 0.37F * static_cast<float>(key % 97 + d);
    return values;
  }
  void Append(uint64_t key, float salt, std::vector<std::byte>* records) const {
    std::vector<std::byte> payload(table_.layout.PayloadBytes(3));
    EncodePayload(table_.layout, 3, Values(key, salt).data(), payload.data());
    AppendRecord({key, 3, RecordKind::kRow, payload}, records);
  }
  std::vector<std::byte> RecordsOf(const Rows& rows, uint32_t bucket) const {
    std::vector<std::byte> records;
    for (const auto& [key, salt] : rows) {
      if (BucketOf(key) == bucket) Append(key, salt, &records);
    }
    return records;
  }
  // Stages changes of the buckets held into `store` and all into `rows`, and commits.
  void Publish(ServingStore* store, uint64_t version, int changes, std::mt19937* random,
               Rows* rows) {
    std::map<uint64_t, float> changed;
    for (int i = 0; i < changes; ++i) {
      changed[(*random)() % kKeys] = static_cast<float>(version % 5);
    }
    for (const auto& [key, salt] : changed) {
      (*rows)[key] = salt;
      std::vector<std::byte> record;
      Append(key, salt, &record);
      const Status staged = store->StageRecords(version, 0, BucketOf(key), record);
      ASSERT_EQ(staged.ok(), store->HeldSince(0, BucketOf(key)).has_value()) << staged.ToString();
      if (!staged.ok()) {
        ASSERT_EQ(staged.code(), Code::kNotOwner);
      }
    }
    ASSERT_TRUE(store->Commit(version).ok());
  }
  Status Read(const ReadView& view, uint64_t key, std::vector<float>* out) const {
    const std::vector<int64_t> keys = {static_cast<int64_t>(key)};
    out->assign(kDim, -1.0F);
    return view.Lookup({0, keys, Pooling::kNone, {}, out->data(), kDim, nullptr});
  }

  std::filesystem::path directory_;
  TableConfig table_;
  std::unique_ptr<ServingStore> store_;
};

TEST_F(HoldingTest, RandomMovesUnderPinsEqualAMap) {
  std::mt19937 random(3);
  std::map<uint64_t, Rows> versions;
  Rows rows;
  for (uint64_t key = 0; key < kKeys; key += 2) rows[key] = 1.0F;
  for (uint32_t b = 0; b < kBuckets; b += 2) {
    ASSERT_TRUE(store_->AddBucket(0, b, b / 2 % 2, {}).ok());
    ASSERT_TRUE(store_->StageRecords(1, 0, b, RecordsOf(rows, b)).ok());
  }
  ASSERT_TRUE(store_->Commit(1).ok());
  versions[1] = rows;
  std::vector<std::pair<uint64_t, ReadView>> pins;
  // By bucket: the version from which on it is held; absent: it is not.
  std::map<uint32_t, uint64_t> since = {{0, 0}, {2, 0}, {4, 0}, {6, 0}};
  uint64_t refused_pins = 0;
  uint64_t moves = 0;
  for (uint64_t version = 2; version <= 120; ++version) {
    Publish(store_.get(), version, 150, &random, &rows);
    versions[version] = rows;
    const uint32_t b = random() % kBuckets;
    const uint32_t device = random() % 2;
    if (random() % 4 == 0) {
      ASSERT_TRUE(store_->DropBucket(0, b).ok());
      since.erase(b);
    } else {
      const auto held = store_->DeviceOf(0, b);
      const Status added = store_->AddBucket(0, b, device, RecordsOf(rows, b));
      if (held == device) {
        ASSERT_EQ(added.code(), Code::kRejected);
      } else if (!added.ok()) {
        ASSERT_EQ(added.code(), Code::kBusy) << added.ToString();
      } else {
        moves += held.has_value() ? 1 : 0;
        if (!held) since[b] = version;
        ASSERT_EQ(store_->DeviceOf(0, b), device);
      }
    }
    if (version % 4 == 0) pins.emplace_back(version, std::move(*store_->Pin(version)));
    if (pins.size() > 2) pins.erase(pins.begin());
    store_->Maintain();
    const Status integrity = store_->CheckIntegrity();
    ASSERT_TRUE(integrity.ok()) << "version " << version << ": " << integrity.ToString();
    const auto check = [&](const ReadView& view, uint64_t at) {
      for (int i = 0; i < 200; ++i) {
        const uint64_t key = random() % kKeys;
        std::vector<float> got;
        const Status status = Read(view, key, &got);
        const auto held = since.find(BucketOf(key));
        if (held == since.end() || held->second > at) {
          ASSERT_EQ(status.code(), Code::kNotOwner) << "key " << key << " at " << at;
          if (held != since.end()) ++refused_pins;
          continue;
        }
        ASSERT_TRUE(status.ok()) << status.ToString();
        const auto row = versions[at].find(key);
        ASSERT_EQ(got, row == versions[at].end() ? table_.default_row : Values(key, row->second))
            << "key " << key << " at version " << at << ", newest " << version;
      }
    };
    check(*store_->PinNewest(), version);
    for (const auto& [at, view] : pins) check(view, at);
  }
  EXPECT_GT(refused_pins, 0U) << "no pin was older than a bucket";
  EXPECT_GT(moves, 5U);
  EXPECT_EQ(store_->Stats().refused_rows, 0U);
  pins.clear();
  for (uint32_t b = 0; b < kBuckets; ++b) ASSERT_TRUE(store_->DropBucket(0, b).ok());
  store_->Maintain();
  EXPECT_EQ(store_->Stats().rows, 0U);
  EXPECT_EQ(store_->Stats().ssd_bytes, 0U) << "dropped rows keep their place on the SSD";
  EXPECT_TRUE(store_->CheckIntegrity().ok());
}

TEST_F(HoldingTest, ABucketWithoutRoomChangesNothing) {
  StoreOptions options = store_->options();
  options.ssd_budget_bytes = 0;
  options.ddr_budget_bytes = 2ULL << 20;
  auto small = std::move(*ServingStore::Open(options));
  Rows rows;
  for (uint64_t key = 0; key < 400'000; ++key) rows[key] = 1.0F;
  ASSERT_TRUE(small->AddBucket(0, 1, 0, {}).ok());
  ASSERT_TRUE(small->Commit(1).ok());
  const Status refused = small->AddBucket(0, 0, 1, RecordsOf(rows, 0));
  EXPECT_EQ(refused.code(), Code::kResourceExhausted) << refused.ToString();
  EXPECT_FALSE(small->HeldSince(0, 0).has_value());
  small->Maintain();
  EXPECT_EQ(small->Stats().rows, 0U);
  EXPECT_EQ(small->Stats().refused_rows, 1U);
  EXPECT_TRUE(small->CheckIntegrity().ok());
  EXPECT_EQ(small->AddBucket(0, 2, 7, {}).code(), Code::kInvalidArgument);
  EXPECT_EQ(small->AddBucket(0, 2, 0, RecordsOf({{3, 1.0F}}, BucketOf(3))).code(),
            BucketOf(3) == 2 ? Code::kOk : Code::kCorrupt);
}

TEST_F(HoldingTest, ABucketLeavesTheRoomThatIsAskedFor) {
  StoreOptions options = store_->options();
  options.ssd_budget_bytes = 0;
  options.ddr_budget_bytes = 4ULL << 20;  // half of it on each device
  auto small = std::move(*ServingStore::Open(options));
  Rows rows;
  for (uint64_t key = 0; key < 40'000; ++key) rows[key] = 1.0F;
  ASSERT_TRUE(small->AddBucket(0, 1, 0, {}).ok());
  ASSERT_TRUE(small->Commit(1).ok());
  // 5,000 rows of 32 bytes and their index: more than a quarter of a MiB, less than half of one.
  const Status refused = small->AddBucket(0, 0, 1, RecordsOf(rows, 0), 15ULL << 17);
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_NE(refused.message().find("kept for versions"), std::string::npos) << refused.ToString();
  EXPECT_FALSE(small->HeldSince(0, 0).has_value());
  small->Maintain();
  EXPECT_EQ(small->Stats().rows, 0U);
  EXPECT_TRUE(small->CheckIntegrity().ok());
  EXPECT_TRUE(small->AddBucket(0, 0, 1, RecordsOf(rows, 0), 12ULL << 17).ok());
  // An SSD takes what has no room.
  EXPECT_TRUE(store_->AddBucket(0, 0, 1, RecordsOf(rows, 0), 1ULL << 40).ok());
}

// Half of the buckets lie in another store; rows and fp64 sums from there, and the rest from here,
// add up to the answer of one store.
TEST_F(HoldingTest, RowsAndSumsOfAPeerAddUpToOneStoresAnswer) {
  std::mt19937 random(5);
  Rows rows;
  for (uint64_t key = 0; key < kKeys; ++key) {
    if (key % 3 != 0) rows[key] = static_cast<float>(key % 7) * 0.1F;
  }
  auto one = Open(/*hold_all=*/true);
  StoreOptions options = store_->options();
  options.ssd_directory = directory_ / "peer";
  auto peer = std::move(*ServingStore::Open(options));
  for (uint32_t b = 0; b < kBuckets; ++b) {
    ServingStore* owner = b % 2 == 0 ? store_.get() : peer.get();
    ASSERT_TRUE(owner->AddBucket(0, b, 0, {}).ok());
    ASSERT_TRUE(owner->StageRecords(1, 0, b, RecordsOf(rows, b)).ok());
    ASSERT_TRUE(one->StageRecords(1, 0, b, RecordsOf(rows, b)).ok());
  }
  for (ServingStore* store : {store_.get(), peer.get(), one.get()})
    ASSERT_TRUE(store->Commit(1).ok());

  std::vector<int64_t> keys;
  std::vector<uint32_t> offsets = {0};
  for (int bag = 0; bag < 300; ++bag) {
    for (size_t n = random() % 9; n > 0; --n)
      keys.push_back(static_cast<int64_t>(random() % kKeys));
    offsets.push_back(static_cast<uint32_t>(keys.size()));
  }
  // Keys that the peer is asked for: bags of several of its keys as sums, single keys as rows.
  std::vector<int64_t> asked;
  std::vector<uint32_t> sum_offsets = {0};
  std::vector<uint32_t> places;
  std::vector<size_t> sum_bags;
  std::vector<size_t> row_keys;  // positions in keys
  const auto theirs = [&](size_t k) { return BucketOf(static_cast<uint64_t>(keys[k])) % 2 == 1; };
  for (size_t bag = 0; bag + 1 < offsets.size(); ++bag) {
    std::vector<size_t> remote;
    for (size_t k = offsets[bag]; k < offsets[bag + 1]; ++k) {
      if (theirs(k)) remote.push_back(k);
    }
    if (remote.size() == 1) row_keys.push_back(remote[0]);
    if (remote.size() < 2) continue;
    for (const size_t k : remote) {
      places.push_back(static_cast<uint32_t>(asked.size()));
      asked.push_back(keys[k]);
    }
    sum_offsets.push_back(static_cast<uint32_t>(places.size()));
    sum_bags.push_back(bag);
  }
  const ReadView there = std::move(*peer->PinNewest());
  std::vector<double> sums((sum_offsets.size() - 1) * kDim);
  std::vector<uint8_t> sources(std::max(asked.size(), row_keys.size()));
  std::string records;
  {
    const BagReader reader(there);
    ASSERT_TRUE(
        reader.SumBags(0, asked, sum_offsets, places, {}, sums.data(), sources.data()).ok());
    std::vector<int64_t> singles;
    for (const size_t k : row_keys) singles.push_back(keys[k]);
    ASSERT_TRUE(reader.CopyRows(0, singles, &records, sources.data()).ok());
    const int64_t ours = 0;
    int64_t key = ours;
    while (BucketOf(static_cast<uint64_t>(key)) % 2 == 1) ++key;
    EXPECT_EQ(reader.CopyRows(0, {&key, 1}, &records, sources.data()).code(), Code::kNotOwner);
  }
  std::vector<RemoteRow> remote;
  std::vector<uint32_t> remote_of(keys.size(), 0);
  for (size_t s = 0; s < sum_bags.size(); ++s) {
    const size_t bag = sum_bags[s];
    bool first = true;
    for (size_t k = offsets[bag]; k < offsets[bag + 1]; ++k) {
      if (!theirs(k)) continue;
      RemoteRow row;
      row.sums = first ? sums.data() + s * kDim : nullptr;
      row.summed = !first;
      first = false;
      remote.push_back(row);
      remote_of[k] = static_cast<uint32_t>(remote.size());
    }
  }
  std::span<const std::byte> rest = std::as_bytes(std::span(records));
  for (const size_t k : row_keys) {
    RemoteRow row;
    auto peek = rest;
    if (!peek.empty()) {
      const auto record = ReadRecord(table_.layout, &peek);
      ASSERT_TRUE(record.ok());
      if (record.value().key == static_cast<uint64_t>(keys[k])) {
        row.payload = record.value().payload.data();
        row.live = record.value().live;
        rest = peek;
      }
    }
    remote.push_back(row);
    remote_of[k] = static_cast<uint32_t>(remote.size());
  }
  EXPECT_TRUE(rest.empty());
  for (const Pooling pooling : {Pooling::kSum, Pooling::kMean}) {
    const BagFeature feature{0, pooling, 0};
    std::vector<float> got(300 * kDim);
    std::vector<float> want(300 * kDim);
    KeyBags bags{keys, offsets, got.data(), kDim};
    bags.remote_of = remote_of.data();
    bags.remote = remote.data();
    const ReadView here = std::move(*store_->PinNewest());
    ASSERT_TRUE(BagReader(here).Lookup({&feature, 1}, {&bags, 1}, {}).ok());
    const ReadView all = std::move(*one->PinNewest());
    const KeyBags whole{keys, offsets, want.data(), kDim};
    ASSERT_TRUE(BagReader(all).Lookup({&feature, 1}, {&whole, 1}, {}).ok());
    for (size_t i = 0; i < got.size(); ++i) ASSERT_FLOAT_EQ(got[i], want[i]) << i;
  }
}

// Readers beside moves, versions and the maintainer: no answer is of another version, and a bucket
// that is held throughout is never refused.
TEST_F(HoldingTest, ConcurrencyOfReadersMovesAndVersions) {
  const auto record_of = [&](uint64_t version, uint32_t bucket) {
    Rows rows;
    for (uint64_t key = 0; key < kKeys; ++key) rows[key] = static_cast<float>(version);
    return RecordsOf(rows, bucket);
  };
  for (uint32_t b = 0; b < kBuckets; ++b) {
    ASSERT_TRUE(store_->AddBucket(0, b, b % 2, {}).ok());
    ASSERT_TRUE(store_->StageRecords(1, 0, b, record_of(1, b)).ok());
  }
  ASSERT_TRUE(store_->Commit(1).ok());
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> wrong{0};
  std::atomic<uint64_t> answers{0};
  std::atomic<uint64_t> refused{0};
  std::vector<std::thread> readers;
  for (uint32_t r = 0; r < 2; ++r) {
    readers.emplace_back([&, r] {
      std::mt19937 random(r);
      while (!stop) {
        const auto view = store_->PinNewest();
        const uint64_t key = random() % kKeys;
        std::vector<float> got;
        const Status status = Read(view.value(), key, &got);
        const bool may_be_gone = BucketOf(key) == 0;
        if (!status.ok()) {
          if (!may_be_gone || status.code() != Code::kNotOwner) ++wrong;
          ++refused;
          continue;
        }
        if (got != Values(key, static_cast<float>(view.value().version()))) ++wrong;
        ++answers;
      }
    });
  }
  std::thread maintainer([&] {
    while (!stop) store_->Maintain();
  });
  for (uint64_t version = 2; version <= 25; ++version) {
    for (uint32_t b = 0; b < kBuckets; ++b) {
      if (!store_->HeldSince(0, b)) continue;
      ASSERT_TRUE(store_->StageRecords(version, 0, b, record_of(version, b)).ok());
    }
    ASSERT_TRUE(store_->Commit(version).ok());
    for (uint32_t b = 1; b < kBuckets; ++b) {
      const uint32_t other = 1 - *store_->DeviceOf(0, b);
      const Status moved = store_->AddBucket(0, b, other, record_of(version, b));
      ASSERT_TRUE(moved.ok() || moved.code() == Code::kBusy) << moved.ToString();
    }
    if (version % 2 == 0) {
      ASSERT_TRUE(store_->DropBucket(0, 0).ok());
    } else {
      ASSERT_TRUE(store_->AddBucket(0, 0, version / 2 % 2, record_of(version, 0)).ok());
    }
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
  maintainer.join();
  EXPECT_EQ(wrong, 0U);
  EXPECT_GT(answers, 10U);
  EXPECT_TRUE(store_->CheckIntegrity().ok()) << store_->CheckIntegrity().ToString();
}

TEST_F(HoldingTest, ConcurrencyOfSizesAndABucketThatIsAdded) {
  table_.bucket_bits = 0;
  StoreOptions options;
  options.tables = {table_};
  options.hold_all = false;
  options.ddr_budget_bytes = 256ULL << 20;
  auto store = ServingStore::Open(options);
  ASSERT_TRUE(store.ok());
  ASSERT_TRUE(store.value()->Commit(1).ok());
  std::vector<std::byte> records;
  for (uint64_t key = 0; key < 300'000; ++key) Append(key, 1.0F, &records);
  std::atomic<bool> begun{false};
  std::atomic<bool> added{false};
  uint64_t told = 0;  // how often, while the bucket was not there yet
  std::thread asker([&] {
    begun = true;
    while (!added) {
      const auto view = store.value()->PinNewest();
      ASSERT_TRUE(view.ok());
      told += store.value()->BucketSizeOf(view.value(), 0, 0) ? 0 : 1;
    }
  });
  while (!begun) std::this_thread::yield();
  EXPECT_TRUE(store.value()->AddBucket(0, 0, 0, records).ok());
  added = true;
  asker.join();
  EXPECT_GT(told, 100U) << "it waits for no writer";
  const auto view = store.value()->PinNewest();
  EXPECT_EQ(store.value()->BucketSizeOf(view.value(), 0, 0)->rows, 300'000U);
}

TEST_F(HoldingTest, AMovedBucketIsFreedWhenVersionsAreForgotten) {
  Rows rows;
  for (uint64_t key = 0; key < kKeys; key += 2) rows[key] = 1.0F;
  ASSERT_TRUE(store_->AddBucket(0, 0, 0, {}).ok());
  ASSERT_TRUE(store_->StageRecords(1, 0, 0, RecordsOf(rows, 0)).ok());
  ASSERT_TRUE(store_->Commit(1).ok());
  ASSERT_TRUE(store_->Commit(2).ok());
  EXPECT_EQ(store_->SupersededUntil(), 0U);
  const uint64_t held = store_->Stats().rows;
  ASSERT_TRUE(store_->AddBucket(0, 0, 1, RecordsOf(rows, 0)).ok());
  EXPECT_EQ(store_->SupersededUntil(), 2U);
  EXPECT_EQ(store_->Stats().rows, 2 * held);
  EXPECT_EQ(store_->AddBucket(0, 0, 0, {}).code(), Code::kBusy);
  {
    const auto view = store_->Pin(1);
    ASSERT_TRUE(view.ok());
    store_->Forget(2);
    EXPECT_EQ(store_->Stats().oldest_version, 2U);
    EXPECT_EQ(store_->Pin(1).status().code(), Code::kVersionGone);
    EXPECT_EQ(store_->SupersededUntil(), 2U) << "a pin still needs the copy";
    std::vector<float> out;
    const auto key =
        std::ranges::find_if(rows, [&](const auto& row) { return BucketOf(row.first) == 0; });
    EXPECT_TRUE(Read(view.value(), key->first, &out).ok());
    EXPECT_EQ(out, Values(key->first, 1.0F));
  }
  store_->Forget(2);
  EXPECT_EQ(store_->SupersededUntil(), 0U);
  EXPECT_EQ(store_->Stats().rows, held);
  store_->Maintain();
  EXPECT_EQ(store_->UsageOf(0, 0).ddr_rows, 0U);
  EXPECT_EQ(store_->UsageOf(0, 0).ddr_bytes, 0U);
  EXPECT_EQ(store_->UsageOf(0, 1).ddr_rows, held);
  EXPECT_TRUE(store_->CheckIntegrity().ok());
  EXPECT_TRUE(store_->AddBucket(0, 0, 0, RecordsOf(rows, 0)).ok());
  store_->Forget(99);
  EXPECT_EQ(store_->Stats().newest_version, 2U) << "the newest version stays";
}

// No writer waits for a hundred thousand rows to be freed: they go a part at a time.
TEST_F(HoldingTest, ADroppedBucketIsFreedInParts) {
  StoreOptions options;
  options.tables = {table_};
  options.tables[0].bucket_bits = 0;
  options.ddr_budget_bytes = 8ULL << 20;
  options.hold_all = false;
  store_ = std::move(*ServingStore::Open(options));
  const uint64_t empty = store_->UsageOf(0, 0).budget_used_bytes;
  std::vector<std::byte> records;
  for (uint64_t key = 0; key < 10'000; ++key) Append(key, 1.0F, &records);
  ASSERT_TRUE(store_->AddBucket(0, 0, 0, records).ok());
  ASSERT_TRUE(store_->Commit(1).ok());
  // Versions of some rows are of the window still when they go.
  for (uint64_t version = 2; version <= 4; ++version) {
    records.clear();
    for (uint64_t key = version; key < 10'000; key += 3) Append(key, 2.0F, &records);
    ASSERT_TRUE(store_->StageRecords(version, 0, 0, records).ok());
    ASSERT_TRUE(store_->Commit(version).ok());
  }
  ASSERT_TRUE(store_->DropBucket(0, 0).ok());
  EXPECT_EQ(store_->Stats().rows, 0U);
  uint64_t left = store_->UsageOf(0, 0).ddr_rows;
  uint64_t parts = 0;
  for (uint64_t version = 5; left > 0 && version < 100; ++version) {
    ASSERT_TRUE(store_->Commit(version).ok());  // frees one
    const Status integrity = store_->CheckIntegrity();
    ASSERT_TRUE(integrity.ok()) << integrity.ToString();
    const uint64_t now = store_->UsageOf(0, 0).ddr_rows;
    if (now < left) ++parts;
    EXPECT_LE(left - now, 4096U);
    left = now;
    if (parts == 5) store_->Maintain();  // the rest
    if (parts == 5) left = store_->UsageOf(0, 0).ddr_rows;
  }
  EXPECT_EQ(parts, 5U);
  EXPECT_EQ(left, 0U);
  EXPECT_EQ(store_->UsageOf(0, 0).budget_used_bytes, empty);
}

}  // namespace
}  // namespace embertide
