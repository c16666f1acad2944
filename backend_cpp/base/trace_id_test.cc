#include "base/trace_id.h"

#include <gtest/gtest.h>

#include <tuple>

namespace embertide {
namespace {

constexpr const char* kWhole = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
constexpr const char* kId = "4bf92f3577b34da6a3ce929d0e0e4736";

TEST(TraceId, IsThatOfATraceparent) {
  EXPECT_EQ(TraceIdOf(kWhole), kId);
  // A later version, with more.
  EXPECT_EQ(TraceIdOf("01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more"), kId);
}

TEST(TraceId, ComesWithTheCallersSpanAndFlags) {
  const std::optional<Traceparent> given = ParseTraceparent(kWhole);
  ASSERT_TRUE(given);
  EXPECT_EQ(given->trace_id, kId);
  EXPECT_EQ(given->parent_id, "00f067aa0ba902b7");
  EXPECT_EQ(given->flags, 1);
  EXPECT_TRUE(given->sampled());
  std::string text = kWhole;
  for (const auto& [flags, number, sampled] :
       {std::tuple("00", 0x00, false), std::tuple("02", 0x02, false), std::tuple("03", 0x03, true),
        std::tuple("fe", 0xfe, false), std::tuple("ff", 0xff, true)}) {
    text.replace(text.size() - 2, 2, flags);
    const std::optional<Traceparent> flagged = ParseTraceparent(text);
    ASSERT_TRUE(flagged) << flags;
    EXPECT_EQ(flagged->flags, number);
    EXPECT_EQ(flagged->sampled(), sampled) << flags;
  }
}

TEST(TraceId, IsThirtyTwoDigitsOfLowercaseHex) {
  EXPECT_TRUE(IsTraceId(kId));
  for (const std::string& odd :
       {std::string(), std::string(31, '1'), std::string(33, '1'), std::string(32, '0'),
        std::string(32, 'F'), std::string(32, 'g')}) {
    EXPECT_FALSE(IsTraceId(odd)) << odd;
  }
}

TEST(TraceId, IsEmptyForAllElse) {
  const std::string whole = kWhole;
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_EQ(TraceIdOf(whole.substr(0, length)), "") << length;
    EXPECT_FALSE(ParseTraceparent(whole.substr(0, length))) << length;
  }
  for (size_t at = 0; at < whole.size(); ++at) {
    for (const char odd : {'\0', '\n', '\x1b', '<', 'G', 'A', '\xff'}) {
      std::string text = whole;
      text[at] = odd;
      EXPECT_EQ(TraceIdOf(text), "") << at << " " << static_cast<int>(odd);
    }
  }
  EXPECT_EQ(TraceIdOf(whole + "-more"), "");
  EXPECT_EQ(TraceIdOf("01" + whole.substr(2) + "more"), "");
  EXPECT_EQ(TraceIdOf("ff" + whole.substr(2)), "");
  EXPECT_EQ(TraceIdOf("00-00000000000000000000000000000000-00f067aa0ba902b7-01"), "");
  EXPECT_EQ(TraceIdOf("00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01"), "");
  EXPECT_EQ(TraceIdOf(std::string(1 << 20, 'a')), "");
}

}  // namespace
}  // namespace embertide
