// BucketIndex: key -> Location for the resident rows of one bucket.
//
// Open addressing in groups of four or six entries that fill one cache line (index_group.h), so
// that a lookup waits for one line before it knows where the row lies. A hash's first group is its
// low 32 bits scaled to the number of groups; a full group's keys go on in the next one. Arrays
// grow by a fifth when they are full, so an entry costs 21 to 26 bytes in plain groups and 12.5 to
// 15 in lean ones; entries keep their order, so growing is one pass along both arrays
// (docs/design/0004-one-line-index.md). Arrays of either kind grow into those of the other, as the
// number of groups says. Large arrays are lists of 64 KiB pages, and the pass goes kStepGroups at a
// time, a step for each entry that is added, so that nobody waits for all of it:
//
//   from   [ homes below `moved`: stand in `to` ][ homes from `moved` on: stand here ]
//   to     [ ....................................... ][ empty yet                         ]
//
// Moved entries stay in `from`, unread, until `from` is retired.
//
// A key can stand so far behind its first group in lean arrays and no farther. Should the groups
// there be full, which no chance brings about but a forger of keys may, the arrays become plain,
// all at once.
//
// Invariants
//   1. A key stands in at most one entry; no group from its hash's first to its own, the last left
//      out, has an empty entry, nor is one outside the window of lean arrays.
//   2. At most 3/4 of the entries of plain arrays that are not grown out of, or 17/20 of lean ones,
//      are used or deleted.
//   3. The bytes of the arrays are charged to the budget while they exist, also while retired.
//
// Threads: Begin to AccessCount run on any thread beside one writer. The arrays of a grown bucket
// are handed to the writer's retire list, not freed.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "ddr/byte_budget.h"
#include "ddr/page_pool.h"
#include "embertide/hash.h"
#include "embertide/status.h"
#include "store/index_group.h"
#include "store/location.h"

namespace embertide {

class BucketIndex {
 public:
  static constexpr uint32_t kMaxAccessCount = 63;
  // Groups that are moved when an entry is added: about 10 us, and over long before either of the
  // arrays is full.
  static constexpr uint32_t kStepGroups = 256;
  static constexpr uint32_t kPageBytes = 64 << 10;
  static constexpr uint32_t kPageGroups = kPageBytes / sizeof(IndexGroup);
  // The groups of one size, in pages; freed by whoever retired them.
  struct Arrays {
    IndexGroup** pages = nullptr;
    uint32_t group_count = 0;
    uint32_t slot_bits = 0;  // of lean groups; 0: plain ones
    bool lean() const { return slot_bits != 0; }
    GroupRef group(uint32_t number) const {
      return {pages[number / kPageGroups] + number % kPageGroups, slot_bits};
    }
    uint32_t lanes() const { return lean() ? kLeanEntries : kPlainEntries; }
    uint32_t entries() const { return group_count * lanes(); }
    uint64_t bytes() const { return pages == nullptr ? 0 : BytesFor(group_count); }
  };
  // With the list of their pages.
  static uint64_t BytesFor(uint32_t group_count);
  static void Free(PagePool* pool, const Arrays& arrays);
  static constexpr uint32_t kNotFound = ~0U;

  // Arrays of half a page and more lie in pages, so a budget may need twice the pages that it pays.
  static constexpr uint32_t kPagesPerBudgetPage = 2;
  // `lean`: how entries of lean arrays say what they say; by default there are none.
  explicit BucketIndex(const LeanShape& lean = LeanShape()) : lean_(lean) {}
  ~BucketIndex() { EMBERTIDE_CHECK(arrays().pages == nullptr); }
  BucketIndex(const BucketIndex&) = delete;
  BucketIndex& operator=(const BucketIndex&) = delete;

