// HbmCache: the memory of the devices, and the rows that enter, end and leave.
#include "hbm/cache.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_map>

namespace embertide {
namespace {

// Batches may take one part in this of the budget: their output and what missed goes through it.
constexpr uint64_t kLanesShare = 8;
// One fill may bring one part in this of the budget.
constexpr uint64_t kFillShare = 64;
constexpr uint32_t kMaxBatchKeys = 16384;
constexpr uint32_t kMinBatchKeys = 32;
constexpr uint32_t kMinFillRows = 16;
// Ways for each row that the pages hold: sets fill unevenly, and pruned rows are smaller.
constexpr double kWaysPerRow = 1.25;
constexpr double kWaysPerChunkedRow = 2.0;
constexpr uint64_t kAlignment = 256;

constexpr uint64_t RoundUp(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

// Hands out one allocation piece by piece; without memory it only counts.
class Carver {
 public:
  explicit Carver(std::byte* memory) : memory_(memory) {}
  template <typename T>
  T* Take(uint64_t count) {
    bytes_ = RoundUp(bytes_, kAlignment);
    T* piece = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += count * sizeof(T);
    return piece;
  }
  uint64_t bytes() const { return RoundUp(bytes_, kAlignment); }

 private:
  std::byte* memory_;
  uint64_t bytes_ = 0;
};

}  // namespace

HbmCache::~HbmCache() {
  for (const auto& shard : shards_) {
    // Work that is under way uses memory that goes now. An error changes nothing any more.
    static_cast<void>(shard->device->Wait(shard->stream));
  }
}

Result<std::unique_ptr<HbmCache>> HbmCache::Open(const HbmOptions& options,
                                                 std::vector<std::unique_ptr<HbmDevice>> devices) {
  if (devices.empty()) return Status(Code::kInvalidArgument, "an HBM tier needs a device");
  if (options.tables.size() >= kHbmNoTable) {
    return Status(Code::kInvalidArgument,
                  "an HBM tier takes fewer than " + std::to_string(kHbmNoTable) + " tables");
  }
  std::unique_ptr<HbmCache> cache(new HbmCache);
  cache->tables_ = options.tables;
  cache->budget_bytes_ = options.budget_bytes;
  cache->several_ = devices.size() > 1;
  uint64_t item = 0;
  for (const TableConfig& table : options.tables) {
    const RowLayout& layout = table.layout;
    if (layout.is_keys()) continue;  // they never come here
    item = std::max<uint64_t>({item, layout.PayloadBytes(layout.full_mask()), layout.dim() * 8U});
    cache->max_dim_ = std::max(cache->max_dim_, layout.dim());
  }
  cache->item_bytes_ = static_cast<uint32_t>(RoundUp(item, kHbmSlotUnit));
  cache->max_dim_ = static_cast<uint32_t>(RoundUp(cache->max_dim_, 4));
  const uint64_t across = cache->several_ ? 2 : 0;
  const uint64_t key_bytes = sizeof(uint64_t) + sizeof(uint16_t) + 2 * sizeof(uint32_t) +
                             2 * sizeof(HbmRef) + sizeof(HbmBag) +
                             (1 + across) * cache->item_bytes_ + cache->max_dim_ * sizeof(float);
  cache->batch_keys_ = static_cast<uint32_t>(std::min<uint64_t>(
      options.budget_bytes / kLanesShare / kHbmLanes / key_bytes, kMaxBatchKeys));
  if (cache->batch_keys_ < kMinBatchKeys) {
    return Status(Code::kInvalidArgument,
                  "hbm_budget_bytes = " + std::to_string(options.budget_bytes) +
                      " leaves room for batches of " + std::to_string(cache->batch_keys_) +
                      " keys; give at least " +
                      std::to_string(kMinBatchKeys * key_bytes * kHbmLanes * kLanesShare));
  }
  for (auto& device : devices) {
    auto shard = std::make_unique<Shard>();
    shard->device = std::move(device);
    EMBERTIDE_RETURN_IF_ERROR(cache->OpenShard(options, shard.get()));
    cache->shards_.push_back(std::move(shard));
  }
  for (uint32_t lane = 0; lane < kHbmLanes; ++lane) cache->free_lanes_.push_back(lane);
  return cache;
}

Status HbmCache::OpenShard(const HbmOptions& options, Shard* shard) {
  HbmDevice& device = *shard->device;
  const uint64_t fill_rows =
      std::clamp<uint64_t>(options.budget_bytes / kFillShare / (item_bytes_ + sizeof(HbmPlacement)),
                           kMinFillRows, kHbmFillRows);
  fill_rows_ = static_cast<uint32_t>(fill_rows);
  shard->lanes.resize(kHbmLanes);
  HbmTable* tables = nullptr;
  float* default_rows = nullptr;
  uint64_t default_floats = 0;
  for (const TableConfig& table : options.tables) {
    default_floats += RoundUp(table.layout.dim(), 4);
  }
  // Both sides of all copies, in the same order.
  const auto carve_both = [&](Carver* carver, bool host) {
    (host ? tables : shard->tables) = carver->Take<HbmTable>(options.tables.size());
    auto* floats = carver->Take<float>(default_floats);
    if (host) {
      default_rows = floats;
    } else {
      shard->default_rows = {reinterpret_cast<std::byte*>(floats)};
    }
    (host ? shard->endings_host : shard->endings) = carver->Take<HbmEnding>(fill_rows_);
    (host ? shard->placements_host : shard->placements) =
        carver->Take<HbmPlacement>(fill_rows_ + HbmPlaces::kPageUnits);
    (host ? shard->payloads_host : shard->payloads) =
        carver->Take<std::byte>(fill_rows * item_bytes_);
    (host ? shard->survey_host : shard->survey) = carver->Take<uint32_t>(2 * fill_rows);
    for (Lane& lane : shard->lanes) {
      Lane::Side& side = host ? lane.host : lane.device;
      side.keys = carver->Take<uint64_t>(batch_keys_);
      side.tables = carver->Take<uint16_t>(batch_keys_);
      side.answers = carver->Take<uint32_t>(batch_keys_);
      side.bags = carver->Take<HbmBag>(batch_keys_);
      side.at = carver->Take<uint32_t>(batch_keys_);
      side.given = carver->Take<HbmRef>(batch_keys_);
      side.items = carver->Take<std::byte>(uint64_t{batch_keys_} * item_bytes_);
      side.out = carver->Take<float>(uint64_t{batch_keys_} * max_dim_);
    }
  };
  const auto carve_device = [&](Carver* carver) {
    carve_both(carver, /*host=*/false);
    for (Lane& lane : shard->lanes) {
      lane.refs = carver->Take<HbmRef>(batch_keys_);
      if (!several_) continue;
      lane.partials = carver->Take<double>(uint64_t{batch_keys_} * item_bytes_ / sizeof(double));
      lane.incoming = carver->Take<std::byte>(uint64_t{batch_keys_} * item_bytes_);
    }
  };
  Carver counted(nullptr);
  carve_device(&counted);
  // The rest is ways and pages, in the proportion that the tables' rows ask for.
  double slot_bytes = 0;
  double ways = kWaysPerRow;
  uint32_t least_units = HbmPlaces::kPageUnits;
  const auto has_values = [](const TableConfig& table) { return !table.layout.is_keys(); };
  const auto tables_here = std::ranges::count_if(options.tables, has_values);
  for (const TableConfig& table : options.tables) {
    const RowLayout& layout = table.layout;
    if (layout.is_keys()) continue;
    const uint64_t whole = RoundUp(layout.PayloadBytes(layout.full_mask()), kHbmSlotUnit);
    slot_bytes += static_cast<double>(whole) / static_cast<double>(tables_here);
    if (layout.chunks > 1) ways = kWaysPerChunkedRow;
    least_units = std::min<uint32_t>(
        least_units,
        static_cast<uint32_t>(RoundUp(layout.PayloadBytes(1), kHbmSlotUnit) / kHbmSlotUnit));
  }
  constexpr uint64_t kWayBytes = sizeof(uint16_t) + sizeof(HbmEntry);
  const uint64_t rest =
      options.budget_bytes > counted.bytes() ? options.budget_bytes - counted.bytes() : 0;
  const auto sets = static_cast<uint64_t>(static_cast<double>(rest) /
                                          (kHbmWays * (kWayBytes + slot_bytes / ways)));
  const uint64_t directory = sets * kHbmWays * kWayBytes + 3 * kAlignment;
  const uint64_t pages = rest > directory ? (rest - directory) / kHbmPageBytes : 0;
  if (sets == 0 || pages == 0) {
    return {Code::kInvalidArgument, "hbm_budget_bytes = " + std::to_string(options.budget_bytes) +
                                        " leaves no page: " + std::to_string(counted.bytes()) +
                                        " go to copies; give more"};
  }
  if (pages * HbmPlaces::kPageUnits > ~0U || sets * kHbmWays >= HbmPlaces::kNoWay) {
    return {Code::kInvalidArgument,
            "hbm_budget_bytes = " + std::to_string(options.budget_bytes) +
                " is more than a device's cache can name; give at most 128 GiB"};
  }
  Result<std::byte*> memory = device.Allocate(options.budget_bytes);
  if (!memory.ok()) return memory.status();
  Carver carver(*memory);
  carve_device(&carver);
  shard->directory.sets = static_cast<uint32_t>(sets);
  shard->directory.tags = carver.Take<uint16_t>(sets * kHbmWays);
  shard->directory.entries = carver.Take<HbmEntry>(sets * kHbmWays);
  shard->directory.pages = carver.Take<std::byte>(pages * kHbmPageBytes);
  EMBERTIDE_CHECK(carver.bytes() <= options.budget_bytes);
  shard->fixed_bytes = carver.bytes() - pages * kHbmPageBytes;
  shard->places = std::make_unique<HbmPlaces>(shard->directory.sets, static_cast<uint32_t>(pages));
  Carver host_counted(nullptr);
  carve_both(&host_counted, /*host=*/true);
  Result<std::byte*> host = device.AllocateHost(host_counted.bytes());
  if (!host.ok()) return host.status();
  Carver host_carver(*host);
  carve_both(&host_carver, /*host=*/true);
  host_bytes_ += host_counted.bytes() + sets * kHbmWays * HbmPlaces::kWayBytes +
                 pages * (HbmPlaces::kPageUnits / least_units) * HbmPlaces::kSlotBytes;

  for (uint32_t s = 0; s <= kHbmLanes; ++s) {
    const Result<uint32_t> stream = device.AddStream();
    if (!stream.ok()) return stream.status();
    (s < kHbmLanes ? shard->lanes[s].stream : shard->stream) = stream.value();
  }
  const std::byte* rows_on_device = shard->default_rows.front();
  shard->default_rows.clear();
  uint64_t at = 0;
  for (size_t t = 0; t < options.tables.size(); ++t) {
    const RowLayout& layout = options.tables[t].layout;
    tables[t] = {layout.dim(), layout.chunks, layout.chunk_dim, layout.dtype};
    std::fill_n(default_rows + at, layout.dim(), 0.0F);
    std::copy(options.tables[t].default_row.begin(), options.tables[t].default_row.end(),
              default_rows + at);
    shard->default_rows.push_back(rows_on_device + at * sizeof(float));
    at += RoundUp(layout.dim(), 4);
  }
  EMBERTIDE_RETURN_IF_ERROR(device.Upload(
      shard->stream, reinterpret_cast<std::byte*>(shard->tables),
      reinterpret_cast<const std::byte*>(tables), options.tables.size() * sizeof(HbmTable)));
  EMBERTIDE_RETURN_IF_ERROR(device.Upload(shard->stream, const_cast<std::byte*>(rows_on_device),
                                          reinterpret_cast<const std::byte*>(default_rows),
                                          at * sizeof(float)));
  return device.Wait(shard->stream);
}

bool HbmCache::Check(const Status& status) {
  if (!status.ok()) failed_ = true;
  return status.ok();
}

std::vector<HbmDeviceStats> HbmCache::Stats() const {
  std::vector<HbmDeviceStats> all;
  for (const auto& shard : shards_) {
    HbmDeviceStats& stats = all.emplace_back();
    stats.hits = shard->hits.load(std::memory_order_relaxed);
    stats.misses = shard->misses.load(std::memory_order_relaxed);
    const std::lock_guard lock(shard->mutex);
    stats.budget_bytes = budget_bytes_;
    stats.used_bytes = shard->fixed_bytes + shard->places->page_bytes();
    stats.rows = shard->places->rows();
    stats.placed = shard->placed;
    stats.evictions = shard->places->evictions();
    stats.ended = shard->ended;
    stats.in_use = shard->in_use;
    stats.deferred = shard->deferred;
  }
  return all;
}

std::vector<HbmTableStats> HbmCache::TableStats() const {
  std::vector<HbmTableStats> all(tables_.size());
  for (const auto& shard : shards_) {
    const std::lock_guard lock(shard->mutex);
    for (uint32_t t = 0; t < all.size(); ++t) {
      const HbmTableStats here = shard->places->OfTable(t);
      all[t].rows += here.rows;
      all[t].bytes += here.bytes;
    }
  }
  return all;
}

bool HbmCache::Has(uint32_t table, uint64_t key, uint64_t version) const {
  Shard& shard = *shards_[DeviceOf(table, key)];
  const std::lock_guard lock(shard.mutex);
  return shard.places->EndOf(table, key) > version;
}

Status HbmCache::CheckIntegrity() const {
  for (const auto& shard : shards_) {
    const std::lock_guard lock(shard->mutex);
    EMBERTIDE_RETURN_IF_ERROR(shard->places->CheckIntegrity());
  }
  return Status::Ok();
}

Result<HbmKind> ParseHbmKind(const std::string& name) {
  if (name == "gpu") return HbmKind::kGpu;
  if (name == "twin") return HbmKind::kTwin;
  return Status(Code::kInvalidArgument, "HBM kind \"" + name + "\"; use gpu or twin");
}

// --- rows that end

void HbmCache::End(uint32_t table, uint64_t key, uint64_t until) {
  Shard& shard = *shards_[DeviceOf(table, key)];
  const std::lock_guard lock(shard.mutex);
  const uint32_t way = shard.places->End(table, key, until);
  if (way == HbmPlaces::kNoWay) return;
  ++shard.ended;
  shard.endings_host[shard.endings_count++] = {until, way};
  if (shard.endings_count < fill_rows_) return;
  FlushLocked(&shard);
  Check(shard.device->Wait(shard.stream));
  shard.endings_count = 0;
  shard.endings_given = 0;
}

void HbmCache::Flush() {
  for (const auto& shard : shards_) {
    const std::lock_guard lock(shard->mutex);
    FlushLocked(shard.get());
  }
}

void HbmCache::FlushLocked(Shard* shard) {
  const uint32_t first = shard->endings_given;
  const uint32_t count = shard->endings_count - first;
  if (count == 0 || !healthy()) return;
  shard->endings_given = shard->endings_count;
  HbmDevice& device = *shard->device;
  if (!Check(device.Upload(shard->stream, reinterpret_cast<std::byte*>(shard->endings + first),
                           reinterpret_cast<const std::byte*>(shard->endings_host + first),
                           count * sizeof(HbmEnding)))) {
    return;
  }
  Check(device.End(shard->stream, shard->directory, shard->endings + first, count));
}

// --- rows that enter

void HbmCache::Survey(uint32_t d, std::span<HbmRow> rows) {
  Shard& shard = *shards_[d];
  HbmDevice& device = *shard.device;
  std::unordered_map<uint32_t, uint32_t> place_of;  // set -> its place among those asked for
  const auto set_of = [&](const HbmRow& row) {
    return HbmSetOf(HbmHash(row.table, row.key), shard.directory.sets);
  };
  // The last fill's copies are done once the survey is.
  shard.fill_rows = 0;
  shard.fill_bytes = 0;
  uint32_t* sets = shard.survey_host;
  for (HbmRow& row : rows) {
    row.used = ~0U;  // no place for what is not surveyed
    if (place_of.size() == fill_rows_) continue;
    const auto next = static_cast<uint32_t>(place_of.size());
    if (place_of.emplace(set_of(row), next).second) sets[next] = set_of(row);
  }
  const auto count = static_cast<uint32_t>(place_of.size());
  if (count == 0 || !healthy()) return;
  uint32_t* used = shard.survey_host + fill_rows_;
  const uint64_t bytes = count * sizeof(uint32_t);
  if (!Check(device.Upload(shard.stream, reinterpret_cast<std::byte*>(shard.survey),
                           reinterpret_cast<const std::byte*>(sets), bytes)) ||
      !Check(device.Survey(shard.stream, shard.directory, shard.survey, count,
                           shard.survey + fill_rows_)) ||
      !Check(device.Download(shard.stream, reinterpret_cast<std::byte*>(used),
                             reinterpret_cast<const std::byte*>(shard.survey + fill_rows_),
                             bytes)) ||
      !Check(device.Wait(shard.stream))) {
    return;
  }
  for (HbmRow& row : rows) {
    const auto found = place_of.find(set_of(row));
    if (found != place_of.end()) row.used = used[found->second];
  }
}

void HbmCache::Place(uint32_t d, std::span<const HbmRow> rows, uint64_t oldest, uint64_t safe,
                     const std::function<uint64_t()>& retire) {
  Shard& shard = *shards_[d];
  const std::lock_guard lock(shard.mutex);
  if (!healthy() || rows.empty()) return;
  const uint32_t capacity = fill_rows_ + HbmPlaces::kPageUnits;
  if (capacity - shard.fill_rows <= HbmPlaces::kPageUnits) {
    shard.deferred += rows.size();
    return;
  }
  FlushLocked(&shard);
  const uint32_t first = shard.fill_rows;
  const uint64_t first_byte = shard.fill_bytes;
  std::vector<uint32_t> emptied;
  shard.places->BeginBatch(safe, &emptied);
  const auto empty_ways = [&] {
    for (const uint32_t way : emptied) {
      HbmPlacement& placement = shard.placements_host[shard.fill_rows++];
      placement = {};
      placement.way = way;
    }
    emptied.clear();
  };
  empty_ways();
  for (const HbmRow& row : rows) {
    const auto bytes = static_cast<uint32_t>(row.payload.size());
    if (shard.fill_rows == capacity ||
        shard.fill_bytes + item_bytes_ > uint64_t{fill_rows_} * item_bytes_) {
      ++shard.deferred;
      continue;
    }
    const HbmPlaces::Place place =
        shard.places->Put(row.table, row.key, bytes, row.until, row.used, oldest, &emptied);
    empty_ways();
    if (place.answer == HbmPlaces::Answer::kInUse) ++shard.in_use;
    if (place.answer == HbmPlaces::Answer::kDeferred) ++shard.deferred;
    if (place.answer != HbmPlaces::Answer::kPlaced) continue;
    std::copy(row.payload.begin(), row.payload.end(), shard.payloads_host + shard.fill_bytes);
    HbmPlacement& placement = shard.placements_host[shard.fill_rows++];
    placement.entry = {row.key, row.since, row.until, place.slot, HbmMeta(row.table, row.live)};
    placement.from = shard.fill_bytes;
    placement.way = place.way;
    placement.bytes = bytes;
    shard.fill_bytes += RoundUp(bytes, 16);
    ++shard.placed;
  }
  HbmDevice& device = *shard.device;
  const uint32_t count = shard.fill_rows - first;
  if (count > 0 &&
      Check(device.Upload(shard.stream, reinterpret_cast<std::byte*>(shard.placements + first),
                          reinterpret_cast<const std::byte*>(shard.placements_host + first),
                          count * sizeof(HbmPlacement))) &&
      Check(device.Upload(shard.stream, shard.payloads + first_byte,
                          shard.payloads_host + first_byte, shard.fill_bytes - first_byte))) {
    Check(device.Place(shard.stream, shard.directory, shard.placements + first, count,
                       shard.payloads));
  }
  // Whoever reads from here on was given the new places.
  shard.places->EndBatch(retire());
}

}  // namespace embertide
