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
#include "ddr/byte_budget.h"
#include "ddr/slab_arena.h"
#include "embertide/hash.h"
#include "embertide/store.h"
#include "policy/frequency_sketch.h"
#include "ssd/block_log.h"
#include "store/bucket.h"
#include "store/decay.h"
#include "store/group_price.h"
#include "store/hbm_tier.h"
#include "store/location.h"
#include "store/node_pool.h"
#include "store/prune_price.h"
#include "store/prune_sample.h"
#include "store/reader_registry.h"
#include "store/seal_file.h"
#include "store/ssd_notes.h"
#include "store/tier_policy.h"
#include "store/train_ops.h"
#include "store/turn_mutex.h"

namespace embertide {

class SsdBatch;

// A row that was read, from a device whose policy is to hear of it.
struct Access {
  uint64_t key;
  uint32_t table;
};

// Rows of one table in one tier of a device, those of older versions too, and their payload and
// aux. Written under the device's writer lock.
struct TierCount {
  std::atomic<uint64_t> rows{0};
  std::atomic<uint64_t> bytes{0};
};

// A pass over the entries of some of a device's tables: place in `tables`, ordinal of the bucket,
// entry.
struct Hand {
  std::vector<uint32_t> tables;
  uint32_t table = 0;
  uint32_t bucket = 0;
  uint32_t entry = 0;
};

// The bytes of rows that a table may have in DDR on a device. Changed under the device's writer.
struct TableShare {
  static constexpr uint64_t kNone = ~0ULL;
  std::atomic<uint64_t> bytes{kNone};
  // What the rows may take now: `bytes`, or more while a share that was lowered is being emptied.
  // It never rises before the next share is set.
  std::atomic<uint64_t> allowed{kNone};
  Hand clock;  // of evictions among the table's own rows
  bool given() const { return bytes.load(std::memory_order_relaxed) != kNone; }
};

// A device; or the part of one that is set aside for a table with budgets of its own, which shares
// nothing with the rest of the device but its number.
struct Device {
  Device(uint32_t d, uint64_t budget_bytes, std::vector<uint32_t> of, size_t all_tables)
      : number(d),
        tables(std::move(of)),
        budget(budget_bytes),
        arena(&budget),
        index_pages(budget_bytes / BucketIndex::kPageBytes * BucketIndex::kPagesPerBudgetPage,
                    BucketIndex::kPageBytes),
        nodes(&budget, &index_pages),
        in_ddr(all_tables),
        in_ssd(all_tables),
        shares(all_tables),
        clock{tables},
        packing{tables} {}
  const uint32_t number;               // of the device
  const std::vector<uint32_t> tables;  // whose rows may lie here
  TurnMutex writer;                    // held by whoever writes to this device's buckets
  std::mutex upkeep;                   // held by who maintains it; taken before `writer`
  ByteBudget budget;                   // its share of the DDR budget
  SlabArena arena;
  PagePool index_pages;  // of its buckets' arrays, and of:
  NodePool nodes;
  // Charged from the beginning, so that rows of a full device can still be pruned, which needs a
  // page for the smaller ones before the larger ones leave theirs. Lent for that, and taken back
  // before anything else gets the room. 0 where rows go to an SSD instead, and in serving.
  uint64_t reserve_bytes = 0;
  bool reserve_lent = false;
  // Training: occurrences of keys that have no row; null: every key gets one at once.
  std::unique_ptr<FrequencySketch> new_keys;
  std::unique_ptr<BlockLog> ssd;            // null without an SSD budget
  std::unique_ptr<SsdNotes> notes;          // null: no table whose rows it may have is pruned
  std::vector<TierCount> in_ddr;            // by table
  std::vector<TierCount> in_ssd;            // by table
  std::vector<TableShare> shares;           // by table
  bool shared_out = false;                  // some table has a share
  std::deque<Retired> retired;              // ascending epochs
  std::map<uint64_t, VersionNode*> staged;  // version -> its nodes on this device
  // Which rows leave DDR and which enter; null: the counts of the index and the clock hand, and a
  // row enters from the SSD once its count is `least_count`.
  std::unique_ptr<TierPolicy> policy;
  uint32_t least_count = 1;
  // Rows read from the SSD; with a policy, from DDR too. Appended to by readers, emptied by
  // Maintain. What is more than `most_accesses` is dropped and counted.
  Mutex accesses_mutex;
  size_t most_accesses = 0;
  std::vector<Access> accesses EMBERTIDE_GUARDED_BY(accesses_mutex);
  std::vector<Access> replayed;  // those of Maintain's last turn: its memory is kept (`upkeep`)
  // Rows of the SSD that are being read without the writer: told of slots that are freed meanwhile.
  std::vector<SsdBatch*> reading;
  uint64_t LogBytes() const { return 2 * most_accesses * sizeof(Access); }
  uint64_t PolicyBytes() const {
    return LogBytes() + (policy == nullptr ? 0 : policy->bytes()) +
           (new_keys == nullptr ? 0 : new_keys->bytes());
  }
  Hand clock;    // of eviction: what it meets ages
  Hand packing;  // of moving rows out of pages; were it the clock's, rows would leave by chance
  Hand unshared_clock;  // of eviction among the rows of tables without a share
  // Bytes that compaction may read and write now, and when that was reckoned.
  double compaction_credit = 0;
  std::chrono::steady_clock::time_point compaction_at = std::chrono::steady_clock::now();
};

// Why rows are written to the SSD.
enum class MoveKind : uint8_t {
  kEvict,      // to make room for others
  kEmptyPage,  // their page is wanted
  kCompact,    // their segment is
};

// What holds a device's writer, for who lets go of it while a drive works.
using WriterLock = std::unique_lock<TurnMutex>;
// Does what takes long without the writer; with it where the lock is null, since the caller is in
// the middle of a row of its own.
template <typename Io>
void WithoutWriter(WriterLock* writer, const Io& io) {
  if (writer != nullptr) writer->unlock();
  io();
  if (writer != nullptr) writer->lock();
}

struct Table {
  TableConfig config;
  uint32_t ordinal = 0;            // index into StoreOptions::tables
  std::vector<float> default_row;  // dim values
  std::vector<BucketSlot> buckets;
  uint32_t part = 0;  // its rows lie on devices[part * options.devices ...]
  RowCost cost{};
  GroupPrice* pruned_with = nullptr;  // null: its rows are not pruned
  size_t place_in_group = 0;          // among its tables
};

inline Bucket::~Bucket() { index.Clear(&device->index_pages); }

inline Bucket::Bucket(Device* on, const Table& of)
    : rows(on->arena.base()),
      device(on),
      table(of.ordinal),
      chunk_bytes(of.config.layout.chunk_bytes()),
      scale_bytes(static_cast<uint16_t>(of.config.layout.PayloadBytes(1) - chunk_bytes)),
      full_mask(of.config.layout.full_mask()) {}

struct Store::Impl {
  explicit Impl(StoreOptions opts);
  ~Impl();

