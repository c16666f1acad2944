// Where a row is, whole-bucket reads, and the check of every invariant.
#include <algorithm>

#include "embertide/hash.h"
#include "store/row_note.h"
#include "store/store_impl.h"

namespace embertide {
namespace {

// Rows that an export brings from the SSD together: several times a drive's queue.
constexpr size_t kRowsAtATime = 1024;

}  // namespace

RowLocation ReadView::Explain(uint32_t table_number, uint64_t key) const {
  RowLocation answer;
  const StoreState& store = store_->impl_->store;
  if (!store.CheckTable(table_number).ok()) return answer;
  const Reading reading(&store.readers, reader_);
  const Table& table = store.tables[table_number];
  const uint64_t hash = HashKey(key);
  answer.bucket = table.BucketOf(hash);
  const Bucket* bucket = table.buckets[answer.bucket].At(version_);
  if (bucket == nullptr) return answer;
  answer.held = true;
  answer.device = bucket->pool->number;
  const BucketIndex& index = bucket->index;
  answer.access_count = index.AccessCount(hash, key);
  const Location place = Resolve(index.Peek(hash, key), version_, &answer.version);
  if (place.tier() == TierId::kNowhere) {
    const bool pruned = place.slot() == static_cast<uint64_t>(RecordKind::kPruned);
    if (pruned) answer.tier = Source::kPruned;
    return answer;
  }
  answer.resident = true;
  if (store.hbm != nullptr && store.hbm->cache().Has(table_number, key, version_)) {
    answer.hbm_copy = store.hbm->cache().DeviceOf(table_number, key);
  }
  answer.tier = place.tier() == TierId::kDdr ? Source::kDdr : Source::kSsd;
  if (place.tier() == TierId::kDdr) {
    answer.slot_bytes = bucket->pool->arena.SlotBytes(place.slot());
  }
  answer.live = place.live();
  answer.payload_bytes = table.config.layout.PayloadBytes(place.live());
  return answer;
}

Status Store::Impl::ExportBucket(const ReadView& view, uint32_t t, uint32_t b,
                                 std::vector<std::byte>* records, std::vector<RowState>* states) {
  EMBERTIDE_RETURN_IF_ERROR(store.CheckBucket(t, b));
  const Table& table = store.tables[t];
  const auto find = [&] { return table.buckets[b].At(view.version()); };
  Status not_held{Code::kNotOwner, "bucket " + std::to_string(b) + " of table " +
                                       table.config.name + " is not held here at version " +
                                       std::to_string(view.version())};
  RowPool* pool = nullptr;
  {
    const Reading reading(&store.readers, view.reader_);
    const Bucket* bucket = find();
    if (bucket == nullptr) return not_held;
    pool = bucket->pool;
  }
  // The writer stands still while the entries are listed; what they name then outlives the read. It
  // is taken first: a writer that needs room waits for reads to end.
  std::vector<std::pair<uint64_t, Location>> rows;
  WriterLock writer(pool->writer);
  const Reading reading(&store.readers, view.reader_);
  const Bucket* bucket = find();
  if (bucket == nullptr || bucket->pool != pool) return not_held;
  const BucketIndex& index = bucket->index;
  index.Walk(0, index.capacity(), [&](uint32_t e, Location said) {
    const Location place = Resolve(said, view.version());
    if (place.tier() != TierId::kNowhere) rows.emplace_back(index.KeyAt(e), place);
    return true;
  });
  writer.unlock();
  std::sort(rows.begin(), rows.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  const RowLayout& layout = table.config.layout;
  const uint32_t aux_bytes = states == nullptr ? 0 : store.AuxBytes(table);
  const uint32_t most = layout.PayloadBytes(layout.full_mask()) + aux_bytes;
  std::vector<std::byte> ssd_rows(size_t{kRowsAtATime} * most);
  std::vector<LogRead> reads;
  for (size_t first = 0; first < rows.size(); first += kRowsAtATime) {
    const auto part = std::span(rows).subspan(first, std::min(kRowsAtATime, rows.size() - first));
    reads.clear();
    for (size_t r = 0; r < part.size(); ++r) {
      const auto& [key, place] = part[r];
      if (place.tier() != TierId::kSsd) continue;
      reads.push_back({place.slot(), key, t, layout.PayloadBytes(place.live()) + aux_bytes,
                       ssd_rows.data() + r * most});
    }
    if (!reads.empty()) EMBERTIDE_RETURN_IF_ERROR(pool->ssd->Read(reads));
    for (size_t r = 0; r < part.size(); ++r) {
      const auto& [key, place] = part[r];
      const bool on_ssd = place.tier() == TierId::kSsd;
      const uint32_t bytes = layout.PayloadBytes(place.live());
      const std::byte* row =
          on_ssd ? ssd_rows.data() + r * most : pool->arena.Address(place.slot());
      AppendRecord({key, place.live(), RecordKind::kRow, {row, bytes}}, records);
      if (states == nullptr) continue;
      states->push_back(
          this->rows.StateIn(table, on_ssd ? row + bytes : pool->arena.Aux(place.slot())));
    }
  }
  return Status::Ok();
}

Status Store::ExportBucket(const ReadView& view, uint32_t t, uint32_t b,
                           std::vector<std::byte>* records) const {
  return impl_->ExportBucket(view, t, b, records, nullptr);
}

Status TrainingStore::ExportBucketWithStates(const ReadView& view, uint32_t t, uint32_t b,
                                             std::vector<std::byte>* records,
                                             std::vector<RowState>* states) const {
  return impl_->ExportBucket(view, t, b, records, states);
}

namespace {

// Every place that the entries of a pool name, and what hangs on them.
struct Named {
  // Rows and bytes of a table that entries and chains name, by tier.
  struct Count {
    uint64_t rows = 0;
    uint64_t bytes = 0;
  };
  explicit Named(size_t tables) : in_ddr(tables), in_ssd(tables) {}
  std::vector<uint64_t> ddr;
  std::vector<std::pair<uint64_t, uint32_t>> ssd;
  std::vector<Count> in_ddr;
  std::vector<Count> in_ssd;
  uint64_t nodes = 0;
  uint64_t index_bytes = 0;
  uint64_t rows = 0;
  uint64_t chosen_among = 0;  // keys that the policy of the pool holds

  void Add(Location place, uint32_t bytes) {
    if (place.tier() == TierId::kDdr) ddr.push_back(place.slot());
    if (place.tier() == TierId::kSsd) ssd.emplace_back(place.slot(), bytes);
  }
  void Add(uint32_t table, Location place, uint32_t bytes) {
    Add(place, bytes);
    if (place.tier() == TierId::kNowhere) return;
    Count& count = (place.tier() == TierId::kSsd ? in_ssd : in_ddr)[table];
    ++count.rows;
    count.bytes += bytes;
  }
};

Status NameEntries(const Table& table, const Bucket& bucket, uint32_t aux, bool retired,
                   Named* named) {
  const RowLayout& layout = table.config.layout;
  EMBERTIDE_RETURN_IF_ERROR(bucket.index.CheckIntegrity());
  named->index_bytes += kBucketBytes + bucket.index.bytes() + bucket.change_bytes();
  // That of a retired bucket knows of its rows no longer.
  const TierPolicy* policy = retired ? nullptr : bucket.pool->policy.get();
  named->rows += bucket.index.size();
  const auto name = [&](uint32_t e, Location place) -> Status {
    const uint64_t key = bucket.index.KeyAt(e);
    if (Noted(*bucket.pool, table) && place.tier() == TierId::kSsd &&
        bucket.pool->notes->Find(place.slot()) == nullptr) {
      return {Code::kCorrupt, "pruning has no note of key " + std::to_string(key)};
    }
    if (policy != nullptr) {
      if (policy->Holds(key)) ++named->chosen_among;
      if (Resolve(place, ~0ULL).tier() == TierId::kDdr && !policy->Holds(key)) {
        return {Code::kCorrupt, "the policy does not know of key " + std::to_string(key)};
      }
    }
    if (!place.is_chain()) {
      named->Add(table.ordinal, place, layout.PayloadBytes(place.live()) + aux);
      return Status::Ok();
    }
    uint64_t newer = ~0ULL;
    for (const VersionNode* node = place.chain(); node != nullptr; node = node->older.load()) {
      if (node->version >= newer) {
        return {Code::kCorrupt,
                "the chain of key " + std::to_string(node->key) + " does not descend"};
      }
      newer = node->version;
      ++named->nodes;
      const Location at = Location::FromWord(node->word.load());
      named->Add(table.ordinal, at, layout.PayloadBytes(at.live()) + aux);
    }
    return Status::Ok();
  };
  Status named_all = Status::Ok();
  bucket.index.Walk(0, bucket.index.capacity(), [&](uint32_t e, Location place) {
    named_all = name(e, place);
    return named_all.ok();
  });
  return named_all;
}

}  // namespace

Status Store::CheckIntegrity() const {
  uint64_t index_bytes = 0;
  uint64_t rows = 0;
  for (const auto& each : impl_->store.pools) {
    RowPool& pool = *each;
    // Upkeep lets go of the writer in the middle of a move.
    const std::lock_guard upkeep(pool.upkeep);
    const std::lock_guard writer(pool.writer);
    Named named(impl_->store.tables.size());
    for (const uint32_t t : pool.tables) {
      const Table& table = impl_->store.tables[t];
      for (const BucketSlot& slot : table.buckets) {
        const Bucket* bucket = slot.On(&pool);
        if (bucket == nullptr) continue;
        EMBERTIDE_RETURN_IF_ERROR(
            NameEntries(table, *bucket, impl_->store.AuxBytes(table), /*retired=*/false, &named));
      }
    }
    const uint64_t held_rows = named.rows;
    if (pool.policy != nullptr && pool.policy->rows() != named.chosen_among) {
      return {Code::kCorrupt, "the policy holds " + std::to_string(pool.policy->rows()) +
                                  " rows, " + std::to_string(named.chosen_among) +
                                  " of them have an entry"};
    }
    for (const Retired& retired : pool.retired) {
      if (retired.node != nullptr) ++named.nodes;
      if (retired.arrays.pages != nullptr) named.index_bytes += retired.arrays.bytes();
      if (retired.bucket != nullptr) {
        const Table& table = impl_->store.tables[retired.bucket->table];
        EMBERTIDE_RETURN_IF_ERROR(NameEntries(table, *retired.bucket, impl_->store.AuxBytes(table),
                                              /*retired=*/true, &named));
      }
      if (retired.node == nullptr && retired.arrays.pages == nullptr && retired.bucket == nullptr) {
        named.Add(retired.place, retired.bytes);
      }
    }
    if (named.nodes != pool.nodes.nodes()) {
      return {Code::kCorrupt, "chains name " + std::to_string(named.nodes) + " nodes, " +
                                  std::to_string(pool.nodes.nodes()) + " are in use"};
    }
    EMBERTIDE_RETURN_IF_ERROR(pool.arena.CheckIntegrity(named.ddr));
    EMBERTIDE_RETURN_IF_ERROR(pool.held.CheckIntegrity());
    named.index_bytes += impl_->store.DirectoryBytes(pool);
    if (pool.ssd != nullptr) EMBERTIDE_RETURN_IF_ERROR(pool.ssd->CheckIntegrity(named.ssd));
    const uint64_t reserve = pool.reserve_lent ? 0 : pool.reserve_bytes;
    const uint64_t held = named.index_bytes + pool.nodes.bytes() + pool.arena.page_bytes() +
                          reserve + pool.PolicyBytes() +
                          (pool.notes == nullptr ? 0 : pool.notes->bytes());
    if (pool.budget.used_bytes() != held || held > pool.budget.limit_bytes()) {
      return {Code::kCorrupt, "device " + std::to_string(pool.number) + ": charged " +
                                  std::to_string(pool.budget.used_bytes()) + " bytes, holds " +
                                  std::to_string(held) + ", budget " +
                                  std::to_string(pool.budget.limit_bytes())};
    }
    for (const Table& table : impl_->store.tables) {
      const auto same = [&](const TierCount& counted, const Named::Count& found) {
        return counted.rows == found.rows && counted.bytes == found.bytes;
      };
      const uint32_t t = table.ordinal;
      if (!same(pool.in_ddr[t], named.in_ddr[t]) || !same(pool.in_ssd[t], named.in_ssd[t])) {
        return {Code::kCorrupt, "rows of table " + table.config.name + " are not counted right"};
      }
      const TableShare& share = pool.shares[t];
      if (pool.in_ddr[t].bytes > share.allowed || share.allowed < share.bytes) {
        return {Code::kCorrupt, "rows of table " + table.config.name + " take " +
                                    std::to_string(pool.in_ddr[t].bytes) +
                                    " bytes of DDR and may take " + std::to_string(share.allowed)};
      }
    }
    index_bytes += named.index_bytes;
    rows += held_rows;
  }
  if (impl_->store.hbm != nullptr)
    EMBERTIDE_RETURN_IF_ERROR(impl_->store.hbm->cache().CheckIntegrity());
  if (index_bytes != impl_->store.counters.index_bytes.load()) {
    return {Code::kCorrupt, "index bytes are counted as " +
                                std::to_string(impl_->store.counters.index_bytes.load()) +
                                " and are " + std::to_string(index_bytes)};
  }
  if (rows != impl_->store.counters.rows.load())
    return {Code::kCorrupt, "rows are not counted right"};
  return Status::Ok();
}

}  // namespace embertide
