// Every optimizer as optimizer.h says it: against a reference in fp64, bit for bit whatever the
// threads and tiers, over a checkpoint, with clipped and refused gradients, over chunks that die.
#include "embertide/optimizer.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>

#include "store/test_rows.h"

namespace embertide {
namespace {

constexpr uint32_t kChunks = 3;
constexpr uint32_t kChunkDim = 5;
constexpr uint32_t kDim = kChunks * kChunkDim;
constexpr uint16_t kWhole = 0b111;
constexpr uint64_t kKeys = 60;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One row in fp64, by the formulas of the header; dead chunks' values and elements are zero.
struct Reference {
  std::vector<double> values = std::vector<double>(kDim);
  std::vector<double> elements = std::vector<double>(kDim);
  double accumulator = 0;
  uint32_t steps = 0;
  uint16_t live = kWhole;

  bool Lives(uint32_t d) const { return (live >> (d / kChunkDim) & 1U) != 0; }

  // Returns whether the gradient was clipped.
  bool Step(Optimizer optimizer, const StepOptions& options, std::vector<double> g) {
    const double lr = options.learning_rate;
    const double norm = std::sqrt(std::inner_product(g.begin(), g.end(), g.begin(), 0.0));
    const bool clips = options.max_gradient_norm > 0 && norm > options.max_gradient_norm;
    for (double& each : g) each *= clips ? options.max_gradient_norm / norm : 1.0;
    const double mean = std::inner_product(g.begin(), g.end(), g.begin(), 0.0) / kDim;
    if (optimizer == Optimizer::kRowwiseAdagrad) {
      accumulator = (accumulator == 0 ? options.initial_accumulator : accumulator) + mean;
    } else if (optimizer == Optimizer::kRowwiseAdam) {
      accumulator = options.beta2 * accumulator + (1 - options.beta2) * mean;
      ++steps;
    }
    for (uint32_t d = 0; d < kDim; ++d) {
      if (!Lives(d)) continue;
      double& kept = elements[d];
      if (optimizer == Optimizer::kRowwiseAdagrad) {
        values[d] -= lr * g[d] / (std::sqrt(accumulator) + options.epsilon);
      } else if (optimizer == Optimizer::kAdagrad) {
        kept = (kept == 0 ? options.initial_accumulator : kept) + g[d] * g[d];
        values[d] -= lr * g[d] / (std::sqrt(kept) + options.epsilon);
      } else if (optimizer == Optimizer::kSgd) {
        values[d] -= lr * g[d];
      } else {
        kept = options.beta1 * kept + (1 - options.beta1) * g[d];
        const double first = kept / (1 - std::pow(options.beta1, steps));
        const double second = accumulator / (1 - std::pow(options.beta2, steps));
        values[d] -= lr * first / (std::sqrt(second) + options.epsilon);
      }
    }
    return clips;
  }

