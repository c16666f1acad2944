// Batched reads through a pinned view.
//
// A batch runs in passes over arrays of the calling thread, so that no key waits alone for memory:
// find the entries, a block of keys at a time whose index groups are all asked for first; bring the
// SSD rows (each block once, in one batch); then copy or pool the rows straight into the output,
// asking for rows ahead.
#include <algorithm>
#include <cstring>

#include "store/row_ops.h"
#include "store/store_impl.h"

namespace embertide {
namespace {

// Keys that are found together: more than a core has misses in flight (a few dozen), and their
// cursors stay in the first-level cache.
constexpr size_t kBlock = 64;
// About as many keys are found, and their rows read, before the next: what was asked for while
// finding is still in the second-level cache when it is read, and SSD reads still come in batches
// far deeper than a drive's queue.
constexpr size_t kChunkKeys = 2048;
// Rows asked for before the first is copied; finding them brought their first line near already.
constexpr size_t kRowsAhead = 12;
constexpr size_t kLine = 64;

// What a key found; an enum, so that the usual case is one test.
enum class What : uint8_t { kRow, kSums, kNothing };

struct Found {
  const std::byte* payload = nullptr;  // null: the default row. kSums: fp64 sums
  uint16_t live = 0;
  Source source = Source::kDefault;
  What what = What::kRow;
};

// A row that lies on an SSD.
struct SsdKey {
  size_t at = 0;  // in Scratch::found
  const Device* device = nullptr;
  LogRead read;
};

// One batch's working memory, kept by each thread; bounded by the largest batch it saw.
struct Scratch {
  std::vector<Found> found;
  std::vector<SsdKey> ssd_keys;
  std::vector<LogRead> ssd_reads;
  std::vector<std::byte> ssd_rows;
  std::vector<double> sums;
  std::vector<SourceCounts> counts;  // by table
  std::vector<ObservedRead> observed;
  std::vector<std::pair<Device*, Access>> accesses;  // for the policies
  // A batch that failed leaves nothing to the next, which may be another store's.
  void Begin(size_t tables) {
    counts.assign(tables, SourceCounts{});
    observed.clear();
    accesses.clear();
    not_held = false;
  }
  uint32_t until_observed = 0;  // keys
  uint32_t dice = 1;
  // Keys to pass over, kObserveEvery - 1 on average: a steady step would meet the same features
  // again and again.
  uint32_t Gap() {
    dice = dice * 1664525 + 1013904223;  // Numerical Recipes, 2nd edition, 7.1
    return (dice >> 16) % (2 * kObserveEvery - 1);
  }
  // The first key whose bucket is not held, if any.
  bool not_held = false;
  uint32_t not_held_table = 0;
  uint32_t not_held_bucket = 0;
};

Scratch& ThreadScratch() {
  thread_local Scratch scratch;
  return scratch;
}

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

void WriteRow(const Table& table, const Found& found, float* out) {
  const RowLayout& layout = table.config.layout;
  if (found.payload == nullptr) {
    std::copy(table.default_row.begin(), table.default_row.end(), out);
  } else if (IsWholeFp32(layout, found.live)) {
    CopyFloats(found.payload, layout.dim(), out);
  } else {
    DecodePayload(layout, found.live, found.payload, out);
  }
}

void AddRow(const Table& table, const Found& found, double* sums) {
  const RowLayout& layout = table.config.layout;
  if (found.what != What::kRow) {
    if (found.what == What::kNothing) return;
    const auto* others = reinterpret_cast<const double*>(found.payload);
    for (uint32_t d = 0; d < layout.dim(); ++d) sums[d] += others[d];
  } else if (found.payload == nullptr) {
    for (size_t d = 0; d < table.default_row.size(); ++d) sums[d] += table.default_row[d];
  } else if (IsWholeFp32(layout, found.live)) {
    AddFloats(found.payload, layout.dim(), sums);
  } else {
    AccumulatePayload(layout, found.live, found.payload, 1.0, sums);
  }
}

// Finds keys in the order they are given, a block at a time. Memory is asked for in loops that do
// nothing else: a core looks no further ahead than some three hundred instructions, and waits at a
// prefetch for the page's address.
class Finder {
 public:
  // Requires: room in scratch->found for all keys that come.
  Finder(const Store::Impl& impl, uint64_t version, Scratch* scratch)
      : impl_(impl), version_(version), scratch_(scratch), next_(scratch->found.data()) {}

