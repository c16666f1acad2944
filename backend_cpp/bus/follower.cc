// The follower's thread.
#include "embertide/follower.h"

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "base/file.h"
#include "bus/chain.h"
#include "bus/delta.h"
#include "bus/promotion.h"
#include "bus/redis.h"
#include "embertide/checksum.h"

namespace embertide {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kRedisTimeout{2000};
// One wait for the next commit; bounds how long a stop takes.
constexpr milliseconds kBlock{100};
constexpr milliseconds kSoon{1};  // the same while buckets are being added
constexpr size_t kCommitsAtOnce = 64;
// Entries of each stream in one round trip: at most 64 MiB of one bucket's batches.
constexpr size_t kBatchesAtOnce = 64;

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
  uint64_t revision = 0;                       // of the promotion record that the sink was told of
  std::string promotion_file;                  // as read last
  std::string promotion_copy;
  std::chrono::steady_clock::time_point record_looked;  // when that file was looked at last
  std::chrono::steady_clock::time_point looked;         // when the files were looked at last
  std::chrono::steady_clock::time_point tried;          // when Redis was last to be reached
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
  // The model's streams (docs/formats.md, "Bus").
  std::string CommitStream() const { return "e:{" + options.model + ":commit}:log"; }
  std::string PartitionStream(uint32_t partition) const {
    return "e:{" + options.model + ":" + std::to_string(partition) + "}:commit";
  }
  std::string BucketStream(uint32_t partition, uint32_t table, uint32_t bucket) const {
    return "e:{" + options.model + ":" + std::to_string(partition) + "}:" + std::to_string(table) +
           ":" + std::to_string(bucket);
  }
  const std::string& Cursor(const std::string& stream) {
    return cursors.try_emplace(stream, "0-0").first->second;
  }

  void Run();
  void Connect();
  void LookAtPromotion();
  void TakePromotion(const std::string& bytes, const std::string& where, std::string* last);
  bool MayTake(VersionId id);
  Status FollowOnce(milliseconds block);
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
  Status TakeWay(bool by_snapshot);
  Status FindWay(bool by_snapshot, VersionId* snapshot, std::vector<v1::CommitFile>* chain);
  size_t AfterUndone(const std::vector<v1::CommitFile>& chain) const;
  Status TakeFromFiles(const v1::CommitFile& file);
};

// The copy on the bus at every call, the file every `retry_every`.
void Follower::Impl::LookAtPromotion() {
  if (!options.guard) return;
  const auto now = std::chrono::steady_clock::now();
  if (now - record_looked >= options.retry_every) {
    record_looked = now;
    const std::string path = options.publication + "/promoted.json";
    const Result<std::string> bytes = ReadWholeFile(path, kMaxPromotionBytes);
    if (bytes.ok()) TakePromotion(bytes.value(), path, &promotion_file);
  }
  if (redis == nullptr) return;
  const std::string key = PromotionKey(options.model);
  const auto copy = redis->Get(key);
  if (copy.ok() && copy.value()) TakePromotion(*copy.value(), key, &promotion_copy);
}

void Follower::Impl::TakePromotion(const std::string& bytes, const std::string& where,
                                   std::string* last) {
  if (bytes == *last) return;
  *last = bytes;
  const Result<Promotion> record = ParsePromotion(bytes, where);
  if (!record.ok()) {
    ++stats.corrupt;
    return Note(record.status());
  }
  if (record.value().revision <= revision) return;
  revision = record.value().revision;
  sink->SetPromotion(record.value());
  // A rollback leads past what is held back.
  for (const Promotion::Undone& undone : record.value().undone) {
    if (undone.to <= newest().number && newest().number < undone.number) Note(CatchUp());
  }
}

bool Follower::Impl::MayTake(VersionId id) {
  if (sink->MayTake(id.number)) return true;
  ++stats.held;
  return false;
}

void Follower::Impl::Run() {
  LookAtPromotion();
  Note(CatchUp());
  stats.caught_up = true;
  while (!Stopping()) {
    LookAtPromotion();
    const bool more = sink->Between();
    const auto now = std::chrono::steady_clock::now();
    if (!options.bus.empty() && redis == nullptr && now - tried >= options.retry_every) Connect();
    if (redis == nullptr) {
      if (Wait(more ? kSoon : std::min(options.retry_every, kBlock))) return;
      if (std::chrono::steady_clock::now() - looked >= options.retry_every) Note(CatchUp());
      continue;
    }
    const Status status = FollowOnce(more ? kSoon : kBlock);
    if (status.ok()) continue;
    Note(status);
    if (status.code() == Code::kBusy) {  // for the guard, which may decide any time
      if (Wait(kBlock)) return;
      continue;
    }
    if (status.code() == Code::kDeviceError) {
      redis.reset();
      stats.connected = false;
    }
    if (Wait(options.retry_every)) return;
  }
}

