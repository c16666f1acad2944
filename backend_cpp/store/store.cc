// Store: opening, pins and counters; what its parts do for it.
#include <algorithm>

#include "store/hbm_fill.h"
#include "store/option_checks.h"
#include "store/store_impl.h"

namespace embertide {

Store::Store(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Store::~Store() = default;

Result<std::unique_ptr<Store::Impl>> Store::Impl::Open(StoreOptions options, Profile profile) {
  EMBERTIDE_RETURN_IF_ERROR(ValidateOptions(options, profile));
  auto impl = std::make_unique<Impl>(std::move(options), profile);
  if (const StoreOptions& opts = impl->store.options; opts.hbm_budget_bytes > 0) {
    auto hbm = HbmTier::Open(opts);
    if (!hbm.ok()) return hbm.status();
    impl->store.hbm = std::move(*hbm);
  }
  const std::vector<uint32_t>& numa_nodes = impl->store.options.numa_nodes;
  for (const auto& pool : impl->store.pools) {
    if (numa_nodes.empty()) break;
    const uint32_t node = numa_nodes[pool->number % numa_nodes.size()];
    EMBERTIDE_RETURN_IF_ERROR(pool->arena.pool()->Bind(node));
    EMBERTIDE_RETURN_IF_ERROR(pool->index_pages.Bind(node));
  }
  std::unique_ptr<SealReader> seal;
  if (impl->store.options.open_seal) {
    auto opened = SealReader::Open(impl->store.options.ssd_directory, impl->seals.Describe());
    if (!opened.ok()) return opened.status();
    seal = std::move(*opened);
  } else if (impl->store.options.ssd_budget_bytes > 0) {
    // The rows that it names are about to be gone.
    EMBERTIDE_RETURN_IF_ERROR(RemoveSeal(impl->store.options.ssd_directory));
  }
  for (size_t d = 0; d < impl->store.pools.size(); ++d) {
    EMBERTIDE_RETURN_IF_ERROR(
        impl->store.OpenPool(impl->store.pools[d].get(), seal ? &seal->segments()[d] : nullptr));
  }
  if (seal != nullptr) EMBERTIDE_RETURN_IF_ERROR(impl->seals.Load(seal.get()));
  return impl;
}

const StoreOptions& Store::options() const { return impl_->store.options; }

// --- pins ----------------------------------------------------------------------------------------

Result<ReadView> Store::Pin(uint64_t version) const {
  Result<uint32_t> reader = impl_->store.readers.Enter(version);
  if (!reader.ok()) return reader.status();
  // The slot shows the version before the window is read: a fold either sees the slot, or moved
  // `oldest` before this line reads it.
  const uint64_t oldest = impl_->store.oldest.load();
  const uint64_t newest = impl_->store.newest.load();
  if (!impl_->store.training() && (version < oldest || version > newest)) {
    impl_->store.readers.Leave(*reader);
    return Status(Code::kVersionGone, "version " + std::to_string(version) +
                                          " is not held; this node holds " +
                                          std::to_string(oldest) + " to " + std::to_string(newest));
  }
  return ReadView(this, *reader, version);
}

Result<ReadView> Store::PinNewest() const {
  uint64_t version = impl_->store.newest.load();
  Result<uint32_t> reader = impl_->store.readers.Enter(version);
  if (!reader.ok()) return reader.status();
  // Newest may have moved on, and the window past us, between the two lines above.
  while (version < impl_->store.oldest.load()) {
    version = impl_->store.newest.load();
    impl_->store.readers.Repin(*reader, version);
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
  if (store_ != nullptr) store_->impl_->store.readers.Leave(reader_);
}

// --- buckets
// --------------------------------------------------------------------------------------

std::optional<uint64_t> Store::HeldSince(uint32_t t, uint32_t b) const {
  const uint64_t since =
      impl_->store.tables[t].buckets[b].held_since.load(std::memory_order_acquire);
  return since == BucketSlot::kNotHeld ? std::nullopt : std::optional(since);
}

std::optional<uint32_t> Store::DeviceOf(uint32_t t, uint32_t b) const {
  const BucketSlot& slot = impl_->store.tables[t].buckets[b];
  if (slot.held_since == BucketSlot::kNotHeld) return std::nullopt;
  return slot.device.load();
}

std::optional<Store::BucketSize> Store::BucketSizeOf(const ReadView& view, uint32_t t,
                                                     uint32_t b) const {
  const Reading reading(&impl_->store.readers, view.reader_);
  const Table& table = impl_->store.tables[t];
  const Bucket* bucket = table.buckets[b].newest;
  if (bucket == nullptr) return std::nullopt;
  const RowLayout& layout = table.config.layout;
  BucketSize size;
  size.rows = bucket->index.size();
  size.index_bytes = bucket->index.bytes();
  size.payload_bytes = size.rows * layout.PayloadBytes(layout.full_mask());
  return size;
}

void Store::Maintain() {
  for (uint32_t d = 0; d < impl_->store.options.devices; ++d) Maintain(d);
}

void Store::Maintain(uint32_t number) {
  for (auto& pool : impl_->store.pools) {
    if (pool->number != number) continue;
    const std::unique_lock upkeep(pool->upkeep, std::try_to_lock);
    if (upkeep.owns_lock()) impl_->upkeep.Maintain(pool.get());
  }
  if (number == 0 && impl_->store.hbm != nullptr) FillHbm(impl_->store);
}

// --- counters ------------------------------------------------------------------------------------

Store::Usage Store::UsageOf(uint32_t table, uint32_t d) const {
  const RowPool& pool = *impl_->store.PoolOf(impl_->store.tables[table], d);
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
  usage.ddr_rows = pool.in_ddr[table].rows;
  usage.ddr_bytes = share(pool.in_ddr, pool.arena.page_bytes());
  usage.budget_bytes = pool.budget.limit_bytes();
  usage.budget_used_bytes = pool.budget.used_bytes();
  usage.ddr_row_bytes = pool.in_ddr[table].bytes;
  const TableShare& ddr_share = pool.shares[table];
  usage.ddr_share_bytes = ddr_share.given() ? ddr_share.bytes.load() : 0;
  usage.ddr_allowed_bytes = ddr_share.given() ? ddr_share.allowed.load() : 0;
  usage.ssd_rows = pool.in_ssd[table].rows;
  if (pool.ssd != nullptr) usage.ssd_bytes = share(pool.in_ssd, pool.ssd->used_bytes());
  return usage;
}

static void AddSsd(const BlockLog& log, StoreStats* stats) {
  const LogStats counted = log.Stats();
  stats->ssd_bytes += log.used_bytes();
  stats->seal.kept_bytes += log.kept_bytes();
  stats->ssd.engine = log.file().engine();
  stats->ssd.direct = log.file().direct();
  stats->ssd.blocks_read += counted.blocks_read;
  stats->ssd.bytes_written += counted.bytes_written;
  stats->ssd.row_bytes += counted.row_bytes;
  stats->ssd.read_errors += counted.read_errors;
  stats->ssd.corrupt += counted.corrupt;
  stats->ssd.write_errors += counted.write_errors;
  stats->ssd.bad_blocks += log.bad_blocks().found();
  stats->ssd.bad_blocks_dropped += log.bad_blocks().dropped();
}

Store::Window Store::window() const {
  // The oldest first: it may leave meanwhile, and never comes after the newest.
  const uint64_t oldest = impl_->store.oldest.load();
  return {oldest, impl_->store.newest.load()};
}

uint64_t Store::FreeBytes() const {
  uint64_t free = 0;
  for (const auto& pool : impl_->store.pools) {
    const uint64_t limit = pool->budget.limit_bytes();
    free += limit - std::min(limit, pool->budget.used_bytes());
    if (pool->ssd == nullptr) continue;
    const uint64_t segments = pool->ssd->segments() * kSegmentBytes;
    free += segments - std::min(segments, pool->ssd->used_bytes());
  }
  return free;
}

std::string Store::SsdFailure() const {
  for (const auto& pool : impl_->store.pools) {
    if (pool->ssd == nullptr) continue;
    if (std::string failure = pool->ssd->failure(); !failure.empty()) return failure;
  }
  return "";
}

StoreStats Store::Stats() const {
  StoreStats stats;
  stats.rows = impl_->store.counters.rows.load();
  for (const auto& pool : impl_->store.pools) {
    stats.ddr_payload_bytes += pool->arena.page_bytes();
    stats.huge_bytes += pool->arena.pool()->huge_bytes() + pool->index_pages.huge_bytes();
    if (pool->ssd != nullptr) AddSsd(*pool->ssd, &stats);
    if (pool->notes != nullptr) stats.index_bytes += pool->notes->bytes();
  }
  stats.index_bytes += impl_->store.counters.index_bytes.load();
  for (const auto& pool : impl_->store.pools) stats.index_bytes += pool->nodes.bytes();
  stats.ddr_budget_bytes = impl_->store.options.ddr_budget_bytes;
  for (size_t s = 0; s < kSources; ++s) stats.hits[s] = impl_->store.counters.hits[s].load();
  stats.evictions_to_ssd = impl_->store.counters.evictions.load();
  stats.evictions_by_writers = impl_->store.counters.evictions_by_writers.load();
  stats.promotions = impl_->store.counters.promoted.load();
  stats.refused_promotions = impl_->store.counters.refused_promotions.load();
  stats.ssd.compacted_bytes = impl_->store.counters.compacted_bytes.load();
  stats.ssd.compacted_rows = impl_->store.counters.compacted_rows.load();
  stats.ssd.compactions_forced = impl_->store.counters.compactions_forced.load();
  stats.ssd.mended_rows = impl_->store.counters.mended_rows.load();
  stats.refused_rows = impl_->store.counters.refused_rows.load();
  stats.reader_waits_given_up = impl_->store.counters.reader_waits_given_up.load();
  impl_->seals.AddTo(&stats);
  if (impl_->store.hbm != nullptr) {
    stats.hbm = impl_->store.hbm->cache().Stats();
    stats.hbm_tables = impl_->store.hbm->cache().TableStats();
    stats.hbm_dropped_misses = impl_->store.hbm->wishes_dropped();
    stats.hbm_fallbacks = impl_->store.hbm->fallbacks();
    stats.hbm_failed = !impl_->store.hbm->cache().healthy();
  }
  stats.new_keys_waiting = impl_->store.counters.new_keys_waiting.load();
  stats.dropped_gradients = impl_->store.counters.dropped_gradients.load();
  stats.refused_gradients = impl_->store.counters.refused_gradients.load();
  stats.clipped_gradients = impl_->store.counters.clipped_gradients.load();
  stats.failed_keys = impl_->store.counters.failed_keys.load();
  stats.step_reads = impl_->store.counters.step_reads.load();
  stats.held_rows_removed = impl_->store.counters.held_rows_removed.load();
  stats.placed_keys = impl_->store.counters.placed_keys.load();
  stats.stale_places = impl_->store.counters.stale_places.load();
  stats.unworthy_keys = impl_->store.counters.unworthy_keys.load();
  stats.worthy_keys_without_room = impl_->store.counters.worthy_keys_without_room.load();
  stats.dropped_accesses = impl_->store.counters.dropped_accesses.load();
  for (const auto& pool : impl_->store.pools) stats.policy_bytes += pool->PolicyBytes();
  stats.oldest_version = impl_->store.oldest.load();
  stats.newest_version = impl_->store.newest.load();
  return stats;
}

}  // namespace embertide
