// Seals: what of a store's SSD tier can be used after its process was killed.
//
//   DIR/device-N.log      the rows on the SSD, which a seal names in place
//   DIR/seal-N.rows       the seal: where each of those rows lies, and the rows of DDR themselves
//   DIR/seal.json         says which file of rows is complete; written last, by rename
//
// A seal is taken while versions go on, so its rows are as of versions from `first` to `last`, each
// row of its own. Records are whole rows: applying again, to all buckets, what changed after
// `first` up to `last` gives `last` exactly (docs/design/0006-seals.md, docs/formats.md).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "embertide/status.h"

namespace embertide {

// A version's name. `proof` is a checksum of what announced it, so that versions of equal numbers
// of two publications are told apart.
struct SealedVersion {
  uint64_t number = 0;
  uint64_t lineage = 0;
  uint32_t proof = 0;
  bool operator==(const SealedVersion&) const = default;
};

struct SealInfo {
  uint64_t sequence = 0;  // of the seals of a directory: ascending
  std::string model;
  uint64_t schema_id = 0;
  SealedVersion first;
  SealedVersion last;
  std::vector<std::string> tables;  // name, id, layout and bucket bits of each, in their order
  std::vector<std::string> logs;    // files on the SSD by device; empty: that device has none
  uint64_t rows = 0;
  uint64_t ddr_rows = 0;     // of them, those whose payload is in the seal
  int64_t written_ms = 0;    // wall clock
  std::string file;          // of rows, in the directory
  uint64_t file_bytes = 0;   // its length
  uint64_t segments_at = 0;  // offset of the segments' frames in it
};

struct SealOptions {
  std::string model;
  uint64_t schema_id = 0;
  // Gives the name of a committed version; asked for the newest, at the beginning and at the end.
  std::function<std::optional<SealedVersion>(uint64_t number)> name;
  uint64_t bytes_per_s = 0;  // written to the seal; 0: as fast as it goes
  // OPTIONAL: waits for so long, between two slices; false: the seal is given up.
  std::function<bool(std::chrono::nanoseconds)> wait;
};

// Reads DIR/seal.json. kNotFound: there is none; kCorrupt naming the file and what is wrong
// with it; kRejected: of a format that is not known.
Result<SealInfo> ReadSealInfo(const std::string& directory);

}  // namespace embertide
