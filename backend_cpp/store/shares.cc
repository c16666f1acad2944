// Shares: bytes of rows that a table may have in DDR on a device, changed while it serves. They are
// bounds within the pool's budget, which holds beside them, and choose whose rows leave: no page
// and no row moves because a share was set.
#include <algorithm>
#include <map>
#include <set>

#include "store/store_impl.h"

namespace embertide {

static Status CheckShares(const StoreState& store, std::span<const DdrShare> shares) {
  std::map<const RowPool*, uint64_t> total;
  std::set<std::pair<uint32_t, uint32_t>> seen;
  for (const DdrShare& each : shares) {
    EMBERTIDE_RETURN_IF_ERROR(store.CheckTable(each.table));
    const Table& table = store.tables[each.table];
    const std::string name = "DDR share of table " + table.config.name + " on device " +
                             std::to_string(each.device) + " = " + std::to_string(each.bytes);
    if (each.device >= store.options.devices) {
      return {Code::kInvalidArgument,
              name + ": there are " + std::to_string(store.options.devices) + " devices"};
    }
    const RowPool& pool = *store.PoolOf(table, each.device);
    if (!seen.emplace(each.table, each.device).second) {
      return {Code::kInvalidArgument, name + ": it stands twice"};
    }
    if (each.bytes < kMinDdrShareBytes) {
      return {Code::kInvalidArgument, name + " is less than " + std::to_string(kMinDdrShareBytes)};
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

uint64_t Store::RowRoom(uint32_t d) const {
  const RowPool& pool = *impl_->store.pools[d];  // the part that tables share is the first
  const std::string& name = impl_->store.tables[pool.tables.front()].config.name;
  if (impl_->store.options.table_budgets.contains(name)) return 0;
  const uint64_t limit = pool.budget.limit_bytes();
  const auto low = static_cast<uint64_t>(RowPool::kLowRoom * static_cast<double>(limit));
  const uint64_t used = pool.budget.used_bytes();
  const uint64_t pages = pool.arena.page_bytes();
  // Rows of each size have a page that is not full.
  std::set<uint64_t> sizes;
  for (const uint32_t t : pool.tables) sizes.insert(impl_->store.tables[t].cost.FullBytes());
  const uint64_t waste = sizes.size() * pool.arena.slab_bytes() / 2;
  const uint64_t others = used - std::min(used, pages) + pool.ReadyBytes() + low + waste;
  return others < limit ? limit - others : 0;
}

Status ServingStore::SetDdrShares(std::span<const DdrShare> shares) {
  EMBERTIDE_RETURN_IF_ERROR(CheckShares(impl_->store, shares));
  std::map<RowPool*, std::map<uint32_t, uint64_t>> by_pool;
  for (const DdrShare& each : shares) {
    by_pool[impl_->store.PoolOf(impl_->store.tables[each.table], each.device)][each.table] =
        each.bytes;
  }
  for (const auto& pool : impl_->store.pools) {
    const std::lock_guard writer(pool->writer);
    pool->Share(by_pool[pool.get()]);
  }
  return Status::Ok();
}

}  // namespace embertide
