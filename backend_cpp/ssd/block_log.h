// BlockLog: the SSD tier of one device. Rows packed into 4 KiB blocks, blocks into 1 MiB segments.
//
//   slot:   37          9 8          0       block: [u32 crc32c][u16 bytes][u16 rows][entry]...
//           [ block      ][ offset/8 ]       entry: [u64 key][payload, aux], padded to 8 bytes
//
// The index entry of an SSD row stays in DDR, so a miss costs one read of one block. The log holds
// what DDR had no room for, not what a restart needs: after a restart a node reads its snapshot.
//
// Invariants
//   1. An entry lies in one block. The checksum covers the block after the checksum itself.
//   2. Segments in use times 1 MiB never exceed the budget.
//   3. A segment whose last live byte is freed is used again; nothing is written over before.
//
// Threads: Read() on any thread beside one writer, for slots published to that thread and not yet
// freed. All else: one writer.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "embertide/status.h"
#include "ssd/block_file.h"

namespace embertide {

inline constexpr uint32_t kSegmentBlocks = 256;
inline constexpr uint64_t kSegmentBytes = uint64_t{kSegmentBlocks} * kBlockBytes;
inline constexpr uint32_t kSsdOffsetBits = 9;
inline constexpr uint32_t kBlockHeaderBytes = 8;
inline constexpr uint32_t kEntryHeaderBytes = 8;
// The largest payload plus aux that an entry can hold.
inline constexpr uint32_t kMaxEntryBytes = kBlockBytes - kBlockHeaderBytes - kEntryHeaderBytes;

// A row to be written; `bytes` (payload, then aux) need only live until Append returns.
struct LogEntry {
  uint64_t key = 0;
  std::span<const std::byte> bytes;
};

// A row to be read; `row` is set to the entry's bytes inside `buffers` of Read.
struct LogRead {
  uint64_t slot = 0;
  uint64_t key = 0;
  uint32_t bytes = 0;
  const std::byte* row = nullptr;
};

// Aligned memory for the blocks of one batch; grows and is kept by its owner for the next batch.
class BlockBuffers {
 public:
  // Room for `blocks` blocks; earlier contents are lost.
  std::byte* Reserve(size_t blocks);

 private:
  std::unique_ptr<std::byte[]> memory_;
  size_t blocks_ = 0;
};

class BlockLog {
 public:
  BlockLog(std::unique_ptr<BlockFile> file, uint64_t budget_bytes);

  // Writes all entries and appends their slots to `slots` (same order). All or nothing:
  // kResourceExhausted when the budget has no free segment, else the file's error.
  Status Append(std::span<const LogEntry> entries, std::vector<uint64_t>* slots);
  // Reads the rows of `reads`, each block once. kCorrupt naming the block when a checksum or a key
  // does not match; kDeviceError from the file. Valid until `buffers` is used again.
  Status Read(std::span<LogRead> reads, BlockBuffers* buffers) const;
  // Gives the entry's bytes back. Requires: no reader can still be at it.
  void Free(uint64_t slot, uint32_t bytes);

  // The segment with the most dead bytes if over half of it is dead, else kNoSegment; its owner
  // moves the live rows away, which frees it.
  static constexpr uint32_t kNoSegment = ~0U;
  uint32_t SegmentToCompact() const;
  static uint32_t SegmentOf(uint64_t slot) {
    return static_cast<uint32_t>((slot >> kSsdOffsetBits) / kSegmentBlocks);
  }

  uint64_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }
  // DDR bytes of the segment table.
  uint64_t directory_bytes() const { return segments_.size() * sizeof(Segment); }
  const char* engine() const { return file_->engine(); }
  // Verifies that live bytes by segment are those of `rows` (slot, bytes), and invariant 2.
  Status CheckIntegrity(std::span<const std::pair<uint64_t, uint32_t>> rows) const;

 private:
  struct Segment {
    bool open = false;
    uint32_t written_blocks = 0;
    uint32_t live_bytes = 0;
  };
  static uint32_t EntryBytes(size_t bytes) {
    return (kEntryHeaderBytes + static_cast<uint32_t>(bytes) + 7U) & ~7U;
  }
  // Blocks that can still be written without a new segment, and from where.
  uint32_t OpenSegment();

  std::unique_ptr<BlockFile> file_;
  std::vector<Segment> segments_;
  uint32_t current_ = kNoSegment;
  std::atomic<uint64_t> used_bytes_{0};
  BlockBuffers write_buffer_;
};

}  // namespace embertide
