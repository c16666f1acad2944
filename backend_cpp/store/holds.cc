// Rows that a trainer holds in DDR for the batches that are to come: what is held is counted by
// each pool (held_rows.h), and what makes room passes over it (evictor.cc).
#include <algorithm>
#include <bit>
#include <string>

#include "embertide/hash.h"
#include "store/store_impl.h"

namespace embertide {
namespace {

// Keys of one hold of a pool's writer: well under a millisecond.
constexpr size_t kTurnKeys = 8192;
// Keys whose holds are asked of memory before they are read: each waits for memory otherwise.
constexpr size_t kAskedAhead = 16;

uint64_t BytesOf(const StoreState& store, const RowPool& pool, const Table& table) {
  const RowLayout& layout = table.config.layout;
  return pool.PageBytesOf(layout.PayloadBytes(layout.full_mask()), store.AuxBytes(table));
}

// Calls visit(i, key, bytes of its whole row), the key one of keys[i], for the keys of a pool, in
// turns of its writer, in the order of the call, and begin() before each turn, until one of them
// fails. Returns how many keys were seen to.
template <typename Begin, typename Visit>
size_t ForKeysOf(const StoreState& store, RowPool* pool, std::span<const TableKeys> keys,
                 size_t most, Status* status, const Begin& begin, const Visit& visit) {
  size_t seen = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    const TableKeys& each = keys[i];
    const Table& table = store.tables[each.table];
    if (std::ranges::find(pool->tables, each.table) == pool->tables.end()) continue;
    const uint64_t bytes = BytesOf(store, *pool, table);
    for (size_t k = 0; k < each.keys.size() && seen < most;) {
      const std::lock_guard writer(pool->writer);
      const size_t end = std::min(each.keys.size(), k + kTurnKeys);
      *status = begin(end - k);
      if (!status->ok()) return seen;
      for (; k < end && seen < most; ++k) {
        const auto key = static_cast<uint64_t>(each.keys[k]);
        if (k + kAskedAhead < end) {
          pool->held.AskFor(each.table, static_cast<uint64_t>(each.keys[k + kAskedAhead]));
        }
        if (table.NewestOf(HashKey(key))->pool != pool) continue;
        *status = visit(i, key, bytes);
        if (!status->ok()) return seen;
        ++seen;
      }
    }
  }
  return seen;
}

Status NoRoom(const RowPool& pool, uint64_t bytes) {
  return {Code::kResourceExhausted,
          "holding " + std::to_string(pool.held.rows()) + " rows of " +
              std::to_string(pool.held.row_bytes()) + " bytes and one of " + std::to_string(bytes) +
              " more takes over " + std::to_string(pool.MostHeldBytes()) +
              ", of hold_bytes = " + std::to_string(pool.hold_bytes) + " and half of what of " +
              std::to_string(pool.budget.limit_bytes()) + " bytes of DDR " +
              std::to_string(pool.budget.used_bytes() - pool.arena.page_bytes()) +
              " of index and directories leave on device " + std::to_string(pool.number) +
              "; hold fewer batches, or give more of both"};
}

}  // namespace

std::vector<int64_t> KeysOnce(std::span<const int64_t> keys) {
  // By hash: the place of a key in `distinct`, and one more; 0: none.
  thread_local std::vector<uint32_t> slots;
  slots.assign(std::bit_ceil(2 * keys.size() + 1), 0);
  const size_t mask = slots.size() - 1;
  std::vector<int64_t> distinct;
  distinct.reserve(keys.size());
  for (const int64_t key : keys) {
    size_t slot = HashKey(static_cast<uint64_t>(key)) & mask;
    while (slots[slot] != 0 && distinct[slots[slot] - 1] != key) slot = (slot + 1) & mask;
    if (slots[slot] != 0) continue;
    distinct.push_back(key);
    slots[slot] = static_cast<uint32_t>(distinct.size());
  }
  return distinct;
}

Result<std::vector<std::vector<int64_t>>> TrainingStore::HoldRows(std::span<const TableKeys> keys) {
  Impl& impl = *impl_;
  for (const TableKeys& each : keys) EMBERTIDE_RETURN_IF_ERROR(impl.store.CheckTable(each.table));
  if (impl.store.options.hold_bytes == 0) {
    return Status(Code::kInvalidArgument, "hold_bytes is 0: no row is held");
  }
  std::vector<std::vector<int64_t>> first_holds(keys.size());
  std::vector<size_t> taken;  // by pool that was seen to
  Status status;
  for (const auto& each : impl.store.pools) {
    RowPool* const pool = each.get();
    uint64_t most = 0;
    const auto reserve = [&](size_t count) -> Status {
      EMBERTIDE_RETURN_IF_ERROR(impl.residency.WithRoom(pool, [&]() -> Status {
        if (pool->held.Reserve(count)) return Status::Ok();
        return {Code::kResourceExhausted, "no room in DDR to note which rows are held"};
      }));
      most = pool->MostHeldBytes();
      return Status::Ok();
    };
    taken.push_back(ForKeysOf(impl.store, pool, keys, ~size_t{0}, &status, reserve,
                              [&](size_t i, uint64_t key, uint64_t bytes) -> Status {
                                const uint32_t table = keys[i].table;
                                if (pool->held.row_bytes() + bytes > most &&
                                    !pool->held.Has(table, key)) {
                                  return NoRoom(*pool, bytes);
                                }
                                if (pool->held.Hold(table, key, bytes)) {
                                  first_holds[i].push_back(static_cast<int64_t>(key));
                                }
                                return Status::Ok();
                              }));
    if (!status.ok()) break;
  }
  if (status.ok()) return first_holds;
  for (size_t p = 0; p < taken.size(); ++p) {
    RowPool* const pool = impl.store.pools[p].get();
    Status undone;
    ForKeysOf(
        impl.store, pool, keys, taken[p], &undone, [](size_t) { return Status::Ok(); },
        [&](size_t i, uint64_t key, uint64_t bytes) {
          EMBERTIDE_CHECK(pool->held.Release(keys[i].table, key, bytes));
          return Status::Ok();
        });
  }
  return status;
}

Status TrainingStore::ReleaseRows(std::span<const TableKeys> keys) {
  const StoreState& store = impl_->store;
  for (const TableKeys& each : keys) EMBERTIDE_RETURN_IF_ERROR(store.CheckTable(each.table));
  Status wrong;
  for (const auto& each : store.pools) {
    RowPool* const pool = each.get();
    Status status;
    ForKeysOf(
        store, pool, keys, ~size_t{0}, &status, [](size_t) { return Status::Ok(); },
        [&](size_t i, uint64_t key, uint64_t bytes) {
          const uint32_t table = keys[i].table;
          if (!pool->held.Release(table, key, bytes) && wrong.ok()) {
            wrong = {Code::kInvalidArgument, "key " + std::to_string(static_cast<int64_t>(key)) +
                                                 " of table " + store.tables[table].config.name +
                                                 " is not held; release the keys of a "
                                                 "call that held them, once"};
          }
          return Status::Ok();
        });
  }
  return wrong;
}

uint64_t TrainingStore::HoldBytes(uint32_t t) const {
  const Table& table = impl_->store.tables[t];
  return BytesOf(impl_->store, *impl_->store.PoolOf(table, 0), table);
}

TrainingStore::HeldSize TrainingStore::Held() const {
  HeldSize size;
  for (const auto& pool : impl_->store.pools) {
    size.rows += pool->held.rows();
    size.bytes += pool->held.row_bytes();
    size.most_bytes += pool->MostHeldBytes();
  }
  return size;
}

}  // namespace embertide
