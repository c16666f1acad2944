// SsdMover: rows moved to and on the SSD, and compaction: the live rows of a segment that is mostly
// dead are written again, packed, so that the segment is free. A move for upkeep lets go of the
// writer lock while the drive reads and writes; a row that changed or came to be held meanwhile
// keeps its place, and the copy is dead.
//
// The segment's own blocks say which rows it holds; one look at the index tells the live ones. A
// live row in no entry, because its bucket or version was retired, is freed without being moved.
//
// Threads: the pool's writer is held throughout, but as WithoutWriter says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "store/holder.h"
#include "store/reclaimer.h"
#include "store/row_pool.h"
#include "store/seal_manifest.h"
#include "store/store_state.h"

namespace embertide {

// Why rows are written to the SSD.
enum class MoveKind : uint8_t {
  kEvict,      // to make room for others
  kEmptyPage,  // their page is wanted
  kCompact,    // their segment is
};

// A row that is to lie elsewhere on the SSD, as it was when its bytes were copied.
struct Moving {
  uint32_t table;
  uint64_t key;
  Location from;
  std::span<const std::byte> bytes;
};

class SsdMover {
 public:
  SsdMover(StoreState& store, SealManifest& seals, Reclaimer& reclaimer)
      : store_(store), seals_(seals), reclaimer_(reclaimer) {}

  // Writes rows to the log, and whoever names their places names the new ones, but for rows that
  // are gone, changed or held meanwhile. Returns how many moved; an error: none did. The last
  // of those to leave DDR stay, if there is no room for the notes of all.
  Result<size_t> Move(RowPool* pool, std::span<const Moving> rows, MoveKind kind,
                      WriterLock* writer);
  // Compacts some blocks, if options.ssd_compaction_bytes_per_s allows it.
  void CompactInBackground(RowPool* pool, WriterLock* writer);

 private:
  // Who names this place; nullopt: nobody does any more.
  std::optional<Holder> HolderOf(RowPool* pool, uint32_t table, uint64_t key, Location place);
  // Charges the notes of rows that are to move to the log, of the first of them if there is no room
  // for all; returns of how many rows.
  size_t TakeNotes(RowPool* pool, std::span<const Moving> rows, MoveKind kind) const;
  void GiveNotesBack(RowPool* pool, std::span<const Moving> rows) const;
  // Requires: TakeNotes for them.
  void AddNotes(RowPool* pool, std::span<const Moving> rows, const LogBatch& batch) const;
  // Moves the live rows of some blocks of a segment of which `least_dead` is dead. Returns the
  // bytes read and written, 0 if there is no such segment.
  uint64_t CompactStep(RowPool* pool, double least_dead, WriterLock* writer);
  // Up to a segment, whatever the bytes a second: rows would be refused otherwise. False if none is
  // worth it.
  bool CompactForRoom(RowPool* pool, WriterLock* writer);

  StoreState& store_;
  SealManifest& seals_;
  Reclaimer& reclaimer_;
};

}  // namespace embertide
