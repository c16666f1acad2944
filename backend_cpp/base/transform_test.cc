// Transforms: each step as it is defined, bounds, missing values, and every bad text refused.
#include "embertide/transform.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

namespace embertide {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kMost = std::numeric_limits<float>::max();

std::string Column(const std::string& steps,
                   const std::string& rest = R"("fill":0,"missing":false)") {
  return R"({"name":"x","steps":[)" + steps + "]," + rest + "}";
}

std::string File(const std::string& columns) {
  return R"({"format":1,"columns":[)" + columns + "]}";
}

// The results of one column of one step for values.
std::vector<float> Applied(const std::string& step, std::vector<float> values) {
  Result<Transforms> transforms = Transforms::Parse(File(Column(step)));
  EXPECT_TRUE(transforms.ok()) << transforms.status().ToString();
  std::vector<float> out(values.size());
  transforms->Apply(values, out.data());
  return out;
}

TEST(TransformTest, EachStepIsAsItIsDefined) {
  EXPECT_EQ(Applied("", {-3, 0.1F}), (std::vector<float>{-3, 0.1F}));
  EXPECT_EQ(Applied(R"({"kind":"clip","low":-1,"high":2})", {-3, 0.5F, 3}),
            (std::vector<float>{-1, 0.5F, 2}));
  EXPECT_EQ(Applied(R"({"kind":"standardise","mean":1,"std":4})", {1, 3, -1}),
            (std::vector<float>{0, 0.5F, -0.5F}));
  EXPECT_EQ(Applied(R"({"kind":"quantile","values":[0,10,20],"shares":[0.25,0.5,1]})",
                    {-1, 0, 4, 10, 15, 20, 99}),
            (std::vector<float>{0.25F, 0.25F, 0.35F, 0.5F, 0.75F, 1, 1}));
  EXPECT_EQ(Applied(R"({"kind":"bucketise","edges":[1,2,4,8]})", {0, 1, 1.5F, 2, 8, 99}),
            (std::vector<float>{0, 0.25F, 0.25F, 0.5F, 1, 1}));
  EXPECT_EQ(Applied(R"({"kind":"clip","low":0,"high":4},{"kind":"standardise","mean":2,"std":2})",
                    {-9, 3, 9}),
            (std::vector<float>{-1, 0.5F, 1}));
}

// The bits are those of the exact value rounded once, but for what lies next to the middle of two
// floats; and they are these on every machine.
TEST(TransformTest, Log1pIsCloseToExactAndTheSameEverywhere) {
  std::vector<float> values;
  for (double x = 1e-40; x < 3e38; x *= 1.0173) {
    values.push_back(static_cast<float>(x));
    values.push_back(static_cast<float>(-x));
  }
  const std::vector<float> out = Applied(R"({"kind":"log1p"})", values);
  for (size_t i = 0; i < values.size(); ++i) {
    const long double x = values[i];
    const auto want = static_cast<float>(std::copysign(std::log1p(std::abs(x)), x));
    EXPECT_EQ(out[i], want) << values[i];
  }
  uint64_t hash = 14695981039346656037ULL;
  for (const float value : out) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    hash = (hash ^ bits) * 1099511628211ULL;
  }
  EXPECT_EQ(hash, 15423178121534235963ULL);
}

TEST(TransformTest, MissingValuesReadAsTheFillAndAreCounted) {
  const std::string log1p = R"({"kind":"log1p"})";
  Result<Transforms> transforms =
      Transforms::Parse(File(Column(log1p, R"("fill":-2.5,"missing":true)") + "," + Column("")));
  ASSERT_TRUE(transforms.ok()) << transforms.status().ToString();
  EXPECT_EQ(transforms->inputs(), 2U);
  EXPECT_EQ(transforms->outputs(), 3U);
  const std::vector<float> raw = {kNan, 7, 0, kNan};
  std::vector<float> out(6);
  EXPECT_EQ(transforms->Apply(raw, out.data()), 2U);
  EXPECT_EQ(out, (std::vector<float>{-2.5F, 1, 7, 0, 0, 0}));
}

