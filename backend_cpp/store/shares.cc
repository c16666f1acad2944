// Shares: bytes of rows that a table may have in DDR on a device, changed while it serves. They are
// bounds within the pool's budget, which holds beside them, and choose whose rows leave: no page
// and no row moves because a share was set.
#include <algorithm>
#include <map>
#include <set>

#include "store/store_impl.h"

namespace embertide {
namespace {

// A small share keeps no more than this part of it free ahead of need.
constexpr uint64_t kLeastShareOverReady = 4;

}  // namespace

bool Store::Impl::ShareHolds(const RowPool& pool, uint32_t table, uint64_t bytes) {
  const uint64_t allowed = pool.shares[table].allowed.load(std::memory_order_relaxed);
  const uint64_t used = pool.in_ddr[table].bytes.load(std::memory_order_relaxed);
  return used <= allowed && bytes <= allowed - used;
}

uint64_t Store::Impl::ShareLacks(const RowPool& pool, uint32_t table) const {
  const TableShare& share = pool.shares[table];
  if (pool.ssd == nullptr || !share.given()) return 0;
  const uint64_t bytes = share.bytes;
  const TableConfig& config = tables[table].config;
  const uint64_t row =
      config.layout.PayloadBytes(config.layout.full_mask()) + AuxBytes(tables[table]);
  const uint64_t ready = std::max(static_cast<uint64_t>(kLowRoom * static_cast<double>(bytes)),
                                  kPromotionsAtOnce * row);
  const uint64_t used = pool.in_ddr[table].bytes;
  const uint64_t most = bytes - std::min(ready, bytes / kLeastShareOverReady);
  return used > most ? used - most : 0;
}

bool Store::Impl::GivesWay(const RowPool& pool, uint32_t table) {
  if (!pool.shares[table].given()) return true;
  const std::vector<uint32_t>& others = pool.unshared_clock.tables;
  return std::ranges::none_of(others, [&](uint32_t t) { return pool.in_ddr[t].bytes > 0; });
}

bool Store::Impl::EvictTable(RowPool* pool, uint32_t table, WriterLock* writer) {
  TableShare& share = pool->shares[table];
  const uint64_t lacks = ShareLacks(*pool, table);
  const uint64_t batch = std::min(kEvictBytes, std::max(share.bytes / kLeastOverEvicted, lacks));
  const bool went = pool->policy != nullptr
                        ? EvictByPolicy(pool, batch, writer)
                        : EvictByClock(pool, &share.clock, batch, /*chained=*/true, writer);
  const uint64_t left = pool->in_ddr[table].bytes;
  share.allowed = std::max(share.bytes.load(), std::min(share.allowed.load(), left));
  return went;
}

Status Store::Impl::MakeShareRoom(RowPool* pool, const Table& table, uint64_t bytes) {
  while (!ShareHolds(*pool, table.ordinal, bytes)) {
    if (EvictTable(pool, table.ordinal, nullptr)) continue;
    // Rows of buckets that were dropped count until they are freed.
    if (!pool->retired.empty()) {
      EMBERTIDE_RETURN_IF_ERROR(AwaitReaders(pool));
      continue;
    }
    return {Code::kResourceExhausted,
            "table " + table.config.name + " has " +
                std::to_string(pool->in_ddr[table.ordinal].bytes) +
                " bytes of rows in its DDR share of " +
                std::to_string(pool->shares[table.ordinal].bytes) + " on device " +
                std::to_string(pool->number) +
                ", and the SSD tier takes no more; raise the SSD budget or the share"};
  }
  return Status::Ok();
}

static Status CheckShares(const Store::Impl& impl, std::span<const DdrShare> shares) {
  std::map<const RowPool*, uint64_t> total;
  std::set<std::pair<uint32_t, uint32_t>> seen;
  for (const DdrShare& each : shares) {
    EMBERTIDE_RETURN_IF_ERROR(impl.CheckTable(each.table));
    const Table& table = impl.tables[each.table];
    const std::string name = "DDR share of table " + table.config.name + " on device " +
                             std::to_string(each.device) + " = " + std::to_string(each.bytes);
    if (each.device >= impl.options.devices) {
      return {Code::kInvalidArgument,
              name + ": there are " + std::to_string(impl.options.devices) + " devices"};
    }
    const RowPool& pool = *impl.PoolOf(table, each.device);
    if (!seen.emplace(each.table, each.device).second) {
      return {Code::kInvalidArgument, name + ": it stands twice"};
    }
    if (each.bytes < kLeastDdrShareBytes) {
      return {Code::kInvalidArgument,
              name + " is less than " + std::to_string(kLeastDdrShareBytes)};
    }
    if (pool.ssd == nullptr) {
      return {Code::kInvalidArgument,
              name + ": its rows cannot leave DDR, for want of an SSD tier; give it an SSD budget"};
    }
    // Not the sum itself: it might pass the largest number.
    const uint64_t limit = pool.budget.limit_bytes();
    uint64_t& all = total[&pool];
    if (each.bytes > limit || all > limit - each.bytes) {
      return {Code::kInvalidArgument, name + ": with the shares before it, it exceeds the " +
                                          std::to_string(limit) +
                                          " bytes of DDR there; lower some"};
    }
    all += each.bytes;
  }
  return Status::Ok();
}

// Requires: the pool's writer.
static void Share(RowPool* pool, const std::map<uint32_t, uint64_t>& bytes) {
  pool->unshared_clock = {};
  for (const uint32_t t : pool->tables) {
    TableShare& share = pool->shares[t];
    const auto found = bytes.find(t);
    if (found == bytes.end()) {
      pool->unshared_clock.tables.push_back(t);
      share.bytes = TableShare::kNone;
      share.allowed = TableShare::kNone;
      continue;
    }
    if (!share.given()) share.clock = {{t}};
    const uint64_t used = pool->in_ddr[t].bytes;
    // In this order a reader of both never sees more bytes than are allowed.
    share.allowed = std::max(found->second, used);
    share.bytes = found->second;
  }
  pool->shared_out = !bytes.empty();
}

uint64_t Store::RowRoom(uint32_t d) const {
  const RowPool& pool = *impl_->pools[d];  // the part that tables share is the first
  const std::string& name = impl_->tables[pool.tables.front()].config.name;
  if (impl_->options.table_budgets.contains(name)) return 0;
  const uint64_t limit = pool.budget.limit_bytes();
  const auto low = static_cast<uint64_t>(Impl::kLowRoom * static_cast<double>(limit));
  const uint64_t used = pool.budget.used_bytes();
  const uint64_t pages = pool.arena.page_bytes();
  // Rows of each size have a page that is not full.
  std::set<uint64_t> sizes;
  for (const uint32_t t : pool.tables) sizes.insert(impl_->tables[t].cost.FullBytes());
  const uint64_t waste = sizes.size() * pool.arena.slab_bytes() / 2;
  const uint64_t others = used - std::min(used, pages) + Impl::ReadyBytes(pool) + low + waste;
  return others < limit ? limit - others : 0;
}

Status Store::SetDdrShares(std::span<const DdrShare> shares) {
  if (impl_->training()) {
    return {Code::kInvalidArgument, "DDR shares are of stores that serve; a trainer has none"};
  }
  EMBERTIDE_RETURN_IF_ERROR(CheckShares(*impl_, shares));
  std::map<RowPool*, std::map<uint32_t, uint64_t>> by_pool;
  for (const DdrShare& each : shares) {
    by_pool[impl_->PoolOf(impl_->tables[each.table], each.device)][each.table] = each.bytes;
  }
  for (const auto& pool : impl_->pools) {
    const std::lock_guard writer(pool->writer);
    Share(pool.get(), by_pool[pool.get()]);
  }
  return Status::Ok();
}

}  // namespace embertide
