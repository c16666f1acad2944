#include "front/stages.h"

#include <gtest/gtest.h>

#include "triton/stage_names.h"

namespace embertide::front {
namespace {

TEST(Stages, OursAreTakenOutAndACallersStay) {
  BackendStages stages;
  const int64_t ns = 7;
  EXPECT_TRUE(TakeStage(triton::kStageBegan, TRITONSERVER_PARAMETER_INT, &ns, &stages));
  EXPECT_TRUE(TakeStage(triton::kStageNet, TRITONSERVER_PARAMETER_INT, &ns, &stages));
  EXPECT_EQ(stages.began_ns, 7);
  EXPECT_EQ(stages.net_ns, 7);
  EXPECT_EQ(stages.lookup_ns, 0);
  // Whatever begins so, also what a later backend says, and with a type that it should not have.
  EXPECT_TRUE(TakeStage("embertide_stage_later_ns", TRITONSERVER_PARAMETER_INT, &ns, &stages));
  EXPECT_TRUE(TakeStage(triton::kStageLookup, TRITONSERVER_PARAMETER_STRING, "7", &stages));
  EXPECT_EQ(stages.lookup_ns, 0);
  for (const char* name : {"version", "node", "embertide", "stage"}) {
    EXPECT_FALSE(TakeStage(name, TRITONSERVER_PARAMETER_INT, &ns, &stages)) << name;
  }
}

TEST(Stages, AddUpToNoMoreThanTheWhole) {
  const Moments moments{1'000, 3'000, 40'000, 50'000};
  const BackendStages backend{10'000, 4'000, 5'000, 6'000};
  const StageTimes times = TimesOf(moments, backend);
  EXPECT_EQ(times.whole_us, 49);
  EXPECT_EQ(times.us, (std::array<double, 6>{2, 7, 4, 5, 6, 10}));
}

TEST(Stages, OfAnotherBackendAreNotMadeUp) {
  const StageTimes times = TimesOf({1'000, 3'000, 40'000, 50'000}, {});
  EXPECT_EQ(times.us, (std::array<double, 6>{2, -1, -1, -1, -1, 10}));
}

}  // namespace
}  // namespace embertide::front
