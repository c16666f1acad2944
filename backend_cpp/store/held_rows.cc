// Rows that must stay in DDR: see the header.
#include "store/held_rows.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "embertide/hash.h"

namespace embertide {
namespace {

constexpr size_t kMinSlots = 256;

// Slots for so many keys, at most 3/4 of them used.
size_t SlotsFor(size_t keys) { return std::bit_ceil(std::max(kMinSlots, keys + keys / 3 + 1)); }

}  // namespace

size_t HeldRows::HomeOf(uint32_t table, uint64_t key) const {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15U;
  return (HashKey(key) ^ (table * kGolden) >> 20) & (slots_.size() - 1);
}

size_t HeldRows::Find(uint32_t table, uint64_t key) const {
  size_t slot = HomeOf(table, key);
  while (slots_[slot].count > 0 && (slots_[slot].key != key || slots_[slot].table != table)) {
    slot = Next(slot);
  }
  return slot;
}

bool HeldRows::Reserve(size_t keys) {
  const size_t wanted = SlotsFor(rows() + keys);
  if (wanted <= slots_.size()) return true;
  const uint64_t more = wanted * sizeof(Slot);
  if (!budget_->TryCharge(more)) return false;  // the old slots stay until the new ones are there
  std::vector<Slot> old(wanted);
  std::swap(old, slots_);
  for (const Slot& each : old) {
    if (each.count > 0) slots_[Find(each.table, each.key)] = each;
  }
  budget_->Release(old.size() * sizeof(Slot));
  bytes_.store(more, std::memory_order_relaxed);
  return true;
}

bool HeldRows::Hold(uint32_t table, uint64_t key, uint64_t bytes) {
  Slot& slot = slots_[Find(table, key)];
  if (slot.count++ > 0) return false;
  slot.key = key;
  slot.table = table;
  rows_.fetch_add(1, std::memory_order_relaxed);
  row_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  return true;
}

bool HeldRows::Release(uint32_t table, uint64_t key, uint64_t bytes) {
  if (slots_.empty()) return false;
  size_t hole = Find(table, key);
  if (slots_[hole].count == 0) return false;
  if (--slots_[hole].count > 0) return true;
  rows_.fetch_sub(1, std::memory_order_relaxed);
  row_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
  // Entries behind it that the empty slot would cut off from their homes move up.
  for (size_t at = Next(hole); slots_[at].count > 0; at = Next(at)) {
    const size_t mask = slots_.size() - 1;
    const size_t home = HomeOf(slots_[at].table, slots_[at].key);
    if (((at - home) & mask) < ((at - hole) & mask)) continue;
    slots_[hole] = std::exchange(slots_[at], Slot());
    hole = at;
  }
  slots_[hole] = Slot();
  return true;
}

Status HeldRows::CheckIntegrity() const {
  uint64_t used = 0;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    const Slot& each = slots_[slot];
    if (each.count == 0) continue;
    ++used;
    if (Find(each.table, each.key) != slot) {
      return {Code::kCorrupt, "the hold of key " + std::to_string(each.key) + " of table " +
                                  std::to_string(each.table) + " is not found"};
    }
  }
  if (used != rows() || used * 4 > slots_.size() * 3 || bytes() != slots_.size() * sizeof(Slot)) {
    return {Code::kCorrupt, std::to_string(used) + " keys are held, counted as " +
                                std::to_string(rows()) + ", in " + std::to_string(slots_.size()) +
                                " slots"};
  }
  return Status::Ok();
}

}  // namespace embertide
