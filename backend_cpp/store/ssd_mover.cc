// Rows moved to and on the SSD: see the header.
#include "store/ssd_mover.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "embertide/hash.h"
#include "store/row_note.h"

namespace embertide {
namespace {

// Blocks of one step: a millisecond or two of a drive.
constexpr uint32_t kStepBlocks = 64;
// In the background a segment is worth its move when half is dead: a byte is then written twice at
// most. When the budget is full, any segment of which an eighth is.
constexpr double kWorthMoving = 0.5;
constexpr double kWorthMovingFull = 0.125;
// Segments compacted for one write to a full SSD: each gives an eighth of itself or more, and a
// write is about a quarter.
constexpr int kCompactTries = 8;
// Seconds of its budget that a pool may spend at once after it had nothing to compact.
constexpr double kBurstSeconds = 0.1;

}  // namespace

std::optional<Holder> SsdMover::HolderOf(RowPool* pool, uint32_t table, uint64_t key,
                                         Location named) {
  const uint64_t hash = HashKey(key);
  Bucket* bucket = store_.tables[table].In(pool, hash);
  if (bucket == nullptr) return std::nullopt;
  const uint32_t entry = bucket->index.Locate(hash, key);
  if (entry == BucketIndex::kNotFound) return std::nullopt;
  const auto there = [named](Location place) {
    return place.tier() == named.tier() && place.slot() == named.slot();
  };
  const Location place = bucket->index.At(entry);
  if (!place.is_chain()) {
    return there(place) ? std::optional<Holder>({table, bucket, entry, nullptr}) : std::nullopt;
  }
  for (VersionNode* node = place.chain(); node != nullptr; node = node->older.load()) {
    const Holder holder{table, bucket, entry, node};
    if (there(holder.place())) return holder;
  }
  return std::nullopt;
}

size_t SsdMover::TakeNotes(RowPool* pool, std::span<const Moving> rows, MoveKind kind) const {
  if (pool->notes == nullptr) return rows.size();
  const auto noted = [&](const Moving& row) { return Noted(*pool, store_.tables[row.table]); };
  pool->notes->ChargeAhead();
  size_t left = pool->notes->Take(static_cast<size_t>(std::ranges::count_if(rows, noted)),
                                  /*of_page=*/kind != MoveKind::kEvict);
  size_t fit = 0;
  for (; fit < rows.size(); ++fit) {
    if (!noted(rows[fit])) continue;
    if (left == 0) break;
    --left;
  }
  return fit;
}

void SsdMover::GiveNotesBack(RowPool* pool, std::span<const Moving> rows) const {
  if (pool->notes == nullptr) return;
  pool->notes->GiveBack(static_cast<size_t>(std::ranges::count_if(
      rows, [&](const Moving& row) { return Noted(*pool, store_.tables[row.table]); })));
}

void SsdMover::AddNotes(RowPool* pool, std::span<const Moving> rows, const LogBatch& batch) const {
  if (pool->notes == nullptr) return;
  std::vector<uint64_t> slots;
  std::vector<const Moving*> noted;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!Noted(*pool, store_.tables[rows[i].table])) continue;
    slots.push_back(batch.slots[i]);
    noted.push_back(&rows[i]);
  }
  pool->notes->Add(slots, [&](size_t i, uint32_t* words) {
    const Moving& row = *noted[i];
    const Table& table = store_.tables[row.table];
    if (row.from.tier() == TierId::kSsd) {
      std::copy_n(pool->notes->Find(row.from.slot()), pool->notes->words(), words);
      return;
    }
    WriteNote(table, row.from.live(), row.bytes.data(),
              row.bytes.data() + row.bytes.size() - store_.AuxBytes(table), words);
  });
}

