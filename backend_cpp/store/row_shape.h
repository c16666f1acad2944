// RowShape: how words of index groups say where the rows of one table lie, in one range of DDR, and
// how long they are. One for plain groups and one for lean ones, so that a loop that places rows by
// it need not know of which kind they are.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "ddr/slab_arena.h"
#include "embertide/row.h"
#include "store/index_group.h"
#include "store/location.h"

namespace embertide {

struct RowShape {
  uint64_t rows = 0;       // address of slot 0
  uint64_t slot_mask = 0;  // of a word; what it leaves is so many bits down and up, in bytes
  uint64_t slot_down = 0;
  uint64_t slot_up = 0;
  uint64_t live_down = 0;  // the live mask is this many bits up in a word
  uint64_t live_mask = 0;
  uint64_t chunk_bytes = 0;
  uint64_t scale_bytes = 0;  // before the chunks

  static RowShape OfPlain(const RowLayout& layout, const std::byte* rows) {
    RowShape shape;
    shape.rows = reinterpret_cast<uintptr_t>(rows);
    shape.slot_mask = Location::kSlotMask;
    shape.slot_up = std::countr_zero(kSlotUnitBytes);
    shape.live_down = Location::kLiveShift;
    shape.live_mask = layout.full_mask();
    shape.chunk_bytes = layout.chunk_bytes();
    shape.scale_bytes = layout.scale_bytes();
    return shape;
  }
  // The shape of the words that FindLean gives.
  static RowShape OfLean(const RowLayout& layout, const std::byte* rows, const LeanShape& lean) {
    RowShape shape = OfPlain(layout, rows);
    shape.slot_mask = LeanShape::kFoundMask;
    shape.slot_down = lean.chunks;
    shape.slot_up += lean.unit_shift;
    shape.live_down = 0;
    return shape;
  }
};

}  // namespace embertide
