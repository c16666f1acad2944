// Pruning: a price a byte for the rows of a group of tables, and a pass that leaves what is worth
// it. prune_price.h says what is; prune_sample.h how several stores find one price; waiting_keys.h
// what becomes of keys without a row; prune_state.cc what a checkpoint has of all that.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "store/prune_sample.h"
#include "store/store_impl.h"

namespace embertide {
namespace {

// Changes whose rows are brought from the SSD at once: of more, many leave again before their turn.
constexpr size_t kReshapedAtOnce = 512;

// Rows that a price is found with, at most: the bytes that they stand for are within 1 % of all.
constexpr uint64_t kSampleRows = 65'536;
// Of the bytes, what a pass leaves free for keys that come until the next.
constexpr double kLeftFree = 0.05;
// Entries of a slice: well under a millisecond.
constexpr uint64_t kSliceEntries = 4096;
// Bits of a hash that choose neither its bucket nor its place in the index.
constexpr uint32_t kSampleShift = 32;
constexpr uint32_t kMostRare = 64 - kSampleShift - kMaxBucketBits;

uint64_t HashIn(const Table& table, uint64_t key) {
  // A key of several tables is several keys.
  return HashKey(HashKey(key) + table.config.id);
}

}  // namespace

Status Store::Impl::CheckGroup(uint32_t group) const {
  if (group < groups.size()) return Status::Ok();
  return {Code::kInvalidArgument, "prune group " + std::to_string(group) +
                                      " does not exist; there are " +
                                      std::to_string(groups.size())};
}

std::optional<float> Store::Impl::Worth(const Table& table, uint64_t key, float earned) {
  GroupPrice& group = *table.pruned_with;
  const MutexLock lock(group.mutex);
  const uint64_t hash = HashIn(table, key);
  group.seen[group.seen_of[table.place_in_group]].keys.Add(hash);
  const auto scale = static_cast<float>(group.scales[table.place_in_group].scale);
  const float utility = group.waiting.Add(hash, earned * scale, group.step);
  return Admit(&group, hash, utility, table.cost.FullBytes()) ? std::optional(utility / scale)
                                                              : std::nullopt;
}

bool Store::Impl::WorthCounting(const Table& table, uint64_t key, const float* logs) {
  if (table.pruned_with == nullptr) return false;
  GroupPrice& group = *table.pruned_with;
  const MutexLock lock(group.mutex);
  const CountsWorth& counts = group.counts[table.place_in_group];
  const float worth = counts.Of(logs[counts.of.counter]);
  if (!(worth > 0.0F)) return false;
  const uint64_t hash = HashIn(table, key);
  const float utility = group.waiting.Add(hash, worth, group.step);
  return Admit(&group, hash, utility, table.cost.LeastBytes());
}

bool Store::Impl::Admit(GroupPrice* group, uint64_t hash, float utility, uint64_t bytes) {
  if (!(utility > group->price * static_cast<float>(bytes))) {
    ++unworthy_keys;
    return false;
  }
  if (group->room < bytes) {
    ++worthy_keys_without_room;
    return false;
  }
  group->room -= bytes;
  group->waiting.Remove(hash);
  return true;
}

template <typename Visit, typename After>
void Store::Impl::ForEachSlice(Bucket* bucket, const Visit& visit, const After& after) {
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

Store::Impl::RowNote Store::Impl::NoteOf(const RowPool* pool, const Table& table, Location place) {
  const uint32_t chunks = table.cost.chunks;
  if (place.tier() == TierId::kSsd) {
    const uint32_t* words = pool->notes->Find(place.slot());
    EMBERTIDE_CHECK(words != nullptr);
    const auto* floats = reinterpret_cast<const float*>(words + 1);
    return {words[0], floats, table.cost.counters != 0 ? floats[chunks] : 0.0F};
  }
  RowAux* aux = AuxOf(pool, place);
  return {aux->tick, aux->utility(), LogIn(table, place.live(), pool->arena.Address(place.slot()))};
}

float Store::Impl::LogIn(const Table& table, uint16_t live, const std::byte* payload) {
  if ((live & table.cost.counters) == 0) return 0.0F;
  const RowLayout learned = table.config.learned();
  const uint32_t counter = table.pruned_with->counts[table.place_in_group].of.counter;
  const auto before = learned.PayloadBytes(static_cast<uint16_t>(live & learned.full_mask()));
  float log = 0.0F;
  std::memcpy(&log, payload + before + counter * sizeof(log), sizeof(log));
  return log;
}

std::array<float, kMaxChunks> Store::Impl::UtilityOf(const Table& table,
                                                     const RowNote& note) const {
  std::array<float, kMaxChunks> utility{};
  const double scale = table.pruned_with->scales[table.place_in_group].scale;
  const double kept = scale * decay.Over(RowAux::Steps(note.tick, tick));
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
void Store::Impl::ForSomeRows(const Table& table, uint32_t rare, const Visit& visit) const {
  const uint64_t others = (uint64_t{1} << rare) - 1;
  for (uint32_t b = 0; b < table.config.buckets(); ++b) {
    Bucket* bucket = Newest(table, b);
    ForEachSlice(
        bucket,
        [&](uint64_t key, Location place) {
          if ((HashKey(key) >> kSampleShift & others) == 0) visit(bucket->pool, place);
        },
        [](WriterLock*) {});
  }
}

GroupSample Store::Impl::TakeSample(GroupPrice* group, uint32_t rare) const {
  {
    const MutexLock lock(group->mutex);
    group->Scale();
  }
  GroupSample sample = EmptySample(group, rare);
  for (size_t i = 0; i < sample.tables.size(); ++i) {
    const Table& table = tables[group->tables[i]];
    const uint32_t chunks = table.cost.chunks;
    TableSample& added = sample.tables[i];
    ForSomeRows(table, rare, [&](const RowPool* pool, Location place) {
      const RowNote note = NoteOf(pool, table, place);
      const auto utility = UtilityOf(table, note);
      added.rows.insert(added.rows.end(), utility.begin(), utility.begin() + chunks);
      if (table.cost.counters != 0) added.rows.push_back(note.log);
    });
  }
  return sample;
}

GroupSample Store::Impl::EmptySample(GroupPrice* group, uint32_t rare) const {
  const MutexLock lock(group->mutex);
  GroupSample sample{group->step, rare, {}};
  for (size_t i = 0; i < group->tables.size(); ++i) {
    const RowCost& cost = tables[group->tables[i]].cost;
    sample.tables.push_back({group->scales[i].scale, cost.utilities(), {}});
  }
  return sample;
}

Result<GroupSample> Store::Impl::JoinSamples(GroupPrice* group,
                                             std::span<const std::string> samples) const {
  GroupSample all = EmptySample(group, 0);
  for (size_t rank = 0; rank < samples.size(); ++rank) {
    const Result<GroupSample> sample = GroupSample::Read(samples[rank]);
    Status added = sample.ok() ? Status::Ok() : sample.status();
    if (rank == 0 && added.ok()) all.rare = std::min(sample.value().rare, kMostRare);
    if (added.ok()) added = all.Add(sample.value());
    if (!added.ok())
      return Status(added.code(), "sample " + std::to_string(rank) + ": " + added.message());
  }
  return all;
}

PriceSample Store::Impl::Priced(const GroupPrice& group, const GroupSample& sample) const {
  PriceSample priced;
  std::array<float, kMaxChunks> utility{};
  for (size_t i = 0; i < group.tables.size(); ++i) {
    const RowCost& cost = tables[group.tables[i]].cost;
    const TableSample& table = sample.tables[i];
    for (size_t row = 0; row < table.rows.size(); row += table.floats) {
      std::copy_n(table.rows.begin() + static_cast<ptrdiff_t>(row), table.floats, utility.begin());
      if (cost.counters != 0) utility[cost.chunks] = group.counts[i].Of(utility[cost.chunks]);
      priced.Add(cost, utility.data());
    }
  }
  return priced;
}

void Store::Impl::PruneBucket(GroupPrice* group, const Table& table, uint32_t b, uint32_t max_age,
                              PruneOutcome* outcome) {
  Bucket* bucket = Newest(table, b);
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
    const RowNote note = NoteOf(pool, table, place);
    const auto utility = UtilityOf(table, note);
    const uint32_t age = RowAux::Steps(note.tick, tick);
    const bool expired = max_age > 0 && age > max_age;
    const uint16_t live =
        expired ? uint16_t{0} : table.cost.WorthKeeping(utility.data(), group->price);
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
    BringRows(pool, reshaped, writer);
  };
  const auto apply = [&](WriterLock* writer) {
    TakeReserveBack(pool);
    for (size_t i = 0; i < changes.size(); ++i) {
      if (pool->ssd != nullptr && i % kReshapedAtOnce == 0) bring(i, writer);
      const Change& each = changes[i];
      uint16_t live = each.live;
      if (!ChangeLive(pool, table, b, each.key, live, each.kind).ok()) {
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
    Reclaim(pool);
  };
  ForEachSlice(bucket, visit, apply);
  {
    const std::lock_guard writer(pool->writer);
    ShrinkIndex(pool, bucket);
  }
  // In an order that does not depend on where they stood.
  std::ranges::sort(gone, {}, &Change::key);
  const MutexLock lock(group->mutex);
  for (const Change& each : gone) {
    if (each.kind == RecordKind::kExpired) continue;
    group->waiting.Add(HashIn(table, each.key), each.utility, group->step);
  }
}

Result<uint64_t> Store::PruneRows(uint32_t g) const {
  EMBERTIDE_RETURN_IF_ERROR(impl_->CheckGroup(g));
  uint64_t rows = 0;
  for (const uint32_t t : impl_->groups[g]->tables) {
    const Table& table = impl_->tables[t];
    for (uint32_t b = 0; b < table.config.buckets(); ++b) {
      rows += Store::Impl::Newest(table, b)->index.size();
    }
  }
  return rows;
}

Result<std::string> Store::PruneSample(uint32_t g, uint64_t rows) {
  EMBERTIDE_RETURN_IF_ERROR(impl_->CheckGroup(g));
  const uint32_t rare =
      std::min(kMostRare, static_cast<uint32_t>(std::bit_width(rows / kSampleRows)));
  return impl_->TakeSample(impl_->groups[g].get(), rare).Write();
}

Result<PruneOutcome> Store::Prune(uint32_t g, uint64_t bytes, uint32_t max_age,
                                  std::span<const std::string> samples) {
  EMBERTIDE_RETURN_IF_ERROR(impl_->CheckGroup(g));
  GroupPrice* group = impl_->groups[g].get();
  uint64_t least = 0;
  for (const uint32_t t : group->tables) {
    least = std::max(least, impl_->tables[t].cost.FullBytes());
  }
  if (bytes < least) {
    return Status(Code::kInvalidArgument, "pruning to " + std::to_string(bytes) +
                                              " bytes, less than one row of " +
                                              std::to_string(least));
  }
  std::string own;
  if (samples.empty()) {
    own = std::move(PruneSample(g, PruneRows(g).value()).value());
    samples = {&own, 1};
  }
  const Result<GroupSample> sample = impl_->JoinSamples(group, samples);
  if (!sample.ok()) return sample.status();
  for (size_t i = 0; i < group->counts.size(); ++i) {
    CountsWorth& counts = group->counts[i];
    if (counts.of.worth == 0.0F) continue;
    const CountsWorth found =
        sample.value().tables[i].FindWorth(impl_->tables[counts.of.table].cost, counts);
    const MutexLock lock(group->mutex);
    counts = found;
  }
  const PriceSample priced = impl_->Priced(*group, sample.value());
  const auto aim = static_cast<uint64_t>(static_cast<double>(bytes) * (1.0 - kLeftFree));
  {
    const MutexLock lock(group->mutex);
    group->price = priced.PriceFor(aim >> sample.value().rare);
  }
  PruneOutcome outcome;
  outcome.price = group->price;
  for (const uint32_t t : group->tables) {
    for (uint32_t b = 0; b < impl_->tables[t].config.buckets(); ++b) {
      impl_->PruneBucket(group, impl_->tables[t], b, max_age, &outcome);
    }
  }
  const MutexLock lock(group->mutex);
  // What others left of the bytes is not known here.
  group->room = samples.size() > 1 ? 0 : bytes - std::min(bytes, outcome.bytes);
  return outcome;
}

Status Store::NoteStake(uint32_t t, double at_stake, double squares) {
  EMBERTIDE_RETURN_IF_ERROR(impl_->CheckTable(t));
  const Table& table = impl_->tables[t];
  const bool sums = at_stake >= 0.0 && squares >= 0.0 && std::isfinite(at_stake + squares);
  if (table.pruned_with == nullptr || !sums) {
    return {Code::kInvalidArgument, "table " + table.config.name + ": a stake of " +
                                        std::to_string(at_stake) + " in squares of " +
                                        std::to_string(squares) +
                                        ": give sums of squares, of a table that is pruned"};
  }
  GroupPrice& group = *table.pruned_with;
  const MutexLock lock(group.mutex);
  group.scales[table.place_in_group].Add(at_stake, squares, group.step, impl_->decay);
  return Status::Ok();
}

Result<uint64_t> Store::PruneRoom(uint32_t g) const {
  EMBERTIDE_RETURN_IF_ERROR(impl_->CheckGroup(g));
  const MutexLock lock(impl_->groups[g]->mutex);
  return impl_->groups[g]->room;
}

Status Store::SetPruneRoom(uint32_t g, uint64_t bytes) {
  EMBERTIDE_RETURN_IF_ERROR(impl_->CheckGroup(g));
  const MutexLock lock(impl_->groups[g]->mutex);
  impl_->groups[g]->room = bytes;
  return Status::Ok();
}

Result<uint64_t> Store::SeenBytes(uint32_t g) const {
  EMBERTIDE_RETURN_IF_ERROR(impl_->CheckGroup(g));
  GroupPrice& group = *impl_->groups[g];
  const MutexLock lock(group.mutex);
  double bytes = 0.0;
  for (const GroupPrice::SeenKeys& each : group.seen) {
    bytes += each.keys.Estimate() * static_cast<double>(each.row_bytes);
  }
  return static_cast<uint64_t>(bytes);
}

}  // namespace embertide
