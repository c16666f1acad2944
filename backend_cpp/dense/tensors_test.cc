// Safetensors files are read exactly, and corrupt ones are refused with the field named.
#include <gtest/gtest.h>

#include <cstring>

#include "embertide/dense.h"

namespace embertide {
namespace {

std::vector<std::byte> File(const std::string& header, const std::vector<float>& data) {
  std::vector<std::byte> bytes(8 + header.size() + data.size() * sizeof(float));
  const uint64_t length = header.size();
  std::memcpy(bytes.data(), &length, 8);
  std::memcpy(bytes.data() + 8, header.data(), header.size());
  std::memcpy(bytes.data() + 8 + header.size(), data.data(), data.size() * sizeof(float));
  return bytes;
}

TEST(TensorsTest, NamesShapesAndValuesAreReadAsTheyStand) {
  const auto tensors = ParseTensors(
      File(R"({"__metadata__":{"a":"b"},"w":{"dtype":"F32","shape":[1,2],"data_offsets":[4,12]},)"
           R"("b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
           {7.0F, 1.5F, -2.0F}));
  ASSERT_TRUE(tensors.ok()) << tensors.status().ToString();
  ASSERT_EQ(tensors.value().size(), 2U);
  EXPECT_EQ(tensors.value()[0].name, "b");
  EXPECT_EQ(tensors.value()[0].values, std::vector<float>{7.0F});
  EXPECT_EQ(tensors.value()[1].shape, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(tensors.value()[1].values, (std::vector<float>{1.5F, -2.0F}));
}

TEST(TensorsTest, WhatReducedPrecisionCostsIsReadFromTheMetadata) {
  const auto none = ParseReduced(File(R"({"__metadata__":{"a":"b"}})", {}));
  ASSERT_TRUE(none.ok()) << none.status().ToString();
  EXPECT_FALSE(none.value().has_value());
  const auto file = [](const std::string& fields) {
    return ParseReduced(File(R"({"__metadata__":{"reduced":"{)" + fields + R"(}"}})", {}));
  };
  const auto found = file(R"(\"type\":\"int8\",\"taken\":false,\"events\":7,\"auc_loss\":0.25,)"
                          R"(\"max_error\":1e-3,\"why\":\"far\")");
  ASSERT_TRUE(found.ok()) << found.status().ToString();
  ASSERT_TRUE(found.value().has_value());
  EXPECT_EQ(found.value()->type, "int8");
  EXPECT_FALSE(found.value()->taken);
  EXPECT_EQ(found.value()->events, 7U);
  EXPECT_EQ(found.value()->auc_loss, 0.25);
  EXPECT_EQ(found.value()->max_error, 1e-3);
  EXPECT_EQ(found.value()->why_refused, "far");
  const auto corrupt = file(R"(\"type\":\"bf16\",\"taken\":true,\"events\":-7)");
  ASSERT_FALSE(corrupt.ok());
  EXPECT_NE(corrupt.status().ToString().find("-7 is no integer"), std::string::npos)
      << corrupt.status().ToString();
}

TEST(TensorsTest, HarmedFilesAreRefused) {
  const auto message = [](const std::vector<std::byte>& bytes) {
    const auto tensors = ParseTensors(bytes);
    return tensors.ok() ? std::string() : tensors.status().ToString();
  };
  const auto one = [](const std::string& fields) {
    return File("{\"w\":{" + fields + "}}", {1.0F});
  };
  EXPECT_NE(message({}).find("fewer than 8"), std::string::npos);
  EXPECT_NE(message(one(R"("dtype":"F64","shape":[1],"data_offsets":[0,4])")).find("F64"),
            std::string::npos);
  EXPECT_NE(message(one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])")).find("data_offsets"),
            std::string::npos);
  EXPECT_NE(message(one(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])")).find("shape"),
            std::string::npos);
  EXPECT_NE(message(one(R"("dtype":"F32","shape":[1])")).find("data_offsets"), std::string::npos);
  std::vector<std::byte> cut = one(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])");
  cut.resize(20);
  EXPECT_NE(message(cut).find("header says"), std::string::npos);
}

}  // namespace
}  // namespace embertide