Result<size_t> SsdMover::Move(RowPool* pool, std::span<const Moving> rows, MoveKind kind,
                              WriterLock* writer) {
  BlockLog& log = *pool->ssd;
  const bool compaction = kind == MoveKind::kCompact;
  const size_t noted = TakeNotes(pool, rows, kind);
  if (noted < rows.size() && (compaction || noted == 0)) {
    GiveNotesBack(pool, rows.first(noted));
    return Status(Code::kResourceExhausted,
                  "no room in the DDR budget for what pruning keeps of rows on the SSD");
  }
  rows = rows.first(noted);
  std::vector<LogEntry> entries;
  entries.reserve(rows.size());
  for (const Moving& row : rows) entries.push_back({row.key, row.table, row.bytes});
  Result<LogBatch> batch = log.Take(entries, compaction);
  // A drive that takes no writes gets no room by compaction.
  const auto full = [&] { return batch.status().code() == Code::kResourceExhausted; };
  for (int tries = 0; !batch.ok() && full() && !compaction && tries < kCompactTries &&
                      (seals_.Drop(pool) || CompactForRoom(pool, writer));
       ++tries) {
    batch = log.Take(entries);
  }
  if (!batch.ok()) {
    GiveNotesBack(pool, rows);
    return batch.status();
  }
  AddNotes(pool, rows, batch.value());
  Status written;
  WithoutWriter(writer, [&] { written = log.Write(entries, *batch); });
  log.Finish(entries, *batch, written, compaction);
  if (!written.ok()) return written;
  size_t moved = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const Moving& row = rows[i];
    const Table& table = store_.tables[row.table];
    const std::optional<Holder> holder = HolderOf(pool, row.table, row.key, row.from);
    // Its slot may be another row's by now, and training changes rows where they are: what counts
    // is that the bytes are those that were written. A row that is held since must stay, for who
    // holds it may have seen it in DDR.
    const auto may_leave = [&] {
      if (pool->held.Has(row.table, row.key)) return false;
      const auto payload = row.bytes.first(row.bytes.size() - store_.AuxBytes(table));
      const auto aux = row.bytes.subspan(payload.size());
      const uint64_t slot = row.from.slot();
      return holder->place().live() == row.from.live() &&
             std::memcmp(payload.data(), pool->arena.Address(slot), payload.size()) == 0 &&
             (aux.empty() || std::memcmp(aux.data(), pool->arena.Aux(slot), aux.size()) == 0);
    };
    if (!holder.has_value() || (row.from.tier() == TierId::kDdr && !may_leave())) {
      log.Free(batch->slots[i], static_cast<uint32_t>(row.bytes.size()));
      continue;
    }
    const Location place = holder->place();
    const Location to(TierId::kSsd, place.live(), batch->slots[i]);
    store_.CountPlace(pool, table, to, /*taken=*/true);
    holder->Set(to);
    reclaimer_.RetirePlace(pool, table, place);
    ++moved;
  }
  return moved;
}

uint64_t SsdMover::CompactStep(RowPool* pool, double least_dead, WriterLock* writer) {
  BlockLog& log = *pool->ssd;
  const std::optional<LogRun> run = log.NextToCompact(kStepBlocks, least_dead);
  if (!run.has_value()) return 0;
  std::vector<LogRow> scanned;
  std::vector<std::byte> bytes;
  WithoutWriter(writer, [&] { log.Scan(*run, &scanned, &bytes); });
  std::vector<Moving> rows;
  uint64_t work = uint64_t{run->blocks} * kBlockBytes;
  for (const LogRow& row : scanned) {
    const Location place(TierId::kSsd, 0, row.slot);
    if (!HolderOf(pool, row.table, row.key, place).has_value()) continue;
    rows.push_back({row.table, row.key, place, std::span(bytes).subspan(row.at, row.bytes)});
    work += row.bytes;
  }
  store_.counters.compacted_bytes += work;
  // Without room, or with a drive that fails, the rows stay where they are and are tried again.
  const Result<size_t> moved = Move(pool, rows, MoveKind::kCompact, writer);
  if (moved.ok()) store_.counters.compacted_rows += moved.value();
  log.Compacted(*run, moved.ok());
  return work;
}

void SsdMover::CompactInBackground(RowPool* pool, WriterLock* writer) {
  const auto now = std::chrono::steady_clock::now();
  const std::chrono::duration<double> passed = now - pool->compaction_at;
  pool->compaction_at = now;
  const double rate = static_cast<double>(store_.options.ssd_compaction_bytes_per_s) /
                      static_cast<double>(store_.pools.size());
  double& credit = pool->compaction_credit;
  credit = std::min(credit + rate * passed.count(), rate * kBurstSeconds);
  if (credit > 0) credit -= static_cast<double>(CompactStep(pool, kWorthMoving, writer));
}

bool SsdMover::CompactForRoom(RowPool* pool, WriterLock* writer) {
  uint32_t steps = 0;
  while (steps < kSegmentBlocks / kStepBlocks && CompactStep(pool, kWorthMovingFull, writer) > 0) {
    ++steps;
  }
  if (steps == 0) return false;
  ++store_.counters.compactions_forced;
  // Upkeep tries again another time: no writer shall wait for readers on its behalf.
  if (writer != nullptr) return reclaimer_.Reclaim(pool);
  return reclaimer_.AwaitReaders(pool).ok();
}

}  // namespace embertide
