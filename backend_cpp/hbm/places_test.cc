// Ways, slots and pages: random rows of all sizes against a map, every invariant after each batch.
#include "hbm/places.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace embertide {
namespace {

using Answer = HbmPlaces::Answer;

TEST(HbmPlacesTest, RandomRowsEqualAMapAndKeepTheInvariants) {
  constexpr uint32_t kSets = 40;
  HbmPlaces places(kSets, /*pages=*/6);
  std::mt19937 random(1);
  std::map<uint64_t, uint32_t> way_of;  // rows that stand somewhere, ended or not
  std::map<uint32_t, uint64_t> key_in;  // the same, by way
  std::map<uint64_t, uint64_t> until_of;
  uint64_t placed = 0;
  uint64_t deferred = 0;
  for (uint64_t batch = 1; batch < 2000; ++batch) {
    std::vector<uint32_t> emptied;
    // A reader of eight batches ago may still be there.
    places.BeginBatch(batch > 8 ? batch - 8 : 0, &emptied);
    std::map<uint32_t, int> changed;
    const auto take_out = [&] {
      for (const uint32_t way : emptied) {
        ASSERT_EQ(++changed[way], 1) << "a way changed twice in a batch";
        way_of.erase(key_in.at(way));
        key_in.erase(way);
      }
      emptied.clear();
    };
    take_out();
    for (int i = 0; i < 20; ++i) {
      const uint64_t key = random() % 3000;
      // Sizes come in waves, so that pages change their class.
      const uint32_t bytes = batch / 300 % 2 == 0 ? 64 + random() % 200 : 500 + random() % 3000;
      const HbmPlaces::Place place =
          places.Put(1, key, bytes, kHbmOpenEnd, static_cast<uint32_t>(random()), batch, &emptied);
      take_out();
      if (place.answer == Answer::kThere) {
        ASSERT_TRUE(way_of.contains(key) && until_of[key] == kHbmOpenEnd);
      }
      if (place.answer == Answer::kDeferred) ++deferred;
      if (place.answer != Answer::kPlaced) continue;
      ++placed;
      ASSERT_EQ(++changed[place.way], 1) << "a way changed twice in a batch";
      ASSERT_EQ(place.way / kHbmWays, HbmSetOf(HbmHash(1, key), kSets));
      if (key_in.contains(place.way)) way_of.erase(key_in[place.way]);
      way_of[key] = place.way;
      key_in[place.way] = key;
      until_of[key] = kHbmOpenEnd;
    }
    places.EndBatch(batch);
    const uint64_t key = random() % 3000;
    const uint32_t ended = places.End(1, key, batch + 3);
    if (ended != HbmPlaces::kNoWay) until_of[key] = std::min(until_of[key], batch + 3);
    ASSERT_EQ(ended == HbmPlaces::kNoWay, !way_of.contains(key) || until_of[key] < batch + 3);
    ASSERT_EQ(places.rows(), way_of.size());
    for (const auto& [known, way] : way_of) ASSERT_EQ(places.Find(1, known), way);
    const Status integrity = places.CheckIntegrity();
    ASSERT_TRUE(integrity.ok()) << "batch " << batch << ": " << integrity.ToString();
  }
  EXPECT_GT(placed, 5000U);
  EXPECT_GT(deferred, 1000U);
}

TEST(HbmPlacesTest, ASlotIsNotUsedAgainWhileAReaderMayBeAtIt) {
  HbmPlaces places(/*sets=*/1, /*pages=*/1);
  std::vector<uint32_t> emptied;
  places.BeginBatch(0, &emptied);
  // A page has 16 slots of 4 KB.
  for (uint64_t key = 0; key < 16; ++key) {
    ASSERT_EQ(places.Put(0, key, 4000, kHbmOpenEnd, 0, 1, &emptied).answer, Answer::kPlaced);
  }
  places.EndBatch(5);
  places.BeginBatch(6, &emptied);
  ASSERT_EQ(places.Put(0, 99, 4000, kHbmOpenEnd, 0, 1, &emptied).answer, Answer::kDeferred);
  ASSERT_EQ(emptied.size(), 1U);
  places.EndBatch(6);
  for (const uint64_t safe : {5U, 6U}) {  // a reader of epoch 5, or 6, is still there
    emptied.clear();
    places.BeginBatch(safe, &emptied);
    EXPECT_EQ(places.Put(0, 99, 4000, kHbmOpenEnd, ~0U, 1, &emptied).answer, Answer::kDeferred);
    places.EndBatch(7);
  }
  places.BeginBatch(7, &emptied);
  EXPECT_EQ(places.Put(0, 99, 4000, kHbmOpenEnd, 0, 1, &emptied).answer, Answer::kPlaced);
}

TEST(HbmPlacesTest, RowsThatEndedLeaveFirstAndRowsInUseStay) {
  HbmPlaces places(/*sets=*/1, /*pages=*/2);
  std::vector<uint32_t> emptied;
  places.BeginBatch(0, &emptied);
  for (uint64_t key = 0; key < kHbmWays; ++key) {
    ASSERT_EQ(places.Put(0, key, 64, kHbmOpenEnd, 0, 1, &emptied).answer, Answer::kPlaced);
  }
  places.EndBatch(1);
  places.BeginBatch(2, &emptied);
  EXPECT_EQ(places.Put(0, 100, 64, kHbmOpenEnd, ~0U, 1, &emptied).answer, Answer::kInUse);
  const uint32_t ended = places.End(0, 7, 3);
  ASSERT_EQ(places.Find(0, 7), ended);
  EXPECT_EQ(places.End(0, 7, 4), HbmPlaces::kNoWay) << "the earlier end holds";
  // A pin below 3 may still be there: the row is no better than others, which are all in use.
  EXPECT_EQ(places.Put(0, 100, 64, kHbmOpenEnd, ~0U, 2, &emptied).answer, Answer::kInUse);
  const HbmPlaces::Place place = places.Put(0, 100, 64, kHbmOpenEnd, ~0U, 3, &emptied);
  EXPECT_EQ(place.answer, Answer::kPlaced);
  EXPECT_EQ(place.way, ended);
  // One that was not asked for goes before those that were.
  const uint32_t idle = places.Find(0, 12);
  EXPECT_EQ(places.Put(0, 101, 64, kHbmOpenEnd, ~(1U << idle), 3, &emptied).way, idle);
  EXPECT_EQ(places.Put(0, 12, 64, kHbmOpenEnd, ~(1U << idle), 3, &emptied).answer, Answer::kInUse)
      << "a way changes once in a batch";
}

TEST(HbmPlacesTest, AClassWithoutPagesGetsOneOfTheLargest) {
  HbmPlaces places(/*sets=*/64, /*pages=*/3);
  std::vector<uint32_t> emptied;
  places.BeginBatch(0, &emptied);
  uint64_t small = 0;
  for (uint64_t key = 0; key < 4000; ++key) {
    if (places.Put(0, key, 128, kHbmOpenEnd, 0, 1, &emptied).answer == Answer::kPlaced) ++small;
  }
  EXPECT_EQ(small, 3U * kHbmPageBytes / 128);
  places.EndBatch(1);
  HbmPlaces::Place place;
  for (uint64_t batch = 2; batch < 6 && place.answer != Answer::kPlaced; ++batch) {
    emptied.clear();
    places.BeginBatch(batch, &emptied);
    place = places.Put(0, 9000, 2000, kHbmOpenEnd, 0, 1, &emptied);
    places.EndBatch(batch);
    ASSERT_TRUE(places.CheckIntegrity().ok()) << places.CheckIntegrity().ToString();
  }
  EXPECT_EQ(place.answer, Answer::kPlaced);
  EXPECT_GE(places.rows(), 2U * kHbmPageBytes / 128) << "one page went, no more";
}

}  // namespace
}  // namespace embertide
