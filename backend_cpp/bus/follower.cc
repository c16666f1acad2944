// The follower's thread.
#include "embertide/follower.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "bus/delta.h"
#include "bus/redis.h"
#include "embertide/checksum.h"

namespace embertide {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kRedisTimeout{2000};
// One wait for the next commit; bounds how long a stop takes.
constexpr milliseconds kBlock{100};
// Between attempts to reach Redis, and between looks at the files while it is away.
constexpr milliseconds kRetryEvery{500};
constexpr size_t kCommitsAtOnce = 64;
// Entries of each stream in one round trip: at most 64 MiB of one bucket's batches.
constexpr size_t kBatchesAtOnce = 64;

constexpr const char* kCommitStream = "e:{commit}:log";

std::string PartitionStream(uint32_t partition) {
  return "e:{" + std::to_string(partition) + "}:commit";
}

std::string BucketStream(uint32_t partition, uint32_t table, uint32_t bucket) {
  return "e:{" + std::to_string(partition) + "}:" + std::to_string(table) + ":" +
         std::to_string(bucket);
}

}  // namespace

struct Follower::Impl {
  FollowerOptions options;
  RedisAddress address;
  VersionSink* sink = nullptr;
  FollowerStats stats;
  mutable std::mutex mutex;
  std::condition_variable wake;
  bool stop = false;
  std::string error;
  std::unique_ptr<RedisConnection> redis;
  std::map<std::string, std::string> cursors;  // stream -> id of the last entry read; bounded by
                                               // the model's buckets
  std::thread thread;

  VersionId newest() const { return {sink->newest_number(), sink->newest_lineage()}; }

  bool Wait(milliseconds time) {
    std::unique_lock lock(mutex);
    return wake.wait_for(lock, time, [this] { return stop; });
  }
  bool Stopping() const {
    const std::lock_guard lock(mutex);
    return stop;
  }
  void Note(const Status& status) {
    const std::lock_guard lock(mutex);
    error = status.ok() ? std::string() : status.ToString();
  }
  const std::string& Cursor(const std::string& stream) {
    return cursors.try_emplace(stream, "0-0").first->second;
  }

  void Run();
  void Connect();
  Status FollowOnce();
  Status Take(const v1::GlobalCommit& commit);
  Status TakeFromBus(const v1::GlobalCommit& commit);
  Status ReadPartitions(const v1::GlobalCommit& commit, std::vector<v1::PartitionCommit>* out);
  struct Wanted {
    uint32_t partition = 0;
    v1::BucketSequence bucket;
    std::vector<v1::RowBatch> batches;
    bool done = false;
  };
  Status ReadBatches(VersionId id, std::vector<Wanted>* wanted);
  Status Keep(VersionId id, const StreamEntry& entry, Wanted* wanted);
  Status CatchUp();
  Status FindChain(std::vector<v1::CommitFile>* chain, VersionId* snapshot);
  Status TakeFromFiles(const v1::CommitFile& file);
  Status Commit(const v1::GlobalCommit& commit);
};

void Follower::Impl::Run() {
  Note(CatchUp());
  while (!Stopping()) {
    if (!options.bus.empty() && redis == nullptr) Connect();
    if (redis == nullptr) {
      if (Wait(kRetryEvery)) return;
      Note(CatchUp());
      continue;
    }
    const Status status = FollowOnce();
    if (status.ok()) continue;
    Note(status);
    if (status.code() == Code::kDeviceError) {
      redis.reset();
      stats.connected = false;
    }
    if (Wait(kRetryEvery)) return;
  }
}

void Follower::Impl::Connect() {
  ++stats.reconnects;
  Result<std::unique_ptr<RedisConnection>> opened = RedisConnection::Open(address, kRedisTimeout);
  if (!opened.ok()) return Note(opened.status());
  redis = std::move(*opened);
  // What was read from another server, or before it lost everything, says nothing about this one.
  cursors.clear();
  stats.connected = true;
}