  // --- any thread, under a pin
  // Where a lookup of a hash stands; a batch asks for many keys' groups before it reads the first.
  struct Cursor {
    Arrays arrays;
    uint32_t number = 0;
    GroupRef group;
    void Prefetch() const { __builtin_prefetch(group.address()); }
    // To the next group of the chain.
    void Advance() {
      if (++number == arrays.group_count) number = 0;
      group = arrays.group(number);
    }
  };
  // `kLean`: its groups may be lean ones.
  template <bool kLean = true>
  Cursor Begin(uint64_t hash) const {
    const uint64_t packed = packed_.load(std::memory_order_acquire);
    // One test for both rare cases: no arrays, or growing.
    if (static_cast<int64_t>(packed - 1) < 0) [[unlikely]] {
      return BeginRare(packed, hash);
    }
    Arrays arrays = Unpack(packed);
    if constexpr (!kLean) arrays.slot_bits = 0;
    return CursorAt(arrays, hash);
  }
  // That of an index without arrays.
  static GroupRef EmptyGroup() { return {&empty_group_, 0}; }
  // The value that FindIn looks for in a group.
  uint64_t Wanted(uint64_t hash, uint64_t key, GroupRef group) const {
    return group.lean() ? lean_.Turned(hash) : key;
  }
  // The location for `found`, which FindIn returned. Requires: it is not kContinueProbe.
  Location FoundBy(uint64_t hash, uint64_t key, GroupRef group, uint64_t found) const {
    if (found == 0) return {};
    if (!group.lean()) return LocationOf(found);
    return found == kAskIndex ? Peek(hash, key) : lean_.RowOf(found);
  }
  const LeanShape& lean() const { return lean_; }
  // Counts an access of a key that was found in the group, unless a writer is quicker; not in lean
  // groups.
  static void Count(GroupRef group, uint64_t key);

  // The location of `key`, which counts as no access; a default Location if it has no entry.
  Location Peek(uint64_t hash, uint64_t key) const {
    GroupRef group;
    return Find(hash, key, &group);
  }
  // As Peek; tells the last group that was looked at, its own if it has one.
  Location Find(uint64_t hash, uint64_t key, GroupRef* group) const {
    const Cursor at = Begin(hash);
    return at.group.lean() ? FindLeanFrom(at, hash, key, group) : FindPlainFrom(at, key, group);
  }
  // 0 to kMaxAccessCount, halved by Age; 0 in lean groups.
  uint32_t AccessCount(uint64_t hash, uint64_t key) const;
  // Calls visit(key) for the keys of a group, removed ones and such that stand there no longer
  // included.
  template <typename Visit>
  void ForEachKey(const Cursor& at, const Visit& visit) const {
    for (uint32_t i = 0; i < at.arrays.lanes(); ++i) {
      Entry entry;
      if (Read(at, i, &entry)) visit(entry.key());
    }
  }

  // --- the writer
  // The entry of `key`, or kNotFound.
  uint32_t Locate(uint64_t hash, uint64_t key) const;
  Location At(uint32_t entry) const;
  uint64_t KeyAt(uint32_t entry) const;
  void Set(uint32_t entry, Location location);
  // Whether there is room for an entry of this hash, so that Reserve has nothing to do.
  bool HasRoom(uint64_t hash) const;
  using Retire = std::function<void(const Arrays&)>;
  // Makes room for an entry of this hash. If the arrays must grow, the new ones are charged to
  // `budget` and lie in `pool`, which has pages of kPageBytes, as many as that budget may need; the
  // old ones are handed to `retire`, by this call or a later one. Entries have other numbers then.
  // kResourceExhausted if the budget has no room.
  Status Reserve(ByteBudget* budget, PagePool* pool, const Retire& retire, uint64_t hash);
  // As Reserve, but arrays for so many more entries at once, of any hashes; for each of those
  // Reserve is still to be called.
  Status ReserveEntries(ByteBudget* budget, PagePool* pool, const Retire& retire, uint32_t entries);
  // Makes the arrays smaller, if those of 3/4 their size and less would do, with room to spare; all
  // at once. Charged and retired as by Reserve; nothing happens if the budget has no room for both.
  void Shrink(ByteBudget* budget, PagePool* pool, const Retire& retire);
  // Adds a key that is not there. Requires: Reserve of its hash, and no Insert since.
  void Insert(uint64_t hash, Location location);
  void Erase(uint32_t entry);
  // Frees the arrays. Requires: no reader. To be called before it ends.
  void Clear(PagePool* pool);

