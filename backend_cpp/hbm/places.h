// HbmPlaces: which row stands in which way and slot of a device's cache, decided on the host.
//
// The device is told what was decided and answers lookups by itself; this is only asked when rows
// enter, change or leave. A slot that a row gave up may still be read by work under way: it waits
// under the epoch of that moment (store/reader_registry.h) until no reader of then is left.
//
// Invariants
//   1. Every way that is taken has a slot of its own; a page's slots are of one size class.
//   2. taken + waiting + free slots of a page = its slots; pages never exceed those given.
//   3. A way changes at most once in a batch, so the kernel that writes it needs no order.
//
// Who leaves: a row that ended before every pin first; else a clock of one bit, which the device
// sets when the row is asked for and a survey clears. A set whose rows were all asked for admits
// nobody. A row whose class has no slot makes another one of its set leave and comes in later; a
// class takes a page from the class with the most, while that has more than it has itself.
//
// Threads: the caller serialises.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "embertide/hbm.h"
#include "embertide/status.h"
#include "hbm/layout.h"

namespace embertide {

class HbmPlaces {
 public:
  static constexpr uint32_t kNoWay = ~0U;
  static constexpr uint32_t kPageUnits = kHbmPageBytes / kHbmSlotUnit;
  // Host bytes of a way, and the most of a slot: its owner and its place on the free list.
  static constexpr uint64_t kWayBytes = 24;
  static constexpr uint64_t kSlotBytes = 12;

  HbmPlaces(uint32_t sets, uint32_t pages);

  // The way where a row stands, ended or not; kNoWay if in none.
  uint32_t Find(uint32_t table, uint64_t key) const;
  // The version that ends the row; 0 if there is none.
  uint64_t EndOf(uint32_t table, uint64_t key) const;
  // The row ends with version `until`, if it is there and no earlier end is known: its way, or
  // kNoWay.
  uint32_t End(uint32_t table, uint64_t key, uint64_t until);

  // --- a batch of rows that enter
  // Slots given up under an epoch < `safe` are free again. Rows that had to leave for a page that
  // another class is short of are appended to `emptied`.
  void BeginBatch(uint64_t safe, std::vector<uint32_t>* emptied);
  enum class Answer : uint8_t {
    kPlaced,
    kThere,    // it is there and has not ended
    kInUse,    // every row of its set was asked for of late, or changed in this batch
    kDeferred  // its class has no slot; a way may have been emptied for a later batch
  };
  struct Place {
    Answer answer = Answer::kInUse;
    uint32_t way = 0;
    uint32_t slot = 0;
  };
  // A place for a row. `used`: its set's survey; `oldest`: no pin is below it.
  Place Put(uint32_t table, uint64_t key, uint32_t bytes, uint64_t until, uint32_t used,
            uint64_t oldest, std::vector<uint32_t>* emptied);
  // The device has been told: what was given up in this batch waits under `epoch`.
  void EndBatch(uint64_t epoch);

  uint64_t rows() const { return rows_; }
  HbmTableStats OfTable(uint32_t table) const {
    return table < by_table_.size() ? by_table_[table] : HbmTableStats();
  }
  uint64_t evictions() const { return evictions_; }
  // Bytes of pages that have a class.
  uint64_t page_bytes() const;
  // kCorrupt naming the first invariant that does not hold.
  Status CheckIntegrity() const;

 private:
  struct Way {
    uint64_t key = 0;
    uint64_t until = 0;  // 0: empty
    uint32_t slot = 0;
    uint16_t table = 0;
    uint16_t batch = 0;  // that changed it last
  };
  static_assert(sizeof(Way) == kWayBytes);
  struct Page {
    uint32_t units = 0;   // of a slot; 0: the page has no class
    uint32_t out = 0;     // slots taken or waiting
    bool listed = false;  // in empty_pages_
    std::vector<uint32_t> owners;
  };
  struct Waiting {
    uint64_t epoch;
    uint32_t slot;
  };
  static uint32_t UnitsOf(uint32_t bytes) {
    return bytes == 0 ? 1 : (bytes + kHbmSlotUnit - 1) / kHbmSlotUnit;
  }
  Page& PageOf(uint32_t slot) { return pages_[slot / kPageUnits]; }
  uint32_t UnitsAt(uint32_t slot) const { return pages_[slot / kPageUnits].units; }
  uint32_t* OwnerOf(uint32_t slot);
  std::optional<uint32_t> TakeSlot(uint32_t units);
  bool AddPage(uint32_t units);
  void FreeSlot(uint32_t slot);
  void ListEmptyPage(uint32_t number);
  // A row came to a way, or is about to leave it.
  void CountRow(const Way& way, bool comes);
  // The row in a way leaves.
  void Empty(uint32_t way);
  void TakePageFor(uint32_t units, std::vector<uint32_t>* emptied);
  // Lower leaves sooner; kStays: not in this batch.
  static constexpr uint32_t kStays = 9;
  uint32_t RankOf(uint32_t way, uint32_t used, uint64_t oldest) const;

  const uint32_t sets_;
  std::vector<Way> ways_;
  std::vector<Page> pages_;
  std::vector<uint32_t> free_pages_;   // without a class
  std::vector<uint32_t> empty_pages_;  // of a class, without a slot out when they were listed
  std::vector<std::vector<uint32_t>> free_slots_;  // by units
  std::vector<uint32_t> pages_of_;                 // by units
  std::vector<uint32_t> given_up_;                 // slots, in this batch
  std::deque<Waiting> waiting_;                    // ascending epochs
  uint32_t hand_ = 0;                              // ways of a set, in turn
  uint32_t page_hand_ = 0;
  uint32_t short_of_ = 0;  // units of a class that found no slot in the last batch; 0: none
  uint16_t batch_ = 0;
  uint64_t rows_ = 0;
  std::vector<HbmTableStats> by_table_;  // as many as had rows
  uint64_t evictions_ = 0;
};

}  // namespace embertide
