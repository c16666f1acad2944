// The training step: an exact step of the optimizer for all of a batch and the utility of its rows'
// chunks, a table after the other.
//
// The occurrences of a table's keys are dealt out to parts, each of a range of hashes and of one
// device, in the order of the batch; of keys whose places a lookup has told, each of some blocks of
// DDR, so that a part's rows lie on few pages. Parts have no key in common, so several threads may
// be at them (part_worker.h). A pool's writer is held for a turn of some parts at a time, so that
// others get theirs. Keys without a row in DDR come last of all (late_keys.h): theirs is made, or
// brought from the SSD. The parts do not depend on the threads, nor does any sum; turns are
// longer with more of them, for each begins and ends with all.
#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "store/late_keys.h"
#include "store/part_worker.h"
#include "store/store_impl.h"

namespace embertide {
namespace {

// Occurrences of a part, on average: with what is noted of them they fill a second-level cache.
constexpr size_t kPartKeys = 1024;
// Occurrences that each thread brings in while a pool's writer is held: about a millisecond.
constexpr size_t kTurnKeys = 16384;
// That a thread deals out at least: less is not worth its while.
constexpr size_t kMinDealt = 4096;
// At most one key in so many of a batch may lack a known place; else all keys are looked for.
constexpr size_t kMinKnown = 4;
// Keys of a call: occurrences, and the slots that they are grouped in, are numbered by 32 bits.
constexpr size_t kMaxKeys = 1U << 28;

// A batch's working memory, kept by each thread that calls; bounded by the largest table's batch
// that it saw.
struct Scratch {
  std::vector<uint32_t> parts;  // of the occurrences, in the order of the batch
  std::vector<Occurrence> dealt;
  std::vector<uint32_t> counts;  // of `dealt`; unused where each stands for one
  std::vector<uint32_t> places;  // by share and part
  std::vector<uint32_t> ends;    // of the parts, in `dealt`
};

Scratch& ThreadScratch() {
  thread_local Scratch scratch;
  return scratch;
}

LateKeys* ThreadLateKeys() {
  thread_local LateKeys late;
  return &late;
}

// Kept as long as the thread.
PartWorker* ThreadWorker() {
  thread_local PartWorker worker;
  return &worker;
}

// Calls use(occurrence, count) for the keys at [k, end) of the bags, in order.
template <typename Use>
void ForEachKeyIn(const BagGradients& bags, size_t k, size_t end, const Use& use) {
  const float* gradient = bags.gradients;
  const size_t stride = gradient == nullptr ? 0 : bags.stride;
  const uint64_t* const places = bags.places == nullptr ? nullptr : bags.places->words.get();
  const auto occurrence = [&bags, places](size_t k, const float* of) {
    return Occurrence{static_cast<uint64_t>(bags.keys[k]), of, places == nullptr ? 0 : places[k]};
  };
  const auto& offsets = bags.offsets;
  if (offsets.empty()) {
    gradient += k * stride;
    const uint32_t* const counts = bags.counts.empty() ? nullptr : bags.counts.data();
    for (; k < end; ++k, gradient += stride) {
      use(occurrence(k, gradient), counts == nullptr ? 1 : counts[k]);
    }
    return;
  }
  const auto after = std::upper_bound(offsets.begin(), offsets.end(), k);
  size_t bag = static_cast<size_t>(after - offsets.begin()) - 1;
  for (gradient += bag * stride; k < end; ++bag, gradient += stride) {
    const size_t until = std::min<size_t>(end, offsets[bag + 1]);
    for (; k < until; ++k) use(occurrence(k, gradient), 1U);
  }
}

// A table's batch: bags after bags, of which only the keys in a bag count.
struct Batch {
  std::span<const BagGradients* const> pieces;
  static std::pair<size_t, size_t> KeysIn(const BagGradients& bags) {
    if (bags.offsets.empty()) return {0, bags.keys.size()};
    return {bags.offsets.front(), bags.offsets.back()};
  }
  size_t size() const {
    size_t keys = 0;
    for (const BagGradients* each : pieces) keys += KeysIn(*each).second - KeysIn(*each).first;
    return keys;
  }
  // Whether some key stands for several occurrences.
  bool counted() const {
    return std::ranges::any_of(pieces, [](const auto* each) { return !each->counts.empty(); });
  }
  // Calls use(occurrence, count) for the occurrences [first, end), in order.
  template <typename Use>
  void ForEach(size_t first, size_t end, const Use& use) const {
    size_t begin = 0;  // of the piece
    for (const BagGradients* each : pieces) {
      const auto [from, to] = KeysIn(*each);
      const size_t k = std::max(first, begin);
      const size_t until = std::min(end, begin + (to - from));
      if (k < until) ForEachKeyIn(*each, from + k - begin, from + until - begin, use);
      begin += to - from;
    }
  }
};

// One table's part of a call.
class TableRun {
 public:
  // `crew` null: the caller's thread alone. `late`: gets the keys without a row in DDR.
  TableRun(const TableStep& step, Reclaimer* reclaimer, Crew* crew, LateKeys* late)
      : step_(step),
        store_(*step.store),
        reclaimer_(*reclaimer),
        table_(*step.table),
        crew_(crew),
        late_keys_(*late),
        scratch_(ThreadScratch()) {
    workers_.resize(crew == nullptr ? 1 : crew->size(), nullptr);
  }

