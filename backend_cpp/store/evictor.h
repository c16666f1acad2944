// Evictor: which rows leave DDR, and pages that are emptied.
//
// Rows leave as the pool's policy says; without one, by a clock hand that passes over the pool's
// entries: an entry whose halved access count was zero leaves for the SSD. Where tables have
// shares, rows beyond a share go first, then rows of tables without one. When the bytes are wanted
// by another size class or by the index, whole pages are condemned and their rows moved. Rows that
// are held (held_rows.h) stay in DDR, and may move from page to page.
//
// Threads: the pool's writer is held throughout, but as WithoutWriter says; without `writer`, the
// rows count as evicted by a writer.
#pragma once

#include <cstdint>
#include <vector>

#include "store/holder.h"
#include "store/reclaimer.h"
#include "store/row_pool.h"
#include "store/ssd_mover.h"
#include "store/store_state.h"

namespace embertide {

class Evictor {
 public:
  // Rows of one batch of reads for promotions, and then of one hold of the writer lock.
  static constexpr size_t kPromotionsAtOnce = 64;

  Evictor(StoreState& store, Reclaimer& reclaimer, SsdMover& mover)
      : store_(store), reclaimer_(reclaimer), mover_(mover) {}

  // Moves some hundred KiB of DDR rows to SSD, less on a small pool; false if nothing went.
  bool Evict(RowPool* pool, WriterLock* writer);
  // Evicts some rows of a table that has a share; false if none went.
  bool EvictTable(RowPool* pool, uint32_t table, WriterLock* writer);
  // Bytes of rows that shall leave a table's share: for the room that it keeps ready ahead of rows
  // that enter, a batch of promotions at least, or because it has shrunk.
  uint64_t ShareLacks(const RowPool& pool, uint32_t table) const;
  // Moves the rows of condemned pages that a pass over `entries` entries meets into other pages
  // with room; if `demote`, those that find none to the SSD, but for those that are held, else a
  // row that finds none ends the pass: while DDR is full the next ones would find none either.
  void MoveCondemned(RowPool* pool, uint32_t entries, bool demote, WriterLock* writer);
  // The same in one round, which meets all rows.
  void MoveAllCondemned(RowPool* pool);

 private:
  // So many bytes as a policy chooses, or as a hand does among the rows of its tables. `chained`:
  // also rows that versions of the window changed, where nothing else can go.
  bool EvictByPolicy(RowPool* pool, uint64_t bytes, WriterLock* writer);
  bool EvictByClock(RowPool* pool, Hand* hand, uint64_t bytes, bool chained, WriterLock* writer);
  // Rows that the policy lets go; returns how many keys it chose for them,
  // and `held`: those that it let go and that must stay.
  uint32_t ChooseByPolicy(RowPool* pool, uint64_t wanted, std::vector<Holder>* victims,
                          std::vector<uint64_t>* held);
  // Has the policy hold a key that it chose if, chosen or not, its newest place is in DDR.
  void EnterAgain(RowPool* pool, uint32_t table, uint64_t key);
  // Rows that a pass of the clock hand takes along.
  enum class Sweeping : uint8_t { kCold, kAny, kChained };
  // Passes a clock hand over up to `entries` entries, collecting rows that may leave DDR.
  void Sweep(RowPool* pool, Hand* hand, uint32_t entries, Sweeping sweeping,
             std::vector<Holder>* victims, uint64_t wanted);
  // Moves rows of DDR to the SSD; false if none went.
  bool Demote(RowPool* pool, const std::vector<Holder>& victims, MoveKind kind, WriterLock* writer);
  // Entries of the buckets of a hand's tables, used or not: one round of it.
  uint32_t RoundOf(const RowPool* pool, const Hand& hand) const;
  // Returns how many of the entries were passed.
  template <typename Visit>
  uint32_t AdvanceHand(RowPool* pool, Hand* hand, uint32_t entries, Visit visit);

  StoreState& store_;
  Reclaimer& reclaimer_;
  SsdMover& mover_;
};

}  // namespace embertide