// Waits for commits and takes them in order. kDeviceError: the connection is gone.
Status Follower::Impl::FollowOnce() {
  const auto entries =
      redis->ReadAfter(kCommitStream, Cursor(kCommitStream), kCommitsAtOnce, kBlock);
  if (!entries.ok()) return entries.status();
  for (const StreamEntry& entry : entries.value()) {
    v1::GlobalCommit commit;
    if (!commit.ParseFromString(entry.message)) {
      ++stats.corrupt;
    } else if (const Status status = Take(commit); !status.ok()) {
      return status;  // the cursor stays: the commit is tried again
    }
    cursors[kCommitStream] = entry.id;
    if (Stopping()) break;
  }
  Note(Status::Ok());
  return Status::Ok();
}

Status Follower::Impl::Take(const v1::GlobalCommit& commit) {
  const VersionId id = IdOf(commit.version());
  if (id.lineage < newest().lineage) {
    ++stats.stale_lineage;
    return Status::Ok();
  }
  if (id.number <= newest().number) {
    ++stats.repeats;
    return Status::Ok();
  }
  if (commit.schema_id() != sink->schema_id()) {
    ++stats.other_schema;
    return {Code::kRejected, Text(id) + " has another schema than the one that is loaded"};
  }
  Status status = Status::Ok();
  if (IdOf(commit.previous()) == newest()) {
    status = TakeFromBus(commit);
    if (status.ok() || status.code() == Code::kDeviceError ||
        status.code() == Code::kResourceExhausted) {
      return status;
    }
    if (status.code() == Code::kCorrupt) ++stats.corrupt;
  }
  ++stats.gaps;
  EMBERTIDE_RETURN_IF_ERROR(CatchUp());
  if (newest().number >= id.number) return Status::Ok();
  if (status.ok()) {
    status = {Code::kNotFound, Text(id) + " follows " + Text(IdOf(commit.previous())) +
                                   ", which neither this node nor a file has"};
  }
  return status;
}

Status Follower::Impl::TakeFromBus(const v1::GlobalCommit& commit) {
  const VersionId id = IdOf(commit.version());
  std::vector<v1::PartitionCommit> partitions;
  EMBERTIDE_RETURN_IF_ERROR(ReadPartitions(commit, &partitions));
  std::vector<Wanted> wanted;
  for (const v1::PartitionCommit& partition : partitions) {
    for (const v1::BucketSequence& bucket : partition.buckets()) {
      wanted.push_back({partition.partition(), bucket, {}, false});
    }
  }
  EMBERTIDE_RETURN_IF_ERROR(ReadBatches(id, &wanted));
  // Nothing is staged before everything is there and proved.
  for (const Wanted& each : wanted) {
    for (const v1::RowBatch& batch : each.batches) {
      EMBERTIDE_RETURN_IF_ERROR(
          sink->Stage(id.number, batch.table_id(), batch.bucket(), batch.records()));
      stats.rows += batch.rows() + batch.tombstones();
    }
  }
  return Commit(commit);
}

Status Follower::Impl::ReadPartitions(const v1::GlobalCommit& commit,
                                      std::vector<v1::PartitionCommit>* out) {
  const VersionId id = IdOf(commit.version());
  std::vector<RedisConnection::Range> ranges;
  for (const v1::PartitionCommitRef& ref : commit.partitions()) {
    const std::string stream = PartitionStream(ref.partition());
    ranges.push_back({stream, Cursor(stream)});
  }
  const auto answers = redis->ReadRanges(ranges, kCommitsAtOnce);
  if (!answers.ok()) return answers.status();
  for (size_t i = 0; i < ranges.size(); ++i) {
    bool found = false;
    for (const StreamEntry& entry : answers.value()[i]) {
      v1::PartitionCommit partition;
      if (!partition.ParseFromString(entry.message)) {
        return {Code::kCorrupt, ranges[i].stream + " holds no partition commit at " + entry.id};
      }
      const VersionId at{partition.version(), partition.lineage()};
      if (at.number > id.number) break;
      cursors[ranges[i].stream] = entry.id;
      if (at != id) continue;
      if (Crc32c(std::as_bytes(std::span(entry.message))) !=
          commit.partitions(static_cast<int>(i)).crc32c()) {
        return {Code::kCorrupt, ranges[i].stream + ": the commit of " + Text(id) +
                                    " is not the one that the global commit names"};
      }
      out->push_back(std::move(partition));
      found = true;
      break;
    }
    if (!found)
      return {Code::kNotFound,
              "the commit of " + Text(id) + " in " + ranges[i].stream + " is missing"};
  }
  return Status::Ok();
}

