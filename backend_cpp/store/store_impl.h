// Store::Impl: the state of a store and the operations its files share. Private to this folder.
//
//   store.cc       open, pin, stats          versions.cc   stage, commit, fold
//   holding.cc     buckets added, dropped    training.cc   rows pruned and taken
//   finder.cc      where a batch's rows lie  training_step.cc   rows updated,
//   pruning.cc     what rows are worth         part_worker.cc     by its threads,
//   prune_state.cc what checkpoints have of it late_keys.cc       made and brought
//   counting.cc    events of keys
//   lookup.cc      batched reads
//   hbm_tier.cc    the tier above DDR
//   residency.cc   room: evict, move, reclaim              integrity.cc  every invariant
//   shares.cc      bytes that tables may have in DDR       ssd_batch.cc  reads for a writer
//   compaction.cc  rows moved to and on the SSD   upkeep.cc     promotions, room ahead: Maintain
//   sealing.cc     what outlives a kill           mending.cc    rows of bad blocks
#pragma once

#include <atomic>
#include <bit>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/crew.h"
#include "base/mutex.h"
#include "embertide/hash.h"
#include "embertide/store.h"
#include "store/decay.h"
#include "store/group_price.h"
#include "store/hbm_tier.h"
#include "store/location.h"
#include "store/prune_price.h"
#include "store/prune_sample.h"
#include "store/reader_registry.h"
#include "store/row_pool.h"
#include "store/seal_file.h"
#include "store/table.h"
#include "store/train_ops.h"

namespace embertide {

// Why rows are written to the SSD.
enum class MoveKind : uint8_t {
  kEvict,      // to make room for others
  kEmptyPage,  // their page is wanted
  kCompact,    // their segment is
};

struct Store::Impl {
  explicit Impl(StoreOptions opts);
  ~Impl();

  StoreOptions options;
  std::vector<Table> tables;
  // Part by part; the part that tables share, if any do, is the first.
  std::vector<std::unique_ptr<RowPool>> pools;
  mutable ReaderRegistry readers{kMaxReaders};
  std::unique_ptr<HbmTier> hbm;  // null without an HBM budget

  std::atomic<uint64_t> newest{0};
  std::atomic<uint64_t> oldest{0};  // of the window
  Mutex commit_mutex;
  // Committed versions, ascending.
  std::deque<uint64_t> window EMBERTIDE_GUARDED_BY(commit_mutex);
  // (table, bucket) that have an older copy.
  std::vector<std::pair<uint32_t, uint32_t>> superseded EMBERTIDE_GUARDED_BY(commit_mutex);
  std::atomic<uint64_t> superseded_until{0};  // the largest `since` of them; 0: none

  // Training.
  const Decay decay{options.utility_decay};
  std::vector<std::unique_ptr<GroupPrice>> groups;  // as options.prune_groups
  std::atomic<uint32_t> tick{0};                    // steps that were begun, modulo RowAux::kTicks
  std::mutex crew_mutex;       // of TakeCrew; taken before any writer lock, or a read begins
  std::unique_ptr<Crew> crew;  // of as many threads as were asked for last

  std::mutex seal_mutex;  // held while one is written
  // Guards the seal's manifest. Taken after a pool's writer lock, never before one.
  std::mutex seal_manifest_mutex;
  std::atomic<uint64_t> seals_dropped{0};
  std::atomic<uint64_t> sealed_version{0};
  std::atomic<uint64_t> seals_written{0};
  std::atomic<uint64_t> seals_failed{0};
  std::atomic<uint64_t> seal_bytes{0};
  std::atomic<double> seal_seconds{0};

