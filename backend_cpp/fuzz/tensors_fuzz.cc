// Safetensors: as many values as the shape has, and the same when written again.
#include <cmath>
#include <nlohmann/json.hpp>

#include "embertide/dense.h"
#include "fuzz/fuzz.h"

namespace embertide::fuzz {
namespace {

std::string File(const std::vector<DenseTensor>& tensors) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  std::string data;
  for (const DenseTensor& tensor : tensors) {
    const size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(tensor.values.data()), tensor.values.size() * 4);
    header[tensor.name] = {
        {"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  return Raw<uint64_t>(text.size()) + text + data;
}

}  // namespace

std::vector<std::string> Seeds() {
  return {File({}), File({{"b", {1}, {7.0F}}, {"w", {1, 2}, {1.5F, -2.0F}}, {"x", {0, 3}, {}}})};
}

void Run(std::string_view input) {
  const auto tensors = ParseTensors(std::as_bytes(std::span(input)));
  if (!tensors.ok()) {
    EMBERTIDE_CHECK(tensors.status().code() == Code::kCorrupt);
    return;
  }
  for (const DenseTensor& tensor : tensors.value()) {
    uint64_t values = 1;
    for (const int64_t dim : tensor.shape) values *= static_cast<uint64_t>(dim);
    EMBERTIDE_CHECK(values == tensor.values.size());
  }
  const std::string written = File(tensors.value());
  const auto again = ParseTensors(std::as_bytes(std::span(written)));
  EMBERTIDE_CHECK(again.ok() && File(again.value()) == written);
}

}  // namespace embertide::fuzz
