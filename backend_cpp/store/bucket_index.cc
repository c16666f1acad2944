// BucketIndex: see the header for the layout and the invariants.
#include "store/bucket_index.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "embertide/hash.h"

#if defined(__SANITIZE_ADDRESS__)
#define EMBERTIDE_LEAK_CHECK 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMBERTIDE_LEAK_CHECK 1
#endif
#endif
#ifdef EMBERTIDE_LEAK_CHECK
#include <sanitizer/lsan_interface.h>
#endif

namespace embertide {

namespace {

// Smaller arrays are one piece of the ordinary heap, with the list of their pages before it. What
// the heap keeps of those that a bucket grew out of is as much again, which nobody counts.
constexpr uint32_t kMinPagedBytes = 32 << 10;
static_assert(kMinPagedBytes == BucketIndex::kPageBytes / BucketIndex::kPagesPerBudgetPage);
constexpr uint32_t kMinPagedGroups = kMinPagedBytes / sizeof(IndexGroup);
// From here on they are whole pages, which is fine enough a step; below, the last page is used in
// part.
constexpr uint32_t kMinWholePages = 5;
constexpr uint32_t kMinWholeGroups = kMinWholePages * BucketIndex::kPageGroups;
constexpr uint64_t kSystemPageBytes = 4096;
// Bytes of the heap for a piece, beside the piece: its header, and what alignment leaves unused.
constexpr uint64_t kHeapBytes = 64;

// The number of entries of arrays of one kind that may be in use.
uint64_t MostTaken(uint64_t groups, bool lean) {
  return lean ? groups * kLeanEntries * 17 / 20 : groups * kPlainEntries * 3 / 4;
}

Status NoMemory(uint64_t bytes) {
  return {Code::kResourceExhausted, "the system has no memory for an index of " +
                                        std::to_string(bytes) +
                                        " bytes, which its budget would allow"};
}

uint32_t PagesOf(uint32_t groups) {
  return (groups + BucketIndex::kPageGroups - 1) / BucketIndex::kPageGroups;
}

}  // namespace

BucketIndex::Arrays BucketIndex::Allocate(uint32_t size, bool lean, PagePool* pool) const {
  const uint32_t groups = kGroupCounts[size];
  const uint32_t pages = PagesOf(groups);
  const bool paged = groups >= kMinPagedGroups;
  const uint64_t head = HeadBytes(groups);
  void* memory = std::aligned_alloc(alignof(IndexGroup),
                                    head + (paged ? 0 : uint64_t{groups} * sizeof(IndexGroup)));
  if (memory == nullptr) return {};
#ifdef EMBERTIDE_LEAK_CHECK
  // Beside the size in one word, the address of a list is none to the leak checker.
  __lsan_ignore_object(memory);
#endif
  Growth* growth = new (memory) Growth;
  auto** list = reinterpret_cast<IndexGroup**>(growth + 1);
  std::byte* behind = static_cast<std::byte*>(memory) + head;
  if (!paged) std::memset(behind, 0, uint64_t{groups} * sizeof(IndexGroup));
  for (uint32_t p = 0; p < pages; ++p) {
    const bool whole = uint64_t{p + 1} * kPageGroups <= groups;
    std::byte* page = paged ? pool->Take(whole) : behind + uint64_t{p} * kPageBytes;
    if (page == nullptr) {
      // Those taken so far go as arrays of as many pages do.
      if (p > 0) {
        Free(pool, {list, p * kPageGroups, 0});
      } else {
        std::free(memory);
      }
      return {};
    }
    list[p] = reinterpret_cast<IndexGroup*>(page);
  }
  return {list, groups, lean ? lean_.slot_bits : 0U};
}

constinit const std::array<uint32_t, BucketIndex::kSizes> BucketIndex::kGroupCounts =
    []() noexcept {
      std::array<uint32_t, kSizes> counts{};
      uint64_t count = 1;
      for (uint32_t& each : counts) {
        each = static_cast<uint32_t>(count);
        // A fifth that is no whole number is rounded down: less waste, a few more steps.
        const uint64_t unit = count < kMinWholeGroups ? 1 : kPageGroups;
        const uint64_t fifth = count / 5 / unit * unit;
        count += fifth == 0 ? unit : fifth;
        if (unit == 1 && count >= kMinWholeGroups) count = kMinWholeGroups;
      }
      return counts;
    }();

uint64_t BucketIndex::HeadBytes(uint32_t group_count) {
  const uint64_t bytes = sizeof(Growth) + uint64_t{PagesOf(group_count)} * sizeof(IndexGroup*);
  return (bytes + alignof(IndexGroup) - 1) / alignof(IndexGroup) * alignof(IndexGroup);
}

uint64_t BucketIndex::BytesFor(uint32_t group_count) {
  uint64_t groups = uint64_t{group_count} * sizeof(IndexGroup);
  // The system counts whole pages of what is written to.
  if (group_count >= kMinPagedGroups) {
    groups = (groups + kSystemPageBytes - 1) / kSystemPageBytes * kSystemPageBytes;
  }
  return HeadBytes(group_count) + groups + kHeapBytes;
}

void BucketIndex::Free(PagePool* pool, const Arrays& arrays) {
  if (arrays.pages == nullptr) return;
  if (arrays.group_count >= kMinPagedGroups) {
    const uint32_t pages = PagesOf(arrays.group_count);
    for (uint32_t first = 0, p = 1; p <= pages; ++p) {
      if (p < pages && arrays.pages[p] == arrays.pages[p - 1] + kPageGroups) continue;
      pool->Give(reinterpret_cast<std::byte*>(arrays.pages[first]), p - first);
      first = p;
    }
  }
  std::free(GrowthOf(arrays));
}

void BucketIndex::Clear(PagePool* pool) {
  Free(pool, Growing());
  Free(pool, arrays());
  packed_ = 0;
}

constinit IndexGroup BucketIndex::empty_group_{};

// --- any thread ----------------------------------------------------------------------------------

BucketIndex::Cursor BucketIndex::BeginRare(uint64_t packed, uint64_t hash) {
  const Arrays to = Unpack(packed);
  if (to.pages == nullptr) return {to, 0, EmptyGroup()};
  const Growth& growth = *GrowthOf(to);
  const uint32_t home = HomeOf(hash, growth.from.group_count);
  const bool moved = home < growth.moved.load(std::memory_order_acquire);
  return CursorAt(moved ? to : growth.from, hash);
}

void BucketIndex::Count(GroupRef group, uint64_t key) {
  if (group.lean()) return;
  for (uint32_t i = 0; i < kPlainEntries; ++i) {
    if (group->key(i).load(std::memory_order_acquire) != key) continue;
    uint64_t word = group->plain_word(i).load(std::memory_order_relaxed);
    if (!IsLive(word, /*lean=*/false) || CountOf(word) == kMaxAccessCount) continue;
    // If the writer set the word meanwhile, its value stays.
    group->plain_word(i).compare_exchange_strong(word, word + (1ULL << kCountShift),
                                                 std::memory_order_relaxed);
  }
}

uint32_t BucketIndex::LaneOf(const Cursor& at, uint64_t hash, uint64_t key) const {
  const uint32_t lanes = at.arrays.lanes();
  if (!at.arrays.lean()) {
    for (uint32_t i = 0; i < lanes; ++i) {
      if (at.group->key(i).load(std::memory_order_acquire) == key &&
          IsLive(at.group->plain_word(i).load(std::memory_order_acquire), /*lean=*/false)) {
        return i;
      }
    }
    return kNotFound;
  }
  const uint64_t turned = lean_.Turned(hash);
  const uint64_t beside = turned & ((1U << LeanShape::kBesideBits) - 1);
  for (uint32_t i = 0; i < lanes; ++i) {
    if (LeanShape::BesideOf(*at.group, i) != beside) continue;
    const uint64_t word = at.group->lean_word(i).load(std::memory_order_acquire);
    if (!LeanShape::IsLive(word)) continue;
    const bool its = LeanShape::IsChain(word)
                         ? LeanShape::ChainOf(word)->key == key
                         : (word ^ lean_.RestOf(turned)) >> lean_.slot_bits == 0;
    // Bits of zeros may have been those of an entry that was still to be written.
    if (its && LeanShape::BesideOf(*at.group, i) == beside) return i;
  }
  return kNotFound;
}

BucketIndex::Spot BucketIndex::Probe(uint64_t hash, uint64_t key) const {
  Cursor at = Begin(hash);
  if (at.arrays.pages == nullptr) return {at, kNotFound};
  for (uint32_t window = WindowOf(at.arrays);; at.Advance()) {
    const uint32_t lane = LaneOf(at, hash, key);
    if (lane != kNotFound || !GoesOn(at.group) || --window == 0) return {at, lane};
  }
}

Location BucketIndex::FindPlainFrom(Cursor at, uint64_t key, GroupRef* group) {
  uint64_t word = FindPlain(*at.group, key);
  while (word == kContinueProbe) {
    at.Advance();
    word = FindPlain(*at.group, key);
  }
  *group = at.group;
  return word == 0 ? Location() : LocationOf(word);
}

Location BucketIndex::FindLeanFrom(Cursor at, uint64_t hash, uint64_t key, GroupRef* group) const {
  const uint64_t turned = lean_.Turned(hash);
  uint64_t found = FindLean(*at.group, at.group.slot_bits(), turned);
  // No window is smaller, but that of arrays with fewer groups, which are not all full.
  for (uint32_t least = LeanShape::kMinWindow; found == kContinueProbe && least > 0; --least) {
    at.Advance();
    found = FindLean(*at.group, at.group.slot_bits(), turned);
  }
  *group = at.group;
  if (found == 0) return {};
  if (found != kAskIndex && found != kContinueProbe) return lean_.RowOf(found);
  // A tag alone may be another key's.
  const Spot spot = Probe(hash, key);
  *group = spot.at.group;
  if (spot.lane == kNotFound) return {};
  const uint64_t word = Word(spot).load(std::memory_order_acquire);
  // Or it is gone by now.
  return IsLive(word, spot.at.arrays.lean()) ? SaidBy(word, spot.at.arrays) : Location();
}

uint32_t BucketIndex::AccessCount(uint64_t hash, uint64_t key) const {
  const Spot spot = Probe(hash, key);
  if (spot.lane == kNotFound || spot.at.arrays.lean()) return 0;
  return CountOf(Word(spot).load(std::memory_order_relaxed));
}

bool BucketIndex::Read(const Cursor& at, uint32_t lane, Entry* entry) const {
  const uint64_t word = Word({at, lane}).load(std::memory_order_acquire);
  if (!IsLive(word, at.arrays.lean())) return false;
  if (!at.arrays.lean()) {
    const uint64_t key = at.group->key(lane).load(std::memory_order_acquire);
    *entry = {HashKey(key), LocationOf(word), word & kCountBits};
    return true;
  }
  entry->location = SaidBy(word, at.arrays);
  entry->count = 0;
  entry->hash = LeanShape::IsChain(word)
                    ? HashKey(LeanShape::ChainOf(word)->key)
                    : lean_.HashOf(lean_.TurnedOf(LeanShape::BesideOf(*at.group, lane), word),
                                   at.number, at.arrays.group_count);
  return true;
}

// --- the writer ----------------------------------------------------------------------------------

BucketIndex::Spot BucketIndex::SpotOf(uint32_t entry) const {
  Arrays all = arrays();
  if (entry >= all.entries()) {
    entry -= all.entries();
    all = Growing();
  }
  // By numbers that the compiler knows: nothing is divided.
  const uint32_t number = all.lean() ? entry / kLeanEntries : entry / kPlainEntries;
  return {{all, number, all.group(number)}, entry - number * all.lanes()};
}

uint32_t BucketIndex::Locate(uint64_t hash, uint64_t key) const {
  const Spot spot = Probe(hash, key);
  if (spot.lane == kNotFound) return kNotFound;
  const Arrays now = arrays();
  const uint32_t before = spot.at.arrays.pages == now.pages ? 0 : now.entries();
  return before + spot.at.number * spot.at.arrays.lanes() + spot.lane;
}

Location BucketIndex::At(uint32_t entry) const {
  const Spot spot = SpotOf(entry);
  return SaidBy(Word(spot).load(std::memory_order_relaxed), spot.at.arrays);
}

uint64_t BucketIndex::KeyAt(uint32_t entry) const {
  const Spot spot = SpotOf(entry);
  if (!spot.at.arrays.lean()) return spot.at.group->key(spot.lane).load(std::memory_order_relaxed);
  Entry read;
  EMBERTIDE_CHECK(Read(spot.at, spot.lane, &read));
  return read.key();
}

void BucketIndex::Set(uint32_t entry, Location location) {
  const Spot spot = SpotOf(entry);
  std::atomic<uint64_t>& word = Word(spot);
  if (!spot.at.arrays.lean()) {
    const uint64_t count = word.load(std::memory_order_relaxed) & kCountBits;
    word.store(location.word() | count, std::memory_order_release);
    return;
  }
  // The word of a chain holds no bits of the hash; Read takes the hash from the chain's nodes.
  Entry before;
  EMBERTIDE_CHECK(Read(spot.at, spot.lane, &before));
  word.store(lean_.WordOf(location, lean_.Turned(before.hash)), std::memory_order_release);
}

BucketIndex::Placed BucketIndex::Place(const Arrays& into, const Entry& entry) const {
  Cursor at = CursorAt(into, entry.hash);
  for (uint32_t window = WindowOf(into); window > 0; --window, at.Advance()) {
    for (uint32_t i = 0; i < into.lanes(); ++i) {
      std::atomic<uint64_t>& word = Word({at, i});
      const uint64_t before = word.load(std::memory_order_relaxed);
      if (!CanTake(before, into.lean())) continue;
      if (into.lean()) {
        const uint64_t turned = lean_.Turned(entry.hash);
        LeanShape::SetBeside(&*at.group, i, turned);
        word.store(lean_.WordOf(entry.location, turned), std::memory_order_release);
      } else {
        at.group->key(i).store(entry.key(), std::memory_order_release);
        word.store(entry.location.word() | entry.count, std::memory_order_release);
      }
      return before == 0 ? Placed::kWasEmpty : Placed::kWasDeleted;
    }
  }
  return Placed::kNowhere;
}

bool BucketIndex::Stands(uint64_t hash) const {
  Cursor at = Begin(hash);
  // Plain arrays are never full, and a key may stand anywhere in them.
  if (!at.arrays.lean()) return at.arrays.pages != nullptr;
  for (uint32_t window = WindowOf(at.arrays); window > 0; --window, at.Advance()) {
    for (uint32_t i = 0; i < at.arrays.lanes(); ++i) {
      if (CanTake(Word({at, i}).load(std::memory_order_relaxed), at.arrays.lean())) return true;
    }
  }
  return false;
}

bool BucketIndex::Holds(uint32_t size, uint64_t entries) const {
  const uint32_t groups = kGroupCounts[size];
  return entries <= MostTaken(groups, lean_.Window(groups) > 0);
}

bool BucketIndex::HasRoom(uint64_t hash) const {
  const Arrays now = arrays();
  return !growing() && used_.load() + 1 + deleted_ <= MostTaken(now.group_count, now.lean()) &&
         Stands(hash);
}

Status BucketIndex::Reserve(ByteBudget* budget, PagePool* pool, const Retire& retire,
                            uint64_t hash) {
  EMBERTIDE_RETURN_IF_ERROR(ReserveEntries(budget, pool, retire, 1));
  return Stands(hash) ? Status::Ok() : MakePlain(budget, pool, retire);
}

Status BucketIndex::ReserveEntries(ByteBudget* budget, PagePool* pool, const Retire& retire,
                                   uint32_t entries) {
  const Arrays now = arrays();
  const uint32_t wanted = used_.load() + entries;
  const auto fits = [&] { return wanted + deleted_ <= MostTaken(now.group_count, now.lean()); };
  if (growing()) {
    Step(kStepGroups, retire);
    if (growing() && !fits()) Step(~0U, retire);
    if (growing() && GrowthOf(now)->stuck) return MakePlain(budget, pool, retire);
    if (fits()) return Status::Ok();
  } else if (fits()) {
    return Status::Ok();
  }
  // Full of deleted entries: the same size again; else the next.
  uint32_t size = now.pages == nullptr ? 0 : SizeOf(packed_.load());
  // One at a time: arrays that have just grown shall not be full again soon.
  const uint32_t spare = entries == 1 ? wanted / 16 : 0;
  // Lean ones in place of plain ones are smaller.
  if (!now.lean() && lean_.Window(kGroupCounts[size]) > 0) size = 0;
  while (!Holds(size, wanted + spare)) ++size;
  const uint64_t bytes = BytesFor(kGroupCounts[size]);
  if (!budget->TryCharge(bytes)) {
    return {Code::kResourceExhausted,
            "an index of " + std::to_string(bytes) + " bytes does not fit the budget"};
  }
  if (!GrowInto(size, pool)) {
    budget->Release(bytes);
    return NoMemory(bytes);
  }
  if (now.pages == nullptr) return Status::Ok();
  Step(kStepGroups, retire);
  return growing() && GrowthOf(arrays())->stuck ? MakePlain(budget, pool, retire) : Status::Ok();
}

bool BucketIndex::GrowInto(uint32_t size, PagePool* pool) {
  const Arrays now = arrays();
  const Arrays to = Allocate(size, lean_.Window(kGroupCounts[size]) > 0, pool);
  if (to.pages == nullptr) return false;
  const uint64_t packed = Packed(to, size);
  deleted_ = 0;
  GrowthOf(to)->from = now;
  packed_.store(now.pages == nullptr ? packed : packed | kGrowing, std::memory_order_seq_cst);
  return true;
}

void BucketIndex::Shrink(ByteBudget* budget, PagePool* pool, const Retire& retire) {
  if (arrays().pages == nullptr) return;
  if (growing()) Step(~0U, retire);
  if (growing()) return;
  const uint32_t wanted = used_.load() + used_.load() / 16;
  uint32_t size = 0;
  while (!Holds(size, wanted)) ++size;
  if (kGroupCounts[size] * 4 > arrays().group_count * 3) return;
  if (!budget->TryCharge(BytesFor(kGroupCounts[size]))) return;
  if (!GrowInto(size, pool)) {
    budget->Release(BytesFor(kGroupCounts[size]));
    return;
  }
  Step(~0U, retire);
}

void BucketIndex::Step(uint32_t groups, const Retire& retire) {
  const uint64_t packed = packed_.load();
  const Arrays to = Unpack(packed);
  Growth& growth = *GrowthOf(to);
  const Arrays from = growth.from;
  if (growth.stuck) return;
  const uint32_t first = growth.moved.load();
  uint32_t end = first + std::min(groups, from.group_count - first);
  Cursor at{from, first, from.group(first)};
  for (uint32_t seen = 1;; ++seen, at.Advance()) {
    for (uint32_t i = 0; i < from.lanes(); ++i) {
      Entry entry;
      if (!Read(at, i, &entry)) continue;
      const uint32_t home = HomeOf(entry.hash, from.group_count);
      if (home < first || home >= end) continue;
      const Placed placed = Place(to, entry);
      if (placed == Placed::kWasDeleted) --deleted_;
      if (placed != Placed::kNowhere) continue;
      // Some keys of homes before `end` stand in `to` as strays until the arrays become plain.
      growth.stuck = true;
      end = home;
    }
    // Keys of the last home stand in the groups after it as long as these are full.
    if (first + seen >= end && !GoesOn(at.group)) break;
    if (seen == from.group_count) break;
  }
  growth.moved.store(end, std::memory_order_release);
  if (end < from.group_count) return;
  packed_.store(packed & ~kGrowing, std::memory_order_seq_cst);
  retire(from);
}
Status BucketIndex::MakePlain(ByteBudget* budget, PagePool* pool, const Retire& retire) {
  const Arrays now = arrays();
  const Arrays from = Growing();
  const uint32_t wanted = used_.load() + 1;
  uint32_t size = 0;
  while (wanted + wanted / 16 > MostTaken(kGroupCounts[size], /*lean=*/false)) ++size;
  const uint64_t bytes = BytesFor(kGroupCounts[size]);
  if (!budget->TryCharge(bytes)) {
    return {Code::kResourceExhausted, "an index of " + std::to_string(bytes) +
                                          " bytes for keys whose hashes are alike does not fit "
                                          "the budget"};
  }
  const Arrays to = Allocate(size, /*lean=*/false, pool);
  if (to.pages == nullptr) {
    budget->Release(bytes);
    return NoMemory(bytes);
  }
  for (const Arrays& each : {now, from}) {
    for (uint32_t number = 0; number < each.group_count; ++number) {
      const Cursor at{each, number, each.group(number)};
      for (uint32_t i = 0; i < each.lanes(); ++i) {
        Entry entry;
        if (Read(at, i, &entry) && !Stray(each, entry.hash)) Place(to, entry);
      }
    }
  }
  deleted_ = 0;
  packed_.store(Packed(to, size), std::memory_order_seq_cst);
  retire(now);
  if (from.pages != nullptr) retire(from);
  return Status::Ok();
}

void BucketIndex::Insert(uint64_t hash, Location location) {
  const Arrays into = Begin(hash).arrays;
  const Placed placed = Place(into, {hash, location, 1ULL << kCountShift});
  EMBERTIDE_CHECK(placed != Placed::kNowhere);
  if (placed == Placed::kWasDeleted && into.pages == arrays().pages) --deleted_;
  used_.store(used_.load() + 1, std::memory_order_relaxed);
}

void BucketIndex::Erase(uint32_t entry) {
  const Spot spot = SpotOf(entry);
  Word(spot).store(spot.at.arrays.lean() ? LeanShape::kDeleted : kIndexDeleted,
                   std::memory_order_release);
  used_.store(used_.load() - 1, std::memory_order_relaxed);
  if (entry < arrays().entries()) ++deleted_;
}

uint8_t BucketIndex::Age(uint32_t entry) {
  const Spot spot = SpotOf(entry);
  if (spot.at.arrays.lean()) return 0;
  std::atomic<uint64_t>& at = Word(spot);
  uint64_t word = at.load(std::memory_order_relaxed);
  const uint32_t before = CountOf(word);
  at.store((word & ~kCountBits) | (uint64_t{before / 2} << kCountShift), std::memory_order_release);
  return static_cast<uint8_t>(before);
}

Status BucketIndex::CheckIntegrity() const {
  const Arrays now = arrays();
  uint64_t used = 0;
  uint64_t deleted = 0;
  for (uint32_t e = 0; e < now.entries(); ++e) {
    const uint64_t word = Word(SpotOf(e)).load();
    if (word != 0 && !IsLive(word, now.lean())) ++deleted;
  }
  const uint32_t misplaced = Walk(0, capacity(), [&](uint32_t e, Location /*place*/) {
    ++used;
    const uint64_t key = KeyAt(e);
    return Locate(HashKey(key), key) == e;
  });
  if (misplaced < capacity()) {
    return {Code::kCorrupt,
            "key " + std::to_string(KeyAt(misplaced)) + " is not found where it stands"};
  }
  if (used != used_ || deleted != deleted_ ||
      used + deleted > MostTaken(now.group_count, now.lean())) {
    return {Code::kCorrupt, "the entries of an index do not add up"};
  }
  return Status::Ok();
}

}  // namespace embertide