// Takes one entry of a bucket's stream, if it is of version `id`.
Status Follower::Impl::Keep(VersionId id, const StreamEntry& entry, Wanted* wanted) {
  v1::RowBatch batch;
  if (!batch.ParseFromString(entry.message)) {
    return {Code::kCorrupt, "entry " + entry.id + " is no batch"};
  }
  if (batch.lineage() < id.lineage) {
    ++stats.stale_lineage;
    return Status::Ok();
  }
  if (batch.version() < id.number) {
    ++stats.repeats;
    return Status::Ok();
  }
  EMBERTIDE_RETURN_IF_ERROR(CheckBatch(batch));
  const uint64_t first = wanted->bucket.sequence() - wanted->bucket.batches() + 1;
  if (batch.version() != id.number || batch.table_id() != wanted->bucket.table_id() ||
      batch.bucket() != wanted->bucket.bucket() ||
      batch.sequence() != first + wanted->batches.size()) {
    return {Code::kNotFound, "a batch of " + Text(id) + " is missing before sequence " +
                                 std::to_string(batch.sequence())};
  }
  wanted->batches.push_back(std::move(batch));
  wanted->done = wanted->batches.size() == wanted->bucket.batches();
  return Status::Ok();
}

Status Follower::Impl::ReadBatches(VersionId id, std::vector<Wanted>* wanted) {
  while (true) {
    std::vector<RedisConnection::Range> ranges;
    std::vector<Wanted*> asked;
    for (Wanted& each : *wanted) {
      if (each.done) continue;
      const std::string stream =
          BucketStream(each.partition, each.bucket.table_id(), each.bucket.bucket());
      ranges.push_back({stream, Cursor(stream)});
      asked.push_back(&each);
    }
    if (ranges.empty()) return Status::Ok();
    const auto answers = redis->ReadRanges(ranges, kBatchesAtOnce);
    if (!answers.ok()) return answers.status();
    for (size_t i = 0; i < asked.size(); ++i) {
      if (answers.value()[i].empty()) {
        return {Code::kNotFound, "batches of " + Text(id) + " are missing in " + ranges[i].stream};
      }
      for (const StreamEntry& entry : answers.value()[i]) {
        EMBERTIDE_RETURN_IF_ERROR(Keep(id, entry, asked[i]));
        cursors[ranges[i].stream] = entry.id;
        if (asked[i]->done) break;
      }
    }
  }
}

Status Follower::Impl::Commit(const v1::GlobalCommit& commit) {
  const Result<std::string> tensors = ReadDenseTensors(options.publication, commit);
  if (!tensors.ok()) return tensors.status();
  EMBERTIDE_RETURN_IF_ERROR(sink->Commit(commit, tensors.value()));
  ++stats.versions;
  return Status::Ok();
}

// --- files
// -----------------------------------------------------------------------------------------

