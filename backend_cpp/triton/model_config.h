// ModelConfig: what config.pbtxt says of one model, proved right before anything is loaded.
//
// Pure: text in, value out. Knows the JSON that Triton makes of config.pbtxt, not Triton.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "embertide/node.h"
#include "embertide/status.h"

namespace embertide::triton {

// Names of tensors. A model speaks either our names or those of HPS.
struct TensorNames {
  std::string keys = "KEYS";
  std::string lengths = "LENGTHS";  // HPS: NUMKEYS
  std::string weights = "WEIGHTS";
  std::string dense = "DENSE";  // ranking
  // Inputs of contexts, ranking; `candidates` says how many samples each context has.
  std::string context_keys = "CONTEXT_KEYS";
  std::string context_lengths = "CONTEXT_LENGTHS";
  std::string context_weights = "CONTEXT_WEIGHTS";
  std::string context_dense = "CONTEXT_DENSE";
  std::string candidates = "CANDIDATES";
  std::string score = "SCORE";          // ranking: of the first head
  std::string embedding = "EMBEDDING";  // lookup; HPS: OUTPUT0
  std::string source = "SOURCE";
  std::string version = "VERSION";
};

// The beginning of the names of outputs of heads beside the first.
inline constexpr std::string_view kScoreOf = "SCORE_";

// The parameters of its requests (proto/embertide/v1/options.proto), and what they tell.
struct ModelConfig : ModelSettings {
  bool ranking = false;  // parameter kind
  NodeOptions node;      // parameters of the node
  TensorNames tensors;
  // Heads beside the first whose scores are outputs, "SCORE_" and the name. Whoever opens the model
  // proves them.
  std::vector<std::string> more_heads;
  // Parameter schema, which tells clients what requests carry: the features that it names, in their
  // order; none where there is no schema. Whoever opens the model proves them.
  std::vector<std::string> schema_features;
  // Parameter context, as names. Whoever opens the model proves them.
  std::vector<std::string> context_columns;
};

// Parses Triton's JSON. `model_directory` is what a relative `snapshot` or `ssd_directory` is
// relative to. kInvalidArgument naming what is wrong, why, and what to write instead: unknown
// parameters, tensors of other names or types, response cache, sequence batching, decoupled.
Result<ModelConfig> ParseModelConfig(const std::string& json, const std::string& model_directory);

}  // namespace embertide::triton
