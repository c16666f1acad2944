// Versions are computed in reduced precision where their measurement and the CPU allow it; changes
// are told.
#include "node/served_reduced.h"

#include <gtest/gtest.h>

#include <vector>

namespace embertide {
namespace {

using Reduced = DenseProgram::Reduced;

const ReducedMeasurement kGood{.type = "int8",
                               .taken = true,
                               .events = 50'000,
                               .auc_loss = 1e-5,
                               .max_error = 2e-3,
                               .why_refused = ""};
const ReducedMeasurement kBad{.type = "int8",
                              .taken = false,
                              .events = 50'000,
                              .auc_loss = 0.002,
                              .max_error = 2e-3,
                              .why_refused = "its AUC is 0.002 lower"};

TEST(ServedReducedTest, EachChangeIsToldOnceAndEachVersionIsCounted) {
  std::vector<std::string> told;
  ServedReduced served("int8", [&](const std::string& line) { told.push_back(line); });
  EXPECT_FALSE(served.is_taken());
  EXPECT_FALSE(served.Take(Reduced::kReady, kBad));
  EXPECT_FALSE(served.Take(Reduced::kReady, std::nullopt));
  EXPECT_TRUE(served.Take(Reduced::kReady, kGood));
  EXPECT_TRUE(served.Take(Reduced::kReady, kGood));
  EXPECT_TRUE(served.is_taken());
  EXPECT_FALSE(served.Take(Reduced::kReady, kBad));
  EXPECT_FALSE(served.is_taken());
  EXPECT_EQ(served.versions(0), 2U);
  EXPECT_EQ(served.versions(1), 3U);
  EXPECT_EQ(served.versions(2), 0U);
  ASSERT_EQ(told.size(), 3U);
  EXPECT_NE(told[0].find("in fp32, as int8 is refused: its AUC is 0.002 lower"), std::string::npos);
  EXPECT_NE(told[1].find("in int8: of 50000 events"), std::string::npos);
}

TEST(ServedReducedTest, AMeasurementInAnotherTypeIsNone) {
  std::string told;
  ServedReduced served("bf16", [&](const std::string& line) { told = line; });
  EXPECT_FALSE(served.Take(Reduced::kReady, kGood));
  EXPECT_NE(told.find("bf16 is refused: it was measured in int8"), std::string::npos);
}

TEST(ServedReducedTest, ATypeOfALaterBuildIsComputedInFp32) {
  std::string told;
  ServedReduced served("fp8", [&](const std::string& line) { told = line; });
  EXPECT_FALSE(served.Take(Reduced::kUnknown, kGood));
  EXPECT_EQ(served.versions(3), 1U);
  EXPECT_NE(told.find("does not know fp8"), std::string::npos);
}

TEST(ServedReducedTest, ACpuWithoutTheInstructionsComputesInFp32) {
  std::string told;
  ServedReduced served("int8", [&](const std::string& line) { told = line; });
  EXPECT_FALSE(served.Take(Reduced::kNoCpu, kGood));
  EXPECT_EQ(served.versions(2), 1U);
  EXPECT_NE(told.find("needs a CPU with AVX512-VNNI"), std::string::npos);
  ServedReduced bf16("bf16", [&](const std::string& line) { told = line; });
  EXPECT_FALSE(bf16.Take(Reduced::kNoCpu, kGood));
  EXPECT_NE(told.find("needs a CPU with AVX512-BF16"), std::string::npos);
}

}  // namespace
}  // namespace embertide
