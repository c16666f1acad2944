// Versions are computed in bf16 where their measurement and the CPU allow it; changes are told.
#include "node/served_bf16.h"

#include <gtest/gtest.h>

#include <vector>

namespace embertide {
namespace {

using Bf16 = DenseProgram::Bf16;

const Bf16Measurement kGood{
    .taken = true, .events = 50'000, .auc_loss = 1e-5, .max_error = 2e-3, .why_refused = ""};
const Bf16Measurement kBad{.taken = false,
                           .events = 50'000,
                           .auc_loss = 0.002,
                           .max_error = 2e-3,
                           .why_refused = "its AUC is 0.002 lower"};

TEST(ServedBf16Test, EachChangeIsToldOnceAndEachVersionIsCounted) {
  std::vector<std::string> told;
  ServedBf16 served([&](const std::string& line) { told.push_back(line); });
  EXPECT_FALSE(served.is_taken());
  EXPECT_FALSE(served.Take(Bf16::kReady, kBad));
  EXPECT_FALSE(served.Take(Bf16::kReady, std::nullopt));
  EXPECT_TRUE(served.Take(Bf16::kReady, kGood));
  EXPECT_TRUE(served.Take(Bf16::kReady, kGood));
  EXPECT_TRUE(served.is_taken());
  EXPECT_FALSE(served.Take(Bf16::kReady, kBad));
  EXPECT_FALSE(served.is_taken());
  EXPECT_EQ(served.versions(0), 2U);
  EXPECT_EQ(served.versions(1), 3U);
  EXPECT_EQ(served.versions(2), 0U);
  ASSERT_EQ(told.size(), 3U);
  EXPECT_NE(told[0].find("in fp32, as bf16 is refused: its AUC is 0.002 lower"), std::string::npos);
  EXPECT_NE(told[1].find("in bf16: of 50000 events"), std::string::npos);
}

TEST(ServedBf16Test, ACpuWithoutTheInstructionsComputesInFp32) {
  std::string told;
  ServedBf16 served([&](const std::string& line) { told = line; });
  EXPECT_FALSE(served.Take(Bf16::kNoCpu, kGood));
  EXPECT_EQ(served.versions(2), 1U);
  EXPECT_NE(told.find("needs a CPU with AVX512-BF16"), std::string::npos);
}

}  // namespace
}  // namespace embertide
