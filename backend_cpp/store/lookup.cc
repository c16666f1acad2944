// Batched reads through a pinned view: keys are found (finder.h), and their rows pooled.
#include <algorithm>
#include <atomic>
#include <mutex>

#include "store/finder.h"
#include "store/lookup_scratch.h"
#include "store/row_ops.h"
#include "store/store_impl.h"

namespace embertide {
namespace {

// Rows pooled at a time: few enough to lie in the second-level cache together. The sums of a larger
// bag pass through memory as often.
constexpr size_t kBagRows = 64;
// Keys of several lookups that a thread is woken for, about 0.2 ms of work.
constexpr size_t kMinShared = 4096;

Status ValidateRequest(const LookupRequest& request, const TableConfig& table) {
  if (request.out_stride < table.layout.dim()) {
    return {Code::kInvalidArgument, "output stride " + std::to_string(request.out_stride) +
                                        " is less than dim " + std::to_string(table.layout.dim())};
  }
  if (request.pooling == Pooling::kNone) return Status::Ok();
  const auto& offsets = request.offsets;
  if (offsets.empty() || offsets.front() != 0 || offsets.back() != request.keys.size() ||
      !std::is_sorted(offsets.begin(), offsets.end())) {
    return {Code::kInvalidArgument, "offsets must ascend from 0 to the number of keys (" +
                                        std::to_string(request.keys.size()) + ")"};
  }
  return Status::Ok();
}

bool AreRows(const FoundRow* found, size_t n) {
  return std::all_of(found, found + n,
                     [](const FoundRow& row) { return row.kind == FoundKind::kRow; });
}

// The weights from the i-th key on; null ones stay null.
const float* From(const float* weights, size_t i) {
  return weights == nullptr ? nullptr : weights + i;
}

// In order; rows that stand together at once. Null weights are 1 each.
void AddFound(const Table& table, const FoundRow* found, const float* weights, size_t n,
              double* sums) {
  for (size_t i = 0; i < n;) {
    size_t rows = 0;
    while (i + rows < n && found[i + rows].kind == FoundKind::kRow) ++rows;
    if (rows > 0) {
      AddRows(table.config.layout, found + i, From(weights, i), rows, sums);
      i += rows;
    } else {
      AddOne(table, found[i], From(weights, i), sums);
      ++i;
    }
  }
}

void WriteOne(const Table& table, const FoundRow& found, float* out) {
  if (found.kind == FoundKind::kDefault) {
    std::copy(table.default_row.begin(), table.default_row.end(), out);
  } else {
    WriteRows(table.config.layout, &found, 1, out, 0);
  }
}

// Bags of one key each of one feature, the first of them at `at`, to `out` and every out_stride
// from there. Errors are those of Finder::FindAll.
Status WriteSingles(const StoreState& store, const Table& table, size_t at, size_t n, float* out,
                    size_t out_stride, LookupScratch* scratch) {
  Finder& finder = scratch->finder;
  if (!finder.Find(at + n)) EMBERTIDE_RETURN_IF_ERROR(finder.FindAll());
  const FoundRow* found = finder.found() + at;
  if (finder.only_ddr()) {
    WriteRows(table.config.layout, found, n, out, out_stride);
  } else {
    for (size_t k = 0; k < n; ++k) WriteOne(table, found[k], out + k * out_stride);
  }
  Tally(store, table, at, n, scratch);
  return Status::Ok();
}

// The bag of the n keys from `at` on; null weights are 1 each. Errors are those of Finder::FindAll.
Status PoolBag(SumKind kind, const Table& table, Pooling pooling, size_t at, size_t n,
               const float* weights, LookupScratch* scratch, float* out) {
  Finder& finder = scratch->finder;
  const RowLayout& layout = table.config.layout;
  const double divisor = pooling == Pooling::kMean && n > 0 ? static_cast<double>(n) : 1.0;
  if (n == 1 && weights == nullptr) {
    if (!finder.Find(at + 1)) EMBERTIDE_RETURN_IF_ERROR(finder.FindAll());
    WriteOne(table, finder.found()[at], out);
    return Status::Ok();
  }
  scratch->sums.resize(layout.dim());
  double* sums = scratch->sums.data();
  if (n <= kBagRows) {
    if (!finder.Find(at + n)) EMBERTIDE_RETURN_IF_ERROR(finder.FindAll());
    const FoundRow* found = finder.found() + at;
    if (finder.only_ddr() || AreRows(found, n)) {
      if (kind == SumKind::kFp32 && weights == nullptr) {
        PoolRows32(layout, found, n, divisor, out);
      } else {
        PoolRows(layout, found, weights, n, divisor, sums, out);
      }
      return Status::Ok();
    }
  }
  std::fill_n(sums, layout.dim(), 0.0);
  for (size_t first = 0; first < n;) {
    const size_t rows = std::min(kBagRows, n - first);
    if (!finder.Find(at + first + rows)) EMBERTIDE_RETURN_IF_ERROR(finder.FindAll());
    AddFound(table, finder.found() + at + first, From(weights, first), rows, sums);
    first += rows;
  }
  RoundSums(sums, layout.dim(), divisor, out);
  return Status::Ok();
}

// The bags of one feature of a request, whose keys the finder has from `at` on; returns where those
// of the next begin. Errors are those of Finder::FindAll.
Result<size_t> AnswerFeature(const StoreState& store, std::span<const BagFeature> features,
                             size_t number, const KeyBags& request, size_t at,
                             LookupScratch* scratch) {
  const BagFeature& of = features[number];
  const Table& table = store.tables[of.table];
  const size_t step = features.size();
  const size_t bags = request.bags();
  const auto is_single = [&](size_t bag) {
    return request.begin_of(bag + 1) == request.begin_of(bag) + 1;
  };
  for (size_t bag = number; bag < bags;) {
    float* out = request.out + bag / step * request.out_stride + of.column;
    size_t n = 0;
    while (request.weights == nullptr && n < kBagRows && bag < bags && is_single(bag)) {
      ++n;
      bag += step;
    }
    if (n > 0) {
      EMBERTIDE_RETURN_IF_ERROR(
          WriteSingles(store, table, at, n, out, request.out_stride, scratch));
    } else {
      const size_t first = request.begin_of(bag);
      n = request.begin_of(bag + 1) - first;
      EMBERTIDE_RETURN_IF_ERROR(PoolBag(store.options.sums, table, of.pooling, at, n,
                                        From(request.weights, first), scratch, out));
      Tally(store, table, at, n, scratch);
      bag += step;
    }
    at += n;
  }
  return at;
}

// Writes the sources of a request's bags of one feature; the finder has their keys from `at` on.
void WriteSources(const Finder& finder, size_t features, size_t number, const KeyBags& request,
                  size_t at) {
  if (features == 1 && finder.only_ddr()) {
    std::fill_n(request.source + request.begin_of(0), request.bag_keys().size(),
                static_cast<uint8_t>(Source::kDdr));
    return;
  }
  for (size_t bag = number; bag < request.bags(); bag += features) {
    for (size_t k = request.begin_of(bag); k < request.begin_of(bag + 1); ++k) {
      request.source[k] = static_cast<uint8_t>(finder.found()[at++].source);
    }
  }
}

}  // namespace

// Finds and pools the keys of one chunk.
static Status Answer(const StoreState& store, uint64_t version,
                     std::span<const BagFeature> features, std::span<const KeyBags> requests,
                     LookupScratch* scratch) {
  Finder& finder = scratch->finder;
  finder.Begin(&store, version);
  finder.AddByFeature(features, requests);
  size_t at = 0;
  for (size_t f = 0; f < features.size(); ++f) {
    for (const KeyBags& request : requests) {
      const Result<size_t> next = AnswerFeature(store, features, f, request, at, scratch);
      if (!next.ok()) return next.status();
      if (request.places != nullptr) {
        finder.TellPlaces(store.tables[features[f].table], at, next.value() - at,
                          request.places + request.begin_of(0));
      }
      if (request.source != nullptr) WriteSources(finder, features.size(), f, request, at);
      at = next.value();
    }
  }
  finder.Count();
  return Status::Ok();
}

namespace {

// The lookup in the tiers below, for the HBM tier.
class BelowHbmLookup : public BelowHbm {
 public:
  BelowHbmLookup(const StoreState& store, uint64_t version, LookupScratch* scratch)
      : store_(store), version_(version), scratch_(scratch) {}
  Status Find(std::span<const BagFeature> features, const KeyBags& keys) override {
    return FindAll(store_, version_, features, keys, scratch_);
  }
  Row At(size_t i) const override {
    const FoundRow& found = scratch_->finder.found()[i];
    const HbmRefKind kind = found.kind == FoundKind::kSums      ? HbmRefKind::kSums
                            : found.kind == FoundKind::kNothing ? HbmRefKind::kNothing
                            : found.kind == FoundKind::kDefault ? HbmRefKind::kFloats
                                                                : HbmRefKind::kRow;
    return {kind, found.live, found.source, found.payload};
  }
  void CountHit(uint32_t table, uint64_t key, uint16_t live) override {
    ++scratch_->counts[table][static_cast<size_t>(Source::kHbm)];
    const ReadObserver* const observer = store_.options.observer;
    if (observer == nullptr) return;
    const uint64_t hash = HashKey(key);
    if (IsWatched(hash)) {
      const uint32_t bucket = store_.tables[table].BucketOf(hash);
      scratch_->finder.watched().push_back({hash, table, bucket});
    }
    if (scratch_->until_observed-- > 0) return;
    scratch_->until_observed = scratch_->gaps.Gap(observer->every());
    Observe(store_.tables[table], key, {nullptr, live, Source::kHbm}, observer->every(), scratch_);
  }

