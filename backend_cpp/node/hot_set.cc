// Finding and changing copies.
#include "node/hot_set.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "embertide/hash.h"

namespace embertide {
namespace {

constexpr int kTries = 4;  // of a reader that meets the writer
constexpr auto kRelaxed = std::memory_order_relaxed;

constexpr size_t WordsOf(uint32_t bytes) { return (bytes + 7) / 8; }

uint64_t About(uint32_t table, const HotSet::Row& row) {
  return uint64_t{table} << 32 | uint64_t{row.live} << 8 | static_cast<uint64_t>(row.source);
}
uint32_t TableOf(uint64_t about) { return static_cast<uint32_t>(about >> 32); }

// Four keys a group on average: one in fifty has no place at most.
size_t GroupsFor(uint32_t slots) { return std::bit_ceil(std::max<size_t>(1, slots / 4)); }

}  // namespace

uint64_t HotSet::SlotBytes(uint32_t payload_bytes) {
  // Groups are rounded up to a power of two: at most twice a quarter of 32 bytes a slot.
  return (kPayload + WordsOf(payload_bytes)) * sizeof(Word) + 2 * sizeof(Group) / 4 + 1;
}

HotSet::HotSet(uint32_t slots, uint32_t payload_bytes)
    : slots_(slots),
      stride_(kPayload + WordsOf(payload_bytes)),
      words_(new Word[size_t{slots} * stride_]()),
      groups_(GroupsFor(slots)),
      read_(new std::atomic<uint8_t>[slots]()) {}

uint64_t HotSet::bytes() const {
  return size_t{slots_} * (stride_ * sizeof(Word) + 1) + groups_.size() * sizeof(Group);
}

HotSet::Group& HotSet::GroupOf(const Name& name) const {
  // Not the bits that choose the bucket alone: keys of some buckets only are here.
  const uint64_t hash = HashKey(name.key ^ HashKey(name.table));
  return groups_[hash & (groups_.size() - 1)];
}

HotSet::Found HotSet::Find(const Name& name, Version version, Row* row,
                           std::vector<std::byte>* payloads) const {
  for (const std::atomic<uint32_t>& place : GroupOf(name).places) {
    const uint32_t at = place.load(std::memory_order_acquire);
    if (at == 0) continue;
    const Word* slot = SlotAt(at - 1);
    if (slot[kKey].load(kRelaxed) != name.key || TableOf(slot[kAbout].load(kRelaxed)) != name.table)
      continue;
    for (int attempt = 0; attempt < kTries; ++attempt) {
      const uint64_t before = slot[kSeq].load(std::memory_order_acquire);
      if (before % 2 != 0) continue;
      const uint64_t key = slot[kKey].load(kRelaxed);
      const uint64_t from = slot[kFrom].load(kRelaxed);
      const uint64_t to = slot[kTo].load(kRelaxed);
      const uint64_t lineage = slot[kLineage].load(kRelaxed);
      const uint64_t about = slot[kAbout].load(kRelaxed);
      // A version before `to` is of the history that `to` is of.
      const bool valid =
          from <= version.number && (version.number < to || Version{to, lineage} == version);
      const size_t size = payloads->size();
      Row copy;
      copy.source = static_cast<Source>(about & 0xFF);
      copy.live = static_cast<uint16_t>(about >> 8);
      if (valid && copy.source == Source::kHot) {
        copy.bytes = static_cast<uint32_t>(slot[kBytes].load(kRelaxed));
        const size_t words = std::min(WordsOf(copy.bytes), stride_ - kPayload);
        payloads->resize(size + words * sizeof(uint64_t));
        for (size_t w = 0; w < words; ++w) {
          const uint64_t word = slot[kPayload + w].load(kRelaxed);
          std::memcpy(payloads->data() + size + w * sizeof(word), &word, sizeof(word));
        }
      }
      std::atomic_thread_fence(std::memory_order_acquire);
      if (slot[kSeq].load(kRelaxed) != before || key != name.key || TableOf(about) != name.table) {
        payloads->resize(size);
        continue;
      }
      if (read_[at - 1].load(kRelaxed) == 0) read_[at - 1].store(1, kRelaxed);
      if (!valid) return Found::kOtherVersion;
      *row = copy;
      return Found::kYes;
    }
    return Found::kOtherVersion;  // it is being written
  }
  return Found::kNo;
}

std::optional<uint32_t> HotSet::SlotOf(const Name& name) const {
  for (const std::atomic<uint32_t>& place : GroupOf(name).places) {
    const uint32_t at = place.load(kRelaxed);
    if (at != 0 && NameOf(at - 1) == name) return at - 1;
  }
  return std::nullopt;
}

bool HotSet::HasPlace(const Name& name) const {
  return std::ranges::any_of(GroupOf(name).places,
                             [](const auto& place) { return place.load(kRelaxed) == 0; });
}

uint32_t HotSet::OneOfGroup(const Name& name) const {
  return GroupOf(name).places[name.key % kWays].load(kRelaxed) - 1;
}

template <typename Change>
void HotSet::Write(uint32_t slot, const Change& change) {
  Word* const words = SlotAt(slot);
  const uint64_t seq = words[kSeq].load(kRelaxed);
  words[kSeq].store(seq + 1, kRelaxed);
  std::atomic_thread_fence(std::memory_order_release);
  change(words);
  words[kSeq].store(seq + 2, std::memory_order_release);
}

void HotSet::StorePayload(Word* slot, const Row& row, const std::byte* payload) {
  slot[kBytes].store(row.bytes, kRelaxed);
  for (uint32_t done = 0; done < row.bytes; done += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, payload + done, std::min<size_t>(sizeof(word), row.bytes - done));
    slot[kPayload + done / sizeof(word)].store(word, kRelaxed);
  }
}