  // Entries, used or not: their numbers are below.
  uint32_t capacity() const { return arrays().entries() + Growing().entries(); }
  uint32_t group_count() const { return arrays().group_count + Growing().group_count; }
  // Calls visit(entry, location) for the used ones of entries first, ..., end - 1, until one is
  // answered by false; returns that one's number, or `end`. A visit may set or erase its own entry.
  // Requires: end <= capacity().
  template <typename Visit>
  uint32_t Walk(uint32_t first, uint32_t end, const Visit& visit) const {
    const bool may_stray = growing();
    for (uint32_t entry = first; entry < end;) {
      Spot spot = SpotOf(entry);
      const Arrays& all = spot.at.arrays;
      for (; spot.lane < all.lanes() && entry < end; ++spot.lane, ++entry) {
        const uint64_t word = Word(spot).load(std::memory_order_relaxed);
        if (!IsLive(word, all.lean())) continue;
        if (Entry read; may_stray && Read(spot.at, spot.lane, &read) && Stray(all, read.hash)) {
          continue;
        }
        if (!visit(entry, SaidBy(word, all))) return entry;
      }
    }
    return end;
  }
  // Calls visit(key, location) for every key whose hash's low half is begin, ..., end - 1.
  // Requires: begin < end <= 2^32.
  template <typename Visit>
  void ForEachIn(uint64_t begin, uint64_t end, const Visit& visit) const {
    VisitIn(arrays(), begin, end, visit);
    VisitIn(Growing(), begin, end, visit);
  }
  // Halves the entry's access count and returns what it was: the clock hand of eviction.
  uint8_t Age(uint32_t entry);
  uint32_t size() const { return used_.load(std::memory_order_relaxed); }
  uint64_t bytes() const { return arrays().bytes() + Growing().bytes(); }
  bool growing() const { return Growing().pages != nullptr; }

  // Verifies invariants 1 and 2. kCorrupt naming the key.
  Status CheckIntegrity() const;

  // The location in a word of a plain group.
  static Location LocationOf(uint64_t word) { return Location::FromWord(word & ~kOwnBits); }

 private:
  static constexpr uint32_t kCountShift = 57;
  static constexpr uint64_t kCountBits = uint64_t{kMaxAccessCount} << kCountShift;
  static constexpr uint64_t kOwnBits = kCountBits | kIndexDeleted;
  // The sizes that arrays grow through, in groups: each about a fifth more than the one before, and
  // whole pages where that is fine enough.
  static constexpr uint32_t kSizes = 112;
  static const std::array<uint32_t, kSizes> kGroupCounts;

