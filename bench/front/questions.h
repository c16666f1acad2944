// Questions with their right answers, as bench/front/questions.py writes them.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace embertide::bench {

struct Question {
  std::string path;
  grpc::ByteBuffer request;
  std::string answer;
  std::string compared;  // numbers of the fields that are; each has its length on the wire
};

inline grpc::ByteBuffer BufferOf(const std::string& text) {
  const grpc::Slice slice(text);
  return {&slice, 1};
}

inline std::vector<Question> ReadQuestions(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string data{std::istreambuf_iterator<char>(file), {}};
  std::vector<std::string> texts;
  for (size_t at = 0; at + 4 <= data.size();) {
    uint32_t size = 0;
    std::memcpy(&size, data.data() + at, sizeof(size));
    texts.push_back(data.substr(at + 4, size));
    at += 4 + size;
  }
  std::vector<Question> questions;
  for (size_t i = 0; i + 4 <= texts.size(); i += 4) {
    questions.push_back({texts[i], BufferOf(texts[i + 1]), texts[i + 2], texts[i + 3]});
  }
  return questions;
}

inline std::optional<uint64_t> TakeVarint(std::string_view& data) {
  uint64_t value = 0;
  for (int shift = 0; shift < 64 && !data.empty(); shift += 7) {
    const auto byte = static_cast<uint8_t>(data.front());
    data.remove_prefix(1);
    value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if ((byte & 0x80) == 0) return value;
  }
  return std::nullopt;
}

// The encoded fields of an answer that are compared, as they stand; nothing if it is no message of
// integers and what has a length.
inline std::optional<std::string> ComparedOf(std::string_view answer, std::string_view compared) {
  std::string held;
  while (!answer.empty()) {
    const std::string_view field = answer;
    const auto tag = TakeVarint(answer);
    const auto size = TakeVarint(answer);
    if (!tag || !size) return std::nullopt;
    if ((*tag & 7) == 0) continue;
    if ((*tag & 7) != 2 || *size > answer.size()) return std::nullopt;
    answer.remove_prefix(*size);
    if (compared.find(static_cast<char>(*tag >> 3)) != std::string_view::npos) {
      held.append(field.substr(0, field.size() - answer.size()));
    }
  }
  return held;
}

inline bool IsRight(const Question& question, const grpc::ByteBuffer& answer) {
  if (question.answer.empty()) return true;
  grpc::Slice slice;
  if (!answer.DumpToSingleSlice(&slice).ok()) return false;
  const std::string_view said(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return ComparedOf(said, question.compared) == question.answer;
}

}  // namespace embertide::bench