 private:
  const StoreState& store_;
  const uint64_t version_;
  LookupScratch* scratch_;
};

}  // namespace

// The bags [first, end) of a request; both at the beginning of a sample of `features` bags.
static KeyBags Slice(const KeyBags& request, size_t features, size_t first, size_t end) {
  KeyBags slice = request;
  slice.out += first / features * request.out_stride;
  if (request.offsets.empty()) {
    slice.keys = request.keys.subspan(first, end - first);
    if (request.source != nullptr) slice.source += first;
    if (request.remote_of != nullptr) slice.remote_of += first;
    if (request.weights != nullptr) slice.weights += first;
    if (request.places != nullptr) slice.places += first;
  } else {
    slice.offsets = request.offsets.subspan(first, end - first + 1);
  }
  return slice;
}

// One bag, kChunkKeys keys at a time: the same sums as PoolBag's.
static Status AnswerBag(const StoreState& store, uint64_t version, const BagFeature& of,
                        const KeyBags& bag, LookupScratch* scratch) {
  const Table& table = store.tables[of.table];
  const uint32_t dim = table.config.layout.dim();
  Finder& finder = scratch->finder;
  scratch->sums.assign(dim, 0.0);
  double* sums = scratch->sums.data();
  for (size_t first = 0; first < bag.keys.size(); first += kChunkKeys) {
    KeyBags piece = bag;
    piece.keys = bag.keys.subspan(first, std::min(kChunkKeys, bag.keys.size() - first));
    if (bag.remote_of != nullptr) piece.remote_of += first;
    const size_t n = piece.keys.size();
    finder.Begin(&store, version);
    finder.Add({&of, 1}, piece);
    EMBERTIDE_RETURN_IF_ERROR(finder.FindAll());
    AddFound(table, finder.found(), From(bag.weights, first), n, sums);
    if (bag.places != nullptr) finder.TellPlaces(table, 0, n, bag.places + first);
    for (size_t i = 0; bag.source != nullptr && i < n; ++i) {
      bag.source[first + i] = static_cast<uint8_t>(finder.found()[i].source);
    }
    Tally(store, table, 0, n, scratch);
    finder.Count();
  }
  const bool mean = of.pooling == Pooling::kMean && !bag.keys.empty();
  RoundSums(sums, dim, mean ? static_cast<double>(bag.keys.size()) : 1.0, bag.out + of.column);
  return Status::Ok();
}

// A jagged sample that is too large for a chunk.
static Status AnswerLargeSample(const StoreState& store, uint64_t version,
                                std::span<const BagFeature> features, const KeyBags& sample,
                                LookupScratch* scratch) {
  for (size_t f = 0; f < features.size(); ++f) {
    const size_t first = sample.offsets[f];
    KeyBags bag = sample;
    bag.offsets = {};
    bag.keys = sample.keys.subspan(first, sample.offsets[f + 1] - first);
    if (sample.source != nullptr) bag.source += first;
    if (sample.remote_of != nullptr) bag.remote_of += first;
    if (sample.weights != nullptr) bag.weights += first;
    if (sample.places != nullptr) bag.places += first;
    EMBERTIDE_RETURN_IF_ERROR(AnswerBag(store, version, features[f], bag, scratch));
  }
  return Status::Ok();
}

// Calls answer(chunk) for all samples in order, about kChunkKeys keys at a time; `large` gets each
// sample that alone has more.
template <typename Answer, typename Large>
static Status ForEachChunk(size_t features, std::span<const KeyBags> requests, const Answer& answer,
                           const Large& large) {
  std::vector<KeyBags> chunk;
  size_t keys = 0;
  for (const KeyBags& request : requests) {
    const size_t bags = request.bags();
    for (size_t first = 0; first < bags;) {
      size_t end = first;
      bool is_large = false;
      for (; end < bags && keys < kChunkKeys; end += features) {
        const size_t n = request.begin_of(end + features) - request.begin_of(end);
        is_large = !request.offsets.empty() && n > kChunkKeys;
        if (is_large) break;
        keys += n;
      }
      if (end > first) chunk.push_back(Slice(request, features, first, end));
      if (is_large) {
        EMBERTIDE_RETURN_IF_ERROR(large(Slice(request, features, end, end + features)));
        end += features;
      }
      first = end;
      if (keys < kChunkKeys) continue;
      EMBERTIDE_RETURN_IF_ERROR(answer(chunk));
      chunk.clear();
      keys = 0;
    }
  }
  return chunk.empty() ? Status::Ok() : answer(chunk);
}

BagReader::BagReader(const ReadView& view) : view_(view) {
  view_.store_->impl_->store.readers.BeginRead(view_.reader_);
}

BagReader::~BagReader() { view_.store_->impl_->store.readers.EndRead(view_.reader_); }

Status BagReader::Lookup(std::span<const BagFeature> features, std::span<const KeyBags> requests,
                         std::span<SourceCounts> counts) const {
  const StoreState& store = view_.store_->impl_->store;
  for (const BagFeature& feature : features) {
    EMBERTIDE_RETURN_IF_ERROR(store.CheckValues(feature.table));
  }
  LookupScratch& scratch = ThreadLookupScratch();
  scratch.Begin(store.tables.size());
  Status status(Code::kUnavailable, "there is no HBM tier");
  if (store.hbm != nullptr) {
    BelowHbmLookup below(store, view_.version_, &scratch);
    status = store.hbm->Lookup(view_.version_, features, requests, &below);
    // Answered without it, the keys are counted again.
    if (status.code() == Code::kUnavailable) scratch.Begin(store.tables.size());
  }
  if (status.code() == Code::kUnavailable) {
    status = ForEachChunk(
        features.size(), requests,
        [&](std::span<const KeyBags> chunk) {
          return Answer(store, view_.version_, features, chunk, &scratch);
        },
        [&](const KeyBags& sample) {
          return AnswerLargeSample(store, view_.version_, features, sample, &scratch);
        });
  }
  EMBERTIDE_RETURN_IF_ERROR(status);
  Tell(store, &scratch);
  SourceCounts all{};
  for (size_t t = 0; t < store.tables.size(); ++t) {
    for (size_t s = 0; s < kSources; ++s) {
      all[s] += scratch.counts[t][s];
      if (!counts.empty()) counts[t][s] += scratch.counts[t][s];
    }
  }
  for (size_t s = 0; s < kSources; ++s) {
    if (all[s] > 0) store.counters.hits[s].fetch_add(all[s], std::memory_order_relaxed);
  }
  return Status::Ok();
}

// Places of a request's keys, which are still to be found.
static uint64_t* BeginPlaces(const StoreState& store, const LookupRequest& request) {
  RowPlaces& places = *request.places;
  const RowPool& pool = *store.PoolOf(store.tables[request.table], 0);
  places.words = std::make_unique_for_overwrite<uint64_t[]>(request.keys.size());
  places.keys = request.keys.size();
  places.mark = RowPlaces::MarkOf(request.keys);
  places.table = request.table;
  places.as_of = pool.ended_places.load(std::memory_order_acquire);
  return places.words.get();
}

// A request as bags of one feature. Errors are those of ReadView::Lookup.
static Result<std::pair<BagFeature, KeyBags>> AsBags(const StoreState& store,
                                                     const LookupRequest& request) {
  EMBERTIDE_RETURN_IF_ERROR(store.CheckValues(request.table));
  EMBERTIDE_RETURN_IF_ERROR(ValidateRequest(request, store.tables[request.table].config));
  // Without pooling every key is a bag of its own.
  const bool single = request.pooling == Pooling::kNone;
  const BagFeature feature{request.table, single ? Pooling::kSum : request.pooling, 0};
  KeyBags bags{request.keys, single ? std::span<const uint32_t>() : request.offsets, request.out,
               request.out_stride, request.source};
  bags.weights = request.weights;
  if (request.places != nullptr && store.tells_places()) bags.places = BeginPlaces(store, request);
  return std::pair(feature, bags);
}

Status ReadView::Lookup(const LookupRequest& request) const {
  Result<std::pair<BagFeature, KeyBags>> bags = AsBags(store_->impl_->store, request);
  if (!bags.ok()) return bags.status();
  return BagReader(*this).Lookup({&bags->first, 1}, {&bags->second, 1}, {});
}

Status ReadView::Lookup(std::span<const LookupRequest> requests, uint32_t threads) const {
  StoreState& store = store_->impl_->store;
  EMBERTIDE_RETURN_IF_ERROR(CheckStepThreads(threads));
  std::vector<std::pair<BagFeature, KeyBags>> pieces;
  size_t keys = 0;
  for (const LookupRequest& request : requests) {
    Result<std::pair<BagFeature, KeyBags>> bags = AsBags(store, request);
    if (!bags.ok()) return bags.status();
    keys += request.keys.size();
    const auto piece = [&](std::span<const KeyBags> chunk) {
      for (const KeyBags& each : chunk) pieces.emplace_back(bags->first, each);
      return Status::Ok();
    };
    const auto large = [&](const KeyBags& sample) { return piece({&sample, 1}); };
    EMBERTIDE_RETURN_IF_ERROR(ForEachChunk(1, {&bags->second, 1}, piece, large));
  }
  const auto parts = static_cast<uint32_t>(std::clamp<size_t>(keys / kMinShared, 1, threads));
  std::unique_lock<std::mutex> crew_lock;
  Crew* const crew = parts > 1 ? store.TakeCrew(threads, &crew_lock) : nullptr;
  const BagReader reader(*this);
  std::atomic<size_t> next{0};
  std::vector<Status> done(parts);
  const auto work = [&](uint32_t part) {
    for (size_t i = next++; i < pieces.size() && done[part].ok(); i = next++) {
      done[part] = reader.Lookup({&pieces[i].first, 1}, {&pieces[i].second, 1}, {});
    }
  };
  if (crew == nullptr) {
    work(0);
  } else {
    crew->Run(parts, work);
  }
  for (const Status& each : done) EMBERTIDE_RETURN_IF_ERROR(each);
  return Status::Ok();
}

}  // namespace embertide