  // The content of an entry, whatever its group.
  struct Entry {
    uint64_t hash = 0;
    Location location;
    uint64_t count = 0;  // of accesses, as in a plain word
    uint64_t key() const { return KeyOfHash(hash); }
  };
  static uint32_t CountOf(uint64_t word) {
    return static_cast<uint32_t>((word & kCountBits) >> kCountShift);
  }
  static bool IsLive(uint64_t word, bool lean) {
    return lean ? LeanShape::IsLive(word) : word != 0 && word != kIndexDeleted;
  }
  // Whether an entry of this word can become another key's: deleted ones of plain groups can.
  static bool CanTake(uint64_t word, bool lean) {
    return lean ? word == 0 : !IsLive(word, /*lean=*/false);
  }
  // The first group of a hash among so many.
  static uint32_t HomeOf(uint64_t hash, uint32_t group_count) {
    return static_cast<uint32_t>((uint64_t{static_cast<uint32_t>(hash)} * group_count) >> 32);
  }
  static Cursor CursorAt(const Arrays& arrays, uint64_t hash) {
    const uint32_t number = HomeOf(hash, arrays.group_count);
    return {arrays, number, arrays.group(number)};
  }
  // Groups from its first that a key may stand in.
  uint32_t WindowOf(const Arrays& arrays) const {
    return arrays.lean() ? lean_.Window(arrays.group_count) : arrays.group_count;
  }
  // Stands before the list of pages of any arrays, and says what was grown out of into them.
  struct Growth {
    Arrays from;
    std::atomic<uint32_t> moved{0};  // homes of `from` below this one; all of them: it is over
    bool stuck = false;              // the next one has no room where it belongs; the writer's
  };
  static Growth* GrowthOf(const Arrays& to) { return reinterpret_cast<Growth*>(to.pages) - 1; }
  // Bytes of the piece of the heap that holds growth and list, up to where groups may follow.
  static uint64_t HeadBytes(uint32_t group_count);
  // Without pages where the system has no memory for them.
  Arrays Allocate(uint32_t size, bool lean, PagePool* pool) const;
  // One word names the arrays, their size and their kind, so that a reader never sees those of two.
  static constexpr uint32_t kSizeShift = 48;
  static constexpr uint32_t kSlotBitsShift = 55;
  static constexpr uint64_t kGrowing = 1ULL << 63;
  static_assert(kSizes <= 1U << (kSlotBitsShift - kSizeShift));
  static uint32_t SizeOf(uint64_t packed) {
    return static_cast<uint32_t>(packed >> kSizeShift) &
           ((1U << (kSlotBitsShift - kSizeShift)) - 1);
  }
  static Arrays Unpack(uint64_t packed) {
    return {reinterpret_cast<IndexGroup**>(packed & ((1ULL << kSizeShift) - 1U)),
            packed == 0 ? 0 : kGroupCounts[SizeOf(packed)],
            static_cast<uint32_t>(packed >> kSlotBitsShift) & 63U};
  }
  static uint64_t Packed(const Arrays& arrays, uint32_t size) {
    return (uint64_t{arrays.slot_bits} << kSlotBitsShift) | (uint64_t{size} << kSizeShift) |
           reinterpret_cast<uintptr_t>(arrays.pages);
  }
  // While growing, those that are grown into.
  Arrays arrays() const { return Unpack(packed_.load(std::memory_order_acquire)); }
  // Those that are grown out of; none if not growing.
  Arrays Growing() const {
    const uint64_t packed = packed_.load(std::memory_order_acquire);
    return (packed & kGrowing) == 0 ? Arrays{} : GrowthOf(Unpack(packed))->from;
  }
  static Cursor BeginRare(uint64_t packed, uint64_t hash);
  static Location FindPlainFrom(Cursor at, uint64_t key, GroupRef* group);
  Location FindLeanFrom(Cursor at, uint64_t hash, uint64_t key, GroupRef* group) const;
  // Whether arrays of a size, which are of the kind that they would be, hold so many entries.
  bool Holds(uint32_t size, uint64_t entries) const;
  // New arrays of a size, into which Step moves what there is. Requires: not growing; their bytes
  // are charged.
  // False: the system has no memory for it.
  bool GrowInto(uint32_t size, PagePool* pool);
  // Moves the next homes, and hands the old arrays to `retire` when all are. Stops early at one
  // that has no room where it belongs. Requires: growing.
  void Step(uint32_t groups, const Retire& retire);
  // Moves all there is to plain arrays, at once, whether growing or not.
  Status MakePlain(ByteBudget* budget, PagePool* pool, const Retire& retire);
  // Whether one of the groups where a hash may stand has room.
  bool Stands(uint64_t hash) const;
  // An entry by its number: through the arrays, then, while growing, through those grown out of.
  struct Spot {
    Cursor at;
    uint32_t lane = 0;
  };
  Spot SpotOf(uint32_t entry) const;
  static std::atomic<uint64_t>& Word(const Spot& spot) {
    return spot.at.arrays.lean() ? spot.at.group->lean_word(spot.lane)
                                 : spot.at.group->plain_word(spot.lane);
  }
  // The location in a live word.
  Location SaidBy(uint64_t word, const Arrays& of) const {
    return of.lean() ? lean_.LocationOf(word) : LocationOf(word);
  }
  // Reads the entry in a lane into `entry`; false: there is none.
  bool Read(const Cursor& at, uint32_t lane, Entry* entry) const;
  // The lane of a key in a group, or kNotFound.
  uint32_t LaneOf(const Cursor& at, uint64_t hash, uint64_t key) const;
  // As ForEachIn, of one of the arrays.
  template <typename Visit>
  void VisitIn(const Arrays& all, uint64_t begin, uint64_t end, const Visit& visit) const {
    if (all.pages == nullptr) return;
    Cursor at = CursorAt(all, begin);
    const uint32_t last = CursorAt(all, end - 1).number;
    for (uint32_t step = 0, least = last - at.number; step < all.group_count; ++step) {
      for (uint32_t i = 0; i < all.lanes(); ++i) {
        Entry entry;
        if (!Read(at, i, &entry) || Stray(all, entry.hash)) continue;
        const auto low = static_cast<uint32_t>(entry.hash);
        if (low >= begin && low < end) visit(entry.key(), entry.location);
      }
      // Keys of the last home stand in the groups after it as long as these are full.
      if (step >= least && !GoesOn(at.group)) break;
      at.Advance();
    }
  }
  // Whether a key that stands in these arrays is looked for in the others: while growing, what was
  // moved lies there still.
  bool Stray(const Arrays& all, uint64_t hash) const {
    const Arrays from = Growing();
    if (from.pages == nullptr) return false;
    const Growth& growth = *GrowthOf(arrays());
    const bool moved = HomeOf(hash, from.group_count) < growth.moved.load();
    return moved == (all.pages == from.pages);
  }
  Spot Probe(uint64_t hash, uint64_t key) const;
  // Takes an entry where a hash may stand.
  enum class Placed : uint8_t { kNowhere, kWasEmpty, kWasDeleted };
  Placed Place(const Arrays& into, const Entry& entry) const;

  static IndexGroup empty_group_;
  std::atomic<uint64_t> packed_{0};
  std::atomic<uint32_t> used_{0};  // set by the writer, read by any thread
  uint32_t deleted_ = 0;           // of arrays()
  const LeanShape lean_;
};

}  // namespace embertide
