// RowPool: the DDR and SSD of one device that the rows of some tables share, and what is kept of
// them: pages, buckets' arrays, notes, counts, shares, and what waits to be freed.
//
// A table with budgets of its own has a pool on each device, which shares nothing with the others
// of the device but its number. All other tables share one pool on each device.
//
// Threads: who writes holds `writer`, as the comments of the files beside this one say. Counts and
// shares may be read by any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "ddr/byte_budget.h"
#include "ddr/page_pool.h"
#include "ddr/slab_arena.h"
#include "embertide/store.h"
#include "policy/frequency_sketch.h"
#include "ssd/block_log.h"
#include "store/bucket.h"
#include "store/fair_mutex.h"
#include "store/held_rows.h"
#include "store/node_pool.h"
#include "store/ssd_notes.h"
#include "store/tier_policy.h"

namespace embertide {

struct RowAux;

// A row that was read, from a pool whose policy is to hear of it.
struct Access {
  uint64_t key;
  uint32_t table;
};

// Rows of one table in one tier of a pool, those of older versions too, and their payload and
// aux. Written under the pool's writer lock.
struct TierCount {
  std::atomic<uint64_t> rows{0};
  std::atomic<uint64_t> bytes{0};
};

// A pass over the entries of some of a pool's tables: place in `tables`, ordinal of the bucket,
// entry.
struct Hand {
  std::vector<uint32_t> tables;
  uint32_t table = 0;
  uint32_t bucket = 0;
  uint32_t entry = 0;
};

// The bytes of rows that a table may have in DDR on a device. Changed under the pool's writer.
struct TableShare {
  static constexpr uint64_t kNone = ~0ULL;
  std::atomic<uint64_t> bytes{kNone};
  // Bytes that the rows may take now: `bytes`, or more while a share that was lowered is being
  // emptied. It never rises before the next share is set.
  std::atomic<uint64_t> allowed{kNone};
  Hand clock;  // of evictions among the table's own rows
  bool given() const { return bytes.load(std::memory_order_relaxed) != kNone; }
};

// Bytes of the slot of a row: without a live chunk as with one, so that all slots of a table lie at
// multiples of one unit (LeanShape).
inline uint32_t SlotPayload(const RowLayout& layout, uint16_t live) {
  return layout.PayloadBytes(live == 0 ? uint16_t{1} : live);
}

struct RowPool {
  // `ssd`: bytes of its log; 0: it has none.
  RowPool(uint32_t d, uint64_t budget_bytes, uint64_t ssd, IndexKind kind, std::vector<uint32_t> of,
          size_t all_tables)
      : number(d),
        tables(std::move(of)),
        ssd_bytes(ssd),
        index(kind),
        budget(budget_bytes),
        arena(&budget),
        held(&budget),
        index_pages(budget_bytes / BucketIndex::kPageBytes * BucketIndex::kPagesPerBudgetPage,
                    BucketIndex::kPageBytes),
        nodes(&budget, &index_pages),
        in_ddr(all_tables),
        in_ssd(all_tables),
        shares(all_tables),
        ended_places(pools_made++ << 40U),
        clock{tables},
        packing{tables} {}
  inline static std::atomic<uint64_t> pools_made{0};
  const uint32_t number;               // of the device
  const std::vector<uint32_t> tables;  // whose rows may lie here
  const uint64_t ssd_bytes;            // of its log; 0: it has none
  const IndexKind index;               // of its buckets
  FairMutex writer;                    // held by whoever writes to this pool's buckets
  std::mutex upkeep;                   // held by who maintains it; taken before `writer`
  ByteBudget budget;                   // its share of the DDR budget
  SlabArena arena;
  HeldRows held;  // training: rows that eviction passes over
  // Kinds of pages that its rows may need: of a table whose rows lose chunks, one for each number
  // of them.
  uint32_t page_kinds = 0;
  uint64_t hold_bytes = 0;  // training: its share of StoreOptions::hold_bytes
  PagePool index_pages;     // of its buckets' arrays, and of:
  NodePool nodes;
  // Charged from the beginning, so that rows of a full pool can still be pruned, which needs a
  // page for the smaller ones before the larger ones leave theirs. Lent for that, and taken back
  // before anything else gets the room. 0 where rows go to an SSD instead, and in serving.
  uint64_t reserve_bytes = 0;
  bool reserve_lent = false;
  // Training: occurrences of keys that have no row; null: every key gets one at once.
  std::unique_ptr<FrequencySketch> new_keys;
  std::unique_ptr<BlockLog> ssd;    // null without an SSD budget
  std::unique_ptr<SsdNotes> notes;  // null: no table whose rows it may have is pruned
  std::vector<TierCount> in_ddr;    // by table
  std::vector<TierCount> in_ssd;    // by table
  std::vector<TableShare> shares;   // by table
  bool shared_out = false;          // some table has a share
  std::deque<Retired> retired;      // ascending epochs
  // Counts the places of rows in DDR that ended: until it changes, each row lies where it lay.
  // Begins with another number in each pool. Changed by the writer, after the index is.
  std::atomic<uint64_t> ended_places;
  std::map<uint64_t, VersionNode*> staged;  // version -> its nodes in this pool
  // Which rows leave DDR and which enter; null: the counts of the index and the clock hand, and a
  // row enters from the SSD once its count is `least_count`.
  std::unique_ptr<TierPolicy> policy;
  uint32_t least_count = 1;
  // Rows read from the SSD; with a policy, from DDR too. Appended to by readers, emptied by
  // Maintain. Those beyond `most_accesses` are dropped and counted.
  Mutex accesses_mutex;
  size_t most_accesses = 0;
  std::vector<Access> accesses EMBERTIDE_GUARDED_BY(accesses_mutex);
  std::vector<Access> replayed;  // those of Maintain's last turn: its memory is kept (`upkeep`)
  Hand clock;                    // of eviction: what it meets ages
  Hand packing;  // of moving rows out of pages; were it the clock's, rows would leave by chance
  Hand unshared_clock;  // of eviction among the rows of tables without a share
  // Bytes that compaction may read and write now, and when that was reckoned.
  double compaction_credit = 0;
  std::chrono::steady_clock::time_point compaction_at = std::chrono::steady_clock::now();

