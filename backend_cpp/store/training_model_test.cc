// A training store against a map: rows made, updated, pruned, regrown, taken and restored at
// random, every invariant after each operation.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <memory>
#include <set>

#include "store/test_rows.h"

namespace embertide {
namespace {

constexpr uint64_t kKeys = 3000;  // of each table
constexpr int kSteps = 500;
constexpr StepOptions kAdagrad{0.1F, 1e-8F, 0.5F};

// How far a stored value may be from the exact one: half a step of the format, and of fp32, in
// which updates are computed (10, 7 and 23 bits behind the point; int8 counts in 127ths of the
// row's largest value).
double Tolerance(DType dtype, double value, double largest) {
  const double fp32 = std::ldexp(std::fabs(value), -22) + 1e-30;
  switch (dtype) {
    case DType::kFp32:
      return fp32;
    case DType::kFp16:
      return fp32 + std::max(std::ldexp(std::fabs(value), -11), std::ldexp(1.0, -25));
    case DType::kBf16:
      return fp32 + std::ldexp(std::fabs(value), -8);
    case DType::kInt8:
      return fp32 + largest / 127 * 0.5001;
    case DType::kInt4:  // served, and never trained
    case DType::kKeys:
      break;
  }
  return 0;
}

class TrainingModelTest : public ::testing::TestWithParam<std::tuple<uint32_t, IndexKind>> {
 protected:
  TrainingModelTest()
      : directory_(std::filesystem::temp_directory_path() /
                   ("embertide-training-" + std::to_string(::getpid()))),
        random_(std::get<0>(GetParam())) {
    options_.tables = TestTables();
    options_.devices = 2;
    options_.ddr_budget_bytes = 15ULL << 19;
    options_.ssd_budget_bytes = 64ULL << 20;
    options_.ssd_directory = directory_;
    if (Lean()) MakeLean(&options_);
    store_ = std::move(*TrainingStore::Open(options_));
  }
  ~TrainingModelTest() override {
    store_.reset();
    std::filesystem::remove_all(directory_);
  }

  using Name = std::pair<uint32_t, uint64_t>;  // table, key
  static bool Lean() { return std::get<1>(GetParam()) == IndexKind::kLean; }
  uint32_t Random(size_t below) { return static_cast<uint32_t>(random_() % below); }
  uint32_t RandomTable() { return Random(options_.tables.size()); }
  const TableConfig& Table(uint32_t t) const { return options_.tables[t]; }

  std::vector<float> Read(uint32_t t, uint64_t key) {
    std::vector<float> out(Table(t).layout.dim(), -1.0F);
    const auto keys = std::vector<int64_t>{static_cast<int64_t>(key)};
    const auto view = store_->PinNewest();
    EXPECT_TRUE(
        view.value().Lookup({t, keys, Pooling::kNone, {}, out.data(), out.size(), nullptr}).ok());
    return out;
  }
  TestRow Encoded(uint32_t t, uint16_t live, const std::vector<float>& values) const {
    TestRow row{live, std::vector<std::byte>(Table(t).layout.PayloadBytes(live))};
    EncodePayload(Table(t).layout, live, values.data(), row.payload.data());
    return row;
  }

  // Rows for keys that have none; returns for how many.
  uint64_t MakeMissing(uint32_t t, const std::vector<int64_t>& keys) {
    const TableConfig& table = Table(t);
    uint64_t made = 0;
    for (const int64_t raw : keys) {
      const Name name{t, static_cast<uint64_t>(raw)};
      if (rows_.contains(name)) continue;
      std::vector<float> values(table.layout.dim());
      for (uint32_t d = 0; d < values.size(); ++d) {
        values[d] = InitialValue(table.init_seed, table.id, name.second, d, table.init_scale);
      }
      rows_[name] = Encoded(t, table.layout.full_mask(), values);
      states_[name] = 0;
      changed_.insert(name);
      removed_.erase(name);
      ++made;
    }
    return made;
  }

  void Ensure() {
    const uint32_t t = RandomTable();
    std::vector<int64_t> keys;
    for (uint32_t n = 1 + Random(120); n > 0; --n) keys.push_back(Random(kKeys));
    const uint64_t made = MakeMissing(t, keys);
    const auto ensured = store_->EnsureRows(t, keys);
    ASSERT_TRUE(ensured.ok()) << ensured.status().ToString();
    ASSERT_EQ(ensured.value(), made);
  }