  mutable std::atomic<uint64_t> hits[kSources] = {};
  std::atomic<uint64_t> evictions{0};
  std::atomic<uint64_t> evictions_by_writers{0};
  std::atomic<uint64_t> promoted{0};
  std::atomic<uint64_t> refused_promotions{0};
  mutable std::atomic<uint64_t> dropped_accesses{0};
  std::atomic<uint64_t> refused_rows{0};
  std::atomic<uint64_t> reader_waits_given_up{0};
  std::atomic<uint64_t> new_keys_waiting{0};
  std::atomic<uint64_t> dropped_gradients{0};
  std::atomic<uint64_t> refused_gradients{0};
  std::atomic<uint64_t> clipped_gradients{0};
  std::atomic<uint64_t> failed_keys{0};
  std::atomic<uint64_t> unworthy_keys{0};
  std::atomic<uint64_t> worthy_keys_without_room{0};
  std::atomic<uint64_t> compacted_bytes{0};
  std::atomic<uint64_t> compacted_rows{0};
  std::atomic<uint64_t> compactions_forced{0};
  std::atomic<uint64_t> mended_rows{0};
  std::atomic<uint64_t> rows{0};         // index entries of all buckets
  std::atomic<uint64_t> index_bytes{0};  // arrays, nodes and directories, retired ones included

  bool training() const { return options.profile == Profile::kTrain; }
  // The newest copy of a bucket. Requires: the caller is its writer, or the store is of the
  // training profile, whose buckets are always held.
  static Bucket* Newest(const Table& table, uint32_t bucket) {
    return table.buckets[bucket].newest.load();
  }
  // Requires: d < options.devices.
  RowPool* PoolOf(const Table& table, uint32_t d) const {
    return pools[size_t{table.part} * options.devices + d].get();
  }
  void MakePools();
  // The directories of its tiers, its policy and its logs, charged; its file on the SSD, with what
  // `sealed` names of it, or empty.
  Status OpenPool(RowPool* pool, const std::vector<SealedSegment>* sealed);
  void MakeNotes(RowPool* pool);
  // Of a pool's DDR, what it takes before the first bucket.
  uint64_t DirectoryBytes(const RowPool& pool) const;
  // The name of a pool's file on the SSD; empty: it has none.
  std::string LogOf(const RowPool& pool) const;
  Status OpenPolicy(RowPool* pool, const std::string& name);
  uint32_t AuxBytes(const Table& table) const {
    return training() ? RowAux::Bytes(options.optimizer, table.config.learned()) : 0;
  }
  static uint32_t BucketOf(const Table& table, uint64_t hash) {
    return BucketOfHash(hash, table.config.bucket_bits);
  }
  // kInvalidArgument naming what is out of range.
  Status CheckTable(uint32_t table) const;
  // The same, and that its rows are values: for calls that make numbers of them.
  Status CheckValues(uint32_t table) const;
  Status CheckBucket(uint32_t table, uint32_t bucket) const;
  // The crew of so many threads, at least 1, for as long as `lock` is held.
  Crew* TakeCrew(uint32_t threads, std::unique_lock<std::mutex>* lock);

  // Payload that one eviction takes out, so that its SSD write is a few hundred KiB.
  static constexpr uint64_t kEvictBytes = 256 * 1024;
  // And no more than this part of the budget: a batch is what the policy cannot take back.
  static constexpr uint64_t kLeastOverEvicted = 64;
  // With room for rows of less than this share of the budget Maintain makes some ahead of need.
  static constexpr double kLowRoom = 0.03;
  // Rows of one batch of reads for promotions, and then of one hold of the writer lock.
  static constexpr size_t kPromotionsAtOnce = 64;

