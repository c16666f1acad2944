// The part of row_kernels.h, which includes it, that finds keys: their hashes, what their groups
// have of them, and where that says their rows lie. Under the same rules.
#include <array>
#include <cstddef>
#include <cstring>
#include <utility>

#include "store/row_ops.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace embertide {
namespace {

template <typename T>
inline T Load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <typename T>
inline void Save(const T& value, void* to) {
  std::memcpy(to, &value, sizeof(value));
}

void Hashes(const uint64_t* keys, size_t n, uint64_t* hashes) {
  for (size_t i = 0; i < n; ++i) hashes[i] = HashKey(keys[i]);
}

void Turn(const uint64_t* hashes, size_t n, uint32_t bucket_bits, uint64_t* turned) {
  for (size_t i = 0; i < n; ++i) turned[i] = LeanShape::Turn(hashes[i], bucket_bits);
}

using Notes = uint64_t __attribute__((vector_size(4 * kWidth)));
constexpr size_t kNotes = sizeof(Notes) / sizeof(uint64_t);

// A bit of each lane, all of whose bits are alike.
inline uint64_t BitsOf(Notes lanes) {
#if defined(__AVX512F__)
  return _mm512_movepi64_mask(reinterpret_cast<__m512i>(lanes));
#elif defined(__AVX2__)
  return static_cast<uint64_t>(_mm256_movemask_pd(reinterpret_cast<__m256d>(lanes)));
#else
  uint64_t bits = 0;
  for (size_t k = 0; k < kNotes; ++k) bits |= (lanes[k] & 1U) << k;
  return bits;
#endif
}

// Bits of each lane's low half.
inline Notes CountBits(Notes bits) {
  bits -= (bits >> 1) & 0x5555;
  bits = (bits & 0x3333) + ((bits >> 2) & 0x3333);
  bits = (bits + (bits >> 4)) & 0x0f0f;
  return (bits + (bits >> 8)) & 0x1f;
}

// first[0], second[0], first[1], ...: the whole of it fills two vectors.
template <size_t... kLane>
inline void SavePairs(Notes first, Notes second, void* to, std::index_sequence<kLane...>) {
  Save(__builtin_shufflevector(first, second, (kLane / 2 + kLane % 2 * kNotes)...), to);
  Save(__builtin_shufflevector(first, second, ((kNotes + kLane) / 2 + kLane % 2 * kNotes)...),
       static_cast<std::byte*>(to) + sizeof(Notes));
}
inline void SavePairs(Notes first, Notes second, void* to) {
  SavePairs(first, second, to, std::make_index_sequence<kNotes>());
}

template <bool kOneChunk>
RowOps::Placed PlaceAll(const RowShape& shape, const uint64_t* words, const GroupRef* groups,
                        size_t n, FoundRow* found, Lines* lines) {
  static_assert(sizeof(FoundRow) == 2 * sizeof(uint64_t));
  static_assert(sizeof(Lines) == 2 * sizeof(uint64_t));
  static_assert(sizeof(GroupRef) == sizeof(uint64_t));
  constexpr uint64_t kIsRow =
      (uint64_t{static_cast<uint8_t>(Source::kDdr)} << 8 * offsetof(FoundRow, source) % 64) |
      (uint64_t{static_cast<uint8_t>(FoundKind::kRow)} << 8 * offsetof(FoundRow, kind) % 64);
  constexpr uint64_t kInLine = kLine - 1;
  RowOps::Placed placed = {0, 0};
  for (size_t i = 0; i < n; i += kNotes) {
    const auto word = Load<Notes>(words + i);
    const auto group = Load<Notes>(groups + i);
    const auto goes_on = word == Notes{} + kContinueProbe;
    const auto other = (word & Location::kKindMask) != Notes{} + Location::kDdrKind;
    placed.go_on |= BitsOf(reinterpret_cast<Notes>(goes_on)) << i;
    placed.other |= BitsOf(reinterpret_cast<Notes>(other)) << i;
    const Notes payload =
        shape.rows + (((word & shape.slot_mask) >> shape.slot_down) << shape.slot_up);
    const Notes live = (word >> shape.live_down) & shape.live_mask;
    SavePairs(payload, live | kIsRow, found + i);
    const Notes bytes =
        (kOneChunk ? Notes{} + 1 : CountBits(live)) * shape.chunk_bytes + shape.scale_bytes;
    const Notes to = goes_on ? (group & ~kInLine) + kLine : payload;
    const Notes count = goes_on ? Notes{} + 1 : ((to & kInLine) + bytes + kInLine) / kLine;
    SavePairs(to & ~kInLine, count, lines + i);
  }
  const uint64_t all = n == 64 ? ~0ULL : (1ULL << n) - 1;
  return {placed.go_on & all, placed.other & all};
}

RowOps::Placed Place(const RowShape& shape, const uint64_t* words, const GroupRef* groups, size_t n,
                     FoundRow* found, Lines* lines) {
  return shape.live_mask == 1 ? PlaceAll<true>(shape, words, groups, n, found, lines)
                              : PlaceAll<false>(shape, words, groups, n, found, lines);
}

#if defined(__AVX2__)
constexpr size_t kFoundAtOnce = 32;

// The fields that are read from keys' lean groups.
struct LeanNotes {
  alignas(64) std::array<uint64_t, kFoundAtOnce> words;
  alignas(64) std::array<uint64_t, kFoundAtOnce> its;    // two bits an entry of the same tag
  alignas(64) std::array<uint64_t, kFoundAtOnce> twice;  // the first of them, or the last entry
  alignas(64) std::array<uint64_t, kFoundAtOnce> more;
};

void Read(const GroupRef* groups, const uint64_t* wanted, size_t n, LeanNotes* notes) {
  for (size_t i = 0; i < n; ++i) {
    const IndexGroup& group = *groups[i];
    const __m128i tag = _mm_set1_epi16(static_cast<int16_t>(wanted[i]));
    const __m128i equal = _mm_cmpeq_epi16(LoadLanes<__m128i>(group.lanes.data()), tag);
    const auto its = static_cast<uint32_t>(_mm_movemask_epi8(equal));
    const auto twice = static_cast<uint32_t>(std::countr_zero(its | 0x400U));
    notes->its[i] = its;
    notes->twice[i] = twice;
    notes->words[i] = group.lean_word(twice / 2).load(std::memory_order_acquire);
    notes->more[i] = group.lanes[1].load(std::memory_order_acquire);
  }
}

// As FindLean, of kNotes keys from i on.
Notes Compare(const LeanNotes& notes, size_t i, Notes bits, Notes wanted) {
  constexpr Notes kNone = {};
  const auto word = Load<Notes>(&notes.words[i]);
  const auto twice = Load<Notes>(&notes.twice[i]);
  const auto more = Load<Notes>(&notes.more[i]);
  const Notes off = (word ^ (wanted >> LeanShape::kBesideBits << bits)) >> bits;
  const Notes others =
      ((more >> (32 + 2 * twice + (twice >> 1))) ^ (wanted >> LeanShape::kTagBits)) & 31;
  const auto any = (Load<Notes>(&notes.its[i]) & 0xfff) != kNone;
  const auto used = word != kNone;
  const auto tagged = (wanted & 0xffff) != kNone;
  const auto row = ((off | others | (word & 1)) == kNone) & used & any & tagged;
  const Notes place = ((word & ~(~kNone << bits)) >> 1) | Location::kDdrKind;
  const Notes no_row = any ? kNone + kAskIndex : used ? kNone + kContinueProbe : kNone;
  return row ? place : no_row;
}

// As FindLean, of at most kFoundAtOnce keys. Reads all before it compares any, for what was just
// noted cannot be loaded as a vector yet.
void FindAtOnce(const GroupRef* groups, const uint64_t* wanted, size_t n, uint64_t* found) {
  LeanNotes notes;
  Read(groups, wanted, n, &notes);
  const Notes bits = Notes{} + groups[0].slot_bits();
  size_t i = 0;
  for (; i + kNotes <= n; i += kNotes) {
    Save(Compare(notes, i, bits, Load<Notes>(wanted + i)), found + i);
  }
  if (i == n) return;
  Notes rest = {};
  for (size_t k = 0; k < n - i; ++k) rest[k] = wanted[i + k];
  const Notes compared = Compare(notes, i, bits, rest);
  for (size_t k = 0; k < n - i; ++k) found[i + k] = compared[k];
}

void Find(const GroupRef* groups, const uint64_t* wanted, size_t n, uint64_t* found) {
  if (n == 0) return;
  const uint32_t bits = groups[0].slot_bits();
  uint32_t other = 0;
  for (size_t i = 0; i < n; ++i) other |= groups[i].slot_bits() ^ bits;
  if (bits == 0 || other != 0 || n > kFoundAtOnce) {
    for (size_t i = 0; i < n; ++i) found[i] = FindIn(groups[i], wanted[i]);
  } else {
    FindAtOnce(groups, wanted, n, found);
  }
}
#else
void Find(const GroupRef* groups, const uint64_t* wanted, size_t n, uint64_t* found) {
  for (size_t i = 0; i < n; ++i) found[i] = FindIn(groups[i], wanted[i]);
}
#endif

void FindInPlain(const GroupRef* groups, const uint64_t* wanted, size_t n, uint64_t* found) {
  for (size_t i = 0; i < n; ++i) found[i] = FindPlain(*groups[i], wanted[i]);
}

}  // namespace
}  // namespace embertide
