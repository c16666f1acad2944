// Batched reads through a pinned view.
//
// A batch runs in three passes over arrays of the calling thread, so that no step waits for the one
// before it on the same key: find the entries (tags prefetched ahead), bring the SSD rows (each
// block once, in one batch), then decode or pool straight into the output.
#include <algorithm>

#include "store/store_impl.h"

namespace embertide {
namespace {

// Tags of this many keys are on their way to the cache before the first is probed: enough to cover
// a DRAM access (~100 ns) at ~5 ns a probe.
constexpr size_t kPrefetchAhead = 16;

struct Found {
  const std::byte* payload = nullptr;  // null: the default row
  uint16_t live = 0;
  Source source = Source::kDefault;
};

// One batch's working memory, kept by each thread; bounded by the largest batch it saw.
struct Scratch {
  std::vector<uint64_t> hashes;
  std::vector<Found> found;
  std::vector<size_t> ssd_keys;  // positions whose row lies on an SSD
  std::vector<LogRead> ssd_reads;
  std::vector<std::byte> ssd_rows;
  BlockBuffers blocks;
  std::vector<double> sums;
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
  } else {
    DecodePayload(layout, found.live, found.payload, out);
  }
}

void AddRow(const Table& table, const Found& found, double* sums) {
  if (found.payload != nullptr) {
    AccumulatePayload(table.config.layout, found.live, found.payload, 1.0, sums);
    return;
  }
  for (size_t d = 0; d < table.default_row.size(); ++d) sums[d] += table.default_row[d];
}

// Pools rows found[at(0)] .. found[at(n - 1)] into `out`; kNone writes them one after the other.
template <typename At>
void PoolRows(const Table& table, Scratch* scratch, Pooling pooling, size_t n, const At& at,
              float* out) {
  const uint32_t dim = table.config.layout.dim();
  if (n == 1 || pooling == Pooling::kNone) {
    for (size_t i = 0; i < n; ++i) WriteRow(table, scratch->found[at(i)], out + i * dim);
    return;
  }
  scratch->sums.assign(dim, 0.0);
  for (size_t i = 0; i < n; ++i) AddRow(table, scratch->found[at(i)], scratch->sums.data());
  const double divisor = pooling == Pooling::kMean && n > 0 ? static_cast<double>(n) : 1.0;
  for (uint32_t d = 0; d < dim; ++d) out[d] = static_cast<float>(scratch->sums[d] / divisor);
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

// The keys found at `version`; SSD rows are noted, not yet read.
static void FindKeys(const Store::Impl& impl, const Table& table, std::span<const int64_t> keys,
                     uint64_t version, Scratch* scratch) {
  const size_t n = keys.size();
  scratch->hashes.resize(n);
  scratch->found.assign(n, Found{});
  scratch->ssd_keys.clear();
  scratch->ssd_reads.clear();
  for (size_t i = 0; i < n + kPrefetchAhead; ++i) {
    if (i < n) {
      const uint64_t hash = HashKey(static_cast<uint64_t>(keys[i]));
      scratch->hashes[i] = hash;
      table.buckets[Store::Impl::BucketOf(table, hash)].index.Prefetch(hash);
    }
    if (i < kPrefetchAhead) continue;
    const size_t at = i - kPrefetchAhead;
    const auto key = static_cast<uint64_t>(keys[at]);
    const uint64_t hash = scratch->hashes[at];
    const uint32_t bucket = Store::Impl::BucketOf(table, hash);
    const Location place =
        Store::Impl::Resolve(table.buckets[bucket].index.Find(hash, key), version);
    Found& found = scratch->found[at];
    found.live = place.live();
    switch (place.tier()) {
      case TierId::kDdr:
        found.source = Source::kDdr;
        found.payload = impl.devices[impl.DeviceOf(table, bucket)]->arena.Address(place.slot());
        __builtin_prefetch(found.payload);
        break;
      case TierId::kSsd:
        found.source = Source::kSsd;
        scratch->ssd_keys.push_back(at);
        scratch->ssd_reads.push_back(
            {place.slot(), key, table.config.layout.PayloadBytes(place.live()), nullptr});
        break;
      case TierId::kHbm:  // No HBM tier yet: its slots are never handed out.
      case TierId::kNowhere:
        found.source = place.slot() == static_cast<uint64_t>(RecordKind::kPruned)
                           ? Source::kPruned
                           : Source::kDefault;
    }
  }
}

// Brings the noted SSD rows of every device and asks for their promotion.
static Status ReadSsdRows(const Store::Impl& impl, const Table& table, uint32_t table_number,
                          Scratch* scratch) {
  const uint32_t row_bytes = table.config.layout.PayloadBytes(table.config.layout.full_mask());
  scratch->ssd_rows.resize(scratch->ssd_reads.size() * row_bytes);
  std::vector<LogRead> reads;
  std::vector<size_t> which;
  for (uint32_t d = 0; d < impl.options.devices; ++d) {
    Device& device = *impl.devices[d];
    reads.clear();
    which.clear();
    for (size_t r = 0; r < scratch->ssd_reads.size(); ++r) {
      const uint64_t hash = scratch->hashes[scratch->ssd_keys[r]];
      if (impl.DeviceOf(table, Store::Impl::BucketOf(table, hash)) != d) continue;
      reads.push_back(scratch->ssd_reads[r]);
      which.push_back(r);
    }
    if (reads.empty()) continue;
    EMBERTIDE_RETURN_IF_ERROR(device.ssd->Read(reads, &scratch->blocks));
    // A reader never waits: if the list is being emptied now, these rows ask again next time.
    const std::unique_lock lock(device.promotions_mutex, std::try_to_lock);
    for (size_t r = 0; r < reads.size(); ++r) {
      std::byte* row = scratch->ssd_rows.data() + which[r] * row_bytes;
      std::copy_n(reads[r].row, reads[r].bytes, row);
      scratch->found[scratch->ssd_keys[which[r]]].payload = row;
      if (!lock.owns_lock() || device.promotions.size() >= kMaxPromotions) {
        const_cast<Store::Impl&>(impl).promotions_dropped.fetch_add(1, std::memory_order_relaxed);
        continue;
      }
      const uint64_t hash = HashKey(reads[r].key);
      device.promotions.push_back({table_number, Store::Impl::BucketOf(table, hash), reads[r].key});
    }
  }
  return Status::Ok();
}

RowGather::RowGather(const ReadView& view) : view_(view) {
  view_.store_->impl_->readers.BeginRead(view_.reader_);
}

RowGather::~RowGather() { view_.store_->impl_->readers.EndRead(view_.reader_); }

Status RowGather::Find(uint32_t table_number, std::span<const int64_t> keys, uint8_t* source) {
  const Store::Impl& impl = *view_.store_->impl_;
  EMBERTIDE_RETURN_IF_ERROR(impl.CheckTable(table_number));
  table_ = table_number;
  const Table& table = impl.tables[table_number];
  Scratch& scratch = ThreadScratch();
  FindKeys(impl, table, keys, view_.version_, &scratch);
  if (!scratch.ssd_reads.empty()) {
    EMBERTIDE_RETURN_IF_ERROR(ReadSsdRows(impl, table, table_number, &scratch));
  }
  uint64_t hits[kSources] = {};
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto from = static_cast<uint8_t>(scratch.found[i].source);
    ++hits[from];
    if (source != nullptr) source[i] = from;
  }
  for (size_t s = 0; s < kSources; ++s) {
    if (hits[s] > 0) impl.hits[s].fetch_add(hits[s], std::memory_order_relaxed);
  }
  return Status::Ok();
}

void RowGather::Pool(Pooling pooling, std::span<const uint32_t> which, float* out) const {
  const Table& table = view_.store_->impl_->tables[table_];
  PoolRows(table, &ThreadScratch(), pooling, which.size(), [&](size_t i) { return which[i]; }, out);
}

Status ReadView::Lookup(const LookupRequest& request) const {
  const Store::Impl& impl = *store_->impl_;
  EMBERTIDE_RETURN_IF_ERROR(impl.CheckTable(request.table));
  const Table& table = impl.tables[request.table];
  EMBERTIDE_RETURN_IF_ERROR(ValidateRequest(request, table.config));
  RowGather gather(*this);
  EMBERTIDE_RETURN_IF_ERROR(gather.Find(request.table, request.keys, request.source));
  Scratch& scratch = ThreadScratch();
  if (request.pooling == Pooling::kNone) {
    for (size_t i = 0; i < request.keys.size(); ++i) {
      WriteRow(table, scratch.found[i], request.out + i * request.out_stride);
    }
    return Status::Ok();
  }
  for (size_t bag = 0; bag + 1 < request.offsets.size(); ++bag) {
    const uint32_t begin = request.offsets[bag];
    PoolRows(
        table, &scratch, request.pooling, request.offsets[bag + 1] - begin,
        [=](size_t i) { return begin + i; }, request.out + bag * request.out_stride);
  }
  return Status::Ok();
}

RowLocation ReadView::Explain(uint32_t table_number, uint64_t key) const {
  RowLocation answer;
  const Store::Impl& impl = *store_->impl_;
  if (!impl.CheckTable(table_number).ok()) return answer;
  const Reading reading(&impl.readers, reader_);
  const Table& table = impl.tables[table_number];
  const uint64_t hash = HashKey(key);
  answer.bucket = Store::Impl::BucketOf(table, hash);
  answer.device = impl.DeviceOf(table, answer.bucket);
  const BucketIndex& index = table.buckets[answer.bucket].index;
  answer.access_count = index.AccessCount(hash, key);
  const Location place = Store::Impl::Resolve(index.Find(hash, key), version_, &answer.version);
  if (place.tier() == TierId::kNowhere) return answer;
  answer.resident = true;
  answer.tier = place.tier() == TierId::kDdr ? Source::kDdr : Source::kSsd;
  answer.live = place.live();
  answer.payload_bytes = table.config.layout.PayloadBytes(place.live());
  return answer;
}

}  // namespace embertide
