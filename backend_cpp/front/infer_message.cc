// The wire format of protobuf, as far as it is needed to leave a field where it is.
#include "front/infer_message.h"

#include <google/protobuf/io/coded_stream.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#include <limits>

namespace embertide::front {
namespace {

using inference::ModelInferRequest;

enum Wire : uint8_t { kVarint = 0, kFixed64 = 1, kLengthDelimited = 2, kFixed32 = 5 };
constexpr uint32_t kRawInputs = ModelInferRequest::kRawInputContentsFieldNumber;
constexpr uint32_t kRawOutputs = inference::ModelInferResponse::kRawOutputContentsFieldNumber;

grpc::Status Invalid(const std::string& why) { return {grpc::StatusCode::INVALID_ARGUMENT, why}; }

// Walks over slices as over one run of bytes.
class Cursor {
 public:
  explicit Cursor(std::span<const Bytes> slices) : slices_(slices) {
    for (const Bytes slice : slices) left_ += slice.size();
    SkipEmpty();
  }
  uint64_t left() const { return left_; }

  bool Byte(uint8_t* byte) {
    if (left_ == 0) return false;
    *byte = slices_.front()[at_];
    Advance(1);
    return true;
  }

  bool Varint(uint64_t* value) {
    *value = 0;
    for (uint32_t shift = 0; shift < 64; shift += 7) {
      uint8_t byte = 0;
      if (!Byte(&byte)) return false;
      *value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if ((byte & 0x80) == 0) return true;
    }
    return false;
  }

  // The next `bytes`, in their pieces. Requires: as many are left.
  void Take(uint64_t bytes, std::vector<Bytes>* pieces) {
    while (bytes > 0) {
      const Bytes slice = slices_.front().subspan(at_);
      const size_t taken = std::min<uint64_t>(bytes, slice.size());
      pieces->push_back(slice.first(taken));
      Advance(taken);
      bytes -= taken;
    }
  }

 private:
  void Advance(size_t bytes) {
    at_ += bytes;
    left_ -= bytes;
    SkipEmpty();
  }
  void SkipEmpty() {
    while (!slices_.empty() && at_ == slices_.front().size()) {
      slices_ = slices_.subspan(1);
      at_ = 0;
    }
  }

