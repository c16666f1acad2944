// A serving store against a map: every operation at random, every invariant after each of them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <memory>

#include "embertide/serving_store.h"
#include "store/test_rows.h"

namespace embertide {
namespace {

constexpr uint32_t kDevices = 3;
constexpr uint64_t kKeys = 2600;  // of each table
constexpr int kSteps = 1000;
constexpr uint32_t kWindow = 3;

class ServingModelTest : public ::testing::TestWithParam<std::tuple<uint32_t, IndexKind>> {
 protected:
  ServingModelTest()
      : directory_(std::filesystem::temp_directory_path() /
                   ("embertide-model-" + std::to_string(::getpid()))),
        random_(std::get<0>(GetParam())) {
    options_.tables = TestTables();
    options_.devices = kDevices;
    options_.hold_all = false;
    options_.ddr_budget_bytes = kDevices * (17ULL << 17);
    options_.ssd_budget_bytes = kDevices * (12ULL << 20);
    options_.ssd_directory = directory_;
    options_.window_versions = kWindow;
    if (Lean()) MakeLean(&options_);
    auto store = ServingStore::Open(options_);
    EXPECT_TRUE(store.ok()) << store.status().ToString();
    store_ = std::move(*store);
  }
  ~ServingModelTest() override {
    pins_.clear();
    store_.reset();
    std::filesystem::remove_all(directory_);
  }

  static bool Lean() { return std::get<1>(GetParam()) == IndexKind::kLean; }
  uint32_t Random(size_t below) { return static_cast<uint32_t>(random_() % below); }
  const TableConfig& Table(uint32_t t) const { return options_.tables[t]; }
  bool Held(uint32_t t, uint32_t b) const { return since_.contains({t, b}); }

  // Rows and tombstones of one bucket for the version to come; twice, now and then.
  void Stage() {
    const uint32_t t = Random(options_.tables.size());
    const uint32_t b = Random(Table(t).buckets());
    std::vector<std::byte> records;
    for (uint32_t n = 1 + Random(newest_ == 0 ? 600 : 80); n > 0; --n) {
      uint64_t key = Random(kKeys);
      while (BucketOfKey(Table(t), key) != b) key = Random(kKeys);
      if (Random(5) == 0) {
        const auto kind = Random(2) == 0 ? RecordKind::kPruned : RecordKind::kExpired;
        AppendRecord({key, 0, kind, {}}, &records);
        next_.erase({t, key});
      } else {
        const TestRow row = RandomRow(Table(t), &random_);
        AppendRow(key, row, &records);
        next_[{t, key}] = row;
      }
    }
    const Status staged = store_->StageRecords(newest_ + 1, t, b, records);
    if (!Held(t, b)) {
      ASSERT_EQ(staged.code(), Code::kNotOwner);  // others hold it, and it changes there
      return;
    }
    ASSERT_TRUE(staged.ok()) << staged.ToString();
    staged_ = true;
    if (Random(4) == 0) {
      ASSERT_TRUE(store_->StageRecords(newest_ + 1, t, b, records).ok());
    }
  }

  // Records whose last one is no record, or of another bucket: nothing of them counts.
  void StageHarmed() {
    const uint32_t t = Random(options_.tables.size());
    const uint32_t b = Random(Table(t).buckets());
    std::vector<std::byte> records;
    for (uint64_t key = 0; key < 40; ++key) {
      if (BucketOfKey(Table(t), key) == b) AppendRow(key, RandomRow(Table(t), &random_), &records);
    }
    if (Random(2) == 0) {
      records.resize(records.size() - 1 - Random(8));
    } else {
      uint64_t key = 0;
      while (BucketOfKey(Table(t), key) == b) ++key;
      AppendRow(key, RandomRow(Table(t), &random_), &records);
    }
    ASSERT_EQ(store_->StageRecords(newest_ + 1, t, b, records).code(), Code::kCorrupt);
  }

  // A bucket of the version to come is what it is in `rows`.
  void SetNext(uint32_t t, uint32_t b, const TestRows& rows) {
    const auto of_bucket = [&](const auto& each) {
      return each.first.first == t && BucketOfKey(Table(t), each.first.second) == b;
    };
    std::erase_if(next_, of_bucket);
    std::ranges::copy_if(rows, std::inserter(next_, next_.end()), of_bucket);
  }

  // The version to come has failed, and is begun anew.
  void DropStaged() {
    if (newest_ == 0) return;
    store_->DropStaged();
    next_ = *versions_[newest_];
    if (staged_) ++drops_;
    staged_ = false;
  }

  void Commit() {
    ASSERT_TRUE(store_->Commit(++newest_).ok());
    versions_[newest_] = std::make_shared<const TestRows>(next_);
    staged_ = false;
    oldest_ = std::max(oldest_, newest_ < kWindow ? 1 : newest_ - kWindow + 1);
  }

