// BucketIndex: see the header for the layout and the invariants.
#include "store/bucket_index.h"

#include <bit>
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

uint8_t TagOf(uint64_t hash) { return static_cast<uint8_t>(hash & 0x7f); }

// Bit i says that tags[i] == tag.
uint32_t Match(const std::atomic<uint8_t>* tags, uint8_t tag) {
#ifdef EMBERTIDE_SIMD_TAGS
  // A byte load is atomic whatever vector brings it; the scalar path below is what TSan sees.
  const __m128i group = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tags));
  const __m128i wanted = _mm_set1_epi8(static_cast<char>(tag));
  const int mask = _mm_movemask_epi8(_mm_cmpeq_epi8(group, wanted));
  std::atomic_signal_fence(std::memory_order_acquire);
  return static_cast<uint32_t>(mask);
#else
  uint32_t mask = 0;
  for (uint32_t i = 0; i < 16; ++i) {
    mask |= static_cast<uint32_t>(tags[i].load(std::memory_order_acquire) == tag) << i;
  }
  return mask;
#endif
}

}  // namespace

uint32_t BucketIndex::Probe(const Arrays& arrays, uint64_t hash, uint64_t key) {
  uint32_t group = static_cast<uint32_t>(hash >> 7) & (arrays.groups - 1);
  for (uint32_t step = 0; step < arrays.groups; ++step) {
    const std::atomic<uint8_t>* tags = &arrays.tags[group * 16];
    for (uint32_t hits = Match(tags, TagOf(hash)); hits != 0; hits &= hits - 1) {
      const uint32_t entry = group * 16 + static_cast<uint32_t>(std::countr_zero(hits));
      if (arrays.entries[entry].key.load(std::memory_order_acquire) == key) return entry;
    }
    if (Match(tags, kEmpty) != 0) return kNotFound;
    group = (group + 1) & (arrays.groups - 1);
  }
  return kNotFound;
}

void BucketIndex::Prefetch(uint64_t hash) const {
  const Arrays* arrays = arrays_.load(std::memory_order_acquire);
  if (arrays == nullptr) return;
  const uint32_t group = static_cast<uint32_t>(hash >> 7) & (arrays->groups - 1);
  __builtin_prefetch(&arrays->tags[group * 16]);
}

Location BucketIndex::Find(uint64_t hash, uint64_t key) const {
  const Arrays* arrays = arrays_.load(std::memory_order_acquire);
  if (arrays == nullptr) return {};
  const uint32_t entry = Probe(*arrays, hash, key);
  if (entry == kNotFound) return {};
  const uint64_t word = arrays->entries[entry].word.load(std::memory_order_acquire);
  if (arrays->entries[entry].key.load(std::memory_order_acquire) != key) return {};
  const uint8_t count = arrays->counts[entry].load(std::memory_order_relaxed);
  if (count < 255) arrays->counts[entry].store(count + 1, std::memory_order_relaxed);
  return Location::FromWord(word);
}

uint32_t BucketIndex::AccessCount(uint64_t hash, uint64_t key) const {
  const Arrays* arrays = arrays_.load(std::memory_order_acquire);
  const uint32_t entry = arrays == nullptr ? kNotFound : Probe(*arrays, hash, key);
  return entry == kNotFound ? 0 : arrays->counts[entry].load(std::memory_order_relaxed);
}

uint32_t BucketIndex::Locate(uint64_t hash, uint64_t key) const {
  const Arrays* arrays = arrays_.load();
  return arrays == nullptr ? kNotFound : Probe(*arrays, hash, key);
}

