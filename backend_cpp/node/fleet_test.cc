// Nodes that share a model: what they tell the control plane, and what they ask each other.
#include <gtest/gtest.h>

#include "node/test_fleet.h"

namespace embertide {
namespace {

TestModel::Rows ManyRows(uint64_t keys, float value) {
  TestModel::Rows rows;
  for (uint64_t key = 0; key < keys; ++key) rows[key] = value + static_cast<float>(key);
  return rows;
}

TEST(FleetNodeTest, BeatsTellTheP99OfWhatWasAnsweredInTheLastSecond) {
  TestFleet fleet(1);
  TestControl control;
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  fleet.Write(fleet.MakePlan(1));
  NodeOptions options = fleet.Options(0);
  options.control = control.address();
  fleet.Start(0, options);
  const auto last = [&] {
    const auto beats = control.beats();
    return beats.empty() ? ~0ULL : beats.back().p99_us();
  };
  ASSERT_TRUE(Await([&] { return last() == 0; })) << "nothing was answered yet";
  v1::ReadResponse response;
  EXPECT_TRUE(Await([&] {
    EXPECT_TRUE(fleet.Read(0, {1, 2, 3}, &response).ok());
    return last() > 0;
  }));
  EXPECT_LT(last(), 1'000'000U);
  // What Triton answers comes by this way.
  EXPECT_TRUE(Await([&] {
    fleet.node(0).NoteLatency(std::chrono::milliseconds(300), 1);
    return last() >= 300'000;
  }));
  EXPECT_TRUE(Await([&] { return last() == 0; })) << "a second without requests";
}

}  // namespace
}  // namespace embertide
