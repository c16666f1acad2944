#include "front/json_message.h"

#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

namespace embertide::front {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 16;      // of lists and objects
constexpr size_t kMaxShown = 80;   // of a text of the caller's, in an error
constexpr size_t kMaxNumber = 32;  // letters
constexpr size_t kMaxDimensions = 8;

grpc::Status Wrong(const std::string& why) { return {grpc::StatusCode::INVALID_ARGUMENT, why}; }

std::string Quoted(const std::string& text) {
  return json(text.substr(0, kMaxShown)).dump(-1, ' ', true, json::error_handler_t::replace);
}

// Whether lists and objects are nested deeper than anything of the protocol: a parser would follow.
bool IsTooDeep(std::string_view text) {
  int depth = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') ++i;
      if (c == '"') quoted = false;
    } else if (c == '"') {
      quoted = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxDepth) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

template <typename T>
void AppendValue(T value, std::string* bytes) {
  const auto raw = std::bit_cast<std::array<char, sizeof(T)>>(value);
  bytes->append(raw.data(), raw.size());
}

template <typename T>
bool AppendWhole(const json& value, std::string* bytes) {
  if (!value.is_number_integer()) return false;
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (!std::in_range<T>(number)) return false;
    AppendValue(static_cast<T>(number), bytes);
    return true;
  }
  const auto number = value.get<int64_t>();
  if (!std::in_range<T>(number)) return false;
  AppendValue(static_cast<T>(number), bytes);
  return true;
}

template <typename T>
bool AppendReal(const json& value, std::string* bytes) {
  if (value.is_null()) {
    AppendValue(std::numeric_limits<T>::quiet_NaN(), bytes);
    return true;
  }
  if (!value.is_number()) return false;
  AppendValue(static_cast<T>(value.get<double>()), bytes);
  return true;
}

bool AppendBool(const json& value, std::string* bytes) {
  if (!value.is_boolean()) return false;
  AppendValue(static_cast<uint8_t>(value.get<bool>()), bytes);
  return true;
}

bool AppendText(const json& value, std::string* bytes) {
  if (!value.is_string()) return false;
  const auto& text = value.get_ref<const std::string&>();
  AppendValue(static_cast<uint32_t>(text.size()), bytes);
  bytes->append(text);
  return true;
}

// Appends a value to a tensor's bytes; false if it is not of the tensor's type.
using Append = bool (*)(const json& value, std::string* bytes);
// Reads a number from a tensor's bytes, and writes it as JSON.
using Write = void (*)(const char* at, std::string* text);

template <typename T>
T ReadValue(const char* at) {
  std::array<char, sizeof(T)> raw;
  std::copy_n(at, raw.size(), raw.begin());
  return std::bit_cast<T>(raw);
}

template <typename T>
void WriteNumber(const char* at, std::string* text) {
  const T value = ReadValue<T>(at);
  if constexpr (std::is_floating_point_v<T>) {
    if (!std::isfinite(value)) {
      text->append("null");
      return;
    }
  }
  std::array<char, kMaxNumber> letters;
  const auto written = std::to_chars(letters.data(), letters.data() + letters.size(), value);
  text->append(letters.data(), written.ptr);
}

void WriteBool(const char* at, std::string* text) { text->append(*at != 0 ? "true" : "false"); }

struct Type {
  std::string_view name;
  size_t bytes;  // of an element; 0: they are texts
  Append append;
  Write write;
};
constexpr std::array<Type, 12> kTypes = {
    {{"BOOL", 1, AppendBool, WriteBool},
     {"INT8", 1, AppendWhole<int8_t>, WriteNumber<int8_t>},
     {"INT16", 2, AppendWhole<int16_t>, WriteNumber<int16_t>},
     {"INT32", 4, AppendWhole<int32_t>, WriteNumber<int32_t>},
     {"INT64", 8, AppendWhole<int64_t>, WriteNumber<int64_t>},
     {"UINT8", 1, AppendWhole<uint8_t>, WriteNumber<uint8_t>},
     {"UINT16", 2, AppendWhole<uint16_t>, WriteNumber<uint16_t>},
     {"UINT32", 4, AppendWhole<uint32_t>, WriteNumber<uint32_t>},
     {"UINT64", 8, AppendWhole<uint64_t>, WriteNumber<uint64_t>},
     {"FP32", 4, AppendReal<float>, WriteNumber<float>},
     {"FP64", 8, AppendReal<double>, WriteNumber<double>},
     {"BYTES", 0, AppendText, nullptr}}};

const Type* TypeOf(const std::string& name) {
  for (const Type& type : kTypes) {
    if (type.name == name) return &type;
  }
  return nullptr;
}

// False, and `wrong` is the value, if one is not of the type.
bool AppendAll(const json& data, const Type& type, std::string* bytes, const json** wrong) {
  if (!data.is_array()) {
    if (type.append(data, bytes)) return true;
    *wrong = &data;
    return false;
  }
  for (const json& each : data) {
    if (!AppendAll(each, type, bytes, wrong)) return false;
  }
  return true;
}