  std::span<const Bytes> slices_;
  size_t at_ = 0;  // in the first slice
  uint64_t left_ = 0;
};

template <typename To, typename Values>
grpc::Status Narrow(const Values& values, const std::string& name, std::string* bytes) {
  bytes->resize(values.size() * sizeof(To));
  char* out = bytes->data();
  for (const auto value : values) {
    const To narrow = static_cast<To>(value);
    if (static_cast<decltype(value)>(narrow) != value && value == value) {  // not of NaN
      return Invalid("input " + name + ": " + std::to_string(value) + " does not fit its type");
    }
    std::memcpy(out, &narrow, sizeof(To));
    out += sizeof(To);
  }
  return grpc::Status::OK;
}

}  // namespace

grpc::Status InferMessage::Split(std::span<const Bytes> slices) {
  Cursor cursor(slices);
  std::array<size_t, 8> counts{};
  while (cursor.left() > 0) {
    Cursor field = cursor;  // as the head takes it, its tag included
    const uint64_t before = cursor.left();
    uint64_t tag = 0;
    if (!cursor.Varint(&tag)) return Invalid("the message is no ModelInferRequest: it is cut off");
    const uint64_t number = tag >> 3;
    uint64_t length = 0;
    bool whole = true;
    switch (tag & 7) {
      case kVarint:
        whole = cursor.Varint(&length);
        length = 0;
        break;
      case kFixed64:
        length = 8;
        break;
      case kLengthDelimited:
        whole = cursor.Varint(&length);
        break;
      case kFixed32:
        length = 4;
        break;
      default:
        return Invalid("the message is no ModelInferRequest: field " + std::to_string(number) +
                       " has an unknown form");
    }
    if (!whole || length > cursor.left()) {
      return Invalid("the message is no ModelInferRequest: field " + std::to_string(number) +
                     " is cut off");
    }
    if (number < counts.size() && ++counts[number] > kMaxTensors) {
      return Invalid("the request has more than " + std::to_string(kMaxTensors) +
                     " inputs, outputs, parameters or raw tensors");
    }
    if (number == kRawInputs && (tag & 7) == kLengthDelimited) {
      const size_t first = pieces_.size();
      cursor.Take(length, &pieces_);
      raw_.push_back({first, pieces_.size() - first, length});
      continue;
    }
    std::vector<Bytes> skipped;
    cursor.Take(length, &skipped);
    const uint64_t bytes = before - cursor.left();
    head_bytes_ += bytes;
    if (head_bytes_ > kMaxHeadBytes) {
      return Invalid("the request has more than " + std::to_string(kMaxHeadBytes) +
                     " bytes beside its raw tensors: send tensors in raw_input_contents");
    }
    field.Take(bytes, &head_pieces_);
  }
  return grpc::Status::OK;
}

grpc::Status InferMessage::Parse() {
  std::string head;
  head.reserve(head_bytes_);
  for (const Bytes piece : head_pieces_) {
    head.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  head_ = google::protobuf::Arena::CreateMessage<ModelInferRequest>(&arena_);
  if (!head_->ParseFromString(head)) {
    head_ = nullptr;  // part of it may be there, and no UTF-8
    return Invalid("the message is no ModelInferRequest");
  }
  return grpc::Status::OK;
}

grpc::Status ReadVersion(const char* field, const std::string& text, int64_t* version) {
  *version = -1;
  if (text.empty()) return grpc::Status::OK;
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, *version);
  if (error == std::errc() && stopped == end && *version >= 0) return grpc::Status::OK;
  return Invalid(std::string(field) + " is \"" + text.substr(0, 40) +
                 "\"; it must be a whole number");
}

grpc::Status TypedBytes(const ModelInferRequest::InferInputTensor& input, std::string* bytes) {
  const inference::InferTensorContents& contents = input.contents();
  const std::string& type = input.datatype();
  const std::string& name = input.name();
  if (type == "BOOL") return Narrow<bool>(contents.bool_contents(), name, bytes);
  if (type == "INT8") return Narrow<int8_t>(contents.int_contents(), name, bytes);
  if (type == "INT16") return Narrow<int16_t>(contents.int_contents(), name, bytes);
  if (type == "INT32") return Narrow<int32_t>(contents.int_contents(), name, bytes);
  if (type == "INT64") return Narrow<int64_t>(contents.int64_contents(), name, bytes);
  if (type == "UINT8") return Narrow<uint8_t>(contents.uint_contents(), name, bytes);
  if (type == "UINT16") return Narrow<uint16_t>(contents.uint_contents(), name, bytes);
  if (type == "UINT32") return Narrow<uint32_t>(contents.uint_contents(), name, bytes);
  if (type == "UINT64") return Narrow<uint64_t>(contents.uint64_contents(), name, bytes);
  if (type == "FP32") return Narrow<float>(contents.fp32_contents(), name, bytes);
  if (type == "FP64") return Narrow<double>(contents.fp64_contents(), name, bytes);
  if (type == "BYTES") {
    for (const std::string& each : contents.bytes_contents()) {
      const auto length = static_cast<uint32_t>(each.size());
      bytes->append(reinterpret_cast<const char*>(&length), sizeof(length)).append(each);
    }
    return grpc::Status::OK;
  }
  return Invalid("input " + name + " has type " + type +
                 ", which has no list of numbers: send it in raw_input_contents");
}

grpc::ByteBuffer AnswerOf(const inference::ModelInferResponse& head,
                          std::span<const grpc::Slice> tensors) {
  std::vector<grpc::Slice> slices;
  slices.reserve(1 + 2 * tensors.size());
  const size_t head_bytes = head.ByteSizeLong();
  grpc_slice first = grpc_slice_malloc(head_bytes);
  head.SerializeWithCachedSizesToArray(GRPC_SLICE_START_PTR(first));
  slices.emplace_back(first, grpc::Slice::STEAL_REF);
  for (const grpc::Slice& tensor : tensors) {
    uint8_t start[16];
    start[0] = kRawOutputs << 3 | kLengthDelimited;
    const uint8_t* const end =
        google::protobuf::io::CodedOutputStream::WriteVarint64ToArray(tensor.size(), start + 1);
    slices.emplace_back(start, static_cast<size_t>(end - start));
    slices.push_back(tensor);
  }
  return {slices.data(), slices.size()};
}

}  // namespace embertide::front