  // `remote`: what came from elsewhere for it; null: it is looked for.
  void Add(uint32_t table, int64_t key, const RemoteRow* remote = nullptr) {
    block_[size_].table = table;
    block_[size_].key = static_cast<uint64_t>(key);
    block_[size_].remote = remote;
    if (++size_ == kBlock) Flush();
  }

  void Flush() {
    for (size_t i = 0; i < size_; ++i) {
      Pending& key = block_[i];
      key.start = {};
      if (key.remote != nullptr) continue;
      key.hash = HashKey(key.key);
      const Table& table = impl_.tables[key.table];
      const uint32_t number = Store::Impl::BucketOf(table, key.hash);
      key.bucket = table.buckets[number].At(version_);
      if (key.bucket != nullptr) {
        key.start = key.bucket->index.StartOf(key.hash);
      } else {
        scratch_->not_held = true;
        scratch_->not_held_table = key.table;
        scratch_->not_held_bucket = number;
      }
    }
    for (size_t i = 0; i < size_; ++i) block_[i].start.Prefetch();
    for (size_t i = 0; i < size_; ++i) Place(block_[i], next_ + i);
    for (size_t i = 0; i < size_; ++i) __builtin_prefetch(next_[i].payload);
    next_ += size_;
    size_ = 0;
  }

 private:
  struct Pending {
    uint64_t key;
    uint64_t hash;
    const Bucket* bucket;
    BucketIndex::Start start;
    const RemoteRow* remote;
    uint32_t table;
  };

  void Take(const Pending& key, Found* found) {
    const RemoteRow& row = *key.remote;
    const auto* sums = reinterpret_cast<const std::byte*>(row.sums);
    found->payload = sums != nullptr ? sums : row.payload;
    found->live = row.live;
    found->source = row.source;
    found->what = row.summed ? What::kNothing : sums != nullptr ? What::kSums : What::kRow;
    ++scratch_->counts[key.table][static_cast<size_t>(row.source)];
  }

  void Place(const Pending& key, Found* found) {
    if (key.remote != nullptr) return Take(key, found);
    const Location place =
        Store::Impl::Resolve(BucketIndex::Find(key.start, key.hash, key.key), version_);
    found->live = place.live();
    found->payload = nullptr;
    found->what = What::kRow;
    switch (place.tier()) {
      case TierId::kDdr: {
        Device* device = key.bucket->device;
        found->source = Source::kDdr;
        found->payload = device->arena.Address(place.slot());
        if (device->policy != nullptr) {
          scratch_->accesses.push_back({device, {key.key, key.table}});
        }
        break;
      }
      case TierId::kSsd:
        found->source = Source::kSsd;
        NoteSsd(key, place, found);
        break;
      case TierId::kHbm:  // No HBM tier yet: its slots are never handed out.
      case TierId::kNowhere:
        found->source = place.slot() == static_cast<uint64_t>(RecordKind::kPruned)
                            ? Source::kPruned
                            : Source::kDefault;
    }
    ++scratch_->counts[key.table][static_cast<size_t>(found->source)];
    if (impl_.options.observer != nullptr) Observe(key, *found);
  }

