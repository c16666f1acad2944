// Store::Impl: the state of a store and the operations its files share. Private to this folder.
//
//   store.cc       open, pin, stats          versions.cc   stage, commit, fold
//   holding.cc     buckets added, dropped
//   lookup.cc      batched reads             training.cc   rows made, updated and taken
//   residency.cc   room: evict, promote, move, reclaim     integrity.cc  every invariant
//   compaction.cc  room on the SSD
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ddr/byte_budget.h"
#include "ddr/slab_arena.h"
#include "embertide/hash.h"
#include "embertide/store.h"
#include "ssd/block_log.h"
#include "store/bucket_index.h"
#include "store/location.h"
#include "store/reader_registry.h"

namespace embertide {

// Training state beside a payload (profile kTrain). Followed by `chunks` floats of utility.
struct RowAux {
  float accumulator = 0.0F;  // row-wise Adagrad's h
  uint32_t changed = 0;      // 1: changed since TakeChanges, and listed in Bucket::changed
};

// A row asked for on an SSD more than once, to be brought into DDR.
struct Promotion {
  uint32_t table;
  uint32_t bucket;
  uint64_t key;
};
// Why 4096: about what a device promotes between two calls of Maintain; more is dropped, counted.
inline constexpr size_t kMaxPromotions = 4096;

struct Bucket;
struct Device;

// Something unlinked, to be freed when no reader of its epoch is left.
struct Retired {
  uint64_t epoch = 0;
  Location place;  // a slot, of `bytes` payload + aux (SSD needs them)
  uint32_t bytes = 0;
  VersionNode* node = nullptr;
  BucketIndex::Arrays* arrays = nullptr;
  Bucket* bucket = nullptr;  // with all its rows
  uint32_t table = 0;        // of `bucket`
};

// The rows of one bucket on one device.
struct Bucket {
  explicit Bucket(Device* on) : device(on) {}
  BucketIndex index;
  Device* const device;  // where its rows lie
  // It answers versions from here on; below, `older` does, if there is one. Set before readers can
  // reach it.
  uint64_t since = 0;
  std::atomic<Bucket*> older{nullptr};     // on another device; until no pin below `since` is left
  std::vector<uint64_t> changed;           // training: keys of rows with aux.changed
  std::map<uint64_t, RecordKind> removed;  // training: keys removed since TakeChanges
};

// The copies of one bucket in this store. The newest is owned here, and owns its older one.
struct BucketSlot {
  BucketSlot() = default;
  BucketSlot(BucketSlot&&) noexcept {}     // for std::vector, before there is anything in it
  std::atomic<Bucket*> newest{nullptr};    // null: not held
  std::atomic<Bucket*> building{nullptr};  // being filled: writers see it, readers do not
  // For those who ask and pin nothing, and so may not follow the pointers.
  static constexpr uint64_t kNotHeld = ~0ULL;
  std::atomic<uint64_t> held_since{kNotHeld};
  std::atomic<uint32_t> device{0};  // of `newest`

  // What answers at a version; null if the bucket is not held there.
  const Bucket* At(uint64_t version) const {
    const Bucket* bucket = newest.load(std::memory_order_acquire);
    while (bucket != nullptr && version < bucket->since) {
      bucket = bucket->older.load(std::memory_order_acquire);
    }
    return bucket;
  }
  // Its copy on a device, being filled or superseded ones too. Requires: the device's writer.
  Bucket* On(const Device* device) const {
    Bucket* bucket = building.load();
    if (bucket != nullptr && bucket->device == device) return bucket;
    for (bucket = newest.load(); bucket != nullptr; bucket = bucket->older.load()) {
      if (bucket->device == device) return bucket;
    }
    return nullptr;
  }
};

// Rows of one table in one tier of a device, those of older versions too, and their payload and
// aux. Written under the device's writer lock.
struct TierCount {
  std::atomic<uint64_t> rows{0};
  std::atomic<uint64_t> bytes{0};
};

struct Device {
  Device(uint64_t budget_bytes, size_t tables)
      : budget(budget_bytes), arena(&budget), in_ddr(tables), in_ssd(tables) {}
  std::mutex writer;  // held by whoever writes to this device's buckets
  ByteBudget budget;  // this device's share of the DDR budget
  SlabArena arena;
  std::unique_ptr<BlockLog> ssd;            // null without an SSD budget
  std::vector<TierCount> in_ddr;            // by table
  std::vector<TierCount> in_ssd;            // by table
  std::deque<Retired> retired;              // ascending epochs
  std::map<uint64_t, VersionNode*> staged;  // version -> its nodes on this device
  std::mutex promotions_mutex;
  std::vector<Promotion> promotions;
  // Bytes that compaction may read and write now, and when that was reckoned.
  double compaction_credit = 0;
  std::chrono::steady_clock::time_point compaction_at = std::chrono::steady_clock::now();
  // Where the clock hand stands: table, ordinal of the bucket, entry.
  uint32_t hand_table = 0;
  uint32_t hand_bucket = 0;
  uint32_t hand_entry = 0;
};

struct Table {
  TableConfig config;
  uint32_t ordinal = 0;            // index into StoreOptions::tables
  std::vector<float> default_row;  // dim values
  std::vector<BucketSlot> buckets;
};

struct Store::Impl {
  explicit Impl(StoreOptions opts);
  ~Impl();