// The text at a name, or an error; empty where there is none.
grpc::Status ReadText(const json& object, const char* name, const std::string& where,
                      std::string* text) {
  const auto found = object.find(name);
  if (found == object.end()) return grpc::Status::OK;
  if (!found->is_string()) return Wrong(where + ": \"" + name + "\" must be a text");
  *text = found->get<std::string>();
  return grpc::Status::OK;
}

using Parameters = google::protobuf::Map<std::string, inference::InferParameter>;

grpc::Status ReadParameters(const json& object, const std::string& where, Parameters* parameters) {
  const auto found = object.find("parameters");
  if (found == object.end()) return grpc::Status::OK;
  if (!found->is_object()) return Wrong(where + ": \"parameters\" must be an object");
  for (const auto& [name, value] : found->items()) {
    if (name == "binary_data_size") {
      return Wrong(where + ": tensors are not taken in binary here; send them as \"data\"");
    }
    // How the answer is written is not the model's to know, and is always the same here.
    if (name == "binary_data" || name == "binary_data_output") continue;
    inference::InferParameter& parameter = (*parameters)[name];
    if (value.is_boolean()) {
      parameter.set_bool_param(value.get<bool>());
    } else if (value.is_string()) {
      parameter.set_string_param(value.get<std::string>());
    } else if (value.is_number_unsigned() && !std::in_range<int64_t>(value.get<uint64_t>())) {
      parameter.set_uint64_param(value.get<uint64_t>());
    } else if (value.is_number_integer()) {
      parameter.set_int64_param(value.get<int64_t>());
    } else if (value.is_number()) {
      parameter.set_double_param(value.get<double>());
    } else {
      return Wrong(where + ": parameter " + Quoted(name) + " must be a text, a number or a bool");
    }
  }
  return grpc::Status::OK;
}

grpc::Status ReadShape(const json& input, const std::string& where,
                       inference::ModelInferRequest::InferInputTensor* tensor) {
  const auto shape = input.find("shape");
  if (shape == input.end() || !shape->is_array() || shape->size() > kMaxDimensions) {
    return Wrong(where + ": \"shape\" must be a list of at most " + std::to_string(kMaxDimensions) +
                 " whole numbers");
  }
  for (const json& each : *shape) {
    if (!each.is_number_integer() ||
        (each.is_number_unsigned() && !std::in_range<int64_t>(each.get<uint64_t>()))) {
      return Wrong(where + ": \"shape\" must be of whole numbers");
    }
    tensor->add_shape(each.get<int64_t>());
  }
  return grpc::Status::OK;
}

grpc::Status ReadInput(const json& input, size_t at, inference::ModelInferRequest* request) {
  std::string where = "input " + std::to_string(at);
  if (!input.is_object()) return Wrong(where + " must be an object");
  auto* const tensor = request->add_inputs();
  grpc::Status status = ReadText(input, "name", where, tensor->mutable_name());
  if (status.ok() && !tensor->name().empty()) where = "input " + Quoted(tensor->name());
  if (status.ok()) status = ReadText(input, "datatype", where, tensor->mutable_datatype());
  if (status.ok()) status = ReadShape(input, where, tensor);
  if (status.ok()) status = ReadParameters(input, where, tensor->mutable_parameters());
  if (!status.ok()) return status;
  const Type* const type = TypeOf(tensor->datatype());
  if (type == nullptr) {
    return Wrong(where + ": datatype " + Quoted(tensor->datatype()) + " is not taken in JSON");
  }
  const auto data = input.find("data");
  if (data == input.end() || !data->is_array()) {
    return Wrong(where + ": \"data\" must be a list");
  }
  const json* wrong = nullptr;
  if (!AppendAll(*data, *type, request->add_raw_input_contents(), &wrong)) {
    const std::string shown = wrong->is_object()
                                  ? "an object"
                                  : wrong->dump(-1, ' ', true, json::error_handler_t::replace);
    return Wrong(where + ": " + shown.substr(0, kMaxShown) + " is no " + tensor->datatype());
  }
  return grpc::Status::OK;
}

grpc::Status ReadOutput(const json& output, size_t at, inference::ModelInferRequest* request) {
  const std::string where = "output " + std::to_string(at);
  if (!output.is_object()) return Wrong(where + " must be an object");
  auto* const wanted = request->add_outputs();
  grpc::Status status = ReadText(output, "name", where, wanted->mutable_name());
  return status.ok() ? ReadParameters(output, where, wanted->mutable_parameters()) : status;
}

using Read = grpc::Status (*)(const json& each, size_t at, inference::ModelInferRequest* request);

grpc::Status ReadList(const json& body, const char* name, Read read,
                      inference::ModelInferRequest* request) {
  const auto found = body.find(name);
  if (found == body.end()) return grpc::Status::OK;
  if (!found->is_array()) return Wrong(std::string("\"") + name + "\" must be a list");
  for (size_t i = 0; i < found->size(); ++i) {
    if (grpc::Status status = read((*found)[i], i, request); !status.ok()) return status;
  }
  return grpc::Status::OK;
}