  StoreOptions options;
  std::vector<Table> tables;
  // Part by part; the part that tables share, if any do, is the first.
  std::vector<std::unique_ptr<Device>> devices;
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
  // Guards the seal's manifest. Taken after a device's writer lock, never before one.
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
  Device* DeviceOf(const Table& table, uint32_t d) const {
    return devices[size_t{table.part} * options.devices + d].get();
  }
  void MakeDevices();
  // The directories of its tiers, its policy and its logs, charged; its file on the SSD, with what
  // `sealed` names of it, or empty.
  Status OpenDevice(Device* device, const std::vector<SealedSegment>* sealed);
  void MakeNotes(Device* device);
  // Of a device's DDR, what it takes before the first bucket.
  uint64_t DirectoryBytes(const Device& device) const;
  // The name of a device's file on the SSD; empty: it has none.
  std::string LogOf(const Device& device) const;
  Status OpenPolicy(Device* device, const std::string& name);
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

  // --- residency.cc; the device's writer is held -------------------------------------------------
  // A DDR slot, evicting to SSD as needed. kResourceExhausted when nothing more can go.
  Result<uint64_t> AllocateDdr(Device* device, const Table& table, uint32_t payload_bytes,
                               uint32_t aux_bytes);
  // In shares.cc: whether a table's share has room for so many bytes of rows more.
  static bool ShareHolds(const Device& device, uint32_t table, uint64_t bytes);
  // Bytes of rows that shall leave a table's share: for the room that it keeps ready ahead of rows
  // that enter, a batch of promotions at least, or because it has shrunk.
  uint64_t ShareLacks(const Device& device, uint32_t table) const;
  // Whether rows of a table may leave for want of room on the device: those with a share stay while
  // there are others.
  static bool GivesWay(const Device& device, uint32_t table);
  // Evicts rows of the table until its share has room for so many bytes. kResourceExhausted: the
  // SSD takes no more.
  Status MakeShareRoom(Device* device, const Table& table, uint64_t bytes);
  // Evicts some rows of a table that has a share; false if none went.
  bool EvictTable(Device* device, uint32_t table, WriterLock* writer);
  void TakeReserveBack(Device* device);
  // A DDR row with this payload, which becomes the newest of its key.
  Result<Location> StoreRow(Device* device, const Table& table, uint64_t key, uint16_t live,
                            std::span<const std::byte> payload);
  // Room for so many more entries in the bucket's index (and, in training, for noting their
  // changes), evicting rows as needed. To be called before a slot is taken for the new row: a page
  // with a slot that no entry names cannot be emptied.
  Status ReserveEntries(Device* device, Bucket* bucket, uint32_t entries);
  Status ReserveEntry(Device* device, Bucket* bucket) {
    if (!training() && bucket->index.HasRoom()) return Status::Ok();
    return ReserveEntries(device, bucket, 1);
  }
  // Gives back what entries that are gone took in a bucket's index.
  void ShrinkIndex(Device* device, Bucket* bucket);
  // Inserts a key that has no entry. Requires: ReserveEntry.
  void InsertEntry(Bucket* bucket, uint64_t key, Location location);
  void EraseEntry(Bucket* bucket, uint32_t entry);
  // A version node, charged to the budget. kResourceExhausted as above.
  Result<VersionNode*> NewNode(Device* device);
  // A place was taken, or freed, for a row of the table.
  void CountPlace(Device* device, const Table& table, Location place, bool taken) const;
  // Unlinked: frees when no reader can be at it.
  void RetirePlace(Device* device, const Table& table, Location place);
  void RetireNode(Device* device, VersionNode* node);
  void RetireArrays(Device* device, const BucketIndex::Arrays& arrays);
  // Frees what no reader can hold any more; of a bucket with many rows a part, and the next call
  // another. True: something was freed.
  bool Reclaim(Device* device);
  // As Reclaim, waiting for those readers. kResourceExhausted naming the one that stays longer than
  // options.reader_wait_ms.
  Status AwaitReaders(Device* device);
  // False: it is a bucket, of which a part is left.
  bool Free(Device* device, Retired* retired);
  // One step towards room: reclaims, then takes cold rows, then whole pages out of DDR. Returns
  // `wanted`, which has failed for want of room, when there is nothing left to try.
  Status MakeRoom(Device* device, int round, const Status& wanted);
  // Charges notes of rows on the SSD ahead once more, emptying pages for them, before rows take
  // what came free: without notes none could leave.
  Status ChargeNotes(Device* device);
  // Attempts, making room in between, until it no longer fails for want of room.
  template <typename Attempt>
  Status WithRoom(Device* device, const Attempt& attempt) {
    Status status = attempt();
    for (int round = 0; status.code() == Code::kResourceExhausted; ++round) {
      EMBERTIDE_RETURN_IF_ERROR(MakeRoom(device, round, status));
      status = attempt();
    }
    return status;
  }
  // Of the pages of a device, what no row takes; rows count as they are, not as their slots.
  static uint64_t FreeSlotBytes(const Device& device);
  // Pages that rows may take beside what is kept ready for others.
  static uint64_t SparePages(const Device& device);
  // Whether another row must leave for one that enters.
  static bool Full(const Device& device);
  // Bytes of the budget that writers shall find free, for pages of any kind.
  static uint64_t ReadyBytes(const Device& device);
  // A place that may change: an entry's own, or that of a node of its chain.
  struct Holder {
    uint32_t table;
    Bucket* bucket;
    uint32_t entry;
    VersionNode* node;  // null: the entry itself
  };
  static Location PlaceOf(const Holder& holder);
  static void SetPlace(const Holder& holder, Location place);
  // Moves some hundred KiB of DDR rows to SSD, less on a small device, as its policy or the clock
  // chooses; false if nothing went. Where tables have shares, rows beyond a share go first, then
  // rows of tables without one. `writer` as in WithoutWriter; without one, the rows count as
  // evicted by a writer.
  bool Evict(Device* device, WriterLock* writer);
  // The same, so many bytes as a policy chooses, or as a hand does among the rows of its tables.
  // `chained`: also rows that versions of the window changed, where nothing else can go.
  bool EvictByPolicy(Device* device, uint64_t bytes, WriterLock* writer);
  bool EvictByClock(Device* device, Hand* hand, uint64_t bytes, bool chained, WriterLock* writer);
  // Rows that the policy lets go; returns how many keys it chose for them.
  uint32_t ChooseByPolicy(Device* device, uint64_t wanted, std::vector<Holder>* victims);
  // Calls visit(holder) for all places of an entry.
  template <typename Visit>
  static void ForEachPlace(uint32_t table, Bucket* bucket, uint32_t entry, const Visit& visit);
  // Rows that a pass of the clock hand takes along.
  enum class Sweeping : uint8_t { kCold, kAny, kChained };
  // Passes a clock hand over up to `entries` entries, collecting rows that may leave DDR.
  void Sweep(Device* device, Hand* hand, uint32_t entries, Sweeping sweeping,
             std::vector<Holder>* victims, uint64_t wanted);
  // Moves rows of DDR to the SSD; false if none went.
  bool Demote(Device* device, const std::vector<Holder>& victims, MoveKind kind,
              WriterLock* writer);
  // Moves the rows of condemned pages that a pass over `entries` entries meets into other pages
  // with room; if `demote`, those that find none to the SSD.
  void MoveCondemned(Device* device, uint32_t entries, bool demote, WriterLock* writer);
  // Entries of the buckets of a hand's tables, used or not: one round of it.
  uint32_t RoundOf(const Device* device, const Hand& hand) const;
  // Returns how many of the entries were passed.
  template <typename Visit>
  uint32_t AdvanceHand(Device* device, Hand* hand, uint32_t entries, Visit visit);