  StoreOptions options;
  std::vector<Table> tables;
  std::vector<std::unique_ptr<Device>> devices;
  mutable ReaderRegistry readers{kMaxReaders};

  std::atomic<uint64_t> newest{0};
  std::atomic<uint64_t> oldest{0};  // of the window
  std::deque<uint64_t> window;      // committed versions, ascending; guarded by commit_mutex
  // (table, bucket) that have an older copy; guarded by commit_mutex.
  std::vector<std::pair<uint32_t, uint32_t>> superseded;
  std::atomic<uint64_t> superseded_until{0};  // the largest `since` of them; 0: none
  std::mutex commit_mutex;

  mutable std::atomic<uint64_t> hits[kSources] = {};
  std::atomic<uint64_t> evictions{0};
  std::atomic<uint64_t> promoted{0};
  std::atomic<uint64_t> promotions_dropped{0};
  std::atomic<uint64_t> refused_rows{0};
  std::atomic<uint64_t> compacted_bytes{0};
  std::atomic<uint64_t> compacted_rows{0};
  std::atomic<uint64_t> compactions_forced{0};
  std::atomic<uint64_t> rows{0};         // index entries of all buckets
  std::atomic<uint64_t> index_bytes{0};  // arrays, nodes and directories, retired ones included

  bool training() const { return options.profile == Profile::kTrain; }
  // The newest copy of a bucket. Requires: the caller is its writer, or the store is of the
  // training profile, whose buckets are always held.
  static Bucket* Newest(const Table& table, uint32_t bucket) {
    return table.buckets[bucket].newest.load();
  }
  uint32_t NumberOf(const Device* device) const;
  uint32_t AuxBytes(const Table& table) const {
    return training() ? static_cast<uint32_t>(sizeof(RowAux)) + 4U * table.config.layout.chunks : 0;
  }
  static uint32_t BucketOf(const Table& table, uint64_t hash) {
    return BucketOfHash(hash, table.config.bucket_bits);
  }
  // kInvalidArgument naming what is out of range.
  Status CheckTable(uint32_t table) const;
  Status CheckBucket(uint32_t table, uint32_t bucket) const;