void Follower::Impl::Connect() {
  tried = std::chrono::steady_clock::now();
  ++stats.reconnects;
  Result<std::unique_ptr<RedisConnection>> opened = RedisConnection::Open(address, kRedisTimeout);
  if (!opened.ok()) return Note(opened.status());
  redis = std::move(*opened);
  // What was read from another server, or before it lost everything, says nothing about this one.
  cursors.clear();
  stats.connected = true;
}

// Waits for commits and takes them in order. kDeviceError: the connection is gone.
Status Follower::Impl::FollowOnce(milliseconds block) {
  const std::string log = CommitStream();
  const auto entries = redis->ReadAfter(log, Cursor(log), kCommitsAtOnce, block);
  if (!entries.ok()) return entries.status();
  if (entries.value().empty() && std::chrono::steady_clock::now() - looked >= options.look_every) {
    Note(CatchUp());
    return Status::Ok();
  }
  for (const StreamEntry& entry : entries.value()) {
    v1::GlobalCommit commit;
    if (!commit.ParseFromString(entry.message)) {
      ++stats.corrupt;
    } else if (const Status status = Take(commit); !status.ok()) {
      return status;  // the cursor stays: the commit is tried again
    }
    cursors[log] = entry.id;
    Note(Status::Ok());
    if (Stopping()) break;
  }
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
  if (!MayTake(id)) {
    return {Code::kBusy, Text(id) + " waits until the guard decides on those before it"};
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
      if (!sink->Holds(bucket.table_id(), bucket.bucket())) continue;
      wanted.push_back({partition.partition(), bucket, {}, false});
    }
  }
  EMBERTIDE_RETURN_IF_ERROR(ReadBatches(id, &wanted));
  const Result<std::string> tensors = ReadDenseTensors(options.publication, commit);
  if (!tensors.ok()) return tensors.status();
  // Nothing is staged before everything is there and proved.
  for (const Wanted& each : wanted) {
    for (const v1::RowBatch& batch : each.batches) {
      EMBERTIDE_RETURN_IF_ERROR(
          sink->Stage(id.number, batch.table_id(), batch.bucket(), batch.records()));
      stats.rows += batch.rows() + batch.tombstones();
    }
  }
  EMBERTIDE_RETURN_IF_ERROR(sink->Commit(commit, tensors.value()));
  ++stats.versions;
  stats.freshness_ms = MsSince(commit.committed_ms());
  return Status::Ok();
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
      const bool stale = at.lineage < id.lineage;
      if (stale) ++stats.stale_lineage;
      if (!stale && at.number > id.number) break;
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
  const uint64_t first = wanted->bucket.sequence() - wanted->bucket.batches() + 1;
  // A publisher whose connection broke may have sent its batches of this version twice.
  const bool again = batch.version() == id.number && batch.lineage() == id.lineage &&
                     batch.sequence() < first + wanted->batches.size();
  if (batch.version() < id.number || again) {
    ++stats.repeats;
    return Status::Ok();
  }
  EMBERTIDE_RETURN_IF_ERROR(CheckBatch(batch));
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

// --- files ---------------------------------------------------------------------------------------

// Finds `*snapshot`, if its number is not 0, and the commits after it (or after the node's newest
// version) to take. The chain alone is enough where it reaches as far; `by_snapshot`: it could not
// be taken.
Status Follower::Impl::FindWay(bool by_snapshot, VersionId* snapshot,
                               std::vector<v1::CommitFile>* chain) {
  const VersionId have = newest();
  const std::vector<VersionId> deltas = ListVersions(options.publication + "/deltas", "commit.pb");
  std::vector<VersionId> snapshots =
      Newer(ListVersions(options.publication + "/snapshots", "manifest.json"), have);
  std::erase_if(snapshots, [this](VersionId id) { return !sink->MayLoad(id.number); });
  const auto find_chain = [&](VersionId from) {
    return NewestChain(options.publication, from, deltas, [this] { ++stats.corrupt; });
  };
  *chain = by_snapshot ? std::vector<v1::CommitFile>() : find_chain(have);
  const VersionId end = chain->empty() ? have : IdOf(chain->back().commit().version());
  if (!snapshots.empty() && snapshots.front().number > end.number) {
    *snapshot = snapshots.front();
    *chain = find_chain(*snapshot);
  } else if (const auto newer = Newer(deltas, have); chain->empty() && !newer.empty()) {
    return {Code::kNotFound, "no chain of delta files leads from " + Text(have) + " to " +
                                 Text(newer.front()) + ", and no newer snapshot is there"};
  }
  return Status::Ok();
}

