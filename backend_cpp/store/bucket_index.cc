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

// Smaller arrays are one piece of the ordinary heap.
constexpr uint32_t kLeastPages = 5;
constexpr uint32_t kLeastPagedGroups = kLeastPages * BucketIndex::kPageGroups;

uint32_t PagesOf(uint32_t groups) {
  return (groups + BucketIndex::kPageGroups - 1) / BucketIndex::kPageGroups;
}

BucketIndex::Arrays Allocate(uint32_t groups) {
  const uint32_t pages = PagesOf(groups);
  auto list = std::make_unique<BucketIndex::Group*[]>(pages);
  if (groups < kLeastPagedGroups) {
    const size_t bytes = size_t{groups} * sizeof(BucketIndex::Group);
    void* memory = std::aligned_alloc(alignof(BucketIndex::Group), bytes);
    if (memory == nullptr) throw std::bad_alloc();
    std::memset(memory, 0, bytes);
    for (uint32_t p = 0; p < pages; ++p) {
      list[p] = static_cast<BucketIndex::Group*>(memory) + size_t{p} * BucketIndex::kPageGroups;
    }
  } else {
    for (uint32_t p = 0; p < pages; ++p) {
      list[p] = reinterpret_cast<BucketIndex::Group*>(TakePoolPage());
    }
  }
#ifdef EMBERTIDE_LEAK_CHECK
  // Beside the size in one word, the address of a list is none to the leak checker.
  __lsan_ignore_object(list.get());
#endif
  return {list.release(), groups};
}

}  // namespace

constinit const std::array<uint32_t, BucketIndex::kSizes> BucketIndex::kGroupCounts =
    []() noexcept {
      std::array<uint32_t, kSizes> counts{};
      uint64_t count = 1;
      for (uint32_t& each : counts) {
        each = static_cast<uint32_t>(count);
        // A fifth that is no whole number is rounded down: less waste, a few more steps.
        const uint64_t unit = count < kLeastPagedGroups ? 1 : kPageGroups;
        const uint64_t fifth = count / 5 / unit * unit;
        count += fifth == 0 ? unit : fifth;
        if (unit == 1 && count >= kLeastPagedGroups) count = kLeastPagedGroups;
      }
      return counts;
    }();

uint64_t BucketIndex::Arrays::bytes() const {
  return uint64_t{group_count} * sizeof(Group) + uint64_t{PagesOf(group_count)} * sizeof(Group*);
}

void BucketIndex::Free(const Arrays& arrays) {
  if (arrays.pages == nullptr) return;
  if (arrays.group_count < kLeastPagedGroups) {
    std::free(arrays.pages[0]);
  } else {
    for (uint32_t p = 0; p < PagesOf(arrays.group_count); ++p) {
      GivePoolPage(reinterpret_cast<std::byte*>(arrays.pages[p]));
    }
  }
  delete[] arrays.pages;
}

BucketIndex::Found BucketIndex::Probe(uint64_t hash, uint64_t key) const {
  for (Cursor at = Begin(hash);; at.Advance()) {
    for (uint32_t i = 0; i < kGroupEntries; ++i) {
      if (at.group->keys[i].load(std::memory_order_acquire) == key &&
          IsLive(at.group->words[i].load(std::memory_order_acquire))) {
        return {at.group, at.number, i};
      }
    }
    if (!GoesOn(*at.group)) break;
  }
  return {};
}

constinit BucketIndex::Group BucketIndex::empty_group_{};

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

