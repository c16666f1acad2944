// A join is slow where it would cost others: by bytes, by time, and by resting.
#include "node/join_pace.h"

#include <gtest/gtest.h>

namespace embertide {
namespace {

using std::chrono::milliseconds;

constexpr JoinPace::Clock::time_point kBegin{std::chrono::hours(1)};

TEST(JoinPaceTest, SmallBucketsAreAddedManyAtOnce) {
  JoinPace pace;
  EXPECT_EQ(pace.buckets(), 1U);
  for (const size_t expected : {2, 4, 8, 16, 32, 64, 64}) {
    pace.Note(pace.buckets(), pace.buckets() * 1000, milliseconds(1), kBegin);
    EXPECT_EQ(pace.buckets(), expected);
  }
}

TEST(JoinPaceTest, AStepHasAtMostItsBytesOrOneBucket) {
  constexpr uint64_t kStepBytes = 1 << 16;
  JoinPace pace(kStepBytes);
  const uint64_t each = kStepBytes / 5;
  for (int step = 0; step < 8; ++step) {
    EXPECT_LE(pace.buckets() * each, kStepBytes);
    pace.Note(pace.buckets(), pace.buckets() * each, milliseconds(1), kBegin);
  }
  EXPECT_EQ(pace.buckets(), 5U);
  pace.Note(5, 5 * 2 * kStepBytes, milliseconds(20), kBegin);
  EXPECT_EQ(pace.buckets(), 1U);
}

TEST(JoinPaceTest, AStepThatTookLongIsFollowedByASmallerOne) {
  JoinPace pace;
  pace.Note(40, 40, JoinPace::kStepTime + milliseconds(1), kBegin);
  EXPECT_EQ(pace.buckets(), 20U);
  pace.Note(20, 20, JoinPace::kStepTime / 2, kBegin);
  EXPECT_EQ(pace.buckets(), 20U);
  pace.Note(1, 1, milliseconds(500), kBegin);
  EXPECT_EQ(pace.buckets(), 1U);
}

TEST(JoinPaceTest, ItRestsAsLongAsAStepTook) {
  JoinPace usual;
  EXPECT_FALSE(usual.Rests(kBegin));
  usual.Note(1, 1, milliseconds(40), kBegin);
  EXPECT_TRUE(usual.Rests(kBegin + milliseconds(39)));
  EXPECT_FALSE(usual.Rests(kBegin + milliseconds(40)));
  JoinPace pace(1, 9);
  pace.Note(0, 0, milliseconds(5), kBegin);
  EXPECT_TRUE(pace.Rests(kBegin + milliseconds(44))) << "a step that failed read files, too";
  JoinPace restless(1, 0);
  restless.Note(1, 1, milliseconds(40), kBegin);
  EXPECT_FALSE(restless.Rests(kBegin));
}

}  // namespace
}  // namespace embertide
