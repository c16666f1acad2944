// BucketIndex: see the header for the layout and the invariants.
#include "store/bucket_index.h"

#include <sys/mman.h>

#include <bit>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>

#include "embertide/hash.h"

#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
#include <emmintrin.h>
#define EMBERTIDE_SIMD_TAGS 1
#endif

namespace embertide {
namespace {

constexpr uint8_t kEmpty = 0x80;
constexpr uint8_t kDeleted = 0xfe;
constexpr uint8_t kUnused = 0xff;
// A group's entries, 7/8 of them in use, times 8.
constexpr uint32_t kMaxLoad8 = BucketIndex::kGroupEntries * 7;
// Arrays of at least this size lie in pages of it, if the system has any: a lookup then seldom
// waits for a page table.
constexpr size_t kHugePageBytes = size_t{2} << 20;

uint8_t TagOf(uint64_t hash) { return static_cast<uint8_t>(hash & 0x7f); }

// Bit i says that tags[i] == tag.
uint32_t Match(const BucketIndex::Group& group, uint8_t tag) {
#ifdef EMBERTIDE_SIMD_TAGS
  // A byte load is atomic whatever vector brings it; the scalar path below is what TSan sees.
  const __m128i tags = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(group.tags.data()));
  const __m128i wanted = _mm_set1_epi8(static_cast<char>(tag));
  const int mask = _mm_movemask_epi8(_mm_cmpeq_epi8(tags, wanted)) & 0x7f;
  std::atomic_signal_fence(std::memory_order_acquire);
  return static_cast<uint32_t>(mask);
#else
  uint32_t mask = 0;
  for (uint32_t i = 0; i < BucketIndex::kGroupEntries; ++i) {
    mask |= static_cast<uint32_t>(group.tags[i].load(std::memory_order_acquire) == tag) << i;
  }
  return mask;
#endif
}

BucketIndex::Group* AllocateGroups(uint32_t count) {
  const size_t bytes = size_t{count} * sizeof(BucketIndex::Group);
  const bool huge = bytes >= kHugePageBytes;
  void* memory = std::aligned_alloc(huge ? kHugePageBytes : alignof(BucketIndex::Group), bytes);
  if (memory == nullptr) throw std::bad_alloc();
  // A system without huge pages says no, and serves with small ones.
  if (huge) madvise(memory, bytes, MADV_HUGEPAGE);
  auto* groups = static_cast<BucketIndex::Group*>(memory);
  std::uninitialized_default_construct_n(groups, count);
  return groups;
}

}  // namespace

BucketIndex::Group::Group() {
  for (std::atomic<uint8_t>& tag : tags) tag.store(kEmpty, std::memory_order_relaxed);
  tags[kGroupEntries].store(kUnused, std::memory_order_relaxed);
}

BucketIndex::Arrays::Arrays(uint32_t count) : group_count(count), groups(AllocateGroups(count)) {}

BucketIndex::Arrays::~Arrays() { std::free(groups); }

uint32_t BucketIndex::Probe(const Arrays& arrays, uint64_t hash, uint64_t key) {
  uint32_t group = FirstGroup(arrays, hash);
  for (uint32_t step = 0; step < arrays.group_count; ++step) {
    const Group& at = arrays.groups[group];
    for (uint32_t hits = Match(at, TagOf(hash)); hits != 0; hits &= hits - 1) {
      const auto i = static_cast<uint32_t>(std::countr_zero(hits));
      if (at.entries[i].key.load(std::memory_order_acquire) == key) return group * 8 + i;
    }
    if (Match(at, kEmpty) != 0) return kNotFound;
    group = (group + 1) & (arrays.group_count - 1);
  }
  return kNotFound;
}

Location BucketIndex::Find(const Start& start, uint64_t hash, uint64_t key) {
  if (start.arrays == nullptr) return {};
  const uint32_t at = Probe(*start.arrays, hash, key);
  if (at == kNotFound) return {};
  const Entry& entry = start.arrays->entry(at);
  const uint64_t word = entry.word.load(std::memory_order_acquire);
  if (entry.key.load(std::memory_order_acquire) != key) return {};
  std::atomic<uint8_t>& count = start.arrays->count(at);
  const uint8_t before = count.load(std::memory_order_relaxed);
  if (before < 255) count.store(before + 1, std::memory_order_relaxed);
  return Location::FromWord(word);
}

Location BucketIndex::Peek(uint64_t hash, uint64_t key) const {
  const Arrays* arrays = arrays_.load(std::memory_order_acquire);
  const uint32_t at = arrays == nullptr ? kNotFound : Probe(*arrays, hash, key);
  if (at == kNotFound) return {};
  const Entry& entry = arrays->entry(at);
  const uint64_t word = entry.word.load(std::memory_order_acquire);
  // As in Find: the entry may have been reused since it was met.
  return entry.key.load(std::memory_order_acquire) == key ? Location::FromWord(word) : Location();
}