  void Observe(const Pending& key, const Found& found) {
    const bool by_place = scratch_->until_observed == 0;
    // Bits that neither bucket nor index group depend on alone.
    const bool by_key = (key.hash >> 20) % kObserveEvery == 0;
    scratch_->until_observed = by_place ? scratch_->Gap() : scratch_->until_observed - 1;
    if (!by_place && !by_key) return;
    const Table& table = impl_.tables[key.table];
    scratch_->observed.push_back(
        {key.key, key.hash, key.table, Store::Impl::BucketOf(table, key.hash),
         table.config.layout.PayloadBytes(found.live), found.source, by_place, by_key});
  }

  void NoteSsd(const Pending& key, Location place, const Found* found) {
    const uint32_t bytes = impl_.tables[key.table].config.layout.PayloadBytes(place.live());
    scratch_->ssd_keys.push_back({static_cast<size_t>(found - scratch_->found.data()),
                                  key.bucket->device,
                                  {place.slot(), key.key, key.table, bytes, nullptr}});
  }

  const Store::Impl& impl_;
  const uint64_t version_;
  Scratch* scratch_;
  Found* next_;
  size_t size_ = 0;
  std::array<Pending, kBlock> block_;
};

// Reads rows of found[] in the order they were found.
class Pooler {
 public:
  explicit Pooler(Scratch* scratch)
      : scratch_(scratch),
        next_(scratch->found.data()),
        end_(next_ + scratch->found.size()),
        ahead_(next_) {}

  // Pools the next n rows, all of `table`, into dim floats.
  void Pool(const Table& table, Pooling pooling, size_t n, float* out) {
    const uint32_t dim = table.config.layout.dim();
    if (n == 1) {
      FetchAhead(table);
      return WriteRow(table, *next_++, out);
    }
    scratch_->sums.assign(dim, 0.0);
    double* sums = scratch_->sums.data();
    for (size_t i = 0; i < n; ++i) {
      FetchAhead(table);
      AddRow(table, *next_++, sums);
    }
    const double divisor = pooling == Pooling::kMean && n > 0 ? static_cast<double>(n) : 1.0;
    for (uint32_t d = 0; d < dim; ++d) out[d] = static_cast<float>(sums[d] / divisor);
  }

  void WriteSources(size_t n, uint8_t* source) const {
    for (size_t i = 0; i < n; ++i) source[i] = static_cast<uint8_t>(next_[i].source);
  }

 private:
  // Rows of other tables may be longer; a line too few costs less than knowing.
  void FetchAhead(const Table& table) {
    const size_t bytes = table.config.layout.chunk_bytes() * table.config.layout.chunks;
    const Found* until = std::min(end_, next_ + kRowsAhead);
    for (; ahead_ < until; ++ahead_) {
      for (size_t at = 0; at < bytes; at += kLine) __builtin_prefetch(ahead_->payload + at);
    }
  }

