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
constexpr uint32_t kLeastPagedBytes = 32 << 10;
static_assert(kLeastPagedBytes == BucketIndex::kPageBytes / BucketIndex::kPagesPerBudgetPage);
constexpr uint32_t kLeastPagedGroups = kLeastPagedBytes / sizeof(BucketIndex::Group);
// From here on they are whole pages, which is fine enough a step; below, the last page is used in
// part.
constexpr uint32_t kLeastWholePages = 5;
constexpr uint32_t kLeastWholeGroups = kLeastWholePages * BucketIndex::kPageGroups;
constexpr uint64_t kSystemPageBytes = 4096;
// What the heap takes for a piece, beside it: its header, and what aligning leaves.
constexpr uint64_t kHeapBytes = 64;

// Three quarters in use.
bool Fits(uint64_t taken, uint64_t groups) {
  return taken * 4 <= groups * BucketIndex::kGroupEntries * 3;
}

uint32_t PagesOf(uint32_t groups) {
  return (groups + BucketIndex::kPageGroups - 1) / BucketIndex::kPageGroups;
}

}  // namespace

BucketIndex::Arrays BucketIndex::Allocate(uint32_t groups, PagePool* pool) {
  const uint32_t pages = PagesOf(groups);
  const bool paged = groups >= kLeastPagedGroups;
  const uint64_t head = HeadBytes(groups);
  void* memory =
      std::aligned_alloc(alignof(Group), head + (paged ? 0 : uint64_t{groups} * sizeof(Group)));
  if (memory == nullptr) throw std::bad_alloc();
#ifdef EMBERTIDE_LEAK_CHECK
  // Beside the size in one word, the address of a list is none to the leak checker.
  __lsan_ignore_object(memory);
#endif
  Growth* growth = new (memory) Growth;
  auto** list = reinterpret_cast<Group**>(growth + 1);
  std::byte* behind = static_cast<std::byte*>(memory) + head;
  if (!paged) std::memset(behind, 0, uint64_t{groups} * sizeof(Group));
  for (uint32_t p = 0; p < pages; ++p) {
    const bool whole = uint64_t{p + 1} * kPageGroups <= groups;
    std::byte* page = paged ? pool->Take(whole) : behind + uint64_t{p} * kPageBytes;
    if (page == nullptr) throw std::bad_alloc();
    list[p] = reinterpret_cast<Group*>(page);
  }
  return {list, groups};
}

constinit const std::array<uint32_t, BucketIndex::kSizes> BucketIndex::kGroupCounts =
    []() noexcept {
      std::array<uint32_t, kSizes> counts{};
      uint64_t count = 1;
      for (uint32_t& each : counts) {
        each = static_cast<uint32_t>(count);
        // A fifth that is no whole number is rounded down: less waste, a few more steps.
        const uint64_t unit = count < kLeastWholeGroups ? 1 : kPageGroups;
        const uint64_t fifth = count / 5 / unit * unit;
        count += fifth == 0 ? unit : fifth;
        if (unit == 1 && count >= kLeastWholeGroups) count = kLeastWholeGroups;
      }
      return counts;
    }();

uint64_t BucketIndex::HeadBytes(uint32_t group_count) {
  const uint64_t bytes = sizeof(Growth) + uint64_t{PagesOf(group_count)} * sizeof(Group*);
  return (bytes + alignof(Group) - 1) / alignof(Group) * alignof(Group);
}

uint64_t BucketIndex::BytesFor(uint32_t group_count) {
  uint64_t groups = uint64_t{group_count} * sizeof(Group);
  // What is written to, as the system counts.
  if (group_count >= kLeastPagedGroups) {
    groups = (groups + kSystemPageBytes - 1) / kSystemPageBytes * kSystemPageBytes;
  }
  return HeadBytes(group_count) + groups + kHeapBytes;
}