uint32_t BucketIndex::AccessCount(uint64_t hash, uint64_t key) const {
  const Arrays* arrays = arrays_.load(std::memory_order_acquire);
  const uint32_t entry = arrays == nullptr ? kNotFound : Probe(*arrays, hash, key);
  return entry == kNotFound ? 0 : arrays->count(entry).load(std::memory_order_relaxed);
}

uint32_t BucketIndex::Locate(uint64_t hash, uint64_t key) const {
  const Arrays* arrays = arrays_.load();
  return arrays == nullptr ? kNotFound : Probe(*arrays, hash, key);
}

void BucketIndex::Place(Arrays* arrays, uint64_t hash, uint64_t key, uint64_t word, uint8_t count) {
  uint32_t group = FirstGroup(*arrays, hash);
  while (true) {
    Group& at = arrays->groups[group];
    const uint32_t room = Match(at, kEmpty) | Match(at, kDeleted);
    if (room != 0) {
      const auto i = static_cast<uint32_t>(std::countr_zero(room));
      if (at.tags[i].load() == kDeleted) --arrays->deleted;
      at.entries[i].key.store(key, std::memory_order_release);
      at.entries[i].word.store(word, std::memory_order_release);
      at.counts[i].store(count, std::memory_order_relaxed);
      at.tags[i].store(TagOf(hash), std::memory_order_release);
      arrays->used.store(arrays->used.load() + 1, std::memory_order_relaxed);
      return;
    }
    group = (group + 1) & (arrays->group_count - 1);
  }
}

Status BucketIndex::Reserve(ByteBudget* budget, const std::function<void(Arrays*)>& retire) {
  Arrays* old = arrays_.load();
  if (old == nullptr || (old->used + old->deleted + 1) * 8 > old->group_count * kMaxLoad8) {
    // Full of deleted entries: the same size again; else twice the size.
    const uint32_t count = old == nullptr ? 1
                           : (old->used + 1) * 2 > old->group_count * kGroupEntries
                               ? old->group_count * 2
                               : old->group_count;
    if (!budget->TryCharge(BytesFor(count))) {
      return {Code::kResourceExhausted,
              "an index of " + std::to_string(BytesFor(count)) + " bytes does not fit the budget"};
    }
    auto grown = std::make_unique<Arrays>(count);
    for (uint32_t e = 0; old != nullptr && e < old->group_count * 8; ++e) {
      if (old->tag(e).load() >= 0x80) continue;
      const uint64_t moved = old->entry(e).key.load();
      Place(grown.get(), HashKey(moved), moved, old->entry(e).word.load(), old->count(e).load());
    }
    arrays_.store(grown.release(), std::memory_order_seq_cst);
    if (old != nullptr) retire(old);
  }
  return Status::Ok();
}

void BucketIndex::Insert(uint64_t hash, uint64_t key, Location location) {
  Place(arrays_.load(), hash, key, location.word(), 1);
}

void BucketIndex::Erase(uint32_t entry) {
  Arrays* arrays = arrays_.load();
  arrays->entry(entry).word.store(Location().word(), std::memory_order_release);
  arrays->tag(entry).store(kDeleted, std::memory_order_release);
  arrays->used.store(arrays->used.load() - 1, std::memory_order_relaxed);
  ++arrays->deleted;
}

uint8_t BucketIndex::Age(uint32_t entry) {
  std::atomic<uint8_t>& count = arrays_.load()->count(entry);
  const uint8_t before = count.load(std::memory_order_relaxed);
  count.store(before / 2, std::memory_order_relaxed);
  return before;
}

uint32_t BucketIndex::capacity() const {
  const Arrays* arrays = arrays_.load();
  return arrays == nullptr ? 0 : arrays->group_count * 8;
}

uint32_t BucketIndex::size() const {
  const Arrays* arrays = arrays_.load();
  return arrays == nullptr ? 0 : arrays->used.load(std::memory_order_relaxed);
}

uint64_t BucketIndex::bytes() const {
  const Arrays* arrays = arrays_.load();
  return arrays == nullptr ? 0 : arrays->bytes();
}

Status BucketIndex::CheckIntegrity(uint64_t (*hash)(uint64_t)) const {
  const Arrays* arrays = arrays_.load();
  if (arrays == nullptr) return Status::Ok();
  uint32_t used = 0;
  uint32_t deleted = 0;
  for (uint32_t e = 0; e < arrays->group_count * 8; ++e) {
    deleted += static_cast<uint32_t>(arrays->tag(e).load() == kDeleted);
    if (arrays->tag(e).load() >= 0x80) continue;
    ++used;
    const uint64_t key = arrays->entry(e).key.load();
    if (Probe(*arrays, hash(key), key) != e) {
      return {Code::kCorrupt, "key " + std::to_string(key) + " is not found where it stands"};
    }
  }
  if (used != arrays->used || deleted != arrays->deleted ||
      (used + deleted) * 8 > arrays->group_count * kMaxLoad8 + 8) {
    return {Code::kCorrupt, "the entries of an index do not add up"};
  }
  return Status::Ok();
}

}  // namespace embertide
