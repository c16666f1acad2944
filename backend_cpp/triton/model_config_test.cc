// The settings that a model's configuration may have, and what each refusal says.
#include "triton/model_config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace embertide::triton {
namespace {

using Json = nlohmann::json;

// A configuration that loads, as Triton gives it.
Json Good() {
  return Json::parse(R"({
    "name": "m", "max_batch_size": 64,
    "input": [
      {"name": "KEYS", "data_type": "TYPE_INT64", "dims": [-1], "allow_ragged_batch": true},
      {"name": "LENGTHS", "data_type": "TYPE_INT32", "dims": [-1], "allow_ragged_batch": true,
       "optional": true}],
    "output": [{"name": "EMBEDDING", "data_type": "TYPE_FP32", "dims": [-1]}],
    "instance_group": [{"kind": "KIND_CPU", "count": 2}],
    "parameters": {"kind": {"string_value": "lookup"}, "snapshot": {"string_value": "snap"},
                   "hbm_budget_bytes": {"string_value": "123456789"},
                   "max_keys": {"string_value": "77"}}})");
}

void ExpectRefused(const Json& json, const std::string& says) {
  const Result<ModelConfig> config = ParseModelConfig(json.dump(), "/models/m");
  ASSERT_FALSE(config.ok()) << says;
  EXPECT_NE(config.status().message().find(says), std::string::npos) << config.status().message();
}

TEST(ModelConfigTest, ParsesWhatIsThere) {
  const Result<ModelConfig> config = ParseModelConfig(Good().dump(), "/models/m");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config.value().node.snapshot, "/models/m/snap");
  EXPECT_EQ(config.value().max_keys, 77U);
  EXPECT_EQ(config.value().node.hbm_budget_bytes, 123456789U);
  EXPECT_EQ(config.value().tensors.embedding, "EMBEDDING");
}

TEST(ModelConfigTest, PoliciesThatAreNotGivenAreThoseOfTheStore) {
  EXPECT_EQ(NodeOptions().ddr_policy, kDefaultDdrPolicy);
  EXPECT_EQ(NodeOptions().hbm_policy, kDefaultHbmPolicy);
}

TEST(ModelConfigTest, ASchemaNamesTheFeatures) {
  Json json = Good();
  json["parameters"]["schema"]["string_value"] =
      R"({"features": [{"name": "user", "pooling": "sum"}, {"name": "item"}], "more": 1})";
  const Result<ModelConfig> config = ParseModelConfig(json.dump(), "/models/m");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config.value().schema_features, (std::vector<std::string>{"user", "item"}));
  for (const char* text : {"{", "{}", R"({"features": [{}]})", R"({"features": [{"name": 3}]})"}) {
    json["parameters"]["schema"]["string_value"] = text;
    ExpectRefused(json, "parameter \"schema\"");
  }
}

TEST(ModelConfigTest, TablesMayHaveBudgetsAndPoliciesOfTheirOwn) {
  Json json = Good();
  json["parameters"]["table_budgets"]["string_value"] = "item=4096/8192/lru:2,user=512";
  json["parameters"]["ddr_policy"]["string_value"] = "clock:3";
  const Result<ModelConfig> config = ParseModelConfig(json.dump(), "/models/m");
  ASSERT_TRUE(config.ok()) << config.status().message();
  const auto& budgets = config.value().node.table_budgets;
  ASSERT_EQ(budgets.size(), 2U);
  EXPECT_EQ(budgets.at("item").ddr_bytes, 4096U);
  EXPECT_EQ(budgets.at("item").ssd_bytes, 8192U);
  EXPECT_EQ(budgets.at("item").ddr_policy, "lru:2");
  EXPECT_EQ(budgets.at("user").ssd_bytes, 0U);
  EXPECT_EQ(budgets.at("user").ddr_policy, kDefaultDdrPolicy);
  EXPECT_EQ(config.value().node.ddr_policy, "clock:3");
}

TEST(ModelConfigTest, APasswordInAUrlIsRefusedAndAFileOfOneIsNot) {
  Json json = Good();
  json["parameters"].erase("snapshot");
  json["parameters"]["publication"]["string_value"] = "pub";
  for (const std::string url : {"redis://me:hush@host", "redis://:hush@host:1/2",
                                "rediss://host?ssl_ca_certs=/ca&password=hush"}) {
    json["parameters"]["bus"]["string_value"] = url;
    ExpectRefused(json, "?password_file=PATH");
    EXPECT_EQ(ParseModelConfig(json.dump(), "/m").status().message().find("hush"),
              std::string::npos);
  }
  for (const std::string url : {"redis://host:6379", "redis://me@host:6379?password_file=/p",
                                "redis://me:@host", "unix:///run/redis.sock"}) {
    json["parameters"]["bus"]["string_value"] = url;
    EXPECT_TRUE(ParseModelConfig(json.dump(), "/m").ok()) << url;
  }
}