void BucketIndex::Place(Arrays* arrays, uint64_t hash, uint64_t key, uint64_t word, uint8_t count) {
  uint32_t group = static_cast<uint32_t>(hash >> 7) & (arrays->groups - 1);
  while (true) {
    const std::atomic<uint8_t>* tags = &arrays->tags[group * 16];
    const uint32_t room = Match(tags, kEmpty) | Match(tags, kDeleted);
    if (room != 0) {
      const uint32_t entry = group * 16 + static_cast<uint32_t>(std::countr_zero(room));
      if (arrays->tags[entry].load() == kDeleted) --arrays->deleted;
      arrays->entries[entry].key.store(key, std::memory_order_release);
      arrays->entries[entry].word.store(word, std::memory_order_release);
      arrays->counts[entry].store(count, std::memory_order_relaxed);
      arrays->tags[entry].store(TagOf(hash), std::memory_order_release);
      ++arrays->used;
      return;
    }
    group = (group + 1) & (arrays->groups - 1);
  }
}

Status BucketIndex::Insert(uint64_t hash, uint64_t key, Location location, ByteBudget* budget,
                           const std::function<void(Arrays*)>& retire) {
  Arrays* old = arrays_.load();
  if (old == nullptr || (old->used + old->deleted + 1) * 8 > old->groups * 16 * 7) {
    // Full of deleted entries: the same size again; else twice the size.
    const uint32_t groups = old == nullptr                           ? 1
                            : (old->used + 1) * 2 > old->groups * 16 ? old->groups * 2
                                                                     : old->groups;
    if (!budget->TryCharge(BytesFor(groups))) {
      return {Code::kResourceExhausted,
              "an index of " + std::to_string(BytesFor(groups)) + " bytes does not fit the budget"};
    }
    auto grown = std::make_unique<Arrays>();
    grown->groups = groups;
    grown->tags.reset(new std::atomic<uint8_t>[size_t{groups} * 16]);
    grown->counts.reset(new std::atomic<uint8_t>[size_t{groups} * 16]());
    grown->entries.reset(new Arrays::Entry[size_t{groups} * 16]());
    for (uint32_t e = 0; e < groups * 16; ++e) grown->tags[e].store(kEmpty);
    for (uint32_t e = 0; old != nullptr && e < old->groups * 16; ++e) {
      if (old->tags[e].load() >= 0x80) continue;
      const uint64_t moved = old->entries[e].key.load();
      Place(grown.get(), HashKey(moved), moved, old->entries[e].word.load(), old->counts[e].load());
    }
    arrays_.store(grown.release(), std::memory_order_seq_cst);
    if (old != nullptr) retire(old);
  }
  Place(arrays_.load(), hash, key, location.word(), 1);
  return Status::Ok();
}

void BucketIndex::Erase(uint32_t entry) {
  Arrays* arrays = arrays_.load();
  arrays->entries[entry].word.store(Location().word(), std::memory_order_release);
  arrays->tags[entry].store(kDeleted, std::memory_order_release);
  --arrays->used;
  ++arrays->deleted;
}

uint8_t BucketIndex::Age(uint32_t entry) {
  std::atomic<uint8_t>& count = arrays_.load()->counts[entry];
  const uint8_t before = count.load(std::memory_order_relaxed);
  count.store(before / 2, std::memory_order_relaxed);
  return before;
}

uint32_t BucketIndex::capacity() const {
  const Arrays* arrays = arrays_.load();
  return arrays == nullptr ? 0 : arrays->groups * 16;
}

uint32_t BucketIndex::size() const {
  const Arrays* arrays = arrays_.load();
  return arrays == nullptr ? 0 : arrays->used;
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
  for (uint32_t e = 0; e < arrays->groups * 16; ++e) {
    deleted += static_cast<uint32_t>(arrays->tags[e].load() == kDeleted);
    if (arrays->tags[e].load() >= 0x80) continue;
    ++used;
    const uint64_t key = arrays->entries[e].key.load();
    if (Probe(*arrays, hash(key), key) != e) {
      return {Code::kCorrupt, "key " + std::to_string(key) + " is not found where it stands"};
    }
  }
  if (used != arrays->used || deleted != arrays->deleted ||
      (used + deleted) * 8 > arrays->groups * 16 * 7 + 8) {
    return {Code::kCorrupt, "the entries of an index do not add up"};
  }
  return Status::Ok();
}

}  // namespace embertide
