// BlockLog: the SSD tier of one device. Rows packed into 4 KiB blocks, blocks into 1 MiB segments.
//
//   slot:   37          9 8          0       block: [u32 check][u16 bytes][u16 rows][entry]...
//           [ block      ][ offset/8 ]       entry: [u64 key][u32 table][u16 bytes][u16 zero]
//                                                   [payload, aux], padded to 8 bytes
//
// The index entry of an SSD row stays in DDR, so a miss costs one read of one block; an entry says
// whose it is, so a segment's live rows are found from its own blocks. The log holds what DDR had
// no room for; which rows of it a restart may still use, a seal says (store/seal_file.h).
//
// Invariants
//   1. An entry lies in one block. `check` is the CRC32C of the block after it, xor the segment's
//      salt: a number chosen each time a segment is taken into use, so that what it held before, or
//      for another process, is never taken for what it holds now.
//   2. Segments in use times 1 MiB never exceed the budget. The last free one is left to
//      compaction, which could free nothing without room to write.
//   3. A segment whose last live byte is freed is used again; nothing is written over before. If
//      the newest complete seal, or the one being written, names it, it waits for the next one.
//
// A file that refuses a write, as the disk is full, is left alone for a while: Take fails at once,
// and nothing is compacted, for 100 ms and then twice as long each time, up to 5 s.
//
// Threads: Read(), Write(), Scan() and Stats() on any thread beside one writer; Read for slots
// published to that thread and not yet freed. All else: one writer.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "embertide/status.h"
#include "ssd/bad_blocks.h"
#include "ssd/block_file.h"

namespace embertide {

inline constexpr uint32_t kSegmentBlocks = 256;
inline constexpr uint64_t kSegmentBytes = uint64_t{kSegmentBlocks} * kBlockBytes;
inline constexpr uint32_t kSsdOffsetBits = 9;
inline constexpr uint32_t kBlockHeaderBytes = 8;
inline constexpr uint32_t kEntryHeaderBytes = 16;
// The largest payload plus aux that an entry can hold.
inline constexpr uint32_t kMaxEntryBytes = kBlockBytes - kBlockHeaderBytes - kEntryHeaderBytes;

// A row to be written; `bytes` (payload, then aux) need only live until it is.
struct LogEntry {
  uint64_t key = 0;
  uint32_t table = 0;
  std::span<const std::byte> bytes;
};

// A row to be read.
struct LogRead {
  uint64_t slot = 0;
  uint64_t key = 0;
  uint32_t table = 0;
  uint32_t bytes = 0;       // of the entry, from its front
  std::byte* to = nullptr;  // where they are copied
};

// A row that a scan met, live or not; its entry's bytes are bytes[at], ... of the scan.
struct LogRow {
  uint64_t slot = 0;
  uint64_t key = 0;
  uint32_t table = 0;
  uint32_t bytes = 0;
  size_t at = 0;
};

// Blocks that follow one another.
struct LogRun {
  uint64_t first = 0;
  uint32_t blocks = 0;
  uint32_t salt = 0;  // of their segment
};

// Room that entries have taken: the slot of each, and the blocks that they lie in.
struct LogBatch {
  std::vector<uint64_t> slots;
  std::vector<LogRun> runs;  // of a segment each
};

// A segment, as far as a seal needs to know it to use it again.
struct SealedSegment {
  uint32_t number = 0;
  uint32_t salt = 0;
  // The first and the last of the blocks that the seal names. Blocks are written in ascending
  // order: where the first is what it was, nothing after it was written over.
  uint16_t first_block = 0;
  uint16_t last_block = 0;
  uint32_t written_blocks = 0;
  uint32_t entry_bytes = 0;
};

// Counters since the log was made.
struct LogStats {
  uint64_t blocks_read = 0;
  uint64_t bytes_written = 0;  // whole blocks, compaction's too
  uint64_t row_bytes = 0;      // of entries written for the first time: what the blocks were for
  uint64_t read_errors = 0;    // reads that the file refused
  uint64_t corrupt = 0;        // reads of a block that is not what was written
  uint64_t write_errors = 0;
};

class BlockLog {
 public:
  BlockLog(std::unique_ptr<BlockFile> file, uint64_t budget_bytes);

