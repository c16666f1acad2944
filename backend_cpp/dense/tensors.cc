// Reading the safetensors format: u64 length of a JSON header, the header, then the data.
#include <cmath>
#include <cstring>
#include <utility>

#include "base/json.h"
#include "embertide/dense.h"

namespace embertide {
namespace {

DenseTensor ReadOne(const std::string& name, const Json& entry, std::span<const std::byte> data) {
  const auto fail = [&](const std::string& what) {
    throw std::invalid_argument("tensor \"" + name + "\": " + what);
  };
  if (entry.at("dtype") != "F32") {
    fail("dtype is " + entry.at("dtype").dump() + "; parameters must be F32");
  }
  DenseTensor tensor{name, entry.at("shape").get<std::vector<int64_t>>(), {}};
  const auto begin = entry.at("data_offsets").at(0).get<uint64_t>();
  const auto end = entry.at("data_offsets").at(1).get<uint64_t>();
  uint64_t bytes = sizeof(float);
  for (const int64_t dim : tensor.shape) {
    if (dim < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(dim), &bytes)) {
      fail("shape " + entry.at("shape").dump());
    }
  }
  if (begin > end || end > data.size() || end - begin != bytes) {
    fail("data_offsets " + entry.at("data_offsets").dump() + " do not hold shape " +
         entry.at("shape").dump() + " within " + std::to_string(data.size()) + " bytes");
  }
  tensor.values.resize(bytes / sizeof(float));
  if (bytes > 0) std::memcpy(tensor.values.data(), data.data() + begin, bytes);
  return tensor;
}

// The header, and the data behind it.
std::pair<Json, std::span<const std::byte>> ReadHeader(std::span<const std::byte> bytes) {
  uint64_t header = 0;
  if (bytes.size() < sizeof(header)) throw std::invalid_argument("fewer than 8 bytes");
  std::memcpy(&header, bytes.data(), sizeof(header));
  const auto rest = bytes.subspan(sizeof(header));
  if (header > rest.size()) {
    throw std::invalid_argument("the header says " + std::to_string(header) + " bytes, " +
                                std::to_string(rest.size()) + " are there");
  }
  const auto* text = reinterpret_cast<const char*>(rest.data());
  return {Json::parse(text, text + header), rest.subspan(header)};
}

double Number(const Json& json, const char* field) {
  const auto number = json.at(field).get<double>();
  if (!std::isfinite(number)) throw std::invalid_argument(std::string(field) + " is not finite");
  return number;
}

}  // namespace

Result<std::optional<ReducedMeasurement>> ParseReduced(std::span<const std::byte> bytes) {
  try {
    const Json json = ReadHeader(bytes).first;
    const auto metadata = json.find("__metadata__");
    if (metadata == json.end() || !metadata->contains("reduced")) {
      return std::optional<ReducedMeasurement>();
    }
    const Json said = Json::parse(metadata->at("reduced").get<std::string>());
    return std::optional(ReducedMeasurement{.type = said.at("type").get<std::string>(),
                                            .taken = said.at("taken").get<bool>(),
                                            .events = said.at("events").get<uint64_t>(),
                                            .auc_loss = Number(said, "auc_loss"),
                                            .max_error = Number(said, "max_error"),
                                            .why_refused = said.at("why").get<std::string>()});
  } catch (const std::exception& error) {
    return Status(Code::kCorrupt, std::string("safetensors: reduced: ") + error.what());
  }
}

Result<std::vector<DenseTensor>> ParseTensors(std::span<const std::byte> bytes) {
  try {
    const auto [json, data] = ReadHeader(bytes);
    std::vector<DenseTensor> tensors;
    for (const auto& [name, entry] : json.items()) {
      if (name == "__metadata__") continue;
      tensors.push_back(ReadOne(name, entry, data));
    }
    return tensors;
  } catch (const std::exception& error) {
    return Status(Code::kCorrupt, std::string("safetensors: ") + error.what());
  }
}

}  // namespace embertide
