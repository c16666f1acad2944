// BlockLog: see the header for the layout and the invariants.
#include "ssd/block_log.h"

#include <algorithm>
#include <cstring>

#include "embertide/checksum.h"

namespace embertide {
namespace {

uint32_t BlockCrc(const std::byte* block) { return Crc32c({block + 4, kBlockBytes - 4}); }

}  // namespace

std::byte* BlockBuffers::Reserve(size_t blocks) {
  // One block more than asked, so that the start can be aligned.
  if (blocks > blocks_) {
    memory_.reset(new std::byte[(blocks + 1) * kBlockBytes]);
    blocks_ = blocks;
  }
  const auto address = reinterpret_cast<uintptr_t>(memory_.get());
  return memory_.get() + (kBlockBytes - address % kBlockBytes) % kBlockBytes;
}

BlockLog::BlockLog(std::unique_ptr<BlockFile> file, uint64_t budget_bytes)
    : file_(std::move(file)), segments_(budget_bytes / kSegmentBytes) {}

uint32_t BlockLog::OpenSegment() {
  if (current_ != kNoSegment && segments_[current_].written_blocks < kSegmentBlocks) {
    return current_;
  }
  for (uint32_t s = 0; s < segments_.size(); ++s) {
    if (!segments_[s].open) return s;
  }
  return kNoSegment;
}

Status BlockLog::Append(std::span<const LogEntry> entries, std::vector<uint64_t>* slots) {
  size_t done = 0;
  const size_t slots_before = slots->size();
  while (done < entries.size()) {
    const uint32_t number = OpenSegment();
    if (number == kNoSegment) {
      size_t undo = slots_before;
      for (size_t e = 0; e < done; ++e, ++undo) {
        Free((*slots)[undo], static_cast<uint32_t>(entries[e].bytes.size()));
      }
      slots->resize(slots_before);
      return {Code::kResourceExhausted, "the SSD budget of " +
                                            std::to_string(segments_.size() * kSegmentBytes) +
                                            " bytes has no free segment"};
    }
    Segment& segment = segments_[number];
    const uint32_t room = kSegmentBlocks - segment.written_blocks;
    std::byte* buffer = write_buffer_.Reserve(room);
    uint32_t blocks = 0;
    uint32_t live = 0;
    while (blocks < room && done < entries.size()) {
      std::byte* block = buffer + size_t{blocks} * kBlockBytes;
      std::memset(block, 0, kBlockBytes);
      uint32_t at = kBlockHeaderBytes;
      uint16_t rows = 0;
      const uint64_t block_number =
          uint64_t{number} * kSegmentBlocks + segment.written_blocks + blocks;
      for (; done < entries.size(); ++done, ++rows) {
        const LogEntry& entry = entries[done];
        const uint32_t need = EntryBytes(entry.bytes.size());
        EMBERTIDE_CHECK(entry.bytes.size() <= kMaxEntryBytes);
        if (at + need > kBlockBytes) break;
        std::memcpy(block + at, &entry.key, 8);
        std::memcpy(block + at + kEntryHeaderBytes, entry.bytes.data(), entry.bytes.size());
        slots->push_back((block_number << kSsdOffsetBits) | (at / 8));
        at += need;
        live += need;
      }
      const auto used = static_cast<uint16_t>(at);
      std::memcpy(block + 4, &used, 2);
      std::memcpy(block + 6, &rows, 2);
      const uint32_t crc = BlockCrc(block);
      std::memcpy(block, &crc, 4);
      ++blocks;
    }
    const uint64_t first = uint64_t{number} * kSegmentBlocks + segment.written_blocks;
    const Status written = file_->Write(first, {buffer, size_t{blocks} * kBlockBytes});
    if (!segment.open) {
      segment.open = true;
      used_bytes_.fetch_add(kSegmentBytes, std::memory_order_relaxed);
    }
    current_ = number;
    segment.written_blocks += blocks;
    segment.live_bytes += live;
    if (!written.ok()) {
      // The blocks count as written and dead; compaction takes the segment back.
      for (size_t e = 0; e < done; ++e) {
        Free((*slots)[slots_before + e], static_cast<uint32_t>(entries[e].bytes.size()));
      }
      slots->resize(slots_before);
      return written;
    }
  }
  return Status::Ok();
}

Status BlockLog::Read(std::span<LogRead> reads, BlockBuffers* buffers) const {
  std::vector<BlockRead> blocks;
  blocks.reserve(reads.size());
  for (const LogRead& read : reads) blocks.push_back({read.slot >> kSsdOffsetBits, nullptr});
  const auto by_block = [](const BlockRead& a, const BlockRead& b) { return a.block < b.block; };
  std::sort(blocks.begin(), blocks.end(), by_block);
  blocks.erase(
      std::unique(blocks.begin(), blocks.end(),
                  [](const BlockRead& a, const BlockRead& b) { return a.block == b.block; }),
      blocks.end());
  std::byte* memory = buffers->Reserve(blocks.size());
  for (size_t b = 0; b < blocks.size(); ++b) blocks[b].buffer = memory + b * kBlockBytes;
  EMBERTIDE_RETURN_IF_ERROR(file_->Read(blocks));
  for (const BlockRead& block : blocks) {
    uint32_t crc;
    std::memcpy(&crc, block.buffer, 4);
    if (crc != BlockCrc(block.buffer)) {
      return {Code::kCorrupt, "SSD block " + std::to_string(block.block) + " fails its checksum"};
    }
  }
  for (LogRead& read : reads) {
    const uint64_t number = read.slot >> kSsdOffsetBits;
    const auto block =
        std::lower_bound(blocks.begin(), blocks.end(), BlockRead{number, nullptr}, by_block);
    const uint32_t at = (read.slot & ((1U << kSsdOffsetBits) - 1U)) * 8;
    uint64_t key;
    std::memcpy(&key, block->buffer + at, 8);
    if (key != read.key || at + EntryBytes(read.bytes) > kBlockBytes) {
      return {Code::kCorrupt, "SSD block " + std::to_string(number) + " holds key " +
                                  std::to_string(key) + " where " + std::to_string(read.key) +
                                  " was written"};
    }
    read.row = block->buffer + at + kEntryHeaderBytes;
  }
  return Status::Ok();
}

void BlockLog::Free(uint64_t slot, uint32_t bytes) {
  const uint32_t number = SegmentOf(slot);
  Segment& segment = segments_[number];
  EMBERTIDE_CHECK(segment.live_bytes >= EntryBytes(bytes));
  segment.live_bytes -= EntryBytes(bytes);
  if (segment.live_bytes == 0 && (number != current_ || segment.written_blocks == kSegmentBlocks)) {
    segment = Segment{};
    if (number == current_) current_ = kNoSegment;
    used_bytes_.fetch_sub(kSegmentBytes, std::memory_order_relaxed);
  }
}

uint32_t BlockLog::SegmentToCompact() const {
  uint32_t best = kNoSegment;
  uint64_t best_live = kSegmentBytes / 2;
  for (uint32_t s = 0; s < segments_.size(); ++s) {
    if (!segments_[s].open || s == current_) continue;
    if (segments_[s].live_bytes < best_live) {
      best = s;
      best_live = segments_[s].live_bytes;
    }
  }
  return best;
}

Status BlockLog::CheckIntegrity(std::span<const std::pair<uint64_t, uint32_t>> rows) const {
  std::vector<uint64_t> live(segments_.size(), 0);
  for (const auto& [slot, bytes] : rows) {
    const uint32_t segment = SegmentOf(slot);
    if (segment >= segments_.size() || !segments_[segment].open) {
      return {Code::kCorrupt, "an SSD slot lies in closed segment " + std::to_string(segment)};
    }
    live[segment] += EntryBytes(bytes);
  }
  uint64_t used = 0;
  for (size_t s = 0; s < segments_.size(); ++s) {
    if (segments_[s].open) used += kSegmentBytes;
    if (live[s] != segments_[s].live_bytes) {
      return {Code::kCorrupt, "SSD segment " + std::to_string(s) + " counts " +
                                  std::to_string(segments_[s].live_bytes) + " live bytes, has " +
                                  std::to_string(live[s])};
    }
  }
  if (used != used_bytes()) return {Code::kCorrupt, "SSD segments in use do not add up"};
  return Status::Ok();
}

}  // namespace embertide