  // Between versions: a bucket comes, moves to another device, or goes.
  void ChangeHolding() {
    if (staged_) return;
    const uint32_t t = Random(options_.tables.size());
    const uint32_t b = Random(Table(t).buckets());
    if (Random(3) == 0) {
      ASSERT_TRUE(store_->DropBucket(t, b).ok());
      since_.erase({t, b});
      return;
    }
    const uint32_t device = Random(kDevices);
    const auto on = store_->DeviceOf(t, b);
    ASSERT_EQ(on.has_value(), Held(t, b));
    const TestRows& rows = newest_ == 0 ? next_ : *versions_[newest_];
    const Status added =
        store_->AddBucket(t, b, device, BucketRecords(options_.tables, rows, t, b));
    if (on == device) {
      ASSERT_EQ(added.code(), Code::kRejected);
    } else if (on && !added.ok()) {
      ASSERT_EQ(added.code(), Code::kBusy) << added.ToString();
    } else {
      ASSERT_TRUE(added.ok()) << added.ToString();
      ASSERT_EQ(store_->DeviceOf(t, b), device);
      moves_ += on ? 1 : 0;
      if (!on) since_[{t, b}] = newest_;
      if (newest_ > 0) SetNext(t, b, rows);
    }
  }

  void Pin() {
    const uint64_t version = oldest_ + Random(newest_ - oldest_ + 2) - (oldest_ > 1 ? 1 : 0);
    auto view = store_->Pin(version);
    ASSERT_EQ(view.ok(), version >= oldest_ && version <= newest_) << version;
    if (view.ok()) pins_.emplace_back(version, std::move(*view));
    if (pins_.size() > 4) DropPin();
  }
  void DropPin() {
    if (!pins_.empty()) pins_.erase(pins_.begin() + Random(pins_.size()));
  }
  void Forget() {
    const uint64_t version = oldest_ + Random(newest_ - oldest_ + 1);
    store_->Forget(version);
    oldest_ = std::max(oldest_, version);
    ASSERT_EQ(store_->Stats().oldest_version, oldest_);
  }

  const TestRow* RowAt(uint64_t version, uint32_t t, uint64_t key) const {
    const TestRows& rows = *versions_.at(version);
    const auto row = rows.find({t, key});
    return row == rows.end() ? nullptr : &row->second;
  }

  // Keys of one table, as rows and in bags, and Explain of one.
  void Read(const ReadView& view) {
    const uint32_t t = Random(options_.tables.size());
    const TableConfig& table = Table(t);
    const uint32_t dim = table.layout.dim();
    std::vector<int64_t> keys;
    bool refused = false;
    const bool any = Random(3) == 0;  // also of buckets that are not held
    for (int i = 0; i < 24; ++i) {
      const uint64_t key = Random(kKeys + 50);
      const auto held = since_.find({t, BucketOfKey(table, key)});
      const bool here = held != since_.end() && held->second <= view.version();
      if (!here && !any) continue;
      refused = refused || !here;
      keys.push_back(static_cast<int64_t>(key));
    }
    std::vector<float> out(keys.size() * dim, -1.0F);
    std::vector<uint8_t> source(keys.size());
    const Status status =
        view.Lookup({t, keys, Pooling::kNone, {}, out.data(), dim, source.data()});
    if (refused) {
      ASSERT_EQ(status.code(), Code::kNotOwner);
      ++refusals_;
      return;
    }
    ASSERT_TRUE(status.ok()) << status.ToString();
    std::vector<double> sums(dim, 0.0);
    for (size_t k = 0; k < keys.size(); ++k) {
      const TestRow* row = RowAt(view.version(), t, static_cast<uint64_t>(keys[k]));
      const std::vector<float> want = ValuesOf(table, row);
      ASSERT_EQ(std::vector<float>(&out[k * dim], &out[k * dim] + dim), want)
          << table.name << ", key " << keys[k] << " at version " << view.version() << " of "
          << newest_;
      for (uint32_t d = 0; d < dim; ++d) sums[d] += want[d];
      const auto from = static_cast<Source>(source[k]);
      ASSERT_EQ(from == Source::kDdr || from == Source::kSsd, row != nullptr);
      const RowLocation at = view.Explain(t, static_cast<uint64_t>(keys[k]));
      ASSERT_EQ(at.resident, row != nullptr);
      if (row == nullptr) continue;
      ASSERT_EQ(at.live, row->live);
      ASSERT_EQ(at.payload_bytes, row->payload.size());
      ASSERT_LE(at.version, view.version());
    }
    const std::vector<uint32_t> ends = {0, static_cast<uint32_t>(keys.size())};
    std::vector<float> sum(dim, -1.0F);
    ASSERT_TRUE(view.Lookup({t, keys, Pooling::kSum, ends, sum.data(), dim, nullptr}).ok());
    for (uint32_t d = 0; d < dim && keys.size() > 1; ++d) {
      ASSERT_EQ(sum[d], static_cast<float>(sums[d]));
    }
  }

