// LookupScratch: what a thread keeps for its lookups, and what is counted and told of their keys.
//
// Used by one thread, within one BagReader.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "store/finder.h"
#include "store/gap_sampler.h"
#include "store/row_ops.h"
#include "store/store_state.h"

namespace embertide {

// Keys of a chunk: SSD reads come in batches far deeper than a drive's queue, and what a chunk
// notes of its keys stays in the second-level cache. A chunk has whole samples, so at most twice as
// many; a sample with more keys is answered in pieces. That bounds what a thread keeps: 16 MiB, if
// all rows lie on an SSD and take a block each.
inline constexpr size_t kChunkKeys = 2048;

// One batch's working memory, kept by each thread; bounded as kChunkKeys says. The reads of a
// peer's call have a bound of their own (peer/limits.h), and the misses of HBM are a batch at most.
struct LookupScratch {
  Finder finder;
  std::vector<double> sums;
  std::vector<SourceCounts> counts;  // by table
  std::vector<ObservedRead> observed;
  GapSampler gaps;
  size_t until_observed = 0;  // keys
  // A batch that failed leaves nothing to the next, which may be another store's.
  void Begin(size_t tables) {
    counts.assign(tables, SourceCounts{});
    observed.clear();
    finder.accesses().clear();
    finder.watched().clear();
  }
};

// That of the calling thread, and what it takes.
LookupScratch& ThreadLookupScratch();
size_t LookupScratchBytes();

// Notes a found key for the observer.
void Observe(const Table& table, uint64_t key, const FoundRow& found, uint32_t weight,
             LookupScratch* scratch);

// Counts the n keys from `at` on, all of one table and found, and notes them for the observer.
inline void Tally(const StoreState& store, const Table& table, size_t at, size_t n,
                  LookupScratch* scratch) {
  const Finder& finder = scratch->finder;
  const FoundRow* found = finder.found();
  SourceCounts& counts = scratch->counts[table.ordinal];
  if (finder.only_ddr()) {
    counts[static_cast<size_t>(Source::kDdr)] += n;
  } else {
    for (size_t i = at; i < at + n; ++i) ++counts[static_cast<size_t>(found[i].source)];
  }
  if (store.options.observer == nullptr) return;
  const uint32_t every = store.options.observer->every();
  size_t next = scratch->until_observed;
  for (; next < n; next += 1 + scratch->gaps.Gap(every)) {
    const size_t i = at + next;
    if (!finder.remote(i)) Observe(table, finder.key(i), found[i], every, scratch);
  }
  scratch->until_observed = next - n;
}

// A peer's sums are of weighed rows already. A null weight is 1.
inline void AddOne(const Table& table, const FoundRow& found, const float* weight, double* sums) {
  const uint32_t dim = table.config.layout.dim();
  switch (found.kind) {
    case FoundKind::kRow:
      return AddRows(table.config.layout, &found, weight, 1, sums);
    case FoundKind::kDefault: {
      const double by = weight == nullptr ? 1.0 : double{*weight};
      for (uint32_t d = 0; d < dim; ++d) sums[d] += by * table.default_row[d];
      return;
    }
    case FoundKind::kSums: {
      const auto* others = reinterpret_cast<const double*>(found.payload);
      for (uint32_t d = 0; d < dim; ++d) sums[d] += others[d];
      return;
    }
    case FoundKind::kNothing:
      return;
  }
}

// Finds all keys of a request, to be read from the finder, and counts them. Errors are those of
// Finder::FindAll.
Status FindAll(const StoreState& store, uint64_t version, std::span<const BagFeature> features,
               const KeyBags& keys, LookupScratch* scratch, bool note_changes = false);
// Tells the policies of what was read, and the observer of what it is to hear.
void Tell(const StoreState& store, LookupScratch* scratch);

}  // namespace embertide
