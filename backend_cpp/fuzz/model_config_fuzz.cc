// config.pbtxt as Triton's JSON: a model that is taken is one that can be served.
#include "fuzz/fuzz.h"
#include "triton/model_config.h"

namespace embertide::fuzz {

std::vector<std::string> Seeds() {
  const std::string tensors = R"("max_batch_size": 64, "input": [
      {"name": "KEYS", "data_type": "TYPE_INT64", "dims": [-1], "allow_ragged_batch": true},
      {"name": "LENGTHS", "data_type": "TYPE_INT32", "dims": [-1], "allow_ragged_batch": true,
       "optional": true}], "instance_group": [{"kind": "KIND_CPU", "count": 2}], )";
  return {"{" + tensors + R"("output": [{"name": "EMBEDDING", "data_type": "TYPE_FP32",
      "dims": [-1]}], "parameters": {"kind": {"string_value": "lookup"},
      "snapshot": {"string_value": "snap"}, "max_keys": {"string_value": "77"}}})",
          "{" + tensors + R"("output": [{"name": "SCORE", "data_type": "TYPE_FP32", "dims": [-1]},
      {"name": "SCORE_buy", "data_type": "TYPE_FP32", "dims": [-1]},
      {"name": "SOURCE", "data_type": "TYPE_UINT8", "dims": [-1]}],
      "response_cache": {"enable": false}, "parameters": {"kind": {"string_value": "ranking"},
      "publication": {"string_value": "p"}, "bus": {"string_value": "redis://h:1"},
      "state": {"string_value": "redis://h:2"}, "peer_address": {"string_value": "h:3"},
      "ssd_budget_bytes": {"string_value": "9"}, "ssd_directory": {"string_value": "/s"},
      "max_degraded_share": {"string_value": "0.5"}, "threads": {"string_value": "3"}}})"};
}

void Run(std::string_view input) {
  const auto config = triton::ParseModelConfig(std::string(input), "/models/m");
  if (!config.ok()) {
    EMBERTIDE_CHECK(config.status().code() == Code::kInvalidArgument);
    EMBERTIDE_CHECK(config.status().message().starts_with("config.pbtxt: "));
    return;
  }
  const triton::ModelConfig& made = config.value();
  EMBERTIDE_CHECK(made.node.snapshot.empty() != made.node.publication.empty());
  EMBERTIDE_CHECK(made.node.bus.empty() || !made.node.publication.empty());
  EMBERTIDE_CHECK(made.node.control.empty() || !made.node.state.empty());
  EMBERTIDE_CHECK(made.node.ssd_budget_bytes == 0 || !made.node.ssd_directory.empty());
  EMBERTIDE_CHECK(made.node.devices > 0 && made.threads > 0);
  EMBERTIDE_CHECK(made.max_samples > 0 && made.max_keys > 0 && made.node.ddr_budget_bytes > 0);
}

}  // namespace embertide::fuzz
