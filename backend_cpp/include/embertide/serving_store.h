// ServingStore: a store whose rows come as versions; staged, committed, moved and sealed.
//
// Threads. Writers (StageRecords, Commit, AddBucket and so on) are serialised by the store, one at
// a time a device, beside any readers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "embertide/seal.h"
#include "embertide/store.h"

namespace embertide {

// A block of the SSD tier that is not what was written.
struct BadBlock {
  std::string file;
  uint64_t offset = 0;  // in the file
  struct Row {
    uint32_t table = 0;  // index into StoreOptions::tables
    uint32_t bucket = 0;
    uint64_t key = 0;
  };
  std::vector<Row> rows;  // of the newest version, that lie in it; not empty
};

class ServingStore : public Store {
 public:
  // kInvalidArgument naming the option; kDeviceError if the SSD directory cannot be used, or memory
  // not be bound. With open_seal also kNotFound: there is none; kRejected, naming both values: it
  // is of other tables or budgets; kCorrupt: it is not what was written, or the log is not what it
  // names; kResourceExhausted: its rows do not fit.
  static Result<std::unique_ptr<ServingStore>> Open(StoreOptions options);

  // Applies records of one bucket for a version not yet committed; invisible until Commit.
  // Staging the same records again changes nothing. Before the first Commit, rows go straight into
  // the base. kCorrupt: the bytes are no records of this table or a key is not of this bucket;
  // kResourceExhausted: the budgets are full (counted; DropStaged, for a part of them is staged).
  Status StageRecords(uint64_t version, uint32_t table, uint32_t bucket,
                      std::span<const std::byte> records);
  // Forgets what is staged and not committed, as if it had not been. Before the first Commit there
  // is no such thing.
  void DropStaged();
  // From now on, or no longer, much is staged or added at once and nobody reads: memory comes in
  // huge pages, each of which a writer waits for. To be ended before the first reader.
  void FillAtOnce(bool fill);
  // Makes `version` the newest. Requires: > newest_version. Folds versions that left the window.
  Status Commit(uint64_t version);
  // Holds a bucket from now on, on a device, with these records as its rows at the newest version;
  // it answers that version and later ones. A bucket that is held on another device moves: pins
  // below are answered by the copy there until none is left (see Forget). Requires: the caller is
  // who stages and commits. kRejected: it is on that device already; kBusy: its last move is not
  // over (a version must leave the window first); kCorrupt, kResourceExhausted as StageRecords, or
  // less than `leave_bytes` of the device's DDR budget would be left (nothing is changed then).
  // With an SSD tier, which makes room, `leave_bytes` is not looked at.
  Status AddBucket(uint32_t table, uint32_t bucket, uint32_t device,
                   std::span<const std::byte> records, uint64_t leave_bytes = 0);
  // The least version below which nothing must be pinned any more for all copies that a move left
  // behind to be freed; 0: there is none. Any thread.
  uint64_t SupersededUntil() const;
  // Versions below `version` leave the window, whatever their count, and what they alone need is
  // freed once no pin is left there; to be called again while SupersededUntil says so. The newest
  // version stays. Requires: as AddBucket.
  void Forget(uint64_t version);
  // Holds a bucket no longer; reads in flight end well, later ones get kNotOwner. Ok if it was not
  // held. Requires: as AddBucket.
  Status DropBucket(uint32_t table, uint32_t bucket);
  // Gives tables shares of the DDR budgets, in place of all that were given before; a table that is
  // not named has none, and takes what the others leave. The rows of a table with a share never
  // take more than it. They leave DDR only for other rows of the table, or when the device lacks
  // room that no other table can give. A share that is lowered below what the rows take is emptied
  // by Maintain, in batches; until then the rows take no more than they did. Answers do not change.
  // Any thread, beside readers and writers.
  // kInvalidArgument, and nothing is changed: no such table or device; fewer bytes than
  // kMinDdrShareBytes; the shares of a device exceed its budget; a table stands twice; rows of a
  // table cannot leave DDR, for want of an SSD tier.
  Status SetDdrShares(std::span<const DdrShare> shares);
  // Seals the SSD tier: what of it can be used after a kill (docs/design/0006-seals.md). Blocks for
  // as long as it takes; readers never wait for it, writers for a slice of a millisecond or so at a
  // time. One at a time; safe beside everything else. kRejected: nothing is committed, the versions
  // have no name, or it was given up; kDeviceError from the files. Requires: an SSD tier.
  Status Seal(const SealOptions& options);
  // The blocks that reads found bad since Open and in which rows of the newest version still lie,
  // at most 256 a device and table budget. Costs a pass over the index if there are any; holds up
  // writers for a bucket at a time. Any thread.
  std::vector<BadBlock> FindBadBlocks();
  // Gives the rows of a bucket that the view's version has in bad blocks their bytes again, in DDR,
  // out of `records`: the bucket's, as they are at that version. Rows that left those blocks
  // meanwhile stay as they are. Any thread, beside readers and writers. kNotOwner: the bucket is
  // not held at that version; kNotFound, kCorrupt naming a key whose row `records` lacks, or has
  // with other live chunks; kResourceExhausted as StageRecords; the rows before it are mended.
  Status Mend(const ReadView& view, uint32_t table, uint32_t bucket,
              std::span<const std::byte> records);

 private:
  explicit ServingStore(std::unique_ptr<Impl> impl);
};

}  // namespace embertide
