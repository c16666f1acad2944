// BucketIndex: key -> Location for the resident rows of one bucket.
//
// Open addressing in groups of four entries that fill one cache line, so that a lookup waits for
// one line before it knows where the row lies:
//
//   group  [ 4 keys ][ 4 words ]      64 bytes, aligned
//   word   a Location, with bits of the index's own:  62..57 access count, 56 deleted; 0: empty
//
// Keys are compared whole, all four at once and without a branch: at one line a group there is no
// second line that a tag could save. A hash's first group is its low 32 bits scaled to the number
// of groups; a full group's keys go on in the next one. Arrays grow by a fifth when three quarters
// are in use, so an entry costs 21 to 26 bytes; entries keep their order, so growing is one pass
// along both arrays (docs/design/0004-one-line-index.md). Large arrays are lists of 64 KiB pages,
// and the pass goes kStepGroups at a time, a step for each entry that is added, so that nobody
// waits for all of it:
//
//   from   [ homes below `moved`: stand in `to` ][ homes from `moved` on: stand here ]
//   to     [ ....................................... ][ empty yet                         ]
//
// What was moved stays in `from` unread, until that is retired.
//
// Invariants
//   1. A key stands in at most one entry; no group from its hash's first to its own, the last left
//      out, has an empty entry.
//   2. At most 3/4 of the entries of `to` are used or deleted, and of `from` a few more.
//   3. The bytes of the arrays are charged to the budget while they exist, also while retired.
//
// Threads: Begin to AccessCount run on any thread beside one writer. An entry is published by its
// word; a reader that finds a key reads its word and then the key again, so a reused entry is never
// mistaken. The arrays of a grown bucket are handed to the writer's retire list, not freed.
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
#include "store/location.h"