TEST(ModelConfigTest, AFirstVersionIsOfAPublication) {
  Json json = Good();
  json["parameters"]["first_version"]["string_value"] = "7";
  ExpectRefused(json, "needs \"publication\"");
  json["parameters"].erase("snapshot");
  json["parameters"]["publication"]["string_value"] = "pub";
  const Result<ModelConfig> config = ParseModelConfig(json.dump(), "/models/m");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config.value().node.first_version, 7U);
}

TEST(ModelConfigTest, HbmMayBeATwinAndHasAPolicy) {
  Json json = Good();
  json["parameters"]["hbm_kind"]["string_value"] = "twin";
  json["parameters"]["hbm_policy"]["string_value"] = "clock:3,item=none";
  const Result<ModelConfig> config = ParseModelConfig(json.dump(), "/models/m");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config.value().node.hbm_kind, HbmKind::kTwin);
  EXPECT_EQ(config.value().node.hbm_policy, "clock:3,item=none");
  json["parameters"]["hbm_kind"]["string_value"] = "cpu";
  ExpectRefused(json, "use gpu or twin");
}

TEST(ModelConfigTest, RowsOfPeersHaveACacheWhoseSizeMayBeGiven) {
  Json json = Good();
  const uint64_t usual = ParseModelConfig(json.dump(), "/models/m").value().node.hot_rows_bytes;
  EXPECT_EQ(usual, NodeOptions().hot_rows_bytes);
  json["parameters"]["hot_rows_bytes"]["string_value"] = "0";
  EXPECT_EQ(ParseModelConfig(json.dump(), "/models/m").value().node.hot_rows_bytes, 0U);
  json["parameters"]["hot_rows_bytes"]["string_value"] = "32M";
  ExpectRefused(json, "\"hot_rows_bytes\" is \"32M\"");
}

TEST(ModelConfigTest, BoundsOfWaitsAndAnswersMayBeGiven) {
  Json json = Good();
  for (const auto& [name, value] :
       {std::array{"peer_timeout_ms", "250"}, std::array{"ready_staleness_ms", "1500"},
        std::array{"window_versions", "3"}, std::array{"join_step_bytes", "4096"},
        std::array{"join_rest", "0"}, std::array{"max_output_bytes", "65536"}}) {
    json["parameters"][name]["string_value"] = value;
  }
  const Result<ModelConfig> config = ParseModelConfig(json.dump(), "/models/m");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config.value().node.peer_timeout, std::chrono::milliseconds(250));
  EXPECT_EQ(config.value().node.ready_staleness, std::chrono::milliseconds(1500));
  EXPECT_EQ(config.value().node.window_versions, 3U);
  EXPECT_EQ(config.value().node.join_step_bytes, 4096U);
  EXPECT_EQ(config.value().node.join_rest, 0U);
  EXPECT_EQ(config.value().max_output_bytes, 65536U);
  json["parameters"]["peer_timeout_ms"]["string_value"] = "0";
  ExpectRefused(json, "\"peer_timeout_ms\" is \"0\"");
}

TEST(ModelConfigTest, SpeaksTheNamesOfHps) {
  Json json = Good();
  json["input"][1]["name"] = "NUMKEYS";
  json["output"][0]["name"] = "OUTPUT0";
  const Result<ModelConfig> config = ParseModelConfig(json.dump(), "/models/m");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config.value().tensors.lengths, "NUMKEYS");
}

TEST(ModelConfigTest, ARankingModelTakesDenseFeaturesAndGivesScores) {
  Json json = Good();
  json["parameters"]["kind"]["string_value"] = "ranking";
  json["output"][0]["name"] = "SCORE";
  EXPECT_TRUE(ParseModelConfig(json.dump(), "/models/m").value().ranking);
  json["input"].push_back({{"name", "DENSE"},
                           {"data_type", "TYPE_FP32"},
                           {"dims", {-1}},
                           {"allow_ragged_batch", true}});
  ExpectRefused(json, "DENSE must say optional");
  json["input"][2]["optional"] = true;
  EXPECT_TRUE(ParseModelConfig(json.dump(), "/models/m").ok());
}

TEST(ModelConfigTest, ColumnsOfContextsAreNamedWhereTheirInputsAreDeclared) {
  Json json = Good();
  json["parameters"]["context"]["string_value"] = "user,age";
  ExpectRefused(json, "\"context\" goes with kind ranking");
  json["parameters"]["kind"]["string_value"] = "ranking";
  json["output"][0]["name"] = "SCORE";
  ExpectRefused(json, "input CONTEXT_KEYS is missing");
  const auto declare = [&](const char* name, const char* type) {
    json["input"].push_back({{"name", name},
                             {"data_type", type},
                             {"dims", {-1}},
                             {"allow_ragged_batch", true},
                             {"optional", true}});
  };
  declare("CONTEXT_KEYS", "TYPE_INT64");
  ExpectRefused(json, "input CANDIDATES is missing");
  declare("CANDIDATES", "TYPE_INT32");
  const Result<ModelConfig> config = ParseModelConfig(json.dump(), "/m");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config.value().context_columns, (std::vector<std::string>{"user", "age"}));
  for (const char* text : {"", ",", "user,", ",user", "user,,age"}) {
    json["parameters"]["context"]["string_value"] = text;
    ExpectRefused(json, "give names of features");
  }
  json["parameters"].erase("context");
  ExpectRefused(json, "input CONTEXT_KEYS needs parameter \"context\"");
}

