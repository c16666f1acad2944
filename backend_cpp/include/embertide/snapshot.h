// Snapshots: a directory of bucket files and, last, a manifest (docs/formats.md).
//
//   DIR/manifest.json                     written last, by rename; without it nothing is there
//   DIR/tables/NAME/bucket-00017.emb      one bucket of one table, blocks with CRC32C each
//   DIR/dense/...                         dense program and tensors, named by the manifest
//
// A reader refuses what it cannot prove right and says which field differs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "embertide/status.h"
#include "embertide/table.h"

namespace embertide {

inline constexpr uint32_t kFormatVersion = 1;
// Records of a block, at most: what a reader must buffer and what one checksum covers.
inline constexpr uint32_t kMaxBlockBytes = 256 * 1024;

// A feature of the model: which table its keys belong to and how its bag is pooled.
struct FeatureConfig {
  std::string name;
  std::string table;
  std::string pooling = "sum";  // "sum", "mean" or "none"
  bool weighed = false;         // a request has a weight for each key
  // Names of the features whose keys together are this one's: a node can make the column of KEYS
  // from theirs. Empty: a request has to carry it.
  std::vector<std::string> crossed = {};
};

// A sequence whose columns nodes make: the items of a sample's user, newest first.
struct SequenceInfo {
  std::string name;
  std::string user;                  // the feature whose key finds the items
  std::string item;                  // the feature that is one of them, or not
  std::string table;                 // of keys: its rows are users' items
  std::vector<std::string> columns;  // features, the newest item first
  // Column of DENSE: items there are; the next one: whether `item` is among them; with times, the
  // next `columns`: seconds from each item to the newest.
  uint32_t dense = 0;
  bool times = false;  // whether rows say when items came (docs/formats.md)
};

// A layout of requests before the model was changed: names of features and of columns of DENSE.
struct RequestLayout {
  std::vector<std::string> keys;
  std::vector<std::string> dense;
};
inline constexpr size_t kMaxFormerLayouts = 8;
inline constexpr size_t kMaxHeads = 64;

struct BucketFileInfo {
  std::string path;  // relative to the snapshot
  std::string table;
  uint32_t bucket = 0;
  uint64_t version = 0;
  uint64_t rows = 0;
  uint64_t bytes = 0;
  uint32_t crc32c = 0;  // of the whole file
};

struct DenseFileInfo {
  std::string role;  // "program", "tensors", "transforms" or "config"
  std::string path;
  uint64_t bytes = 0;
  uint32_t crc32c = 0;
};

struct Manifest {
  std::string model;     // name
  uint64_t lineage = 0;  // the publisher's run; 0: imported, published by nobody
  uint64_t version = 0;
  int64_t watermark_ms = 0;  // event time up to which the version has learned
  int64_t committed_ms = 0;  // wall clock of the publisher; 0: not known (older snapshots, imports)
  uint64_t schema_id = 0;    // of features, tables and dense net; commits name the same
  std::vector<TableConfig> tables;
  std::vector<FeatureConfig> features;        // in the order of KEYS' columns
  uint32_t dense_features = 0;                // columns of DENSE, before its transforms
  std::vector<std::string> dense_names = {};  // of those columns; empty: not known
  // The heads of the dense net, each with a score; empty: one, without a name.
  std::vector<std::string> heads = {};
  // Features and columns of DENSE that are the user's, which its candidates share; empty: not
  // known.
  std::vector<std::string> context = {};
  std::vector<SequenceInfo> sequences;  // those whose columns nodes make
  // The newest first: requests in these columns are answered too.
  std::vector<RequestLayout> former = {};
  std::vector<BucketFileInfo> buckets;
  std::vector<DenseFileInfo> dense;  // empty: the snapshot serves `lookup` only
  std::string dense_id;              // of the tensors; empty without a dense part
  std::string dense_cpu;             // baseline of the program, as "x86-64-v3"

  size_t scores() const { return heads.empty() ? 1 : heads.size(); }  // of a sample
};

// JSON of the manifest and back. Parsing: kCorrupt for what is no JSON, and for a field (named)
// that is absent or out of range; kRejected for another format version or hash (both values named),
// and for what it requires and this build lacks. Other fields that this build lacks are passed
// over.
std::string ManifestToJson(const Manifest& manifest);
Result<Manifest> ManifestFromJson(const std::string& json);

// Reads DIR/manifest.json. kNotFound if there is none (the snapshot does not exist).
Result<Manifest> ReadManifest(const std::string& directory);
// Writes DIR/manifest.json: temporary name, fsync, rename, fsync of the directory.
Status WriteManifest(const std::string& directory, const Manifest& manifest);

// The relative path of a bucket file.
std::string BucketPath(const std::string& table, uint32_t bucket);

// Writes one bucket file from records (ascending key order), atomically by rename. Creates folders.
Result<BucketFileInfo> WriteBucketFile(const std::string& directory, const TableConfig& table,
                                       uint32_t bucket, uint64_t version,
                                       std::span<const std::byte> records);

// Reads a bucket file block by block in bounded memory: checks header against `table`, every
// block's CRC, the footer, and that nothing follows. `consume` gets the records of one block.
// kCorrupt / kRejected name the file, the offset and the field; a Status of `consume` is passed on.
Status ReadBucketFile(const std::string& directory, const TableConfig& table,
                      const BucketFileInfo& info,
                      const std::function<Status(std::span<const std::byte>)>& consume);

}  // namespace embertide
