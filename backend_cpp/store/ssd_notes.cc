// Notes of rows on the SSD: see the header.
#include "store/ssd_notes.h"

#include <algorithm>

namespace embertide {

bool SsdNotes::ChargeAhead() {
  while (ahead_ < 2 * page_bytes_) {
    const uint64_t bytes = std::min(2 * page_bytes_ - ahead_, NoteBytes() * kChargedAtOnce);
    if (!budget_.TryCharge(bytes)) return false;
    ahead_ += bytes;
    bytes_ += bytes;
  }
  return true;
}

size_t SsdNotes::Take(size_t rows, bool of_page) {
  uint64_t bytes = rows * NoteBytes();
  if (budget_.TryCharge(bytes)) {
    bytes_ += bytes;
  } else {
    const uint64_t kept = of_page ? 0 : page_bytes_;
    bytes = std::min(bytes, (ahead_ - std::min(ahead_, kept)) / NoteBytes() * NoteBytes());
    ahead_ -= bytes;
  }
  taken_ += bytes;
  return bytes / NoteBytes();
}

void SsdNotes::GiveBack(size_t rows) {
  const uint64_t bytes = rows * NoteBytes();
  taken_ -= bytes;
  bytes_ -= bytes;
  budget_.Release(bytes);
  ChargeAhead();
}

void SsdNotes::Grow(std::span<const uint64_t> slots, Segment* segment) const {
  const uint32_t number = BlockLog::SegmentOf(slots.front());
  const auto other = std::ranges::find_if(
      slots, [number](uint64_t slot) { return BlockLog::SegmentOf(slot) != number; });
  const size_t notes = segment->places.size() + static_cast<size_t>(other - slots.begin());
  segment->places.reserve(notes);
  segment->words.reserve(notes * words_);
}

const uint32_t* SsdNotes::Find(uint64_t slot) const {
  const Segment& segment = segments_[BlockLog::SegmentOf(slot)];
  const uint32_t block = BlockIn(slot);
  if (block >= segment.blocks) return nullptr;
  const size_t end =
      block + 1U < segment.blocks ? segment.firsts[block + 1U] : segment.places.size();
  const auto place = static_cast<uint16_t>(PlaceOf(slot));
  for (size_t i = segment.firsts[block]; i < end; ++i) {
    if (segment.places[i] == place) return segment.words.data() + i * words_;
  }
  return nullptr;
}

void SsdNotes::Drop(uint32_t number) {
  Segment& segment = segments_[number];
  const uint64_t bytes = segment.places.size() * NoteBytes();
  segment = Segment{};
  bytes_ -= bytes;
  budget_.Release(bytes);
  ChargeAhead();
}

}  // namespace embertide