#if defined(__SSE4_1__)
#include <immintrin.h>
#define EMBERTIDE_VECTOR_GROUPS 1
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace embertide {

class BucketIndex {
 public:
  static constexpr uint32_t kGroupEntries = 4;
  static constexpr uint32_t kMaxAccessCount = 63;
  struct alignas(64) Group {
    std::array<std::atomic<uint64_t>, kGroupEntries> keys;
    std::array<std::atomic<uint64_t>, kGroupEntries> words;
  };
  // Groups that are moved when an entry is added: about 10 us, and over long before either of the
  // arrays is full.
  static constexpr uint32_t kStepGroups = 256;
  static constexpr uint32_t kPageBytes = 64 << 10;
  static constexpr uint32_t kPageGroups = kPageBytes / sizeof(Group);
  // The groups of one size, in pages; freed by whoever retired them.
  struct Arrays {
    Group** pages = nullptr;
    uint32_t group_count = 0;
    Group* group(uint32_t number) const {
      return pages[number / kPageGroups] + number % kPageGroups;
    }
    uint64_t bytes() const { return pages == nullptr ? 0 : BytesFor(group_count); }
  };
  // With the list of their pages.
  static uint64_t BytesFor(uint32_t group_count);
  static void Free(PagePool* pool, const Arrays& arrays);
  static constexpr uint32_t kNotFound = ~0U;

  // Arrays of half a page and more lie in pages, so a budget may need twice the pages that it pays.
  static constexpr uint32_t kPagesPerBudgetPage = 2;
  BucketIndex() = default;
  ~BucketIndex() { EMBERTIDE_CHECK(arrays().pages == nullptr); }
  BucketIndex(const BucketIndex&) = delete;
  BucketIndex& operator=(const BucketIndex&) = delete;

  // --- any thread, under a pin
  // Where a lookup of a hash stands; a batch asks for many keys' groups before it reads the first.
  struct Cursor {
    Arrays arrays;
    uint32_t number = 0;
    Group* group = nullptr;
    void Prefetch() const { __builtin_prefetch(group); }
    // To the next group of the chain.
    void Advance() {
      if (++number == arrays.group_count) number = 0;
      group = arrays.group(number);
    }
  };
  Cursor Begin(uint64_t hash) const {
    const uint64_t packed = packed_.load(std::memory_order_acquire);
    // One test for both rare cases: no arrays, or growing.
    if (static_cast<int64_t>(packed - 1) < 0) [[unlikely]] {
      return BeginRare(packed, hash);
    }
    return CursorAt(Unpack(packed), hash);
  }
  // That of an index without arrays.
  static Group* EmptyGroup() { return &empty_group_; }
  // The word of `key` in one group; if it is not there 0, or kGoesOn if GoesOn(group).
  // (As a word, kGoesOn names a row of DDR, so that one test tells both from all else.)
  static constexpr uint64_t kGoesOn =
      (1ULL << 56) | (uint64_t{static_cast<uint8_t>(TierId::kDdr)} << 54);
  static uint64_t WordOrGoesOn(const Group& group, uint64_t key);
  // Whether a key that is not in this group may stand in the next.
  static bool GoesOn(const Group& group);
  // Counts an access of a key that was found in the group, unless a writer is quicker.
  static void Count(Group* group, uint64_t key);

  // The word of `key` and the last group that was looked at, its own if it has one; else 0.
  uint64_t Find(uint64_t hash, uint64_t key, Group** group) const;
  // The location of `key`, which counts as no access; a default Location if it has no entry.
  Location Peek(uint64_t hash, uint64_t key) const {
    Group* group = nullptr;
    const uint64_t word = Find(hash, key, &group);
    return word == 0 ? Location() : LocationOf(word);
  }
  // 0 to kMaxAccessCount, halved by Age.
  uint32_t AccessCount(uint64_t hash, uint64_t key) const;

  // --- the writer
  // The entry of `key`, or kNotFound.
  uint32_t Locate(uint64_t hash, uint64_t key) const;
  Location At(uint32_t entry) const { return LocationOf(Word(entry).load()); }
  uint64_t KeyAt(uint32_t entry) const {
    return GroupOf(entry)->keys[entry % kGroupEntries].load();
  }
  void Set(uint32_t entry, Location location);
  // Whether there is room for one entry more, so that Reserve has nothing to do.
  bool HasRoom() const;
  // Makes room for so many more entries. If the arrays must grow, the new ones are charged to
  // `budget` and lie in `pool`, which has pages of kPageBytes, as many as that budget may need; the
  // old ones are handed to `retire`, by this call or a later one. Entries have other numbers then.
  // kResourceExhausted if the budget has no room.
  Status Reserve(ByteBudget* budget, PagePool* pool,
                 const std::function<void(const Arrays&)>& retire, uint32_t entries = 1);
  // Makes the arrays smaller, if those of 3/4 their size and less would do, with room to spare; all
  // at once. Charged and retired as by Reserve; nothing happens if the budget has no room for both.
  void Shrink(ByteBudget* budget, PagePool* pool, const std::function<void(const Arrays&)>& retire);
  // Adds a key that is not there. Requires: Reserve, and no Insert since.
  void Insert(uint64_t hash, uint64_t key, Location location);
  void Erase(uint32_t entry);
  // Frees the arrays. Requires: no reader. To be called before it ends.
  void Clear(PagePool* pool);

  // Entries, used or not; iterate with Occupied.
  uint32_t capacity() const {
    return (arrays().group_count + Growing().group_count) * kGroupEntries;
  }
  bool Occupied(uint32_t entry) const;
  // Calls visit(key, location) for every key whose hash's low half is begin, ..., end - 1.
  // Requires: begin < end <= 2^32.
  template <typename Visit>
  void ForEachIn(uint64_t begin, uint64_t end, const Visit& visit) const {
    VisitIn(arrays(), 0, begin, end, visit);
    VisitIn(Growing(), arrays().group_count * kGroupEntries, begin, end, visit);
  }
  // Halves the entry's access count and returns what it was: the clock hand of eviction.
  uint8_t Age(uint32_t entry);
  uint32_t size() const { return used_.load(std::memory_order_relaxed); }
  uint64_t bytes() const { return arrays().bytes() + Growing().bytes(); }
  bool growing() const { return Growing().pages != nullptr; }

  // Verifies invariants 1 and 2 given the hash of a key. kCorrupt naming the key.
  Status CheckIntegrity(uint64_t (*hash)(uint64_t)) const;

  static Location LocationOf(uint64_t word) { return Location::FromWord(word & ~kOwnBits); }

 private:
  static constexpr uint32_t kCountShift = 57;
  static constexpr uint64_t kDeleted = 1ULL << 56;
  static constexpr uint64_t kCountBits = uint64_t{kMaxAccessCount} << kCountShift;
  static constexpr uint64_t kOwnBits = kCountBits | kDeleted;
  // The sizes that arrays grow through, in groups: each about a fifth more than the one before, and
  // whole pages where that is fine enough.
  static constexpr uint32_t kSizes = 112;
  static const std::array<uint32_t, kSizes> kGroupCounts;

  static uint32_t CountOf(uint64_t word) {
    return static_cast<uint32_t>((word & kCountBits) >> kCountShift);
  }
  static bool IsLive(uint64_t word) { return word != 0 && word != kDeleted; }
  // The first group of a hash among so many.
  static uint32_t HomeOf(uint64_t hash, uint32_t group_count) {
    return static_cast<uint32_t>((uint64_t{static_cast<uint32_t>(hash)} * group_count) >> 32);
  }
  static Cursor CursorAt(const Arrays& arrays, uint64_t hash) {
    const uint32_t number = HomeOf(hash, arrays.group_count);
    return {arrays, number, arrays.group(number)};
  }
  // Stands before the list of pages of any arrays, and says what was grown out of into them.
  struct Growth {
    Arrays from;
    std::atomic<uint32_t> moved{0};  // homes of `from` below this one; all of them: it is over
  };
  static Growth* GrowthOf(const Arrays& to) { return reinterpret_cast<Growth*>(to.pages) - 1; }
  // Of the piece of the heap that holds growth and list, up to where groups may follow.
  static uint64_t HeadBytes(uint32_t group_count);
  static Arrays Allocate(uint32_t groups, PagePool* pool);
  // One word names the arrays and their size, so that a reader never sees those of two.
  static constexpr uint32_t kSizeShift = 48;
  static constexpr uint64_t kGrowing = 1ULL << 63;
  static uint32_t SizeOf(uint64_t packed) {
    return static_cast<uint32_t>((packed & ~kGrowing) >> kSizeShift);
  }
  static Arrays Unpack(uint64_t packed) {
    return {reinterpret_cast<Group**>(packed & ((1ULL << kSizeShift) - 1U)),
            packed == 0 ? 0 : kGroupCounts[SizeOf(packed)]};
  }
  // While growing, those that are grown into.
  Arrays arrays() const { return Unpack(packed_.load(std::memory_order_acquire)); }
  // Those that are grown out of; none if not growing.
  Arrays Growing() const {
    const uint64_t packed = packed_.load(std::memory_order_acquire);
    return (packed & kGrowing) == 0 ? Arrays{} : GrowthOf(Unpack(packed))->from;
  }
  static Cursor BeginRare(uint64_t packed, uint64_t hash);
  // New arrays of a size, into which Step moves what there is. Requires: not growing; `bytes` of
  // them are charged.
  void GrowInto(uint32_t size, PagePool* pool);
  // Moves the next homes, and hands the old arrays to `retire` when all are. Requires: growing.
  void Step(uint32_t groups, const std::function<void(const Arrays&)>& retire);
  // Entries are numbered through the arrays, then, while growing, through those grown out of.
  Group* GroupOf(uint32_t entry) const {
    const Arrays all = arrays();
    const uint32_t number = entry / kGroupEntries;
    return number < all.group_count ? all.group(number) : Growing().group(number - all.group_count);
  }
  std::atomic<uint64_t>& Word(uint32_t entry) const {
    return GroupOf(entry)->words[entry % kGroupEntries];
  }
  // As ForEachIn, of arrays whose entries are numbered from `first` on.
  template <typename Visit>
  void VisitIn(const Arrays& all, uint32_t first, uint64_t begin, uint64_t end,
               const Visit& visit) const {
    if (all.pages == nullptr) return;
    Cursor at = CursorAt(all, begin);
    const uint32_t last = CursorAt(all, end - 1).number;
    for (uint32_t step = 0, least = last - at.number; step < all.group_count; ++step) {
      for (uint32_t i = 0; i < kGroupEntries; ++i) {
        const uint32_t entry = first + at.number * kGroupEntries + i;
        if (!Occupied(entry)) continue;
        const uint64_t key = KeyAt(entry);
        const auto hash = static_cast<uint32_t>(HashKey(key));
        if (hash >= begin && hash < end) visit(key, At(entry));
      }
      // Keys of the last home stand in the groups after it as long as these are full.
      if (step >= least && !GoesOn(*at.group)) break;
      at.Advance();
    }
  }
  // The group, its number and the lane of a key; a null group if it has no entry.
  struct Found {
    Group* group = nullptr;
    uint32_t number = 0;  // through both arrays
    uint32_t lane = 0;
  };
  Found Probe(uint64_t hash, uint64_t key) const;
  // Sets an empty or deleted entry on the way from `at`; true if it was deleted.
  static bool Place(Cursor at, uint64_t key, uint64_t word);

  static Group empty_group_;
  std::atomic<uint64_t> packed_{0};
  std::atomic<uint32_t> used_{0};  // set by the writer, read by any thread
  uint32_t deleted_ = 0;           // of arrays()
};

#if defined(EMBERTIDE_VECTOR_GROUPS)
// Lanes of a group as one vector: each of them as if by a load that acquires.
template <typename Vector>
[[gnu::always_inline]] inline Vector LoadLanes(const std::atomic<uint64_t>* lanes) {
#if defined(__SANITIZE_THREAD__)
  // TSan knows no such load: it does not see this one, and is told what it orders.
  Vector loaded;
  if constexpr (sizeof(Vector) == 16) {
    asm volatile("movdqa %1, %0" : "=x"(loaded) : "m"(*reinterpret_cast<const Vector*>(lanes)));
  } else {
    asm volatile("vmovdqa %1, %0" : "=x"(loaded) : "m"(*reinterpret_cast<const Vector*>(lanes)));
  }
  for (size_t i = 0; i < sizeof(Vector) / sizeof(uint64_t); ++i) {
    __tsan_acquire(const_cast<std::atomic<uint64_t>*>(lanes + i));
  }
  return loaded;
#else
  return *reinterpret_cast<const volatile Vector*>(lanes);
#endif
}
#endif

// Always inlined: files of wider vectors compile it too, and no such code may serve another file.
[[gnu::always_inline]] inline uint64_t BucketIndex::WordOrGoesOn(const Group& group, uint64_t key) {
  // A deleted or an empty entry may keep any key; its word adds nothing but the mark.
  uint64_t word = 0;
  bool full = true;
  // A lane is loaded whole whatever vector brings it.
#if defined(EMBERTIDE_VECTOR_GROUPS) && defined(__AVX512VL__)
  // Empty entries stand after all others, so the first lane that has the key or is empty decides.
  const __m256i wanted = _mm256_set1_epi64x(static_cast<int64_t>(key));
  const auto* keys = group.keys.data();
  const __mmask8 before = _mm256_cmpeq_epi64_mask(LoadLanes<__m256i>(keys), wanted);
  const auto words = LoadLanes<__m256i>(group.words.data());
  const __mmask8 its = _mm256_mask_cmpeq_epi64_mask(before, LoadLanes<__m256i>(keys), wanted);
  const __mmask8 empty = _mm256_testn_epi64_mask(words, words);
  const __m256i undeleted = _mm256_andnot_si256(_mm256_set1_epi64x(kDeleted), words);
  const __m256i first = _mm256_mask_compress_epi64(_mm256_set1_epi64x(kGoesOn),
                                                   static_cast<__mmask8>(its | empty), undeleted);
  return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm256_castsi256_si128(first)));