void HotSet::Insert(uint32_t slot, const Name& name, const Row& row, const std::byte* payload,
                    Version version) {
  read_[slot].store(1, kRelaxed);
  Write(slot, [&](Word* words) {
    words[kKey].store(name.key, kRelaxed);
    words[kAbout].store(About(name.table, row), kRelaxed);
    words[kFrom].store(version.number, kRelaxed);
    words[kTo].store(version.number, kRelaxed);
    words[kLineage].store(version.lineage, kRelaxed);
    StorePayload(words, row, payload);
  });
  for (std::atomic<uint32_t>& place : GroupOf(name).places) {
    if (place.load(kRelaxed) != 0) continue;
    return place.store(slot + 1, std::memory_order_release);
  }
}

void HotSet::Replace(uint32_t slot, const Row& row, const std::byte* payload, Version version) {
  Write(slot, [&](Word* words) {
    words[kAbout].store(About(TableOf(words[kAbout].load(kRelaxed)), row), kRelaxed);
    words[kFrom].store(version.number, kRelaxed);
    words[kTo].store(version.number, kRelaxed);
    words[kLineage].store(version.lineage, kRelaxed);
    StorePayload(words, row, payload);
  });
}

void HotSet::Extend(uint32_t slot, Version version) {
  Write(slot, [&](Word* words) {
    words[kTo].store(version.number, kRelaxed);
    words[kLineage].store(version.lineage, kRelaxed);
  });
}

void HotSet::Remove(uint32_t slot) {
  for (std::atomic<uint32_t>& place : GroupOf(NameOf(slot)).places) {
    if (place.load(kRelaxed) == slot + 1) place.store(0, std::memory_order_release);
  }
  // Whoever came by the group before finds no version.
  Write(slot, [](Word* words) {
    words[kFrom].store(~uint64_t{0}, kRelaxed);
    words[kTo].store(0, kRelaxed);
  });
}

HotSet::Name HotSet::NameOf(uint32_t slot) const {
  const Word* words = SlotAt(slot);
  return {TableOf(words[kAbout].load(kRelaxed)), words[kKey].load(kRelaxed)};
}

HotSet::Version HotSet::VersionOf(uint32_t slot) const {
  const Word* words = SlotAt(slot);
  return {words[kTo].load(kRelaxed), words[kLineage].load(kRelaxed)};
}

bool HotSet::TakeRead(uint32_t slot) { return read_[slot].exchange(0, kRelaxed) != 0; }

}  // namespace embertide
