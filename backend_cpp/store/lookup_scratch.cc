// LookupScratch, the memory that a thread keeps for its lookups: see the header.
#include "store/lookup_scratch.h"

#include <algorithm>
#include <mutex>

#include "embertide/hash.h"

namespace embertide {

LookupScratch& ThreadLookupScratch() {
  thread_local LookupScratch scratch;
  return scratch;
}

void Observe(const Table& table, uint64_t key, const FoundRow& found, uint32_t weight,
             LookupScratch* scratch) {
  const uint64_t hash = HashKey(key);
  scratch->observed.push_back({key, hash, table.ordinal, table.BucketOf(hash),
                               table.config.layout.PayloadBytes(found.live), weight, found.source});
}

Status FindAll(const StoreState& store, uint64_t version, std::span<const BagFeature> features,
               const KeyBags& keys, LookupScratch* scratch, bool note_changes) {
  Finder& finder = scratch->finder;
  finder.Begin(&store, version);
  if (note_changes) finder.NoteChanges();
  finder.Add(features, keys);
  EMBERTIDE_RETURN_IF_ERROR(finder.FindAll());
  for (size_t bag = 0, at = 0; bag < keys.bags(); ++bag) {
    const size_t n = keys.begin_of(bag + 1) - keys.begin_of(bag);
    Tally(store, store.tables[features[bag % features.size()].table], at, n, scratch);
    at += n;
  }
  finder.Count();
  return Status::Ok();
}

// Tells the policies of what was read, pool by pool. A reader never waits: while a log is being
// emptied, what it has to tell is lost, and counted.
static void TellPolicies(const StoreState& store, LookupScratch* scratch) {
  auto& accesses = scratch->finder.accesses();
  if (accesses.empty()) return;
  const auto by_pool = [](const auto& a, const auto& b) { return a.first < b.first; };
  if (store.pools.size() > 1) std::stable_sort(accesses.begin(), accesses.end(), by_pool);
  uint64_t told = 0;
  for (size_t i = 0; i < accesses.size();) {
    RowPool* pool = accesses[i].first;
    const size_t first = i;
    while (i < accesses.size() && accesses[i].first == pool) ++i;
    if (!pool->accesses_mutex.try_lock()) continue;
    const MutexLock lock(pool->accesses_mutex, std::adopt_lock);
    const size_t room = pool->most_accesses - pool->accesses.size();
    const size_t end = first + std::min(room, i - first);
    for (size_t k = first; k < end; ++k) pool->accesses.push_back(accesses[k].second);
    told += end - first;
  }
  if (told < accesses.size()) store.counters.dropped_accesses += accesses.size() - told;
  accesses.clear();
}

void Tell(const StoreState& store, LookupScratch* scratch) {
  TellPolicies(store, scratch);
  if (store.options.observer == nullptr) return;
  std::vector<WatchedKey>& watched = scratch->finder.watched();
  if (!watched.empty()) store.options.observer->Watch(watched);
  if (!scratch->observed.empty()) store.options.observer->Observe(scratch->observed);
  watched.clear();
  scratch->observed.clear();
}

size_t LookupScratchBytes() {
  const LookupScratch& scratch = ThreadLookupScratch();
  return scratch.finder.memory_bytes() + scratch.sums.capacity() * sizeof(double);
}

}  // namespace embertide