  void SetLive(uint16_t mask) {
    live = mask;
    for (uint32_t d = 0; d < kDim; ++d) {
      if (!Lives(d)) values[d] = elements[d] = 0;
    }
  }
};

class OptimizerTest : public ::testing::TestWithParam<Optimizer> {
 protected:
  OptimizerTest()
      : directory_(std::filesystem::temp_directory_path() /
                   ("embertide-optimizer-" + std::to_string(::getpid()))) {
    options_.ddr_budget_bytes = 64ULL << 20;
    options_.optimizer = GetParam();
    TableConfig table;
    table.name = "item";
    table.layout = {kChunks, kChunkDim, DType::kFp32};
    table.bucket_bits = 2;
    options_.tables = {table};
    store_ = std::move(*TrainingStore::Open(options_));
  }
  ~OptimizerTest() override {
    store_.reset();
    std::filesystem::remove_all(directory_);
  }
  const TableConfig& Table() const { return options_.tables[0]; }
  std::vector<float> Read(int64_t key) const {
    std::vector<float> out(Table().layout.dim());
    EXPECT_TRUE(store_->PinNewest()
                    ->Lookup({0, {&key, 1}, Pooling::kNone, {}, out.data(), out.size(), nullptr})
                    .ok());
    return out;
  }
  Reference NewRow(uint64_t key) const {
    Reference row;
    for (uint32_t d = 0; d < kDim; ++d) {
      row.values[d] = InitialValue(Table().init_seed, Table().id, key, d, Table().init_scale);
    }
    return row;
  }
  void Near(uint64_t key, const Reference& want) const {
    const auto near = [](double got, double wanted) {
      return std::fabs(got - wanted) <= 1e-5 * std::max(1.0, std::fabs(wanted));
    };
    const std::vector<float> got = Read(static_cast<int64_t>(key));
    const RowState state = store_->StateOf(0, key).value();
    ASSERT_TRUE(near(state.accumulator, want.accumulator)) << state.accumulator << want.accumulator;
    ASSERT_EQ(state.steps, want.steps);
    ASSERT_EQ(state.elements.size(), KeepsElements(GetParam()) ? kDim : 0);
    for (uint32_t d = 0; d < kDim; ++d) {
      ASSERT_TRUE(near(got[d], want.values[d])) << d << ": " << got[d] << " " << want.values[d];
      if (state.elements.empty()) continue;
      ASSERT_TRUE(near(state.elements[d], want.elements[d])) << d << ": " << state.elements[d];
    }
  }
  uint64_t Apply(const std::vector<int64_t>& keys, const std::vector<float>& gradients,
                 const StepOptions& options) {
    return ApplyRows(store_.get(), 0, keys, gradients, options).value();
  }

