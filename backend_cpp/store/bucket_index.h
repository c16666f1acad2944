// BucketIndex: key -> Location for the resident rows of one bucket.
//
// Open addressing in groups of 16 with a tag byte an entry, compared 16 at a time:
//
//   tags    [t t t t t t t t t t t t t t t t] ...   0..127 in use, 0x80 empty, 0xfe deleted
//   counts  [c c c ...                      ] ...   saturating access counts
//   entries [key, word] ...
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

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "ddr/byte_budget.h"
#include "embertide/status.h"
#include "store/location.h"

namespace embertide {

class BucketIndex {
 public:
  // The arrays of one size; freed by whoever retired them.
  struct Arrays {
    uint32_t groups = 0;
    uint32_t used = 0;  // entries in use
    uint32_t deleted = 0;
    std::unique_ptr<std::atomic<uint8_t>[]> tags;
    std::unique_ptr<std::atomic<uint8_t>[]> counts;
    struct Entry {
      std::atomic<uint64_t> key;
      std::atomic<uint64_t> word;
    };
    std::unique_ptr<Entry[]> entries;
    uint64_t bytes() const { return BytesFor(groups); }
  };
  static uint64_t BytesFor(uint32_t groups) {
    return sizeof(Arrays) + uint64_t{groups} * 16 * (2 + sizeof(Arrays::Entry));
  }
  static constexpr uint32_t kNotFound = ~0U;

  BucketIndex() = default;
  ~BucketIndex() { delete arrays_.load(); }

  // --- any thread, under a pin
  // -------------------------------------------------------------------- Brings the tags of `hash`
  // towards the cache.
  void Prefetch(uint64_t hash) const;
  // The location of `key`, counting an access; a default Location if it has no entry.
  Location Find(uint64_t hash, uint64_t key) const;
  uint32_t AccessCount(uint64_t hash, uint64_t key) const;

  // --- the writer
  // --------------------------------------------------------------------------------- The entry of
  // `key`, or kNotFound.
  uint32_t Locate(uint64_t hash, uint64_t key) const;
  Location At(uint32_t entry) const {
    return Location::FromWord(arrays_.load()->entries[entry].word.load());
  }
  uint64_t KeyAt(uint32_t entry) const { return arrays_.load()->entries[entry].key.load(); }
  void Set(uint32_t entry, Location location) {
    arrays_.load()->entries[entry].word.store(location.word(), std::memory_order_release);
  }
  // Adds a key that is not there. If the arrays must grow, the new ones are charged to `budget`
  // and the old ones are handed to `retire`. kResourceExhausted if the budget has no room.
  Status Insert(uint64_t hash, uint64_t key, Location location, ByteBudget* budget,
                const std::function<void(Arrays*)>& retire);
  void Erase(uint32_t entry);

  // Entries, used or not; iterate with Occupied.
  uint32_t capacity() const;
  bool Occupied(uint32_t entry) const {
    return arrays_.load()->tags[entry].load(std::memory_order_relaxed) < 0x80;
  }
  // Halves the entry's access count and returns what it was: the clock hand of eviction.
  uint8_t Age(uint32_t entry);
  uint32_t size() const;
  uint64_t bytes() const;

  // Verifies invariants 1 and 2 given the hash of a key. kCorrupt naming the key.
  Status CheckIntegrity(uint64_t (*hash)(uint64_t)) const;

 private:
  static uint32_t Probe(const Arrays& arrays, uint64_t hash, uint64_t key);
  static void Place(Arrays* arrays, uint64_t hash, uint64_t key, uint64_t word, uint8_t count);
  std::atomic<Arrays*> arrays_{nullptr};
};

}  // namespace embertide
