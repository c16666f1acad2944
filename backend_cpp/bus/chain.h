// Which delta files lead from one version to another, and what they make of a bucket. Private to
// bus and node.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bus/delta.h"
#include "embertide/snapshot.h"
#include "embertide/status.h"

namespace embertide {

// The versions newer than `have`, newest first. The latest lineage counts first: what a publisher
// still wrote after it was superseded leads nowhere. A lineage older than ours is not looked at.
std::vector<VersionId> Newer(std::vector<VersionId> ids, VersionId have);

// A version on the way; its commit is read again when it is taken, as a chain may be long.
struct ChainLink {
  VersionId id;
  uint64_t rollback_to = 0;  // as its commit says
};

// The versions that lead from `have` to the newest of `deltas` that can be reached, oldest first;
// empty for none. `corrupt` is called for each commit file that fails a proof.
std::vector<ChainLink> NewestChain(const std::string& publication, VersionId have,
                                   const std::vector<VersionId>& deltas,
                                   const std::function<void()>& corrupt);

// The versions that lead from `from` to `to`, oldest first; nullopt if one is missing or harmed.
std::optional<std::vector<ChainLink>> ChainBetween(const std::string& publication, VersionId from,
                                                   VersionId to);

struct BucketId {
  uint32_t table_id = 0;
  uint32_t bucket = 0;
  auto operator<=>(const BucketId&) const = default;
};

// The manifest of the snapshot that was read last: a snapshot never changes, and of a large model
// it takes longer to read than a bucket.
struct LastManifest {
  std::string directory;  // empty: none was read
  Manifest manifest;
};

// Records of buckets, ascending by key, as they were at exactly version `at`: from the newest
// snapshot that leads there, and the delta files after it. `manifest` is that of the model; its
// tables are what the bytes must fit. Memory: the buckets, twice. kNotFound: no snapshot leads
// there (they are older than what is kept, or not written yet); kCorrupt, kRejected naming the
// file. `last` serves callers that read a few buckets at a time.
Result<std::map<BucketId, std::vector<std::byte>>> ReadBucketsAt(const std::string& publication,
                                                                 VersionId at,
                                                                 const Manifest& manifest,
                                                                 std::span<const BucketId> buckets,
                                                                 LastManifest* last = nullptr);

}  // namespace embertide
