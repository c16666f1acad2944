// Pruning: a price a byte for the rows of a group of tables, and a pass that leaves what is worth
// it. prune_price.h says what is; prune_sample.h how several stores find one price; waiting_keys.h
// what becomes of keys without a row; prune_state.cc what a checkpoint has of all that.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "embertide/hash.h"
#include "store/prune_sample.h"
#include "store/row_note.h"
#include "store/store_impl.h"

namespace embertide {
namespace {

// Changes whose rows are brought from the SSD at once: of more, many leave again before their turn.
constexpr size_t kReshapedAtOnce = 512;

// Rows that a price is found with, at most: the bytes that they stand for are within 1 % of all.
constexpr uint64_t kSampleRows = 65'536;
// The share of the bytes that a pass leaves free for keys that come until the next.
constexpr double kLeftFree = 0.05;
// Entries of a slice: well under a millisecond.
constexpr uint64_t kSliceEntries = 4096;
// Bits of a hash that choose neither its bucket nor its place in the index.
constexpr uint32_t kSampleShift = 32;
constexpr uint32_t kMaxRare = 64 - kSampleShift - kMaxBucketBits;

// Calls visit(key, place) for a bucket's rows, in slices under its pool's writer, which may change
// them in after(&writer), called at each slice's end.
template <typename Visit, typename After>
void ForEachSlice(Bucket* bucket, const Visit& visit, const After& after) {
  constexpr uint64_t kHashes = uint64_t{1} << 32;
  for (uint64_t begin = 0; begin < kHashes;) {
    WriterLock writer(bucket->pool->writer);
    const uint64_t slices = bucket->index.capacity() / kSliceEntries + 1;
    const uint64_t end = std::min(kHashes, begin + kHashes / slices + 1);
    bucket->index.ForEachIn(begin, end, visit);
    after(&writer);
    begin = end;
  }
}

// A pass over the rows of a group, or a part of one. Takes the writers of pools itself.
class PrunePass {
 public:
  PrunePass(Store::Impl* impl, GroupPrice* group)
      : store_(impl->store),
        reclaimer_(impl->reclaimer),
        residency_(impl->residency),
        rows_(impl->rows),
        group_(*group) {}

  // One of 2^rare rows of the group, after its scales were made anew: a pass begins.
  GroupSample TakeSample(uint32_t rare);
  // The rows that several stores took, this one among them. kInvalidArgument naming the first
  // sample that is of another group, step, stakes or number of rows.
  Result<GroupSample> JoinSamples(std::span<const std::string> samples) const;
  // Its rows with what their counts are worth.
  PriceSample Priced(const GroupSample& sample) const;
  // One bucket's part.
  void PruneBucket(const Table& table, uint32_t bucket, uint32_t max_age, PruneOutcome* outcome);

 private:
  // The utility of each of a row's chunks now.
  std::array<float, kMaxChunks> UtilityOf(const Table& table, const RowNote& note) const;
  // Calls visit(pool, place) for one of 2^rare rows.
  template <typename Visit>
  void ForSomeRows(const Table& table, uint32_t rare, const Visit& visit) const;
  GroupSample EmptySample(uint32_t rare) const;

