// manifest.json: what is accepted says the same when it is written again, number for number; fields
// that this build lacks are left out, and `requires` names what the manifest written needs.
#include <nlohmann/json.hpp>

#include "embertide/snapshot.h"
#include "fuzz/fuzz.h"

namespace embertide::fuzz {

std::vector<std::string> Seeds() {
  Manifest manifest;
  manifest.model = "news";
  manifest.lineage = 1;
  manifest.version = 9;
  manifest.watermark_ms = -5;
  manifest.schema_id = 7;
  TableConfig table;
  table.name = "item";
  table.id = 3;
  table.layout = {2, 2, DType::kInt8};
  table.bucket_bits = 1;
  table.default_row = {0.5F, 1e-20F, -3.0F, 0.1F};
  manifest.tables = {table};
  std::vector<std::string> seeds = {ManifestToJson(manifest)};
  manifest.features = {{"cand", "item", "mean"}};
  manifest.dense_features = 13;
  manifest.buckets = {{"tables/item/bucket-000001.emb", "item", 1, 9, 5, 300, 77}};
  manifest.dense = {{"program", "dense/model.pt2", 12, 34}};
  manifest.dense_id = "d1";
  manifest.dense_cpu = "x86-64-v3";
  seeds.push_back(ManifestToJson(manifest));
  manifest.dense_features = 2;
  manifest.dense_names = {"price", "age"};
  manifest.heads = {"click", "buy"};
  manifest.context = {"cand", "age"};
  manifest.former = {{{"cand", "user"}, {"age"}}, {{"user"}, {}}};
  seeds.push_back(ManifestToJson(manifest));
  std::string newer = seeds.back();
  newer.insert(newer.find("\"lineage\""), "\"requires\": [\"weighed\"], \"newer\": [{}], ");
  seeds.push_back(newer);
  table.layout.dtype = DType::kInt4;
  manifest.tables = {table};
  seeds.push_back(ManifestToJson(manifest));
  return seeds;
}

void Run(std::string_view input) {
  const std::string text(input);
  const Result<Manifest> manifest = ManifestFromJson(text);
  if (!manifest.ok()) {
    const Code code = manifest.status().code();
    EMBERTIDE_CHECK(code == Code::kCorrupt || code == Code::kRejected);
    return;
  }
  const std::string written = ManifestToJson(manifest.value());
  const Result<Manifest> again = ManifestFromJson(written);
  EMBERTIDE_CHECK(again.ok() && ManifestToJson(again.value()) == written);
  // Fields of float hold less than JSON's numbers do; all else is equal.
  const auto read = nlohmann::json::parse(text).flatten();
  const auto kept = nlohmann::json::parse(written).flatten();
  for (const auto& [name, other] : kept.items()) {
    if (name.starts_with("/requires/")) continue;
    EMBERTIDE_CHECK(read.contains(name));
    const auto& value = read.at(name);
    const bool floats = value.is_number() && other.is_number_float();
    EMBERTIDE_CHECK(floats ? value.get<float>() == other.get<float>()
                           : value.dump() == other.dump());
  }
}

}  // namespace embertide::fuzz
