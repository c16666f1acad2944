// Upkeep: what a thread in the background does for a store: promotions, room in DDR before somebody
// needs it, compaction, huge pages. Here writers shall not wait for a drive or for the system: what
// takes long runs without the writer lock, what needs it comes in slices.
//
// Threads: one at a time in each pool, which holds RowPool::upkeep; it takes the writer itself.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "store/evictor.h"
#include "store/reclaimer.h"
#include "store/residency.h"
#include "store/row_pool.h"
#include "store/ssd_mover.h"
#include "store/store_state.h"

namespace embertide {

class Upkeep {
 public:
  Upkeep(StoreState& store, Reclaimer& reclaimer, SsdMover& mover, Evictor& evictor,
         Residency& residency)
      : store_(store),
        reclaimer_(reclaimer),
        mover_(mover),
        evictor_(evictor),
        residency_(residency) {}

  void Maintain(RowPool* pool);

 private:
  // Cold rows leave, then pages are emptied. Room for `pages` of rows beside what is kept ready.
  void MakeRoomAhead(RowPool* pool, uint32_t pages);
  // Tells the policy what was read since, and gives the rows that it admits from the SSD.
  std::vector<Access> Replay(RowPool* pool);
  // Reads rows from the SSD in one batch and brings them to DDR, but for those that are gone, there
  // already, or changed meanwhile. Counts those for which there is no room or no good block. True:
  // a row lacked a page of its size, though there is room for others.
  bool Promote(RowPool* pool, std::span<const Access> rows);

  StoreState& store_;
  Reclaimer& reclaimer_;
  SsdMover& mover_;
  Evictor& evictor_;
  Residency& residency_;
};

}  // namespace embertide