  // --- residency.cc; the device's writer is held -------------------------------------------------
  // A DDR slot, evicting to SSD as needed. kResourceExhausted when nothing more can go.
  Result<uint64_t> AllocateDdr(Device* device, uint32_t payload_bytes, uint32_t aux_bytes);
  // A DDR row with this payload.
  Result<Location> StoreRow(Device* device, const Table& table, uint16_t live,
                            std::span<const std::byte> payload);
  // Room for one more entry in the bucket's index, evicting rows as needed. To be called before a
  // slot is taken for the new row: a page with a slot that no entry names cannot be emptied.
  Status ReserveEntry(Device* device, Bucket* bucket);
  // Inserts a key that has no entry. Requires: ReserveEntry.
  void InsertEntry(Bucket* bucket, uint64_t key, Location location);
  // A version node, charged to the budget. kResourceExhausted as above.
  Result<VersionNode*> NewNode(Device* device);
  // A place was taken, or freed, for a row of the table.
  void CountPlace(Device* device, const Table& table, Location place, bool taken) const;
  // Unlinked: frees when no reader can be at it.
  void RetirePlace(Device* device, const Table& table, Location place);
  void RetireNode(Device* device, VersionNode* node);
  void RetireArrays(Device* device, BucketIndex::Arrays* arrays);
  // Frees what no reader can hold any more.
  void Reclaim(Device* device);
  // As Reclaim, giving those readers a few ms to leave.
  void AwaitReaders(Device* device);
  void Free(Device* device, const Retired& retired);
  // One step towards room: reclaims, then takes cold rows, then whole pages out of DDR. False when
  // there is nothing left to try.
  bool MakeRoom(Device* device, int round);
  // A place that may change: an entry's own, or that of a node of its chain.
  struct Holder {
    uint32_t table;
    Bucket* bucket;
    uint32_t entry;
    VersionNode* node;  // null: the entry itself
  };
  static Location PlaceOf(const Holder& holder);
  static void SetPlace(const Holder& holder, Location place);
  // Moves cold DDR rows to SSD until about `bytes` of payload went, or nothing more can; false if
  // nothing went.
  bool Evict(Device* device, uint64_t bytes);
  // Passes the clock hand over up to `entries` entries, collecting rows that may leave DDR.
  void Sweep(Device* device, uint32_t entries, bool any, std::vector<Holder>* victims,
             uint64_t wanted);
  bool Demote(Device* device, const std::vector<Holder>& victims);
  // Moves the rows of condemned pages that a pass over `entries` entries meets: into other pages
  // with room, else, if `demote`, to the SSD.
  void MoveCondemned(Device* device, uint32_t entries, bool demote);
  // Entries of the device's buckets, used or not: one round of the clock hand.
  uint32_t RoundOf(const Device* device) const;
  // Brings an SSD row to DDR. Ok also when it is gone or already there.
  Status Promote(Device* device, uint32_t table, uint32_t bucket, uint64_t key);
  Status PromoteRow(Device* device, uint32_t table, Bucket* bucket, uint64_t key);
  template <typename Visit>
  void AdvanceHand(Device* device, uint32_t entries, Visit visit);

  // --- compaction.cc; the device's writer is held -----------------------------------------------
  // Who names this SSD slot; nullopt: nobody does any more.
  std::optional<Holder> HolderOf(Device* device, uint32_t table, uint64_t key, uint64_t ssd_slot);
  // Moves the live rows of some blocks of a segment of which `least_dead` is dead. Returns the
  // bytes read and written, 0 if there is no such segment.
  uint64_t CompactStep(Device* device, double least_dead);
  // A step, if the budget of bytes a second allows it.
  void CompactInBackground(Device* device);
  // Up to a segment, whatever that budget: rows would be refused otherwise. False if none is worth
  // it.
  bool CompactForRoom(Device* device);

  // --- versions.cc -------------------------------------------------------------------------------
  Status StageOne(Device* device, uint64_t version, uint32_t table, uint32_t number, Bucket* bucket,
                  const RowRecord& record);
  Status StageBase(Device* device, const Table& table, Bucket* bucket, const RowRecord& record);
  // Folds all versions <= `limit` of a device. Requires: no reader below `limit`, or ever again.
  void Fold(Device* device, uint64_t limit);
  void FoldNode(Device* device, VersionNode* node, uint64_t limit);
  // The window is what it is from now on: folds and retires what left it and no pin needs.
  // Requires: commit_mutex.
  void LeaveWindow();

  // --- holding.cc --------------------------------------------------------------------------------
  // Retires older copies that no pin can read any more. Requires: commit_mutex.
  void RetireSuperseded(uint64_t limit);
  // Unlinks a bucket's versions and retires it. Requires: the device's writer; no reader can reach
  // the bucket from now on.
  void RetireBucket(uint32_t table, uint32_t number, Bucket* bucket);
  // Requires: no reader can hold anything of it.
  void FreeBucket(const Table& table, Bucket* bucket);
  // All records are of the table and the bucket.
  Status ProveRecords(const Table& table, uint32_t bucket,
                      std::span<const std::byte> records) const;

  // --- lookup.cc ---------------------------------------------------------------------------------
  // What a chain or an entry means at a version.
  static Location Resolve(Location location, uint64_t version, uint64_t* changed_at = nullptr);

  // --- training.cc; the device's writer is held --------------------------------------------------
  // The row of an entry in DDR (brought there from SSD if need be).
  Result<Location> ResidentRow(Device* device, uint32_t table, uint32_t bucket, uint64_t key);
  RowAux* AuxOf(Device* device, Location place) const {
    return reinterpret_cast<RowAux*>(device->arena.Aux(place.slot()));
  }
  void MarkChanged(Device* device, Bucket* bucket, uint64_t key, Location place);
};

}  // namespace embertide
