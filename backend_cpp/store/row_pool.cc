// RowPool: how much room it has, and what its tables may have of it.
#include "store/row_pool.h"

#include <algorithm>

namespace embertide {
namespace {

// Upkeep empties pages until this part of the budget is free, a page of rows and two of nodes or
// index at least and so many bytes at most: rows of another size, index arrays and version nodes
// need pages, which slots that came free here and there do not give. A budget of which the least is
// more than an eighth keeps none.
constexpr uint64_t kMinOverReady = 100;
constexpr uint64_t kMinReady = kMaxSlabPageBytes + uint64_t{2} * BucketIndex::kPageBytes;
constexpr uint64_t kMaxReady = 64 << 20;
constexpr uint64_t kMinLimitOverReady = 8;

}  // namespace

uint64_t RowPool::FreeSlotBytes() const {
  uint64_t bytes = arena.page_bytes();
  for (const TierCount& rows : in_ddr) bytes -= rows.bytes.load();
  return bytes;
}

uint64_t RowPool::SparePages() const {
  const uint64_t kept = budget.used_bytes() + ReadyBytes();
  const uint64_t limit = budget.limit_bytes();
  return kept < limit ? (limit - kept) / arena.slab_bytes() : 0;
}

bool RowPool::Full() const {
  const auto low = static_cast<uint64_t>(kLowRoom * static_cast<double>(budget.limit_bytes()));
  const uint64_t spare = SparePages() * arena.slab_bytes();
  return ssd != nullptr && FreeSlotBytes() + spare < low;
}

uint64_t RowPool::ReadyBytes() const {
  const uint64_t limit = budget.limit_bytes();
  if (limit < kMinReady * kMinLimitOverReady) return 0;
  return std::clamp(limit / kMinOverReady, kMinReady, kMaxReady);
}

bool RowPool::ShareHolds(uint32_t table, uint64_t bytes) const {
  const uint64_t allowed = shares[table].allowed.load(std::memory_order_relaxed);
  const uint64_t used = in_ddr[table].bytes.load(std::memory_order_relaxed);
  return used <= allowed && bytes <= allowed - used;
}

bool RowPool::GivesWay(uint32_t table) const {
  if (!shares[table].given()) return true;
  const std::vector<uint32_t>& others = unshared_clock.tables;
  return std::ranges::none_of(others, [&](uint32_t t) { return in_ddr[t].bytes > 0; });
}

uint64_t RowPool::PageBytesOf(uint32_t payload_bytes, uint32_t aux_bytes) const {
  const uint64_t slot = SlotBytesOf(payload_bytes) + ((aux_bytes + 7U) & ~7U);
  const uint64_t of_page = arena.slab_bytes() / slot;
  return (arena.slab_bytes() + of_page - 1) / of_page;
}

uint64_t RowPool::MostHeldBytes() const {
  const uint64_t pages = arena.page_bytes();
  const uint64_t used = std::max(budget.used_bytes(), pages);  // which a writer may change
  const uint64_t others = used - pages + uint64_t{page_kinds} * arena.slab_bytes();
  const uint64_t limit = budget.limit_bytes();
  return std::min(hold_bytes, others < limit ? (limit - others) / 2 : 0);
}

bool RowPool::LendReserve() {
  if (reserve_bytes == 0 || reserve_lent) return false;
  reserve_lent = true;
  budget.Release(reserve_bytes);
  return true;
}

void RowPool::TakeReserveBack() {
  if (reserve_lent) reserve_lent = !budget.TryCharge(reserve_bytes);
}

void RowPool::Share(const std::map<uint32_t, uint64_t>& bytes_of) {
  unshared_clock = {};
  for (const uint32_t t : tables) {
    TableShare& share = shares[t];
    const auto found = bytes_of.find(t);
    if (found == bytes_of.end()) {
      unshared_clock.tables.push_back(t);
      share.bytes = TableShare::kNone;
      share.allowed = TableShare::kNone;
      continue;
    }
    if (!share.given()) share.clock = {{t}};
    const uint64_t used = in_ddr[t].bytes;
    // In this order a reader of both never sees more bytes than are allowed.
    share.allowed = std::max(found->second, used);
    share.bytes = found->second;
  }
  shared_out = !bytes_of.empty();
}

}  // namespace embertide