TEST(TransformTest, WhatNeighboursOfAContextShareIsTransformedAndCountedOnce) {
  const std::string log1p = R"({"kind":"log1p"})";
  const std::string missing = R"("fill":-2.5,"missing":true)";
  Result<Transforms> transforms =
      Transforms::Parse(File(Column(log1p, missing) + "," + Column(log1p) + "," + Column("")));
  ASSERT_TRUE(transforms.ok()) << transforms.status().ToString();
  const std::vector<float> raw = {kNan, 3, 1, kNan, 4, 1, 5, 6, 2, 5, kNan, 2, 5, 7, 2};
  constexpr uint32_t kNone = Transforms::kNoContext;
  std::vector<float> want(20);
  EXPECT_EQ(transforms->Apply(raw, want.data()), 3U);
  const auto apply = [&](const std::vector<uint32_t>& context_of, std::vector<float> values) {
    std::vector<float> out(20);
    const uint64_t gone = transforms->Apply(values, context_of, {true, false, true}, out.data());
    EXPECT_EQ(out, want);
    return gone;
  };
  EXPECT_EQ(apply({0, 0, 1, 1, 1}, raw), 2U);
  EXPECT_EQ(apply({kNone, kNone, kNone, kNone, kNone}, raw), 3U);
  // They are not looked at again.
  std::vector<float> others = raw;
  others[3] = others[5] = others[9] = 99;
  EXPECT_EQ(apply({0, 0, 1, 1, kNone}, others), 2U);
}

TEST(TransformTest, WhatComesOutIsFiniteWhateverComesIn) {
  const std::string steep = R"({"kind":"standardise","mean":-1e38,"std":1e-37})";
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> values = {0, kMost, -kMost, inf, -inf};
  EXPECT_EQ(Applied(steep + "," + steep, values),
            (std::vector<float>{kMost, kMost, -kMost, kMost, -kMost}));
  for (const float value : Applied(steep + R"(,{"kind":"log1p"})", values)) {
    EXPECT_TRUE(std::isfinite(value));
  }
}

TEST(TransformTest, TheTextOfWhatWasReadIsReadAsTheSame) {
  const std::string text =
      File(Column(R"({"kind":"log1p"},{"kind":"clip","low":-0.1,"high":0.1},)"
                  R"({"kind":"standardise","mean":0.1,"std":1e-7},)"
                  R"({"kind":"quantile","values":[0.1,0.30000000000000004],"shares":[0,1]},)"
                  R"({"kind":"bucketise","edges":[0.5]})",
                  R"("fill":0.1,"missing":true)"));
  Result<Transforms> first = Transforms::Parse(text);
  ASSERT_TRUE(first.ok()) << first.status().ToString();
  Result<Transforms> second = Transforms::Parse(first->text());
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(first->text(), second->text());
  EXPECT_EQ(second->columns()[0].steps[3].values[1], 0.30000000000000004);
}

TEST(TransformTest, BadTextIsRefusedByName) {
  const auto refuses = [](const std::string& text, const std::string& says, Code code) {
    const Result<Transforms> parsed = Transforms::Parse(text);
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_EQ(parsed.status().code(), code) << text;
    EXPECT_NE(parsed.status().message().find(says), std::string::npos) << parsed.status().message();
  };
  const auto column = [&](const std::string& step, const std::string& says) {
    refuses(File(Column(step)), says, Code::kCorrupt);
    refuses(File(Column(step)), "column \"x\"", Code::kCorrupt);
  };
  refuses(R"({"format":2,"columns":[]})", "format is 2", Code::kRejected);
  refuses("{", "transforms", Code::kCorrupt);
  refuses(R"({"format":1})", "columns", Code::kCorrupt);
  refuses(R"({"format":1,"columns":[],"more":1})", "\"more\"", Code::kCorrupt);
  refuses(File(Column("", R"("fill":1e39,"missing":false)")), "fill", Code::kCorrupt);
  refuses(File(Column("", R"("fill":true,"missing":false)")), "fill", Code::kCorrupt);
  refuses(File(Column("", R"("fill":0,"missing":1)")), "missing", Code::kCorrupt);
  column(R"({"kind":"sqrt"})", "\"sqrt\" does not exist");
  column(R"({"kind":"log1p","base":2})", "\"base\"");
  column(R"({"kind":"clip","low":2,"high":1})", "above");
  column(R"({"kind":"standardise","mean":0,"std":0})", "std");
  column(R"({"kind":"standardise","mean":0,"std":1e-39})", "std");
  column(R"({"kind":"quantile","values":[1,1],"shares":[0,1]})", "ascend");
  column(R"({"kind":"quantile","values":[1,2],"shares":[0]})", "shares");
  column(R"({"kind":"quantile","values":[1,2],"shares":[0.5,0.4]})", "shares");
  column(R"({"kind":"quantile","values":[1,2],"shares":[0,1.5]})", "shares");
  column(R"({"kind":"bucketise","edges":[]})", "edges");
  column(R"({"kind":"bucketise","edges":["a"]})", "edges");
  std::string edges = "0";
  for (size_t i = 1; i <= kMaxDensePoints; ++i) edges += "," + std::to_string(i);
  column(R"({"kind":"bucketise","edges":[)" + edges + "]}", "1 to 256");
  std::string steps = R"({"kind":"log1p"})";
  for (size_t i = 0; i < kMaxDenseSteps; ++i) steps += R"(,{"kind":"log1p"})";
  column(steps, "8 at most");
}

}  // namespace
}  // namespace embertide