  // --- residency.cc; the pool's writer is held -------------------------------------------------
  // A DDR slot, evicting to SSD as needed. kResourceExhausted when nothing more can go.
  Result<uint64_t> AllocateDdr(RowPool* pool, const Table& table, uint32_t payload_bytes,
                               uint32_t aux_bytes);
  // In shares.cc: whether a table's share has room for so many bytes of rows more.
  static bool ShareHolds(const RowPool& pool, uint32_t table, uint64_t bytes);
  // Bytes of rows that shall leave a table's share: for the room that it keeps ready ahead of rows
  // that enter, a batch of promotions at least, or because it has shrunk.
  uint64_t ShareLacks(const RowPool& pool, uint32_t table) const;
  // Whether rows of a table may leave for want of room on the pool: those with a share stay while
  // there are others.
  static bool GivesWay(const RowPool& pool, uint32_t table);
  // Evicts rows of the table until its share has room for so many bytes. kResourceExhausted: the
  // SSD takes no more.
  Status MakeShareRoom(RowPool* pool, const Table& table, uint64_t bytes);
  // Evicts some rows of a table that has a share; false if none went.
  bool EvictTable(RowPool* pool, uint32_t table, WriterLock* writer);
  void TakeReserveBack(RowPool* pool);
  // A DDR row with this payload, which becomes the newest of its key.
  Result<Location> StoreRow(RowPool* pool, const Table& table, uint64_t key, uint16_t live,
                            std::span<const std::byte> payload);
  // Room for so many more entries in the bucket's index (and, in training, for noting their
  // changes), evicting rows as needed. To be called before a slot is taken for the new row: a page
  // with a slot that no entry names cannot be emptied.
  Status ReserveEntries(RowPool* pool, Bucket* bucket, uint32_t entries);
  Status ReserveEntry(RowPool* pool, Bucket* bucket) {
    if (!training() && bucket->index.HasRoom()) return Status::Ok();
    return ReserveEntries(pool, bucket, 1);
  }
  // Gives back what entries that are gone took in a bucket's index.
  void ShrinkIndex(RowPool* pool, Bucket* bucket);
  // Inserts a key that has no entry. Requires: ReserveEntry.
  void InsertEntry(Bucket* bucket, uint64_t key, Location location);
  void EraseEntry(Bucket* bucket, uint32_t entry);
  // A version node, charged to the budget. kResourceExhausted as above.
  Result<VersionNode*> NewNode(RowPool* pool);
  // A place was taken, or freed, for a row of the table.
  void CountPlace(RowPool* pool, const Table& table, Location place, bool taken) const;
  // Unlinked: frees when no reader can be at it.
  void RetirePlace(RowPool* pool, const Table& table, Location place);
  void RetireNode(RowPool* pool, VersionNode* node);
  void RetireArrays(RowPool* pool, const BucketIndex::Arrays& arrays);
  // Frees what no reader can hold any more; of a bucket with many rows a part, and the next call
  // another. True: something was freed.
  bool Reclaim(RowPool* pool);
  // As Reclaim, waiting for those readers. kResourceExhausted naming the one that stays longer than
  // options.reader_wait_ms.
  Status AwaitReaders(RowPool* pool);
  // False: it is a bucket, of which a part is left.
  bool Free(RowPool* pool, Retired* retired);
  // One step towards room: reclaims, then takes cold rows, then whole pages out of DDR. Returns
  // `wanted`, which has failed for want of room, when there is nothing left to try.
  Status MakeRoom(RowPool* pool, int round, const Status& wanted);
  // Charges notes of rows on the SSD ahead once more, emptying pages for them, before rows take
  // what came free: without notes none could leave.
  Status ChargeNotes(RowPool* pool);
  // Attempts, making room in between, until it no longer fails for want of room.
  template <typename Attempt>
  Status WithRoom(RowPool* pool, const Attempt& attempt) {
    Status status = attempt();
    for (int round = 0; status.code() == Code::kResourceExhausted; ++round) {
      EMBERTIDE_RETURN_IF_ERROR(MakeRoom(pool, round, status));
      status = attempt();
    }
    return status;
  }
  // Of the pages of a pool, what no row takes; rows count as they are, not as their slots.
  static uint64_t FreeSlotBytes(const RowPool& pool);
  // Pages that rows may take beside what is kept ready for others.
  static uint64_t SparePages(const RowPool& pool);
  // Whether another row must leave for one that enters.
  static bool Full(const RowPool& pool);
  // Bytes of the budget that writers shall find free, for pages of any kind.
  static uint64_t ReadyBytes(const RowPool& pool);
  // A place that may change: an entry's own, or that of a node of its chain.
  struct Holder {
    uint32_t table;
    Bucket* bucket;
    uint32_t entry;
    VersionNode* node;  // null: the entry itself
  };
  static Location PlaceOf(const Holder& holder);
  static void SetPlace(const Holder& holder, Location place);
  // Moves some hundred KiB of DDR rows to SSD, less on a small pool, as its policy or the clock
  // chooses; false if nothing went. Where tables have shares, rows beyond a share go first, then
  // rows of tables without one. `writer` as in WithoutWriter; without one, the rows count as
  // evicted by a writer.
  bool Evict(RowPool* pool, WriterLock* writer);
  // The same, so many bytes as a policy chooses, or as a hand does among the rows of its tables.
  // `chained`: also rows that versions of the window changed, where nothing else can go.
  bool EvictByPolicy(RowPool* pool, uint64_t bytes, WriterLock* writer);
  bool EvictByClock(RowPool* pool, Hand* hand, uint64_t bytes, bool chained, WriterLock* writer);
  // Rows that the policy lets go; returns how many keys it chose for them.
  uint32_t ChooseByPolicy(RowPool* pool, uint64_t wanted, std::vector<Holder>* victims);
  // Calls visit(holder) for all places of an entry.
  template <typename Visit>
  static void ForEachPlace(uint32_t table, Bucket* bucket, uint32_t entry, const Visit& visit);
  // Rows that a pass of the clock hand takes along.
  enum class Sweeping : uint8_t { kCold, kAny, kChained };
  // Passes a clock hand over up to `entries` entries, collecting rows that may leave DDR.
  void Sweep(RowPool* pool, Hand* hand, uint32_t entries, Sweeping sweeping,
             std::vector<Holder>* victims, uint64_t wanted);
  // Moves rows of DDR to the SSD; false if none went.
  bool Demote(RowPool* pool, const std::vector<Holder>& victims, MoveKind kind, WriterLock* writer);
  // Moves the rows of condemned pages that a pass over `entries` entries meets into other pages
  // with room; if `demote`, those that find none to the SSD.
  void MoveCondemned(RowPool* pool, uint32_t entries, bool demote, WriterLock* writer);
  // Entries of the buckets of a hand's tables, used or not: one round of it.
  uint32_t RoundOf(const RowPool* pool, const Hand& hand) const;
  // Returns how many of the entries were passed.
  template <typename Visit>
  uint32_t AdvanceHand(RowPool* pool, Hand* hand, uint32_t entries, Visit visit);

