// Holder: a place of a row that may change: an index entry's own, or that of a node of its chain.
//
// Requires, throughout: the writer of the bucket's pool, for as long as the holder is used.
#pragma once

#include <cstdint>

#include "store/bucket.h"
#include "store/location.h"

namespace embertide {

struct Holder {
  uint32_t table;
  Bucket* bucket;
  uint32_t entry;
  VersionNode* node;  // null: the entry itself

  Location place() const {
    return node != nullptr ? Location::FromWord(node->word.load()) : bucket->index.At(entry);
  }
  void Set(Location place) const {
    if (node != nullptr) {
      node->word.store(place.word(), std::memory_order_release);
    } else {
      bucket->index.Set(entry, place);
    }
  }
};

// Calls visit(holder, place) for all places of an entry that says `said`.
template <typename Visit>
void ForEachPlace(uint32_t table, Bucket* bucket, uint32_t entry, Location said,
                  const Visit& visit) {
  if (!said.is_chain()) return visit(Holder{table, bucket, entry, nullptr}, said);
  for (VersionNode* node = said.chain(); node != nullptr; node = node->older.load()) {
    visit(Holder{table, bucket, entry, node}, Location::FromWord(node->word.load()));
  }
}

}  // namespace embertide
