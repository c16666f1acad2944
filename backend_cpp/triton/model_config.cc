// Parsing and validation of a model's configuration.
#include "triton/model_config.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <map>
#include <optional>

#include "base/json.h"

namespace embertide::triton {
namespace {

// A score that lacks one key in twenty is of use; an embedding that is a default is not.
constexpr double kDegradedShareOfRanking = 0.05;

Status Refuse(const std::string& message) {
  return {Code::kInvalidArgument, "config.pbtxt: " + message};
}

std::string Quoted(const char* name, const std::string& text) {
  return "parameter \"" + std::string(name) + "\" is \"" + text + "\"; ";
}

// The text as a number, if it is nothing else and within the bounds.
template <typename Number>
std::optional<Number> Within(const Setting& setting, const std::string& text) {
  Number number{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  const bool read = error == std::errc() && stop == end && !text.empty();
  // A comparison with NaN is false.
  const bool within = read && number >= static_cast<Number>(setting.min) &&
                      number <= static_cast<Number>(setting.max);
  return within ? std::optional(number) : std::nullopt;
}

std::string Absolute(const std::string& path, const std::string& directory) {
  return path.empty() || path.front() == '/' ? path : directory + "/" + path;
}

Status ParseKind(const std::string& kind, bool* ranking) {
  *ranking = kind == "ranking";
  if (*ranking || kind == "lookup") return Status::Ok();
  return Refuse("kind is \"" + kind + "\"; use lookup or ranking");
}

// Whether a Redis URL has a password, before its @ or in its query.
bool HasPassword(const std::string& url) {
  if (url.find("password=") != std::string::npos) return true;
  const size_t at = url.find('@');
  const size_t scheme = url.find("://");
  if (at == std::string::npos || scheme == std::string::npos) return false;
  const size_t colon = url.find(':', scheme + 3);
  return colon != std::string::npos && colon + 1 < at;
}

// Triton shows the configuration to everybody who asks for it.
Status CheckNoSecret(const char* name, const std::string& url) {
  if (!HasPassword(url)) return Status::Ok();
  return Refuse(std::string("parameter \"") + name +
                "\" holds a password, which everybody who asks for the configuration would see: "
                "put it in a file and write redis://USER@HOST:PORT?password_file=PATH");
}

Status ParseSchema(const std::string& text, std::vector<std::string>* features) {
  try {
    const Json schema = Json::parse(text);
    for (const Json& feature : schema.at("features")) {
      features->push_back(feature.at("name").get<std::string>());
    }
    return Status::Ok();
  } catch (const std::exception& error) {
    return Refuse("parameter \"schema\": " + std::string(error.what()) +
                  "; leave it out, or have `embertide serve` write it");
  }
}

// The names in a list with commas between.
Status ParseContext(const std::string& text, std::vector<std::string>* names) {
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    if (end == begin) {
      return Refuse(Quoted("context", text) +
                    "give names of features and of columns of DENSE, "
                    "with commas between");
    }
    names->push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return Status::Ok();
}

using Setter = std::function<Status(const std::string&)>;
using Setters = std::map<std::string, Setter>;

// Makes the function that reads a parameter's text, by the type of its option.
struct SetterMaker {
  const std::string& directory;  // of the model
  Setters* setters;

  void operator()(const Setting& setting, std::string* to) const {
    (*setters)[setting.name] = [this_directory = &directory, setting, to](const std::string& text) {
      *to = setting.is_path ? Absolute(text, *this_directory) : text;
      return Status::Ok();
    };
  }
  void operator()(const Setting& setting, bool* to) const {
    (*setters)[setting.name] = [setting, to](const std::string& text) {
      if (text != "on" && text != "off")
        return Refuse(Quoted(setting.name, text) + "use on or off");
      *to = text == "on";
      return Status::Ok();
    };
  }
  void operator()(const Setting& setting, double* to) const {
    (*setters)[setting.name] = [setting, to](const std::string& text) {
      const std::optional<double> number = Within<double>(setting, text);
      if (!number) {
        return Refuse(Quoted(setting.name, text) + "it must be a number from " +
                      std::to_string(setting.min) + " to " + std::to_string(setting.max));
      }
      *to = *number;
      return Status::Ok();
    };
  }
  // A whole number: uint32_t, uint64_t or milliseconds.
  template <typename Number>
  void operator()(const Setting& setting, Number* to) const {
    (*setters)[setting.name] = [setting, to](const std::string& text) {
      const std::optional<uint64_t> number = Within<uint64_t>(setting, text);
      if (!number) {
        return Refuse(Quoted(setting.name, text) + "it must be a whole number from " +
                      std::to_string(setting.min) + " to " + std::to_string(setting.max));
      }
      *to = static_cast<Number>(*number);
      return Status::Ok();
    };
  }
  // Sets what `parse` makes of a text.
  template <typename Parse, typename Value>
  void operator()(const Setting& setting, Parse* parse, Value* to) const {
    (*setters)[setting.name] = [setting, parse, to](const std::string& text) {
      Result<Value> value = parse(text);
      if (!value.ok() && setting.is_list) return Refuse(value.status().message());
      if (!value.ok()) {
        return Refuse("parameter \"" + std::string(setting.name) +
                      "\": " + value.status().message());
      }
      *to = std::move(*value);
      return Status::Ok();
    };
  }
};

Status ParseParameters(const Json& json, const std::string& directory, ModelConfig* config) {
  Setters setters;  // the list of names is closed
  ForEachSetting(config, SetterMaker{directory, &setters});
  ForEachSetting(&config->node, SetterMaker{directory, &setters});
  const Json parameters = json.value("parameters", Json::object());
  for (const auto& [name, value] : parameters.items()) {
    if (name == "dead_owner") {
      return Refuse(
          "parameter \"dead_owner\" has gone; give \"max_degraded_share\", from 0 (as "
          "\"error\" was) to 1 (as \"default\" was)");
    }
    if (name == "remote_cache_bytes") {
      return Refuse(
          "parameter \"remote_cache_bytes\" has gone; give \"hot_rows_bytes\", for rows that are "
          "kept from version to version");
    }
    const auto setter = setters.find(name);
    if (setter == setters.end()) {
      std::string message = "parameter \"";
      message.append(name).append("\" is unknown; the backend knows");
      for (const auto& each : setters) message.append(" ").append(each.first);
      return Refuse(message);
    }
    EMBERTIDE_RETURN_IF_ERROR(setter->second(value.value("string_value", "")));
  }
  if (config->kind.empty()) {
    return Refuse("parameter \"kind\" is missing; use lookup or ranking");
  }
  EMBERTIDE_RETURN_IF_ERROR(ParseKind(config->kind, &config->ranking));
  if (parameters.contains("schema")) {
    EMBERTIDE_RETURN_IF_ERROR(ParseSchema(config->schema, &config->schema_features));
  }
  if (parameters.contains("context")) {
    if (!config->ranking) {
      return Refuse("parameter \"context\" goes with kind ranking: embeddings have no candidates");
    }
    EMBERTIDE_RETURN_IF_ERROR(ParseContext(config->context, &config->context_columns));
  }
  if (config->node.snapshot.empty() == config->node.publication.empty()) {
    return Refuse(
        "give one of the parameters \"snapshot\" (a directory, served as it is) and "
        "\"publication\" (a trainer's folder, followed as it grows)");
  }
  if (!config->node.bus.empty() && config->node.publication.empty()) {
    return Refuse("parameter \"bus\" needs \"publication\": delta files are how a gap is closed");
  }
  if (config->node.first_version > 0 && config->node.publication.empty()) {
    return Refuse("parameter \"first_version\" needs \"publication\"");
  }
  if (config->node.guard && config->node.publication.empty()) {
    return Refuse("parameter \"guard\" needs \"publication\": decisions lie in it");
  }
  if (!config->node.state.empty() &&
      (config->node.publication.empty() || config->node.peer_address.empty())) {
    return Refuse("parameter \"state\" needs \"publication\" and \"peer_address\"");
  }
  if (config->node.state.empty() && !config->node.control.empty()) {
    return Refuse("parameter \"control\" needs \"state\": plans are read there");
  }
  if (config->ranking && !parameters.contains("max_degraded_share")) {
    config->node.max_degraded_share = kDegradedShareOfRanking;
  }
  EMBERTIDE_RETURN_IF_ERROR(CheckNoSecret("bus", config->node.bus));
  EMBERTIDE_RETURN_IF_ERROR(CheckNoSecret("state", config->node.state));
  if (config->node.ssd_budget_bytes > 0 && config->node.ssd_directory.empty()) {
    return Refuse("parameter \"ssd_budget_bytes\" needs \"ssd_directory\"");
  }
  if (config->node.warm_up_bytes > 0 && config->node.warm_up_file.empty()) {
    return Refuse("parameter \"warm_up_bytes\" needs \"warm_up_file\"");
  }
  return Status::Ok();
}

// Features of Triton that cannot be right with a model that changes under it.
Status CheckPolicies(const Json& json) {
  if (json.value("/response_cache/enable"_json_pointer, false)) {
    return Refuse(
        "response_cache is on: the model changes with every version, and the cache would "
        "go on giving answers of an old one; remove it");
  }
  if (json.contains("sequence_batching")) {
    return Refuse(
        "sequence_batching: requests are independent and keep no state between them; use "
        "dynamic_batching");
  }
  if (json.value("/model_transaction_policy/decoupled"_json_pointer, false)) {
    return Refuse(
        "model_transaction_policy.decoupled: each request gets exactly one response; "
        "remove it");
  }
  if (json.value("max_batch_size", 0) < 1) {
    return Refuse("max_batch_size must be at least 1: without it Triton forms no batches");
  }
  for (const Json& group : json.value("instance_group", Json::array())) {
    const std::string kind = group.value("kind", "KIND_CPU");
    if (kind != "KIND_CPU") {
      return Refuse("instance_group kind is " + kind +
                    "; instances run on the CPU and share the "
                    "model's devices: use KIND_CPU");
    }
  }
  return Status::Ok();
}

struct Expected {
  std::string name;
  const char* type;
  bool optional;  // inputs: must be declared optional; outputs: may be left out
  int64_t dim;    // dims must be [dim]
};

Status CheckTensor(const Json& tensor, const Expected& want, bool input) {
  const std::string name = tensor.value("name", "");
  const std::string type = tensor.value("data_type", "");
  if (type != want.type) {
    return Refuse(name + " has data_type " + type + "; it must be " + want.type);
  }
  const Json dims = tensor.value("dims", Json::array());
  if (dims != Json::array({want.dim})) {
    return Refuse(name + " has dims " + dims.dump() + "; they must be [" +
                  std::to_string(want.dim) + "]");
  }
  if (!input) return Status::Ok();
  if (tensor.value("optional", false) != want.optional) {
    return Refuse(name + (want.optional ? " must say optional: true; some requests leave it out"
                                        : " must not be optional"));
  }
  if (!tensor.value("allow_ragged_batch", false)) {
    return Refuse(name +
                  " must say allow_ragged_batch: true; requests of different shapes meet in "
                  "one execution");
  }
  return Status::Ok();
}

// Checks a list of tensors against the closed list of what it may hold.
Status CheckTensors(const Json& tensors, const std::vector<Expected>& expected, bool input) {
  const char* what = input ? "input " : "output ";
  std::map<std::string, bool> seen;
  for (const Json& tensor : tensors) {
    const std::string name = tensor.value("name", "");
    const Expected* want = nullptr;
    for (const Expected& each : expected) {
      if (each.name == name) want = &each;
    }
    if (want == nullptr) return Refuse(what + name + " is unknown");
    EMBERTIDE_RETURN_IF_ERROR(CheckTensor(tensor, *want, input));
    seen[name] = true;
  }
  for (const Expected& each : expected) {
    if (!each.optional && !seen[each.name]) return Refuse(what + each.name + " is missing");
  }
  return Status::Ok();
}

bool Declares(const Json& tensors, const std::string& name) {
  for (const Json& tensor : tensors) {
    if (tensor.value("name", "") == name) return true;
  }
  return false;
}

// The heads that have outputs of their own.
std::vector<std::string> MoreHeads(const Json& outputs) {
  std::vector<std::string> heads;
  for (const Json& tensor : outputs) {
    const std::string name = tensor.value("name", "");
    if (name.starts_with(kScoreOf)) heads.push_back(name.substr(kScoreOf.size()));
  }
  return heads;
}

// Inputs of contexts are there if the parameter says which columns they have, and only then.
Status CheckContextInputs(const Json& inputs, const ModelConfig& config) {
  const TensorNames& names = config.tensors;
  for (const std::string& name : {names.context_keys, names.candidates}) {
    if (config.context_columns.empty() || Declares(inputs, name)) continue;
    return Refuse("input " + name + " is missing: parameter \"context\" names columns of contexts");
  }
  for (const std::string& name : {names.context_keys, names.context_lengths, names.context_weights,
                                  names.context_dense, names.candidates}) {
    if (!config.context_columns.empty() || !Declares(inputs, name)) continue;
    return Refuse("input " + name +
                  " needs parameter \"context\", the names of the columns that contexts have");
  }
  return Status::Ok();
}

Status ParseTensors(const Json& json, ModelConfig* config) {
  TensorNames* names = &config->tensors;
  const Json inputs = json.value("input", Json::array());
  const Json outputs = json.value("output", Json::array());
  const std::vector<Expected> extras = {{names->source, "TYPE_UINT8", true, -1},
                                        {names->version, "TYPE_INT64", true, 1}};
  if (config->ranking) {
    EMBERTIDE_RETURN_IF_ERROR(CheckTensors(inputs,
                                           {{names->keys, "TYPE_INT64", false, -1},
                                            {names->lengths, "TYPE_INT32", true, -1},
                                            {names->weights, "TYPE_FP32", true, -1},
                                            {names->dense, "TYPE_FP32", true, -1},
                                            {names->context_keys, "TYPE_INT64", true, -1},
                                            {names->context_lengths, "TYPE_INT32", true, -1},
                                            {names->context_weights, "TYPE_FP32", true, -1},
                                            {names->context_dense, "TYPE_FP32", true, -1},
                                            {names->candidates, "TYPE_INT32", true, -1}},
                                           true));
    EMBERTIDE_RETURN_IF_ERROR(CheckContextInputs(inputs, *config));
    std::vector<Expected> scores = {{names->score, "TYPE_FP32", false, -1}, extras[0], extras[1]};
    config->more_heads = MoreHeads(outputs);
    for (const std::string& head : config->more_heads) {
      scores.push_back({std::string(kScoreOf) + head, "TYPE_FP32", true, -1});
    }
    return CheckTensors(outputs, scores, false);
  }
  if (Declares(inputs, "NUMKEYS") || Declares(outputs, "OUTPUT0")) {
    names->lengths = "NUMKEYS";
    names->embedding = "OUTPUT0";
  }
  EMBERTIDE_RETURN_IF_ERROR(CheckTensors(inputs,
                                         {{names->keys, "TYPE_INT64", false, -1},
                                          {names->lengths, "TYPE_INT32", true, -1},
                                          {names->weights, "TYPE_FP32", true, -1}},
                                         true));
  return CheckTensors(outputs, {{names->embedding, "TYPE_FP32", false, -1}, extras[0], extras[1]},
                      false);
}

}  // namespace

Result<ModelConfig> ParseModelConfig(const std::string& text, const std::string& model_directory) {
  try {
    const Json json = Json::parse(text);
    ModelConfig config;
    EMBERTIDE_RETURN_IF_ERROR(ParseParameters(json, model_directory, &config));
    EMBERTIDE_RETURN_IF_ERROR(CheckPolicies(json));
    EMBERTIDE_RETURN_IF_ERROR(ParseTensors(json, &config));
    return config;
  } catch (const std::exception& error) {
    return Refuse(error.what());
  }
}

}  // namespace embertide::triton