  // --- upkeep.cc; these take the writer themselves, and not for what takes long: `upkeep` is held
  void Maintain(RowPool* pool);
  // In residency.cc: room in DDR before somebody needs it. Cold rows leave, then pages are emptied.
  // Room for `pages` of rows beside what is kept ready.
  void MakeRoomAhead(RowPool* pool, uint32_t pages);
  // Tells the policy what was read since, and gives the rows that it admits from the SSD.
  std::vector<Access> Replay(RowPool* pool);
  // Reads rows from the SSD in one batch and brings them to DDR, but for those that are gone, there
  // already, or changed meanwhile. Counts those for which there is no room or no good block. True:
  // a row lacked a page of its size, though there is room for others.
  bool Promote(RowPool* pool, std::span<const Access> rows);
  // How a row at a place of the SSD is read.
  LogRead ReadOf(const Access& row, Location place, std::byte* to) const;
  // Makes one region of the pages of a pool a huge page, if one is due.
  static void MakeHugePage(RowPool* pool, PagePool* pages);
  // --- and these run under it
  // The entry of a row whose newest place is on the SSD; kNotFound: it has none there.
  uint32_t EntryOnSsd(RowPool* pool, const Access& row, Bucket** bucket) const;
  // Gives a row of the SSD, read to `bytes`, a slot of DDR that was allocated for it.
  void Install(RowPool* pool, uint32_t table, Bucket* bucket, uint64_t key, const std::byte* bytes,
               uint64_t slot);
  // Brings one SSD row to DDR. Ok also when it is gone or already there.
  Status PromoteOne(RowPool* pool, const Access& row);
  // The row in DDR of a key that a batch has read. Errors as ResidentRow.
  Result<Location> BringRow(RowPool* pool, const SsdBatch& batch, size_t i);
  // Brings those of the rows to DDR that are on the SSD and can be read, and lets go of the writer
  // while the drive works. Requires: each key of a table once.
  void BringRows(RowPool* pool, std::span<const Access> rows, WriterLock* writer);

