// Columns that a node makes: equal to those that a client would send, and refused by name.
#include "node/made_columns.h"

#include <gtest/gtest.h>

#include "embertide/hash.h"

namespace embertide {
namespace {

// Two features of events, a cross behind the first one, and a feature behind that.
Manifest TestManifest() {
  Manifest manifest;
  manifest.features = {{"prev", "item", "sum"},
                       {"both", "pair", "sum", false, {"cand", "prev"}},
                       {"cand", "item", "sum"}};
  return manifest;
}

int64_t ByHand(int64_t first, int64_t second) {
  return static_cast<int64_t>(
      HashKey(HashKey(static_cast<uint64_t>(first)) ^ static_cast<uint64_t>(second)));
}

TEST(MadeColumnsTest, ARequestOfOneKeyAFeatureGetsItsCrosses) {
  const Result<MadeColumns> made = MadeColumns::Resolve(TestManifest());
  ASSERT_TRUE(made.ok());
  EXPECT_TRUE(made.value().any());
  EXPECT_EQ(made.value().own_columns(), 2U);
  WholeRequest whole;
  whole.keys = {9, 9};  // of the request before
  whole.offsets = {1};
  const std::vector<int64_t> keys = {1, 2, -1, INT64_MIN};
  ASSERT_TRUE(made.value().Complete(keys, {}, {}, &whole).ok());
  EXPECT_EQ(whole.keys,
            std::vector<int64_t>({1, ByHand(2, 1), 2, -1, ByHand(INT64_MIN, -1), INT64_MIN}));
  EXPECT_TRUE(whole.offsets.empty());
  EXPECT_TRUE(whole.weights.empty());
}

TEST(MadeColumnsTest, AJaggedRequestKeepsItsBagsAndWeights) {
  Manifest manifest = TestManifest();
  manifest.features.push_back({"tags", "tag", "sum", true});
  const Result<MadeColumns> made = MadeColumns::Resolve(manifest);
  ASSERT_TRUE(made.ok());
  WholeRequest whole;
  const std::vector<int64_t> keys = {1, 2, 7, 8, 3, 4};
  const std::vector<uint32_t> offsets = {0, 1, 2, 4, 5, 6, 6};
  const std::vector<float> weights = {0.5F, 2, 3, 4, 5, 6};
  ASSERT_TRUE(made.value().Complete(keys, offsets, weights, &whole).ok());
  EXPECT_EQ(whole.keys, std::vector<int64_t>({1, ByHand(2, 1), 2, 7, 8, 3, ByHand(4, 3), 4}));
  EXPECT_EQ(whole.offsets, std::vector<uint32_t>({0, 1, 2, 3, 5, 6, 7, 8, 8}));
  EXPECT_EQ(whole.weights, std::vector<float>({0.5F, 1, 2, 3, 4, 5, 1, 6}));
}

TEST(MadeColumnsTest, ABagOfOtherThanOneKeyIsNamed) {
  const Result<MadeColumns> made = MadeColumns::Resolve(TestManifest());
  WholeRequest whole;
  const std::vector<int64_t> keys = {1, 2, 3, 4, 5};
  const std::vector<uint32_t> offsets = {0, 1, 2, 4, 5};
  const Status refused = made.value().Complete(keys, offsets, {}, &whole);
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_NE(refused.message().find("feature prev of sample 1 has 2 keys"), std::string::npos)
      << refused.message();
}

TEST(MadeColumnsTest, AManifestThatCrossesWhatNoRequestHasIsRefused) {
  const auto refusal = [](std::vector<std::string> crossed) {
    Manifest manifest = TestManifest();
    manifest.features[1].crossed = std::move(crossed);
    return MadeColumns::Resolve(manifest).status().message();
  };
  EXPECT_NE(refusal({"cand", "who"}).find("\"both\" is crossed of \"who\", which is no feature"),
            std::string::npos);
  EXPECT_NE(refusal({"cand", "both"}).find("crossed of \"both\""), std::string::npos);
  EXPECT_NE(refusal({"cand"}).find("is crossed of one feature"), std::string::npos);
}

TEST(MadeColumnsTest, AModelWithoutCrossesMakesNothing) {
  Manifest manifest = TestManifest();
  manifest.features[1].crossed.clear();
  const Result<MadeColumns> made = MadeColumns::Resolve(manifest);
  EXPECT_FALSE(made.value().any());
  EXPECT_FALSE(MadeColumns().any());
}

}  // namespace
}  // namespace embertide
