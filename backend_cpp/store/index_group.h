// IndexGroup: one cache line of a bucket's index, and how entries stand in it.
//
//   plain  [ 4 keys ][ 4 words ]
//   word   a Location, with bits of the index's own: 62..57 access count, 56 deleted; 0: empty
//
//   lean   [ 6 x 16 bits ][ 6 x 5 bits ][ 6 words ]
//   word   [ hash ][ slot ][ live mask ][ 0 ]      a row of DDR; 0 as a whole: empty
//          [ hash ][       kind + 1 ][ 1 ][ 1 ]    a key that was removed
//          [ address of a chain's newest node, 1 ] a chain of versions
//
// Hashes are a bijection of keys (embertide/hash.h), so an entry need hold only what its place does
// not say of the hash: the bucket and, but for how far a key stands behind its first group, the
// group (Cleary 1984: quotienting). A lean entry has 21 of the bits left beside the word and
// the others above its slot, which is counted in units that all slots of its table are multiples
// of. Where a bucket has too few groups for the bits that are left, its groups are plain ones; so
// they are where rows go by access counts, which lean entries have not, or to an SSD.
//
// Entries of either kind are taken from the front and never become empty again, so a group whose
// last entry is empty is where a search ends.
//
// Threads: one writer; any thread reads. An entry is published by its word. Plain ones are used
// again once they are deleted, so a reader that finds a key reads its word and then the key again.
// Lean ones are not: they belong to one hash as long as their array is there.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "embertide/hash.h"
#include "embertide/row.h"
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

inline constexpr uint32_t kPlainEntries = 4;
inline constexpr uint32_t kLeanEntries = 6;

struct alignas(64) IndexGroup {
  std::array<std::atomic<uint64_t>, 8> lanes;

  std::atomic<uint64_t>& key(uint32_t i) { return lanes[i]; }
  const std::atomic<uint64_t>& key(uint32_t i) const { return lanes[i]; }
  std::atomic<uint64_t>& plain_word(uint32_t i) { return lanes[kPlainEntries + i]; }
  const std::atomic<uint64_t>& plain_word(uint32_t i) const { return lanes[kPlainEntries + i]; }
  std::atomic<uint64_t>& lean_word(uint32_t i) { return lanes[2 + i]; }
  const std::atomic<uint64_t>& lean_word(uint32_t i) const { return lanes[2 + i]; }
};

// A group and its kind, in one word.
class GroupRef {
 public:
  GroupRef() = default;
  // `slot_bits`: of a lean group, the bits of a word below the hash's; 0: a plain one.
  GroupRef(const IndexGroup* group, uint32_t slot_bits)
      : bits_(reinterpret_cast<uintptr_t>(group) | slot_bits) {}
  IndexGroup& operator*() const { return *reinterpret_cast<IndexGroup*>(bits_ & ~kSlotBits); }
  IndexGroup* operator->() const { return &**this; }
  uint32_t slot_bits() const { return static_cast<uint32_t>(bits_ & kSlotBits); }
  bool lean() const { return slot_bits() != 0; }
  // Any address in the group: for asking ahead.
  const void* address() const { return reinterpret_cast<const void*>(bits_); }
  // Groups of a page follow one another. An address, which may be of no group.
  const void* Behind(size_t groups) const {
    return reinterpret_cast<const void*>((bits_ & ~kSlotBits) + groups * sizeof(IndexGroup));
  }
  bool operator==(const GroupRef&) const = default;

 private:
  static constexpr uintptr_t kSlotBits = alignof(IndexGroup) - 1;
  uintptr_t bits_;
};

// Results of a search for a key in a group, other than the word of a row of DDR. As a word,
// kContinueProbe names a row of DDR, so that one test tells both from all else.
inline constexpr uint64_t kIndexDeleted = 1ULL << 56;
inline constexpr uint64_t kContinueProbe = kIndexDeleted | Location::kDdrKind;
// The index has to be asked by itself: a chain, a removed key, or an entry that is no row's.
inline constexpr uint64_t kAskIndex =
    kIndexDeleted | (uint64_t{static_cast<uint8_t>(TierId::kNowhere)} << 54);

// How lean entries of one bucket say what they say.
struct LeanShape {
  static constexpr uint32_t kTagBits = 16;
  static constexpr uint32_t kMoreBits = 5;
  static constexpr uint32_t kBesideBits = kTagBits + kMoreBits;
  // Groups behind its first that a key may stand in, at least, for lean groups to be used. With
  // loads as they are no key by chance stands so far.
  static constexpr uint32_t kMinWindow = 32;
  static constexpr uint64_t kDeleted = (15ULL << 2) | 3U;
  // Slot and live mask, of what FindLean gives.
  static constexpr uint64_t kFoundMask = (1ULL << 54) - 1;

  uint32_t bucket = 0;
  uint8_t bucket_bits = 0;
  uint8_t chunks = 1;      // of a row: bits of its live mask
  uint8_t unit_shift = 0;  // slots are multiples of 1 << this
  uint8_t slot_bits = 0;   // of a word, below the hash's; 0: there is no lean group

