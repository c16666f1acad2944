// Rows of DDR copied to HBM, and ended there.
#include "store/hbm_fill.h"

#include <algorithm>
#include <mutex>

#include "embertide/hash.h"

namespace embertide {
namespace {

// The row's payload, versions and live mask, if it is in DDR in this pool, asked for often enough
// and has any. Requires: the pool's writer.
bool RowForHbm(const StoreState& store, const RowPool* pool, HbmRow* row) {
  const Table& table = store.tables[row->table];
  const uint64_t hash = HashKey(row->key);
  const Bucket* bucket = table.NewestOf(hash);
  if (bucket == nullptr || bucket->pool != pool) return false;
  const uint32_t entry = bucket->index.Locate(hash, row->key);
  if (entry == BucketIndex::kNotFound) return false;
  if (bucket->index.AccessCount(hash, row->key) < store.hbm->AccessesToEnter(row->table))
    return false;
  const uint64_t newest_version = store.newest.load();
  // Out of its chain, a row has not changed since the window began.
  row->since = store.oldest.load();
  row->until = kHbmOpenEnd;
  Location place = bucket->index.At(entry);
  if (place.is_chain()) {
    const VersionNode* node = place.chain();
    for (; node != nullptr && node->version > newest_version; node = node->older.load()) {
      row->until = node->version;
    }
    if (node == nullptr) return false;
    if (node->version != 0) row->since = node->version;
    place = Location::FromWord(node->word.load());
  }
  if (place.tier() != TierId::kDdr || place.live() == 0) return false;
  row->since = std::max(row->since, bucket->since);
  row->live = place.live();
  row->payload = {pool->arena.Address(place.slot()),
                  table.config.layout.PayloadBytes(place.live())};
  return true;
}

}  // namespace

void EndInHbm(const StoreState& store, uint32_t table, const Bucket& bucket) {
  // No version is below 1.
  bucket.index.Walk(0, bucket.index.capacity(), [&](uint32_t e, Location /*place*/) {
    store.hbm->cache().End(table, bucket.index.KeyAt(e), 1);
    return true;
  });
  store.hbm->cache().Flush();
}

void FillHbm(const StoreState& store) {
  const std::unique_lock filling(store.hbm->filling(), std::try_to_lock);
  // Before the first version rows change where they are.
  if (!filling.owns_lock() || store.newest.load() == 0) return;
  HbmCache& cache = store.hbm->cache();
  auto wanted = store.hbm->TakeWishes();
  for (uint32_t h = 0; h < cache.devices(); ++h) {
    if (!wanted[h].empty()) cache.Survey(h, wanted[h]);
  }
  const uint64_t safe = store.readers.MinEpoch();
  for (const auto& pool : store.pools) {
    // Whoever changes a row holds this lock, and ends the row in HBM before letting go of it.
    const std::lock_guard writer(pool->writer);
    for (uint32_t h = 0; h < cache.devices(); ++h) {
      std::vector<HbmRow> rows;
      for (HbmRow& row : wanted[h]) {
        if (RowForHbm(store, pool.get(), &row)) rows.push_back(row);
      }
      cache.Place(h, rows, store.oldest.load(), safe, [&] { return store.readers.Retire(); });
    }
  }
}

}  // namespace embertide