  // --- upkeep.cc; these take the writer themselves, and not for what takes long: `upkeep` is held
  void Maintain(Device* device);
  // In residency.cc: room in DDR before somebody needs it. Cold rows leave, then pages are emptied.
  // Room for `pages` of rows beside what is kept ready.
  void MakeRoomAhead(Device* device, uint32_t pages);
  // Tells the policy what was read since, and gives the rows that it admits from the SSD.
  std::vector<Access> Replay(Device* device);
  // Reads rows from the SSD in one batch and brings them to DDR, but for those that are gone, there
  // already, or changed meanwhile. Counts those for which there is no room or no good block. True:
  // a row lacked a page of its size, though there is room for others.
  bool Promote(Device* device, std::span<const Access> rows);
  // How a row at a place of the SSD is read.
  LogRead ReadOf(const Access& row, Location place, std::byte* to) const;
  // Makes one region of a pool of the device a huge page, if one is due.
  static void MakeHugePage(Device* device, PagePool* pool);
  // --- and these run under it
  // The entry of a row whose newest place is on the SSD; kNotFound: it has none there.
  uint32_t EntryOnSsd(Device* device, const Access& row, Bucket** bucket) const;
  // Gives a row of the SSD, read to `bytes`, a slot of DDR that was allocated for it.
  void Install(Device* device, uint32_t table, Bucket* bucket, uint64_t key, const std::byte* bytes,
               uint64_t slot);
  // Brings one SSD row to DDR. Ok also when it is gone or already there.
  Status PromoteOne(Device* device, const Access& row);
  // The row in DDR of a key that a batch has read. Errors as ResidentRow.
  Result<Location> BringRow(Device* device, const SsdBatch& batch, size_t i);
  // Brings those of the rows to DDR that are on the SSD and can be read, and lets go of the writer
  // while the drive works. Requires: each key of a table once.
  void BringRows(Device* device, std::span<const Access> rows, WriterLock* writer);

