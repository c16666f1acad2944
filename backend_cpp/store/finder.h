// Finder: where the rows of a chunk of keys lie, as of one pinned version.
//
// Keys go on in steps (of 32, or 16: prefetch.h), so that none waits alone for memory and memory
// seldom waits for a sum:
//
//   step s + 3: ask for the keys' groups    step s + 2: find them there, ask for the rows
//   step s + 1: or in the groups after      step s:     what the caller may pool
//
// Lines are asked for into the second-level cache, which has room for more misses than the first,
// by loops that do nothing else: until its address is translated, which takes a walk through the
// page tables, what asks for a line keeps a core from going on for more than some three hundred
// instructions, and the fewer a line takes, the more lines that is.
//
// Rows on an SSD, and keys that nobody here holds, hold the steps back: the caller then asks for
// everything that is left, and the rows are read in one batch (each block once).
//
// Used by one thread, within one BagReader; its memory is kept and bounded by the largest chunk
// (lookup_scratch.h says how requests are cut into chunks).
#pragma once

#include <array>
#include <span>
#include <vector>

#include "store/gap_sampler.h"
#include "store/prefetch.h"
#include "store/row_ops.h"
#include "store/store_state.h"

namespace embertide {

class Finder {
 public:
  // Forgets all keys. `store` must live until the next Begin.
  void Begin(const StoreState* store, uint64_t version);
  // From Begin on: notes when rows changed, which ChangedSince tells.
  void NoteChanges() { note_changes_ = true; }
  // Adds the keys of a request that are in a bag, in order.
  void Add(std::span<const BagFeature> features, const KeyBags& request);
  // Adds those of all requests of a chunk, each one's bags of the first feature before the bags of
  // the next: what the keys of a table have in common is then found out once, and its buckets are
  // cached.
  void AddByFeature(std::span<const BagFeature> features, std::span<const KeyBags> requests);

  // Makes found()[.. end) what those keys found, and asks for what comes after them; false if some
  // wait for Bring.
  bool Find(size_t end) {
    while (ready_ < end) {
      if (waits_) return false;
      Step();
    }
    return true;
  }
  // Finds all keys, rows on an SSD included. kNotOwner, or what reading them failed with.
  Status FindAll();

  const FoundRow* found() const { return found_.data(); }
  // Whether all that was found so far, if it was not left to Bring, is rows of DDR.
  bool only_ddr() const { return only_ddr_; }
  uint64_t key(size_t i) const { return keys_[i]; }
  // Whether a version after `version` changed the row, or that cannot be told. Requires:
  // NoteChanges; `version` is pinned.
  bool ChangedSince(size_t i, uint64_t version) const {
    return changed_[i] > version || buckets_[i] == nullptr || buckets_[i]->since > version;
  }
  bool remote(size_t i) const { return !remote_.empty() && remote_[i] != nullptr; }
  size_t size() const { return size_; }
  // Bytes of its memory, which is kept between chunks.
  size_t memory_bytes() const;
  // Keys that are watched, where there is an observer; the caller empties it.
  std::vector<WatchedKey>& watched() { return watched_; }
  // Rows that were read, for the policies; the caller empties it.
  std::vector<std::pair<RowPool*, Access>>& accesses() { return accesses_; }

  // Writes where the rows of n keys lie, all of one table, as RowPlaces has them. Requires: they
  // are found; a store of one device.
  void TellPlaces(const Table& table, size_t first, size_t n, uint64_t* words) const;
  // Counts the accesses. Requires: all keys are found.
  void Count();

 private:
  // Keys that stand together and are of one table.
  struct Run {
    const Table* table = nullptr;
    size_t end = 0;
  };
  // A row that lies on an SSD.
  struct SsdKey {
    size_t at = 0;  // in found_
    const RowPool* pool = nullptr;
    LogRead read;
  };
  // Groups after the second that are asked for at once: one key in a hundred goes on behind them.
  static constexpr size_t kGroupsAhead = 3;

