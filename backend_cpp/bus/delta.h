// The delta folders of a publication: what versions changed, as files (docs/formats.md).
//
//   PUB/snapshots/NUMBER-LINEAGE/              a snapshot each
//   PUB/deltas/NUMBER-LINEAGE/p-PP.delta       RowBatches of one partition
//                            /dense.safetensors
//                            /commit.pb        written last; without it the version is not there
//
// Numbers have 12 digits, lineages 6, so that names ascend as versions do. Private to bus and node.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "embertide/status.h"
#include "embertide/v1/update.pb.h"

namespace embertide {

// Bytes of a RowBatch, on the bus and in a file.
inline constexpr uint32_t kMaxBatchBytes = 1U << 20;

// A version's name. Ordered by number: numbers rise across lineages.
struct VersionId {
  uint64_t number = 0;
  uint64_t lineage = 0;
  auto operator<=>(const VersionId&) const = default;
};
VersionId IdOf(const v1::Version& version);
// "NUMBER-LINEAGE", as folders are named.
std::string FolderName(VersionId id);
std::string Text(VersionId id);  // "version 5 of lineage 2"

// The versions that have a folder with `file` in it, ascending. Empty if PARENT does not exist.
std::vector<VersionId> ListVersions(const std::string& parent, const std::string& file);

// PUB/deltas/ID/commit.pb. kNotFound; kCorrupt naming the file.
Result<v1::CommitFile> ReadCommitFile(const std::string& publication, VersionId id);

// The batches of one delta file, each proved by CheckBatch before it is given to `consume`, and the
// file last: after an error, what was given is not to be used. kCorrupt naming the file. A Status
// of `consume` is passed on. Memory: one batch.
Status ReadDeltaFile(const std::string& publication, VersionId id,
                     const v1::PartitionCommit& partition,
                     const std::function<Status(const v1::RowBatch&)>& consume);

// The dense tensors that a commit brings, inline or as a file, proved; empty if it brings none.
Result<std::string> ReadDenseTensors(const std::string& publication,
                                     const v1::GlobalCommit& commit);

// CRC32C of a batch's header and records, as RowBatch.crc32c; kCorrupt unless it is what it says.
Status CheckBatch(const v1::RowBatch& batch);

}  // namespace embertide
