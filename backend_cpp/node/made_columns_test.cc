// Columns that a node makes: equal to those that a client would send, and refused by name.
#include "node/made_columns.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>

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
  EXPECT_NE(refusal({"cand", "both"}).find("\"both\" is made by nodes, and others are made"),
            std::string::npos);
  EXPECT_NE(refusal({"cand"}).find("is crossed of one feature"), std::string::npos);
}

// The same, with a sequence of two places whose columns stand apart, and a dense feature.
Manifest TestSequences() {
  Manifest manifest = TestManifest();
  manifest.features.insert(manifest.features.begin() + 1, {"liked1", "item", "sum"});
  manifest.features.push_back({"user", "user", "sum"});
  manifest.features.push_back({"liked0", "item", "sum"});
  manifest.tables.resize(2);
  manifest.tables[0].name = "item";
  manifest.tables[1].name = "liked_of_user";
  manifest.tables[1].layout = {3, 1, DType::kKeys};  // room for one more than there are places
  manifest.dense_features = 3;
  manifest.sequences = {{"liked", "user", "cand", "liked_of_user", {"liked0", "liked1"}, 1}};
  return manifest;
}

TEST(MadeColumnsTest, ASequenceIsPutIntoKeysAndDense) {
  const Result<MadeColumns> resolved = MadeColumns::Resolve(TestSequences());
  ASSERT_TRUE(resolved.ok()) << resolved.status().ToString();
  const MadeColumns& made = resolved.value();
  EXPECT_EQ(made.own_columns(), 3U);
  EXPECT_EQ(made.own_dense(), 1U);
  ASSERT_EQ(made.sequences().size(), 1U);
  EXPECT_EQ(made.sequences()[0].table, 1U);
  WholeRequest whole;
  const std::vector<int64_t> keys = {1, 2, 50, /**/ 3, 4, 60, /**/ 5, 6, 50};
  ASSERT_TRUE(made.Complete(keys, {}, {}, &whole).ok());
  const std::vector<float> dense = {0.5F, 1.5F, 2.5F};
  made.CompleteDense(dense, &whole);
  EXPECT_EQ(made.UsersOf(made.sequences()[0], whole), std::vector<int64_t>({50, 60, 50}));
  const auto want = [&](const std::vector<int64_t>& items) {
    std::vector<int64_t> wanted;
    for (size_t s = 0; s < 3; ++s) {
      const int64_t* own = &keys[3 * s];
      wanted.insert(wanted.end(), {own[0], items[2 * s + 1], ByHand(own[1], own[0]), own[1], own[2],
                                   items[2 * s]});
    }
    return wanted;
  };
  EXPECT_EQ(whole.keys, want(std::vector<int64_t>(6, kNoKey)));
  EXPECT_EQ(whole.dense, std::vector<float>({0.5F, 0, 0, 1.5F, 0, 0, 2.5F, 0, 0}));
  // Another version may follow: what the first one gave is overwritten.
  for (const std::vector<int64_t>& rows :
       {std::vector<int64_t>{9, 8, 7, /**/ 4, kNoKey, kNoKey, /**/ kNoKey, kNoKey, kNoKey},
        std::vector<int64_t>{kNoKey, kNoKey, kNoKey, /**/ 3, 4, 5, /**/ 6, kNoKey, kNoKey}}) {
    made.PutItems(made.sequences()[0], rows, &whole);
    EXPECT_EQ(whole.keys, want({rows[0], rows[1], rows[3], rows[4], rows[6], rows[7]}));
    EXPECT_EQ(whole.dense, rows[0] == 9 ? std::vector<float>({0.5F, 2, 0, 1.5F, 1, 1, 2.5F, 0, 0})
                                        : std::vector<float>({0.5F, 0, 0, 1.5F, 2, 1, 2.5F, 1, 1}));
  }
}

// Two fp32 as one key, the first in its low half.
int64_t Pair(float first, float second) {
  return static_cast<int64_t>(uint64_t{std::bit_cast<uint32_t>(second)} << 32 |
                              std::bit_cast<uint32_t>(first));
}