  // Writes all entries and appends their slots to `slots` (same order). All or nothing:
  // kResourceExhausted when the budget has no free segment, else the file's error. `moved`: they
  // are compaction's, which may use the last free segment.
  Status Append(std::span<const LogEntry> entries, std::vector<uint64_t>* slots,
                bool moved = false);
  // The same in three steps, of which the one that waits for the drive needs no writer. The first
  // gives the entries their slots, which count as live, and must not be read or freed before the
  // last.
  Result<LogBatch> Take(std::span<const LogEntry> entries, bool moved = false);
  // Why the last write failed; empty once one has gone well. Any thread.
  std::string failure() const;
  // Writes are not tried before a while has passed. Any thread.
  bool paused() const {
    return paused_until_.load(std::memory_order_relaxed) >
           std::chrono::steady_clock::now().time_since_epoch().count();
  }
  // After a write that failed, and the pause: tries one where nothing is yet, of what an eviction
  // writes. Else a disk that has room again would be taken for full until rows are to leave.
  void Probe();
  // Any thread. Requires: the batch that Take gave for the entries. The file's error.
  Status Write(std::span<const LogEntry> entries, const LogBatch& batch);
  // `written`: what Write said. If it is an error, the slots are given back, the blocks are dead.
  void Finish(std::span<const LogEntry> entries, const LogBatch& batch, const Status& written,
              bool moved = false);
  // Reads rows, each block once; sorts `reads` by slot. kCorrupt naming the block when its checksum
  // or an entry does not match, kDeviceError from the file; what is at `to` is then unspecified.
  Status Read(std::span<LogRead> reads) const;
  // Told of each segment that is free from then on, by whoever is the writer.
  void OnClose(std::function<void(uint32_t segment)> call) { on_close_ = std::move(call); }
  // Gives the entry's bytes back. Requires: no reader can still be at it.
  void Free(uint64_t slot, uint32_t bytes);
  // Until Unpin of the same slot nothing else comes to lie where its segment is, freed or not: for
  // who reads it without the writer. As often as it is called. Requires: the slot is live.
  void Pin(uint64_t slot) { ++segments_[SegmentOf(slot)].pins; }
  void Unpin(uint64_t slot);

  // The next blocks whose live rows are worth moving away: of the segment at hand, else of the one
  // with the most dead bytes, if they are at least `least_dead` of what was written to it. Until
  // Compacted the segment stays, so that Scan may read it without the writer. When the last live
  // row of a segment has moved and is freed, so is the segment. nullopt: there is none.
  std::optional<LogRun> NextToCompact(uint32_t blocks, double least_dead);
  // Ends what NextToCompact gave; unless its rows were `moved`, it is given again.
  void Compacted(const LogRun& run, bool moved);
  // Appends all rows of a run to `rows` and their bytes to `bytes`. Blocks that cannot be read, or
  // fail their checksum, are left out and counted: their rows fail when they are asked for.
  void Scan(const LogRun& run, std::vector<LogRow>* rows, std::vector<std::byte>* bytes) const;

  // --- seals
  // The seal being written names the row at `slot`. Requires: it is live.
  void Name(uint64_t slot);
  std::vector<SealedSegment> Named() const;
  // Whether a log can be opened from a seal that names so many segments: one must be free, or
  // compaction, which then has none to write to, never frees another. kResourceExhausted.
  Status CheckSealed(size_t segments) const;
  // As BlockFile::Sync.
  Status Sync() const { return file_->Sync(); }
  // The seal being written is complete: what it does not name is kept no longer.
  void CompleteSeal();
  // It is given up.
  void AbandonSeal();
  // Nothing is kept for any seal any more.
  void DropSeals();
  // Bytes of segments without a live byte, which wait for the next seal. Any thread.
  uint64_t kept_bytes() const { return kept_bytes_.load(std::memory_order_relaxed); }
  // Takes over what a complete seal names, its rows aside. Requires: a new log on a file that was
  // kept. kRejected: a segment lies beyond the budget; kCorrupt naming the block that is not what
  // was sealed, kDeviceError, what CheckSealed says: the log must then not be used.
  Status Reopen(std::span<const SealedSegment> segments);
  // A row of the seal is in use. False: there cannot be such a row.
  bool MarkLive(uint64_t slot, uint32_t bytes);