TEST(ModelConfigTest, EachFurtherHeadOfARankingModelHasAnOutput) {
  Json json = Good();
  json["parameters"]["kind"]["string_value"] = "ranking";
  json["output"][0]["name"] = "SCORE";
  EXPECT_TRUE(ParseModelConfig(json.dump(), "/m").value().more_heads.empty());
  for (const char* name : {"SCORE_buy", "SCORE_SOURCE"}) {
    json["output"].push_back({{"name", name}, {"data_type", "TYPE_FP32"}, {"dims", {-1}}});
  }
  const Result<ModelConfig> config = ParseModelConfig(json.dump(), "/m");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config.value().more_heads, (std::vector<std::string>{"buy", "SOURCE"}));
  EXPECT_EQ(config.value().tensors.score, "SCORE");
  json["output"][1]["data_type"] = "TYPE_FP64";
  ExpectRefused(json, "SCORE_buy has data_type TYPE_FP64; it must be TYPE_FP32");
  json["output"].erase(0);
  json["output"][0]["data_type"] = "TYPE_FP32";
  ExpectRefused(json, "output SCORE is missing");
  json["parameters"]["kind"]["string_value"] = "lookup";
  ExpectRefused(json, "output SCORE_buy is unknown");
}

TEST(ModelConfigTest, RefusesParametersThatItDoesNotKnowOrCannotRead) {
  for (const auto& [name, value, says] :
       {std::array{"snapshott", "x", "\"snapshott\" is unknown"},
        std::array{"devices", "0", "\"devices\" is \"0\""},
        std::array{"devices", "2x", "whole number"}, std::array{"max_keys", "-1", "whole number"},
        std::array{"max_keys", "", "whole number"},
        std::array{"kind", "embedding", "use lookup or ranking"},
        std::array{"kind", "ranking", "output EMBEDDING is unknown"},
        std::array{"ssd_budget_bytes", "9", "ssd_directory"},
        std::array{"table_budgets", "item", "is not TABLE=DDR_BYTES"},
        std::array{"table_budgets", "item=1/x", "has \"x\" for bytes"},
        std::array{"table_budgets", "item=1,item=2", "second one of its table"},
        std::array{"ssd_engine", "uring", "use auto, io_uring, libaio or pread"},
        std::array{"ssd_compaction_bytes_per_s", "1MiB", "whole number"},
        std::array{"ssd_seal_interval_ms", "-1", "whole number"},
        std::array{"ssd_seal_bytes_per_s", "64 MiB", "whole number"},
        std::array{"snapshot", "", "one of the parameters"},
        std::array{"publication", "pub", "one of the parameters"},
        std::array{"bus", "redis://x", "needs \"publication\""}}) {
    Json json = Good();
    json["parameters"][name]["string_value"] = value;
    ExpectRefused(json, says);
  }
}

TEST(ModelConfigTest, RefusesPoliciesThatCannotBeRight) {
  Json json = Good();
  json["response_cache"]["enable"] = true;
  ExpectRefused(json, "response_cache");
  json = Good();
  json["sequence_batching"] = Json::object();
  ExpectRefused(json, "sequence_batching");
  json = Good();
  json["model_transaction_policy"]["decoupled"] = true;
  ExpectRefused(json, "decoupled");
  json = Good();
  json["max_batch_size"] = 0;
  ExpectRefused(json, "max_batch_size");
  json = Good();
  json["instance_group"][0]["kind"] = "KIND_GPU";
  ExpectRefused(json, "KIND_CPU");
}

TEST(ModelConfigTest, RefusesOtherTensors) {
  Json json = Good();
  json["input"][0]["data_type"] = "TYPE_INT32";
  ExpectRefused(json, "KEYS has data_type TYPE_INT32");
  json = Good();
  json["input"][0]["allow_ragged_batch"] = false;
  ExpectRefused(json, "allow_ragged_batch");
  json = Good();
  json["input"][1]["optional"] = false;
  ExpectRefused(json, "optional");
  json = Good();
  json["output"] = Json::array();
  ExpectRefused(json, "EMBEDDING is missing");
  ExpectRefused(Json(3), "config.pbtxt");
}

}  // namespace
}  // namespace embertide::triton
