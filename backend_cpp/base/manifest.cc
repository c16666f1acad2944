// manifest.json: docs/formats.md, "Manifest".
#include <algorithm>
#include <array>
#include <string_view>

#include "base/file.h"
#include "base/json.h"
#include "embertide/hash.h"
#include "embertide/snapshot.h"

namespace embertide {
namespace {

// 131072 buckets a table at ~200 bytes a line, for some tens of tables.
constexpr size_t kMaxManifestBytes = size_t{1} << 30;

// The names in `requires`: features of the format that came after its first build, and without
// which a manifest is not to be read. docs/design/0010-compatibility.md says when there is one.
constexpr std::array<std::string_view, 4> kUnderstood = {"weighed", "keys", "times", "int4"};

// Whether a value was read as it stands, arrays by their elements; a float holds less than JSON's
// numbers do.
bool Same(const OrderedJson& read, const OrderedJson& kept) {
  if (read.is_array() && kept.is_array()) {
    return std::equal(read.begin(), read.end(), kept.begin(), kept.end(), Same);
  }
  const bool floats = read.is_number() && kept.is_number_float();
  // By their text: to == of this library, -1 is the largest unsigned number.
  return floats ? read.get<float>() == kept.get<float>() : read.dump() == kept.dump();
}

// nlohmann's conversions cut numbers to fit: what was read must say the same when it is written,
// but for fields proved `apart`. Throws naming the first that does not. Fields of newer builds are
// passed over, for a manifest that is wrong without one names it in `requires`.
void Prove(const std::string& what, const OrderedJson& read, const OrderedJson& kept,
           const std::vector<std::string>& apart = {}) {
  for (const auto& [name, value] : read.items()) {
    if (std::find(apart.begin(), apart.end(), name) != apart.end()) continue;
    if (!kept.contains(name) || Same(value, kept.at(name))) continue;
    std::string message = what;
    throw std::invalid_argument(
        message.append(": field \"").append(name).append("\" cannot be ").append(value.dump()));
  }
}

OrderedJson TableToJson(const TableConfig& table) {
  return {{"name", table.name},
          {"id", table.id},
          {"dim", table.layout.dim()},
          {"chunks", table.layout.chunks},
          {"dtype", DTypeName(table.layout.dtype)},
          {"bucket_bits", table.bucket_bits},
          {"init_seed", table.init_seed},
          {"init_scale", table.init_scale},
          {"default_row", table.default_row}};
}

TableConfig TableFromJson(const OrderedJson& json) {
  TableConfig table;
  Read(json, "name", &table.name);
  Read(json, "id", &table.id);
  uint32_t dim = 0;
  Read(json, "dim", &dim);
  uint32_t chunks = 0;
  Read(json, "chunks", &chunks);
  if (chunks == 0 || chunks > kMaxChunks || dim % chunks != 0 || dim / chunks > 0xffff) {
    throw std::invalid_argument("table \"" + table.name + "\": dim " + std::to_string(dim) +
                                " cannot be cut into " + std::to_string(chunks) + " chunks");
  }
  table.layout.chunks = static_cast<uint16_t>(chunks);
  table.layout.chunk_dim = static_cast<uint16_t>(dim / chunks);
  std::string dtype_name;
  Read(json, "dtype", &dtype_name);
  const Result<DType> dtype = ParseDType(dtype_name);
  if (!dtype.ok()) throw std::invalid_argument(dtype.status().message());
  table.layout.dtype = dtype.value();
  Read(json, "bucket_bits", &table.bucket_bits);
  Read(json, "init_seed", &table.init_seed);
  Read(json, "init_scale", &table.init_scale);
  Read(json, "default_row", &table.default_row);
  if (const Status status = table.Validate(); !status.ok()) {
    throw std::invalid_argument(status.message());
  }
  Prove("table \"" + table.name + "\"", json, TableToJson(table));
  return table;
}

OrderedJson BucketToJson(const BucketFileInfo& info) {
  return {{"path", info.path},       {"table", info.table}, {"bucket", info.bucket},
          {"version", info.version}, {"rows", info.rows},   {"bytes", info.bytes},
          {"crc32c", info.crc32c}};
}

// A path of the manifest stays inside the snapshot.
std::string PathFromJson(const OrderedJson& json) {
  std::string path;
  Read(json, "path", &path);
  if (path.empty() || path.front() == '/' || path.find("..") != std::string::npos) {
    throw std::invalid_argument("path \"" + path + "\" leaves the snapshot");
  }
  return path;
}

BucketFileInfo BucketFromJson(const OrderedJson& json) {
  BucketFileInfo info;
  info.path = PathFromJson(json);
  Read(json, "table", &info.table);
  Read(json, "bucket", &info.bucket);
  Read(json, "version", &info.version);
  Read(json, "rows", &info.rows);
  Read(json, "bytes", &info.bytes);
  Read(json, "crc32c", &info.crc32c);
  Prove("bucket file " + info.path, json, BucketToJson(info));
  return info;
}

OrderedJson FeatureToJson(const FeatureConfig& feature) {
  OrderedJson json = {
      {"name", feature.name}, {"table", feature.table}, {"pooling", feature.pooling}};
  // Only where they are: older nodes, which do not understand them, serve all others.
  if (feature.weighed) json["weighed"] = true;
  if (!feature.crossed.empty()) json["crossed"] = feature.crossed;
  return json;
}

FeatureConfig FeatureFromJson(const OrderedJson& json) {
  FeatureConfig feature;
  Read(json, "name", &feature.name);
  Read(json, "table", &feature.table);
  Read(json, "pooling", &feature.pooling);
  if (json.contains("weighed")) Read(json, "weighed", &feature.weighed);
  if (json.contains("crossed")) Read(json, "crossed", &feature.crossed);
  Prove("feature \"" + feature.name + "\"", json, FeatureToJson(feature));
  return feature;
}

OrderedJson SequenceToJson(const SequenceInfo& sequence) {
  OrderedJson json = {{"name", sequence.name},       {"user", sequence.user},
                      {"item", sequence.item},       {"table", sequence.table},
                      {"columns", sequence.columns}, {"dense", sequence.dense}};
  // Only where there are: older nodes, which do not understand them, serve all others.
  if (sequence.times) json["times"] = true;
  return json;
}

SequenceInfo SequenceFromJson(const OrderedJson& json) {
  SequenceInfo sequence;
  Read(json, "name", &sequence.name);
  Read(json, "user", &sequence.user);
  Read(json, "item", &sequence.item);
  Read(json, "table", &sequence.table);
  Read(json, "columns", &sequence.columns);
  Read(json, "dense", &sequence.dense);
  if (json.contains("times")) Read(json, "times", &sequence.times);
  Prove("sequence \"" + sequence.name + "\"", json, SequenceToJson(sequence));
  return sequence;
}

OrderedJson LayoutToJson(const RequestLayout& layout) {
  return {{"keys", layout.keys}, {"dense", layout.dense}};
}

// The name that is there twice, if one is.
std::optional<std::string> Twice(std::vector<std::string> names) {
  std::ranges::sort(names);
  const auto twice = std::ranges::adjacent_find(names);
  if (twice == names.end()) return std::nullopt;
  return *twice;
}

RequestLayout LayoutFromJson(const OrderedJson& json) {
  RequestLayout layout;
  Read(json, "keys", &layout.keys);
  Read(json, "dense", &layout.dense);
  if (layout.keys.empty()) throw std::invalid_argument("a former layout has no column of KEYS");
  for (const auto& names : {layout.keys, layout.dense}) {
    if (const auto twice = Twice(names)) {
      throw std::invalid_argument("a former layout has column \"" + *twice + "\" twice");
    }
  }
  return layout;
}

std::vector<std::string> HeadsFromJson(const OrderedJson& json) {
  std::vector<std::string> heads;
  Read(json, "heads", &heads);
  if (heads.size() > kMaxHeads) {
    throw std::invalid_argument("heads are " + std::to_string(heads.size()) + "; there are " +
                                std::to_string(kMaxHeads) + " at most");
  }
  if (const auto twice = Twice(heads)) {
    throw std::invalid_argument("head \"" + *twice + "\" is there twice");
  }
  if (std::ranges::find(heads, "") != heads.end()) {
    throw std::invalid_argument("a head has no name");
  }
  return heads;
}

// A column of DENSE is proved where the manifest names them.
std::vector<std::string> ContextFromJson(const OrderedJson& json, const Manifest& manifest) {
  std::vector<std::string> context;
  Read(json, "context", &context);
  if (const auto twice = Twice(context)) {
    throw std::invalid_argument("context has \"" + *twice + "\" twice");
  }
  const auto is_feature = [&](const std::string& name) {
    return std::ranges::find(manifest.features, name, &FeatureConfig::name) !=
           manifest.features.end();
  };
  if (!context.empty() && std::ranges::none_of(context, is_feature)) {
    throw std::invalid_argument("context names no feature");
  }
  const bool named = !manifest.dense_names.empty() || manifest.dense_features == 0;
  for (const std::string& name : context) {
    const auto& dense = manifest.dense_names;
    if (is_feature(name) || std::ranges::find(dense, name) != dense.end()) continue;
    if (named || name.empty()) {
      throw std::invalid_argument("context names \"" + name +
                                  "\", which is no feature and no column of DENSE");
    }
  }
  return context;
}

OrderedJson DenseToJson(const DenseFileInfo& file) {
  return {{"role", file.role}, {"path", file.path}, {"bytes", file.bytes}, {"crc32c", file.crc32c}};
}

DenseFileInfo DenseFromJson(const OrderedJson& json) {
  DenseFileInfo file;
  file.path = PathFromJson(json);
  Read(json, "role", &file.role);
  constexpr std::array<const char*, 4> kRoles = {"program", "tensors", "transforms", "config"};
  if (std::ranges::find(kRoles, file.role) == kRoles.end()) {
    throw std::invalid_argument("dense file " + file.path + ": role \"" + file.role +
                                "\" is not understood");
  }
  Read(json, "bytes", &file.bytes);
  Read(json, "crc32c", &file.crc32c);
  Prove("dense file " + file.path, json, DenseToJson(file));
  return file;
}

OrderedJson ToJson(const Manifest& manifest) {
  OrderedJson json;
  json["format_version"] = kFormatVersion;
  json["hash_name"] = kHashName;
  json["hash_seed"] = kHashSeed;
  json["model"] = manifest.model;
  json["lineage"] = manifest.lineage;
  json["version"] = manifest.version;
  json["watermark_ms"] = manifest.watermark_ms;
  // Only where it is known: snapshots without it keep their bytes.
  if (manifest.committed_ms > 0) json["committed_ms"] = manifest.committed_ms;
  json["schema_id"] = manifest.schema_id;
  auto required = OrderedJson::array();
  const auto has = [&](DType dtype) {
    return std::ranges::any_of(manifest.tables,
                               [dtype](const auto& table) { return table.layout.dtype == dtype; });
  };
  if (has(DType::kKeys)) {
    required.push_back("keys");
    if (std::ranges::any_of(manifest.sequences, &SequenceInfo::times)) required.push_back("times");
  }
  if (has(DType::kInt4)) required.push_back("int4");
  if (!required.empty()) json["requires"] = required;
  json["dense_features"] = manifest.dense_features;
  const auto list = [&json](const char* name, const auto& items, auto to_json) {
    json[name] = OrderedJson::array();
    for (const auto& item : items) json[name].push_back(to_json(item));
  };
  if (!manifest.dense_names.empty()) json["dense_names"] = manifest.dense_names;
  if (!manifest.heads.empty()) json["heads"] = manifest.heads;
  if (!manifest.context.empty()) json["context"] = manifest.context;
  list("tables", manifest.tables, TableToJson);
  list("features", manifest.features, FeatureToJson);
  if (!manifest.sequences.empty()) list("sequences", manifest.sequences, SequenceToJson);
  if (!manifest.former.empty()) list("former", manifest.former, LayoutToJson);
  list("buckets", manifest.buckets, BucketToJson);
  list("dense", manifest.dense, DenseToJson);
  json["dense_id"] = manifest.dense_id;
  json["dense_cpu"] = manifest.dense_cpu;
  return json;
}

// Throws nlohmann's or std's exceptions on anything wrong; the caller turns them into a Status.
Manifest Parse(const OrderedJson& json) {
  Manifest manifest;
  Read(json, "model", &manifest.model);
  Read(json, "lineage", &manifest.lineage);
  Read(json, "version", &manifest.version);
  Read(json, "watermark_ms", &manifest.watermark_ms);
  if (json.contains("committed_ms")) Read(json, "committed_ms", &manifest.committed_ms);
  Read(json, "schema_id", &manifest.schema_id);
  Read(json, "dense_features", &manifest.dense_features);
  if (json.contains("dense_names")) Read(json, "dense_names", &manifest.dense_names);
  if (const size_t named = manifest.dense_names.size();
      named != 0 && named != manifest.dense_features) {
    throw std::invalid_argument("dense_names has " + std::to_string(named) +
                                " names; dense_features is " +
                                std::to_string(manifest.dense_features));
  }
  if (json.contains("heads")) manifest.heads = HeadsFromJson(json);
  Read(json, "dense_id", &manifest.dense_id);
  Read(json, "dense_cpu", &manifest.dense_cpu);
  Prove("the manifest", json, ToJson(manifest), {"tables", "features", "buckets", "dense"});
  for (const OrderedJson& table : json.at("tables"))
    manifest.tables.push_back(TableFromJson(table));
  for (const OrderedJson& each : json.at("features"))
    manifest.features.push_back(FeatureFromJson(each));
  if (json.contains("context")) manifest.context = ContextFromJson(json, manifest);
  for (const OrderedJson& each : json.value("sequences", OrderedJson::array()))
    manifest.sequences.push_back(SequenceFromJson(each));
  std::vector<OrderedJson> former;
  if (json.contains("former")) Read(json, "former", &former);
  for (const OrderedJson& each : former) manifest.former.push_back(LayoutFromJson(each));
  if (manifest.former.size() > kMaxFormerLayouts) {
    throw std::invalid_argument("former has " + std::to_string(manifest.former.size()) +
                                " layouts; there are " + std::to_string(kMaxFormerLayouts) +
                                " at most");
  }
  for (const OrderedJson& bucket : json.at("buckets"))
    manifest.buckets.push_back(BucketFromJson(bucket));
  for (const OrderedJson& file : json.at("dense")) manifest.dense.push_back(DenseFromJson(file));
  return manifest;
}

// Checks the fields that must match before the rest is read at all.
Status CheckFormat(const OrderedJson& json) {
  const auto refuse = [](const std::string& field, const std::string& is, const std::string& want) {
    return Status(Code::kRejected,
                  "manifest.json: " + field + " is " + is + ", this build reads " + want);
  };
  const auto& format = json.at("format_version");
  if (format != kFormatVersion) {
    return refuse("format_version", format.dump(), std::to_string(kFormatVersion));
  }
  const OrderedJson& name = json.at("hash_name");
  if (name != kHashName) return refuse("hash_name", name.dump(), kHashName);
  const OrderedJson& seed = json.at("hash_seed");
  if (seed != kHashSeed) return refuse("hash_seed", seed.dump(), std::to_string(kHashSeed));
  std::vector<std::string> required;
  if (json.contains("requires")) Read(json, "requires", &required);
  for (const std::string& each : required) {
    if (std::ranges::find(kUnderstood, each) != kUnderstood.end()) continue;
    return {Code::kRejected, "manifest.json: requires \"" + each +
                                 "\", which this build does not have: read it with a newer build"};
  }
  return Status::Ok();
}

}  // namespace

std::string ManifestToJson(const Manifest& manifest) { return ToJson(manifest).dump(1) + "\n"; }

Result<Manifest> ManifestFromJson(const std::string& text) {
  try {
    const OrderedJson json = OrderedJson::parse(text);
    EMBERTIDE_RETURN_IF_ERROR(CheckFormat(json));
    return Parse(json);
  } catch (const std::exception& error) {
    return Status(Code::kCorrupt, std::string("manifest.json: ") + error.what());
  }
}

Result<Manifest> ReadManifest(const std::string& directory) {
  const Result<std::string> text = ReadWholeFile(directory + "/manifest.json", kMaxManifestBytes);
  if (!text.ok()) return text.status();
  return ManifestFromJson(text.value());
}

Status WriteManifest(const std::string& directory, const Manifest& manifest) {
  const std::string text = ManifestToJson(manifest);
  return WriteFileAtomically(directory + "/manifest.json",
                             {reinterpret_cast<const std::byte*>(text.data()), text.size()});
}

}  // namespace embertide
