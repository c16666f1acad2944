// A TrainingStore beside its step (training_step.cc): chunks that live and die, changes taken
// for a version, state for checkpoints. One writer; rows change in place.
#include <algorithm>
#include <cstring>
#include <map>
#include <string>

#include "embertide/hash.h"
#include "store/training_rows.h"

namespace embertide {
namespace {

// Bytes of a note of a removed key in a deque, its share of the list of pieces included; and room
// that a bucket's notes are charged at a time.
constexpr size_t kNoteBytes = sizeof(RemovedKey) + 1;
constexpr uint64_t kNotePage = 4096;
constexpr size_t kNotesOfPage = kNotePage / kNoteBytes;

// Keeps only those notes of removed keys that count, ascending by key.
void TidyRemoved(Bucket* bucket) {
  auto& removed = bucket->removed;
  std::ranges::stable_sort(removed, {}, &RemovedKey::key);
  auto to = removed.begin();
  for (auto at = removed.begin(); at != removed.end(); ++at) {
    const bool last = at + 1 == removed.end() || at[1].key != at->key;
    const uint32_t entry = last ? bucket->index.Locate(HashKey(at->key), at->key) : 0;
    if (last && entry == BucketIndex::kNotFound) *to++ = *at;
  }
  removed.erase(to, removed.end());
  bucket->tidied = removed.size();
}

// Adds the keys of the rows that changed, and of some on the SSD that may have.
void ChangedRows(const Bucket& bucket, std::map<uint64_t, RecordKind>* changes) {
  const BucketIndex& index = bucket.index;
  const auto note = [&](uint64_t key) {
    const uint64_t hash = HashKey(key);
    if (!bucket.changed.Has(hash)) return;
    const Location place = index.Peek(hash, key);
    const bool changed = place.tier() == TierId::kSsd ||
                         (place.tier() == TierId::kDdr && AuxOf(*bucket.pool, place)->changed != 0);
    if (changed) changes->emplace(key, RecordKind::kRow);
  };
  // Hashes `apart` from one another begin at one group of the index each; a cell may span several.
  const uint32_t groups = std::max(index.group_count(), 1U);
  const uint64_t apart = std::max<uint64_t>((uint64_t{1} << 32) / groups, 1);
  bucket.changed.ForEach([&](uint32_t first, uint32_t last) {
    for (uint64_t hash = first;; hash = std::min<uint64_t>(hash + apart, last)) {
      for (BucketIndex::Cursor at = index.Begin(hash);; at.Advance()) {
        index.ForEachKey(at, note);
        if (!GoesOn(at.group)) break;
      }
      if (hash == last) break;
    }
  });
}

}  // namespace

Status TrainingRows::FitRemoved(RowPool* pool, Bucket* bucket) {
  const auto fits = [&] {
    return (bucket->removed.size() + 1) * kNoteBytes <= bucket->removed_bytes;
  };
  if (fits()) return Status::Ok();
  if (bucket->removed.size() >= 2 * bucket->tidied + kNotesOfPage) TidyRemoved(bucket);
  if (fits()) return Status::Ok();
  const auto charge = [&]() -> Status {
    if (pool->budget.TryCharge(kNotePage)) return Status::Ok();
    return {Code::kResourceExhausted, "no room to note removed keys in the DDR budget"};
  };
  Status charged = residency_.WithRoom(pool, charge);
  if (!charged.ok() && pool->LendReserve()) charged = charge();
  if (!charged.ok()) return charged;
  bucket->removed_bytes += kNotePage;
  store_.counters.index_bytes += kNotePage;
  return Status::Ok();
}

void TrainingRows::ForgetMoments(const Table& table, RowAux* aux) const {
  aux->accumulator = 0.0F;
  if (CountsSteps(store_.options.optimizer)) *aux->steps(table.config.learned()) = 0;
}

void TrainingRows::ForgetElements(const Table& table, uint32_t kept, RowAux* aux) const {
  if (!KeepsElements(store_.options.optimizer)) return;
  const RowLayout layout = table.config.learned();
  float* elements = aux->elements(store_.options.optimizer, layout);
  for (uint32_t c = 0; c < layout.chunks; ++c, elements += layout.chunk_dim) {
    if ((kept >> c & 1U) == 0) std::fill_n(elements, layout.chunk_dim, 0.0F);
  }
}

Result<Location> TrainingRows::AddRow(RowPool* pool, const Table& table, Bucket* bucket,
                                      uint64_t key, uint16_t live,
                                      std::span<const std::byte> payload) {
  EMBERTIDE_RETURN_IF_ERROR(residency_.ReserveEntry(pool, bucket, key));
  Result<Location> place = residency_.StoreRow(pool, table, key, live, payload);
  if (!place.ok()) return place;
  residency_.InsertEntry(bucket, key, *place);
  MarkRowChanged(table, HashKey(key), AuxOf(*pool, *place));
  return place;
}

Status TrainingRows::RemoveRow(RowPool* pool, Bucket* bucket, uint64_t key, RecordKind kind) {
  const Table& table = store_.tables[bucket->table];
  const auto locate = [&] { return bucket->index.Locate(HashKey(key), key); };
  if (locate() == BucketIndex::kNotFound) {
    return {Code::kNotFound,
            "key " + std::to_string(key) + " has no row in table " + table.config.name};
  }
  EMBERTIDE_RETURN_IF_ERROR(FitRemoved(pool, bucket));
  // Making room may have moved the row.
  const uint32_t entry = locate();
  const Location place = bucket->index.At(entry);
  if (pool->held.Has(bucket->table, key)) ++store_.counters.held_rows_removed;
  residency_.EraseEntry(bucket, entry);
  bucket->removed.push_back({key, kind});
  reclaimer_.RetirePlace(pool, table, place);
  return Status::Ok();
}

Status TrainingRows::ChangeLive(RowPool* pool, const Table& table, uint32_t b, uint64_t key,
                                uint16_t live, RecordKind kind) {
  const RowLayout& layout = table.config.layout;
  Bucket* bucket = table.Newest(b);
  if (live == 0) return RemoveRow(pool, bucket, key, kind);
  const Result<Location> old = residency_.ResidentRow(pool, table.ordinal, b, key);
  if (!old.ok()) return old.status();
  if (live == old.value().live()) return Status::Ok();
  std::vector<float> values(layout.dim());
  DecodePayload(layout, old.value().live(), pool->arena.Address(old.value().slot()), values.data());
  std::vector<std::byte> payload(layout.PayloadBytes(live));
  EncodePayload(layout, live, values.data(), payload.data());
  Result<Location> stored = residency_.StoreRow(pool, table, key, live, payload);
  const bool shrinks = payload.size() < layout.PayloadBytes(old.value().live());
  if (!stored.ok() && shrinks && pool->LendReserve()) {
    stored = residency_.StoreRow(pool, table, key, live, payload);
  }
  if (!stored.ok()) return stored.status();
  const Location place = *stored;
  // Making room may have moved the old row to the SSD: ask the index again.
  const uint32_t entry = bucket->index.Locate(HashKey(key), key);
  const Result<Location> again = residency_.ResidentRow(pool, table.ordinal, b, key);
  if (!again.ok()) {
    reclaimer_.RetirePlace(pool, table, place);
    return again.status();
  }
  std::copy_n(pool->arena.Aux(again.value().slot()), store_.AuxBytes(table),
              pool->arena.Aux(place.slot()));
  bucket->index.Set(entry, place);
  RowAux* aux = AuxOf(*pool, place);
  ForgetElements(table, live & again.value().live(), aux);
  if ((again.value().live() & ~table.cost.counters) == 0) ForgetMoments(table, aux);
  MarkRowChanged(table, HashKey(key), aux);
  reclaimer_.RetirePlace(pool, table, again.value());
  return Status::Ok();
}

Status TrainingRows::SetLive(uint32_t t, uint64_t key, uint16_t live) {
  EMBERTIDE_RETURN_IF_ERROR(store_.CheckValues(t));
  const Table& table = store_.tables[t];
  const RowLayout& layout = table.config.layout;
  if ((live & ~layout.full_mask()) != 0) {
    return {Code::kInvalidArgument, "live mask " + std::to_string(live) + " names chunks past " +
                                        std::to_string(layout.chunks)};
  }
  const uint32_t b = table.BucketOf(HashKey(key));
  RowPool& pool = *table.Newest(b)->pool;
  const std::lock_guard writer(pool.writer);
  reclaimer_.Reclaim(&pool);
  pool.TakeReserveBack();
  return ChangeLive(&pool, table, b, key, live, RecordKind::kPruned);
}

Status TrainingRows::TakeChanges(uint32_t t, uint32_t b, std::vector<std::byte>* records) {
  EMBERTIDE_RETURN_IF_ERROR(store_.CheckBucket(t, b));
  Table& table = store_.tables[t];
  Bucket& bucket = *table.Newest(b);
  RowPool& pool = *bucket.pool;
  WriterLock writer(pool.writer);
  reclaimer_.Reclaim(&pool);
  std::map<uint64_t, RecordKind> changes;
  if (pool.ssd != nullptr) {
    ChangedRows(bucket, &changes);
    std::vector<Access> rows;
    rows.reserve(changes.size());
    for (const auto& [key, kind] : changes) rows.push_back({key, t});
    residency_.BringRows(&pool, rows, &writer);
    changes.clear();  // others may have changed rows meanwhile
  }
  TidyRemoved(&bucket);
  for (const RemovedKey& each : bucket.removed) changes.emplace(each.key, each.kind);
  ChangedRows(bucket, &changes);
  const size_t before = records->size();
  std::vector<uint64_t> taken;
  for (const auto& [key, kind] : changes) {
    if (kind != RecordKind::kRow) {
      AppendRecord({key, 0, kind, {}}, records);
      continue;
    }
    const Result<Location> place = residency_.ResidentRow(&pool, t, b, key);
    if (!place.ok()) {
      records->resize(before);  // no row says yet that it was taken
      return place.status();
    }
    RowAux* aux = AuxOf(pool, place.value());
    if (aux->changed == 0) continue;  // it was on the SSD, where that is not seen
    if (pool.ssd == nullptr) {
      aux->changed = 0;  // nothing fails from here on
    } else {
      taken.push_back(key);
    }
    const uint16_t live = place.value().live();
    AppendRecord(
        {key,
         live,
         RecordKind::kRow,
         {pool.arena.Address(place.value().slot()), table.config.layout.PayloadBytes(live)}},
        records);
  }
  // Making room for one may have sent another to the SSD. A row that cannot be brought from there
  // any more, to say that it was taken, is taken once more the next time.
  bool all = true;
  for (const uint64_t key : taken) {
    const Result<Location> place = residency_.ResidentRow(&pool, t, b, key);
    all = all && place.ok();
    if (place.ok()) AuxOf(pool, place.value())->changed = 0;
  }
  if (all) bucket.changed.Clear();
  std::deque<RemovedKey>().swap(bucket.removed);
  bucket.tidied = 0;
  pool.budget.Release(bucket.removed_bytes);
  store_.counters.index_bytes -= std::exchange(bucket.removed_bytes, 0);
  return Status::Ok();
}

Status TrainingRows::MarkChanged(uint32_t t, uint32_t b, std::span<const uint64_t> keys) {
  EMBERTIDE_RETURN_IF_ERROR(store_.CheckBucket(t, b));
  const Table& table = store_.tables[t];
  Bucket& bucket = *table.Newest(b);
  RowPool& pool = *bucket.pool;
  const std::lock_guard writer(pool.writer);
  for (const uint64_t key : keys) {
    const Result<Location> place = residency_.ResidentRow(&pool, t, b, key);
    if (place.ok()) {
      MarkRowChanged(table, HashKey(key), AuxOf(pool, place.value()));
    } else if (place.status().code() == Code::kNotFound) {
      EMBERTIDE_RETURN_IF_ERROR(FitRemoved(&pool, &bucket));
      bucket.removed.push_back({key, RecordKind::kExpired});
    } else {
      return place.status();
    }
  }
  return Status::Ok();
}

RowState TrainingRows::StateIn(const Table& table, const std::byte* bytes) const {
  // Copied, for on the SSD it stands anywhere.
  alignas(RowAux) std::array<std::byte, kMaxEntryBytes> copy;
  std::memcpy(copy.data(), bytes, store_.AuxBytes(table));
  auto* aux = reinterpret_cast<RowAux*>(copy.data());
  const RowLayout layout = table.config.learned();
  const Optimizer optimizer = store_.options.optimizer;
  RowState state{aux->accumulator, RowAux::Steps(aux->tick, store_.tick), {}, 0, {}};
  std::copy_n(aux->utility(), layout.chunks, state.utility.begin());
  if (CountsSteps(optimizer)) state.steps = *aux->steps(layout);
  if (KeepsElements(optimizer)) {
    const float* elements = aux->elements(optimizer, layout);
    state.elements.assign(elements, elements + layout.dim());
  }
  return state;
}

Result<RowState> TrainingRows::StateOf(uint32_t t, uint64_t key) {
  EMBERTIDE_RETURN_IF_ERROR(store_.CheckTable(t));
  const Table& table = store_.tables[t];
  const uint32_t b = table.BucketOf(HashKey(key));
  RowPool& pool = *table.Newest(b)->pool;
  const std::lock_guard writer(pool.writer);
  const Result<Location> place = residency_.ResidentRow(&pool, t, b, key);
  if (!place.ok()) return place.status();
  return StateIn(table, pool.arena.Aux(place.value().slot()));
}

Status TrainingRows::SetState(uint32_t t, uint64_t key, const RowState& state) {
  EMBERTIDE_RETURN_IF_ERROR(store_.CheckTable(t));
  const Table& table = store_.tables[t];
  const RowLayout layout = table.config.learned();
  const Optimizer optimizer = store_.options.optimizer;
  const size_t elements = KeepsElements(optimizer) ? layout.dim() : 0;
  if (state.elements.size() != elements || (state.steps != 0 && !CountsSteps(optimizer))) {
    return {Code::kInvalidArgument,
            "a state of " + std::to_string(state.elements.size()) + " elements and " +
                std::to_string(state.steps) + " steps: " + OptimizerName(optimizer) + " keeps " +
                std::to_string(elements) + " of a row of table " + table.config.name +
                "; give the state that this optimizer had"};
  }
  const uint32_t b = table.BucketOf(HashKey(key));
  RowPool& pool = *table.Newest(b)->pool;
  const std::lock_guard writer(pool.writer);
  const Result<Location> place = residency_.ResidentRow(&pool, t, b, key);
  if (!place.ok()) return place.status();
  RowAux* aux = AuxOf(pool, place.value());
  aux->accumulator = state.accumulator;
  aux->tick = RowAux::Steps(state.age, store_.tick);
  std::copy_n(state.utility.begin(), layout.chunks, aux->utility());
  if (CountsSteps(optimizer)) *aux->steps(layout) = state.steps;
  if (elements > 0) {
    std::copy_n(state.elements.begin(), elements, aux->elements(optimizer, layout));
    ForgetElements(table, place.value().live(), aux);
  }
  return Status::Ok();
}

Status TrainingRows::ExportRows(uint32_t t, std::span<const uint64_t> keys,
                                std::vector<std::byte>* records, std::vector<RowState>* states) {
  EMBERTIDE_RETURN_IF_ERROR(store_.CheckValues(t));
  const Table& table = store_.tables[t];
  for (const uint64_t key : keys) {
    const uint32_t b = table.BucketOf(HashKey(key));
    RowPool& pool = *table.Newest(b)->pool;
    const std::lock_guard writer(pool.writer);
    const Result<Location> place = residency_.ResidentRow(&pool, t, b, key);
    if (!place.ok()) {
      if (place.status().code() == Code::kNotFound) continue;
      return place.status();
    }
    const uint16_t live = place.value().live();
    const uint64_t slot = place.value().slot();
    AppendRecord({key,
                  live,
                  RecordKind::kRow,
                  {pool.arena.Address(slot), table.config.layout.PayloadBytes(live)}},
                 records);
    states->push_back(StateIn(table, pool.arena.Aux(slot)));
  }
  return Status::Ok();
}

Status TrainingRows::PutRows(uint32_t t, std::span<const std::byte> records,
                             std::span<const RowState> states) {
  EMBERTIDE_RETURN_IF_ERROR(store_.CheckValues(t));
  const Table& table = store_.tables[t];
  for (size_t row = 0; !records.empty(); ++row) {
    const Result<RowRecord> read = ReadRecord(table.config.layout, &records);
    if (!read.ok()) return read.status();
    const RowRecord& record = read.value();
    if (row >= states.size()) {
      return {Code::kInvalidArgument, std::to_string(states.size()) + " states for more records"};
    }
    {
      const uint32_t b = table.BucketOf(HashKey(record.key));
      RowPool& pool = *table.Newest(b)->pool;
      const std::lock_guard writer(pool.writer);
      const Result<Location> place = residency_.ResidentRow(&pool, t, b, record.key);
      if (!place.ok()) return place.status();
      if (record.kind != RecordKind::kRow || record.live != place.value().live()) {
        return {Code::kInvalidArgument, "key " + std::to_string(record.key) + " of table " +
                                            table.config.name + " comes with chunks " +
                                            std::to_string(record.live) + ", and its row has " +
                                            std::to_string(place.value().live())};
      }
      std::ranges::copy(record.payload, pool.arena.Address(place.value().slot()));
      MarkRowChanged(table, HashKey(record.key), AuxOf(pool, place.value()));
    }
    EMBERTIDE_RETURN_IF_ERROR(SetState(t, record.key, states[row]));
  }
  return Status::Ok();
}

Status TrainingRows::Import(uint32_t t, uint32_t b, std::span<const std::byte> records) {
  EMBERTIDE_RETURN_IF_ERROR(store_.CheckBucket(t, b));
  Table& table = store_.tables[t];
  RowPool& pool = *store_.tables[t].Newest(b)->pool;
  const std::lock_guard writer(pool.writer);
  while (!records.empty()) {
    const Result<RowRecord> record = ReadRecord(table.config.layout, &records);
    if (!record.ok()) return record.status();
    if (BucketOfHash(HashKey(record.value().key), table.config.bucket_bits) != b) {
      return {Code::kCorrupt, "key " + std::to_string(record.value().key) + " is not of bucket " +
                                  std::to_string(b)};
    }
    EMBERTIDE_RETURN_IF_ERROR(residency_.PutRecord(&pool, table, table.Newest(b), record.value()));
    reclaimer_.Reclaim(&pool);
  }
  return Status::Ok();
}

}  // namespace embertide