  const StoreState& store_;
  Reclaimer& reclaimer_;
  Residency& residency_;
  TrainingRows& rows_;
  GroupPrice& group_;
};

std::array<float, kMaxChunks> PrunePass::UtilityOf(const Table& table, const RowNote& note) const {
  std::array<float, kMaxChunks> utility{};
  const double scale = table.pruned_with->scales[table.place_in_group].scale;
  const double kept = scale * store_.decay.Over(RowAux::Steps(note.tick, store_.tick));
  for (uint32_t c = 0; c < table.cost.chunks; ++c) {
    utility[c] = static_cast<float>(kept * static_cast<double>(note.utility[c]));
  }
  if (table.cost.counters != 0) {
    const CountsWorth& counts = table.pruned_with->counts[table.place_in_group];
    utility[table.cost.chunks] = counts.Of(note.log);
  }
  return utility;
}

template <typename Visit>
void PrunePass::ForSomeRows(const Table& table, uint32_t rare, const Visit& visit) const {
  const uint64_t others = (uint64_t{1} << rare) - 1;
  for (uint32_t b = 0; b < table.config.buckets(); ++b) {
    Bucket* bucket = table.Newest(b);
    ForEachSlice(
        bucket,
        [&](uint64_t key, Location place) {
          if ((HashKey(key) >> kSampleShift & others) == 0) visit(bucket->pool, place);
        },
        [](WriterLock*) {});
  }
}

GroupSample PrunePass::TakeSample(uint32_t rare) {
  {
    const MutexLock lock(group_.mutex);
    group_.Scale();
  }
  GroupSample sample = EmptySample(rare);
  for (size_t i = 0; i < sample.tables.size(); ++i) {
    const Table& table = store_.tables[group_.tables[i]];
    const uint32_t chunks = table.cost.chunks;
    TableSample& added = sample.tables[i];
    ForSomeRows(table, rare, [&](const RowPool* pool, Location place) {
      const RowNote note = NoteOf(*pool, table, place);
      const auto utility = UtilityOf(table, note);
      added.rows.insert(added.rows.end(), utility.begin(), utility.begin() + chunks);
      if (table.cost.counters != 0) added.rows.push_back(note.log);
    });
  }
  return sample;
}

GroupSample PrunePass::EmptySample(uint32_t rare) const {
  const MutexLock lock(group_.mutex);
  GroupSample sample{group_.step, rare, {}};
  for (size_t i = 0; i < group_.tables.size(); ++i) {
    const RowCost& cost = store_.tables[group_.tables[i]].cost;
    sample.tables.push_back({group_.scales[i].scale, cost.utilities(), {}});
  }
  return sample;
}

Result<GroupSample> PrunePass::JoinSamples(std::span<const std::string> samples) const {
  GroupSample all = EmptySample(0);
  for (size_t rank = 0; rank < samples.size(); ++rank) {
    const Result<GroupSample> sample = GroupSample::Read(samples[rank]);
    Status added = sample.ok() ? Status::Ok() : sample.status();
    if (rank == 0 && added.ok()) all.rare = std::min(sample.value().rare, kMaxRare);
    if (added.ok()) added = all.Add(sample.value());
    if (!added.ok())
      return Status(added.code(), "sample " + std::to_string(rank) + ": " + added.message());
  }
  return all;
}

PriceSample PrunePass::Priced(const GroupSample& sample) const {
  PriceSample priced;
  std::array<float, kMaxChunks> utility{};
  for (size_t i = 0; i < group_.tables.size(); ++i) {
    const RowCost& cost = store_.tables[group_.tables[i]].cost;
    const TableSample& table = sample.tables[i];
    for (size_t row = 0; row < table.rows.size(); row += table.floats) {
      std::copy_n(table.rows.begin() + static_cast<ptrdiff_t>(row), table.floats, utility.begin());
      if (cost.counters != 0) utility[cost.chunks] = group_.counts[i].Of(utility[cost.chunks]);
      priced.Add(cost, utility.data());
    }
  }
  return priced;
}

void PrunePass::PruneBucket(const Table& table, uint32_t b, uint32_t max_age,
                            PruneOutcome* outcome) {
  Bucket* bucket = table.Newest(b);
  RowPool* pool = bucket->pool;
  struct Change {
    uint64_t key;
    uint16_t was;
    uint16_t live;
    RecordKind kind;
    float utility;  // of all its chunks
  };
  std::vector<Change> changes;  // of a slice
  std::vector<Change> gone;
  const auto visit = [&](uint64_t key, Location place) {
    const RowNote note = NoteOf(*pool, table, place);
    const auto utility = UtilityOf(table, note);
    const uint32_t age = RowAux::Steps(note.tick, store_.tick);
    const bool expired = max_age > 0 && age > max_age;
    const uint16_t live =
        expired ? uint16_t{0} : table.cost.WorthKeeping(utility.data(), group_.price);
    if (live == place.live()) {
      ++outcome->rows;
      outcome->bytes += table.cost.Bytes(live);
      return;
    }
    float sum = 0.0F;
    for (uint32_t c = 0; c < table.cost.utilities(); ++c) sum += utility[c];
    const RecordKind kind = expired ? RecordKind::kExpired : RecordKind::kPruned;
    changes.push_back({key, place.live(), live, kind, sum});
  };
  std::vector<Access> reshaped;  // of some changes: rows that stay with other chunks
  const auto bring = [&](size_t first, WriterLock* writer) {
    reshaped.clear();
    for (size_t i = first; i < std::min(first + kReshapedAtOnce, changes.size()); ++i) {
      if (changes[i].live != 0) reshaped.push_back({changes[i].key, table.ordinal});
    }
    residency_.BringRows(pool, reshaped, writer);
  };
  const auto apply = [&](WriterLock* writer) {
    pool->TakeReserveBack();
    for (size_t i = 0; i < changes.size(); ++i) {
      if (pool->ssd != nullptr && i % kReshapedAtOnce == 0) bring(i, writer);
      const Change& each = changes[i];
      uint16_t live = each.live;
      if (!rows_.ChangeLive(pool, table, b, each.key, live, each.kind).ok()) {
        ++outcome->rows_unchanged;
        live = each.was;
      } else if (live != 0) {
        outcome->chunks_pruned += static_cast<uint32_t>(std::popcount<uint16_t>(each.was & ~live));
        outcome->chunks_regrown += static_cast<uint32_t>(std::popcount<uint16_t>(live & ~each.was));
      }
      if (live == 0) {
        gone.push_back(each);
        ++(each.kind == RecordKind::kExpired ? outcome->rows_expired : outcome->rows_pruned);
        continue;
      }
      ++outcome->rows;
      outcome->bytes += table.cost.Bytes(live);
    }
    changes.clear();
    reclaimer_.Reclaim(pool);
  };
  ForEachSlice(bucket, visit, apply);
  {
    const std::lock_guard writer(pool->writer);
    residency_.ShrinkIndex(pool, bucket);
  }
  // In an order that does not depend on where they stood.
  std::ranges::sort(gone, {}, &Change::key);
  const MutexLock lock(group_.mutex);
  for (const Change& each : gone) {
    if (each.kind == RecordKind::kExpired) continue;
    group_.waiting.Add(PruneHash(table, each.key), each.utility, group_.step);
  }
}

}  // namespace

Result<uint64_t> TrainingStore::PruneRows(uint32_t g) const {
  EMBERTIDE_RETURN_IF_ERROR(impl_->store.CheckGroup(g));
  uint64_t rows = 0;
  for (const uint32_t t : impl_->store.groups[g]->tables) {
    const Table& table = impl_->store.tables[t];
    for (uint32_t b = 0; b < table.config.buckets(); ++b) {
      rows += table.Newest(b)->index.size();
    }
  }
  return rows;
}

Result<std::string> TrainingStore::PruneSample(uint32_t g, uint64_t rows) {
  EMBERTIDE_RETURN_IF_ERROR(impl_->store.CheckGroup(g));
  const uint32_t rare =
      std::min(kMaxRare, static_cast<uint32_t>(std::bit_width(rows / kSampleRows)));
  return PrunePass(impl_.get(), impl_->store.groups[g].get()).TakeSample(rare).Write();
}

Result<PruneOutcome> TrainingStore::Prune(uint32_t g, uint64_t bytes, uint32_t max_age,
                                          std::span<const std::string> samples) {
  EMBERTIDE_RETURN_IF_ERROR(impl_->store.CheckGroup(g));
  GroupPrice* group = impl_->store.groups[g].get();
  uint64_t least = 0;
  for (const uint32_t t : group->tables) {
    least = std::max(least, impl_->store.tables[t].cost.FullBytes());
  }
  if (bytes < least) {
    return Status(Code::kInvalidArgument, "pruning to " + std::to_string(bytes) +
                                              " bytes, less than one row of " +
                                              std::to_string(least));
  }
  PrunePass pass(impl_.get(), group);
  std::string own;
  if (samples.empty()) {
    own = std::move(PruneSample(g, PruneRows(g).value()).value());
    samples = {&own, 1};
  }
  const Result<GroupSample> sample = pass.JoinSamples(samples);
  if (!sample.ok()) return sample.status();
  for (size_t i = 0; i < group->counts.size(); ++i) {
    CountsWorth& counts = group->counts[i];
    if (counts.of.worth == 0.0F) continue;
    const CountsWorth found =
        sample.value().tables[i].FindWorth(impl_->store.tables[counts.of.table].cost, counts);
    const MutexLock lock(group->mutex);
    counts = found;
  }
  const PriceSample priced = pass.Priced(sample.value());
  const auto aim = static_cast<uint64_t>(static_cast<double>(bytes) * (1.0 - kLeftFree));
  {
    const MutexLock lock(group->mutex);
    group->price = priced.PriceFor(aim >> sample.value().rare);
  }
  PruneOutcome outcome;
  outcome.price = group->price;
  for (const uint32_t t : group->tables) {
    for (uint32_t b = 0; b < impl_->store.tables[t].config.buckets(); ++b) {
      pass.PruneBucket(impl_->store.tables[t], b, max_age, &outcome);
    }
  }
  const MutexLock lock(group->mutex);
  // The bytes that others left are not known here.
  group->room = samples.size() > 1 ? 0 : bytes - std::min(bytes, outcome.bytes);
  return outcome;
}

Status TrainingStore::RecordSensitivity(uint32_t t, double at_stake, double squares) {
  EMBERTIDE_RETURN_IF_ERROR(impl_->store.CheckTable(t));
  const Table& table = impl_->store.tables[t];
  const bool sums = at_stake >= 0.0 && squares >= 0.0 && std::isfinite(at_stake + squares);
  if (table.pruned_with == nullptr || !sums) {
    return {Code::kInvalidArgument, "table " + table.config.name + ": a stake of " +
                                        std::to_string(at_stake) + " in squares of " +
                                        std::to_string(squares) +
                                        ": give sums of squares, of a table that is pruned"};
  }
  GroupPrice& group = *table.pruned_with;
  const MutexLock lock(group.mutex);
  group.scales[table.place_in_group].Add(at_stake, squares, group.step, impl_->store.decay);
  return Status::Ok();
}

Result<uint64_t> TrainingStore::PruneRoom(uint32_t g) const {
  EMBERTIDE_RETURN_IF_ERROR(impl_->store.CheckGroup(g));
  const MutexLock lock(impl_->store.groups[g]->mutex);
  return impl_->store.groups[g]->room;
}

Status TrainingStore::SetPruneRoom(uint32_t g, uint64_t bytes) {
  EMBERTIDE_RETURN_IF_ERROR(impl_->store.CheckGroup(g));
  const MutexLock lock(impl_->store.groups[g]->mutex);
  impl_->store.groups[g]->room = bytes;
  return Status::Ok();
}

Result<uint64_t> TrainingStore::SeenBytes(uint32_t g) const {
  EMBERTIDE_RETURN_IF_ERROR(impl_->store.CheckGroup(g));
  GroupPrice& group = *impl_->store.groups[g];
  const MutexLock lock(group.mutex);
  double bytes = 0.0;
  for (const GroupPrice::SeenKeys& each : group.seen) {
    bytes += each.keys.Estimate() * static_cast<double>(each.row_bytes);
  }
  return static_cast<uint64_t>(bytes);
}

}  // namespace embertide
