// RowNote: what pruning knows of a row, in DDR whatever the row's tier: of a row in DDR from the
// row itself, of one on the SSD from a note (ssd_notes.h), which is written when the row goes
// there.
//
//   note   [ step of the last use ][ utility, a float a chunk ]...[ log of the count ]
//
// Requires, throughout: the pool's writer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "store/row_pool.h"
#include "store/table.h"

namespace embertide {

// Valid until the row changes or moves.
struct RowNote {
  uint32_t tick = 0;               // the step that last used it
  const float* utility = nullptr;  // of its chunks, as it was then
  float log = 0.0F;                // of the count that says what its counters are worth; 0: none
};

// Whether pruning keeps a note of the table's rows on the SSD.
inline bool Noted(const RowPool& pool, const Table& table) {
  return pool.notes != nullptr && table.pruned_with != nullptr;
}
RowNote NoteOf(const RowPool& pool, const Table& table, Location place);
// Writes the note of a row of DDR: `row` is its payload and, from `aux` on, what training keeps.
void WriteNote(const Table& table, uint16_t live, const std::byte* row, const std::byte* aux,
               uint32_t* words);

}  // namespace embertide