  // With room for rows of less than this share of the budget Maintain makes some ahead of need.
  static constexpr double kLowRoom = 0.03;
  // Bytes of the pages that no row takes; rows count as they are, not as their slots.
  uint64_t FreeSlotBytes() const;
  // Pages that rows may take beside what is kept ready for others.
  uint64_t SparePages() const;
  // Whether another row must leave for one that enters.
  bool Full() const;
  // Bytes of the budget that writers shall find free, for pages of any kind.
  uint64_t ReadyBytes() const;
  // Whether a table's share has room for so many bytes of rows more.
  bool ShareHolds(uint32_t table, uint64_t bytes) const;
  // Whether rows of a table may leave for want of room in the pool: those with a share stay while
  // there are others.
  bool GivesWay(uint32_t table) const;
  // Gives tables these shares, and the others none. Requires: the writer.
  void Share(const std::map<uint32_t, uint64_t>& bytes_of);
  // Bytes of pages that a whole row takes, with its part of what a page has left over.
  uint64_t PageBytesOf(uint32_t payload_bytes, uint32_t aux_bytes) const;
  // Bytes that held rows may take now (HeldRows::row_bytes): half of what is left for pages of
  // rows, less one page of each kind, so that the other rows and the index always find room.
  uint64_t MostHeldBytes() const;
  // False: there is none, or it is lent already.
  bool LendReserve();
  // As soon as there is room for it.
  void TakeReserveBack();
  uint64_t LogBytes() const { return 2 * most_accesses * sizeof(Access); }
  uint64_t PolicyBytes() const {
    return LogBytes() + (policy == nullptr ? 0 : policy->bytes()) +
           (new_keys == nullptr ? 0 : new_keys->bytes()) + held.bytes();
  }
};

// The state that training keeps beside a row of DDR.
inline RowAux* AuxOf(const RowPool& pool, Location place) {
  return reinterpret_cast<RowAux*>(pool.arena.Aux(place.slot()));
}

// The hold of a pool's writer, for who lets go of it while a drive works.
using WriterLock = std::unique_lock<FairMutex>;
// Does what takes long without the writer; with it where the lock is null, since the caller is in
// the middle of a row of its own.
template <typename Io>
void WithoutWriter(WriterLock* writer, const Io& io) {
  if (writer != nullptr) writer->unlock();
  io();
  if (writer != nullptr) writer->lock();
}

}  // namespace embertide