  std::filesystem::path directory_;
  StoreOptions options_;
  std::unique_ptr<TrainingStore> store_;
};

TEST_P(OptimizerTest, EqualsAReferenceInDoubles) {
  StepOptions step{0.05F, 1e-4F, 0.1F, 0.8, 0.95, 0.0F};
  std::map<uint64_t, Reference> rows;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  uint64_t clipped = 0;
  uint64_t refused = 0;
  for (int turn = 0; turn < 120; ++turn) {
    step.max_gradient_norm = turn % 2 == 0 ? 0.0F : 5.0F;
    std::vector<int64_t> keys(40);
    for (int64_t& key : keys) key = static_cast<int64_t>(random() % kKeys);
    std::vector<float> gradients(keys.size() * kDim);
    for (float& each : gradients) each = normal(random);
    const bool harmed = turn % 10 == 3;
    if (harmed) gradients[kDim + 2] = turn % 20 == 3 ? kNan : -INFINITY;
    std::map<uint64_t, std::vector<double>> sums;
    for (size_t k = 0; k < keys.size(); ++k) {
      std::vector<double>& sum = sums[static_cast<uint64_t>(keys[k])];
      sum.resize(kDim);
      for (uint32_t d = 0; d < kDim; ++d) sum[d] += gradients[k * kDim + d];
    }
    for (const auto& [key, sum] : sums) {
      Reference& row = rows.try_emplace(key, NewRow(key)).first->second;
      if (harmed && key == static_cast<uint64_t>(keys[1])) {
        ++refused;
      } else if (row.Step(GetParam(), step, sum)) {
        ++clipped;
      }
    }
    ASSERT_EQ(Apply(keys, gradients, step), sums.size() - (harmed ? 1 : 0));
    if (turn % 8 == 7) {
      // Chunks die and live again.
      for (auto& [key, row] : rows) {
        const auto live = static_cast<uint16_t>(1 + random() % kWhole);
        ASSERT_TRUE(store_->SetLive(0, key, live).ok());
        row.SetLive(live);
      }
    }
  }
  EXPECT_EQ(rows.size(), kKeys);
  for (const auto& [key, row] : rows) ASSERT_NO_FATAL_FAILURE(Near(key, row)) << key;
  EXPECT_GT(clipped, 100U);
  EXPECT_EQ(store_->Stats().clipped_gradients, clipped);
  EXPECT_EQ(store_->Stats().refused_gradients, refused);
  ASSERT_TRUE(store_->CheckIntegrity().ok());
}

// Refused gradients change no bit of a row or of its state, also where gradients are clipped.
TEST_P(OptimizerTest, GradientsThatAreNotFiniteChangeNothing) {
  const std::vector<int64_t> keys = {1, 2, 3};
  for (const float limit : {0.0F, 1.0F}) {
    const StepOptions step{0.1F, 1e-8F, 0.0F, 0.9, 0.999, limit};
    const uint64_t before = store_->Stats().refused_gradients;
    const uint64_t clipped = store_->Stats().clipped_gradients;
    ASSERT_EQ(Apply(keys, std::vector<float>(3 * kDim, 0.1F), step), 3U);
    std::vector<std::vector<float>> rows;
    std::vector<RowState> states;
    for (const int64_t key : keys) {
      rows.push_back(Read(key));
      states.push_back(store_->StateOf(0, static_cast<uint64_t>(key)).value());
    }
    std::vector<float> gradients(3 * kDim, 0.0F);
    gradients[0] = kNan;
    gradients[kDim + 7] = INFINITY;
    gradients[2 * kDim] = 1e25F;  // its square is no float; clipped it is
    const bool clips = limit > 0;
    ASSERT_EQ(Apply(keys, gradients, step), clips ? 1U : 0U);
    EXPECT_EQ(store_->Stats().refused_gradients, before + (clips ? 2 : 3));
    EXPECT_EQ(store_->Stats().clipped_gradients, clipped + (clips ? 1 : 0));
    for (size_t k = 0; k < (clips ? 2 : 3); ++k) {
      RowState state = store_->StateOf(0, static_cast<uint64_t>(keys[k])).value();
      EXPECT_EQ(Read(keys[k]), rows[k]);
      EXPECT_EQ(std::exchange(state.age, 0), 1U);
      EXPECT_TRUE(state == states[k]);
    }
    for (const float value : Read(3)) EXPECT_TRUE(std::isfinite(value));
  }
}

// A clipped gradient is clipped for utilities too.
TEST_P(OptimizerTest, AClippedGradientCountsAsTheClippedOne) {
  std::vector<float> gradients(kDim, 0.0F);
  gradients[0] = 3.0F;          // of chunk 0
  gradients[kChunkDim] = 4.0F;  // of chunk 1
  StepOptions step{0.1F, 1e-8F, 0.0F, 0.9, 0.999, 5.0F};
  ASSERT_EQ(Apply({1}, gradients, step), 1U);
  EXPECT_EQ(store_->Stats().clipped_gradients, 0U) << "a norm of 5 is allowed";
  EXPECT_EQ(store_->StateOf(0, 1)->utility, (std::array<float, kMaxChunks>{9.0F, 16.0F}));
  step.max_gradient_norm = 0.5F;
  ASSERT_EQ(Apply({2}, gradients, step), 1U);
  EXPECT_EQ(store_->Stats().clipped_gradients, 1U);
  EXPECT_FLOAT_EQ(store_->StateOf(0, 2)->utility[0], 0.09F);
  EXPECT_FLOAT_EQ(store_->StateOf(0, 2)->utility[1], 0.16F);
}

// The bytes of rows and all that is kept of them do not depend on devices, tiers and threads.
TEST_P(OptimizerTest, TheSameBytesWhateverTheDevicesTheTiersAndTheThreads) {
  options_.tables[0].layout = {4, 16, DType::kFp32};
  options_.tables[0].bucket_bits = 4;
  constexpr uint64_t kMany = 10000;
  struct Case {
    uint32_t devices;
    uint32_t threads;
    bool ssd;
  };
  std::vector<std::byte> want;
  std::vector<RowState> want_states;
  for (const Case& of :
       std::vector<Case>{{1, 1, false}, {1, 4, false}, {3, 3, false}, {2, 2, true}}) {
    options_.devices = of.devices;
    options_.ddr_budget_bytes = of.ssd ? 2ULL << 20 : 64ULL << 20;
    options_.ssd_budget_bytes = of.ssd ? 64ULL << 20 : 0;
    options_.ssd_directory = directory_;
    store_ = std::move(*TrainingStore::Open(options_));
    std::mt19937 random(4);
    for (int turn = 0; turn < 3; ++turn) {
      std::vector<int64_t> keys(20000);
      for (int64_t& key : keys) key = static_cast<int64_t>(random() % kMany);
      std::vector<float> gradients(keys.size() * 64);
      for (float& each : gradients) each = static_cast<float>(random() % 1000) * 0.013F - 6.5F;
      // One key's gradients, all over the batch, whose sum in fp64 depends on their order.
      const std::vector<float> in_order = {1e30F, 1.0F, -1e30F, 1e-3F, 1e22F, 3.0F, -1e22F, 5.0F};
      for (size_t i = 0; i < in_order.size(); ++i) {
        keys[i * 2500] = kMany;
        std::fill_n(gradients.data() + i * 2500 * 64, 64, in_order[i]);
      }
      const BagGradients bags{0, keys, {}, gradients.data(), 64};
      const StepOptions step{0.1F, 1e-6F, 0.0F, 0.9, 0.999, turn == 1 ? 40.0F : 0.0F};
      ASSERT_TRUE(store_->ApplyGradients({&bags, 1}, step, of.threads).ok());
    }
    EXPECT_EQ(store_->Stats().evictions_to_ssd > 0, of.ssd);
    EXPECT_GT(store_->Stats().clipped_gradients, 0U);
    std::vector<std::byte> got;
    std::vector<RowState> states;
    for (uint32_t b = 0; b < Table().buckets(); ++b) {
      ASSERT_TRUE(store_->ExportBucket(*store_->PinNewest(), 0, b, &got).ok());
    }
    for (uint64_t key = 0; key < kMany; key += 7) {
      const Result<RowState> state = store_->StateOf(0, key);
      if (state.ok()) states.push_back(state.value());
    }
    states.push_back(store_->StateOf(0, kMany).value());
    EXPECT_GT(states.size(), kMany / 14);
    if (want.empty()) want = got;
    if (want_states.empty()) want_states = states;
    EXPECT_TRUE(got == want) << of.devices << " devices, " << of.threads << " threads";
    EXPECT_TRUE(states == want_states) << of.devices << " devices, " << of.threads << " threads";
  }
}

TEST_P(OptimizerTest, ChunksThatLiveAgainBeginAnew) {
  const StepOptions step{0.1F, 1e-8F, 0.0F, 0.9, 0.999, 0.0F};
  for (int turn = 0; turn < 3; ++turn) Apply({3}, std::vector<float>(kDim, 0.5F), step);
  const RowState whole = store_->StateOf(0, 3).value();
  ASSERT_TRUE(store_->SetLive(0, 3, 0b101).ok());
  Apply({3}, std::vector<float>(kDim, 0.5F), step);  // also while it is dead
  const RowState without = store_->StateOf(0, 3).value();
  ASSERT_TRUE(store_->SetLive(0, 3, 0b111).ok());
  const RowState again = store_->StateOf(0, 3).value();
  EXPECT_EQ(again.accumulator, without.accumulator) << "it is the row's";
  EXPECT_EQ(again.steps, without.steps);
  for (uint32_t d = 0; d < again.elements.size(); ++d) {
    const bool kept = d / kChunkDim != 1;
    EXPECT_NE(whole.elements[d], 0.0F);
    EXPECT_EQ(again.elements[d], kept ? without.elements[d] : 0.0F) << d;
  }
  // A row that was removed has nothing left.
  ASSERT_TRUE(store_->SetLive(0, 3, 0).ok());
  ASSERT_TRUE(store_->EnsureRows(0, std::vector<int64_t>{3}).ok());
  const RowState anew = store_->StateOf(0, 3).value();
  EXPECT_EQ(anew.accumulator, 0.0F);
  EXPECT_EQ(anew.steps, 0U);
  for (const float each : anew.elements) EXPECT_EQ(each, 0.0F);
}

TEST_P(OptimizerTest, AStateThatIsSetGoesOnBitForBit) {
  const StepOptions step{0.1F, 1e-8F, 0.1F, 0.9, 0.999, 0.0F};
  std::vector<float> gradients(kDim);
  for (uint32_t d = 0; d < kDim; ++d) gradients[d] = 0.1F * static_cast<float>(d) - 0.6F;
  for (int turn = 0; turn < 5; ++turn) Apply({3}, gradients, step);
  ASSERT_TRUE(store_->SetLive(0, 3, 0b110).ok());
  auto other = std::move(*TrainingStore::Open(options_));
  for (uint32_t b = 0; b < Table().buckets(); ++b) {
    std::vector<std::byte> records;
    ASSERT_TRUE(store_->ExportBucket(*store_->PinNewest(), 0, b, &records).ok());
    ASSERT_TRUE(other->ImportRecords(0, b, records).ok());
  }
  RowState state = store_->StateOf(0, 3).value();
  if (!state.elements.empty()) state.elements[0] = 7.0F;  // of a dead chunk: it is not kept
  ASSERT_TRUE(other->SetState(0, 3, state).ok());
  ASSERT_TRUE(ApplyRows(other.get(), 0, std::vector<int64_t>{3}, gradients, step).ok());
  Apply({3}, gradients, step);
  EXPECT_TRUE(other->StateOf(0, 3).value() == store_->StateOf(0, 3).value());
  std::vector<float> there(kDim);
  const std::vector<int64_t> keys = {3};
  ASSERT_TRUE(
      other->PinNewest()->Lookup({0, keys, Pooling::kNone, {}, there.data(), kDim, nullptr}).ok());
  EXPECT_EQ(there, Read(3));
  // One that is not this optimizer's.
  state.elements.assign(KeepsElements(GetParam()) ? 0 : kDim, 0.0F);
  EXPECT_EQ(other->SetState(0, 3, state).code(), Code::kInvalidArgument);
}

TEST_P(OptimizerTest, NumbersThatCannotLearnAreRefused) {
  const std::vector<float> gradients(kDim, 1.0F);
  std::vector<StepOptions> wrong(8);
  wrong[0].learning_rate = kNan;
  wrong[1].epsilon = 0.0F;
  wrong[2].initial_accumulator = -1.0F;
  wrong[3].beta1 = 1.0;
  wrong[4].beta2 = -0.1;
  wrong[5].max_gradient_norm = -1.0F;
  wrong[6].max_gradient_norm = kNan;
  wrong[7].beta2 = std::numeric_limits<double>::quiet_NaN();
  for (const StepOptions& each : wrong) {
    const auto refused = ApplyRows(store_.get(), 0, std::vector<int64_t>{1}, gradients, each);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.status().code(), Code::kInvalidArgument) << refused.status().ToString();
  }
  EXPECT_EQ(store_->Stats().rows, 0U);
}

TEST(OptimizerNameTest, EachNameIsReadAsItIsWritten) {
  for (const Optimizer each : {Optimizer::kRowwiseAdagrad, Optimizer::kAdagrad, Optimizer::kSgd,
                               Optimizer::kRowwiseAdam}) {
    EXPECT_EQ(ParseOptimizer(OptimizerName(each)).value(), each);
  }
  EXPECT_EQ(ParseOptimizer("adam").status().code(), Code::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(All, OptimizerTest,
                         ::testing::Values(Optimizer::kRowwiseAdagrad, Optimizer::kAdagrad,
                                           Optimizer::kSgd, Optimizer::kRowwiseAdam),
                         [](const auto& of) { return std::string(OptimizerName(of.param)); });

}  // namespace
}  // namespace embertide