  // --- compaction.cc; the device's writer is held, but as WithoutWriter says ---------------------
  // Who names this place; nullopt: nobody does any more.
  std::optional<Holder> HolderOf(Device* device, uint32_t table, uint64_t key, Location place);
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
  Result<size_t> MoveToLog(Device* device, std::span<const Moving> rows, MoveKind kind,
                           WriterLock* writer);
  // Charges the notes of rows that are to move to the log, of the first of them if there is no room
  // for all; returns of how many rows.
  size_t TakeNotes(Device* device, std::span<const Moving> rows, MoveKind kind) const;
  void GiveNotesBack(Device* device, std::span<const Moving> rows) const;
  // Requires: TakeNotes for them.
  void AddNotes(Device* device, std::span<const Moving> rows, const LogBatch& batch) const;
  // Whether pruning keeps a note of the table's rows on the SSD.
  static bool Noted(const Device& device, const Table& table) {
    return device.notes != nullptr && table.pruned_with != nullptr;
  }
  // Moves the live rows of some blocks of a segment of which `least_dead` is dead. Returns the
  // bytes read and written, 0 if there is no such segment.
  uint64_t CompactStep(Device* device, double least_dead, WriterLock* writer);
  // A step, if the budget of bytes a second allows it.
  void CompactInBackground(Device* device, WriterLock* writer);
  // Up to a segment, whatever that budget: rows would be refused otherwise. False if none is worth
  // it.
  bool CompactForRoom(Device* device, WriterLock* writer);

