// SlabArena: capacity, reuse, budgets, condemned pages.
#include "ddr/slab_arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>

namespace embertide {
namespace {

TEST(SlabArenaTest, RandomAllocationsKeepEveryInvariant) {
  ByteBudget budget(8ULL << 20);
  SlabArena arena(&budget);
  std::mt19937 random(1);
  struct Held {
    uint64_t slot;
    uint32_t bytes;
    uint32_t aux_bytes;
    int fill;
  };
  std::vector<Held> held;
  uint64_t refused = 0;
  const auto has = [](const std::byte* at, uint32_t bytes, int fill) {
    return std::all_of(at, at + bytes, [fill](std::byte b) { return b == std::byte(fill); });
  };
  for (int step = 0; step < 60000; ++step) {
    if (held.empty() || random() % 5 < 3) {
      const uint32_t bytes = 16 + random() % 4 * 48;
      const uint32_t aux_bytes = random() % 2 * 24;
      const Result<uint64_t> slot = arena.Allocate(bytes, aux_bytes);
      if (!slot.ok()) {
        EXPECT_EQ(slot.status().code(), Code::kResourceExhausted);
        ++refused;
        continue;
      }
      const int fill = step % 250;
      std::memset(arena.Address(slot.value()), fill, bytes);
      if (aux_bytes > 0) {
        ASSERT_TRUE(has(arena.Aux(slot.value()), aux_bytes, 0));
        std::memset(arena.Aux(slot.value()), fill + 1, aux_bytes);
      }
      held.push_back({slot.value(), bytes, aux_bytes, fill});
    } else {
      std::swap(held[random() % held.size()], held.back());
      const Held& last = held.back();
      ASSERT_TRUE(has(arena.Address(last.slot), last.bytes, last.fill));
      if (last.aux_bytes > 0) {
        ASSERT_TRUE(has(arena.Aux(last.slot), last.aux_bytes, last.fill + 1));
      }
      arena.Free(last.slot);
      held.pop_back();
    }
    ASSERT_LE(budget.used_bytes(), budget.limit_bytes());
    if (step % 1000 != 0) continue;
    std::vector<uint64_t> slots;
    for (const Held& each : held) slots.push_back(each.slot);
    const Status status = arena.CheckIntegrity(slots);
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  for (const Held& each : held) arena.Free(each.slot);
  EXPECT_EQ(budget.used_bytes(), 0U) << "an empty page was kept";
}

TEST(SlabArenaTest, APageIsAShareOfTheBudgetWithinBounds) {
  EXPECT_EQ(SlabPageBytes(1 << 20), 64U << 10);
  EXPECT_EQ(SlabPageBytes(700 << 20), 128U << 10) << "a power of two";
  EXPECT_EQ(SlabPageBytes(uint64_t{1} << 40), 256U << 10);
  ByteBudget budget(512 << 20);
  SlabArena arena(&budget);
  const uint64_t slot = *arena.Allocate(1024, 12);
  EXPECT_EQ(budget.used_bytes(), 128U << 10);
  EXPECT_EQ(arena.page_bytes(), arena.slab_bytes());
  arena.Free(slot);
}

TEST(SlabArenaTest, TheBudgetRefuses) {
  ByteBudget budget(2 * kMinSlabPageBytes);
  SlabArena arena(&budget);
  int allocated = 0;
  while (arena.Allocate(1024, 0).ok()) ++allocated;
  EXPECT_EQ(allocated, 128);
  EXPECT_FALSE(arena.Allocate(64, 0).ok());
}

TEST(SlabArenaTest, IntegrityFindsASlotNamedTwiceOrLost) {
  ByteBudget budget(2 * kMinSlabPageBytes);
  SlabArena arena(&budget);
  const uint64_t a = *arena.Allocate(64, 0);
  const uint64_t b = *arena.Allocate(64, 0);
  EXPECT_TRUE(arena.CheckIntegrity(std::vector<uint64_t>{a, b}).ok());
  EXPECT_FALSE(arena.CheckIntegrity(std::vector<uint64_t>{a, a}).ok());
  EXPECT_FALSE(arena.CheckIntegrity(std::vector<uint64_t>{a}).ok());
}

TEST(SlabArenaTest, SparsePagesAreCondemnedAndEmptiedOnesGivenBack) {
  ByteBudget budget(64 * kMinSlabPageBytes);
  SlabArena arena(&budget);
  std::vector<uint64_t> slots;
  for (int i = 0; i < 40 * 64; ++i) slots.push_back(*arena.Allocate(1024, 0));
  std::vector<uint64_t> kept;
  for (size_t i = 0; i < slots.size(); ++i) {
    if (i % 10 == 0) {
      kept.push_back(slots[i]);
    } else {
      arena.Free(slots[i]);
    }
  }
  arena.CondemnSparsePages();
  ASSERT_TRUE(arena.has_condemned());
  for (uint64_t& slot : kept) {
    if (!arena.Condemned(slot)) continue;
    const uint64_t moved = *arena.Allocate(1024, 0);
    EXPECT_FALSE(arena.Condemned(moved));
    arena.Free(slot);
    slot = moved;
  }
  EXPECT_FALSE(arena.has_condemned());
  EXPECT_TRUE(arena.CheckIntegrity(kept).ok());
  EXPECT_LE(arena.page_bytes(), 6ULL * kMinSlabPageBytes) << "4 pages hold the tenth that is left";
}

}  // namespace
}  // namespace embertide
