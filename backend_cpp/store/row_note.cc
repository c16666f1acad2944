// RowNote, what pruning knows of a row: see the header.
#include "store/row_note.h"

#include <cstring>

#include "store/group_price.h"
#include "store/train_ops.h"

namespace embertide {
namespace {

// The log of the count that says what a row's counters are worth; 0: none.
float LogIn(const Table& table, uint16_t live, const std::byte* payload) {
  if ((live & table.cost.counters) == 0) return 0.0F;
  const RowLayout learned = table.config.learned();
  const uint32_t counter = table.pruned_with->counts[table.place_in_group].of.counter;
  const auto before = learned.PayloadBytes(static_cast<uint16_t>(live & learned.full_mask()));
  float log = 0.0F;
  std::memcpy(&log, payload + before + counter * sizeof(log), sizeof(log));
  return log;
}

}  // namespace

RowNote NoteOf(const RowPool& pool, const Table& table, Location place) {
  const uint32_t chunks = table.cost.chunks;
  if (place.tier() == TierId::kSsd) {
    const uint32_t* words = pool.notes->Find(place.slot());
    EMBERTIDE_CHECK(words != nullptr);
    const auto* floats = reinterpret_cast<const float*>(words + 1);
    return {words[0], floats, table.cost.counters != 0 ? floats[chunks] : 0.0F};
  }
  RowAux* aux = AuxOf(pool, place);
  return {aux->tick, aux->utility(), LogIn(table, place.live(), pool.arena.Address(place.slot()))};
}

void WriteNote(const Table& table, uint16_t live, const std::byte* row, const std::byte* aux,
               uint32_t* words) {
  RowAux head;
  std::memcpy(&head, aux, sizeof(head));
  words[0] = head.tick;
  std::memcpy(words + 1, aux + sizeof(head), table.cost.chunks * sizeof(float));
  if (table.cost.counters == 0) return;
  const float log = LogIn(table, live, row);
  std::memcpy(words + 1 + table.cost.chunks, &log, sizeof(log));
}

}  // namespace embertide
