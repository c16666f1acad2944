// The follower's thread.
#include "embertide/follower.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <stop_token>
#include <thread>

#include "base/background_task.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/sleep.h"
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
// Messages have at most these bytes (update.proto), and a reply kMaxReplyBytes.
constexpr size_t kMaxCommitBytes = size_t{4} << 20;
constexpr size_t kCommitsAtOnce = kMaxReplyBytes / kMaxCommitBytes - 1;
constexpr size_t kBatchesAtOnce = kMaxBytesInFlight / kMaxBatchBytes;
constexpr size_t kRangesAtOnce = 4096;
constexpr size_t kWaysTried = 4;  // by files, past those that are harmed
// Between attempts of a version whose rows find no room, and of delta files that fail: they are
// small, and a drive that has room again is to be used within seconds.
constexpr milliseconds kLongestSmall{5000};
// A version on time is taken in turns with requests: a fifth of the time at work, or half of it
// when it is older than kEarly. One that is late, or that others wait for, is taken at once, and a
// late one from a file if there is one.
constexpr std::chrono::microseconds kTurn{400};
constexpr std::chrono::microseconds kLongRest{1600};
constexpr std::chrono::microseconds kShortRest{400};
constexpr milliseconds kEarly{250};
constexpr milliseconds kOnTime{500};
// A node says what it has applied so often, and is taken for gone when it has not for so long.
constexpr milliseconds kNoteEvery{5000};
constexpr milliseconds kNoteSoonest{250};
constexpr milliseconds kNoteExpires{30'000};

// An entry's id: NUMBER-SUFFIX.
std::string EntryId(uint64_t number, uint64_t suffix) {
  return std::to_string(number) + "-" + std::to_string(suffix);
}

bool IsOnTime(int64_t committed_ms) {
  return MsSince(committed_ms) < static_cast<uint64_t>(kOnTime.count());
}

// After a turn of a version that was committed then.
std::chrono::microseconds RestOf(int64_t committed_ms) {
  if (!IsOnTime(committed_ms)) return {};
  return MsSince(committed_ms) < static_cast<uint64_t>(kEarly.count()) ? kLongRest : kShortRest;
}

// "NAME.HOST.PID.N": of a node's follower and of no other.
std::string NoteName(const std::string& node) {
  static std::atomic<uint64_t> followers{0};
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return node + "." + host.data() + "." + std::to_string(::getpid()) + "." +
         std::to_string(++followers);
}

}  // namespace

struct Follower::Impl {
  FollowerOptions options;
  RedisAddress address;
  VersionSink* sink = nullptr;
  FollowerStats stats;
  std::stop_source stop;
  mutable Mutex mutex;
  std::string error EMBERTIDE_GUARDED_BY(mutex);
  std::unique_ptr<RedisConnection> redis;
  std::string cursor;  // id of the last commit read
  std::string note_name;
  int64_t committed_ms = 0;  // of the version that is being taken
  bool more_wait = false;    // whether versions after it are there already
  std::chrono::steady_clock::time_point turn_began;
  uint64_t staged_rows = 0;  // of the version that is being taken
  uint64_t noted = 0;        // version that Redis was told last
  std::chrono::steady_clock::time_point noted_at;
  uint64_t revision = 0;       // of the promotion record that the sink was told of
  std::string promotion_file;  // as read last
  std::string promotion_copy;
  std::chrono::steady_clock::time_point record_looked;  // when that file was looked at last
  std::chrono::steady_clock::time_point looked;         // when the files were looked at last
  std::chrono::steady_clock::time_point tried;          // when Redis was last to be reached
  // The last catch-up that failed, and when it may be tried again.
  struct Failure {
    VersionId snapshot;
    VersionId end;  // of the chain
    Status status;
    milliseconds back_off{0};
    std::chrono::steady_clock::time_point again;
  };
  std::optional<Failure> failure;
  milliseconds full_back_off{0};         // after a version of the bus for which there was no room
  bool begun = false;                    // the files that were there at the start were looked at
  Status last = Status::Ok();            // as `error`
  std::unique_ptr<BackgroundTask> task;  // last: its thread uses the members above

  VersionId newest() const { return {sink->newest_number(), sink->newest_lineage()}; }