  // Makes room for the keys of a request behind all others.
  void Grow(const KeyBags& request);
  // Puts keys [first, end) of a request from `at` on, where Grow made room.
  void Put(const KeyBags& request, size_t first, size_t end, size_t at);
  // The keys before `end` that are in no run yet are of this feature.
  void AddRun(const BagFeature& feature, size_t end);
  void Step();
  template <bool kLean>
  void StepOf();
  template <bool kLean>
  void Aim(size_t first, size_t end);
  // AimAt and Watch take n keys of one table from `first` on, with their hashes.
  template <bool kLean>
  void AimAt(const Table& table, size_t first, size_t n, const uint64_t* hashes);
  void Watch(const Table& table, size_t first, size_t n, const uint64_t* hashes);
  void NoteNotHeld(const Table& table, size_t i);
  template <bool kLean>
  void Place(size_t first, size_t end);
  // How words of these groups, of keys of a table, say where its rows lie; null if not all alike.
  template <bool kLean>
  const RowShape* ShapeOf(const Table& table, size_t first, size_t n) const;
  // PlaceAlike and PlaceEach take n keys from `first` on, with what their groups have of them.
  void PlaceAlike(const RowShape& shape, size_t first, size_t n, const uint64_t* words);
  void PlaceEach(size_t first, size_t n, const uint64_t* words);
  void PlaceOne(size_t i, Location indexed);
  template <bool kLean>
  void Settle();
  // Where the index says that a key lies, by what was found of it in its group.
  Location IndexedAt(size_t i, uint64_t found) const {
    return buckets_[i] == nullptr
               ? Location()
               : buckets_[i]->index.FoundBy(HashKey(keys_[i]), keys_[i], groups_[i], found);
  }
  void TakeRemote(size_t i);
  void SettleLast();
  // Asks for what was noted in lines_.
  void AskForRows();
  Status ReadSsdRows();

  const StoreState* store_ = nullptr;
  uint64_t version_ = 0;
  size_t size_ = 0;
  size_t run_ = 0;      // of the next key to begin
  size_t met_run_ = 0;  // of the next to be looked for in its group
  size_t begun_ = 0;    // keys whose group was asked for
  size_t met_ = 0;      // keys looked for in it
  size_t second_ = 0;   // in the second, too, if that was full
  size_t settled_ = 0;  // keys looked for everywhere
  size_t ready_ = 0;    // those whose rows are on their way since a step
  bool lean_ = false;   // some tables' groups may be lean
  bool waits_ = false;
  bool only_ddr_ = true;
  bool note_changes_ = false;
  // One for each key, runs_ aside; groups_ has those where the keys were found, or their first.
  std::vector<Run> runs_;
  std::vector<uint64_t> keys_;
  std::vector<uint64_t> wanted_;  // what is looked for in its group, where some are lean
  std::vector<GroupRef> groups_;
  std::vector<const Bucket*> buckets_;
  std::vector<FoundRow> found_;
  std::vector<uint64_t> changed_;  // the version that a row is of; 0: of none since the oldest
  std::vector<const RemoteRow*> remote_;  // empty: no key came from elsewhere
  // Keys that are not in their first group, which is full.
  std::array<size_t, kMaxKeysAStep + 1> late_;
  size_t late_count_ = 0;
  // Keys in late_ that are not in their second group, either.
  std::array<size_t, kMaxKeysAStep> last_;
  size_t last_count_ = 0;
  // Lines of the rows that a step found; those that Place left to PlaceOne have two of them.
  std::array<Lines, 4 * kMaxKeysAStep + RowOps::kPlacedAtOnce> lines_;
  size_t lines_count_ = 0;
  // The first key whose bucket is not held, if any.
  size_t not_held_ = kHeld;
  uint32_t not_held_table_ = 0;
  static constexpr size_t kHeld = ~size_t{0};
  std::vector<SsdKey> ssd_keys_;
  std::vector<LogRead> ssd_reads_;
  std::vector<std::byte> ssd_rows_;
  std::vector<std::pair<RowPool*, Access>> accesses_;
  std::vector<WatchedKey> watched_;
  GapSampler gaps_;
  size_t until_counted_ = 0;  // keys
};

}  // namespace embertide