json ShapeJson(const google::protobuf::RepeatedField<int64_t>& shape) {
  json list = json::array();
  for (const int64_t each : shape) list.push_back(each);
  return list;
}

json ParametersJson(const Parameters& parameters) {
  json object = json::object();
  for (const auto& [name, parameter] : parameters) {
    json& value = object[name];
    switch (parameter.parameter_choice_case()) {
      case inference::InferParameter::kBoolParam:
        value = parameter.bool_param();
        break;
      case inference::InferParameter::kInt64Param:
        value = parameter.int64_param();
        break;
      case inference::InferParameter::kUint64Param:
        value = parameter.uint64_param();
        break;
      case inference::InferParameter::kDoubleParam:
        value = parameter.double_param();
        break;
      default:
        value = parameter.string_param();
    }
  }
  return object;
}

// The texts of a tensor of BYTES, each behind its length, as a list; false if they are cut short.
bool WriteTexts(const std::string& bytes, std::string* text) {
  for (size_t at = 0; at < bytes.size();) {
    if (bytes.size() - at < sizeof(uint32_t)) return false;
    const auto length = ReadValue<uint32_t>(bytes.data() + at);
    at += sizeof(uint32_t);
    if (bytes.size() - at < length) return false;
    if (text->back() != '[') text->push_back(',');
    text->append(
        json(bytes.substr(at, length)).dump(-1, ' ', true, json::error_handler_t::replace));
    at += length;
  }
  return true;
}

bool WriteNumbers(const std::string& bytes, const Type& type, std::string* text) {
  if (bytes.size() % type.bytes != 0) return false;
  for (size_t at = 0; at < bytes.size(); at += type.bytes) {
    if (at > 0) text->push_back(',');
    type.write(bytes.data() + at, text);
  }
  return true;
}

std::string Text(const json& value) {
  return value.dump(-1, ' ', true, json::error_handler_t::replace);
}

}  // namespace

grpc::Status FromJson(std::string_view body, inference::ModelInferRequest* request) {
  if (IsTooDeep(body)) {
    return Wrong("the body is nested more than " + std::to_string(kMaxDepth) + " deep");
  }
  const json parsed = json::parse(body, nullptr, /*allow_exceptions=*/false);
  if (parsed.is_discarded()) return Wrong("the body is no JSON");
  if (!parsed.is_object()) return Wrong("the body must be an object");
  grpc::Status status = ReadText(parsed, "id", "the request", request->mutable_id());
  if (status.ok()) status = ReadParameters(parsed, "the request", request->mutable_parameters());
  if (status.ok()) status = ReadList(parsed, "inputs", ReadInput, request);
  if (status.ok()) status = ReadList(parsed, "outputs", ReadOutput, request);
  return status;
}

grpc::Status ToJson(const inference::ModelInferResponse& response, std::string* body) {
  json head{{"model_name", response.model_name()}, {"model_version", response.model_version()}};
  if (!response.id().empty()) head["id"] = response.id();
  head["parameters"] = ParametersJson(response.parameters());
  *body = Text(head);
  body->back() = ',';  // in place of the brace: tensors are written as they are read
  body->append("\"outputs\":[");
  for (int i = 0; i < response.outputs_size(); ++i) {
    const auto& output = response.outputs(i);
    const Type* const type = TypeOf(output.datatype());
    std::string list = "[";
    const bool written =
        type != nullptr && i < response.raw_output_contents_size() &&
        (type->bytes == 0 ? WriteTexts(response.raw_output_contents(i), &list)
                          : WriteNumbers(response.raw_output_contents(i), *type, &list));
    if (!written) {
      return {grpc::StatusCode::INTERNAL,
              "output " + Quoted(output.name()) + " cannot be written as JSON; ask over gRPC"};
    }
    json tensor{{"name", output.name()},
                {"datatype", output.datatype()},
                {"shape", ShapeJson(output.shape())}};
    if (output.parameters_size() > 0) tensor["parameters"] = ParametersJson(output.parameters());
    if (i > 0) body->push_back(',');
    body->append(Text(tensor));
    body->back() = ',';
    body->append("\"data\":").append(list).append("]}");
  }
  body->append("]}");
  return grpc::Status::OK;
}

std::string ToJson(const inference::ModelMetadataResponse& response) {
  const auto tensors = [](const auto& list) {
    json all = json::array();
    for (const auto& each : list) {
      all.push_back({{"name", each.name()},
                     {"datatype", each.datatype()},
                     {"shape", ShapeJson(each.shape())}});
    }
    return all;
  };
  json versions = json::array();
  for (const std::string& version : response.versions()) versions.push_back(version);
  return Text({{"name", response.name()},
               {"versions", versions},
               {"platform", response.platform()},
               {"inputs", tensors(response.inputs())},
               {"outputs", tensors(response.outputs())}});
}

std::string ErrorJson(const std::string& why) { return Text({{"error", why}}); }

}  // namespace embertide::front