Location BucketIndex::Peek(uint64_t hash, uint64_t key) const {
  for (Cursor at = Begin(hash);; at.Advance()) {
    if (const uint64_t word = WordIn(*at.group, key); word != 0) return LocationOf(word);
    if (!GoesOn(*at.group)) break;
  }
  return {};
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

bool BucketIndex::Place(const Arrays& arrays, uint64_t hash, uint64_t key, uint64_t word) {
  for (Cursor at = CursorAt(arrays, hash);; at.Advance()) {
    for (uint32_t i = 0; i < kGroupEntries; ++i) {
      const uint64_t before = at.group->words[i].load(std::memory_order_relaxed);
      if (IsLive(before)) continue;
      at.group->keys[i].store(key, std::memory_order_release);
      at.group->words[i].store(word, std::memory_order_release);
      return before == kDeleted;
    }
  }
}

Status BucketIndex::Reserve(ByteBudget* budget, const std::function<void(const Arrays&)>& retire,
                            uint32_t entries) {
  const Arrays old = arrays();
  const auto fits = [](uint64_t taken, uint64_t groups) {
    return taken * 4 <= groups * kGroupEntries * 3;
  };
  const uint32_t wanted = used_.load() + entries;
  if (fits(wanted + deleted_, old.group_count)) return Status::Ok();
  // Full of deleted entries: the same size again; else the next.
  uint32_t size = old.pages == nullptr ? 0 : static_cast<uint32_t>(packed_.load() >> kSizeShift);
  // One at a time: arrays that have just grown shall not be full again soon.
  const uint32_t spare = entries == 1 ? wanted / 16 : 0;
  while (!fits(wanted + spare, kGroupCounts[size])) ++size;
  const uint64_t bytes = Arrays{nullptr, kGroupCounts[size]}.bytes();
  if (!budget->TryCharge(bytes)) {
    return {Code::kResourceExhausted,
            "an index of " + std::to_string(bytes) + " bytes does not fit the budget"};
  }
  const Arrays grown = Allocate(kGroupCounts[size]);
  for (uint32_t e = 0; e < old.group_count * kGroupEntries; ++e) {
    const uint64_t word = Word(e).load();
    if (!IsLive(word)) continue;
    const uint64_t key = KeyAt(e);
    Place(grown, HashKey(key), key, word);
  }
  deleted_ = 0;
  packed_.store((uint64_t{size} << kSizeShift) | reinterpret_cast<uintptr_t>(grown.pages),
                std::memory_order_seq_cst);
  if (old.pages != nullptr) retire(old);
  return Status::Ok();
}

void BucketIndex::Insert(uint64_t hash, uint64_t key, Location location) {
  if (Place(arrays(), hash, key, location.word() | (1ULL << kCountShift))) --deleted_;
  used_.store(used_.load() + 1, std::memory_order_relaxed);
}

void BucketIndex::Erase(uint32_t entry) {
  Word(entry).store(kDeleted, std::memory_order_release);
  used_.store(used_.load() - 1, std::memory_order_relaxed);
  ++deleted_;
}

uint8_t BucketIndex::Age(uint32_t entry) {
  std::atomic<uint64_t>& at = Word(entry);
  uint64_t word = at.load(std::memory_order_relaxed);
  const uint32_t before = CountOf(word);
  at.store((word & ~kCountBits) | (uint64_t{before / 2} << kCountShift), std::memory_order_release);
  return static_cast<uint8_t>(before);
}

Status BucketIndex::CheckIntegrity(uint64_t (*hash)(uint64_t)) const {
  uint32_t used = 0;
  uint32_t deleted = 0;
  for (uint32_t e = 0; e < capacity(); ++e) {
    const uint64_t word = Word(e).load();
    deleted += static_cast<uint32_t>(word == kDeleted);
    if (!IsLive(word)) continue;
    ++used;
    const uint64_t key = KeyAt(e);
    if (Locate(hash(key), key) != e) {
      return {Code::kCorrupt, "key " + std::to_string(key) + " is not found where it stands"};
    }
  }
  if (used != used_ || deleted != deleted_ || (used + deleted) * 4 > capacity() * 3) {
    return {Code::kCorrupt, "the entries of an index do not add up"};
  }
  return Status::Ok();
}

}  // namespace embertide