// The commits that lead from the node's newest version, or from the snapshot `*snapshot` if its
// number is not 0, to the newest version of the publication; empty if there is nothing newer.
Status Follower::Impl::FindChain(std::vector<v1::CommitFile>* chain, VersionId* snapshot) {
  const VersionId have = newest();
  const std::vector<VersionId> deltas = ListVersions(options.publication + "/deltas", "commit.pb");
  const std::vector<VersionId> snapshots =
      ListVersions(options.publication + "/snapshots", "manifest.json");
  const auto newer = [&](const std::vector<VersionId>& ids) {
    return !ids.empty() && ids.back().number > have.number && ids.back().lineage >= have.lineage;
  };
  VersionId at = newer(deltas) ? deltas.back() : have;
  while (at != have) {
    Result<v1::CommitFile> file = ReadCommitFile(options.publication, at);
    if (!file.ok()) break;  // the chain does not reach us; a snapshot further up may serve
    at = IdOf(file.value().commit().previous());
    chain->push_back(std::move(*file));
    if (at.number < have.number) break;
  }
  std::reverse(chain->begin(), chain->end());
  if (at == have && (newer(deltas) || !newer(snapshots))) return Status::Ok();
  // We are on no chain that leads there: take the newest snapshot and what follows it.
  if (!newer(snapshots)) {
    chain->clear();
    return {Code::kNotFound, "no chain of delta files leads from " + Text(have) + " to " +
                                 Text(deltas.back()) + ", and no newer snapshot is there"};
  }
  *snapshot = snapshots.back();
  std::erase_if(*chain, [&](const v1::CommitFile& file) {
    return file.commit().version().number() <= snapshot->number;
  });
  if (!chain->empty() && IdOf(chain->front().commit().previous()) != *snapshot) chain->clear();
  return Status::Ok();
}

Status Follower::Impl::TakeFromFiles(const v1::CommitFile& file) {
  const VersionId id = IdOf(file.commit().version());
  if (file.commit().schema_id() != sink->schema_id()) {
    ++stats.other_schema;
    return {Code::kRejected, Text(id) + " has another schema than the one that is loaded"};
  }
  for (const v1::PartitionCommit& partition : file.partitions()) {
    EMBERTIDE_RETURN_IF_ERROR(
        ReadDeltaFile(options.publication, id, partition, [&](const v1::RowBatch& batch) -> Status {
          stats.rows += batch.rows() + batch.tombstones();
          return sink->Stage(id.number, batch.table_id(), batch.bucket(), batch.records());
        }));
  }
  EMBERTIDE_RETURN_IF_ERROR(Commit(file.commit()));
  ++stats.catch_ups;
  return Status::Ok();
}

Status Follower::Impl::CatchUp() {
  std::vector<v1::CommitFile> chain;
  VersionId snapshot;
  Status status = FindChain(&chain, &snapshot);
  if (status.ok() && snapshot.number > 0) {
    status = sink->Load(options.publication + "/snapshots/" + FolderName(snapshot));
    if (status.ok()) ++stats.catch_ups;
  }
  for (size_t i = 0; status.ok() && i < chain.size() && !Stopping(); ++i) {
    status = TakeFromFiles(chain[i]);
  }
  if (status.code() == Code::kCorrupt) ++stats.corrupt;
  if (status.code() == Code::kResourceExhausted) ++stats.refused;
  return status;
}

// --- the object
// ------------------------------------------------------------------------------------

Result<std::unique_ptr<Follower>> Follower::Start(const FollowerOptions& options,
                                                  VersionSink* sink) {
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  impl->sink = sink;
  if (!options.bus.empty()) {
    Result<RedisAddress> address = ParseRedisUrl(options.bus);
    if (!address.ok()) return address.status();
    impl->address = std::move(*address);
  }
  std::unique_ptr<Follower> follower(new Follower(std::move(impl)));
  follower->impl_->thread = std::thread([impl = follower->impl_.get()] { impl->Run(); });
  return follower;
}

Follower::Follower(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Follower::~Follower() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
  }
  impl_->wake.notify_all();
  if (impl_->thread.joinable()) impl_->thread.join();
}

const FollowerStats& Follower::stats() const { return impl_->stats; }

std::string Follower::last_error() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->error;
}

Result<std::string> NewestSnapshot(const std::string& publication) {
  const std::vector<VersionId> ids = ListVersions(publication + "/snapshots", "manifest.json");
  if (ids.empty()) {
    return Status(Code::kNotFound, publication +
                                       " holds no snapshot yet: start the trainer, and "
                                       "wait for its first");
  }
  return publication + "/snapshots/" + FolderName(ids.back());
}

}  // namespace embertide