  // Some keys twice, some new. What was computed exactly is then what the store stored.
  void Apply() {
    const uint32_t t = RandomTable();
    const TableConfig& table = Table(t);
    const uint32_t dim = table.layout.dim();
    std::vector<int64_t> keys;
    for (uint32_t n = 1 + Random(40); n > 0; --n) keys.push_back(Random(kKeys));
    keys.push_back(keys.front());
    std::vector<float> gradients(keys.size() * dim);
    for (float& g : gradients) g = static_cast<float>(Random(2001)) * 0.001F - 1;
    MakeMissing(t, keys);
    std::map<uint64_t, std::vector<double>> sums;
    for (size_t k = 0; k < keys.size(); ++k) {
      std::vector<double>& sum = sums[static_cast<uint64_t>(keys[k])];
      sum.resize(dim);
      for (uint32_t d = 0; d < dim; ++d) sum[d] += gradients[k * dim + d];
    }
    const auto updated = ApplyRows(store_.get(), t, keys, gradients, kAdagrad);
    ASSERT_TRUE(updated.ok()) << updated.status().ToString();
    ASSERT_EQ(updated.value(), sums.size());
    for (const auto& [key, sum] : sums) {
      const Name name{t, key};
      double squares = 0;
      for (const double s : sum) squares += s * s;
      const double before = states_[name] == 0 ? kAdagrad.initial_accumulator : states_[name];
      const double state = before + squares / dim;
      const auto stored = store_->StateOf(t, key);
      ASSERT_TRUE(stored.ok());
      ASSERT_NEAR(stored.value().accumulator, state, std::ldexp(state, -22));
      states_[name] = stored.value().accumulator;
      TestRow& row = rows_[name];
      std::vector<float> want = ValuesOf(table, &row);
      double largest = 0;
      for (uint32_t d = 0; d < dim; ++d) {
        const bool live = (row.live >> (d / table.layout.chunk_dim) & 1U) != 0;
        const double step = kAdagrad.learning_rate / (std::sqrt(state) + kAdagrad.epsilon);
        want[d] = live ? static_cast<float>(want[d] - step * sum[d]) : 0;
        largest = std::max(largest, std::fabs(static_cast<double>(want[d])));
      }
      const std::vector<float> got = Read(t, key);
      for (uint32_t d = 0; d < dim; ++d) {
        ASSERT_NEAR(got[d], want[d], Tolerance(table.layout.dtype, want[d], largest) + 1e-7)
            << table.name << ", key " << key << ", dimension " << d;
      }
      row = Encoded(t, row.live, got);
      changed_.insert(name);
    }
  }

  void SetLive() {
    const uint32_t t = RandomTable();
    const RowLayout& layout = Table(t).layout;
    for (int n = 0; n < 20; ++n) {
      const Name name{t, Random(kKeys)};
      const auto live = static_cast<uint16_t>(Random(layout.full_mask() + 1U));
      const Status set = store_->SetLive(t, name.second, live);
      const auto row = rows_.find(name);
      ASSERT_EQ(set.code(), row == rows_.end() ? Code::kNotFound : Code::kOk) << set.ToString();
      if (row == rows_.end() || row->second.live == live) continue;
      if (live == 0) {
        rows_.erase(row);
        states_.erase(name);
        changed_.erase(name);
        removed_[name] = RecordKind::kPruned;
      } else {
        row->second = Encoded(t, live, ValuesOf(Table(t), &row->second));
        changed_.insert(name);
      }
    }
    ASSERT_EQ(store_->SetLive(t, 0, static_cast<uint16_t>(layout.full_mask() + 1)).code(),
              Code::kInvalidArgument);
  }

  void Mark() {
    const uint32_t t = RandomTable();
    std::vector<uint64_t> keys;
    const uint32_t b = Random(Table(t).buckets());
    while (keys.size() < 5) {
      const uint64_t key = Random(kKeys);
      if (BucketOfKey(Table(t), key) == b) keys.push_back(key);
    }
    ASSERT_TRUE(store_->MarkChanged(t, b, keys).ok());
    for (const uint64_t key : keys) {
      if (rows_.contains({t, key})) {
        changed_.insert({t, key});
      } else {
        removed_[{t, key}] = RecordKind::kExpired;
      }
    }
  }