  // --- sealing.cc --------------------------------------------------------------------------------
  // All but what the logs keep for it. `dropped`: seals_dropped when it began; given up when that
  // has changed.
  Status WriteSeal(const SealOptions& options, uint64_t dropped);
  // Of the rows of a bucket, those whose hash's low half is part->begin or more; sets part->end.
  // False: it is not held, or has left part->log (which the first slice sets).
  bool TakeSlice(SealPart* part);
  Status PublishSeal(const SealInfo& info, uint64_t dropped);
  // Rows need the room that seals keep on this device; the newest is gone, one being written ends
  // without success. False: they keep none. Requires: the device's writer.
  bool DropSeals(Device* device);
  // Requires: nothing is committed yet, and the logs are reopened.
  Status LoadPart(const SealPart& part);
  // The tables and logs, as a seal names them.
  SealInfo DescribeSeal() const;

  // --- mending.cc; the device's writer is held ---------------------------------------------------
  // The place that answers the key of an entry at a version, if it is of a bad block.
  static std::optional<Holder> BadPlace(const Device* device, const std::set<uint64_t>& blocks,
                                        uint32_t table, Bucket* bucket, uint32_t entry,
                                        uint64_t version);
  // Calls visit(key, place) for all of a bucket's entries of which there is one.
  template <typename Visit>
  static void ForEachBad(const Device* device, const std::set<uint64_t>& blocks, uint32_t table,
                         Bucket* bucket, uint64_t version, const Visit& visit);
  // The newest copy of a bucket, if it is on this device and answers that version.
  static Bucket* CopyAt(const Device* device, const BucketSlot& slot, uint64_t version);
  // Ok also if the row is not in a bad block any more.
  Status MendOne(Device* device, const Table& table, uint32_t bucket, uint64_t version,
                 const RowRecord& record);

  // --- versions.cc -------------------------------------------------------------------------------
  Status StageOne(Device* device, uint64_t version, uint32_t table, uint32_t number, Bucket* bucket,
                  const RowRecord& record);
  Status StageBase(Device* device, const Table& table, Bucket* bucket, const RowRecord& record);
  // Takes the head of a chain, of a version that is not committed, out of it.
  void UnstageNode(Device* device, VersionNode* node);
  // Folds all versions <= `limit` of a device. Requires: no reader below `limit`, or ever again.
  void Fold(Device* device, uint64_t limit);
  // The same for the key of a node that `version` has staged.
  void FoldKey(Device* device, const VersionNode& staged, uint64_t version);
  void FoldNode(Device* device, VersionNode* node, uint64_t limit);
  // Of a node that was staged.
  Bucket* BucketOn(Device* device, const VersionNode& node);
  // The window is what it is from now on: folds and retires what left it and no pin needs.
  void LeaveWindow() EMBERTIDE_REQUIRES(commit_mutex);

  // --- holding.cc --------------------------------------------------------------------------------
  // Retires older copies that no pin can read any more.
  void RetireSuperseded(uint64_t limit) EMBERTIDE_REQUIRES(commit_mutex);
  // Unlinks a bucket's versions and retires it, in slices under its device's writer. Requires:
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
  // The row's payload, versions and live mask, if it is in DDR on this device, asked for often
  // enough and has any. Requires: the device's writer.
  bool RowForHbm(const Device* device, HbmRow* row) const;