  static constexpr uint32_t kNoSegment = ~0U;
  static uint32_t SegmentOf(uint64_t slot) {
    return static_cast<uint32_t>((slot >> kSsdOffsetBits) / kSegmentBlocks);
  }

  size_t segments() const { return segments_.size(); }
  uint64_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }
  // DDR bytes of the segment table.
  uint64_t directory_bytes() const { return segments_.size() * sizeof(Segment); }
  const BlockFile& file() const { return *file_; }
  static uint64_t BlockOf(uint64_t slot) { return slot >> kSsdOffsetBits; }
  // Blocks that reads and scans found not to be what was written, and whose segment is still the
  // same.
  BadBlocks& bad_blocks() const { return bad_blocks_; }
  LogStats Stats() const;
  // Verifies that live bytes by segment are those of `rows` (slot, bytes), and invariant 2.
  Status CheckIntegrity(std::span<const std::pair<uint64_t, uint32_t>> rows) const;

 private:
  struct Segment {
    bool open = false;
    bool compacted = false;     // all its blocks were: what is still live is retired, or unreadable
    bool sealed = false;        // the newest complete seal names it
    bool named = false;         // so does the one being written: blocks from first to last
    uint16_t writing = 0;       // batches with room here that are not finished
    uint16_t compact_next = 0;  // the first block that compaction has not moved
    uint16_t first_block = 0;
    uint16_t last_block = 0;
    uint32_t pins = 0;  // runs of compaction that are not ended, and slots that are pinned
    uint32_t salt = 0;
    uint32_t written_blocks = 0;
    uint32_t entry_bytes = 0;  // of all entries written
    uint32_t live_bytes = 0;   // of those not freed
  };
  static uint32_t EntryBytes(size_t bytes) {
    return (kEntryHeaderBytes + static_cast<uint32_t>(bytes) + 7U) & ~7U;
  }
  // A segment without a live byte is free, or kept for a seal.
  void Close(uint32_t number);
  // If it has no live byte and no pin, and no more is to be written to it.
  void CloseIfEmpty(uint32_t number);
  // Frees the segments that only a seal kept.
  void CloseUnnamed();
  // Notes the block if it fails. Requires: a slot in the block is live, and was published to this
  // thread.
  Status CheckBlock(uint64_t number, const std::byte* block) const;
  // The segment with room for more blocks, or a free one.
  uint32_t OpenSegment(bool moved) const;
  void Release(std::span<const LogEntry> entries, const LogBatch& batch);
  void NoteWrite(const Status& written);

  std::unique_ptr<BlockFile> file_;
  std::function<void(uint32_t segment)> on_close_;
  std::vector<Segment> segments_;
  uint32_t current_ = kNoSegment;
  uint32_t compacting_ = kNoSegment;
  std::atomic<uint64_t> used_bytes_{0};
  std::atomic<uint64_t> kept_bytes_{0};
  mutable BadBlocks bad_blocks_;
  uint64_t next_salt_;  // by chance at first: no other process of this file has the same
  mutable std::mutex failure_mutex_;
  std::string failure_;                    // of the last write; under the mutex
  std::chrono::milliseconds back_off_{0};  // after it; the same
  std::atomic<bool> failed_{false};        // whether there is one
  std::atomic<int64_t> paused_until_{0};   // by the steady clock
  std::atomic<uint64_t> bytes_written_{0};
  std::atomic<uint64_t> row_bytes_{0};
  std::atomic<uint64_t> write_errors_{0};
  mutable std::atomic<uint64_t> blocks_read_{0};
  mutable std::atomic<uint64_t> read_errors_{0};
  mutable std::atomic<uint64_t> corrupt_{0};
};

}  // namespace embertide