#elif defined(EMBERTIDE_VECTOR_GROUPS) && defined(__AVX2__)
  const __m256i wanted = _mm256_set1_epi64x(static_cast<int64_t>(key));
  const auto* keys = group.keys.data();
  const __m256i before = _mm256_cmpeq_epi64(LoadLanes<__m256i>(keys), wanted);
  const auto words = LoadLanes<__m256i>(group.words.data());
  const __m256i its = _mm256_and_si256(before, words);
  const __m256i four = _mm256_and_si256(its, _mm256_cmpeq_epi64(LoadLanes<__m256i>(keys), wanted));
  const __m256i empty = _mm256_cmpeq_epi64(words, _mm256_setzero_si256());
  full = _mm256_testz_si256(empty, empty) != 0;
  const __m128i both =
      _mm_or_si128(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  word = static_cast<uint64_t>(_mm_cvtsi128_si64(both)) |
         static_cast<uint64_t>(_mm_extract_epi64(both, 1));
#elif defined(EMBERTIDE_VECTOR_GROUPS)
  const __m128i wanted = _mm_set1_epi64x(static_cast<int64_t>(key));
  __m128i both = _mm_setzero_si128();
  __m128i empty = _mm_setzero_si128();
  for (uint32_t half = 0; half < 2; ++half) {
    const auto* keys = &group.keys[2 * half];
    const __m128i before = _mm_cmpeq_epi64(LoadLanes<__m128i>(keys), wanted);
    const auto words = LoadLanes<__m128i>(&group.words[2 * half]);
    const __m128i its = _mm_and_si128(before, words);
    both =
        _mm_or_si128(both, _mm_and_si128(its, _mm_cmpeq_epi64(LoadLanes<__m128i>(keys), wanted)));
    empty = _mm_or_si128(empty, _mm_cmpeq_epi64(words, _mm_setzero_si128()));
  }
  full = _mm_testz_si128(empty, empty) != 0;
  word = static_cast<uint64_t>(_mm_cvtsi128_si64(both)) |
         static_cast<uint64_t>(_mm_extract_epi64(both, 1));
#else
  for (uint32_t i = 0; i < kGroupEntries; ++i) {
    const bool before = group.keys[i].load(std::memory_order_acquire) == key;
    const uint64_t its = group.words[i].load(std::memory_order_acquire);
    const bool after = group.keys[i].load(std::memory_order_acquire) == key;
    word |= its & -static_cast<uint64_t>(static_cast<unsigned>(before) & after);
    full &= its != 0;
  }
#endif
  word &= ~kDeleted;
  return word | (static_cast<uint64_t>(static_cast<unsigned>(word == 0) & full) * kGoesOn);
}

inline bool BucketIndex::GoesOn(const Group& group) {
  return std::ranges::all_of(group.words, [](const std::atomic<uint64_t>& word) {
    return word.load(std::memory_order_acquire) != 0;
  });
}

}  // namespace embertide
