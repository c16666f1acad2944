#include "front/infer_message.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace embertide::front {
namespace {

using inference::ModelInferRequest;
using inference::ModelInferResponse;

ModelInferRequest Request() {
  ModelInferRequest request;
  request.set_model_name("news");
  request.set_id("17");
  (*request.mutable_parameters())["timeout"].set_int64_param(2000);
  for (const char* name : {"KEYS", "DENSE"}) {
    auto* const input = request.add_inputs();
    input->set_name(name);
    input->set_datatype("INT64");
    input->add_shape(2);
    input->add_shape(3);
  }
  request.add_outputs()->set_name("SCORE");
  request.add_raw_input_contents(std::string(48, 'k'));
  request.add_raw_input_contents(std::string(300, 'd'));
  return request;
}

// The text in pieces of the lengths given, the last one of what is left.
std::vector<Bytes> Cut(const std::string& text, const std::vector<size_t>& lengths) {
  const auto* data = reinterpret_cast<const uint8_t*>(text.data());
  std::vector<Bytes> pieces;
  size_t at = 0;
  for (const size_t length : lengths) {
    const size_t taken = std::min(length, text.size() - at);
    pieces.emplace_back(data + at, taken);
    at += taken;
  }
  pieces.emplace_back(data + at, text.size() - at);
  return pieces;
}

std::string Text(std::span<const Bytes> pieces) {
  std::string text;
  for (const Bytes piece : pieces) text.append(piece.begin(), piece.end());
  return text;
}

// Returns the parts of a split message as one message.
ModelInferRequest Whole(const InferMessage& message) {
  ModelInferRequest whole = message.head();
  for (size_t i = 0; i < message.raw_tensors(); ++i) {
    whole.add_raw_input_contents(Text(message.raw(i)));
  }
  return whole;
}

std::string WhyNot(const std::string& text) {
  InferMessage message;
  grpc::Status status = message.Split(Cut(text, {}));
  if (status.ok()) status = message.Parse();
  EXPECT_TRUE(status.ok() || status.error_code() == grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(message.parsed(), status.ok());
  return status.error_message();
}

TEST(InferMessage, IsThatOfProtobufHoweverItIsCut) {
  const std::string text = Request().SerializeAsString();
  std::mt19937 dice(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<size_t> lengths;
    while (dice() % 8 != 0) lengths.push_back(dice() % (round % 2 == 0 ? 4 : 100));
    InferMessage message;
    ASSERT_TRUE(message.Split(Cut(text, lengths)).ok());
    ASSERT_TRUE(message.Parse().ok());
    ASSERT_EQ(Whole(message).SerializeAsString(), text);
    ASSERT_EQ(message.raw_bytes(1), 300U);
    ASSERT_EQ(message.head_bytes() + 2 + 48 + 3 + 300, text.size());  // a tag and a length each
  }
}

TEST(InferMessage, ARawTensorStaysWhereItIs) {
  const std::string text = Request().SerializeAsString();
  InferMessage message;
  ASSERT_TRUE(message.Split(Cut(text, {})).ok());
  ASSERT_EQ(message.raw(1).size(), 1U);
  const auto* const begin = reinterpret_cast<const char*>(message.raw(1)[0].data());
  EXPECT_TRUE(begin > text.data() && begin + 300 <= text.data() + text.size());
}

TEST(InferMessage, WhatIsNoMessageIsRefused) {
  const std::string text = Request().SerializeAsString();
  for (size_t length = 1; length < text.size(); ++length) {
    // Some beginnings are whole messages; none is read beyond its end.
    WhyNot(text.substr(0, length));
  }
  EXPECT_EQ(WhyNot(std::string("\x3a\x7f") + "short"),
            "the message is no ModelInferRequest: field 7 is cut off");
  EXPECT_EQ(WhyNot(std::string(11, '\xff')), "the message is no ModelInferRequest: it is cut off");
  EXPECT_EQ(WhyNot("\x0b"), "the message is no ModelInferRequest: field 1 has an unknown form");
  EXPECT_EQ(WhyNot("\x0a\x01\xff"), "the message is no ModelInferRequest");  // a name is UTF-8
}

TEST(InferMessage, AHugeHeadIsRefusedBeforeItIsMade) {
  ModelInferRequest request = Request();
  request.set_id(std::string(kMaxHeadBytes, 'x'));
  EXPECT_EQ(WhyNot(request.SerializeAsString()),
            "the request has more than 1048576 bytes beside its raw tensors: send tensors in "
            "raw_input_contents");
  ModelInferRequest many;
  for (size_t i = 0; i <= kMaxTensors; ++i) many.add_inputs();
  EXPECT_EQ(WhyNot(many.SerializeAsString()),
            "the request has more than 256 inputs, outputs, parameters or raw tensors");
  many.Clear();
  for (size_t i = 0; i <= kMaxTensors; ++i) many.add_raw_input_contents("");
  EXPECT_NE(WhyNot(many.SerializeAsString()), "");
}

// A head grows no more than was reckoned with, whatever is in it.
TEST(InferMessage, AHeadGrowsNoMoreThanIsSaid) {
  const auto grown = [](const ModelInferRequest& request) {
    return static_cast<double>(request.SpaceUsedLong()) /
           static_cast<double>(request.ByteSizeLong());
  };
  ModelInferRequest entries;
  auto* const input = entries.add_inputs();
  for (int i = 0; i < 100'000; ++i) (*input->mutable_parameters())[std::to_string(i)];
  EXPECT_LT(grown(entries), kHeadGrowth);
  ModelInferRequest texts;
  auto* const contents = texts.add_inputs()->mutable_contents();
  for (int i = 0; i < 100'000; ++i) contents->add_bytes_contents("");
  EXPECT_LT(grown(texts), kHeadGrowth);
  ModelInferRequest numbers;
  for (size_t i = 0; i < kMaxTensors; ++i) {
    numbers.add_inputs()->mutable_contents()->add_int64_contents(1);
  }
  EXPECT_LT(grown(numbers), kHeadGrowth);
}

TEST(InferMessage, NumbersBecomeTheBytesOfTheirType) {
  ModelInferRequest::InferInputTensor input;
  input.set_name("KEYS");
  input.set_datatype("INT64");
  input.mutable_contents()->add_int64_contents(-2);
  std::string bytes;
  ASSERT_TRUE(TypedBytes(input, &bytes).ok());
  EXPECT_EQ(bytes, std::string("\xfe") + std::string(7, '\xff'));

  input.set_datatype("INT32");
  input.mutable_contents()->add_int_contents(3);
  ASSERT_TRUE(TypedBytes(input, &bytes).ok());
  EXPECT_EQ(bytes, std::string("\x03\0\0\0", 4));

  input.set_datatype("INT8");
  input.mutable_contents()->add_int_contents(300);
  EXPECT_EQ(TypedBytes(input, &bytes).error_message(), "input KEYS: 300 does not fit its type");

  input.set_datatype("FP16");
  EXPECT_EQ(TypedBytes(input, &bytes).error_message(),
            "input KEYS has type FP16, which has no list of numbers: send it in "
            "raw_input_contents");

  input.set_datatype("BYTES");
  input.mutable_contents()->add_bytes_contents("ab");
  bytes.clear();
  ASSERT_TRUE(TypedBytes(input, &bytes).ok());
  EXPECT_EQ(bytes, std::string("\x02\0\0\0ab", 6));
}

TEST(InferMessage, ANumberThatIsNoneStaysOne) {
  ModelInferRequest::InferInputTensor input;
  input.set_datatype("FP32");
  input.mutable_contents()->add_fp32_contents(std::numeric_limits<float>::quiet_NaN());
  std::string bytes;
  ASSERT_TRUE(TypedBytes(input, &bytes).ok());
  EXPECT_EQ(bytes.size(), 4U);
}

TEST(InferMessage, AnAnswerIsOneMessage) {
  ModelInferResponse head;
  head.set_model_name("news");
  head.add_outputs()->set_name("SCORE");
  const std::string large(70'000, 's');
  const grpc::ByteBuffer answer = AnswerOf(
      head, std::vector<grpc::Slice>{grpc::Slice("tiny"), grpc::Slice(), grpc::Slice(large)});
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(answer.Dump(&slices).ok());
  std::string text;
  for (const grpc::Slice& slice : slices) text.append(slice.begin(), slice.end());
  ModelInferResponse read;
  ASSERT_TRUE(read.ParseFromString(text));
  ASSERT_EQ(read.raw_output_contents_size(), 3);
  EXPECT_EQ(read.raw_output_contents(0), "tiny");
  EXPECT_EQ(read.raw_output_contents(1), "");
  EXPECT_EQ(read.raw_output_contents(2), large);
  EXPECT_EQ(read.outputs(0).name(), "SCORE");
}

}  // namespace
}  // namespace embertide::front