  void Export(const ReadView& view) {
    const uint32_t t = Random(options_.tables.size());
    const uint32_t b = Random(Table(t).buckets());
    std::vector<std::byte> records;
    const Status status = store_->ExportBucket(view, t, b, &records);
    const auto held = since_.find({t, b});
    if (held == since_.end() || held->second > view.version()) {
      ASSERT_EQ(status.code(), Code::kNotOwner);
      return;
    }
    ASSERT_TRUE(status.ok()) << status.ToString();
    ASSERT_EQ(records, BucketRecords(options_.tables, *versions_[view.version()], t, b));
  }

  void Step() {
    const uint32_t dice = Random(100);
    if (dice < 30) return Stage();
    if (dice < 34) return StageHarmed();
    if (dice < 35) return DropStaged();
    if (dice < 46) return Commit();
    if (dice < 58) return ChangeHolding();
    if (dice < 66) return Pin();
    if (dice < 71) return DropPin();
    if (dice < 74) return Forget();
    if (dice < 82) return store_->Maintain();
    auto newest = store_->PinNewest();
    ASSERT_TRUE(newest.ok());
    ASSERT_EQ(newest->version(), newest_);
    if (dice < 86) return Export(pins_.empty() ? *newest : pins_.front().second);
    ASSERT_NO_FATAL_FAILURE(Read(*newest));
    for (const auto& [version, view] : pins_) ASSERT_NO_FATAL_FAILURE(Read(view));
  }

  std::filesystem::path directory_;
  std::mt19937 random_;
  StoreOptions options_;
  std::unique_ptr<ServingStore> store_;
  TestRows next_;  // what the version to come will be
  std::map<uint64_t, std::shared_ptr<const TestRows>> versions_;
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> since_;  // buckets held, from which version on
  std::vector<std::pair<uint64_t, ReadView>> pins_;
  uint64_t newest_ = 0;
  uint64_t oldest_ = 1;
  bool staged_ = false;
  uint64_t drops_ = 0;
  uint64_t moves_ = 0;
  uint64_t refusals_ = 0;
};

TEST_P(ServingModelTest, EqualsAMapWhateverHappens) {
  for (uint32_t t = 0; t < options_.tables.size(); ++t) {
    for (uint32_t b = 0; b < Table(t).buckets(); ++b) {
      if (b == 3) continue;
      ASSERT_TRUE(store_->AddBucket(t, b, (t + b) % kDevices, {}).ok());
      since_[{t, b}] = 0;
    }
  }
  for (int i = 0; i < 30; ++i) ASSERT_NO_FATAL_FAILURE(Stage());
  ASSERT_NO_FATAL_FAILURE(Commit());
  for (int step = 0; step < kSteps; ++step) {
    ASSERT_NO_FATAL_FAILURE(Step()) << "step " << step;
    const Status integrity = store_->CheckIntegrity();
    ASSERT_TRUE(integrity.ok()) << "step " << step << ": " << integrity.ToString();
  }
  const StoreStats stats = store_->Stats();
  EXPECT_EQ(stats.hits[static_cast<size_t>(Source::kSsd)] > 0U, !Lean());
  EXPECT_EQ(stats.evictions_to_ssd > 0U, !Lean());
  EXPECT_EQ(stats.promotions > 0U, !Lean());
  EXPECT_GT(moves_, 3U);
  EXPECT_GT(drops_, 0U);
  EXPECT_GT(refusals_, 0U);
  EXPECT_EQ(stats.refused_rows, 0U);
  // Nothing is left when all are gone.
  pins_.clear();
  for (uint32_t t = 0; t < options_.tables.size(); ++t) {
    for (uint32_t b = 0; b < Table(t).buckets(); ++b) ASSERT_TRUE(store_->DropBucket(t, b).ok());
  }
  store_->Maintain();
  EXPECT_EQ(store_->Stats().rows, 0U);
  // The segment that each device would write to next stays open.
  EXPECT_LE(store_->Stats().ssd_bytes, kDevices * (1ULL << 20));
  EXPECT_TRUE(store_->CheckIntegrity().ok());
}

INSTANTIATE_TEST_SUITE_P(Seeds, ServingModelTest,
                         ::testing::Combine(::testing::Range(1U, 5U),
                                            ::testing::Values(IndexKind::kPlain,
                                                              IndexKind::kLean)));

}  // namespace
}  // namespace embertide
