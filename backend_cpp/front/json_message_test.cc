#include "front/json_message.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace embertide::front {
namespace {

using inference::ModelInferRequest;
using inference::ModelInferResponse;

template <typename T>
std::vector<T> ValuesOf(const std::string& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

std::string Input(const std::string& type, const std::string& shape, const std::string& data) {
  return R"({"inputs":[{"name":"X","datatype":")" + type + R"(","shape":)" + shape + R"(,"data":)" +
         data + "}]}";
}

std::string WhyNot(const std::string& body) {
  ModelInferRequest request;
  const grpc::Status status = FromJson(body, &request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << body;
  return status.error_message();
}

TEST(JsonMessage, ReadsWhatTheProtocolHas) {
  ModelInferRequest request;
  const grpc::Status status = FromJson(
      R"({"id":"7","parameters":{"timeout":5000,"a":"b","c":true,"d":0.5},
          "inputs":[{"name":"KEYS","datatype":"INT64","shape":[2,2],
                     "data":[[1,-2],[9223372036854775807,4]]},
                    {"name":"DENSE","datatype":"FP32","shape":[1,3],"data":[0.5,null,3]}],
          "outputs":[{"name":"SCORE","parameters":{"binary_data":false}}]})",
      &request);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(request.id(), "7");
  EXPECT_EQ(request.parameters().at("timeout").int64_param(), 5000);
  EXPECT_EQ(request.parameters().at("a").string_param(), "b");
  EXPECT_TRUE(request.parameters().at("c").bool_param());
  EXPECT_EQ(request.parameters().at("d").double_param(), 0.5);
  ASSERT_EQ(request.inputs_size(), 2);
  EXPECT_EQ(request.inputs(0).shape(1), 2);
  EXPECT_EQ(ValuesOf<int64_t>(request.raw_input_contents(0)),
            (std::vector<int64_t>{1, -2, std::numeric_limits<int64_t>::max(), 4}));
  const std::vector<float> dense = ValuesOf<float>(request.raw_input_contents(1));
  ASSERT_EQ(dense.size(), 3);
  EXPECT_EQ(dense[0], 0.5F);
  EXPECT_TRUE(std::isnan(dense[1]));
  ASSERT_EQ(request.outputs_size(), 1);
  EXPECT_EQ(request.outputs(0).parameters_size(), 0);
}

TEST(JsonMessage, NamesWhatItDoesNotTake) {
  EXPECT_EQ(WhyNot("{"), "the body is no JSON");
  EXPECT_EQ(WhyNot("[]"), "the body must be an object");
  EXPECT_EQ(WhyNot(std::string(200'000, '[')), "the body is nested more than 16 deep");
  EXPECT_EQ(WhyNot(R"({"inputs":3})"), "\"inputs\" must be a list");
  EXPECT_EQ(WhyNot(R"({"inputs":[3]})"), "input 0 must be an object");
  EXPECT_EQ(WhyNot(Input("INT32", "[1]", "[2147483648]")), "input \"X\": 2147483648 is no INT32");
  EXPECT_EQ(WhyNot(Input("UINT8", "[1]", "[-1]")), "input \"X\": -1 is no UINT8");
  EXPECT_EQ(WhyNot(Input("INT64", "[1]", "[9223372036854775808]")),
            "input \"X\": 9223372036854775808 is no INT64");
  EXPECT_EQ(WhyNot(Input("INT64", "[1]", "[1.5]")), "input \"X\": 1.5 is no INT64");
  EXPECT_EQ(WhyNot(Input("INT64", "[1]", "[null]")), "input \"X\": null is no INT64");
  EXPECT_EQ(WhyNot(Input("FP32", "[1]", "[{}]")), "input \"X\": an object is no FP32");
  EXPECT_EQ(WhyNot(Input("FP16", "[1]", "[1]")),
            "input \"X\": datatype \"FP16\" is not taken in JSON");
  EXPECT_EQ(WhyNot(Input("INT64", "[1.5]", "[1]")),
            "input \"X\": \"shape\" must be of whole numbers");
  EXPECT_EQ(WhyNot(Input("INT64", "[1]", "7")), "input \"X\": \"data\" must be a list");
  EXPECT_EQ(WhyNot(R"({"inputs":[{"name":"X","datatype":"INT64","shape":[1],)"
                   R"("parameters":{"binary_data_size":8}}]})"),
            "input \"X\": tensors are not taken in binary here; send them as \"data\"");
}

TEST(JsonMessage, WritesEveryTypeAsItReadsIt) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"BOOL", "[true,false]"},
      {"INT8", "[-128,127]"},
      {"INT16", "[-32768,32767]"},
      {"INT32", "[-2147483648,2147483647]"},
      {"INT64", "[-9223372036854775808,9223372036854775807]"},
      {"UINT8", "[0,255]"},
      {"UINT16", "[0,65535]"},
      {"UINT32", "[0,4294967295]"},
      {"UINT64", "[0,18446744073709551615]"},
      {"FP32", "[0.1,null]"},
      {"FP64", "[0.1,1e+300]"},
      {"BYTES", R"(["a\"b","\u00e9"])"}};
  for (const auto& [type, data] : cases) {
    ModelInferRequest request;
    ASSERT_TRUE(FromJson(Input(type, "[2]", data), &request).ok()) << type;
    ModelInferResponse response;
    response.set_model_name("m");
    auto* const output = response.add_outputs();
    output->set_name("X");
    output->set_datatype(type);
    output->add_shape(2);
    response.add_raw_output_contents(request.raw_input_contents(0));
    std::string body;
    ASSERT_TRUE(ToJson(response, &body).ok()) << type;
    const auto read = nlohmann::json::parse(body);
    EXPECT_EQ(read["outputs"][0]["data"], nlohmann::json::parse(data)) << body;
    EXPECT_EQ(read["outputs"][0]["shape"], nlohmann::json::parse("[2]"));
    EXPECT_EQ(read["model_name"], "m");
  }
}

TEST(JsonMessage, AnAnswerThatCannotBeWrittenIsAnError) {
  ModelInferResponse response;
  auto* const output = response.add_outputs();
  output->set_name("X");
  output->set_datatype("INT64");
  response.add_raw_output_contents("1234567");
  std::string body;
  EXPECT_EQ(ToJson(response, &body).error_code(), grpc::StatusCode::INTERNAL);
  output->set_datatype("BYTES");
  EXPECT_EQ(ToJson(response, &body).error_code(), grpc::StatusCode::INTERNAL);
  output->set_datatype("FP16");
  EXPECT_EQ(ToJson(response, &body).error_code(), grpc::StatusCode::INTERNAL);
}

}  // namespace
}  // namespace embertide::front