  void Run(const Batch& batch) {
    placed_ = TakePlaces(batch);
    Deal(batch);
    const size_t parts = scratch_.ends.size();
    for (size_t part = 0; part < parts;) {
      const size_t first = part;
      const auto d = static_cast<uint32_t>(part >> part_bits_);
      const size_t until = (size_t{d} + 1) << part_bits_;
      while (part < until && BeginOf(part) - BeginOf(first) < kTurnKeys * workers_.size()) ++part;
      if (BeginOf(part) > BeginOf(first)) Turn(store_.PoolOf(table_, d), first, part);
    }
    for (const PartWorker* worker : workers_) {
      if (worker == nullptr) continue;
      updated_ += worker->updated();
      store_.counters.clipped_gradients += worker->clipped();
      store_.counters.refused_gradients += worker->refused();
    }
  }

  // The number of rows updated that were in DDR.
  uint64_t updated() const { return updated_; }

 private:
  // Work(0), ..., Work(count - 1), on as many threads as there are.
  void Share(size_t count, const std::function<void(uint32_t)>& work) {
    if (count == 1) {
      work(0);
    } else {
      crew_->Run(static_cast<uint32_t>(count), work);
    }
  }

  // Parts are numbered by device, then by the top bits of the hash, as buckets are.
  uint32_t PartOf(const Occurrence& each) const {
    if (placed_ && each.place != 0) return BlockPart(Location::FromWord(each.place).slot());
    const uint64_t hash = HashKey(each.key);
    const uint32_t part = BucketOfHash(hash, part_bits_);
    if (store_.options.devices == 1) return part;
    const BucketSlot& bucket = table_.buckets[BucketOfHash(hash, table_.config.bucket_bits)];
    return (bucket.device.load(std::memory_order_relaxed) << part_bits_) + part;
  }
  // Blocks are dealt out evenly, however the table's lie.
  uint32_t BlockPart(uint64_t slot) const {
    constexpr uint64_t kGolden = 0x9E3779B97F4A7C15U;
    const uint64_t spread = (slot >> block_bits_) * kGolden;
    return part_bits_ == 0 ? 0 : static_cast<uint32_t>(spread >> (64 - part_bits_));
  }
  size_t BeginOf(size_t part) const { return part == 0 ? 0 : scratch_.ends[part - 1]; }

  // Blocks of at most this many slots: eight and more for a part, of a table's rows that lie
  // together; but no more than a page has of the arena, where a row's place is soon known.
  uint32_t BlockBits() const {
    const RowPool& pool = *store_.PoolOf(table_, 0);
    const uint64_t slots = pool.in_ddr[table_.ordinal].bytes.load() / kSlotUnitBytes;
    const uint64_t of_page = pool.arena.slab_bytes() / kSlotUnitBytes;
    const auto bits = static_cast<uint32_t>(std::bit_width(slots >> (part_bits_ + 3)));
    return std::min<uint32_t>(bits, static_cast<uint32_t>(std::bit_width(of_page)) - 1);
  }