  // False: the thread is to end.
  bool Wait(milliseconds time) const { return SleepFor(stop.get_token(), time); }
  bool Stopping() const { return stop.stop_requested(); }
  void Note(const Status& status) {
    last = status;
    const MutexLock lock(mutex);
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
  // Before all commits that are newer than what the node has.
  void ResetCursor() { cursor = EntryId(newest().number, UINT64_MAX); }

  Status Round();
  void Connect();
  void LookAtPromotion();
  void TakePromotion(const std::string& bytes, const std::string& where, std::string* last);
  bool MayTake(VersionId id);
  Status FollowOnce(milliseconds block);
  Status Take(const v1::GlobalCommit& commit);
  Status TakeFromBus(const v1::GlobalCommit& commit);
  Status NoteApplied();
  // One bucket's batches of a version: its sequences from `next` to `last`.
  struct Wanted {
    uint32_t partition = 0;
    uint32_t table = 0;
    uint32_t bucket = 0;
    uint64_t next = 0;
    uint64_t last = 0;
    uint64_t max_bytes = 0;  // of them all
  };
  Status ReadPartitions(const v1::GlobalCommit& commit, std::vector<Wanted>* wanted);
  Status TakeBatches(VersionId id, std::vector<Wanted> wanted);
  Status TakeBatch(VersionId id, const std::string& message, Wanted* wanted);
  void TakeTurns();
  Status Stage(const v1::RowBatch& batch);
  Status StageAndCommit(const v1::GlobalCommit& commit, const std::string& tensors,
                        const std::function<Status()>& stage);
  Status CatchUp();
  // From what the node has to the newest version, by files.
  struct CatchUpPath {
    VersionId snapshot;  // number 0: none
    std::vector<ChainLink> chain;
  };
  // The sources that a search for a path leaves out, since they are corrupt or gone.
  struct SkippedSources {
    bool chain = false;  // from what the node has
    std::set<VersionId> snapshots;
  };
  Status FindPath(const SkippedSources& skipped, CatchUpPath* path);
  Status TakePath(const CatchUpPath& path, SkippedSources* skipped);
  bool IsPutOff(const CatchUpPath& path);
  void PutOff(const CatchUpPath& path, const Status& status);
  size_t AfterUndone(const std::vector<ChainLink>& chain) const;
  Status TakeFromFiles(VersionId id);
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

// Says how it is doing: a version that waits for the guard is no failure.
Status Follower::Impl::Round() {
  if (!begun) {
    LookAtPromotion();
    Note(CatchUp());
    begun = true;  // an exception has it looked at again
  }
  if (Stopping()) return Status::Ok();
  LookAtPromotion();
  const bool more = sink->OnIdle();
  const auto now = std::chrono::steady_clock::now();
  if (!options.bus.empty() && redis == nullptr && now - tried >= options.retry_every) Connect();
  if (redis == nullptr) {
    stats.caught_up = true;
    if (!Wait(more ? kSoon : std::min(options.retry_every, kBlock))) return Status::Ok();
    if (std::chrono::steady_clock::now() - looked >= options.retry_every) Note(CatchUp());
    return last;
  }
  // The bus may have versions beyond a file that is corrupt or missing.
  const VersionId before = newest();
  Status status = FollowOnce(more || !stats.caught_up ? kSoon : kBlock);
  if (newest() == before) stats.caught_up = true;
  if (status.ok()) status = NoteApplied();
  if (status.ok()) return last;
  Note(status);
  if (status.code() == Code::kBusy) {  // for the guard, which may decide any time
    Wait(kBlock);
    return Status::Ok();
  }
  if (status.code() == Code::kDeviceError) {
    redis.reset();
    stats.connected = false;
  }
  // A version that does not fit will not fit half a second later, and each attempt reads it again.
  full_back_off = status.code() == Code::kResourceExhausted
                      ? std::max(options.retry_every, std::min(2 * full_back_off, kLongestSmall))
                      : options.retry_every;
  Wait(full_back_off);
  return status;
}

void Follower::Impl::Connect() {
  tried = std::chrono::steady_clock::now();
  ++stats.reconnects;
  Result<std::unique_ptr<RedisConnection>> opened = RedisConnection::Open(address, kRedisTimeout);
  if (!opened.ok()) return Note(opened.status());
  redis = std::move(*opened);
  ResetCursor();
  noted = 0;
  stats.connected = true;
}

// Says in Redis which version this node has applied, so that the publisher keeps what follows it.
// A Redis that is full, or to which the node may not write, keeps less; that is counted.
Status Follower::Impl::NoteApplied() {
  const auto now = std::chrono::steady_clock::now();
  const uint64_t number = newest().number;
  if (now - noted_at < (number == noted ? kNoteEvery : kNoteSoonest)) return Status::Ok();
  const std::string key = "e:{" + options.model + ":commit}:node";
  Status status = redis->Execute({{"SADD", key + "s", note_name},
                                  {"SET", key + ":" + note_name, std::to_string(number), "PX",
                                   std::to_string(kNoteExpires.count())}});
  noted = number;
  noted_at = now;
  if (status.code() != Code::kRejected) return status;
  ++stats.unnoted;
  return Status::Ok();
}

// Waits for commits and takes them in order. kDeviceError: the connection is gone.
Status Follower::Impl::FollowOnce(milliseconds block) {
  const std::string log = CommitStream();
  const auto entries = redis->ReadAfter(log, cursor, kCommitsAtOnce, block);
  if (!entries.ok()) return entries.status();
  if (entries.value().empty() && std::chrono::steady_clock::now() - looked >= options.look_every) {
    const VersionId before = newest();
    Note(CatchUp());
    if (newest() != before)
      ResetCursor();  // the log may have been begun anew, with smaller numbers
    return Status::Ok();
  }
  for (const StreamEntry& entry : entries.value()) {
    more_wait = &entry != &entries.value().back();
    v1::GlobalCommit commit;
    if (!commit.ParseFromString(entry.message)) {
      ++stats.corrupt;
    } else if (const Status status = Take(commit); !status.ok()) {
      return status;  // the cursor stays: the commit is tried again
    }
    cursor = entry.id;
    full_back_off = milliseconds(0);
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
  if (!IsOnTime(commit.committed_ms()) &&
      std::chrono::steady_clock::now() - looked >= options.retry_every) {
    // Over a slow link a node would fall back ever further; files may be nearer.
    static_cast<void>(CatchUp());
    if (newest().number >= id.number) return Status::Ok();
  }
  Status status = Status::Ok();
  if (IdOf(commit.previous()) == newest()) {
    status = TakeFromBus(commit);
    if (status.code() == Code::kResourceExhausted) ++stats.refused;
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

// Memory: some MiB, whatever the version's size.
Status Follower::Impl::TakeFromBus(const v1::GlobalCommit& commit) {
  const Result<std::string> tensors = ReadDenseTensors(options.publication, commit);
  if (!tensors.ok()) return tensors.status();
  std::vector<Wanted> wanted;
  EMBERTIDE_RETURN_IF_ERROR(ReadPartitions(commit, &wanted));
  return StageAndCommit(commit, tensors.value(),
                        [&] { return TakeBatches(IdOf(commit.version()), std::move(wanted)); });
}

// `stage` calls Stage with each batch. A version that fails leaves no row.
Status Follower::Impl::StageAndCommit(const v1::GlobalCommit& commit, const std::string& tensors,
                                      const std::function<Status()>& stage) {
  staged_rows = 0;
  committed_ms = commit.committed_ms();
  turn_began = std::chrono::steady_clock::now();
  Status status = stage();
  if (status.ok()) status = sink->Commit(commit, tensors);
  if (!status.ok()) {
    sink->DropStaged();
    return status;
  }
  ++stats.versions;
  stats.rows += staged_rows;
  stats.freshness_ms = MsSince(commit.committed_ms());
  return Status::Ok();
}

// A burst of some milliseconds on every core would be seen in the p99 of requests. A lower priority
// does not avoid it: a process keeps its share of a core, whatever its threads' priorities.
void Follower::Impl::TakeTurns() {
  if (std::chrono::steady_clock::now() - turn_began < kTurn) return;
  if (!more_wait) std::this_thread::sleep_for(RestOf(committed_ms));
  turn_began = std::chrono::steady_clock::now();
}

// The next batch, proved, of the version that is being taken.
Status Follower::Impl::Stage(const v1::RowBatch& batch) {
  if (Stopping()) return {Code::kUnavailable, "the node is ending"};
  TakeTurns();
  staged_rows += batch.rows() + batch.tombstones();
  return sink->Stage(batch.version(), batch.table_id(), batch.bucket(), batch.records());
}

// Finds which batches to read.
Status Follower::Impl::ReadPartitions(const v1::GlobalCommit& commit, std::vector<Wanted>* wanted) {
  const VersionId id = IdOf(commit.version());
  std::vector<RedisConnection::Range> ranges;
  for (const v1::PartitionCommitRef& ref : commit.partitions()) {
    const std::string entry = EntryId(id.number, id.lineage);
    ranges.push_back({PartitionStream(ref.partition()), entry, entry, 1, kMaxCommitBytes});
  }
  size_t found = 0;
  EMBERTIDE_RETURN_IF_ERROR(redis->ReadRanges(ranges, [&](size_t i, const StreamEntry& entry) {
    v1::PartitionCommit partition;
    if (Crc32c(std::as_bytes(std::span(entry.message))) !=
            commit.partitions(static_cast<int>(i)).crc32c() ||
        !partition.ParseFromString(entry.message) ||
        VersionId{partition.version(), partition.lineage()} != id) {
      return Status(Code::kCorrupt, ranges[i].stream + ": the commit of " + Text(id) +
                                        " is not the one that the global commit names");
    }
    for (const v1::BucketSequence& each : partition.buckets()) {
      if (each.batches() == 0 || each.batches() > each.sequence()) {
        return Status(Code::kCorrupt, ranges[i].stream + ": " + Text(id) + " has " +
                                          std::to_string(each.batches()) + " batches of a bucket");
      }
      if (!sink->Holds(each.table_id(), each.bucket())) continue;
      wanted->push_back({partition.partition(), each.table_id(), each.bucket(),
                         each.sequence() - each.batches() + 1, each.sequence(),
                         partition.delta_bytes()});
    }
    ++found;
    return Status::Ok();
  }));
  if (found == ranges.size()) return Status::Ok();
  return {Code::kNotFound, std::to_string(ranges.size() - found) + " partition commits of " +
                               Text(id) + " are missing"};
}

// Reads what the partition commits say there is, and nothing else: an entry's id names its version
// and place. Memory: some MiB, whatever the version's size.
Status Follower::Impl::TakeBatches(VersionId id, std::vector<Wanted> wanted) {
  std::vector<RedisConnection::Range> ranges;
  struct Piece {
    Wanted* wanted;
    uint64_t end;  // the sequence after its last
  };
  std::vector<Piece> pieces;  // what each range is of
  const auto read = [&]() -> Status {
    if (Stopping()) return {Code::kUnavailable, "the node is ending"};
    EMBERTIDE_RETURN_IF_ERROR(redis->ReadRanges(ranges, [&](size_t i, const StreamEntry& entry) {
      return TakeBatch(id, entry.message, pieces[i].wanted);
    }));
    for (size_t i = 0; i < pieces.size(); ++i) {
      const Wanted& each = *pieces[i].wanted;
      if (each.next >= pieces[i].end) continue;
      return {Code::kNotFound, "batch " + std::to_string(each.next) + " of " + Text(id) +
                                   " is missing in " + ranges[i].stream};
    }
    ranges.clear();
    pieces.clear();
    return Status::Ok();
  };
  for (Wanted& each : wanted) {
    const std::string stream = BucketStream(each.partition, each.table, each.bucket);
    const uint64_t first = each.next;
    for (uint64_t at = first; at <= each.last; at += kBatchesAtOnce) {
      const size_t count = std::min<uint64_t>(kBatchesAtOnce, each.last - at + 1);
      const uint64_t suffix = (id.lineage << 32) + (at - first);
      ranges.push_back({stream, EntryId(id.number, suffix), EntryId(id.number, suffix + count - 1),
                        count, std::min(count * uint64_t{kMaxBatchBytes}, each.max_bytes)});
      pieces.push_back({&each, at + count});
      if (ranges.size() == kRangesAtOnce) EMBERTIDE_RETURN_IF_ERROR(read());
    }
  }
  return read();
}

Status Follower::Impl::TakeBatch(VersionId id, const std::string& message, Wanted* wanted) {
  v1::RowBatch batch;
  if (!batch.ParseFromString(message)) {
    return {Code::kCorrupt, "an entry of " + Text(id) + " is no batch"};
  }
  EMBERTIDE_RETURN_IF_ERROR(CheckBatch(batch));
  if (batch.version() != id.number || batch.lineage() != id.lineage ||
      batch.table_id() != wanted->table || batch.bucket() != wanted->bucket ||
      batch.sequence() != wanted->next) {
    return {Code::kNotFound, "a batch of " + Text(id) + " is missing before sequence " +
                                 std::to_string(batch.sequence())};
  }
  ++wanted->next;
  return Stage(batch);
}

// --- files ---------------------------------------------------------------------------------------

// Finds the path to the newest version. The chain alone is enough where it reaches as far.
Status Follower::Impl::FindPath(const SkippedSources& skipped, CatchUpPath* path) {
  const VersionId have = newest();
  const std::vector<VersionId> deltas = ListVersions(options.publication + "/deltas", "commit.pb");
  std::vector<VersionId> snapshots =
      Newer(ListVersions(options.publication + "/snapshots", "manifest.json"), have);
  std::erase_if(snapshots, [&](VersionId id) {
    return skipped.snapshots.contains(id) || !sink->MayLoad(id.number);
  });
  const auto find_chain = [&](VersionId from) {
    return NewestChain(options.publication, from, deltas, [this] { ++stats.corrupt; });
  };
  if (!skipped.chain) path->chain = find_chain(have);
  const VersionId end = path->chain.empty() ? have : path->chain.back().id;
  if (!snapshots.empty() && snapshots.front().number > end.number) {
    path->snapshot = snapshots.front();
    path->chain = find_chain(path->snapshot);
  } else if (const auto newer = Newer(deltas, have); path->chain.empty() && !newer.empty()) {
    return {Code::kNotFound, "no chain of delta files leads from " + Text(have) + " to " +
                                 Text(newer.front()) + ", and no newer snapshot is there"};
  }
  return Status::Ok();
}

Status Follower::Impl::TakeFromFiles(VersionId id) {
  const Result<v1::CommitFile> file = ReadCommitFile(options.publication, id);
  if (!file.ok()) return file.status();
  const v1::GlobalCommit& commit = file.value().commit();
  if (commit.schema_id() != sink->schema_id()) {
    ++stats.other_schema;
    return {Code::kRejected, Text(id) + " has another schema than the one that is loaded"};
  }
  const Result<std::string> tensors = ReadDenseTensors(options.publication, commit);
  if (!tensors.ok()) return tensors.status();
  EMBERTIDE_RETURN_IF_ERROR(StageAndCommit(commit, tensors.value(), [&]() -> Status {
    for (const v1::PartitionCommit& partition : file.value().partitions()) {
      EMBERTIDE_RETURN_IF_ERROR(ReadDeltaFile(options.publication, id, partition,
                                              [&](const v1::RowBatch& batch) -> Status {
                                                if (!sink->Holds(batch.table_id(), batch.bucket()))
                                                  return Status::Ok();
                                                return Stage(batch);
                                              }));
    }
    return Status::Ok();
  }));
  ++stats.catch_ups;
  return Status::Ok();
}

// A rollback holds every row that changed since the version that it restores: from there on it may
// be taken in place of all commits before it. Gives the commit to begin with.
size_t Follower::Impl::AfterUndone(const std::vector<ChainLink>& chain) const {
  for (size_t i = chain.size(); i-- > 1;) {
    const uint64_t restored = chain[i].rollback_to;
    if (restored > 0 && restored <= newest().number) return i;
  }
  return 0;
}

// Notes in `*skipped` what could not be taken.
Status Follower::Impl::TakePath(const CatchUpPath& path, SkippedSources* skipped) {
  if (path.snapshot.number > 0) {
    const Status status = sink->Load(
        options.publication + "/snapshots/" + FolderName(path.snapshot), stop.get_token());
    if (!status.ok()) {
      skipped->snapshots.insert(path.snapshot);
      return status;
    }
    ++stats.catch_ups;
  }
  const std::vector<ChainLink>& chain = path.chain;
  for (size_t i = AfterUndone(chain); i < chain.size(); ++i) {
    if (Stopping() || !MayTake(chain[i].id)) break;
    const uint64_t before = newest().number;
    more_wait = i + 1 < chain.size();
    if (const Status status = TakeFromFiles(chain[i].id); !status.ok()) {
      skipped->chain = true;
      return status;
    }
    if (i > 0 && before < chain[i - 1].id.number) stats.skipped += i;
  }
  return Status::Ok();
}

// Where a file is corrupt or gone, another path may lead past it: a newer snapshot past a delta
// file, the delta files or an older snapshot past a snapshot.
Status Follower::Impl::CatchUp() {
  looked = std::chrono::steady_clock::now();
  SkippedSources skipped;
  Status status = Status::Ok();
  CatchUpPath first;
  for (size_t tried = 0; tried < kWaysTried; ++tried) {
    CatchUpPath path;
    const Status found = FindPath(skipped, &path);
    const bool is_way = found.ok() && (path.snapshot.number > 0 || !path.chain.empty());
    if (!is_way) {
      if (tried == 0) status = found;
      break;
    }
    if (tried == 0) {
      if (IsPutOff(path) && failure) return failure->status;
      first = path;
    }
    status = TakePath(path, &skipped);
    if (Stopping()) return Status::Ok();
    if (status.code() == Code::kCorrupt) ++stats.corrupt;
    // kRejected: a snapshot of another schema is behind the last version of ours.
    if (status.code() != Code::kCorrupt && status.code() != Code::kNotFound &&
        status.code() != Code::kRejected) {
      break;
    }
  }
  if (status.code() == Code::kResourceExhausted) ++stats.refused;
  if (status.ok()) {
    failure.reset();
  } else if (first.snapshot.number > 0 || !first.chain.empty()) {
    PutOff(first, status);
  }
  return status;
}

// Files that failed would fail again, and reading them costs as much as it did.
bool Follower::Impl::IsPutOff(const CatchUpPath& path) {
  if (!failure) return false;
  const VersionId end = path.chain.empty() ? VersionId() : path.chain.back().id;
  if (failure->snapshot != path.snapshot || failure->end != end) {
    failure.reset();
    return false;
  }
  if (std::chrono::steady_clock::now() >= failure->again) return false;
  if (failure->status.code() == Code::kResourceExhausted && sink->MayFit()) return false;
  ++stats.backed_off;
  return true;
}

void Follower::Impl::PutOff(const CatchUpPath& path, const Status& status) {
  const milliseconds before = failure ? failure->back_off : milliseconds(0);
  const milliseconds longest =
      std::max(options.retry_every, path.snapshot.number > 0
                                        ? options.longest_back_off
                                        : std::min(kLongestSmall, options.longest_back_off));
  const milliseconds back_off = std::clamp(2 * before, options.retry_every, longest);
  failure = Failure{path.snapshot, path.chain.empty() ? VersionId() : path.chain.back().id, status,
                    back_off, std::chrono::steady_clock::now() + back_off};
}

// --- the object ----------------------------------------------------------------------------------

Result<std::unique_ptr<Follower>> Follower::Start(const FollowerOptions& options,
                                                  VersionSink* sink) {
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  impl->sink = sink;
  impl->note_name = NoteName(options.node);
  if (!options.bus.empty()) {
    Result<RedisAddress> address = ParseRedisUrl(options.bus);
    if (!address.ok()) return address.status();
    impl->address = std::move(*address);
  }
  std::unique_ptr<Follower> follower(new Follower(std::move(impl)));
  follower->impl_->task = std::make_unique<BackgroundTask>(
      TaskOptions{.name = "follower", .board = options.tasks, .own_pace = true},
      [impl = follower->impl_.get()](const std::stop_token&) { return impl->Round(); });
  return follower;
}

Follower::Follower(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Follower::~Follower() {
  impl_->stop.request_stop();
  impl_->task.reset();
}

const FollowerStats& Follower::stats() const { return impl_->stats; }

std::string Follower::last_error() const {
  const MutexLock lock(impl_->mutex);
  return impl_->error;
}

Result<std::vector<std::string>> SnapshotsToTry(const std::string& publication,
                                                const Promotion& promotion,
                                                uint64_t first_version) {
  std::vector<VersionId> ids = Newer(ListVersions(publication + "/snapshots", "manifest.json"), {});
  std::erase_if(ids, [first_version](VersionId id) { return id.number < first_version; });
  if (ids.empty() && first_version > 0) {
    return Status(Code::kNotFound, publication + " holds no snapshot of version " +
                                       std::to_string(first_version) + " or a later one");
  }
  if (ids.empty()) {
    return Status(Code::kNotFound, publication +
                                       " holds no snapshot yet: start the trainer, and "
                                       "wait for its first");
  }
  std::ranges::stable_partition(ids, [&](VersionId id) { return promotion.MaySee(id.number); });
  std::vector<std::string> paths;
  paths.reserve(ids.size());
  for (const VersionId id : ids) paths.push_back(publication + "/snapshots/" + FolderName(id));
  return paths;
}

}  // namespace embertide
