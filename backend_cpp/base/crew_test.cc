// Work is done once a part, whoever does it, and a crew can be used again and again.
#include "base/crew.h"

#include <gtest/gtest.h>

#include <array>

namespace embertide {
namespace {

TEST(CrewTest, EveryPartIsDoneOnceEachTime) {
  Crew crew(4);
  ASSERT_EQ(crew.size(), 4U);
  std::array<uint64_t, 4> done{};
  std::array<uint64_t, 4> want{};
  for (uint32_t round = 0; round < 2000; ++round) {
    const uint32_t parts = 1 + round % 4;
    crew.Run(parts, [&](uint32_t part) { done[part] += round; });
    for (uint32_t part = 0; part < parts; ++part) want[part] += round;
    ASSERT_EQ(done, want);
  }
}

TEST(CrewTest, ACrewOfOneIsTheCaller) {
  Crew crew(1);
  const std::thread::id caller = std::this_thread::get_id();
  std::thread::id worker;
  crew.Run(1, [&](uint32_t) { worker = std::this_thread::get_id(); });
  EXPECT_EQ(worker, caller);
}

}  // namespace
}  // namespace embertide