  // Takes the keys that were changed or removed since, ascending, once.
  void Take() {
    const uint32_t t = RandomTable();
    const uint32_t b = Random(Table(t).buckets());
    std::vector<std::byte> want;
    std::map<uint64_t, RecordKind> of_bucket;
    const auto here = [&](Name name) {
      return name.first == t && BucketOfKey(Table(t), name.second) == b;
    };
    for (const Name& name : changed_) {
      if (here(name)) of_bucket[name.second] = RecordKind::kRow;
    }
    for (const auto& [name, kind] : removed_) {
      if (here(name)) of_bucket[name.second] = kind;
    }
    for (const auto& [key, kind] : of_bucket) {
      if (kind == RecordKind::kRow) {
        AppendRow(key, rows_[{t, key}], &want);
      } else {
        AppendRecord({key, 0, kind, {}}, &want);
      }
      changed_.erase({t, key});
      removed_.erase({t, key});
    }
    std::vector<std::byte> records;
    const Status taken = store_->TakeChanges(t, b, &records);
    ASSERT_TRUE(taken.ok()) << taken.ToString();
    ASSERT_EQ(records, want);
  }

  void Export() {
    const uint32_t t = RandomTable();
    const uint32_t b = Random(Table(t).buckets());
    std::vector<std::byte> records;
    std::vector<RowState> states;
    const uint64_t promotions = store_->Stats().promotions;
    const auto view = store_->PinNewest();
    ASSERT_TRUE(store_->ExportBucketWithStates(view.value(), t, b, &records, &states).ok());
    ASSERT_EQ(store_->Stats().promotions, promotions);
    ASSERT_EQ(records, BucketRecords(options_.tables, rows_, t, b));
    size_t at = 0;
    for (std::span<const std::byte> rest = records; !rest.empty(); ++at) {
      const RowRecord record = ReadRecord(Table(t).layout, &rest).value();
      const RowState state = store_->StateOf(t, record.key).value();
      ASSERT_EQ(states.at(at).accumulator, state.accumulator);
      ASSERT_EQ(states.at(at).age, state.age);
      ASSERT_EQ(states.at(at).utility, state.utility);
    }
    ASSERT_EQ(at, states.size());
  }

  void Step() {
    const uint32_t dice = Random(100);
    if (dice < 35) return Ensure();
    if (dice < 55) return Apply();
    if (dice < 70) return SetLive();
    if (dice < 75) return Mark();
    if (dice < 85) return Take();
    if (dice < 92) return Export();
    store_->Maintain();
  }

  std::filesystem::path directory_;
  std::mt19937 random_;
  StoreOptions options_;
  std::unique_ptr<TrainingStore> store_;
  TestRows rows_;
  std::map<Name, float> states_;
  std::set<Name> changed_;
  std::map<Name, RecordKind> removed_;
};

TEST_P(TrainingModelTest, EqualsAMapWhateverHappens) {
  for (int step = 0; step < kSteps; ++step) {
    ASSERT_NO_FATAL_FAILURE(Step()) << "step " << step;
    const Status integrity = store_->CheckIntegrity();
    ASSERT_TRUE(integrity.ok()) << "step " << step << ": " << integrity.ToString();
  }
  EXPECT_EQ(store_->Stats().evictions_to_ssd > 0U, !Lean());
  EXPECT_EQ(store_->Stats().promotions > 0U, !Lean());
  EXPECT_EQ(store_->Stats().rows, rows_.size());
  for (const auto& [name, state] : states_) {
    ASSERT_EQ(store_->StateOf(name.first, name.second)->accumulator, state);
  }
  // A store restored from the records, and the optimizer's state, is the same.
  StoreOptions options = options_;
  options.ssd_directory = directory_ / "restored";
  const auto restored = std::move(*TrainingStore::Open(options));
  for (uint32_t t = 0; t < options_.tables.size(); ++t) {
    for (uint32_t b = 0; b < Table(t).buckets(); ++b) {
      const auto records = BucketRecords(options_.tables, rows_, t, b);
      ASSERT_TRUE(restored->ImportRecords(t, b, records).ok());
      std::vector<std::byte> again;
      ASSERT_TRUE(restored->ExportBucket(restored->PinNewest().value(), t, b, &again).ok());
      ASSERT_EQ(again, records);
    }
  }
  ASSERT_TRUE(restored->CheckIntegrity().ok());
}

INSTANTIATE_TEST_SUITE_P(Seeds, TrainingModelTest,
                         ::testing::Combine(::testing::Range(1U, 5U),
                                            ::testing::Values(IndexKind::kPlain,
                                                              IndexKind::kLean)));

}  // namespace
}  // namespace embertide
