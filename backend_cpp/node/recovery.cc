// Opening from a seal, and the thread that writes them.
#include "node/recovery.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <vector>

#include "base/file.h"
#include "base/sleep.h"
#include "bus/chain.h"
#include "embertide/checksum.h"

namespace embertide {
namespace {

VersionId IdOf(const SealedVersion& version) { return {version.number, version.lineage}; }

SealedVersion Sealed(const VersionInfo& info) { return {info.number, info.lineage, info.proof}; }

std::string SnapshotFolder(const std::string& publication, VersionId id) {
  return publication + "/snapshots/" + FolderName(id);
}

Result<std::string> SnapshotTensors(const std::string& directory, const Manifest& manifest) {
  for (const DenseFileInfo& file : manifest.dense) {
    if (file.role != "tensors") continue;
    return ReadProvedFile(directory + "/" + file.path, file.bytes, file.crc32c);
  }
  return Status(Code::kNotFound, directory + " has no dense tensors");
}

// How often it is looked whether a seal is due, or its folder has room again.
constexpr std::chrono::milliseconds kLookAtRoom{1000};
constexpr uint64_t kMinRoom = 64 << 10;

// Bytes that this process may write to a folder's file system; 0: that cannot be told.
uint64_t RoomOf(const std::string& directory) {
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(directory, error);
  return error ? 0 : space.available;
}

// The work to be done with the rows of a seal.
struct RecoveryPath {
  std::vector<ChainLink> replay;  // to bring all rows to the seal's last version
  VersionInfo version;            // which is this
};

// The publication has the very version that was sealed last, and all after it.
Result<RecoveryPath> FindPath(const std::string& publication, const SealInfo& seal) {
  const VersionId last = IdOf(seal.last);
  RecoveryPath way;
  auto replay = ChainBetween(publication, IdOf(seal.first), last);
  if (!replay) {
    return Status(Code::kNotFound, "no delta files lead from " + Text(IdOf(seal.first)) + " to " +
                                       Text(last) + ", between which it was sealed");
  }
  way.replay = std::move(*replay);
  const Result<v1::CommitFile> commit = ReadCommitFile(publication, last);
  if (commit.ok()) way.version = VersionInfoOf(commit.value().commit());
  if (Sealed(way.version) != seal.last) {
    const Result<Manifest> manifest = ReadManifest(SnapshotFolder(publication, last));
    if (manifest.ok()) way.version = VersionInfoOf(manifest.value());
  }
  if (Sealed(way.version) != seal.last) {
    return Status(Code::kRejected,
                  Text(last) + " of " + publication + " is not the one that was sealed");
  }
  const auto deltas = ListVersions(publication + "/deltas", "commit.pb");
  const auto chain = NewestChain(publication, last, deltas, [] {});
  const VersionId end = chain.empty() ? last : chain.back().id;
  std::vector<VersionId> others = Newer(deltas, end);
  const auto snapshots = Newer(ListVersions(publication + "/snapshots", "manifest.json"), {});
  if (!snapshots.empty()) others.push_back(snapshots.front());
  for (const VersionId other : others) {
    if (other.number > end.number || other.lineage > end.lineage) {
      return Status(Code::kNotFound,
                    "delta files lead from it to " + Text(end) + ", not to " + Text(other));
    }
  }
  return way;
}

// The dense tensors of a version: the last that were sent since a snapshot, or that snapshot's.
Result<std::string> TensorsOf(const std::string& publication, VersionId version) {
  std::vector<VersionId> snapshots = ListVersions(publication + "/snapshots", "manifest.json");
  std::reverse(snapshots.begin(), snapshots.end());
  for (const VersionId snapshot : snapshots) {
    if (snapshot.number > version.number) continue;
    auto chain = ChainBetween(publication, snapshot, version);
    if (!chain) continue;
    for (auto link = chain->rbegin(); link != chain->rend(); ++link) {
      const Result<v1::CommitFile> file = ReadCommitFile(publication, link->id);
      if (!file.ok()) return file.status();
      Result<std::string> tensors = ReadDenseTensors(publication, file.value().commit());
      if (!tensors.ok() || !tensors.value().empty()) return tensors;
    }
    const std::string directory = SnapshotFolder(publication, snapshot);
    const Result<Manifest> manifest = ReadManifest(directory);
    return manifest.ok() ? SnapshotTensors(directory, manifest.value()) : manifest.status();
  }
  return Status(Code::kNotFound, "no snapshot leads to the dense tensors of " + Text(version));
}

// Without a publication there is one version, the snapshot's.
Result<RecoveryPath> FindSnapshot(const Manifest& manifest, const SealInfo& seal) {
  RecoveryPath way{{}, VersionInfoOf(manifest)};
  if (Sealed(way.version) == seal.last && seal.first == seal.last) return way;
  return Status(Code::kRejected, "it is of " + Text(IdOf(seal.last)) +
                                     ", and the snapshot is another or of other rows");
}

}  // namespace

VersionInfo VersionInfoOf(const v1::GlobalCommit& commit) {
  VersionInfo info;
  info.lineage = commit.version().lineage();
  info.number = commit.version().number();
  info.watermark_ms = commit.watermark_ms();
  info.committed_ms = commit.committed_ms();
  info.dense_id = commit.dense_id();
  v1::GlobalCommit alike = commit;
  alike.clear_dense();  // which the bus's copy alone has
  const std::string bytes = alike.SerializeAsString();
  info.proof = Crc32c(std::as_bytes(std::span(bytes)));
  return info;
}

VersionInfo VersionInfoOf(const Manifest& manifest) {
  VersionInfo info;
  info.lineage = manifest.lineage;
  info.number = manifest.version;
  info.watermark_ms = manifest.watermark_ms;
  info.committed_ms = manifest.committed_ms;
  info.dense_id = manifest.dense_id;
  const std::string json = ManifestToJson(manifest);
  info.proof = Crc32c(std::as_bytes(std::span(json)));
  return info;
}

Result<std::optional<Recovered>> OpenFromSeal(const NodeOptions& options, const Manifest& manifest,
                                              StoreOptions store_options) {
  const Result<SealInfo> seal = ReadSealInfo(options.ssd_directory);
  if (!seal.ok()) {
    if (seal.status().code() == Code::kNotFound) return std::optional<Recovered>();
    return seal.status();
  }
  if (seal.value().model != manifest.model || seal.value().schema_id != manifest.schema_id) {
    return Status(Code::kRejected, "it is of model \"" + seal.value().model + "\", schema " +
                                       std::to_string(seal.value().schema_id));
  }
  const std::string& publication = options.publication;
  Result<RecoveryPath> way = publication.empty() ? FindSnapshot(manifest, seal.value())
                                                 : FindPath(publication, seal.value());
  if (!way.ok()) return way.status();
  Recovered recovered;
  recovered.version = way->version;
  if (!options.dense_plugin.empty()) {
    Result<std::string> tensors = publication.empty()
                                      ? SnapshotTensors(options.snapshot, manifest)
                                      : TensorsOf(publication, IdOf(seal.value().last));
    if (!tensors.ok()) return tensors.status();
    recovered.tensors = std::move(*tensors);
  }
  store_options.open_seal = true;
  Result<std::unique_ptr<ServingStore>> store = ServingStore::Open(std::move(store_options));
  if (!store.ok()) return store.status();
  recovered.store = std::move(*store);
  std::map<uint32_t, uint32_t> tables;
  for (uint32_t t = 0; t < manifest.tables.size(); ++t) tables[manifest.tables[t].id] = t;
  for (const auto& [id, rollback_to] : way->replay) {
    const Result<v1::CommitFile> file = ReadCommitFile(publication, id);
    if (!file.ok()) return file.status();
    for (const v1::PartitionCommit& partition : file.value().partitions()) {
      EMBERTIDE_RETURN_IF_ERROR(
          ReadDeltaFile(publication, id, partition, [&](const v1::RowBatch& batch) -> Status {
            const auto table = tables.find(batch.table_id());
            if (table == tables.end() ||
                batch.bucket() >= manifest.tables[table->second].buckets()) {
              return {Code::kCorrupt, Text(id) + " has a bucket that the manifest does not have"};
            }
            if (!recovered.store->HeldSince(table->second, batch.bucket())) return Status::Ok();
            return recovered.store->StageRecords(recovered.version.number, table->second,
                                                 batch.bucket(),
                                                 std::as_bytes(std::span(batch.records())));
          }));
    }
  }
  return std::optional(std::move(recovered));
}

// --- writing

Sealer::Sealer(const NodeState* state)
    : state_(state),
      due_(std::chrono::steady_clock::now() + state->options().ssd_seal_interval),
      task_({.name = "seals", .board = &state->tasks(), .own_pace = true},
            [this](const std::stop_token& stop) { return SealOnce(stop); }) {}

std::string Sealer::error() const {
  const MutexLock lock(mutex_);
  return error_;
}

// A seal that found no room is written again once there is a quarter more, so that all that is
// written in vain is a few times a seal at most; else when the next one is due.
bool Sealer::HasMoreRoom() const {
  if (last_.code() != Code::kDeviceError) return false;
  return RoomOf(state_->options().ssd_directory) > room_ + room_ / 4 + kMinRoom;
}

Status Sealer::SealOnce(const std::stop_token& stop) {
  const std::chrono::milliseconds every = state_->options().ssd_seal_interval;
  if (!SleepFor(stop, std::min<std::chrono::nanoseconds>(every, kLookAtRoom))) return last_;
  if (std::chrono::steady_clock::now() < due_ && !HasMoreRoom()) return last_;
  due_ = std::chrono::steady_clock::now() + every;
  const StoreStats stats = state_->store().Stats();
  // The last one is as good as another would be, and keeps no room that rows have left.
  if (stats.seal.version == stats.newest_version && stats.seal.kept_bytes == 0) {
    return last_ = Status::Ok();
  }
  SealOptions seal;
  seal.model = state_->manifest().model;
  seal.schema_id = state_->manifest().schema_id;
  seal.bytes_per_s = state_->options().ssd_seal_bytes_per_s;
  seal.name = [this](uint64_t number) -> std::optional<SealedVersion> {
    const auto info = state_->InfoOf(number);
    if (info == nullptr) return std::nullopt;
    return SealedVersion{number, info->lineage, info->proof};
  };
  seal.wait = [&stop](std::chrono::nanoseconds time) { return SleepFor(stop, time); };
  last_ = state_->store().Seal(seal);
  due_ = std::chrono::steady_clock::now() + every;
  if (!last_.ok()) room_ = RoomOf(state_->options().ssd_directory);
  const MutexLock lock(mutex_);
  if (!stop.stop_requested()) error_ = last_.ok() ? "" : last_.ToString();
  return last_;
}

}  // namespace embertide
