#include "front/callers.h"

#include <gtest/gtest.h>

namespace embertide::front {
namespace {

TEST(CallersTest, OneCallersCallsLeaveRoomForTheOthers) {
  Callers callers({.calls = 2, .bytes = 100});
  Callers::Caller* const first = callers.Enter("a");
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(callers.Enter("a"), first);
  EXPECT_EQ(callers.Enter("a"), nullptr);
  Callers::Caller* const other = callers.Enter("b");
  ASSERT_NE(other, nullptr);
  EXPECT_NE(other, first);
  callers.Leave(first);
  EXPECT_EQ(callers.Enter("a"), first);  // a place was given back, and the refusal took none
  EXPECT_EQ(callers.Enter("a"), nullptr);
}

TEST(CallersTest, BytesAreThoseOfAllCallsOfACaller) {
  Callers callers({.calls = 2, .bytes = 100});
  Callers::Caller* const caller = callers.Enter("a");
  ASSERT_EQ(callers.Enter("a"), caller);
  EXPECT_TRUE(caller->bytes.Take(60));
  EXPECT_FALSE(caller->bytes.Take(41));
  EXPECT_TRUE(callers.Enter("b")->bytes.Take(100));
  caller->bytes.Give(60);
  callers.Leave(caller);
  callers.Leave(caller);
  EXPECT_EQ(callers.known(), 1U);  // b: who has no call is forgotten
  EXPECT_TRUE(callers.Enter("a")->bytes.Take(100));
}

}  // namespace
}  // namespace embertide::front
