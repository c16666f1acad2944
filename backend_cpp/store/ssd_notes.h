// SsdNotes: what pruning needs to know of rows on the SSD, kept in DDR, so that a pass reads none
// of them. A row on the SSD does not change, so neither does its note.
//
//   note       words [ step of the last use ][ utility, a float a chunk ]...[ log of the count ]
//   segment    of the log:
//                its notes in the order of their rows
//                the place of each row in its block
//                the first note of each block
//
// All notes are as wide as the widest of the pool's tables. A note stays until its segment is
// free, be its row gone or not.
//
// Rows leave DDR when it is full, which is when there is no room for their notes. So notes are
// charged ahead: half of them for rows that make room for others, half for those of a page that is
// emptied. A page is more than the notes of its rows: with one empty, the rest is charged again.
//
// Invariant: bytes() are charged to the budget.
//
// Threads: the pool's writer, but for bytes().
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "ddr/byte_budget.h"
#include "ssd/block_log.h"

namespace embertide {

class SsdNotes {
 public:
  // `words` a note; so many are charged ahead as rows of two pages have. `budget` outlives it.
  SsdNotes(ByteBudget* budget, size_t segments, uint32_t words, uint64_t rows_of_a_page)
      : budget_(*budget),
        words_(words),
        page_bytes_(rows_of_a_page * NoteBytes()),
        segments_(segments) {}

  // Charges what is to be charged ahead, as far as there is room. False: there is not.
  bool ChargeAhead();
  // Charges notes for so many rows, or for fewer; returns for how many. `of_page`: the rows of a
  // page that is to be emptied.
  size_t Take(size_t rows, bool of_page);
  // Gives back what was taken and not added.
  void GiveBack(size_t rows);
  // Makes the notes of rows that were given these slots, each written by fill(i, words). Requires:
  // Take, and slots that ascend from those of the calls before in their segment.
  template <typename Fill>
  void Add(std::span<const uint64_t> slots, const Fill& fill) {
    for (size_t i = 0; i < slots.size(); ++i) {
      Segment& segment = segments_[BlockLog::SegmentOf(slots[i])];
      if (segment.places.size() == segment.places.capacity()) Grow(slots.subspan(i), &segment);
      const uint32_t block = BlockIn(slots[i]);
      while (segment.blocks <= block) {
        segment.firsts[segment.blocks++] = static_cast<uint16_t>(segment.places.size());
      }
      segment.places.push_back(static_cast<uint16_t>(PlaceOf(slots[i])));
      segment.words.resize(segment.words.size() + words_);
      fill(i, segment.words.data() + segment.words.size() - words_);
    }
    taken_ -= slots.size() * NoteBytes();
  }
  // Null: there is none.
  const uint32_t* Find(uint64_t slot) const;
  // The segment is free.
  void Drop(uint32_t segment);

  uint32_t words() const { return words_; }
  uint64_t NoteBytes() const { return words_ * sizeof(uint32_t) + sizeof(uint16_t); }
  uint64_t directory_bytes() const { return segments_.size() * sizeof(Segment); }
  // Charged, beside the directory. Any thread.
  uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  static constexpr uint64_t kChargedAtOnce = 256;  // notes
  struct Segment {
    std::vector<uint32_t> words;
    std::vector<uint16_t> places;                   // slot / 8 of its block's bytes
    std::array<uint16_t, kSegmentBlocks> firsts{};  // of the first `blocks`
    uint16_t blocks = 0;                            // up to the last one with a note
  };
  // Room for exactly those of the slots, the first ones, that are in the segment.
  void Grow(std::span<const uint64_t> slots, Segment* segment) const;
  static uint32_t PlaceOf(uint64_t slot) { return slot & ((1U << kSsdOffsetBits) - 1U); }
  static uint32_t BlockIn(uint64_t slot) {
    return static_cast<uint32_t>(BlockLog::BlockOf(slot) % kSegmentBlocks);
  }

  ByteBudget& budget_;
  const uint32_t words_;
  const uint64_t page_bytes_;  // of the notes of a page's rows
  std::vector<Segment> segments_;
  uint64_t ahead_ = 0;              // bytes that are charged for notes to come
  uint64_t taken_ = 0;              // and for those of rows that are being moved
  std::atomic<uint64_t> bytes_{0};  // all that is charged
};

}  // namespace embertide