// Nothing is staged before all files are proved: what is staged of a version that then fails would
// show in the next one.
Status Follower::Impl::TakeFromFiles(const v1::CommitFile& file) {
  const VersionId id = IdOf(file.commit().version());
  if (file.commit().schema_id() != sink->schema_id()) {
    ++stats.other_schema;
    return {Code::kRejected, Text(id) + " has another schema than the one that is loaded"};
  }
  const Result<std::string> tensors = ReadDenseTensors(options.publication, file.commit());
  if (!tensors.ok()) return tensors.status();
  const auto each_batch = [&](const std::function<Status(const v1::RowBatch&)>& consume) -> Status {
    for (const v1::PartitionCommit& partition : file.partitions()) {
      EMBERTIDE_RETURN_IF_ERROR(ReadDeltaFile(options.publication, id, partition, consume));
    }
    return Status::Ok();
  };
  EMBERTIDE_RETURN_IF_ERROR(each_batch([](const v1::RowBatch&) { return Status::Ok(); }));
  EMBERTIDE_RETURN_IF_ERROR(each_batch([&](const v1::RowBatch& batch) -> Status {
    if (!sink->Holds(batch.table_id(), batch.bucket())) return Status::Ok();
    stats.rows += batch.rows() + batch.tombstones();
    return sink->Stage(id.number, batch.table_id(), batch.bucket(), batch.records());
  }));
  EMBERTIDE_RETURN_IF_ERROR(sink->Commit(file.commit(), tensors.value()));
  ++stats.versions;
  stats.freshness_ms = MsSince(file.commit().committed_ms());
  ++stats.catch_ups;
  return Status::Ok();
}

// A rollback holds every row that changed since the version that it restores: from there on it may
// be taken in place of all commits before it. Gives the commit to begin with.
size_t Follower::Impl::AfterUndone(const std::vector<v1::CommitFile>& chain) const {
  for (size_t i = chain.size(); i-- > 1;) {
    const uint64_t restored = chain[i].commit().rollback_to();
    if (restored > 0 && restored <= newest().number) return i;
  }
  return 0;
}

Status Follower::Impl::TakeWay(bool by_snapshot) {
  std::vector<v1::CommitFile> chain;
  VersionId snapshot;
  EMBERTIDE_RETURN_IF_ERROR(FindWay(by_snapshot, &snapshot, &chain));
  if (snapshot.number > 0) {
    EMBERTIDE_RETURN_IF_ERROR(
        sink->Load(options.publication + "/snapshots/" + FolderName(snapshot)));
    ++stats.catch_ups;
  }
  for (size_t i = AfterUndone(chain); i < chain.size(); ++i) {
    if (Stopping() || !MayTake(IdOf(chain[i].commit().version()))) break;
    const uint64_t before = newest().number;
    EMBERTIDE_RETURN_IF_ERROR(TakeFromFiles(chain[i]));
    if (i > 0 && before < chain[i - 1].commit().version().number()) stats.skipped += i;
  }
  return Status::Ok();
}

Status Follower::Impl::CatchUp() {
  looked = std::chrono::steady_clock::now();
  Status status = TakeWay(/*by_snapshot=*/false);
  const bool harmed = status.code() == Code::kCorrupt || status.code() == Code::kNotFound;
  if (status.code() == Code::kCorrupt) ++stats.corrupt;
  // A newer snapshot leads past a file that is harmed or gone.
  const auto snapshots = ListVersions(options.publication + "/snapshots", "manifest.json");
  if (harmed && !Newer(snapshots, newest()).empty()) {
    status = TakeWay(/*by_snapshot=*/true);
    if (status.code() == Code::kCorrupt) ++stats.corrupt;
  }
  if (status.code() == Code::kResourceExhausted) ++stats.refused;
  return status;
}

// --- the object ----------------------------------------------------------------------------------

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
  return NewestSnapshot(publication, Promotion());
}

Result<std::string> NewestSnapshot(const std::string& publication, const Promotion& promotion) {
  const std::vector<VersionId> ids =
      Newer(ListVersions(publication + "/snapshots", "manifest.json"), {});
  for (const VersionId id : ids) {
    if (promotion.MaySee(id.number)) return publication + "/snapshots/" + FolderName(id);
  }
  if (ids.empty()) {
    return Status(Code::kNotFound, publication +
                                       " holds no snapshot yet: start the trainer, and "
                                       "wait for its first");
  }
  return publication + "/snapshots/" + FolderName(ids.front());
}

}  // namespace embertide
