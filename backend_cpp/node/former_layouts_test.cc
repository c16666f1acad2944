// Requests of a former layout: brought by names into the columns of today.
#include "node/former_layouts.h"

#include <gtest/gtest.h>

#include <cmath>

namespace embertide {
namespace {

// Features a, b and new, a cross of a and new between them, and the layout before `new` came.
Manifest TestManifest() {
  Manifest manifest;
  manifest.features = {{"b", "item", "sum"},
                       {"both", "pair", "sum", false, {"a", "new"}},
                       {"new", "item", "sum"},
                       {"a", "item", "sum"}};
  manifest.dense_features = 2;
  manifest.dense_names = {"y", "z"};
  manifest.former = {{{"a", "gone", "b"}, {"x", "y"}}, {{"gone"}, {}}};
  return manifest;
}

struct Made {
  explicit Made(const Manifest& manifest)
      : columns(MadeColumns::Resolve(manifest).value()),
        layouts(FormerLayouts::Resolve(manifest, columns).value()) {}
  MadeColumns columns;
  FormerLayouts layouts;
};

TEST(FormerLayoutsTest, ColumnsAreMatchedByName) {
  const Made made(TestManifest());
  ASSERT_EQ(made.layouts.layouts().size(), 2U);
  BroughtRequest brought;
  brought.offsets = {7};  // of the request before
  const std::vector<int64_t> keys = {1, 2, 3, 4, 5, 6};
  const FormerLayout& layout = made.layouts.layouts()[0];
  made.layouts.BringKeys(layout, keys, {}, {}, &brought);
  EXPECT_EQ(brought.keys, std::vector<int64_t>({3, kNoKey, 1, 6, kNoKey, 4}));
  EXPECT_TRUE(brought.offsets.empty());
  EXPECT_TRUE(brought.weights.empty());
  const std::vector<float> dense = {1, 2, 3, 4};
  FormerLayouts::BringDense(layout, dense, 2, NAN, &brought);
  ASSERT_EQ(brought.dense.size(), 4U);
  EXPECT_EQ(brought.dense[0], 2);
  EXPECT_TRUE(std::isnan(brought.dense[1]));
  EXPECT_EQ(brought.dense[2], 4);
}

TEST(FormerLayoutsTest, BagsAndWeightsGoAlongAndANewOneIsEmpty) {
  Manifest manifest = TestManifest();
  manifest.features.push_back({"tags", "item", "sum"});
  const Made made(manifest);
  BroughtRequest brought;
  const std::vector<int64_t> keys = {1, 9, 9, 3, 3};
  const std::vector<uint32_t> offsets = {0, 1, 3, 5};
  const std::vector<float> weights = {0.5F, 7, 7, 2, 3};
  made.layouts.BringKeys(made.layouts.layouts()[0], keys, offsets, weights, &brought);
  // The cross is made from `new`, which has to have a key.
  EXPECT_EQ(brought.keys, std::vector<int64_t>({3, 3, kNoKey, 1}));
  EXPECT_EQ(brought.offsets, std::vector<uint32_t>({0, 2, 3, 4, 4}));
  EXPECT_EQ(brought.weights, std::vector<float>({2, 3, 1, 0.5F}));
}

TEST(FormerLayoutsTest, AManifestGoesThroughJsonAndAWrongOneIsRefused) {
  Manifest manifest = TestManifest();
  const auto reread = [&] { return ManifestFromJson(ManifestToJson(manifest)); };
  Result<Manifest> read = reread();
  ASSERT_TRUE(read.ok()) << read.status().message();
  ASSERT_EQ(read->former.size(), 2U);
  EXPECT_EQ(read->former[0].keys, manifest.former[0].keys);
  EXPECT_EQ(read->former[0].dense, manifest.former[0].dense);
  EXPECT_EQ(read->dense_names, manifest.dense_names);
  const auto expect_refused = [&](const std::string& why) {
    const Result<Manifest> wrong = reread();
    ASSERT_FALSE(wrong.ok());
    EXPECT_NE(wrong.status().message().find(why), std::string::npos) << wrong.status().message();
  };
  manifest.former[0].keys = {"a", "b", "a"};
  expect_refused("has column \"a\" twice");
  manifest.former[0].keys.clear();
  expect_refused("no column of KEYS");
  manifest.former.assign(kMaxFormerLayouts + 1, {{"a"}, {}});
  expect_refused("8 at most");
  manifest.former.resize(1);
  manifest.dense_names = {"y"};
  expect_refused("dense_names has 1 names");
  manifest.dense_names.clear();
  const Result<FormerLayouts> unnamed =
      FormerLayouts::Resolve(manifest, MadeColumns::Resolve(manifest).value());
  EXPECT_EQ(unnamed.status().code(), Code::kCorrupt);
}

}  // namespace
}  // namespace embertide
