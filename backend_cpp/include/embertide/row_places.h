// RowPlaces: where a lookup found the rows of its keys, for the training step that brings their
// gradients: it then need not look for them again.
//
// Nothing depends on it but time. A moved row is looked for again, so it may be as old as
// it likes; it holds nothing in its place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace embertide {

// Made by ReadView::Lookup, used by TrainingStore::ApplyGradients. One thread at a time.
struct RowPlaces {
  // By key, in the order of the request: the Location of its row in DDR; 0: it has none there, or
  // that is not known.
  std::unique_ptr<uint64_t[]> words;
  size_t keys = 0;
  uint64_t mark = 0;   // MarkOf those keys
  uint32_t table = 0;  // of the request
  // RowPool::ended_places of the table's pool before the lookup; places hold as long as it stays.
  uint64_t as_of = 0;

  // The mark of keys in their order: other keys, or the same in another order, have another one,
  // but for one chance in 2^63 or so.
  static uint64_t MarkOf(std::span<const int64_t> keys) {
    uint64_t mark = 0;
    uint64_t by = 0x9E3779B97F4A7C15U;
    for (const int64_t key : keys) mark += (static_cast<uint64_t>(key) + 1) * (by += 2);
    return mark;
  }
};

}  // namespace embertide