  // --- compaction.cc; the pool's writer is held, but as WithoutWriter says ---------------------
  // Who names this place; nullopt: nobody does any more.
  std::optional<Holder> HolderOf(RowPool* pool, uint32_t table, uint64_t key, Location place);
  // A row that is to lie elsewhere on the SSD, as it was when its bytes were copied.
  struct Moving {
    uint32_t table;
    uint64_t key;
    Location from;
    std::span<const std::byte> bytes;
  };
  // Writes rows to the log, and whoever names their places names the new ones, but for rows that
  // are gone or changed meanwhile. Returns how many moved; an error: none did. Of rows that leave
  // DDR the last ones stay, if there is no room for the notes of all.
  Result<size_t> MoveToLog(RowPool* pool, std::span<const Moving> rows, MoveKind kind,
                           WriterLock* writer);
  // Charges the notes of rows that are to move to the log, of the first of them if there is no room
  // for all; returns of how many rows.
  size_t TakeNotes(RowPool* pool, std::span<const Moving> rows, MoveKind kind) const;
  void GiveNotesBack(RowPool* pool, std::span<const Moving> rows) const;
  // Requires: TakeNotes for them.
  void AddNotes(RowPool* pool, std::span<const Moving> rows, const LogBatch& batch) const;
  // Whether pruning keeps a note of the table's rows on the SSD.
  static bool Noted(const RowPool& pool, const Table& table) {
    return pool.notes != nullptr && table.pruned_with != nullptr;
  }
  // Moves the live rows of some blocks of a segment of which `least_dead` is dead. Returns the
  // bytes read and written, 0 if there is no such segment.
  uint64_t CompactStep(RowPool* pool, double least_dead, WriterLock* writer);
  // A step, if the budget of bytes a second allows it.
  void CompactInBackground(RowPool* pool, WriterLock* writer);
  // Up to a segment, whatever that budget: rows would be refused otherwise. False if none is worth
  // it.
  bool CompactForRoom(RowPool* pool, WriterLock* writer);

  // --- sealing.cc --------------------------------------------------------------------------------
  // All but what the logs keep for it. `dropped`: seals_dropped when it began; given up when that
  // has changed.
  Status WriteSeal(const SealOptions& options, uint64_t dropped);
  // Of the rows of a bucket, those whose hash's low half is part->begin or more; sets part->end.
  // False: it is not held, or has left part->log (which the first slice sets).
  bool TakeSlice(SealPart* part);
  Status PublishSeal(const SealInfo& info, uint64_t dropped);
  // Rows need the room that seals keep in this pool; the newest is gone, one being written ends
  // without success. False: they keep none. Requires: the pool's writer.
  bool DropSeals(RowPool* pool);
  // Requires: nothing is committed yet, and the logs are reopened.
  Status LoadPart(const SealPart& part);
  // The tables and logs, as a seal names them.
  SealInfo DescribeSeal() const;

  // --- mending.cc; the pool's writer is held ---------------------------------------------------
  // The place that answers the key of an entry at a version, if it is of a bad block.
  static std::optional<Holder> BadPlace(const RowPool* pool, const std::set<uint64_t>& blocks,
                                        uint32_t table, Bucket* bucket, uint32_t entry,
                                        uint64_t version);
  // Calls visit(key, place) for all of a bucket's entries of which there is one.
  template <typename Visit>
  static void ForEachBad(const RowPool* pool, const std::set<uint64_t>& blocks, uint32_t table,
                         Bucket* bucket, uint64_t version, const Visit& visit);
  // The newest copy of a bucket, if it is in this pool and answers that version.
  static Bucket* CopyAt(const RowPool* pool, const BucketSlot& slot, uint64_t version);
  // Ok also if the row is not in a bad block any more.
  Status MendOne(RowPool* pool, const Table& table, uint32_t bucket, uint64_t version,
                 const RowRecord& record);

