// StoreStats: where answers came from, what a store's tiers did, what it refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "embertide/hbm.h"

namespace embertide {

// Where the answer for a key came from. Stored in the SOURCE output: do not renumber.
enum class Source : uint8_t {
  kHbm = 0,
  kDdr = 1,
  kSsd = 2,
  kRemote = 3,
  kDefault = 4,
  kPruned = 5,
  kUnanswered = 6,  // the default row, as no owner of the key answered: it may well have a row
  kHot = 7          // a row of another node's bucket, of which a copy is kept here
};
inline constexpr size_t kSources = 8;
// "hbm", "ddr", "ssd", "remote", "default", "pruned", "unanswered" or "hot".
const char* SourceName(Source source);

// The work of the SSD tier since Open, over all devices.
struct SsdStats {
  const char* engine = "";  // that reads it; "": there is no SSD tier
  bool direct = false;      // past the page cache; false: the file system refuses O_DIRECT
  uint64_t blocks_read = 0;
  uint64_t bytes_written = 0;    // whole blocks; over row_bytes it is the write amplification
  uint64_t row_bytes = 0;        // of rows that came from DDR, aux included
  uint64_t compacted_bytes = 0;  // read and written by compaction
  uint64_t compacted_rows = 0;
  uint64_t compactions_forced = 0;  // for want of room, whatever the budget of bytes a second
  uint64_t read_errors = 0;         // batches that the drive failed
  uint64_t corrupt = 0;             // batches with a block that is not what was written
  uint64_t write_errors = 0;
  uint64_t bad_blocks = 0;          // noted as not what was written
  uint64_t bad_blocks_dropped = 0;  // times that one was not noted: too many are
  uint64_t mended_rows = 0;         // of such blocks, given their bytes again
};

// Seals since Open.
struct SealStats {
  uint64_t written = 0;
  uint64_t failed = 0;      // not written to the end, those given up among them
  uint64_t dropped = 0;     // that rows needed the room of: there is none until the next is written
  uint64_t bytes = 0;       // of files of rows
  double seconds = 0;       // spent on all of them, waits for the budget of bytes a second included
  uint64_t version = 0;     // of the newest that is complete; 0: there is none
  uint64_t kept_bytes = 0;  // of segments that hold no row and wait for the next seal
};

// Counters since Open, and sizes now. Bytes include every index, chain and allocator overhead.
struct StoreStats {
  uint64_t rows = 0;
  uint64_t ddr_payload_bytes = 0;  // whole slab pages in use
  // Index arrays, page directory, version chains, notes of rows on the SSD that pruning keeps.
  uint64_t index_bytes = 0;
  uint64_t huge_bytes = 0;  // of pages and index arrays, what lies in huge pages by now
  uint64_t ssd_bytes = 0;   // segments in use
  SsdStats ssd;
  SealStats seal;
  uint64_t ddr_budget_bytes = 0;
  uint64_t hits[kSources] = {};  // keys looked up, by Source
  uint64_t evictions_to_ssd = 0;
  uint64_t evictions_by_writers = 0;  // of these, rows for whose room a writer had to wait
  uint64_t promotions = 0;
  uint64_t refused_promotions = 0;        // rows read from the SSD that DDR's policy did not let in
  uint64_t refused_rows = 0;              // staged rows that no tier had room for
  uint64_t reader_waits_given_up = 0;     // by writers that needed room: see reader_wait_ms
  std::vector<HbmDeviceStats> hbm;        // by device; empty: there is no HBM tier
  std::vector<HbmTableStats> hbm_tables;  // by table; empty as well
  uint64_t hbm_dropped_misses = 0;        // that the choice of rows was to hear of and did not
  uint64_t hbm_fallbacks = 0;  // lookups answered without it, as they did not fit or it has failed
  bool hbm_failed = false;     // a device failed; the tier is not used any more
  // Reads that the policies of DDR were to hear of and did not, rows to be promoted among them.
  uint64_t dropped_accesses = 0;
  uint64_t new_keys_waiting = 0;  // occurrences of keys that were no reason for a row yet
  // Counts of training calls, a key a call: gradients of keys that wait for a row; gradients that
  // are not finite, or whose squares are not; gradients that were clipped; keys whose row could be
  // neither made nor brought to DDR.
  uint64_t dropped_gradients = 0;
  uint64_t refused_gradients = 0;
  uint64_t clipped_gradients = 0;
  uint64_t failed_keys = 0;
  // Rows that a training step had to read from the SSD, since nobody had brought them; and rows
  // that were removed, as by pruning, while they were held.
  uint64_t step_reads = 0;
  uint64_t held_rows_removed = 0;
  // Keys of training steps that were told where rows lie, as often as they occur: taken so, those
  // without a row among them; looked for again, for rows had moved since.
  uint64_t placed_keys = 0;
  uint64_t stale_places = 0;
  // Occurrences in a batch of keys without a row, in prune groups: those that were not worth a row,
  // and those that were, but it had no room beside the others.
  uint64_t unworthy_keys = 0;
  uint64_t worthy_keys_without_room = 0;
  // Bytes of the DDR budget that policies, their logs and notes of held rows take.
  uint64_t policy_bytes = 0;
  uint64_t oldest_version = 0;  // of the window; 0 before the first commit
  uint64_t newest_version = 0;
};

}  // namespace embertide