  // For rows of a layout in a range of addresses of so many slots.
  static LeanShape Of(const RowLayout& layout, uint32_t bucket, uint32_t bucket_bits,
                      uint64_t slots);

  // A hash without its bucket, so turned that what its group does not say stands lowest.
  uint64_t Turned(uint64_t hash) const { return Turn(hash, bucket_bits); }
  [[gnu::always_inline]] static uint64_t Turn(uint64_t hash, uint32_t bucket_bits) {
    return (hash << bucket_bits >> (32 + bucket_bits)) | (hash << (32 - bucket_bits));
  }
  // Bits that an entry holds of a hash's low half, which says its group.
  int HeldBits() const {
    return static_cast<int>(kBesideBits + 64U + bucket_bits) - static_cast<int>(slot_bits + 32U);
  }
  // The hash of an entry that has these bits of it, and stands in this one of so many groups.
  uint64_t HashOf(uint64_t turned, uint32_t number, uint32_t groups) const;
  // Groups, out of so many, that a key may stand in from its first on; 0: there are too few.
  uint32_t Window(uint32_t groups) const;

  // The word of an entry of any kind. Requires: it names no row of an SSD.
  uint64_t WordOf(Location location, uint64_t turned) const;
  Location LocationOf(uint64_t word) const;
  // The row that FindLean returned for a lean group.
  Location RowOf(uint64_t found) const {
    return {TierId::kDdr, static_cast<uint16_t>(found & ((1U << chunks) - 1U)), SlotOf(found)};
  }
  uint64_t SlotOf(uint64_t found) const { return (found & kFoundMask) >> chunks << unit_shift; }

  static bool IsLive(uint64_t word) { return word != 0 && word != kDeleted; }
  static bool IsChain(uint64_t word) { return (word & 3U) == 1; }
  static const VersionNode* ChainOf(uint64_t word) {
    return reinterpret_cast<const VersionNode*>(word & ~uint64_t{1});
  }
  // The bits beside an entry's word.
  static uint16_t TagOf(const IndexGroup& group, uint32_t lane) {
    const uint64_t tags = group.lanes[lane / 4].load(std::memory_order_acquire);
    return static_cast<uint16_t>(tags >> (lane % 4 * kTagBits));
  }
  static uint32_t MoreOf(const IndexGroup& group, uint32_t lane) {
    const uint64_t more = group.lanes[1].load(std::memory_order_acquire);
    return static_cast<uint32_t>(more >> (32 + lane * kMoreBits)) & 31U;
  }
  static uint32_t BesideOf(const IndexGroup& group, uint32_t lane) {
    return TagOf(group, lane) | MoreOf(group, lane) << kTagBits;
  }
  // The writer's; before the word.
  static void SetBeside(IndexGroup* group, uint32_t lane, uint64_t turned);
  // The bits of a hash that a row's or a removed key's entry holds.
  uint64_t TurnedOf(uint32_t beside, uint64_t word) const {
    return beside | (word >> slot_bits << kBesideBits);
  }
  // The bits of a turned hash that a word holds.
  uint64_t RestOf(uint64_t turned) const { return turned >> kBesideBits << slot_bits; }
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

// The word of `key` in a plain group; if it is not there 0, or kContinueProbe if it may be in the
// next. Always inlined, as what follows: files of wider vectors compile it too, and no such code
// may serve another file.
[[gnu::always_inline]] inline uint64_t FindPlain(const IndexGroup& group, uint64_t key) {
  // A deleted or an empty entry may keep any key; its word adds nothing but the mark.
  uint64_t word = 0;
  bool full = true;
  // A lane is loaded whole whatever vector brings it.
#if defined(EMBERTIDE_VECTOR_GROUPS) && defined(__AVX512VL__)
  // Empty entries stand after all others, so the first lane that has the key or is empty decides.
  const __m256i wanted = _mm256_set1_epi64x(static_cast<int64_t>(key));
  const auto* keys = group.lanes.data();
  const __mmask8 before = _mm256_cmpeq_epi64_mask(LoadLanes<__m256i>(keys), wanted);
  const auto words = LoadLanes<__m256i>(keys + kPlainEntries);
  const __mmask8 its = _mm256_mask_cmpeq_epi64_mask(before, LoadLanes<__m256i>(keys), wanted);
  const __mmask8 empty = _mm256_testn_epi64_mask(words, words);
  const __m256i undeleted = _mm256_andnot_si256(_mm256_set1_epi64x(kIndexDeleted), words);
  const __m256i first = _mm256_mask_compress_epi64(_mm256_set1_epi64x(kContinueProbe),
                                                   static_cast<__mmask8>(its | empty), undeleted);
  return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm256_castsi256_si128(first)));