  // --- versions.cc -------------------------------------------------------------------------------
  Status StageOne(RowPool* pool, uint64_t version, uint32_t table, uint32_t number, Bucket* bucket,
                  const RowRecord& record);
  Status StageBase(RowPool* pool, const Table& table, Bucket* bucket, const RowRecord& record);
  // Takes the head of a chain, of a version that is not committed, out of it.
  void UnstageNode(RowPool* pool, VersionNode* node);
  // Folds all versions <= `limit` of a pool. Requires: no reader below `limit`, or ever again.
  void Fold(RowPool* pool, uint64_t limit);
  // The same for the key of a node that `version` has staged.
  void FoldKey(RowPool* pool, const VersionNode& staged, uint64_t version);
  void FoldNode(RowPool* pool, VersionNode* node, uint64_t limit);
  // Of a node that was staged.
  Bucket* BucketOn(RowPool* pool, const VersionNode& node);
  // The window is what it is from now on: folds and retires what left it and no pin needs.
  void LeaveWindow() EMBERTIDE_REQUIRES(commit_mutex);

  // --- holding.cc --------------------------------------------------------------------------------
  // Retires older copies that no pin can read any more.
  void RetireSuperseded(uint64_t limit) EMBERTIDE_REQUIRES(commit_mutex);
  // Unlinks a bucket's versions and retires it, in slices under its pool's writer. Requires:
  // nobody can reach the bucket from now on but readers that have it.
  void RetireBucket(uint32_t table, uint32_t number, Bucket* bucket)
      EMBERTIDE_REQUIRES(commit_mutex);
  // Frees up to so many entries of a bucket from *entry on, and once it is past the last, the
  // bucket: true. Requires: no reader can hold anything of it.
  bool FreeBucket(const Table& table, Bucket* bucket, uint32_t* entry, uint32_t most);
  // All records are of the table and the bucket. Tells how many of them are rows, if asked.
  Status ProveRecords(const Table& table, uint32_t bucket, std::span<const std::byte> records,
                      uint32_t* rows = nullptr) const;

  // --- hbm_tier.cc -------------------------------------------------------------------------------
  // Copies rows that readers missed to HBM.
  void FillHbm();
  // No pin finds the bucket's rows in HBM any more. Requires: as RetireBucket.
  void EndInHbm(uint32_t table, const Bucket& bucket);
  // The row's payload, versions and live mask, if it is in DDR in this pool, asked for often
  // enough and has any. Requires: the pool's writer.
  bool RowForHbm(const RowPool* pool, HbmRow* row) const;

  // --- lookup.cc ---------------------------------------------------------------------------------
  // What a chain or an entry means at a version.
  static Location Resolve(Location location, uint64_t version, uint64_t* changed_at = nullptr);

  // --- training.cc; the pool's writer is held --------------------------------------------------
  // What training keeps of a row whose aux stands at `bytes`, aligned or not.
  RowState StateIn(const Table& table, const std::byte* bytes) const;
  // The row of an entry in DDR (brought there from SSD if need be).
  Result<Location> ResidentRow(RowPool* pool, uint32_t table, uint32_t bucket, uint64_t key);
  // Takes away the row of a key, whatever its tier. kNotFound; kResourceExhausted: there is no room
  // to note that it is gone.
  Status RemoveRow(RowPool* pool, Bucket* bucket, uint64_t key, RecordKind kind);
  static RowAux* AuxOf(const RowPool* pool, Location place) {
    return reinterpret_cast<RowAux*>(pool->arena.Aux(place.slot()));
  }
  // Nothing is left of what the optimizer keeps of a row as a whole.
  void ForgetMoments(const Table& table, RowAux* aux) const;
  // Of chunks that are not in `kept`, nothing is left of what the optimizer keeps of their
  // elements.
  void ForgetElements(const Table& table, uint32_t kept, RowAux* aux) const;
  // An occurrence of a key without a row: whether it gets one now.
  bool EntersNow(RowPool* pool, const Table& table, uint64_t key) {
    if (pool->new_keys == nullptr) return true;
    // A key of several tables is several keys.
    const uint64_t counted = HashKey(key) ^ (uint64_t{table.ordinal} << 32);
    if (pool->new_keys->Add(counted) >= options.new_row_accesses) return true;
    ++new_keys_waiting;
    return false;
  }
  // A row for a key that has none. kResourceExhausted when the budgets are full.
  Result<Location> AddRow(RowPool* pool, const Table& table, Bucket* bucket, uint64_t key,
                          uint16_t live, std::span<const std::byte> payload);
  // Gives the row of a key another live mask; 0 removes it, as `kind`. Errors as Store::SetLive.
  Status ChangeLive(RowPool* pool, const Table& table, uint32_t bucket, uint64_t key, uint16_t live,
                    RecordKind kind);
  // Room to note every row of the bucket as changed. kResourceExhausted as ReserveEntry.
  Status FitChanged(RowPool* pool, Bucket* bucket);
  // Room to note one more key as removed. kResourceExhausted as ReserveEntry; nothing is changed.
  Status FitRemoved(RowPool* pool, Bucket* bucket);
  // Of the notes of removed keys, leaves those that count, ascending by key.
  static void TidyRemoved(Bucket* bucket);
  // Requires: ReserveEntry was called for the row.
  static void MarkChanged(Bucket* bucket, uint64_t hash, RowAux* aux) {
    if (aux->changed != 0) return;
    aux->changed = 1;
    bucket->changed.Set(hash);
  }
  // Adds the keys of the rows that changed, and of some on the SSD that may have.
  static void ChangedRows(const Bucket& bucket, std::map<uint64_t, RecordKind>* changes);