  // Whether rows lie where the batch's places say. Keys that these lack are looked for, so that a
  // key is known in all its occurrences or in none. Where that is much of the batch, or places are
  // missing or no longer hold, all keys are found by the index: false.
  bool TakePlaces(const Batch& batch) {
    const auto has = [](const BagGradients* each) {
      return each->places != nullptr && each->places->words != nullptr;
    };
    if (!store_.tells_places() || !std::ranges::all_of(batch.pieces, has)) return false;
    unknown_.clear();
    const size_t most = batch.size() / kMinKnown;
    for (const BagGradients* each : batch.pieces) {
      const auto [from, to] = Batch::KeysIn(*each);
      uint64_t* const words = each->places->words.get();
      for (size_t k = from; k < to; ++k) {
        if (words[k] == 0) unknown_.push_back({static_cast<uint64_t>(each->keys[k]), words + k});
      }
      if (unknown_.size() > most) return false;
    }
    RowPool& pool = *store_.PoolOf(table_, 0);
    const std::lock_guard writer(pool.writer);
    as_of_ = pool.ended_places.load(std::memory_order_relaxed);
    const auto holds = [this](const BagGradients* each) { return each->places->as_of == as_of_; };
    if (!std::ranges::all_of(batch.pieces, holds)) {
      store_.counters.stale_places += batch.size();
      return false;
    }
    for (const auto& [key, word] : unknown_) {
      const uint64_t hash = HashKey(key);
      const Location place = table_.NewestOf(hash)->index.Peek(hash, key);
      if (place.tier() == TierId::kDdr) *word = place.word();
    }
    return true;
  }

  // Each share of the batch is counted and then written by one thread, behind those before it.
  void Deal(const Batch& batch) {
    const size_t keys = batch.size();
    part_bits_ = static_cast<uint32_t>(std::bit_width(keys / kPartKeys));
    if (placed_) block_bits_ = BlockBits();
    const size_t parts = size_t{store_.options.devices} << part_bits_;
    const size_t shares = std::clamp<size_t>(keys / kMinDealt, 1, workers_.size());
    const auto share_at = [=](size_t share) { return keys * share / shares; };
    scratch_.parts.resize(keys);
    scratch_.dealt.resize(keys);
    counted_ = batch.counted();
    if (counted_) scratch_.counts.resize(keys);
    scratch_.ends.resize(parts);
    scratch_.places.assign(shares * parts, 0);
    Share(shares, [&](uint32_t share) {
      uint32_t* part_of = scratch_.parts.data() + share_at(share);
      uint32_t* counts = scratch_.places.data() + share * parts;
      batch.ForEach(share_at(share), share_at(share + 1), [&](const Occurrence& each, uint32_t) {
        *part_of = PartOf(each);
        ++counts[*part_of++];
      });
    });
    uint32_t at = 0;
    for (size_t part = 0; part < parts; ++part) {
      for (size_t share = 0; share < shares; ++share) {
        at += std::exchange(scratch_.places[share * parts + part], at);
      }
      scratch_.ends[part] = at;
    }
    Share(shares, [&](uint32_t share) {
      const uint32_t* part_of = scratch_.parts.data() + share_at(share);
      uint32_t* places = scratch_.places.data() + share * parts;
      Occurrence* const dealt = scratch_.dealt.data();
      const auto deal = [&](const auto& also) {
        batch.ForEach(share_at(share), share_at(share + 1),
                      [&](const Occurrence& each, uint32_t count) {
                        const uint32_t place = places[*part_of++]++;
                        dealt[place] = each;
                        __builtin_prefetch(dealt + place + 4, 1, 3);
                        also(place, count);
                      });
      };
      if (counted_) {
        deal([counts = scratch_.counts.data()](uint32_t place, uint32_t count) {
          counts[place] = count;
        });
      } else {
        deal([](uint32_t, uint32_t) {});
      }
    });
  }

  // The parts [first, end), which lie on one device.
  void Turn(RowPool* pool, size_t first, size_t end) {
    {
      const std::lock_guard writer(pool->writer);
      reclaimer_.Reclaim(pool);
      const bool placed = placed_ && pool->ended_places.load() == as_of_;
      if (placed_) {
        auto& counter = placed ? store_.counters.placed_keys : store_.counters.stale_places;
        counter += BeginOf(end) - BeginOf(first);
      }
      std::atomic<size_t> next{first};
      Share(std::min(workers_.size(), end - first), [&](uint32_t thread) {
        if (workers_[thread] == nullptr) {
          workers_[thread] = ThreadWorker();
          workers_[thread]->Begin(step_);
        }
        for (size_t part = next++; part < end; part = next++) {
          workers_[thread]->Run(
              *pool, static_cast<uint32_t>(part),
              std::span(scratch_.dealt).subspan(BeginOf(part), BeginOf(part + 1) - BeginOf(part)),
              counted_ ? scratch_.counts.data() + BeginOf(part) : nullptr, placed);
        }
      });
    }
    late_.clear();
    for (PartWorker* worker : workers_) {
      if (worker == nullptr) continue;
      for (const PartWorker::Late& each : worker->late()) late_.push_back(&each);
    }
    if (late_.empty()) return;
    std::stable_sort(late_.begin(), late_.end(),
                     [](const auto* a, const auto* b) { return a->part < b->part; });
    if (step_.part.chunks > 0) {
      store_.counters.dropped_gradients += late_.size();
    } else {
      late_keys_.Add(&table_, pool, late_);
    }
    for (PartWorker* worker : workers_) {
      if (worker != nullptr) worker->ForgetLate();
    }
  }

