// HotSet: copies of rows of other nodes' buckets, each valid for a range of versions. Readers take
// no lock; one writer changes it.
//
//   groups  [ 8 x (1 + slot) ]      a key's group by its hash; 0: free
//   slots   [ seq | key | from | to | lineage | table, live, source | payload ]
//
// A reader copies a slot and takes the copy if `seq` was even and is the same afterwards (a
// seqlock; Boehm, "Can seqlocks get along with programming language memory models?", 2012). All
// words are atomic, so what it copied meanwhile is thrown away and never undefined.
//
// Memory is fixed at construction: what `bytes()` says. A key whose group is full has no place.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "embertide/store.h"

namespace embertide {

class HotSet {
 public:
  struct Name {
    uint32_t table = 0;
    uint64_t key = 0;
    bool operator==(const Name&) const = default;
  };
  struct Row {
    uint32_t bytes = 0;  // of payload; 0 unless the source is kHot
    uint16_t live = 0;
    Source source = Source::kDefault;  // kHot: there is a row
  };
  // The version at which a slot's row was proved to be what it is.
  struct Version {
    uint64_t number = 0;
    uint64_t lineage = 0;
    bool operator==(const Version&) const = default;
  };
  enum class Found : uint8_t { kNo, kOtherVersion, kYes };

  // `payload_bytes`: of the largest row.
  HotSet(uint32_t slots, uint32_t payload_bytes);
  // Bytes of one slot, its share of the groups included.
  static uint64_t SlotBytes(uint32_t payload_bytes);

  // --- readers, any number: appends the row's payload to `payloads`. A key that is here is noted
  // as read, whatever the version.
  Found Find(const Name& name, Version version, Row* row, std::vector<std::byte>* payloads) const;

  // --- the writer
  std::optional<uint32_t> SlotOf(const Name& name) const;
  // Whether the key's group has a place.
  bool HasPlace(const Name& name) const;
  // Some slot of the group: who leaves where there is no place.
  uint32_t OneOfGroup(const Name& name) const;
  // Requires: the slot is free, the key is not here and has a place.
  void Insert(uint32_t slot, const Name& name, const Row& row, const std::byte* payload,
              Version version);
  // The row has other bytes from `version` on.
  void Replace(uint32_t slot, const Row& row, const std::byte* payload, Version version);
  // The row is the same at `version` as before.
  void Extend(uint32_t slot, Version version);
  void Remove(uint32_t slot);
  // The name and the version of a slot in use.
  Name NameOf(uint32_t slot) const;
  Version VersionOf(uint32_t slot) const;
  // Whether it was read since the last call.
  bool TakeRead(uint32_t slot);
  uint32_t capacity() const { return slots_; }
  uint64_t bytes() const;

 private:
  static constexpr size_t kWays = 8;
  using Word = std::atomic<uint64_t>;
  // Words of a slot; `kAbout` is table, live and source.
  static constexpr size_t kSeq = 0;
  static constexpr size_t kKey = 1;
  static constexpr size_t kFrom = 2;
  static constexpr size_t kTo = 3;
  static constexpr size_t kLineage = 4;
  static constexpr size_t kAbout = 5;
  static constexpr size_t kBytes = 6;
  static constexpr size_t kPayload = 7;
  struct alignas(32) Group {
    std::atomic<uint32_t> places[kWays];
  };

  Word* SlotAt(uint32_t slot) const { return &words_[size_t{slot} * stride_]; }
  Group& GroupOf(const Name& name) const;
  template <typename Change>
  void Write(uint32_t slot, const Change& change);
  static void StorePayload(Word* slot, const Row& row, const std::byte* payload);

  const uint32_t slots_;
  const size_t stride_;  // words
  std::unique_ptr<Word[]> words_;
  mutable std::vector<Group> groups_;  // a power of two long
  std::unique_ptr<std::atomic<uint8_t>[]> read_;
};

}  // namespace embertide
