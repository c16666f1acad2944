#include "base/json.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace embertide {
namespace {

template <typename T>
std::string Refused(const std::string& text) {
  try {
    static_cast<void>(Json::parse(text).at("n").get<T>());
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(Json, IntegersAreReadAsTheyStand) {
  const Json json =
      Json::parse(R"({"n": 18446744073709551615, "m": -9223372036854775808, "s": [1, 2]})");
  EXPECT_EQ(json.at("n").get<uint64_t>(), ~uint64_t{0});
  EXPECT_EQ(json.at("m").get<int64_t>(), INT64_MIN);
  EXPECT_EQ(json.at("s").get<std::vector<uint16_t>>(), (std::vector<uint16_t>{1, 2}));
}

TEST(Json, WhatIsNoIntegerOrDoesNotFitIsRefusedByItsValue) {
  EXPECT_EQ(Refused<uint32_t>(R"({"n": 4294967296})"),
            "4294967296 is no integer from 0 to 4294967295");
  EXPECT_NE(Refused<uint32_t>(R"({"n": -1})"), "");
  EXPECT_NE(Refused<int64_t>(R"({"n": 18446744073709551615})"), "");
  // As undefined as 1e43 was, had it been converted.
  EXPECT_NE(Refused<uint32_t>(R"({"n": 95231111111111111111111111111111111111133325})"), "");
  EXPECT_NE(Refused<int32_t>(R"({"n": 1.5})"), "");
  EXPECT_NE(Refused<int32_t>(R"({"n": true})"), "");
  EXPECT_NE(Refused<std::vector<int64_t>>(R"({"n": [1, 1e30]})"), "");
}

}  // namespace
}  // namespace embertide