TEST(MadeColumnsTest, ASequenceWithTimesSaysHowLongBeforeTheNewestItemsCame) {
  Manifest manifest = TestSequences();
  manifest.features.push_back({"liked2", "item", "sum"});
  manifest.sequences[0].columns.push_back("liked2");
  manifest.sequences[0].times = true;
  manifest.tables[1].layout = {2, 3, DType::kKeys};  // chunks of two items and their times
  manifest.dense_features = 6;
  const Result<MadeColumns> resolved = MadeColumns::Resolve(manifest);
  ASSERT_TRUE(resolved.ok()) << resolved.status().ToString();
  const MadeColumns& made = resolved.value();
  EXPECT_EQ(made.own_dense(), 1U);
  EXPECT_EQ(made.sequences()[0].dense_columns(), 5U);
  WholeRequest whole;
  const std::vector<int64_t> keys = {1, 2, 50, /**/ 3, 4, 60, /**/ 5, 6, 70};
  ASSERT_TRUE(made.Complete(keys, {}, {}, &whole).ok());
  made.CompleteDense(std::vector<float>{0.5F, 1.5F, 2.5F}, &whole);
  // Dead chunks read as kNoKey, whose halves are 0 and -0.
  const std::vector<int64_t> rows = {
      9,      8,      Pair(0, 2.5F), 7,      kNoKey, Pair(-3, 0), /**/
      4,      kNoKey, Pair(0, 0),    kNoKey, kNoKey, kNoKey,      /**/
      kNoKey, kNoKey, kNoKey,        kNoKey, kNoKey, kNoKey};
  made.PutItems(made.sequences()[0], rows, &whole);
  const std::vector<float> wanted = {0.5F,      3, 0, 0, 2.5F, -3, /**/ 1.5F, 1, 1, 0, 0, 0,
                                     /**/ 2.5F, 0, 0, 0, 0,    0};
  EXPECT_EQ(whole.dense, wanted);
  EXPECT_TRUE(std::ranges::none_of(whole.dense, [](float x) { return x == 0 && std::signbit(x); }));
  const size_t features = manifest.features.size();
  EXPECT_EQ(whole.keys[features - 1], 7);
  EXPECT_EQ(whole.keys[1], 8);

  manifest.tables[1].layout.chunk_dim = 4;
  EXPECT_NE(MadeColumns::Resolve(manifest).status().message().find("no multiple of 3"),
            std::string::npos);
  manifest.tables[1].layout = {1, 3, DType::kKeys};
  EXPECT_NE(MadeColumns::Resolve(manifest).status().message().find("have 2 keys"),
            std::string::npos);
  manifest.tables[1].layout = {2, 3, DType::kKeys};
  manifest.dense_features = 5;
  EXPECT_NE(MadeColumns::Resolve(manifest).status().message().find("column 5 of DENSE"),
            std::string::npos);
}

TEST(MadeColumnsTest, AJaggedRequestGetsOneKeyInEachPlaceOfASequence) {
  Manifest manifest = TestSequences();
  manifest.features.insert(manifest.features.begin(), {"tags", "tag", "sum"});
  const Result<MadeColumns> resolved = MadeColumns::Resolve(manifest);
  const MadeColumns& made = resolved.value();
  WholeRequest whole;
  const std::vector<int64_t> keys = {70, 71, 1, 2, 50, /**/ 3, 4, 60};
  const std::vector<uint32_t> offsets = {0, 2, 3, 4, 5, /**/ 5, 6, 7, 8};
  ASSERT_TRUE(made.Complete(keys, offsets, {}, &whole).ok());
  made.PutItems(made.sequences()[0], std::vector<int64_t>{9, 8, 7, 6, kNoKey, kNoKey}, &whole);
  EXPECT_EQ(whole.keys, std::vector<int64_t>({70, 71, 1, 8, ByHand(2, 1), 2, 50, 9, /**/ 3, kNoKey,
                                              ByHand(4, 3), 4, 60, 6}));
  EXPECT_EQ(whole.offsets,
            std::vector<uint32_t>({0, 2, 3, 4, 5, 6, 7, 8, /**/ 8, 9, 10, 11, 12, 13, 14}));
  EXPECT_TRUE(whole.dense.empty());
  const std::vector<uint32_t> without_user = {0, 2, 3, 4, 4, /**/ 5, 6, 7, 8};
  EXPECT_NE(made.Complete(keys, without_user, {}, &whole)
                .message()
                .find("feature user of sample 0 has 0 keys"),
            std::string::npos);
}

TEST(MadeColumnsTest, ASequenceThatTheManifestDescribesWronglyIsRefused) {
  const auto refusal = [](const auto& change) {
    Manifest manifest = TestSequences();
    change(&manifest.sequences[0], &manifest);
    return MadeColumns::Resolve(manifest).status().message();
  };
  using S = SequenceInfo;
  using M = Manifest;
  const auto has = [&](const auto& change, const char* text) {
    const std::string message = refusal(change);
    EXPECT_NE(message.find(text), std::string::npos) << message;
  };
  has([](S* s, M*) { s->table = "item"; }, "which is no table of keys");
  has([](S* s, M*) { s->table = "who"; }, "which is no table of keys");
  has([](S* s, M*) { s->user = "who"; }, "names feature \"who\"");
  has([](S* s, M*) { s->columns[0] = "who"; }, "has column \"who\"");
  has([](S* s, M*) { s->columns[0] = "liked1"; }, "stands twice");
  has([](S* s, M*) { s->columns.clear(); }, "has 0 columns");
  has([](S*, M* m) { m->tables[1].layout.chunks = 1; }, "have 1 keys");
  has([](S* s, M*) { s->item = "liked1"; }, "others are made from it");
  has([](S* s, M*) { s->dense = 2; }, "column 3 of DENSE, of which there are 3");
  has([](S* s, M*) { s->dense = ~0U; }, "column 4294967295 of DENSE");
  has([](S* s, M*) { s->dense = 0; }, "column 0 of DENSE is a sequence's");
  has([](S* s, M* m) { m->sequences.push_back(*s); }, "stands twice");
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