  // --- lookup.cc ---------------------------------------------------------------------------------
  // What a chain or an entry means at a version.
  static Location Resolve(Location location, uint64_t version, uint64_t* changed_at = nullptr);

  // --- training.cc; the device's writer is held --------------------------------------------------
  // What training keeps of a row whose aux stands at `bytes`, aligned or not.
  RowState StateIn(const Table& table, const std::byte* bytes) const;
  // The row of an entry in DDR (brought there from SSD if need be).
  Result<Location> ResidentRow(Device* device, uint32_t table, uint32_t bucket, uint64_t key);
  // Takes away the row of a key, whatever its tier. kNotFound; kResourceExhausted: there is no room
  // to note that it is gone.
  Status RemoveRow(Device* device, Bucket* bucket, uint64_t key, RecordKind kind);
  static RowAux* AuxOf(const Device* device, Location place) {
    return reinterpret_cast<RowAux*>(device->arena.Aux(place.slot()));
  }
  // Nothing is left of what the optimizer keeps of a row as a whole.
  void ForgetMoments(const Table& table, RowAux* aux) const;
  // Of chunks that are not in `kept`, nothing is left of what the optimizer keeps of their
  // elements.
  void ForgetElements(const Table& table, uint32_t kept, RowAux* aux) const;
  // An occurrence of a key without a row: whether it gets one now.
  bool EntersNow(Device* device, const Table& table, uint64_t key) {
    if (device->new_keys == nullptr) return true;
    // A key of several tables is several keys.
    const uint64_t counted = HashKey(key) ^ (uint64_t{table.ordinal} << 32);
    if (device->new_keys->Add(counted) >= options.new_row_accesses) return true;
    ++new_keys_waiting;
    return false;
  }
  // A row for a key that has none. kResourceExhausted when the budgets are full.
  Result<Location> AddRow(Device* device, const Table& table, Bucket* bucket, uint64_t key,
                          uint16_t live, std::span<const std::byte> payload);
  // Gives the row of a key another live mask; 0 removes it, as `kind`. Errors as Store::SetLive.
  Status ChangeLive(Device* device, const Table& table, uint32_t bucket, uint64_t key,
                    uint16_t live, RecordKind kind);
  // Room to note every row of the bucket as changed. kResourceExhausted as ReserveEntry.
  Status FitChanged(Device* device, Bucket* bucket);
  // Room to note one more key as removed. kResourceExhausted as ReserveEntry; nothing is changed.
  Status FitRemoved(Device* device, Bucket* bucket);
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
  static float* CountersOf(const Device* device, const Table& table, Location place) {
    const RowLayout learned = table.config.learned();
    const auto live = static_cast<uint16_t>(place.live() & learned.full_mask());
    return reinterpret_cast<float*>(device->arena.Address(place.slot()) +
                                    learned.PayloadBytes(live));
  }
  // A key of a table that is pruned, without a row, has earned so much in this step: what it has
  // earned in all, if that is worth a row for which there is room.
  std::optional<float> Worth(const Table& table, uint64_t key, float earned);
  // Such a key has counted so much: whether a row of counters alone is worth that.
  bool WorthCounting(const Table& table, uint64_t key, const float* logs);
  // Takes a row of so many bytes off the room, if what its key earned is worth that and it fits.
  bool Admit(GroupPrice* group, uint64_t hash, float utility, uint64_t bytes)
      EMBERTIDE_REQUIRES(group->mutex);
  // Calls visit(key, place) for a bucket's rows, in slices under its device's writer, which may
  // change them in after(&writer), called at each slice's end.
  template <typename Visit, typename After>
  static void ForEachSlice(Bucket* bucket, const Visit& visit, const After& after);
  // What pruning knows of a row, in DDR whatever its tier; valid until the row changes or moves.
  struct RowNote {
    uint32_t tick = 0;               // the step that last used it
    const float* utility = nullptr;  // of its chunks, as it was then
    float log = 0.0F;                // of the count that says what its counters are worth; 0: none
  };
  static RowNote NoteOf(const Device* device, const Table& table, Location place);
  static float LogIn(const Table& table, uint16_t live, const std::byte* payload);
  // What a row's chunks are worth now.
  std::array<float, kMaxChunks> UtilityOf(const Table& table, const RowNote& note) const;
  // Calls visit(device, place) for one of 2^rare rows.
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