  Scratch* scratch_;
  const Found* next_;
  const Found* end_;
  const Found* ahead_;
};

}  // namespace

Location Store::Impl::Resolve(Location location, uint64_t version, uint64_t* changed_at) {
  if (!location.is_chain()) return location;
  for (const VersionNode* node = location.chain(); node != nullptr;
       node = node->older.load(std::memory_order_acquire)) {
    if (node->version <= version) {
      if (changed_at != nullptr) *changed_at = node->version;
      return Location::FromWord(node->word.load(std::memory_order_acquire));
    }
  }
  return {};
}

// Brings the noted SSD rows, each device's in one batch.
static Status ReadSsdRows(const Store::Impl& impl, Scratch* scratch) {
  auto& keys = scratch->ssd_keys;
  uint64_t bytes = 0;
  for (const SsdKey& key : keys) bytes += key.read.bytes;
  scratch->ssd_rows.resize(bytes + 1);  // a row without bytes has an address, too
  std::byte* row = scratch->ssd_rows.data();
  for (const auto& device : impl.devices) {
    scratch->ssd_reads.clear();
    for (SsdKey& key : keys) {
      if (key.device != device.get()) continue;
      key.read.to = row;
      scratch->found[key.at].payload = row;
      row += key.read.bytes;
      scratch->ssd_reads.push_back(key.read);
    }
    if (scratch->ssd_reads.empty()) continue;
    EMBERTIDE_RETURN_IF_ERROR(device->ssd->Read(scratch->ssd_reads));
    for (const LogRead& read : scratch->ssd_reads) {
      scratch->accesses.push_back({device.get(), {read.key, read.table}});
    }
  }
  return Status::Ok();
}

// After finding: what lies on an SSD is read; a key that nobody here holds fails the batch.
static Status Bring(const Store::Impl& impl, Scratch* scratch) {
  if (scratch->not_held) {
    scratch->not_held = false;
    return {Code::kNotOwner, "bucket " + std::to_string(scratch->not_held_bucket) + " of table " +
                                 impl.tables[scratch->not_held_table].config.name +
                                 " is not held here at the pinned version"};
  }
  return scratch->ssd_keys.empty() ? Status::Ok() : ReadSsdRows(impl, scratch);
}

// Those in a bag.
static std::span<const int64_t> KeysOf(const KeyBags& request) {
  const auto& offsets = request.offsets;
  if (offsets.empty()) return request.keys;
  return request.keys.subspan(offsets.front(), offsets.back() - offsets.front());
}

// Tells the policies of what was read, device by device. A reader never waits: while a log is being
// emptied, what it has to tell is lost, and counted.
static void TellPolicies(const Store::Impl& impl, Scratch* scratch) {
  auto& accesses = scratch->accesses;
  if (accesses.empty()) return;
  const auto by_device = [](const auto& a, const auto& b) { return a.first < b.first; };
  if (impl.devices.size() > 1) std::stable_sort(accesses.begin(), accesses.end(), by_device);
  uint64_t told = 0;
  for (size_t i = 0; i < accesses.size();) {
    Device* device = accesses[i].first;
    const std::unique_lock lock(device->accesses_mutex, std::try_to_lock);
    size_t room = lock.owns_lock() ? device->most_accesses - device->accesses.size() : 0;
    for (; i < accesses.size() && accesses[i].first == device; ++i) {
      if (room == 0) continue;
      device->accesses.push_back(accesses[i].second);
      --room;
      ++told;
    }
  }
  if (told < accesses.size()) impl.dropped_accesses += accesses.size() - told;
  accesses.clear();
}

static void Tell(const Store::Impl& impl, Scratch* scratch) {
  TellPolicies(impl, scratch);
  if (scratch->observed.empty()) return;
  if (impl.options.observer != nullptr) impl.options.observer->Observe(scratch->observed);
  scratch->observed.clear();
}

static void FindKeys(const Store::Impl& impl, uint64_t version,
                     std::span<const BagFeature> features, std::span<const KeyBags> requests,
                     Scratch* scratch) {
  size_t keys = 0;
  for (const KeyBags& request : requests) keys += KeysOf(request).size();
  scratch->found.resize(keys);
  scratch->ssd_keys.clear();
  Finder finder(impl, version, scratch);
  for (const KeyBags& request : requests) {
    size_t feature = 0;
    const auto next = [&] {
      const uint32_t table = features[feature].table;
      if (++feature == features.size()) feature = 0;
      return table;
    };
    const auto add = [&](uint32_t table, size_t k) {
      const uint32_t remote = request.remote_of == nullptr ? 0 : request.remote_of[k];
      finder.Add(table, request.keys[k], remote == 0 ? nullptr : &request.remote[remote - 1]);
    };
    if (request.offsets.empty()) {
      for (size_t k = 0; k < request.keys.size(); ++k) add(next(), k);
      continue;
    }
    for (size_t bag = 0; bag + 1 < request.offsets.size(); ++bag) {
      const uint32_t table = next();
      for (uint32_t k = request.offsets[bag]; k < request.offsets[bag + 1]; ++k) add(table, k);
    }
  }
  finder.Flush();
}

static void PoolBags(const Store::Impl& impl, std::span<const BagFeature> features,
                     std::span<const KeyBags> requests, Scratch* scratch) {
  Pooler pooler(scratch);
  for (const KeyBags& request : requests) {
    if (request.source != nullptr) {
      const auto keys = KeysOf(request);
      pooler.WriteSources(keys.size(), request.source + (keys.data() - request.keys.data()));
    }
    const bool jagged = !request.offsets.empty();
    const size_t bags = jagged ? request.offsets.size() - 1 : request.keys.size();
    float* out = request.out;
    size_t feature = 0;
    for (size_t bag = 0; bag < bags; ++bag) {
      const BagFeature& of = features[feature];
      pooler.Pool(impl.tables[of.table], of.pooling,
                  jagged ? request.offsets[bag + 1] - request.offsets[bag] : 1, out + of.column);
      if (++feature == features.size()) {
        feature = 0;
        out += request.out_stride;
      }
    }
  }
}

// The bags [first, end) of a request; both at the beginning of a sample of `features` bags.
static KeyBags Slice(const KeyBags& request, size_t features, size_t first, size_t end) {
  KeyBags slice = request;
  slice.out += first / features * request.out_stride;
  if (request.offsets.empty()) {
    slice.keys = request.keys.subspan(first, end - first);
    if (request.source != nullptr) slice.source += first;
    if (request.remote_of != nullptr) slice.remote_of += first;
  } else {
    slice.offsets = request.offsets.subspan(first, end - first + 1);
  }
  return slice;
}

// Calls answer(chunk) for all samples in order, about kChunkKeys keys at a time.
template <typename Answer>
static Status ForEachChunk(size_t features, std::span<const KeyBags> requests,
                           const Answer& answer) {
  std::vector<KeyBags> chunk;
  size_t keys = 0;
  for (const KeyBags& request : requests) {
    const auto& offsets = request.offsets;
    const size_t bags = offsets.empty() ? request.keys.size() : offsets.size() - 1;
    for (size_t first = 0; first < bags;) {
      size_t end = first;
      for (; end < bags && keys < kChunkKeys; end += features) {
        keys += offsets.empty() ? features : offsets[end + features] - offsets[end];
      }
      chunk.push_back(Slice(request, features, first, end));
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
  view_.store_->impl_->readers.BeginRead(view_.reader_);
}

BagReader::~BagReader() { view_.store_->impl_->readers.EndRead(view_.reader_); }

Status BagReader::Lookup(std::span<const BagFeature> features, std::span<const KeyBags> requests,
                         std::span<SourceCounts> counts) const {
  const Store::Impl& impl = *view_.store_->impl_;
  for (const BagFeature& feature : features) {
    EMBERTIDE_RETURN_IF_ERROR(impl.CheckTable(feature.table));
  }
  Scratch& scratch = ThreadScratch();
  scratch.Begin(impl.tables.size());
  EMBERTIDE_RETURN_IF_ERROR(
      ForEachChunk(features.size(), requests, [&](std::span<const KeyBags> chunk) -> Status {
        FindKeys(impl, view_.version_, features, chunk, &scratch);
        EMBERTIDE_RETURN_IF_ERROR(Bring(impl, &scratch));
        PoolBags(impl, features, chunk, &scratch);
        return Status::Ok();
      }));
  Tell(impl, &scratch);
  SourceCounts all{};
  for (size_t t = 0; t < impl.tables.size(); ++t) {
    for (size_t s = 0; s < kSources; ++s) {
      all[s] += scratch.counts[t][s];
      if (!counts.empty()) counts[t][s] += scratch.counts[t][s];
    }
  }
  for (size_t s = 0; s < kSources; ++s) {
    if (all[s] > 0) impl.hits[s].fetch_add(all[s], std::memory_order_relaxed);
  }
  return Status::Ok();
}

// Finds keys of one table, for peers.
static Status FindAll(const Store::Impl& impl, uint64_t version, uint32_t table,
                      std::span<const int64_t> keys, Scratch* scratch, uint8_t* sources) {
  EMBERTIDE_RETURN_IF_ERROR(impl.CheckTable(table));
  scratch->Begin(impl.tables.size());
  const BagFeature feature{table, Pooling::kSum, 0};
  const KeyBags bags{keys, {}, nullptr, 0};
  FindKeys(impl, version, {&feature, 1}, {&bags, 1}, scratch);
  EMBERTIDE_RETURN_IF_ERROR(Bring(impl, scratch));
  Tell(impl, scratch);
  for (size_t i = 0; i < keys.size(); ++i) {
    sources[i] = static_cast<uint8_t>(scratch->found[i].source);
  }
  const SourceCounts& counts = scratch->counts[table];
  for (size_t s = 0; s < kSources; ++s) {
    if (counts[s] > 0) impl.hits[s].fetch_add(counts[s], std::memory_order_relaxed);
  }
  return Status::Ok();
}

Status BagReader::CopyRows(uint32_t table, std::span<const int64_t> keys, std::string* records,
                           uint8_t* sources) const {
  const Store::Impl& impl = *view_.store_->impl_;
  Scratch& scratch = ThreadScratch();
  EMBERTIDE_RETURN_IF_ERROR(FindAll(impl, view_.version_, table, keys, &scratch, sources));
  const RowLayout& layout = impl.tables[table].config.layout;
  std::vector<std::byte> bytes;
  bytes.reserve(keys.size() * (kRecordHeaderBytes + layout.PayloadBytes(layout.full_mask())));
  for (size_t i = 0; i < keys.size(); ++i) {
    const Found& found = scratch.found[i];
    if (found.payload == nullptr) continue;
    AppendRecord({static_cast<uint64_t>(keys[i]),
                  found.live,
                  RecordKind::kRow,
                  {found.payload, layout.PayloadBytes(found.live)}},
                 &bytes);
  }
  records->append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return Status::Ok();
}

Status BagReader::SumBags(uint32_t table, std::span<const int64_t> keys,
                          std::span<const uint32_t> offsets, std::span<const uint32_t> places,
                          double* sums, uint8_t* sources) const {
  const Store::Impl& impl = *view_.store_->impl_;
  Scratch& scratch = ThreadScratch();
  EMBERTIDE_RETURN_IF_ERROR(FindAll(impl, view_.version_, table, keys, &scratch, sources));
  const Table& of = impl.tables[table];
  const uint32_t dim = of.config.layout.dim();
  std::fill_n(sums, (offsets.size() - 1) * dim, 0.0);
  for (size_t bag = 0; bag + 1 < offsets.size(); ++bag, sums += dim) {
    for (uint32_t k = offsets[bag]; k < offsets[bag + 1]; ++k) {
      AddRow(of, scratch.found[places[k]], sums);
    }
  }
  return Status::Ok();
}

Status ReadView::Lookup(const LookupRequest& request) const {
  EMBERTIDE_RETURN_IF_ERROR(store_->impl_->CheckTable(request.table));
  const TableConfig& table = store_->impl_->tables[request.table].config;
  EMBERTIDE_RETURN_IF_ERROR(ValidateRequest(request, table));
  // Without pooling every key is a bag of its own.
  const bool single = request.pooling == Pooling::kNone;
  const BagFeature feature{request.table, single ? Pooling::kSum : request.pooling, 0};
  const KeyBags bags{request.keys, single ? std::span<const uint32_t>() : request.offsets,
                     request.out, request.out_stride, request.source};
  return BagReader(*this).Lookup({&feature, 1}, {&bags, 1}, {});
}

}  // namespace embertide
