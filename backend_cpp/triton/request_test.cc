// The contents that a request may have, and the reason of each refusal.
#include "triton/request.h"

#include <gtest/gtest.h>

namespace embertide::triton {
namespace {

constexpr RequestLimits kLimits{2, 3, 6};

template <typename T>
Tensor Make(const char* name, const char* dtype, std::vector<int64_t> shape,
            const std::vector<T>& values) {
  Tensor tensor{name, dtype, std::move(shape), {}, {}};
  const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
  tensor.copy.assign(bytes, bytes + values.size() * sizeof(T));
  return tensor;
}

struct Case {
  std::vector<int64_t> keys_shape;
  size_t keys;
  std::vector<int64_t> lengths_shape;  // empty: no LENGTHS
  std::vector<int32_t> lengths;
  Reason reason;
};

Reason Parse(const Case& c, Bags* bags) {
  static Tensor keys;  // `bags` points into it
  keys = Make("KEYS", "INT64", c.keys_shape, std::vector<int64_t>(c.keys, 7));
  keys.data = keys.copy;
  Tensor lengths = Make("LENGTHS", "INT32", c.lengths_shape, c.lengths);
  lengths.data = lengths.copy;
  return ParseBags(keys, c.lengths_shape.empty() ? nullptr : &lengths, kLimits, bags).reason;
}

TEST(RequestTest, NamesTheReasonOfEachRefusal) {
  const int32_t huge = std::numeric_limits<int32_t>::max();
  for (const Case& c : std::initializer_list<Case>{
           {{2, 2}, 4, {}, {}, Reason::kNone},
           {{2, 3}, 6, {}, {}, Reason::kShape},
           {{4}, 4, {}, {}, Reason::kShape},
           {{2, 2}, 3, {}, {}, Reason::kShape},
           {{-1, 2}, 2, {}, {}, Reason::kShape},
           {{int64_t{1} << 62, 2}, 2, {}, {}, Reason::kShape},
           {{1, 0}, 0, {}, {}, Reason::kEmpty},
           {{4, 2}, 8, {}, {}, Reason::kMaxSamples},
           {{1, 3}, 3, {1, 4}, {1, 0, 2, 0}, Reason::kNone},
           {{1, 0}, 0, {1, 2}, {0, 0}, Reason::kNone},
           {{1, 0}, 0, {1, 0}, {}, Reason::kEmpty},
           {{2, 3}, 6, {1, 4}, {1, 0, 2, 3}, Reason::kShape},
           {{1, 3}, 3, {1, 3}, {1, 1, 1}, Reason::kLengths},
           {{1, 3}, 3, {1, 2}, {1, 1}, Reason::kLengths},
           {{1, 3}, 3, {1, 2}, {4, -1}, Reason::kLengths},
           {{1, 3}, 3, {1, 2}, {-1, 4}, Reason::kLengths},
           {{1, 3}, 3, {1, 4}, {huge, huge, huge, huge}, Reason::kLengths},
           {{1, 7}, 7, {1, 2}, {3, 4}, Reason::kMaxKeys},
           {{1, 0}, 0, {1, 8}, {0, 0, 0, 0, 0, 0, 0, 0}, Reason::kMaxSamples}}) {
    Bags bags;
    EXPECT_EQ(ReasonName(Parse(c, &bags)), std::string(ReasonName(c.reason)));
  }
}

TEST(RequestTest, JaggedBagsLieWhereTheLengthsSay) {
  Bags bags;
  ASSERT_EQ(Parse({{1, 3}, 3, {1, 4}, {1, 0, 2, 0}, Reason::kNone}, &bags), Reason::kNone);
  EXPECT_TRUE(bags.jagged);
  EXPECT_EQ(bags.samples, 2U);
  EXPECT_EQ(bags.offsets, (std::vector<uint32_t>{0, 1, 1, 3, 3}));
}

TEST(RequestTest, CandidatesSayWhoseEachSampleIs) {
  const int32_t huge = std::numeric_limits<int32_t>::max();
  struct Counted {
    std::vector<int64_t> shape;
    std::vector<int32_t> counts;
    Reason reason;
  };
  for (const Counted& c : std::initializer_list<Counted>{{{1, 2}, {2, 1}, Reason::kNone},
                                                         {{1, 2}, {2, 2}, Reason::kContext},
                                                         {{1, 2}, {2, 0}, Reason::kContext},
                                                         {{1, 2}, {3, 0}, Reason::kContext},
                                                         {{1, 2}, {4, -1}, Reason::kContext},
                                                         {{1, 2}, {huge, huge}, Reason::kContext},
                                                         {{1, 3}, {1, 1, 1}, Reason::kContext},
                                                         {{2, 1}, {2, 1}, Reason::kContext},
                                                         {{1, 0}, {}, Reason::kContext},
                                                         {{1, 2}, {3}, Reason::kShape}}) {
    Tensor candidates = Make("CANDIDATES", "INT32", c.shape, c.counts);
    candidates.data = candidates.copy;
    std::vector<uint32_t> context_of;
    EXPECT_EQ(ParseCandidates("CANDIDATES", &candidates, 2, 3, &context_of).reason, c.reason);
    if (c.reason == Reason::kNone) {
      EXPECT_EQ(context_of, (std::vector<uint32_t>{0, 0, 1}));
    }
  }
  std::vector<uint32_t> context_of;
  EXPECT_EQ(ParseCandidates("CANDIDATES", nullptr, 2, 3, &context_of).reason, Reason::kContext);
}

TEST(RequestTest, ASideWithoutLengthsHasOneKeyABag) {
  Tensor keys = Make("CONTEXT_KEYS", "INT64", {1, 4}, std::vector<int64_t>{1, 2, 3, 4});
  keys.data = keys.copy;
  Bags bags;
  ASSERT_EQ(ParseSide(keys, nullptr, kLimits, "context", &bags).reason, Reason::kNone);
  EXPECT_EQ(bags.samples, 2U);
  EXPECT_EQ(bags.offsets, (std::vector<uint32_t>{0, 1, 2, 3, 4}));
  keys.shape = {2, 2};
  EXPECT_EQ(ParseSide(keys, nullptr, kLimits, "context", &bags).reason, Reason::kShape);
  keys = Make("CONTEXT_KEYS", "INT64", {1, 0}, std::vector<int64_t>{});
  keys.data = keys.copy;
  const Refusal none = ParseSide(keys, nullptr, kLimits, "context", &bags);
  EXPECT_EQ(none.reason, Reason::kEmpty);
  EXPECT_EQ(none.status.message(), "the request has no context");
  keys = Make("CONTEXT_KEYS", "INT64", {1, 3}, std::vector<int64_t>{1, 2, 3});
  keys.data = keys.copy;
  EXPECT_EQ(ParseSide(keys, nullptr, kLimits, "context", &bags).reason, Reason::kShape);
  Tensor lengths = Make("CONTEXT_LENGTHS", "INT32", {1, 2}, std::vector<int32_t>{0, 3});
  lengths.data = lengths.copy;
  ASSERT_EQ(ParseSide(keys, &lengths, kLimits, "context", &bags).reason, Reason::kNone);
  EXPECT_EQ(bags.offsets, (std::vector<uint32_t>{0, 0, 3}));
  lengths = Make("CONTEXT_LENGTHS", "INT32", {1, 0}, std::vector<int32_t>{});
  lengths.data = lengths.copy;
  EXPECT_EQ(ParseSide(keys, &lengths, kLimits, "context", &bags).reason, Reason::kEmpty);
}

TEST(RequestTest, WeightsAreFiniteAndOneAKey) {
  const auto parse = [](const char* dtype, const std::vector<int64_t>& shape,
                        const std::vector<float>& values) {
    Tensor keys = Make("KEYS", "INT64", {1, 3}, std::vector<int64_t>(3, 7));
    Tensor weights = Make("WEIGHTS", dtype, shape, values);
    weights.data = weights.copy;
    std::span<const float> seen;
    const Reason reason = ParseWeights("WEIGHTS", &weights, keys, true, &seen).reason;
    if (reason == Reason::kNone) {
      EXPECT_EQ(std::vector(seen.begin(), seen.end()), values);
    }
    return reason;
  };
  EXPECT_EQ(parse("FP32", {1, 3}, {0, -1, 2}), Reason::kNone);
  EXPECT_EQ(parse("FP64", {1, 3}, {0, -1, 2}), Reason::kDtype);
  EXPECT_EQ(parse("FP32", {3, 1}, {0, -1, 2}), Reason::kWeights);
  EXPECT_EQ(parse("FP32", {1, 2}, {0, -1}), Reason::kWeights);
  EXPECT_EQ(parse("FP32", {1, 3}, {0, -1, std::numeric_limits<float>::infinity()}),
            Reason::kWeights);
  std::span<const float> seen;
  EXPECT_EQ(ParseWeights("WEIGHTS", nullptr, {}, false, &seen).reason, Reason::kNone);
  EXPECT_TRUE(seen.empty());
  EXPECT_EQ(ParseWeights("WEIGHTS", nullptr, {}, true, &seen).reason, Reason::kWeights);
}

TEST(RequestTest, RefusesOtherTypes) {
  Tensor keys = Make("KEYS", "INT32", {1, 2}, std::vector<int32_t>{1, 2});
  keys.data = keys.copy;
  Bags bags;
  EXPECT_EQ(ParseBags(keys, nullptr, kLimits, &bags).reason, Reason::kDtype);
}

TEST(RequestTest, DenseValuesAreFiniteOrMissingWhereThatMeansSomething) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const Result<Transforms> transforms = Transforms::Parse(
      R"({"format": 1, "columns": [{"name": "age", "steps": [], "fill": 0, "missing": false},
          {"name": "price", "steps": [], "fill": 0, "missing": true}]})");
  ASSERT_TRUE(transforms.ok());
  Bags bags;
  bags.samples = 2;
  const auto parse = [&](const std::vector<float>& values, const Transforms* with) {
    Tensor tensor = Make("DENSE", "FP32", {2, 2}, values);
    tensor.data = tensor.copy;
    std::span<const float> shown;
    return ParseDense("DENSE", &tensor, 2, with, bags, &shown).status.message();
  };
  EXPECT_EQ(parse({1, 2, 3, 4}, nullptr), "");
  EXPECT_EQ(parse({1, kNan, kNan, 4}, &transforms.value()), "");
  EXPECT_EQ(parse({1, 2, 3, kNan}, nullptr), "DENSE of sample 1 is not finite in column 1: nan");
  EXPECT_EQ(parse({1, 2, 3, -kInf}, &transforms.value()),
            "DENSE of sample 1 is not finite in column 1 (price): -inf");
}

}  // namespace
}  // namespace embertide::triton