  const TableStep step_;
  const StoreState& store_;
  Reclaimer& reclaimer_;
  Table& table_;
  Crew* const crew_;
  LateKeys& late_keys_;
  Scratch& scratch_;
  std::vector<PartWorker*> workers_;  // of the threads; null: it has done nothing yet
  std::vector<const PartWorker::Late*> late_;
  // A key of the batch whose place is not known, and where that is to stand.
  struct Unknown {
    uint64_t key;
    uint64_t* word;
  };
  std::vector<Unknown> unknown_;
  uint32_t part_bits_ = 0;
  uint32_t block_bits_ = 0;  // of slots
  bool placed_ = false;      // keys are dealt out by their places
  uint64_t as_of_ = 0;       // that these hold, as RowPlaces has it
  bool counted_ = false;     // some key of the batch stands for several occurrences
  uint64_t updated_ = 0;
};

Status ValidateBags(const StoreState& store, const BagGradients& bags) {
  EMBERTIDE_RETURN_IF_ERROR(store.CheckValues(bags.table));
  const TableConfig& table = store.tables[bags.table].config;
  if (bags.gradients != nullptr && bags.stride < table.learned().dim()) {
    return {Code::kInvalidArgument,
            "table " + table.name + ": gradients " + std::to_string(bags.stride) +
                " floats apart are less than dim " + std::to_string(table.learned().dim())};
  }
  if (const RowPart& part = bags.part; part.chunks > 0) {
    const size_t floats = table.learned().dim() + part.chunks * sizeof(double) / sizeof(float);
    if (part.chunks > kMaxChunks || part.first >= part.chunks || bags.stride < floats) {
      return {Code::kInvalidArgument,
              "table " + table.name + ": a part from chunk " + std::to_string(part.first) +
                  " on of rows of " + std::to_string(part.chunks) + " chunks, with gradients " +
                  std::to_string(bags.stride) + " floats apart; give " + std::to_string(floats) +
                  " for each, and at most " + std::to_string(kMaxChunks) + " chunks"};
    }
  }
  const auto& offsets = bags.offsets;
  if (!offsets.empty() &&
      (!std::is_sorted(offsets.begin(), offsets.end()) || offsets.back() > bags.keys.size())) {
    return {Code::kInvalidArgument, "table " + table.name +
                                        ": offsets must ascend to the number of keys (" +
                                        std::to_string(bags.keys.size()) + ") at most"};
  }
  if (const RowPlaces* const places = bags.places;
      places != nullptr && places->words != nullptr &&
      (places->table != bags.table || places->keys != bags.keys.size() ||
       places->mark != RowPlaces::MarkOf(bags.keys))) {
    return {Code::kInvalidArgument, "table " + table.name +
                                        ": places that a lookup of other keys has found; give "
                                        "those of a lookup of the same keys in the same order"};
  }
  const auto& counts = bags.counts;
  if (counts.empty()) return Status::Ok();
  if (!offsets.empty() || counts.size() != bags.keys.size()) {
    return {Code::kInvalidArgument, "table " + table.name + ": " + std::to_string(counts.size()) +
                                        " counts for " + std::to_string(bags.keys.size()) +
                                        (offsets.empty() ? " keys" : " keys in bags") +
                                        "; give one for each key, and no offsets"};
  }
  if (const auto none = std::ranges::find(counts, 0U); none != counts.end()) {
    const auto key = bags.keys[static_cast<size_t>(none - counts.begin())];
    return {Code::kInvalidArgument, "table " + table.name + ": key " + std::to_string(key) +
                                        " has count 0; leave out keys that do not occur"};
  }
  return Status::Ok();
}

// Runs the tables in their order, each with its bags in the order of the call. Returns how many
// rows were made, brought or updated. `options`: of kUpdate.
Result<uint64_t> RunTables(Store::Impl* impl, std::span<const BagGradients> bags, StepWork work,
                           const StepOptions* options, uint32_t threads) {
  std::vector<const BagGradients*> by_table;
  size_t keys = 0;
  for (const BagGradients& each : bags) {
    EMBERTIDE_RETURN_IF_ERROR(ValidateBags(impl->store, each));
    by_table.push_back(&each);
    keys += each.keys.size();
  }
  for (const BagGradients& each : bags) {
    const auto other = std::ranges::find_if(bags, [&](const BagGradients& of) {
      return of.table == each.table && of.part != each.part;
    });
    if (other == bags.end()) continue;
    return Status(Code::kInvalidArgument,
                  "table " + impl->store.tables[each.table].config.name +
                      ": bags of different parts of rows; give those of one part");
  }
  if (keys > kMaxKeys) {
    return Status(Code::kInvalidArgument,
                  std::to_string(keys) + " keys in a call, more than " + std::to_string(kMaxKeys));
  }
  std::stable_sort(by_table.begin(), by_table.end(),
                   [](const auto* a, const auto* b) { return a->table < b->table; });
  EMBERTIDE_RETURN_IF_ERROR(CheckStepThreads(threads));
  std::unique_lock<std::mutex> crew_lock;
  Crew* const crew = threads > 1 ? impl->store.TakeCrew(threads, &crew_lock) : nullptr;
  TableStep step{&impl->store, nullptr, work, options, 0, nullptr};
  std::optional<MomentDecay> decay;
  if (work == StepWork::kUpdate) {
    step.tick = (impl->store.tick.fetch_add(1) + 1) % RowAux::kTicks;
    for (const auto& group : impl->store.groups) {
      const MutexLock lock(group->mutex);
      ++group->step;
    }
    if (CountsSteps(impl->store.options.optimizer)) {
      decay.emplace(Decay(options->beta1), Decay(options->beta2));
      step.decay = &*decay;
    }
  }
  LateKeys* const late = ThreadLateKeys();
  late->Begin(step, impl);
  uint64_t updated = 0;
  for (auto first = by_table.begin(); first != by_table.end();) {
    const uint32_t table = (*first)->table;
    const auto end = std::find_if(first, by_table.end(),
                                  [table](const auto* each) { return each->table != table; });
    step.table = &impl->store.tables[table];
    step.part = (*first)->part;
    TableRun run(step, &impl->reclaimer, crew, late);
    run.Run({{first, end}});
    updated += run.updated();
    first = end;
  }
  late->Finish();
  if (!late->failure().ok()) return late->failure();
  switch (work) {
    case StepWork::kMake:
      return late->made();
    case StepWork::kBring:
      return late->brought();
    case StepWork::kUpdate:
      return updated + late->updated();
  }
  return updated;
}

}  // namespace

Result<uint64_t> TrainingStore::EnsureRows(uint32_t t, std::span<const int64_t> keys) {
  const BagGradients bags{t, keys, {}, nullptr, 0};
  return RunTables(impl_.get(), {&bags, 1}, StepWork::kMake, nullptr, 1);
}

Result<uint64_t> TrainingStore::BringRows(std::span<const TableKeys> keys, uint32_t threads) {
  const auto has_ssd = [](const auto& pool) { return pool->ssd != nullptr; };
  if (std::ranges::none_of(impl_->store.pools, has_ssd)) return 0;
  std::vector<BagGradients> bags;
  bags.reserve(keys.size());
  for (const TableKeys& each : keys) bags.push_back({each.table, each.keys, {}, nullptr, 0});
  return RunTables(impl_.get(), bags, StepWork::kBring, nullptr, threads);
}

Result<uint64_t> TrainingStore::ApplyGradients(std::span<const BagGradients> bags,
                                               const StepOptions& options, uint32_t threads) {
  EMBERTIDE_RETURN_IF_ERROR(options.Validate());
  for (const BagGradients& each : bags) {
    if (each.gradients == nullptr && !each.keys.empty()) {
      return Status(Code::kInvalidArgument, "bags without gradients");
    }
  }
  return RunTables(impl_.get(), bags, StepWork::kUpdate, &options, threads);
}

}  // namespace embertide
