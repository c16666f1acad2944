// Store: opening, pinning, counters. The rest of the class is in the files beside this one.
#include <filesystem>
#include <set>
#include <system_error>

#include "store/store_impl.h"

namespace embertide {
namespace {

Status ValidateOptions(const StoreOptions& options) {
  if (options.tables.empty()) return {Code::kInvalidArgument, "a store needs at least one table"};
  std::set<std::string> names;
  std::set<uint32_t> ids;
  for (const TableConfig& table : options.tables) {
    EMBERTIDE_RETURN_IF_ERROR(table.Validate());
    if (!names.insert(table.name).second || !ids.insert(table.id).second) {
      return {Code::kInvalidArgument, "table " + table.name + ": name or id is used twice"};
    }
    const uint32_t aux =
        options.profile == Profile::kTrain ? sizeof(RowAux) + 4U * table.layout.chunks : 0;
    const uint32_t bytes = table.layout.PayloadBytes(table.layout.full_mask()) + aux;
    if (bytes > kMaxEntryBytes) {
      return {Code::kInvalidArgument, "table " + table.name + ": a row of " +
                                          std::to_string(bytes) + " bytes exceeds " +
                                          std::to_string(kMaxEntryBytes)};
    }
  }
  if (options.devices == 0 || options.devices > 64) {
    return {Code::kInvalidArgument,
            "devices = " + std::to_string(options.devices) + "; give 1 to 64"};
  }
  if (options.ddr_budget_bytes < uint64_t{options.devices} * 4 * kSlabPageBytes) {
    return {Code::kInvalidArgument,
            "ddr_budget_bytes = " + std::to_string(options.ddr_budget_bytes) +
                " is less than 1 MiB a device; give more"};
  }
  if (options.window_versions == 0) {
    return {Code::kInvalidArgument, "window_versions = 0; give at least 1"};
  }
  if (options.ssd_budget_bytes > 0) {
    if (options.ssd_directory.empty()) {
      return {Code::kInvalidArgument, "an SSD budget needs ssd_directory"};
    }
    if (options.ssd_budget_bytes / options.devices < 2 * kSegmentBytes) {
      return {Code::kInvalidArgument,
              "ssd_budget_bytes = " + std::to_string(options.ssd_budget_bytes) +
                  " is less than 2 MiB a device; give more or 0"};
    }
  }
  return Status::Ok();
}

}  // namespace

const char* SourceName(Source source) {
  static constexpr const char* kNames[kSources] = {"hbm",    "ddr",     "ssd",
                                                   "remote", "default", "pruned"};
  return kNames[static_cast<size_t>(source)];
}

Store::Impl::Impl(StoreOptions opts) : options(std::move(opts)) {
  tables.reserve(options.tables.size());
  for (const TableConfig& config : options.tables) {
    Table table{config, static_cast<uint32_t>(tables.size()), config.default_row,
                std::vector<BucketSlot>(config.buckets())};
    table.default_row.resize(config.layout.dim(), 0.0F);
    tables.push_back(std::move(table));
  }
  for (uint32_t d = 0; d < options.devices; ++d) {
    devices.push_back(
        std::make_unique<Device>(options.ddr_budget_bytes / options.devices, tables.size()));
  }
  for (Table& table : tables) {
    for (uint32_t b = 0; b < table.buckets.size() && options.hold_all; ++b) {
      // Shifted by the table, or the many tables of one bucket would all lie on device 0.
      const uint32_t device = (table.ordinal + b) % options.devices;
      table.buckets[b].newest = new Bucket(devices[device].get());
      table.buckets[b].held_since = 0;
      table.buckets[b].device = device;
    }
  }
}

uint32_t Store::Impl::NumberOf(const Device* device) const {
  uint32_t number = 0;
  while (devices[number].get() != device) ++number;
  return number;
}

Store::Impl::~Impl() {
  for (auto& device : devices) {
    for (const Retired& retired : device->retired) Free(device.get(), retired);
  }
  for (const Table& table : tables) {
    for (const BucketSlot& slot : table.buckets) {
      for (Bucket* bucket = slot.newest; bucket != nullptr;) {
        Bucket* older = bucket->older;
        FreeBucket(table, bucket);
        bucket = older;
      }
    }
  }
}

Store::Store(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Store::~Store() = default;

Result<std::unique_ptr<Store>> Store::Open(StoreOptions options) {
  EMBERTIDE_RETURN_IF_ERROR(ValidateOptions(options));
  auto impl = std::make_unique<Impl>(std::move(options));
  const StoreOptions& opts = impl->options;
  for (uint32_t d = 0; d < opts.devices; ++d) {
    uint64_t directory = impl->devices[d]->arena.directory_bytes();
    if (opts.ssd_budget_bytes > 0) {
      std::error_code error;
      std::filesystem::create_directories(opts.ssd_directory, error);
      const std::string path = opts.ssd_directory + "/device-" + std::to_string(d) + ".log";
      auto opened = OpenBlockFile(path, opts.ssd_engine);
      if (!opened.ok()) return opened.status();
      std::unique_ptr<BlockFile> file = std::move(*opened);
      if (opts.wrap_ssd) file = opts.wrap_ssd(std::move(file));
      impl->devices[d]->ssd =
          std::make_unique<BlockLog>(std::move(file), opts.ssd_budget_bytes / opts.devices);
      directory += impl->devices[d]->ssd->directory_bytes();
    }
    if (!impl->devices[d]->budget.TryCharge(directory)) {
      return Status(Code::kInvalidArgument, "ddr_budget_bytes is too small for its directories");
    }
    impl->index_bytes += directory;
  }
  return std::unique_ptr<Store>(new Store(std::move(impl)));
}

const StoreOptions& Store::options() const { return impl_->options; }

Status Store::Impl::CheckTable(uint32_t table) const {
  if (table < tables.size()) return Status::Ok();
  return {Code::kInvalidArgument, "table " + std::to_string(table) + " does not exist; there are " +
                                      std::to_string(tables.size())};
}

Status Store::Impl::CheckBucket(uint32_t table, uint32_t bucket) const {
  EMBERTIDE_RETURN_IF_ERROR(CheckTable(table));
  if (bucket < tables[table].buckets.size()) return Status::Ok();
  return {Code::kInvalidArgument, "bucket " + std::to_string(bucket) + " of table " +
                                      tables[table].config.name + " does not exist; there are " +
                                      std::to_string(tables[table].buckets.size())};
}

// --- pins
// ------------------------------------------------------------------------------------------

Result<ReadView> Store::Pin(uint64_t version) const {
  Result<uint32_t> reader = impl_->readers.Enter(version);
  if (!reader.ok()) return reader.status();
  // The slot shows the version before the window is read: a fold either sees the slot, or moved
  // `oldest` before this line reads it.
  const uint64_t oldest = impl_->oldest.load();
  const uint64_t newest = impl_->newest.load();
  if (!impl_->training() && (version < oldest || version > newest)) {
    impl_->readers.Leave(*reader);
    return Status(Code::kVersionGone, "version " + std::to_string(version) +
                                          " is not held; this node holds " +
                                          std::to_string(oldest) + " to " + std::to_string(newest));
  }
  return ReadView(this, *reader, version);
}

Result<ReadView> Store::PinNewest() const {
  uint64_t version = impl_->newest.load();
  Result<uint32_t> reader = impl_->readers.Enter(version);
  if (!reader.ok()) return reader.status();
  // Newest may have moved on, and the window past us, between the two lines above.
  while (version < impl_->oldest.load()) {
    version = impl_->newest.load();
    impl_->readers.Repin(*reader, version);
  }
  return ReadView(this, *reader, version);
}

ReadView::ReadView(ReadView&& other) noexcept
    : store_(other.store_), reader_(other.reader_), version_(other.version_) {
  other.store_ = nullptr;
}

ReadView& ReadView::operator=(ReadView&& other) noexcept {
  std::swap(store_, other.store_);
  std::swap(reader_, other.reader_);
  std::swap(version_, other.version_);
  return *this;
}

ReadView::~ReadView() {
  if (store_ != nullptr) store_->impl_->readers.Leave(reader_);
}

// --- counters
// --------------------------------------------------------------------------------------

Store::Usage Store::UsageOf(uint32_t table, uint32_t d) const {
  const Device& device = *impl_->devices[d];
  // Pages and segments are shared by the tables: each has as much of them as of the rows.
  const auto share = [&](const std::vector<TierCount>& tier, uint64_t bytes) {
    uint64_t all = 0;
    for (const TierCount& each : tier) all += each.bytes.load();
    const double part = static_cast<double>(tier[table].bytes.load());
    return all == 0 ? 0
                    : static_cast<uint64_t>(static_cast<double>(bytes) * part /
                                            static_cast<double>(all));
  };
  Usage usage;
  usage.ddr_rows = device.in_ddr[table].rows;
  usage.ddr_bytes = share(device.in_ddr, device.arena.page_bytes());
  usage.ssd_rows = device.in_ssd[table].rows;
  if (device.ssd != nullptr) usage.ssd_bytes = share(device.in_ssd, device.ssd->used_bytes());
  return usage;
}

static void AddSsd(const BlockLog& log, StoreStats* stats) {
  const LogStats counted = log.Stats();
  stats->ssd_bytes += log.used_bytes();
  stats->ssd.engine = log.file().engine();
  stats->ssd.direct = log.file().direct();
  stats->ssd.blocks_read += counted.blocks_read;
  stats->ssd.bytes_written += counted.bytes_written;
  stats->ssd.row_bytes += counted.row_bytes;
  stats->ssd.read_errors += counted.read_errors;
  stats->ssd.corrupt += counted.corrupt;
  stats->ssd.write_errors += counted.write_errors;
}

StoreStats Store::Stats() const {
  StoreStats stats;
  stats.rows = impl_->rows.load();
  for (const auto& device : impl_->devices) {
    stats.ddr_payload_bytes += device->arena.page_bytes();
    if (device->ssd != nullptr) AddSsd(*device->ssd, &stats);
  }
  stats.index_bytes = impl_->index_bytes.load();
  stats.ddr_budget_bytes = impl_->options.ddr_budget_bytes;
  for (size_t s = 0; s < kSources; ++s) stats.hits[s] = impl_->hits[s].load();
  stats.evictions_to_ssd = impl_->evictions.load();
  stats.promotions = impl_->promoted.load();
  stats.ssd.compacted_bytes = impl_->compacted_bytes.load();
  stats.ssd.compacted_rows = impl_->compacted_rows.load();
  stats.ssd.compactions_forced = impl_->compactions_forced.load();
  stats.refused_rows = impl_->refused_rows.load();
  stats.oldest_version = impl_->oldest.load();
  stats.newest_version = impl_->newest.load();
  return stats;
}

}  // namespace embertide
