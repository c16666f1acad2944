// Store: the tables of one node or one trainer rank, over the tiers of its devices. It has two
// faces: ServingStore (serving_store.h), whose rows come as versions, and TrainingStore
// (training_store.h), whose rows are learned in place. This is what both can do.
//
//   key --HashKey--> bucket --> device (arena) --> index entry --> slot in a tier
//
// Versions. Every read goes through a ReadView, which pins one version. A row that a version of the
// window changed has a chain of (version, slot), newest first; one bit of its index entry says so,
// and a row not lately changed pays nothing. When a version leaves the window and no older pin
// lives, its chains fold into the entries.
//
// Threads. Readers (ReadView) take no lock and may be any number up to kMaxReaders. Writers, the
// calls of the faces, are serialised by the store, one at a time a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "embertide/status.h"
#include "embertide/store_options.h"
#include "embertide/store_reads.h"
#include "embertide/store_stats.h"

namespace embertide {

class Store {
 public:
  virtual ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  const StoreOptions& options() const;

  // Pins a committed version of the window. kVersionGone (the message names the range held) if it
  // left or is not there yet; kBusy if kMaxReaders views live.
  Result<ReadView> Pin(uint64_t version) const;
  // Pins the newest committed version (of a TrainingStore, the live state).
  Result<ReadView> PinNewest() const;

  // The first version at which a bucket is answered, and the device of its newest copy; nullopt if
  // it is not held. Any thread. Requires: table and bucket exist.
  std::optional<uint64_t> HeldSince(uint32_t table, uint32_t bucket) const;
  std::optional<uint32_t> DeviceOf(uint32_t table, uint32_t bucket) const;
  // Size of a bucket's newest copy; nullopt if it is not held. `payload_bytes` is what its rows
  // take with all their chunks, in whatever tier: an upper bound. Any thread; waits for nobody.
  // Requires: the view, which keeps the bucket's memory, reads nothing else meanwhile.
  struct BucketSize {
    uint64_t rows = 0;
    uint64_t index_bytes = 0;
    uint64_t payload_bytes = 0;
  };
  std::optional<BucketSize> BucketSizeOf(const ReadView& view, uint32_t table,
                                         uint32_t bucket) const;
  // The use that a table makes of a device's tiers: rows, also those that versions of the window
  // changed since, and the table's share of the tier's bytes, waste included. Any thread; waits for
  // nobody. Requires: table and device exist.
  struct Usage {
    uint64_t ddr_rows = 0;
    uint64_t ddr_bytes = 0;
    uint64_t ssd_rows = 0;
    uint64_t ssd_bytes = 0;
    // The DDR budget that the table has to itself or shares there: pages, index and all else.
    uint64_t budget_bytes = 0;
    uint64_t budget_used_bytes = 0;
    uint64_t ddr_row_bytes = 0;      // what a share of the table bounds
    uint64_t ddr_share_bytes = 0;    // 0: it has none
    uint64_t ddr_allowed_bytes = 0;  // more than the share while that is being emptied
  };
  Usage UsageOf(uint32_t table, uint32_t device) const;
  // Bytes that the rows of tables which share a device's DDR may take together now: the budget less
  // index, versions, policies and what is kept ready. 0: no tables share. Any thread.
  uint64_t RowRoom(uint32_t device) const;
  // Appends all rows of a bucket as records at the view's version, in ascending key order. No row
  // changes its tier. kNotOwner if it is not held at that version.
  Status ExportBucket(const ReadView& view, uint32_t table, uint32_t bucket,
                      std::vector<std::byte>* records) const;
  // Work for a background thread: promotes hot SSD rows, frees retired memory, compacts segments,
  // makes room in DDR and on the SSD before somebody needs it, makes full regions of memory huge
  // pages. Bounded, and holds up writers for less than a millisecond at a time; none waits for the
  // SSD. Safe beside readers and writers; of two calls at once, one passes over the device that the
  // other is at.
  void Maintain();
  // The same, of one device: for a thread at its NUMA node. The first also does what is of none.
  void Maintain(uint32_t device);
  // Verifies every invariant of the store: free + used = capacity, the index is injective on slots,
  // budgets hold, every entry is found by its key. kCorrupt naming the first that fails.
  // Requires: no concurrent writer.
  Status CheckIntegrity() const;
  StoreStats Stats() const;
  // The versions that can be pinned; 0: none yet. Two loads.
  struct Window {
    uint64_t oldest = 0;
    uint64_t newest = 0;
  };
  Window window() const;
  // Bytes of all budgets, DDR and SSD, that nothing uses.
  uint64_t FreeBytes() const;
  // Why rows cannot be written to the SSD; empty: they can.
  std::string SsdFailure() const;

  struct Impl;  // defined in backend_cpp/store/store_impl.h, for that folder alone

 protected:
  explicit Store(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;

 private:
  friend class ReadView;
  friend class BagReader;
};

}  // namespace embertide