  // --- pruning.cc --------------------------------------------------------------------------------
  // kInvalidArgument: there is no such group.
  Status CheckGroup(uint32_t group) const;
  // The counters of a row that has them.
  static float* CountersOf(const RowPool* pool, const Table& table, Location place) {
    const RowLayout learned = table.config.learned();
    const auto live = static_cast<uint16_t>(place.live() & learned.full_mask());
    return reinterpret_cast<float*>(pool->arena.Address(place.slot()) + learned.PayloadBytes(live));
  }
  // A key of a table that is pruned, without a row, has earned so much in this step: what it has
  // earned in all, if that is worth a row for which there is room.
  std::optional<float> Worth(const Table& table, uint64_t key, float earned);
  // Such a key has counted so much: whether a row of counters alone is worth that.
  bool WorthCounting(const Table& table, uint64_t key, const float* logs);
  // Takes a row of so many bytes off the room, if what its key earned is worth that and it fits.
  bool Admit(GroupPrice* group, uint64_t hash, float utility, uint64_t bytes)
      EMBERTIDE_REQUIRES(group->mutex);
  // Calls visit(key, place) for a bucket's rows, in slices under its pool's writer, which may
  // change them in after(&writer), called at each slice's end.
  template <typename Visit, typename After>
  static void ForEachSlice(Bucket* bucket, const Visit& visit, const After& after);
  // What pruning knows of a row, in DDR whatever its tier; valid until the row changes or moves.
  struct RowNote {
    uint32_t tick = 0;               // the step that last used it
    const float* utility = nullptr;  // of its chunks, as it was then
    float log = 0.0F;                // of the count that says what its counters are worth; 0: none
  };
  static RowNote NoteOf(const RowPool* pool, const Table& table, Location place);
  static float LogIn(const Table& table, uint16_t live, const std::byte* payload);
  // What a row's chunks are worth now.
  std::array<float, kMaxChunks> UtilityOf(const Table& table, const RowNote& note) const;
  // Calls visit(pool, place) for one of 2^rare rows.
  template <typename Visit>
  void ForSomeRows(const Table& table, uint32_t rare, const Visit& visit) const;
  // One of 2^rare rows of a group, after its scales were made anew: a pass begins.
  GroupSample TakeSample(GroupPrice* group, uint32_t rare) const;
  GroupSample EmptySample(GroupPrice* group, uint32_t rare) const;
  // The rows that several stores took, this one among them. kInvalidArgument naming the first
  // sample that is of another group, step, stakes or number of rows.
  Result<GroupSample> JoinSamples(GroupPrice* group, std::span<const std::string> samples) const;
  // Its rows with what their counts are worth.
  PriceSample Priced(const GroupPrice& group, const GroupSample& sample) const;
  // One bucket's part of a pass.
  void PruneBucket(GroupPrice* group, const Table& table, uint32_t bucket, uint32_t max_age,
                   PruneOutcome* outcome);
};

}  // namespace embertide
