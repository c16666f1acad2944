// Every kind of vectors gives the bits of summing, and of decoding, changing and encoding a row,
// one dimension after the other.
#include "store/train_ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "store/decay.h"
#include "store/test_rows.h"

namespace embertide {
namespace {

class TrainOpsTest : public testing::TestWithParam<VectorCase> {
 protected:
  void SetUp() override {
    ops_ = TrainOpsOf(std::get<0>(GetParam()));
    if (ops_ == nullptr) GTEST_SKIP() << "this CPU has no " << std::get<0>(GetParam());
    layout_.dtype = std::get<1>(GetParam());
    std::tie(layout_.chunks, layout_.chunk_dim) = std::get<2>(GetParam());
  }
  std::vector<float> Values(float spread) {
    std::normal_distribution<float> normal(0.0F, spread);
    std::vector<float> values(layout_.dim());
    for (float& value : values) value = normal(random_);
    return values;
  }

  const TrainOps* ops_ = nullptr;
  RowLayout layout_;
  std::mt19937 random_{3};
};

float Most(DType dtype) {
  return dtype == DType::kFp16   ? 65504.0F
         : dtype == DType::kBf16 ? 3.3895314e38F
         : dtype == DType::kInt8 ? 3.4e38F
                                 : std::numeric_limits<float>::max();
}

TEST_P(TrainOpsTest, SumsAndSquaresAreThoseInOrder) {
  const uint32_t dim = layout_.dim();
  std::vector<std::vector<float>> gradients;
  std::vector<const float*> places;
  std::vector<double> want(dim);
  for (size_t n = 1; n <= 9; ++n) {
    gradients.push_back(Values(n % 3 == 0 ? 1e6F : 1e-3F));  // so that the order tells
    places.clear();
    for (const auto& each : gradients) places.push_back(each.data());
    for (uint32_t d = 0; d < dim; ++d) want[d] += static_cast<double>(gradients.back()[d]);
    ChunkSquares squares{};
    for (uint32_t c = 0; c < layout_.chunks; ++c) {
      std::array<double, 16> lanes{};
      for (uint32_t d = 0; d < layout_.chunk_dim; ++d) {
        const double value = want[c * layout_.chunk_dim + d];
        lanes[d % 16] += value * value;
      }
      for (uint32_t apart = 8; apart > 0; apart /= 2) {
        for (uint32_t lane = 0; lane < apart; ++lane) lanes[lane] += lanes[lane + apart];
      }
      squares[c] = lanes[0];
    }
    std::vector<double> sums(dim, -1.0);
    ChunkSquares got{};
    ops_->sum(layout_, places.data(), n, sums.data(), &got);
    EXPECT_EQ(got, squares) << n;
    ASSERT_EQ(sums, want) << n;
    for (const UtilityKind kind :
         {UtilityKind::kSquares, UtilityKind::kNorms, UtilityKind::kAccesses}) {
      std::array<float, kMaxChunks> used{};
      std::array<float, kMaxChunks> utility{};
      for (uint32_t c = 0; c < kMaxChunks; ++c) used[c] = utility[c] = 0.1F * static_cast<float>(c);
      for (uint32_t c = 0; c < layout_.chunks; ++c) {
        double earned = static_cast<double>(n);
        if (kind == UtilityKind::kSquares) earned = squares[c];
        if (kind == UtilityKind::kNorms) earned *= std::sqrt(squares[c]);
        used[c] = static_cast<float>(0.7 * static_cast<double>(used[c]) + earned);
      }
      ops_->use[static_cast<size_t>(kind)](layout_.chunks, squares, static_cast<uint32_t>(n), 0.7,
                                           utility.data());
      EXPECT_EQ(utility, used) << n << UtilityKindName(kind);
    }
  }
}

TEST_P(TrainOpsTest, ARowDescendsAsItsDecodedValuesDo) {
  constexpr double kStep = 0.37;
  const float most = Most(layout_.dtype);
  for (int turn = 0; turn < 40; ++turn) {
    // Whole rows, dead chunks, rows of zeros, and values that fp16 has only as subnormals or not.
    const auto live = static_cast<uint16_t>(turn % 2 == 0 ? layout_.full_mask()
                                                          : random_() & layout_.full_mask());
    const std::vector<float> before = Values(turn == 2 ? 0.0F : turn % 5 == 4 ? 1e-5F : 2.0F);
    std::vector<double> sums(layout_.dim());
    for (double& sum : sums)
      sum = std::normal_distribution(0.0, turn % 7 == 0 ? 1e5 : 1.0)(random_);
    if (turn == 2) std::fill(sums.begin(), sums.end(), 0.0);
    // At an odd address, and what stands behind it stays.
    const uint32_t bytes = layout_.PayloadBytes(live);
    std::vector<std::byte> row(bytes + 2, std::byte{7});
    EncodePayload(layout_, live, before.data(), row.data() + 1);
    std::vector<float> values(layout_.dim());
    DecodePayload(layout_, live, row.data() + 1, values.data());
    for (uint32_t d = 0; d < layout_.dim(); ++d) {
      values[d] = std::clamp(values[d] - static_cast<float>(kStep * sums[d]), -most, most);
    }
    std::vector<std::byte> want = row;
    EncodePayload(layout_, live, values.data(), want.data() + 1);
    ops_->descend[static_cast<size_t>(layout_.dtype)](layout_, live, sums.data(), kStep,
                                                      row.data() + 1);
    ASSERT_EQ(row, want) << "turn " << turn;
  }
}

// Before: rows were infinite, or no numbers, from then on, and published.
TEST_P(TrainOpsTest, AStepTooFarEndsAtTheLargestValue) {
  const uint16_t live = layout_.full_mask();
  const float most = Most(layout_.dtype);
  std::vector<std::byte> row(layout_.PayloadBytes(live));
  EncodePayload(layout_, live, Values(1.0F).data(), row.data());
  for (const double step : {1e30, 1e39, -1e39, std::numeric_limits<double>::infinity()}) {
    std::vector<double> sums(layout_.dim(), -1e9);
    ops_->descend[static_cast<size_t>(layout_.dtype)](layout_, live, sums.data(), step, row.data());
    std::vector<float> values(layout_.dim());
    DecodePayload(layout_, live, row.data(), values.data());
    const float want = step < 0 ? -most : most;
    for (const float value : values) {
      ASSERT_TRUE(std::isfinite(value)) << step;
      ASSERT_NEAR(value / want, 1.0F, 1e-5F) << step;
    }
  }
  std::vector<double> zeros(layout_.dim(), 0.0);  // times infinity: no number
  ops_->descend[static_cast<size_t>(layout_.dtype)](
      layout_, live, zeros.data(), std::numeric_limits<double>::infinity(), row.data());
  std::vector<float> values(layout_.dim());
  DecodePayload(layout_, live, row.data(), values.data());
  for (const float value : values) ASSERT_TRUE(std::isfinite(value));
}

TEST_P(TrainOpsTest, WhatIsKeptOfElementsIsThatOfEachByItself) {
  constexpr double kScale = 0.3;
  constexpr float kInitial = 0.25F;
  constexpr double kEpsilon = 1e-3;
  for (int turn = 0; turn < 20; ++turn) {
    const auto live = static_cast<uint16_t>(turn % 2 == 0 ? layout_.full_mask()
                                                          : random_() & layout_.full_mask());
    std::vector<double> sums(layout_.dim());
    std::vector<float> kept = Values(2.0F);
    for (uint32_t d = 0; d < layout_.dim(); ++d) {
      sums[d] = std::normal_distribution(0.0, turn % 7 == 0 ? 1e5 : 1.0)(random_);
      kept[d] = turn % 3 == 0 && d % 3 == 0 ? 0.0F : std::fabs(kept[d]);
    }
    std::vector<double> adagrad_sums = sums;
    std::vector<double> momentum_sums = sums;
    std::vector<float> adagrad_kept = kept;
    std::vector<float> momentum_kept = kept;
    for (uint32_t d = 0; d < layout_.dim(); ++d) {
      if ((live >> (d / layout_.chunk_dim) & 1U) == 0) continue;
      const double g = sums[d] * kScale;
      const double before = kept[d] == 0.0F ? kInitial : kept[d];
      adagrad_kept[d] = static_cast<float>(before + g * g);
      adagrad_sums[d] = g / (std::sqrt(static_cast<double>(adagrad_kept[d])) + kEpsilon);
      momentum_kept[d] = static_cast<float>(0.9 * kept[d] + sums[d] * 0.1);
      momentum_sums[d] = momentum_kept[d];
    }
    std::vector<double> got_sums = sums;
    std::vector<float> got_kept = kept;
    ops_->adagrad(layout_, live, kScale, kInitial, kEpsilon, got_kept.data(), got_sums.data());
    ASSERT_EQ(got_kept, adagrad_kept) << "turn " << turn;
    ASSERT_EQ(got_sums, adagrad_sums) << "turn " << turn;
    ops_->momentum(layout_, live, 0.9, 0.1, kept.data(), sums.data());
    ASSERT_EQ(kept, momentum_kept) << "turn " << turn;
    ASSERT_EQ(sums, momentum_sums) << "turn " << turn;
  }
}

TEST(DecayTest, StepsAtOnceAreThoseOneAfterTheOther) {
  for (const double factor : {0.5, 0.9999, 1.0}) {
    const Decay decay(factor);
    EXPECT_EQ(decay.Over(0), 1.0);
    EXPECT_EQ(decay.Over(1), factor);
    for (const uint32_t steps : {2U, 255U, 256U, 65535U, 65536U, 70000U, 20'000'000U}) {
      const double want = std::pow(factor, steps);
      EXPECT_NEAR(decay.Over(steps), want, 1e-9 * want) << steps;
    }
    EXPECT_EQ(decay.Over((1U << 31) - 1), factor == 1.0 ? 1.0 : 0.0);
  }
}

// Dimensions with and without a tail, chunks wider and narrower than a vector.
INSTANTIATE_TEST_SUITE_P(All, TrainOpsTest, VectorCases());

}  // namespace
}  // namespace embertide
