// Reads that give rows, keys or sums as they are: for peers, and for columns that a node makes.
#include <algorithm>
#include <string>

#include "store/lookup_scratch.h"
#include "store/store_impl.h"

namespace embertide {

// Finds keys of one table, for peers. A key that is asked for again, to be kept, is no read.
static Status FindForPeer(const StoreState& store, uint64_t version, uint32_t table,
                          std::span<const int64_t> keys, bool again, LookupScratch* scratch,
                          uint8_t* sources) {
  EMBERTIDE_RETURN_IF_ERROR(store.CheckTable(table));
  scratch->Begin(store.tables.size());
  const BagFeature feature{table, Pooling::kSum, 0};
  const KeyBags bags{keys, {}, nullptr, 0};
  EMBERTIDE_RETURN_IF_ERROR(FindAll(store, version, {&feature, 1}, bags, scratch, again));
  if (again) {
    scratch->observed.clear();
    scratch->finder.watched().clear();
  }
  for (ObservedRead& read : scratch->observed) read.for_peer = true;
  Tell(store, scratch);
  for (size_t i = 0; i < keys.size(); ++i) {
    sources[i] = static_cast<uint8_t>(scratch->finder.found()[i].source);
  }
  const SourceCounts& counts = scratch->counts[table];
  for (size_t s = 0; s < kSources; ++s) {
    if (counts[s] > 0) store.counters.hits[s].fetch_add(counts[s], std::memory_order_relaxed);
  }
  return Status::Ok();
}

Status BagReader::CopyRows(uint32_t table, std::span<const int64_t> keys, std::string* records,
                           uint8_t* sources, const ReadView* since) const {
  const StoreState& store = view_.store_->impl_->store;
  LookupScratch& scratch = ThreadLookupScratch();
  EMBERTIDE_RETURN_IF_ERROR(
      FindForPeer(store, view_.version_, table, keys, since != nullptr, &scratch, sources));
  const RowLayout& layout = store.tables[table].config.layout;
  std::vector<std::byte> bytes;
  bytes.reserve(keys.size() * (kRecordHeaderBytes + layout.PayloadBytes(layout.full_mask())));
  for (size_t i = 0; i < keys.size(); ++i) {
    if (since != nullptr && !scratch.finder.ChangedSince(i, since->version())) {
      sources[i] = kUnchangedSource;
      continue;
    }
    const FoundRow& found = scratch.finder.found()[i];
    if (found.kind != FoundKind::kRow) continue;
    AppendRecord({static_cast<uint64_t>(keys[i]),
                  found.live,
                  RecordKind::kRow,
                  {found.payload, layout.PayloadBytes(found.live)}},
                 &bytes);
  }
  records->append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return Status::Ok();
}

Status BagReader::CopyKeys(uint32_t table, const KeyBags& request, int64_t* out, uint8_t* sources,
                           std::span<SourceCounts> counts) const {
  const StoreState& store = view_.store_->impl_->store;
  EMBERTIDE_RETURN_IF_ERROR(store.CheckTable(table));
  const RowLayout& layout = store.tables[table].config.layout;
  if (!layout.is_keys()) {
    return {Code::kInvalidArgument,
            "table " + store.tables[table].config.name + " has rows of values, and no keys"};
  }
  LookupScratch& scratch = ThreadLookupScratch();
  scratch.Begin(store.tables.size());
  const BagFeature feature{table, Pooling::kSum, 0};
  for (size_t first = 0; first < request.keys.size(); first += kChunkKeys) {
    KeyBags piece;
    piece.keys = request.keys.subspan(first, std::min(kChunkKeys, request.keys.size() - first));
    if (request.remote_of != nullptr) piece.remote_of = request.remote_of + first;
    piece.remote = request.remote;
    EMBERTIDE_RETURN_IF_ERROR(FindAll(store, view_.version_, {&feature, 1}, piece, &scratch));
    for (size_t i = 0; i < piece.keys.size(); ++i, out += layout.dim()) {
      const FoundRow& found = scratch.finder.found()[i];
      const bool is_row = found.kind == FoundKind::kRow;
      embertide::CopyKeys(layout, is_row ? found.live : uint16_t{0}, found.payload, out);
      if (sources != nullptr) *sources++ = static_cast<uint8_t>(found.source);
    }
  }
  Tell(store, &scratch);
  for (size_t s = 0; s < kSources; ++s) {
    const uint64_t found = scratch.counts[table][s];
    if (!counts.empty()) counts[table][s] += found;
    if (found > 0) store.counters.hits[s].fetch_add(found, std::memory_order_relaxed);
  }
  return Status::Ok();
}

Status BagReader::SumBags(uint32_t table, std::span<const int64_t> keys,
                          std::span<const uint32_t> offsets, std::span<const uint32_t> places,
                          std::span<const float> weights, double* sums, uint8_t* sources) const {
  const StoreState& store = view_.store_->impl_->store;
  EMBERTIDE_RETURN_IF_ERROR(store.CheckValues(table));
  LookupScratch& scratch = ThreadLookupScratch();
  EMBERTIDE_RETURN_IF_ERROR(
      FindForPeer(store, view_.version_, table, keys, /*again=*/false, &scratch, sources));
  const Table& of = store.tables[table];
  const uint32_t dim = of.config.layout.dim();
  std::fill_n(sums, (offsets.size() - 1) * dim, 0.0);
  for (size_t bag = 0; bag + 1 < offsets.size(); ++bag, sums += dim) {
    for (uint32_t k = offsets[bag]; k < offsets[bag + 1]; ++k) {
      const float* weight = weights.empty() ? nullptr : &weights[k];
      AddOne(of, scratch.finder.found()[places[k]], weight, sums);
    }
  }
  return Status::Ok();
}

}  // namespace embertide
