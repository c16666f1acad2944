// Requests of the inference protocol, by bytes: whatever they are, the message that is split is the
// one that protobuf reads, and tensors stay within what came.
//
//   input: [u8 length of a piece][a ModelInferRequest]
#include "embertide/status.h"
#include "front/infer_message.h"
#include "fuzz/fuzz.h"

namespace embertide::fuzz {
namespace {

using inference::ModelInferRequest;

ModelInferRequest Request() {
  ModelInferRequest request;
  request.set_model_name("news");
  request.set_model_version("1");
  (*request.mutable_parameters())["timeout"].set_int64_param(2000);
  auto* const input = request.add_inputs();
  input->set_name("KEYS");
  input->set_datatype("INT64");
  input->add_shape(1);
  input->add_shape(2);
  request.add_outputs()->set_name("SCORE");
  return request;
}

}  // namespace

std::vector<std::string> Seeds() {
  ModelInferRequest raw = Request();
  raw.add_raw_input_contents(std::string(16, '\x05'));
  ModelInferRequest typed = Request();
  typed.mutable_inputs(0)->mutable_contents()->add_int64_contents(5);
  typed.mutable_inputs(0)->mutable_contents()->add_int64_contents(-1);
  return {Raw<uint8_t>(0) + raw.SerializeAsString(), Raw<uint8_t>(3) + raw.SerializeAsString(),
          Raw<uint8_t>(9) + typed.SerializeAsString()};
}

void Run(std::string_view input) {
  const size_t length = Take<uint8_t>(&input);
  const auto* const data = reinterpret_cast<const uint8_t*>(input.data());
  std::vector<front::Bytes> pieces;
  for (size_t at = 0; length > 0 && at + length < input.size(); at += length) {
    pieces.emplace_back(data + at, length);
  }
  const size_t cut = pieces.size() * length;
  pieces.emplace_back(data + cut, input.size() - cut);

  front::InferMessage message;
  if (!message.Split(pieces).ok() || !message.Parse().ok()) return;
  // Protobuf may read as well what is refused here (groups); what is read here, it reads the same.
  ModelInferRequest whole;
  EMBERTIDE_CHECK(whole.ParseFromArray(input.data(), static_cast<int>(input.size())));
  EMBERTIDE_CHECK(static_cast<size_t>(whole.raw_input_contents_size()) == message.raw_tensors());
  for (size_t i = 0; i < message.raw_tensors(); ++i) {
    std::string tensor;
    for (const front::Bytes piece : message.raw(i)) tensor.append(piece.begin(), piece.end());
    EMBERTIDE_CHECK(tensor == whole.raw_input_contents(static_cast<int>(i)));
    EMBERTIDE_CHECK(tensor.size() == message.raw_bytes(i));
  }
  whole.clear_raw_input_contents();
  EMBERTIDE_CHECK(whole.SerializeAsString().size() == message.head().SerializeAsString().size());
  for (const auto& tensor : message.head().inputs()) {
    std::string bytes;
    front::TypedBytes(tensor, &bytes);
  }
}

}  // namespace embertide::fuzz