void BucketIndex::Free(PagePool* pool, const Arrays& arrays) {
  if (arrays.pages == nullptr) return;
  if (arrays.group_count >= kLeastPagedGroups) {
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

BucketIndex::Found BucketIndex::Probe(uint64_t hash, uint64_t key) const {
  for (Cursor at = Begin(hash);; at.Advance()) {
    for (uint32_t i = 0; i < kGroupEntries; ++i) {
      if (at.group->keys[i].load(std::memory_order_acquire) == key &&
          IsLive(at.group->words[i].load(std::memory_order_acquire))) {
        const bool in_from = at.arrays.pages != arrays().pages;
        return {at.group, at.number + (in_from ? arrays().group_count : 0), i};
      }
    }
    if (!GoesOn(*at.group)) break;
  }
  return {};
}

constinit BucketIndex::Group BucketIndex::empty_group_{};

BucketIndex::Cursor BucketIndex::BeginRare(uint64_t packed, uint64_t hash) {
  const Arrays to = Unpack(packed);
  if (to.pages == nullptr) return {to, 0, EmptyGroup()};
  const Growth& growth = *GrowthOf(to);
  const uint32_t home = HomeOf(hash, growth.from.group_count);
  const bool moved = home < growth.moved.load(std::memory_order_acquire);
  return CursorAt(moved ? to : growth.from, hash);
}

void BucketIndex::Count(Group* group, uint64_t key) {
  for (uint32_t i = 0; i < kGroupEntries; ++i) {
    if (group->keys[i].load(std::memory_order_acquire) != key) continue;
    uint64_t word = group->words[i].load(std::memory_order_relaxed);
    if (!IsLive(word) || CountOf(word) == kMaxAccessCount) continue;
    // What the writer set meanwhile stays.
    group->words[i].compare_exchange_strong(word, word + (1ULL << kCountShift),
                                            std::memory_order_relaxed);
  }
}

uint64_t BucketIndex::Find(uint64_t hash, uint64_t key, Group** group) const {
  Cursor at = Begin(hash);
  uint64_t word = WordOrGoesOn(*at.group, key);
  while (word == kGoesOn) {
    at.Advance();
    word = WordOrGoesOn(*at.group, key);
  }
  *group = at.group;
  return word;
}

uint32_t BucketIndex::AccessCount(uint64_t hash, uint64_t key) const {
  const Found found = Probe(hash, key);
  if (found.group == nullptr) return 0;
  return CountOf(found.group->words[found.lane].load(std::memory_order_relaxed));
}

uint32_t BucketIndex::Locate(uint64_t hash, uint64_t key) const {
  const Found found = Probe(hash, key);
  return found.group == nullptr ? kNotFound : found.number * kGroupEntries + found.lane;
}

void BucketIndex::Set(uint32_t entry, Location location) {
  std::atomic<uint64_t>& word = Word(entry);
  const uint64_t count = word.load(std::memory_order_relaxed) & kCountBits;
  word.store(location.word() | count, std::memory_order_release);
}

bool BucketIndex::Occupied(uint32_t entry) const {
  if (!IsLive(Word(entry).load(std::memory_order_relaxed))) return false;
  const Arrays all = arrays();
  if (entry < all.group_count * kGroupEntries) return true;
  // What was moved lies there still.
  return HomeOf(HashKey(KeyAt(entry)), Growing().group_count) >= GrowthOf(all)->moved.load();
}

bool BucketIndex::Place(Cursor at, uint64_t key, uint64_t word) {
  for (;; at.Advance()) {
    for (uint32_t i = 0; i < kGroupEntries; ++i) {
      const uint64_t before = at.group->words[i].load(std::memory_order_relaxed);
      if (IsLive(before)) continue;
      at.group->keys[i].store(key, std::memory_order_release);
      at.group->words[i].store(word, std::memory_order_release);
      return before == kDeleted;
    }
  }
}

bool BucketIndex::HasRoom() const {
  return !growing() && Fits(used_.load() + 1 + deleted_, arrays().group_count);
}

Status BucketIndex::Reserve(ByteBudget* budget, PagePool* pool,
                            const std::function<void(const Arrays&)>& retire, uint32_t entries) {
  const Arrays now = arrays();
  const uint32_t wanted = used_.load() + entries;
  if (growing()) {
    Step(kStepGroups, retire);
    if (Fits(wanted + deleted_, now.group_count)) return Status::Ok();
    if (growing()) Step(~0U, retire);
  } else if (Fits(wanted + deleted_, now.group_count)) {
    return Status::Ok();
  }
  // Full of deleted entries: the same size again; else the next.
  uint32_t size = now.pages == nullptr ? 0 : SizeOf(packed_.load());
  // One at a time: arrays that have just grown shall not be full again soon.
  const uint32_t spare = entries == 1 ? wanted / 16 : 0;
  while (!Fits(wanted + spare, kGroupCounts[size])) ++size;
  const uint64_t bytes = BytesFor(kGroupCounts[size]);
  if (!budget->TryCharge(bytes)) {
    return {Code::kResourceExhausted,
            "an index of " + std::to_string(bytes) + " bytes does not fit the budget"};
  }
  GrowInto(size, pool);
  if (now.pages != nullptr) Step(kStepGroups, retire);
  return Status::Ok();
}

void BucketIndex::GrowInto(uint32_t size, PagePool* pool) {
  const Arrays now = arrays();
  const Arrays to = Allocate(kGroupCounts[size], pool);
  const uint64_t packed = (uint64_t{size} << kSizeShift) | reinterpret_cast<uintptr_t>(to.pages);
  deleted_ = 0;
  GrowthOf(to)->from = now;
  packed_.store(now.pages == nullptr ? packed : packed | kGrowing, std::memory_order_seq_cst);
}

void BucketIndex::Shrink(ByteBudget* budget, PagePool* pool,
                         const std::function<void(const Arrays&)>& retire) {
  if (arrays().pages == nullptr) return;
  if (growing()) Step(~0U, retire);
  const uint32_t wanted = used_.load() + used_.load() / 16;
  uint32_t size = 0;
  while (!Fits(wanted, kGroupCounts[size])) ++size;
  if (kGroupCounts[size] * 4 > arrays().group_count * 3) return;
  if (!budget->TryCharge(BytesFor(kGroupCounts[size]))) return;
  GrowInto(size, pool);
  Step(~0U, retire);
}

void BucketIndex::Step(uint32_t groups, const std::function<void(const Arrays&)>& retire) {
  const uint64_t packed = packed_.load();
  const Arrays to = Unpack(packed);
  Growth& growth = *GrowthOf(to);
  const Arrays from = growth.from;
  const uint32_t first = growth.moved.load();
  const uint32_t end = first + std::min(groups, from.group_count - first);
  Cursor at{from, first, from.group(first)};
  for (uint32_t seen = 1;; ++seen, at.Advance()) {
    for (uint32_t i = 0; i < kGroupEntries; ++i) {
      const uint64_t word = at.group->words[i].load();
      if (!IsLive(word)) continue;
      const uint64_t key = at.group->keys[i].load();
      const uint64_t hash = HashKey(key);
      const uint32_t home = HomeOf(hash, from.group_count);
      if (home >= first && home < end && Place(CursorAt(to, hash), key, word)) --deleted_;
    }
    // Keys of the last home stand in the groups after it as long as these are full.
    if (first + seen >= end && !GoesOn(*at.group)) break;
    if (seen == from.group_count) break;
  }
  growth.moved.store(end, std::memory_order_release);
  if (end < from.group_count) return;
  packed_.store(packed & ~kGrowing, std::memory_order_seq_cst);
  retire(from);
}

void BucketIndex::Insert(uint64_t hash, uint64_t key, Location location) {
  const Cursor at = Begin(hash);
  const bool deleted = Place(at, key, location.word() | (1ULL << kCountShift));
  if (deleted && at.arrays.pages == arrays().pages) --deleted_;
  used_.store(used_.load() + 1, std::memory_order_relaxed);
}

void BucketIndex::Erase(uint32_t entry) {
  Word(entry).store(kDeleted, std::memory_order_release);
  used_.store(used_.load() - 1, std::memory_order_relaxed);
  if (entry < arrays().group_count * kGroupEntries) ++deleted_;
}

uint8_t BucketIndex::Age(uint32_t entry) {
  std::atomic<uint64_t>& at = Word(entry);
  uint64_t word = at.load(std::memory_order_relaxed);
  const uint32_t before = CountOf(word);
  at.store((word & ~kCountBits) | (uint64_t{before / 2} << kCountShift), std::memory_order_release);
  return static_cast<uint8_t>(before);
}

Status BucketIndex::CheckIntegrity(uint64_t (*hash)(uint64_t)) const {
  uint64_t used = 0;
  uint64_t deleted = 0;
  const uint64_t entries = uint64_t{arrays().group_count} * kGroupEntries;
  for (uint32_t e = 0; e < capacity(); ++e) {
    if (e < entries && Word(e).load() == kDeleted) ++deleted;
    if (!Occupied(e)) continue;
    ++used;
    const uint64_t key = KeyAt(e);
    if (Locate(hash(key), key) != e) {
      return {Code::kCorrupt, "key " + std::to_string(key) + " is not found where it stands"};
    }
  }
  if (used != used_ || deleted != deleted_ || (used + deleted) * 4 > entries * 3) {
    return {Code::kCorrupt, "the entries of an index do not add up"};
  }
  return Status::Ok();
}

}  // namespace embertide
