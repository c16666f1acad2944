// VersionGate: what ordinary requests may see, and what the window must not lose.
#include "node/version_gate.h"

#include <gtest/gtest.h>

namespace embertide {
namespace {

using std::chrono::milliseconds;

class VersionGateTest : public ::testing::Test {
 protected:
  static Promotion Record(uint64_t promoted, std::vector<Promotion::Range> withdrawn = {}) {
    Promotion record;
    record.revision = 1;
    record.promoted = promoted;
    record.withdrawn = std::move(withdrawn);
    return record;
  }
  // False: held back.
  bool Take(VersionGate* gate, uint64_t number) const {
    if (!gate->MayTake(number)) return false;
    gate->BeginCommit(number, now_);
    gate->EndCommit();
    return true;
  }

  VersionGate::Time now_;
};

TEST_F(VersionGateTest, ACandidateIsNotServedBeforeItIsPromoted) {
  VersionGate gate(Record(0), 8, milliseconds(0));
  ASSERT_TRUE(Take(&gate, 1));
  ASSERT_TRUE(Take(&gate, 2));
  EXPECT_EQ(gate.served(), 1U);
  EXPECT_EQ(gate.stats().candidate, 2U);
  gate.SetRecord(Record(2));
  EXPECT_EQ(gate.served(), 2U);
  EXPECT_EQ(gate.stats().candidate, 0U);
  EXPECT_EQ(gate.stats().unguarded, 0U);
}

TEST_F(VersionGateTest, VersionsThatWouldPushTheServedOneOutWaitForADecision) {
  constexpr uint32_t kWindow = 4;
  VersionGate gate(Record(1), kWindow, milliseconds(0));
  for (uint64_t number = 1; number <= kWindow; ++number) ASSERT_TRUE(Take(&gate, number));
  EXPECT_FALSE(Take(&gate, 5));
  EXPECT_TRUE(gate.stats().holding);
  EXPECT_EQ(gate.served(), 1U);
  gate.SetRecord(Record(3));
  EXPECT_TRUE(Take(&gate, 5));
  EXPECT_FALSE(gate.stats().holding);
  EXPECT_EQ(gate.served(), 3U);
}

TEST_F(VersionGateTest, AWithdrawnVersionIsPassedOver) {
  VersionGate gate(Record(1), 8, milliseconds(0));
  for (uint64_t number = 1; number <= 4; ++number) ASSERT_TRUE(Take(&gate, number));
  gate.SetRecord(Record(1, {{2, 2}}));
  EXPECT_EQ(gate.served(), 1U);
  gate.SetRecord(Record(4, {{4, 4}, {2, 2}}));
  EXPECT_EQ(gate.served(), 3U);
}

TEST_F(VersionGateTest, TheServedVersionNeverFalls) {
  VersionGate gate(Record(3), 8, milliseconds(0));
  for (uint64_t number = 1; number <= 3; ++number) ASSERT_TRUE(Take(&gate, number));
  gate.SetRecord(Record(4, {{2, 3}}));  // a rollback: version 4 is on its way
  EXPECT_EQ(gate.served(), 3U);
  ASSERT_TRUE(Take(&gate, 4));
  EXPECT_EQ(gate.served(), 4U);
}

TEST_F(VersionGateTest, ACandidateThatNobodyDecidesOnIsServedAfterTheTimeout) {
  VersionGate gate(Record(1), 4, milliseconds(1000));
  for (uint64_t number = 1; number <= 4; ++number) {
    ASSERT_TRUE(Take(&gate, number));
    now_ += milliseconds(100);
  }
  now_ += milliseconds(700);  // version 2 waits for 1000 ms
  gate.Tick(now_);
  EXPECT_EQ(gate.served(), 2U);
  EXPECT_EQ(gate.stats().unguarded, 1U);
  EXPECT_TRUE(Take(&gate, 5));
}

TEST_F(VersionGateTest, NoTimeoutServesWhatComesAfterAWithdrawnVersion) {
  VersionGate gate(Record(1, {{2, 2}}), 8, milliseconds(1));
  for (uint64_t number = 1; number <= 4; ++number) ASSERT_TRUE(Take(&gate, number));
  now_ += milliseconds(1000);
  gate.Tick(now_);
  EXPECT_EQ(gate.served(), 1U);
  gate.SetRecord(Record(4, {{2, 2}}));
  EXPECT_EQ(gate.served(), 4U);
}

TEST_F(VersionGateTest, AStartPastThePromotedVersionIsCounted) {
  VersionGate gate(Record(3), 8, milliseconds(0));
  ASSERT_TRUE(Take(&gate, 7));
  EXPECT_EQ(gate.served(), 7U);
  EXPECT_EQ(gate.stats().unguarded, 1U);
}

TEST_F(VersionGateTest, AVersionThatMayBeSeenIsKnownBeforeItIsCommitted) {
  VersionGate gate(Record(9), 2, milliseconds(0));
  ASSERT_TRUE(Take(&gate, 1));
  ASSERT_TRUE(gate.MayTake(2));
  gate.BeginCommit(2, now_);
  EXPECT_EQ(gate.served(), 1U);
  EXPECT_EQ(gate.next(), 2U);
}

}  // namespace
}  // namespace embertide
