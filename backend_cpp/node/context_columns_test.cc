// Requests of contexts and samples: as the same request with all columns in each sample.
#include "node/context_columns.h"

#include <gtest/gtest.h>

namespace embertide {
namespace {

const std::vector<std::string> kContext = {"user", "place", "hour"};

// A user, a candidate, crosses of both kinds, a sequence of the user's items, dense features.
Manifest TestManifest() {
  Manifest manifest;
  manifest.tables.resize(2);
  manifest.tables[0].name = "item";
  manifest.tables[1].name = "liked";
  manifest.tables[1].layout = {3, 1, DType::kKeys};
  manifest.features = {{"user", "user", "sum"},
                       {"cand", "item", "sum"},
                       {"where", "pair", "sum", false, {"user", "place"}},
                       {"both", "pair", "sum", false, {"cand", "user"}},
                       {"place", "place", "sum"},
                       {"tags", "tag", "mean", true},
                       {"liked0", "item", "sum"},
                       {"liked1", "item", "sum"}};
  manifest.dense_features = 4;
  manifest.dense_names = {"price", "hour", "liked_taken", "liked_has"};
  manifest.sequences = {{"liked", "user", "cand", "liked", {"liked0", "liked1"}, 2}};
  return manifest;
}

struct Columns {
  MadeColumns made = MadeColumns::Resolve(TestManifest()).value();
  ContextColumns context = ContextColumns::Resolve(TestManifest(), made, nullptr, kContext).value();
};

std::string RefusalOf(const std::vector<std::string>& names, const Manifest& manifest) {
  const Result<MadeColumns> made = MadeColumns::Resolve(manifest);
  return ContextColumns::Resolve(manifest, made.value(), nullptr, names).status().message();
}

TEST(ContextColumnsTest, MadeColumnsAreTheContextsIfTheirSourcesAre) {
  const Columns columns;
  EXPECT_EQ(columns.context.context_keys(), 2U);
  EXPECT_EQ(columns.context.sample_keys(), 2U);
  EXPECT_EQ(columns.context.is_context(),
            std::vector<bool>({true, false, true, false, true, false, true, true}));
  EXPECT_EQ(columns.context.is_context_dense(), std::vector<bool>({false, true, true, false}));
  EXPECT_EQ(columns.context.context_dense(), std::vector<std::string>({"hour"}));
  EXPECT_EQ(columns.context.sample_dense(), std::vector<std::string>({"price"}));
}

// A request with contexts, once each sample has the bags and values of its context.
WholeRequest Repeated(const WholeRequest& whole, size_t features) {
  WholeRequest all;
  all.rows = whole.samples();
  all.dense = whole.dense;
  all.offsets.push_back(0);
  for (size_t s = 0; s < whole.samples(); ++s) {
    for (uint32_t f = 0; f < features; ++f) {
      const size_t bag = whole.RowOf(s, f) * features + f;
      for (uint32_t at = whole.offsets[bag]; at < whole.offsets[bag + 1]; ++at) {
        all.keys.push_back(whole.keys[at]);
        all.weights.push_back(whole.weights[at]);
      }
      all.offsets.push_back(static_cast<uint32_t>(all.keys.size()));
    }
  }
  return all;
}

TEST(ContextColumnsTest, ARequestIsTheOneWhoseSamplesHaveAllColumns) {
  const Columns columns;
  const size_t features = TestManifest().features.size();
  // Two users, the first with two candidates.
  const std::vector<int64_t> user_keys = {1, 10, 2, 20};
  const std::vector<uint32_t> user_offsets = {0, 1, 2, 3, 4};
  const std::vector<int64_t> keys = {100, 7, 8, 101, 102, 9};
  const std::vector<uint32_t> offsets = {0, 1, 3, 4, 4, 5, 6};
  const std::vector<float> weights = {1, 0.5F, 2, 1, 1, 4};
  const std::vector<uint32_t> context_of = {0, 0, 1};
  WholeRequest whole;
  ASSERT_TRUE(columns.context
                  .Complete(columns.made, {user_keys, user_offsets, {}}, {keys, offsets, weights},
                            context_of, &whole)
                  .ok());
  columns.context.CompleteDense(std::vector<float>{5, 6}, std::vector<float>{1, 2, 3}, &whole);
  EXPECT_EQ(whole.contexts, 2U);
  EXPECT_EQ(whole.rows, 5U);
  EXPECT_EQ(ContextColumns::KeysSaved(whole), 5U);  // of user 1: two, a cross and two places

  // The same without contexts.
  const std::vector<int64_t> all_keys = {1, 100, 10, 7, 8, 1, 101, 10, 2, 102, 20, 9};
  const std::vector<uint32_t> all_offsets = {0, 1, 2, 3, 5, 6, 7, 8, 8, 9, 10, 11, 12};
  const std::vector<float> all_weights = {1, 1, 1, 0.5F, 2, 1, 1, 1, 1, 1, 1, 4};
  WholeRequest want;
  ASSERT_TRUE(columns.made.Complete(all_keys, all_offsets, all_weights, &want).ok());
  columns.made.CompleteDense(std::vector<float>{1, 5, 2, 5, 3, 6}, &want);

  const MadeSequence& sequence = columns.made.sequences()[0];
  EXPECT_EQ(MadeColumns::FirstRowOf(sequence, whole), 0U);
  EXPECT_EQ(columns.made.UsersOf(sequence, whole), std::vector<int64_t>({1, 2}));
  EXPECT_EQ(columns.made.UsersOf(sequence, want), std::vector<int64_t>({1, 1, 2}));
  columns.made.PutItems(sequence, std::vector<int64_t>{101, 55, 0, 66, kNoKey, 0}, &whole);
  columns.made.PutItems(sequence, std::vector<int64_t>{101, 55, 0, 101, 55, 0, 66, kNoKey, 0},
                        &want);
  const WholeRequest got = Repeated(whole, features);
  EXPECT_EQ(got.keys, want.keys);
  EXPECT_EQ(got.offsets, want.offsets);
  EXPECT_EQ(got.weights, want.weights);
  EXPECT_EQ(got.dense, want.dense);
  EXPECT_EQ(got.dense, std::vector<float>({1, 5, 2, 0, 2, 5, 2, 1, 3, 6, 1, 0}));
}

TEST(ContextColumnsTest, TimesOfAHistoryAreTheContextsToo) {
  Manifest manifest = TestManifest();
  manifest.sequences[0].times = true;
  manifest.tables[1].layout = {1, 3, DType::kKeys};
  manifest.dense_features = 6;
  manifest.dense_names = {"price", "hour", "liked_taken", "liked_has", "gap0", "gap1"};
  const MadeColumns made = MadeColumns::Resolve(manifest).value();
  const ContextColumns context = ContextColumns::Resolve(manifest, made, nullptr, kContext).value();
  EXPECT_EQ(context.is_context_dense(), std::vector<bool>({false, true, true, false, true, true}));
}

TEST(ContextColumnsTest, ASequenceOfCandidatesIsLookedUpForEach) {
  Manifest manifest = TestManifest();
  manifest.sequences[0].user = "cand";
  manifest.sequences[0].item = "user";
  const MadeColumns made = MadeColumns::Resolve(manifest).value();
  const ContextColumns context = ContextColumns::Resolve(manifest, made, nullptr, kContext).value();
  EXPECT_FALSE(context.is_context()[6]);
  WholeRequest whole;
  const std::vector<int64_t> user_keys = {1, 10};
  const std::vector<uint32_t> user_offsets = {0, 1, 2};
  const std::vector<int64_t> keys = {100, 101};
  const std::vector<uint32_t> offsets = {0, 1, 1, 2, 2};
  const std::vector<uint32_t> context_of = {0, 0};
  ASSERT_TRUE(
      context.Complete(made, {user_keys, user_offsets, {}}, {keys, offsets, {}}, context_of, &whole)
          .ok());
  context.CompleteDense(std::vector<float>{5}, std::vector<float>{1, 2}, &whole);
  EXPECT_EQ(made.UsersOf(made.sequences()[0], whole), std::vector<int64_t>({100, 101}));
  made.PutItems(made.sequences()[0], std::vector<int64_t>{3, kNoKey, 0, 4, 1, 0}, &whole);
  EXPECT_EQ(whole.dense, std::vector<float>({1, 5, 1, 0, 2, 5, 2, 1}));
  EXPECT_EQ(whole.keys[made.PlaceOf(whole, 1, 6)], 3);
  EXPECT_EQ(whole.keys[made.PlaceOf(whole, 2, 7)], 1);
}

TEST(ContextColumnsTest, ABagOfOtherThanOneKeyIsNamedWithItsSide) {
  const Columns columns;
  const std::vector<int64_t> one = {1, 10};
  const std::vector<uint32_t> right = {0, 1, 2};
  const std::vector<uint32_t> wrong = {0, 2, 2};
  const std::vector<uint32_t> context_of = {0};
  WholeRequest whole;
  const auto refusal = [&](const std::vector<uint32_t>& users, const std::vector<uint32_t>& cands) {
    return columns.context
        .Complete(columns.made, {one, users, {}}, {one, cands, {}}, context_of, &whole)
        .message();
  };
  EXPECT_NE(refusal(wrong, right).find("feature user of context 0 has 2 keys"), std::string::npos);
  EXPECT_NE(refusal(right, wrong).find("feature cand of sample 0 has 2 keys"), std::string::npos);
  EXPECT_EQ(refusal(right, right), "");
}

TEST(ContextColumnsTest, ANameThatNoRequestCarriesIsRefused) {
  const Manifest manifest = TestManifest();
  EXPECT_FALSE(
      ContextColumns::Resolve(manifest, MadeColumns::Resolve(manifest).value(), nullptr, {})
          .value()
          .any());
  EXPECT_NE(RefusalOf({"user", "who"}, manifest).find("\"who\", which is no feature"),
            std::string::npos);
  EXPECT_NE(RefusalOf({"user", "where"}, manifest).find("\"where\", which nodes make"),
            std::string::npos);
  EXPECT_NE(RefusalOf({"hour"}, manifest).find("no feature: one at least"), std::string::npos);
  EXPECT_NE(RefusalOf({"user", "cand", "place", "tags"}, manifest).find("a candidate's"),
            std::string::npos);
}

}  // namespace
}  // namespace embertide
