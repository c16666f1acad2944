// BucketIndex: key -> Location for the resident rows of one bucket.
//
// Open addressing in groups of 7 entries that fill two cache lines, so that a lookup asks for one
// place of memory, and the TLB for one page, before it knows where the row lies:
//
//   group  [ 7 tags, 1 unused ][ 7 counts, 1 unused ][ 7 x (key, word) ]      128 bytes, aligned
//
// Tags are compared all at once: 0..127 in use, 0x80 empty, 0xfe deleted, 0xff the unused one.
// Counts are saturating access counts. Entry e is entry e % 8 of group e / 8; e % 8 is never 7.
//
// Invariants
//   1. A key stands in at most one entry; its group chain from the hash's group has no group with
//      an empty tag before it.
//   2. At most 7/8 of the entries are used or deleted.
//   3. The bytes of the arrays are charged to the budget while they exist, also while retired.
//
// Threads: Find, Word and Touch run on any thread beside one writer. An entry is published by its
// tag; a reader that finds a key reads its word and then the key again, so a reused entry is never
// mistaken. The arrays of a grown bucket are handed to the writer's retire list, not freed.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "ddr/byte_budget.h"
#include "embertide/status.h"
#include "store/location.h"

namespace embertide {

class BucketIndex {
 public:
  static constexpr uint32_t kGroupEntries = 7;
  struct Entry {
    std::atomic<uint64_t> key{0};
    std::atomic<uint64_t> word{0};
  };
  struct alignas(128) Group {
    Group();
    std::array<std::atomic<uint8_t>, 8> tags;
    std::array<std::atomic<uint8_t>, 8> counts{};
    std::array<Entry, kGroupEntries> entries;
  };
  // The groups of one size; freed by whoever retired them.
  struct Arrays {
    explicit Arrays(uint32_t count);
    ~Arrays();
    Arrays(const Arrays&) = delete;
    Arrays& operator=(const Arrays&) = delete;
    const uint32_t group_count;
    std::atomic<uint32_t> used{0};  // entries in use; set by the writer, read by any thread
    uint32_t deleted = 0;
    Group* const groups;
    uint64_t bytes() const { return BytesFor(group_count); }
    Entry& entry(uint32_t e) { return groups[e / 8].entries[e % 8]; }
    const Entry& entry(uint32_t e) const { return groups[e / 8].entries[e % 8]; }
    std::atomic<uint8_t>& tag(uint32_t e) const { return groups[e / 8].tags[e % 8]; }
    std::atomic<uint8_t>& count(uint32_t e) const { return groups[e / 8].counts[e % 8]; }
  };
  static uint64_t BytesFor(uint32_t groups) {
    return sizeof(Arrays) + uint64_t{groups} * sizeof(Group);
  }
  static constexpr uint32_t kNotFound = ~0U;

  BucketIndex() = default;
  ~BucketIndex() { delete arrays_.load(); }

  // --- any thread, under a pin
  // Where a lookup of a hash begins; a batch asks for many keys' groups before it reads the first.
  struct Start {
    const Arrays* arrays = nullptr;  // null: an index without entries
    const Group* group = nullptr;
    void Prefetch() const {
      __builtin_prefetch(group);
      // As a number: nothing may be added to a null pointer.
      const auto second = reinterpret_cast<uintptr_t>(group) + sizeof(Group) / 2;
      __builtin_prefetch(reinterpret_cast<const void*>(second));
    }
  };
  Start StartOf(uint64_t hash) const {
    const Arrays* arrays = arrays_.load(std::memory_order_acquire);
    if (arrays == nullptr) return {};
    return {arrays, &arrays->groups[FirstGroup(*arrays, hash)]};
  }
  // The location of `key`, counting an access; a default Location if it has no entry. Requires:
  // `start` is that of its hash, under the same pin.
  static Location Find(const Start& start, uint64_t hash, uint64_t key);
  Location Find(uint64_t hash, uint64_t key) const { return Find(StartOf(hash), hash, key); }
  uint32_t AccessCount(uint64_t hash, uint64_t key) const;

  // --- the writer
  // The entry of `key`, or kNotFound.
  uint32_t Locate(uint64_t hash, uint64_t key) const;
  Location At(uint32_t entry) const {
    return Location::FromWord(arrays_.load()->entry(entry).word.load());
  }
  uint64_t KeyAt(uint32_t entry) const { return arrays_.load()->entry(entry).key.load(); }
  void Set(uint32_t entry, Location location) {
    arrays_.load()->entry(entry).word.store(location.word(), std::memory_order_release);
  }
  // Makes room for one more entry. If the arrays must grow, the new ones are charged to `budget`
  // and the old ones are handed to `retire`. kResourceExhausted if the budget has no room.
  Status Reserve(ByteBudget* budget, const std::function<void(Arrays*)>& retire);
  // Adds a key that is not there. Requires: Reserve, and no Insert since.
  void Insert(uint64_t hash, uint64_t key, Location location);
  void Erase(uint32_t entry);

  // Entries, used or not; iterate with Occupied.
  uint32_t capacity() const;
  bool Occupied(uint32_t entry) const {
    return arrays_.load()->tag(entry).load(std::memory_order_relaxed) < 0x80;
  }
  // Halves the entry's access count and returns what it was: the clock hand of eviction.
  uint8_t Age(uint32_t entry);
  uint32_t size() const;
  uint64_t bytes() const;

  // Verifies invariants 1 and 2 given the hash of a key. kCorrupt naming the key.
  Status CheckIntegrity(uint64_t (*hash)(uint64_t)) const;

 private:
  static uint32_t FirstGroup(const Arrays& arrays, uint64_t hash) {
    return static_cast<uint32_t>(hash >> 7) & (arrays.group_count - 1);
  }
  static uint32_t Probe(const Arrays& arrays, uint64_t hash, uint64_t key);
  static void Place(Arrays* arrays, uint64_t hash, uint64_t key, uint64_t word, uint8_t count);
  std::atomic<Arrays*> arrays_{nullptr};
};

}  // namespace embertide
