// Batched reads through a pinned view.
//
// A batch runs in chunks, a chunk in one pass over its keys in which four things go on in turn, a
// step of eight keys each, so that no key waits alone for memory and the memory never waits long
// for a sum:
//
//   step s + 3: ask for the keys' index groups        step s + 2: find them there, ask for the rows
//   step s + 1: or in the groups after them           step s:     add the rows to their bags
//
// Each is a loop that does nothing else: a core looks some three hundred instructions ahead, and
// the shorter the loop, the more keys that is.
//
// Rows that lie on an SSD hold the bags back: the rest of the chunk is found first, then they are
// read in one batch (each block once). Then the pass goes on.
//
// Longer than 600 lines because finding and pooling share one batch's memory, and the HBM tier,
// whose batches lie in hbm_tier.cc, asks the finder for what it lacks.
#include <algorithm>
#include <cstring>

#include "store/row_ops.h"
#include "store/store_impl.h"

namespace embertide {
namespace {

// Keys of a step. Three steps are more lines than a core has misses in flight, and few enough to
// stay in the first-level cache.
constexpr size_t kStep = 8;
// Rows added at a time: then sums pass through memory once for as many rows.
constexpr size_t kRows = 8;
// Keys of a chunk: SSD reads come in batches far deeper than a drive's queue, and what a chunk
// notes of its keys stays in the second-level cache.
constexpr size_t kChunkKeys = 2048;
constexpr size_t kLine = 64;
// Counting an access is a locked write, so a chunk's come together at its end, where no other key
// waits for them. Where rows are moved by the counts every access counts; else one in so many.
constexpr uint32_t kCountEvery = 8;

// What a key found; an enum, so that the usual case is one test.
enum class What : uint8_t { kRow, kDefault, kSums, kNothing };

struct Found {
  EncodedRow row;  // kSums: fp64 sums in place of the payload
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
  std::vector<uint64_t> keys;
  std::vector<uint64_t> hashes;
  std::vector<uint32_t> tables;
  std::vector<std::pair<BucketIndex::Group*, uint64_t>> counted;  // where a key was found
  std::vector<const RemoteRow*> remote;  // empty: no key of the chunk came from elsewhere
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
  uint32_t until_counted = 0;   // keys
  uint32_t dice = 1;
  // Keys to pass over, every - 1 on average: a steady step would meet the same features again and
  // again.
  uint32_t Gap(uint32_t every) {
    dice = dice * 1664525 + 1013904223;  // Numerical Recipes, 2nd edition, 7.1
    return (dice >> 16) % (2 * every - 1);
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

// Notes a found key for the observer, if it is one of those that it is told of.
void Observe(const Store::Impl& impl, uint32_t table, uint64_t key, const Found& found,
             Scratch* scratch) {
  const uint64_t hash = HashKey(key);
  const bool by_place = scratch->until_observed == 0;
  // Bits that neither bucket nor index group depend on alone.
  const bool by_key = (hash >> 20) % kObserveEvery == 0;
  scratch->until_observed = by_place ? scratch->Gap(kObserveEvery) : scratch->until_observed - 1;
  if (!by_place && !by_key) return;
  const Table& of = impl.tables[table];
  scratch->observed.push_back({key, hash, table, Store::Impl::BucketOf(of, hash),
                               of.config.layout.PayloadBytes(found.row.live), found.source,
                               by_place, by_key});
}

// The pass over one chunk. Keys, hashes, tables and remote rows stand in the scratch.
class Pass {
 public:
  Pass(const Store::Impl& impl, uint64_t version, Scratch* scratch)
      : impl_(impl), version_(version), scratch_(scratch), end_(scratch->keys.size()) {
    scratch->found.resize(end_);
    scratch->ssd_keys.clear();
    scratch->counted.clear();
  }

  // Finds the keys before `end`, and asks for what comes after them.
  void FindUntil(size_t end) {
    end = std::min(end, end_);
    while (settled_ < end) {
      const size_t begun = begun_;
      const size_t found = found_;
      begun_ = std::min(begun_ + kStep, end_);
      found_ = std::min(found_ + kStep, begun);
      const size_t settled = settled_;
      settled_ = std::min(settled_ + kStep, found);
      Begin(begun, begun_);
      Find(found, found_);
      for (size_t i = settled; i < settled_; ++i) {
        if (At(i).goes_on) Settle(i);
      }
    }
  }
  void FindAll() { FindUntil(end_); }

  // Counts what was found, and tells it. Requires: all keys are found.
  void Count() {
    for (const auto& [group, key] : scratch_->counted) BucketIndex::Count(group, key);
    const uint32_t* tables = scratch_->tables.data();
    const Found* found = scratch_->found.data();
    SourceCounts* counts = scratch_->counts.data();
    for (size_t i = 0; i < end_; ++i) ++counts[tables[i]][static_cast<size_t>(found[i].source)];
    if (impl_.options.observer == nullptr) return;
    for (size_t i = 0; i < end_; ++i) {
      if (!Remote(i)) Observe(impl_, tables[i], scratch_->keys[i], found[i], scratch_);
    }
  }

 private:
  struct Pending {
    BucketIndex::Group* group;
    const Bucket* bucket;
    bool goes_on;  // not in its first group, which is full
  };
  static constexpr size_t kPending = 4 * kStep;
  Pending& At(size_t i) { return pending_[i % kPending]; }
  bool Remote(size_t i) const {
    return !scratch_->remote.empty() && scratch_->remote[i] != nullptr;
  }

  void Begin(size_t first, size_t end) {
    const uint32_t* tables = scratch_->tables.data();
    const uint64_t* hashes = scratch_->hashes.data();
    for (size_t i = first; i < end; ++i) {
      const Table& table = impl_.tables[tables[i]];
      // What came from elsewhere is not looked for here, where a superseded copy may still be.
      At(i).bucket =
          Remote(i) ? nullptr : table.buckets[Store::Impl::BucketOf(table, hashes[i])].At(version_);
    }
    for (size_t i = first; i < end; ++i) {
      Pending& key = At(i);
      key.goes_on = false;
      if (key.bucket == nullptr) {
        key.group = BucketIndex::EmptyGroup();
        if (!Remote(i)) NotHeld(i);
        continue;
      }
      key.group = key.bucket->index.Begin(hashes[i]).group;
      __builtin_prefetch(key.group);
    }
  }

  void Find(size_t first, size_t end) {
    const uint64_t* keys = scratch_->keys.data();
    std::array<const BucketIndex::Group*, kStep> groups;
    std::array<uint64_t, kStep> words;
    for (size_t i = first; i < end; ++i) groups[i - first] = At(i).group;
    kRowOps->words(groups.data(), keys + first, end - first, words.data());
    for (size_t i = first; i < end; ++i) Meet(i, words[i - first]);
    for (size_t i = first; i < end; ++i) NoteAccess(i);
  }

  // Notes an access to be counted, unless the key's row is still looked for.
  void NoteAccess(size_t i) {
    const Pending& key = At(i);
    if (key.bucket == nullptr || key.goes_on) return;
    Device* device = key.bucket->device;
    const bool moves = device->ssd != nullptr || impl_.hbm != nullptr;
    if (!moves) {
      if (scratch_->until_counted-- != 0) return;
      scratch_->until_counted = scratch_->Gap(kCountEvery);
    }
    scratch_->counted.emplace_back(key.group, scratch_->keys[i]);
    if (device->policy != nullptr && scratch_->found[i].source == Source::kDdr) {
      scratch_->accesses.push_back({device, {scratch_->keys[i], scratch_->tables[i]}});
    }
  }

  // What the key's first group has of it.
  void Meet(size_t i, uint64_t word) {
    Pending& key = At(i);
    if (Remote(i)) return Take(*scratch_->remote[i], &scratch_->found[i]);
    if (word != 0 || !BucketIndex::GoesOn(*key.group)) return Place(i, word);
    key.goes_on = true;
    BucketIndex::Cursor at = key.bucket->index.Begin(scratch_->hashes[i]);
    at.Advance();
    at.Prefetch();
  }

  void Settle(size_t i) {
    Pending& key = At(i);
    const uint64_t wanted = scratch_->keys[i];
    // From the first group again: the arrays may have grown since, and hold the key elsewhere.
    BucketIndex::Cursor at = key.bucket->index.Begin(scratch_->hashes[i]);
    uint64_t word = BucketIndex::WordIn(*at.group, wanted);
    while (word == 0 && BucketIndex::GoesOn(*at.group)) {
      at.Advance();
      word = BucketIndex::WordIn(*at.group, wanted);
    }
    key.group = at.group;
    key.goes_on = false;
    Place(i, word);
    NoteAccess(i);
  }

  void NotHeld(size_t i) {
    scratch_->not_held = true;
    scratch_->not_held_table = scratch_->tables[i];
    scratch_->not_held_bucket =
        Store::Impl::BucketOf(impl_.tables[scratch_->not_held_table], scratch_->hashes[i]);
  }

  static void Take(const RemoteRow& row, Found* found) {
    const auto* sums = reinterpret_cast<const std::byte*>(row.sums);
    found->row = {sums != nullptr ? sums : row.payload, row.live};
    found->source = row.source;
    found->what = row.summed               ? What::kNothing
                  : sums != nullptr        ? What::kSums
                  : row.payload != nullptr ? What::kRow
                                           : What::kDefault;
  }

  // What an entry's word means at the pinned version; 0: there is no entry.
  void Place(size_t i, uint64_t word) {
    const Bucket* bucket = At(i).bucket;
    const uint32_t t = scratch_->tables[i];
    const Table& table = impl_.tables[t];
    const Location place =
        word == 0 ? Location() : Store::Impl::Resolve(BucketIndex::LocationOf(word), version_);
    const uint32_t bytes = place.live() == table.full_mask
                               ? table.row_bytes
                               : table.config.layout.PayloadBytes(place.live());
    Found& found = scratch_->found[i];
    switch (place.tier()) {
      case TierId::kDdr: {
        const std::byte* payload = SlabArena::AddressOf(bucket->rows, place.slot());
        found = {{payload, place.live()}, Source::kDdr, What::kRow};
        __builtin_prefetch(payload);
        for (uint32_t at = kLine; at < bytes; at += kLine) __builtin_prefetch(payload + at);
        break;
      }
      case TierId::kSsd:
        found = {{nullptr, place.live()}, Source::kSsd, What::kRow};
        scratch_->ssd_keys.push_back(
            {i, bucket->device, {place.slot(), scratch_->keys[i], t, bytes, nullptr}});
        break;
      case TierId::kHbm:  // no entry names it
      case TierId::kNowhere: {
        const bool pruned = place.slot() == static_cast<uint64_t>(RecordKind::kPruned);
        found = {{}, pruned ? Source::kPruned : Source::kDefault, What::kDefault};
      }
    }
  }

  const Store::Impl& impl_;
  const uint64_t version_;
  Scratch* scratch_;
  const size_t end_;
  size_t begun_ = 0;    // keys whose group was asked for
  size_t found_ = 0;    // keys looked for in it
  size_t settled_ = 0;  // keys that stand in scratch->found
  std::array<Pending, kPending> pending_;
};

void AddOne(const Table& table, const Found& found, double* sums) {
  const uint32_t dim = table.config.layout.dim();
  switch (found.what) {
    case What::kRow:
      return AddRows(table.config.layout, &found.row, 1, sums);
    case What::kDefault:
      for (uint32_t d = 0; d < dim; ++d) sums[d] += table.default_row[d];
      return;
    case What::kSums: {
      const auto* others = reinterpret_cast<const double*>(found.row.payload);
      for (uint32_t d = 0; d < dim; ++d) sums[d] += others[d];
      return;
    }
    case What::kNothing:
      return;
  }
}

// In order, as many rows at once as stand together.
void AddFound(const Table& table, const Found* found, size_t n, double* sums) {
  std::array<EncodedRow, kRows> rows;
  size_t together = 0;
  for (size_t i = 0; i < n; ++i) {
    if (found[i].what == What::kRow) {
      rows[together++] = found[i].row;
      continue;
    }
    if (together > 0) AddRows(table.config.layout, rows.data(), together, sums);
    together = 0;
    AddOne(table, found[i], sums);
  }
  if (together > 0) AddRows(table.config.layout, rows.data(), together, sums);
}

void WriteOne(const Table& table, const Found& found, float* out) {
  if (found.what == What::kDefault) {
    std::copy(table.default_row.begin(), table.default_row.end(), out);
  } else {
    WriteRow(table.config.layout, found.row, out);
  }
}

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
      scratch->found[key.at].row.payload = row;
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

// Lays the keys of a chunk out: what each is, its hash and its table.
static void LayOut(std::span<const BagFeature> features, std::span<const KeyBags> requests,
                   Scratch* scratch) {
  size_t keys = 0;
  bool remote = false;
  for (const KeyBags& request : requests) {
    keys += KeysOf(request).size();
    remote |= request.remote_of != nullptr;
  }
  scratch->keys.resize(keys);
  scratch->hashes.resize(keys);
  scratch->tables.resize(keys);
  scratch->remote.assign(remote ? keys : 0, nullptr);
  size_t at = 0;
  for (const KeyBags& request : requests) {
    const std::span<const int64_t> its = KeysOf(request);
    const size_t first = static_cast<size_t>(its.data() - request.keys.data());
    kRowOps->hash(its.data(), its.size(), &scratch->keys[at], &scratch->hashes[at]);
    for (size_t k = 0; remote && request.remote_of != nullptr && k < its.size(); ++k) {
      const uint32_t which = request.remote_of[first + k];
      if (which != 0) scratch->remote[at + k] = &request.remote[which - 1];
    }
    uint32_t* table = scratch->tables.data() + at;
    at += its.size();
    if (features.size() == 1) {
      std::fill_n(table, its.size(), features[0].table);
    } else if (request.offsets.empty()) {
      for (size_t k = 0; k < its.size(); ++k) table[k] = features[k % features.size()].table;
    } else {
      for (size_t bag = 0; bag + 1 < request.offsets.size(); ++bag) {
        const uint32_t n = request.offsets[bag + 1] - request.offsets[bag];
        table = std::fill_n(table, n, features[bag % features.size()].table);
      }
    }
  }
}

// Finds and pools the keys of one chunk.
static Status Answer(const Store::Impl& impl, uint64_t version,
                     std::span<const BagFeature> features, std::span<const KeyBags> requests,
                     Scratch* scratch) {
  LayOut(features, requests, scratch);
  Pass pass(impl, version, scratch);
  bool brought = false;
  // Makes found[..end) hold rows, and asks for those of the next keys.
  const auto find = [&](size_t end) -> Status {
    if (brought) return Status::Ok();
    pass.FindUntil(end + kStep);
    if (scratch->ssd_keys.empty() && !scratch->not_held) return Status::Ok();
    brought = true;
    pass.FindAll();
    return Bring(impl, scratch);
  };
  size_t at = 0;
  for (const KeyBags& request : requests) {
    const size_t first = at;
    const bool jagged = !request.offsets.empty();
    const size_t bags = jagged ? request.offsets.size() - 1 : request.keys.size();
    float* out = request.out;
    size_t feature = 0;
    for (size_t bag = 0; bag < bags; ++bag) {
      const BagFeature& of = features[feature];
      const Table& table = impl.tables[of.table];
      const size_t n = jagged ? request.offsets[bag + 1] - request.offsets[bag] : 1;
      if (n == 1) {
        EMBERTIDE_RETURN_IF_ERROR(find(at + 1));
        WriteOne(table, scratch->found[at++], out + of.column);
      } else {
        const uint32_t dim = table.config.layout.dim();
        scratch->sums.resize(dim);
        double* sums = scratch->sums.data();
        for (uint32_t d = 0; d < dim; ++d) sums[d] = 0.0;
        for (size_t end = at + n; at < end;) {
          const size_t step = std::min(kRows, end - at);
          EMBERTIDE_RETURN_IF_ERROR(find(at + step));
          AddFound(table, &scratch->found[at], step, sums);
          at += step;
        }
        const bool mean = of.pooling == Pooling::kMean && n > 0;
        RoundSums(sums, dim, mean ? static_cast<double>(n) : 1.0, out + of.column);
      }
      if (++feature == features.size()) {
        feature = 0;
        out += request.out_stride;
      }
    }
    if (request.source == nullptr) continue;
    uint8_t* source = request.source + (KeysOf(request).data() - request.keys.data());
    for (size_t i = first; i < at; ++i) *source++ = static_cast<uint8_t>(scratch->found[i].source);
  }
  pass.Count();
  return Status::Ok();
}

// Finds all keys of a request, to be read from scratch->found, and counts them.
static Status FindAll(const Store::Impl& impl, uint64_t version,
                      std::span<const BagFeature> features, const KeyBags& keys, Scratch* scratch) {
  LayOut(features, {&keys, 1}, scratch);
  Pass pass(impl, version, scratch);
  pass.FindAll();
  EMBERTIDE_RETURN_IF_ERROR(Bring(impl, scratch));
  pass.Count();
  return Status::Ok();
}

namespace {

// What the HBM tier asks of the tiers below it.
class BelowHbmLookup : public BelowHbm {
 public:
  BelowHbmLookup(const Store::Impl& impl, uint64_t version, Scratch* scratch)
      : impl_(impl), version_(version), scratch_(scratch) {}
  Status Find(std::span<const BagFeature> features, const KeyBags& keys) override {
    return FindAll(impl_, version_, features, keys, scratch_);
  }
  Row At(size_t i) const override {
    const Found& found = scratch_->found[i];
    const HbmRefKind kind = found.what == What::kSums      ? HbmRefKind::kSums
                            : found.what == What::kNothing ? HbmRefKind::kNothing
                            : found.what == What::kDefault ? HbmRefKind::kFloats
                                                           : HbmRefKind::kRow;
    return {kind, found.row.live, found.source, found.row.payload};
  }
  void CountHit(uint32_t table, uint64_t key, uint16_t live) override {
    ++scratch_->counts[table][static_cast<size_t>(Source::kHbm)];
    if (impl_.options.observer == nullptr) return;
    Observe(impl_, table, key, {{nullptr, live}, Source::kHbm, What::kRow}, scratch_);
  }

 private:
  const Store::Impl& impl_;
  const uint64_t version_;
  Scratch* scratch_;
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
  Status status(Code::kUnavailable, "there is no HBM tier");
  if (impl.hbm != nullptr) {
    BelowHbmLookup below(impl, view_.version_, &scratch);
    status = impl.hbm->Lookup(view_.version_, features, requests, &below);
    // Answered without it, the keys are counted again.
    if (status.code() == Code::kUnavailable) scratch.Begin(impl.tables.size());
  }
  if (status.code() == Code::kUnavailable) {
    status = ForEachChunk(features.size(), requests, [&](std::span<const KeyBags> chunk) {
      return Answer(impl, view_.version_, features, chunk, &scratch);
    });
  }
  EMBERTIDE_RETURN_IF_ERROR(status);
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
static Status FindForPeer(const Store::Impl& impl, uint64_t version, uint32_t table,
                          std::span<const int64_t> keys, Scratch* scratch, uint8_t* sources) {
  EMBERTIDE_RETURN_IF_ERROR(impl.CheckTable(table));
  scratch->Begin(impl.tables.size());
  const BagFeature feature{table, Pooling::kSum, 0};
  const KeyBags bags{keys, {}, nullptr, 0};
  EMBERTIDE_RETURN_IF_ERROR(FindAll(impl, version, {&feature, 1}, bags, scratch));
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
  EMBERTIDE_RETURN_IF_ERROR(FindForPeer(impl, view_.version_, table, keys, &scratch, sources));
  const RowLayout& layout = impl.tables[table].config.layout;
  std::vector<std::byte> bytes;
  bytes.reserve(keys.size() * (kRecordHeaderBytes + layout.PayloadBytes(layout.full_mask())));
  for (size_t i = 0; i < keys.size(); ++i) {
    const Found& found = scratch.found[i];
    if (found.what != What::kRow) continue;
    AppendRecord({static_cast<uint64_t>(keys[i]),
                  found.row.live,
                  RecordKind::kRow,
                  {found.row.payload, layout.PayloadBytes(found.row.live)}},
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
  EMBERTIDE_RETURN_IF_ERROR(FindForPeer(impl, view_.version_, table, keys, &scratch, sources));
  const Table& of = impl.tables[table];
  const uint32_t dim = of.config.layout.dim();
  std::fill_n(sums, (offsets.size() - 1) * dim, 0.0);
  for (size_t bag = 0; bag + 1 < offsets.size(); ++bag, sums += dim) {
    for (uint32_t k = offsets[bag]; k < offsets[bag + 1]; ++k) {
      AddOne(of, scratch.found[places[k]], sums);
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