#elif defined(EMBERTIDE_VECTOR_GROUPS) && defined(__AVX2__)
  const __m256i wanted = _mm256_set1_epi64x(static_cast<int64_t>(key));
  const auto* keys = group.lanes.data();
  const __m256i before = _mm256_cmpeq_epi64(LoadLanes<__m256i>(keys), wanted);
  const auto words = LoadLanes<__m256i>(keys + kPlainEntries);
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
    const auto* keys = &group.key(2 * half);
    const __m128i before = _mm_cmpeq_epi64(LoadLanes<__m128i>(keys), wanted);
    const auto words = LoadLanes<__m128i>(keys + kPlainEntries);
    const __m128i its = _mm_and_si128(before, words);
    both =
        _mm_or_si128(both, _mm_and_si128(its, _mm_cmpeq_epi64(LoadLanes<__m128i>(keys), wanted)));
    empty = _mm_or_si128(empty, _mm_cmpeq_epi64(words, _mm_setzero_si128()));
  }
  full = _mm_testz_si128(empty, empty) != 0;
  word = static_cast<uint64_t>(_mm_cvtsi128_si64(both)) |
         static_cast<uint64_t>(_mm_extract_epi64(both, 1));
#else
  for (uint32_t i = 0; i < kPlainEntries; ++i) {
    const bool before = group.key(i).load(std::memory_order_acquire) == key;
    const uint64_t its = group.plain_word(i).load(std::memory_order_acquire);
    const bool after = group.key(i).load(std::memory_order_acquire) == key;
    word |= its & -static_cast<uint64_t>(static_cast<unsigned>(before) & after);
    full &= its != 0;
  }
#endif
  word &= ~kIndexDeleted;
  return word | (static_cast<uint64_t>(static_cast<unsigned>(word == 0) & full) * kContinueProbe);
}

// Looks for a turned hash in a lean group. Returns a row of DDR, as LeanShape::RowOf takes it; 0 if
// it is not there, or kContinueProbe if it may be in the next group; kAskIndex if that does not say
// it. Requires: the key would stand within its window.
[[gnu::always_inline]] inline uint64_t FindLean(const IndexGroup& group, uint32_t slot_bits,
                                                uint64_t turned) {
  // The first entry with the hash's tag; if there is none, the last: that it is used says to go on.
  constexpr uint32_t kLast = kLeanEntries - 1;
  uint32_t its = 0;
#if defined(EMBERTIDE_VECTOR_GROUPS)
  const __m128i tag = _mm_set1_epi16(static_cast<int16_t>(turned));
  const __m128i equal = _mm_cmpeq_epi16(LoadLanes<__m128i>(group.lanes.data()), tag);
  its = static_cast<uint32_t>(_mm_movemask_epi8(equal)) & 0xfffU;
  const auto lane = static_cast<uint32_t>(std::countr_zero(its | (1U << (2 * kLast)))) / 2;
#else
  for (uint32_t i = 0; i < kLeanEntries; ++i) {
    const bool same = LeanShape::TagOf(group, i) == static_cast<uint16_t>(turned);
    its |= static_cast<uint32_t>(same) << i;
  }
  const auto lane = static_cast<uint32_t>(std::countr_zero(its | (1U << kLast)));
#endif
  const uint64_t word = group.lean_word(lane).load(std::memory_order_acquire);
  const uint64_t off = (word ^ (turned >> LeanShape::kBesideBits << slot_bits)) >> slot_bits;
  const uint64_t others = (turned >> LeanShape::kTagBits & 31U) ^ LeanShape::MoreOf(group, lane);
  // Once in some ten thousand, and of chains and removed keys: a branch that is foreseen. A tag of
  // 0 may be that of an entry whose bits are not there yet.
  const bool no_tag = static_cast<uint16_t>(turned) == 0;
  const bool no_row = (off | (word & 1U) | others) != 0 || word == 0 || no_tag;
  if (static_cast<unsigned>(its != 0) & static_cast<unsigned>(no_row)) [[unlikely]] {
    return kAskIndex;
  }
  const uint64_t found = ((word & ~(~uint64_t{0} << slot_bits)) >> 1) | Location::kDdrKind;
  // By masks, for one key in ten goes on: too few and too many for a branch.
  const uint64_t any = -static_cast<uint64_t>(its != 0);
  const uint64_t used = -static_cast<uint64_t>(word != 0);
  return (found & any) | (kContinueProbe & used & ~any);
}

// `wanted` is the key, or its turned hash where the group is lean.
[[gnu::always_inline]] inline uint64_t FindIn(GroupRef group, uint64_t wanted) {
  return group.lean() ? FindLean(*group, group.slot_bits(), wanted) : FindPlain(*group, wanted);
}

// Whether a key that is not in this group may stand in the next.
inline bool GoesOn(GroupRef group) {
  if (group.lean()) {
    return group->lean_word(kLeanEntries - 1).load(std::memory_order_acquire) != 0;
  }
  return group->plain_word(kPlainEntries - 1).load(std::memory_order_acquire) != 0;
}

}  // namespace embertide
