// Chains of commits, and buckets rebuilt along them.
#include "bus/chain.h"

#include <algorithm>
#include <set>

#include "embertide/row.h"

namespace embertide {
namespace {

// The versions that lead from `from` to `to`, oldest first; nullopt if one is missing or harmed.
// `dead` holds versions that were looked at and do not lead there, and gets those met here.
std::optional<std::vector<ChainLink>> ChainTo(const std::string& publication, VersionId from,
                                              VersionId to, std::set<VersionId>* dead,
                                              const std::function<void()>& corrupt) {
  std::vector<ChainLink> chain;
  while (to.number > from.number && dead->insert(to).second) {
    const Result<v1::CommitFile> file = ReadCommitFile(publication, to);
    if (!file.ok()) {
      if (file.status().code() == Code::kCorrupt) corrupt();
      return std::nullopt;
    }
    chain.push_back({to, file.value().commit().rollback_to()});
    to = IdOf(file.value().commit().previous());
  }
  if (to != from) return std::nullopt;
  std::reverse(chain.begin(), chain.end());
  return chain;
}

// A bucket on its way from a snapshot to a later version. Only what changed is sorted: deltas touch
// a few of a bucket's rows.
struct Rebuilt {
  std::vector<std::byte> base;                         // records of the snapshot, ascending by key
  std::map<uint64_t, std::vector<std::byte>> changes;  // records since; empty: the row is gone
};

Status Change(const TableConfig& table, std::span<const std::byte> records, Rebuilt* bucket) {
  while (!records.empty()) {
    const std::byte* begin = records.data();
    const Result<RowRecord> record = ReadRecord(table.layout, &records);
    if (!record.ok()) return record.status();
    std::vector<std::byte>& change = bucket->changes[record.value().key];
    change.clear();
    if (record.value().kind == RecordKind::kRow) change.assign(begin, records.data());
  }
  return Status::Ok();
}

// The base with its changes, ascending by key.
Result<std::vector<std::byte>> Merge(const TableConfig& table, const Rebuilt& bucket) {
  std::vector<std::byte> out;
  out.reserve(bucket.base.size());
  auto change = bucket.changes.begin();
  const auto take = [&] {
    out.insert(out.end(), change->second.begin(), change->second.end());
    ++change;
  };
  const std::byte* kept = bucket.base.data();  // from here on, the base is to be copied
  for (std::span<const std::byte> rest = bucket.base; !rest.empty();) {
    const std::byte* begin = rest.data();
    const Result<RowRecord> record = ReadRecord(table.layout, &rest);
    if (!record.ok()) return record.status();
    if (change == bucket.changes.end() || record.value().key < change->first) continue;
    out.insert(out.end(), kept, begin);
    while (change != bucket.changes.end() && change->first < record.value().key) take();
    kept = begin;
    if (change == bucket.changes.end() || change->first != record.value().key) continue;
    take();
    kept = rest.data();
  }
  out.insert(out.end(), kept, bucket.base.data() + bucket.base.size());
  while (change != bucket.changes.end()) take();
  return out;
}

Status ApplySnapshot(const std::string& directory, const Manifest& manifest,
                     const std::map<std::string, const TableConfig*>& tables,
                     std::map<BucketId, Rebuilt>* buckets, LastManifest* last) {
  if (last->directory != directory) {
    Result<Manifest> found = ReadManifest(directory);
    if (!found.ok()) return found.status();
    *last = {directory, std::move(found.value())};
  }
  if (last->manifest.schema_id != manifest.schema_id) {
    return {Code::kRejected, directory + " has another schema than the one that is loaded"};
  }
  for (const BucketFileInfo& info : last->manifest.buckets) {
    const auto table = tables.find(info.table);
    if (table == tables.end()) continue;
    const auto wanted = buckets->find({table->second->id, info.bucket});
    if (wanted == buckets->end()) continue;
    EMBERTIDE_RETURN_IF_ERROR(
        ReadBucketFile(directory, *table->second, info, [&](std::span<const std::byte> records) {
          std::vector<std::byte>& base = wanted->second.base;
          base.insert(base.end(), records.begin(), records.end());
          return Status::Ok();
        }));
  }
  return Status::Ok();
}

Status ApplyDeltas(const std::string& publication, VersionId id,
                   const std::map<uint32_t, const TableConfig*>& tables,
                   std::map<BucketId, Rebuilt>* buckets) {
  const Result<v1::CommitFile> file = ReadCommitFile(publication, id);
  if (!file.ok()) return file.status();
  for (const v1::PartitionCommit& partition : file.value().partitions()) {
    const bool wanted = std::ranges::any_of(partition.buckets(), [&](const auto& each) {
      return buckets->contains({each.table_id(), each.bucket()});
    });
    if (!wanted) continue;
    EMBERTIDE_RETURN_IF_ERROR(
        ReadDeltaFile(publication, id, partition, [&](const v1::RowBatch& batch) -> Status {
          const auto found = buckets->find({batch.table_id(), batch.bucket()});
          if (found == buckets->end()) return Status::Ok();
          return Change(*tables.at(batch.table_id()), std::as_bytes(std::span(batch.records())),
                        &found->second);
        }));
  }
  return Status::Ok();
}

}  // namespace

std::vector<VersionId> Newer(std::vector<VersionId> ids, VersionId have) {
  std::erase_if(
      ids, [&](VersionId id) { return id.number <= have.number || id.lineage < have.lineage; });
  std::sort(ids.begin(), ids.end(), [](VersionId a, VersionId b) {
    return std::pair(a.lineage, a.number) > std::pair(b.lineage, b.number);
  });
  return ids;
}

std::vector<ChainLink> NewestChain(const std::string& publication, VersionId have,
                                   const std::vector<VersionId>& deltas,
                                   const std::function<void()>& corrupt) {
  std::set<VersionId> dead;
  for (const VersionId to : Newer(deltas, have)) {
    auto chain = ChainTo(publication, have, to, &dead, corrupt);
    if (chain) return std::move(*chain);
  }
  return {};
}

std::optional<std::vector<ChainLink>> ChainBetween(const std::string& publication, VersionId from,
                                                   VersionId to) {
  std::set<VersionId> dead;
  return ChainTo(publication, from, to, &dead, [] {});
}

Result<std::map<BucketId, std::vector<std::byte>>> ReadBucketsAt(const std::string& publication,
                                                                 VersionId at,
                                                                 const Manifest& manifest,
                                                                 std::span<const BucketId> buckets,
                                                                 LastManifest* last_manifest) {
  LastManifest read_here;
  if (last_manifest == nullptr) last_manifest = &read_here;
  std::map<std::string, const TableConfig*> by_name;
  std::map<uint32_t, const TableConfig*> by_id;
  for (const TableConfig& table : manifest.tables) {
    by_name[table.name] = &table;
    by_id[table.id] = &table;
  }
  std::vector<VersionId> snapshots = ListVersions(publication + "/snapshots", "manifest.json");
  std::reverse(snapshots.begin(), snapshots.end());
  Status last(Code::kNotFound, publication + ": no snapshot and delta files lead to " + Text(at));
  for (const VersionId snapshot : snapshots) {
    if (snapshot.number > at.number) continue;
    const auto chain = ChainBetween(publication, snapshot, at);
    if (!chain) continue;
    std::map<BucketId, Rebuilt> rows;
    for (const BucketId bucket : buckets) rows[bucket];
    last = ApplySnapshot(publication + "/snapshots/" + FolderName(snapshot), manifest, by_name,
                         &rows, last_manifest);
    for (const ChainLink& link : *chain) {
      if (last.ok()) last = ApplyDeltas(publication, link.id, by_id, &rows);
    }
    if (!last.ok()) continue;  // an older snapshot may lead past what is harmed
    std::map<BucketId, std::vector<std::byte>> records;
    for (const auto& [bucket, rebuilt] : rows) {
      Result<std::vector<std::byte>> merged = Merge(*by_id.at(bucket.table_id), rebuilt);
      if (!merged.ok()) return merged.status();
      records[bucket] = std::move(*merged);
    }
    return records;
  }
  return last;
}

}  // namespace embertide
