// BlockLog: see the header for the layout and the invariants.
#include "ssd/block_log.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <random>

#include "embertide/checksum.h"
#include "embertide/hash.h"

namespace embertide {
namespace {

constexpr std::chrono::milliseconds kFirstPause{100};
constexpr std::chrono::milliseconds kLongestPause{5000};
constexpr uint32_t kProbeBlocks = 64;

struct BlockHeader {
  uint32_t check;
  uint16_t bytes;
  uint16_t rows;
};
static_assert(sizeof(BlockHeader) == kBlockHeaderBytes);

struct EntryHeader {
  uint64_t key;
  uint32_t table;
  uint16_t bytes;
  uint16_t zero;
};
static_assert(sizeof(EntryHeader) == kEntryHeaderBytes);

template <typename T>
T Load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <typename T>
void Save(const T& value, std::byte* to) {
  std::memcpy(to, &value, sizeof(value));
}

uint32_t BlockCrc(const std::byte* block) { return Crc32c({block + 4, kBlockBytes - 4}); }

// Copies what was asked of a block that passed its checksum.
Status CopyEntry(const LogRead& read, const std::byte* block) {
  const uint32_t at = (read.slot & ((1U << kSsdOffsetBits) - 1U)) * 8;
  EntryHeader entry{};
  if (at + kEntryHeaderBytes <= kBlockBytes) entry = Load<EntryHeader>(block + at);
  if (entry.key != read.key || entry.table != read.table || entry.bytes < read.bytes ||
      at + kEntryHeaderBytes + read.bytes > kBlockBytes) {
    return {Code::kCorrupt, "SSD block " + std::to_string(BlockLog::BlockOf(read.slot)) +
                                " does not hold key " + std::to_string(read.key) + " of table " +
                                std::to_string(read.table) + " where it was written"};
  }
  std::copy_n(block + at + kEntryHeaderBytes, read.bytes, read.to);
  return Status::Ok();
}

}  // namespace

BlockLog::BlockLog(std::unique_ptr<BlockFile> file, uint64_t budget_bytes)
    : file_(std::move(file)), segments_(budget_bytes / kSegmentBytes) {
  std::random_device chance;
  next_salt_ = (uint64_t{chance()} << 32) | chance();
}

Status BlockLog::CheckBlock(uint64_t number, const std::byte* block) const {
  const uint32_t salt = segments_[number / kSegmentBlocks].salt;
  if (Load<BlockHeader>(block).check == (BlockCrc(block) ^ salt)) return Status::Ok();
  bad_blocks_.Note(number);
  return {Code::kCorrupt, "SSD block " + std::to_string(number) + " fails its checksum"};
}

uint32_t BlockLog::OpenSegment(bool moved) const {
  if (current_ != kNoSegment && segments_[current_].written_blocks < kSegmentBlocks) {
    return current_;
  }
  const uint64_t free = segments_.size() - used_bytes() / kSegmentBytes;
  if (free < (moved ? 1 : 2)) return kNoSegment;
  for (uint32_t s = 0; s < segments_.size(); ++s) {
    if (!segments_[s].open) return s;
  }
  return kNoSegment;
}

Result<LogBatch> BlockLog::Take(std::span<const LogEntry> entries, bool moved) {
  LogBatch batch;
  if (paused()) return Status(Code::kDeviceError, failure());
  batch.slots.reserve(entries.size());
  while (batch.slots.size() < entries.size()) {
    const uint32_t number = OpenSegment(moved);
    if (number == kNoSegment) {
      Release(entries, batch);
      return Status(Code::kResourceExhausted, "the SSD budget of " +
                                                  std::to_string(segments_.size() * kSegmentBytes) +
                                                  " bytes has no free segment");
    }
    Segment& segment = segments_[number];
    if (!segment.open) {
      segment.open = true;
      segment.salt = static_cast<uint32_t>(HashKey(next_salt_++));
      used_bytes_.fetch_add(kSegmentBytes, std::memory_order_relaxed);
    }
    current_ = number;
    ++segment.writing;
    batch.runs.push_back(
        {uint64_t{number} * kSegmentBlocks + segment.written_blocks, 0, segment.salt});
    LogRun& run = batch.runs.back();
    for (uint32_t at = kBlockBytes; batch.slots.size() < entries.size();) {
      const size_t bytes = entries[batch.slots.size()].bytes.size();
      EMBERTIDE_CHECK(bytes <= kMaxEntryBytes);
      if (at + EntryBytes(bytes) > kBlockBytes) {
        if (segment.written_blocks == kSegmentBlocks) break;
        ++segment.written_blocks;
        ++run.blocks;
        at = kBlockHeaderBytes;
      }
      batch.slots.push_back(((run.first + run.blocks - 1) << kSsdOffsetBits) | (at / 8));
      at += EntryBytes(bytes);
      segment.entry_bytes += EntryBytes(bytes);
      segment.live_bytes += EntryBytes(bytes);
    }
  }
  return batch;
}

Status BlockLog::Write(std::span<const LogEntry> entries, const LogBatch& batch) {
  BlockBuffers buffers;
  size_t e = 0;
  for (const LogRun& run : batch.runs) {
    const size_t bytes = size_t{run.blocks} * kBlockBytes;
    std::byte* buffer = buffers.Reserve(run.blocks);
    std::memset(buffer, 0, bytes);
    for (uint32_t b = 0; b < run.blocks; ++b) {
      std::byte* block = buffer + size_t{b} * kBlockBytes;
      BlockHeader header{0, kBlockHeaderBytes, 0};
      for (; e < entries.size() && BlockOf(batch.slots[e]) == run.first + b; ++e, ++header.rows) {
        const LogEntry& entry = entries[e];
        std::byte* to = block + header.bytes;
        Save(EntryHeader{entry.key, entry.table, static_cast<uint16_t>(entry.bytes.size()), 0}, to);
        std::copy(entry.bytes.begin(), entry.bytes.end(), to + kEntryHeaderBytes);
        header.bytes = static_cast<uint16_t>(header.bytes + EntryBytes(entry.bytes.size()));
      }
      Save(header, block);
      header.check = BlockCrc(block) ^ run.salt;
      Save(header, block);
    }
    const Status written = file_->Write(run.first, {buffer, bytes});
    NoteWrite(written);
    if (!written.ok()) return written;
    bytes_written_.fetch_add(bytes, std::memory_order_relaxed);
  }
  return Status::Ok();
}

void BlockLog::NoteWrite(const Status& written) {
  if (written.ok() && !failed_.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(failure_mutex_);
  failed_ = !written.ok();
  if (written.ok()) {
    failure_.clear();
    back_off_ = {};
    paused_until_ = 0;
    return;
  }
  write_errors_.fetch_add(1, std::memory_order_relaxed);
  failure_ = written.message();
  back_off_ = std::clamp(2 * back_off_, kFirstPause, kLongestPause);
  paused_until_ = (std::chrono::steady_clock::now() + back_off_).time_since_epoch().count();
}

void BlockLog::Probe() {
  if (!failed_.load(std::memory_order_relaxed) || paused()) return;
  const uint32_t number = OpenSegment(/*moved=*/true);
  if (number == kNoSegment) return NoteWrite(Status::Ok());  // nothing could be written anyway
  const uint32_t first = segments_[number].written_blocks;
  const uint32_t blocks = std::min(kProbeBlocks, kSegmentBlocks - first);
  BlockBuffers buffers;
  std::byte* const zeros = buffers.Reserve(blocks);
  std::memset(zeros, 0, size_t{blocks} * kBlockBytes);
  NoteWrite(file_->Write(uint64_t{number} * kSegmentBlocks + first,
                         {zeros, size_t{blocks} * kBlockBytes}));
}

std::string BlockLog::failure() const {
  if (!failed_.load(std::memory_order_relaxed)) return "";
  const std::lock_guard lock(failure_mutex_);
  return failure_;
}

void BlockLog::Finish(std::span<const LogEntry> entries, const LogBatch& batch,
                      const Status& written, bool moved) {
  if (!written.ok()) return Release(entries, batch);
  for (const LogRun& run : batch.runs) --segments_[run.first / kSegmentBlocks].writing;
  if (moved) return;
  uint64_t row_bytes = 0;
  for (const LogEntry& entry : entries) row_bytes += entry.bytes.size();
  row_bytes_.fetch_add(row_bytes, std::memory_order_relaxed);
}

// Blocks at the end of what a segment has are given to the next batch: a scan of those that nobody
// wrote would fail.
void BlockLog::Release(std::span<const LogEntry> entries, const LogBatch& batch) {
  size_t last = batch.slots.size();
  for (auto run = batch.runs.rbegin(); run != batch.runs.rend(); ++run) {
    Segment& segment = segments_[run->first / kSegmentBlocks];
    --segment.writing;
    const bool at_end = run->first % kSegmentBlocks + run->blocks == segment.written_blocks;
    if (at_end) segment.written_blocks -= run->blocks;
    for (; last > 0 && BlockOf(batch.slots[last - 1]) >= run->first; --last) {
      if (BlockOf(batch.slots[last - 1]) >= run->first + run->blocks) break;
      if (!at_end) continue;
      segment.entry_bytes -= EntryBytes(entries[last - 1].bytes.size());
    }
  }
  for (size_t s = 0; s < batch.slots.size(); ++s) {
    Free(batch.slots[s], static_cast<uint32_t>(entries[s].bytes.size()));
  }
}

Status BlockLog::Append(std::span<const LogEntry> entries, std::vector<uint64_t>* slots,
                        bool moved) {
  const Result<LogBatch> batch = Take(entries, moved);
  if (!batch.ok()) return batch.status();
  const Status written = Write(entries, batch.value());
  Finish(entries, batch.value(), written, moved);
  const std::vector<uint64_t>& taken = batch.value().slots;
  if (written.ok()) slots->insert(slots->end(), taken.begin(), taken.end());
  return written;
}

Status BlockLog::Read(std::span<LogRead> reads) const {
  std::sort(reads.begin(), reads.end(),
            [](const LogRead& a, const LogRead& b) { return a.slot < b.slot; });
  std::vector<uint64_t> blocks;
  std::vector<size_t> first;  // by block, and one past the last: its first read
  for (size_t r = 0; r < reads.size(); ++r) {
    if (!blocks.empty() && blocks.back() == BlockOf(reads[r].slot)) continue;
    blocks.push_back(BlockOf(reads[r].slot));
    first.push_back(r);
  }
  first.push_back(reads.size());
  const Status status = file_->Read(blocks, [&](size_t b, const std::byte* block) {
    EMBERTIDE_RETURN_IF_ERROR(CheckBlock(blocks[b], block));
    for (const LogRead& read : reads.subspan(first[b], first[b + 1] - first[b])) {
      Status copied = CopyEntry(read, block);
      if (copied.ok()) continue;
      bad_blocks_.Note(blocks[b]);
      return copied;
    }
    return Status::Ok();
  });
  blocks_read_.fetch_add(blocks.size(), std::memory_order_relaxed);
  if (!status.ok()) {
    (status.code() == Code::kCorrupt ? corrupt_ : read_errors_)
        .fetch_add(1, std::memory_order_relaxed);
  }
  return status;
}

void BlockLog::Free(uint64_t slot, uint32_t bytes) {
  const uint32_t number = SegmentOf(slot);
  Segment& segment = segments_[number];
  EMBERTIDE_CHECK(segment.live_bytes >= EntryBytes(bytes));
  segment.live_bytes -= EntryBytes(bytes);
  CloseIfEmpty(number);
}

void BlockLog::Unpin(uint64_t slot) {
  const uint32_t number = SegmentOf(slot);
  EMBERTIDE_CHECK(segments_[number].pins > 0);
  --segments_[number].pins;
  CloseIfEmpty(number);
}

void BlockLog::CloseIfEmpty(uint32_t number) {
  const Segment& segment = segments_[number];
  if (segment.live_bytes > 0 || segment.pins > 0) return;
  if (number == current_) {
    if (segment.written_blocks < kSegmentBlocks) return;
    current_ = kNoSegment;
  }
  Close(number);
}

void BlockLog::Close(uint32_t number) {
  Segment& segment = segments_[number];
  if (number == compacting_) compacting_ = kNoSegment;
  if (segment.sealed || segment.named) {
    kept_bytes_.fetch_add(kSegmentBytes, std::memory_order_relaxed);
    return;
  }
  segment = Segment{};
  if (on_close_) on_close_(number);
  // No read is at it any more: what comes to lie here is not noted before.
  const uint64_t begin = uint64_t{number} * kSegmentBlocks;
  bad_blocks_.Forget(begin, begin + kSegmentBlocks);
  used_bytes_.fetch_sub(kSegmentBytes, std::memory_order_relaxed);
}

// --- seals ---------------------------------------------------------------------------------------

void BlockLog::Name(uint64_t slot) {
  Segment& segment = segments_[SegmentOf(slot)];
  const auto block = static_cast<uint16_t>(BlockOf(slot) % kSegmentBlocks);
  segment.first_block = segment.named ? std::min(segment.first_block, block) : block;
  segment.last_block = segment.named ? std::max(segment.last_block, block) : block;
  segment.named = true;
}

std::vector<SealedSegment> BlockLog::Named() const {
  std::vector<SealedSegment> named;
  for (uint32_t s = 0; s < segments_.size(); ++s) {
    const Segment& segment = segments_[s];
    if (!segment.named) continue;
    named.push_back({s, segment.salt, segment.first_block, segment.last_block,
                     segment.written_blocks, segment.entry_bytes});
  }
  return named;
}

void BlockLog::CompleteSeal() {
  for (Segment& segment : segments_) segment.sealed = std::exchange(segment.named, false);
  CloseUnnamed();
}

void BlockLog::AbandonSeal() {
  for (Segment& segment : segments_) segment.named = false;
  CloseUnnamed();
}

void BlockLog::DropSeals() {
  for (Segment& segment : segments_) segment.named = segment.sealed = false;
  CloseUnnamed();
}

void BlockLog::CloseUnnamed() {
  kept_bytes_.store(0, std::memory_order_relaxed);
  for (uint32_t s = 0; s < segments_.size(); ++s) {
    if (segments_[s].open) CloseIfEmpty(s);
  }
}

Status BlockLog::CheckSealed(size_t segments) const {
  if (segments < segments_.size()) return Status::Ok();
  return {Code::kResourceExhausted,
          "rows of the seal lie in all " + std::to_string(segments_.size()) +
              " segments of the SSD budget: a log opened from it has no free one to move rows to"};
}

Status BlockLog::Reopen(std::span<const SealedSegment> segments) {
  std::vector<uint64_t> blocks;
  for (const SealedSegment& sealed : segments) {
    const std::string name = "SSD segment " + std::to_string(sealed.number) + " of the seal ";
    if (sealed.number >= segments_.size()) {
      return {Code::kRejected, name + "lies beyond the SSD budget of " +
                                   std::to_string(segments_.size() * kSegmentBytes) + " bytes"};
    }
    Segment& segment = segments_[sealed.number];
    if (segment.open || sealed.first_block > sealed.last_block ||
        sealed.last_block >= sealed.written_blocks || sealed.written_blocks > kSegmentBlocks ||
        sealed.entry_bytes > kSegmentBytes) {
      return {Code::kCorrupt, name + "cannot be as it says"};
    }
    segment.open = segment.sealed = true;
    segment.first_block = sealed.first_block;
    segment.last_block = sealed.last_block;
    segment.salt = sealed.salt;
    segment.written_blocks = sealed.written_blocks;
    segment.entry_bytes = sealed.entry_bytes;
    used_bytes_.fetch_add(kSegmentBytes, std::memory_order_relaxed);
    const uint64_t begin = uint64_t{sealed.number} * kSegmentBlocks;
    blocks.push_back(begin + sealed.first_block);
    if (sealed.last_block > sealed.first_block) blocks.push_back(begin + sealed.last_block);
  }
  EMBERTIDE_RETURN_IF_ERROR(CheckSealed(segments.size()));
  blocks_read_.fetch_add(blocks.size(), std::memory_order_relaxed);
  return file_->Read(
      blocks, [&](size_t b, const std::byte* block) { return CheckBlock(blocks[b], block); });
}

bool BlockLog::MarkLive(uint64_t slot, uint32_t bytes) {
  if (SegmentOf(slot) >= segments_.size() || bytes > kMaxEntryBytes) return false;
  Segment& segment = segments_[SegmentOf(slot)];
  const uint64_t block = BlockOf(slot) % kSegmentBlocks;
  if (!segment.sealed || block < segment.first_block || block > segment.last_block) return false;
  segment.live_bytes += EntryBytes(bytes);
  return segment.live_bytes <= segment.entry_bytes;
}

std::optional<LogRun> BlockLog::NextToCompact(uint32_t blocks, double least_dead) {
  // Until a write or Probe has gone well: a pause may end between Probe and this call.
  if (failed_.load(std::memory_order_relaxed)) return std::nullopt;
  if (compacting_ == kNoSegment) {
    uint32_t most_dead = 0;
    for (uint32_t s = 0; s < segments_.size(); ++s) {
      const Segment& segment = segments_[s];
      if (!segment.open || s == current_ || segment.writing > 0 || segment.compacted ||
          segment.live_bytes == 0) {
        continue;
      }
      const uint32_t dead = segment.entry_bytes - segment.live_bytes;
      if (dead <= most_dead || dead < least_dead * segment.entry_bytes) continue;
      most_dead = dead;
      compacting_ = s;
    }
  }
  if (compacting_ == kNoSegment) return std::nullopt;
  Segment& segment = segments_[compacting_];
  ++segment.pins;
  return LogRun{uint64_t{compacting_} * kSegmentBlocks + segment.compact_next,
                std::min(blocks, segment.written_blocks - segment.compact_next), segment.salt};
}

void BlockLog::Compacted(const LogRun& run, bool moved) {
  const auto number = static_cast<uint32_t>(run.first / kSegmentBlocks);
  Segment& segment = segments_[number];
  --segment.pins;
  if (moved) {
    const auto end = static_cast<uint16_t>(run.first % kSegmentBlocks + run.blocks);
    segment.compact_next = std::max(segment.compact_next, end);
    segment.compacted = segment.compact_next == segment.written_blocks;
    if (segment.compacted && compacting_ == number) compacting_ = kNoSegment;
  }
  CloseIfEmpty(number);
}

void BlockLog::Scan(const LogRun& run, std::vector<LogRow>* rows,
                    std::vector<std::byte>* bytes) const {
  std::mutex mutex;
  const auto take = [&](uint64_t number, const std::byte* block) {
    EMBERTIDE_RETURN_IF_ERROR(CheckBlock(number, block));
    const std::lock_guard lock(mutex);
    uint32_t at = kBlockHeaderBytes;
    for (uint16_t left = Load<BlockHeader>(block).rows; left > 0; --left) {
      const auto entry = Load<EntryHeader>(block + at);
      // The checksum has passed: whoever wrote this wrote it wrongly.
      EMBERTIDE_CHECK(at + EntryBytes(entry.bytes) <= kBlockBytes);
      rows->push_back({(number << kSsdOffsetBits) | (at / 8), entry.key, entry.table, entry.bytes,
                       bytes->size()});
      const std::byte* row = block + at + kEntryHeaderBytes;
      bytes->insert(bytes->end(), row, row + entry.bytes);
      at += EntryBytes(entry.bytes);
    }
    return Status::Ok();
  };
  std::vector<uint64_t> blocks(run.blocks);
  for (uint32_t b = 0; b < run.blocks; ++b) blocks[b] = run.first + b;
  blocks_read_.fetch_add(run.blocks, std::memory_order_relaxed);
  const auto sink = [&](size_t b, const std::byte* block) { return take(blocks[b], block); };
  if (file_->Read(blocks, sink).ok()) return;
  // One by one, to pass over the bad ones.
  rows->clear();
  bytes->clear();
  for (const uint64_t number : blocks) {
    const Status status = file_->Read(
        {&number, 1}, [&](size_t /*read*/, const std::byte* block) { return take(number, block); });
    if (status.ok()) continue;
    (status.code() == Code::kCorrupt ? corrupt_ : read_errors_)
        .fetch_add(1, std::memory_order_relaxed);
  }
}

LogStats BlockLog::Stats() const {
  return {blocks_read_.load(), bytes_written_.load(), row_bytes_.load(),
          read_errors_.load(), corrupt_.load(),       write_errors_.load()};
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
