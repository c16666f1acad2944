// The messages of an inference, without copies of their tensors: a request whose raw tensors stay
// in the slices that gRPC received, and an answer whose raw tensors are slices of their own.
//
// Memory is bounded before any is taken: a request has at most kMaxHeadBytes beside its raw
// tensors, and at most kMaxTensors of each kind.
#pragma once

#include <google/protobuf/arena.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>
#include <grpcpp/support/status.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "inference/messages.pb.h"

namespace embertide::front {

// A head is a request without its raw tensors: names, shapes, parameters, and tensors that are
// written as lists of numbers. It has at most so many bytes.
inline constexpr size_t kMaxHeadBytes = 1 << 20;
// Inputs, outputs, parameters, and raw tensors: so many of each.
inline constexpr size_t kMaxTensors = 256;
// A byte of a head takes at most so many bytes as a message: two bytes may be an entry of a map,
// which is a node of a hash table.
inline constexpr size_t kHeadGrowth = 64;

using Bytes = std::span<const uint8_t>;

// A request. Not thread-safe. Requires: what it was read from outlives it.
class InferMessage {
 public:
  // Finds the head and the raw tensors, and proves the form of the message. Copies nothing.
  // INVALID_ARGUMENT, saying what is wrong.
  grpc::Status Split(std::span<const Bytes> slices);
  size_t head_bytes() const { return head_bytes_; }
  // Requires: Split went well.
  grpc::Status Parse();

  bool parsed() const { return head_ != nullptr; }

  // Without raw_input_contents. Requires: parsed.
  const inference::ModelInferRequest& head() const { return *head_; }
  // Raw tensors in their order, each in the pieces it came in.
  size_t raw_tensors() const { return raw_.size(); }
  std::span<const Bytes> raw(size_t number) const {
    return std::span(pieces_).subspan(raw_[number].first, raw_[number].count);
  }
  uint64_t raw_bytes(size_t number) const { return raw_[number].bytes; }

 private:
  struct Raw {
    size_t first = 0;  // of pieces_
    size_t count = 0;
    uint64_t bytes = 0;
  };

  std::vector<Bytes> head_pieces_;
  size_t head_bytes_ = 0;
  std::vector<Bytes> pieces_;
  std::vector<Raw> raw_;
  google::protobuf::Arena arena_;
  inference::ModelInferRequest* head_ = nullptr;  // the arena's
};

// The number that a field of this name has as text, or -1, the newest version, for none.
// INVALID_ARGUMENT for a text that is no whole number.
grpc::Status ReadVersion(const char* field, const std::string& text, int64_t* version);

// The bytes of a tensor that is written as a list of numbers, or why it is none of its type.
grpc::Status TypedBytes(const inference::ModelInferRequest::InferInputTensor& input,
                        std::string* bytes);

// An answer: `head` without raw_output_contents, then these, one an output.
grpc::ByteBuffer AnswerOf(const inference::ModelInferResponse& head,
                          std::span<const grpc::Slice> tensors);

}  // namespace embertide::front
