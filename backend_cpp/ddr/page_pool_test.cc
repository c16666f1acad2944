// PagePool: pages are zeros and lie where they should, regions become huge pages with what they
// hold, and no more is resident than is used.
#include "ddr/page_pool.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "ddr/test_huge_pages.h"
#include "embertide/numa.h"

namespace embertide {
namespace {

constexpr uint32_t kPageBytes = 64 << 10;
constexpr uint32_t kPagesOfHuge = kHugePageBytes / kPageBytes;

uint64_t ResidentBytes(const PagePool& pool, uint64_t bytes) {
  std::vector<unsigned char> resident(bytes / 4096);
  EXPECT_EQ(mincore(pool.base(), bytes, resident.data()), 0);
  uint64_t pages = 0;
  for (const unsigned char each : resident) pages += each & 1U;
  return pages * 4096;
}

// As the store's upkeep does, when every region has been full long enough.
uint32_t MakeAll(PagePool* pool) {
  uint32_t made = 0;
  const auto later = PagePool::Clock::now() + kFullFor;
  while (const std::optional<uint32_t> region = pool->NextDue(later)) {
    // A system under load may have none for a moment.
    bool ready = pool->Prepare(*region);
    for (int tries = 0; !ready && tries < 1000; ++tries) ready = pool->Prepare(*region);
    if (!ready) continue;
    pool->Exchange(*region);
    ++made;
  }
  return made;
}

TEST(PagePoolTest, TheLowestFreePageIsTakenAndIsZeros) {
  PagePool pool(64, kPageBytes);
  std::vector<std::byte*> pages;
  for (uint32_t p = 0; p < 64; ++p) {
    pages.push_back(pool.Take());
    ASSERT_EQ(pages.back(), pool.base() + size_t{p} * kPageBytes);
    std::memset(pages.back(), 0xab, kPageBytes);
  }
  EXPECT_EQ(pool.Take(), nullptr);
  pool.Give(pages[40]);
  pool.Give(pages[7], 2);
  EXPECT_EQ(pool.pages_used(), 61U);
  for (const uint32_t wanted : {7U, 8U, 40U}) {
    std::byte* page = pool.Take();
    ASSERT_EQ(page, pages[wanted]);
    EXPECT_EQ(std::count(page, page + kPageBytes, std::byte{0}), kPageBytes);
  }
}

// The policies that /proc/self/numa_maps has for the ranges that begin in [first, end).
std::vector<std::string> PoliciesIn(const std::byte* first, const std::byte* end) {
  std::vector<std::string> policies;
  std::ifstream maps("/proc/self/numa_maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    uintptr_t begin = 0;
    std::string policy;
    words >> std::hex >> begin >> policy;
    if (begin < reinterpret_cast<uintptr_t>(first) || begin >= reinterpret_cast<uintptr_t>(end)) {
      continue;
    }
    policies.push_back(policy);
  }
  return policies;
}

TEST(PagePoolTest, PagesAreOfTheNumaNodeHugeOnesToo) {
  const std::vector<uint32_t> nodes = NumaNodes();
  if (nodes.empty()) GTEST_SKIP() << "the system lets this process bind no memory";
  PagePool pool(3 * kPagesOfHuge, kPageBytes);
  EXPECT_NE(pool.Bind(1023).message().find("NUMA node 1023 does not exist"), std::string::npos);
  ASSERT_TRUE(pool.Bind(nodes.front()).ok());
  for (uint32_t p = 0; p < 3 * kPagesOfHuge; ++p) std::memset(pool.Take(), 1, kPageBytes);
  const uint32_t made = MakeAll(&pool);
  EXPECT_EQ(made > 0, SystemHasHugePages());
  const std::string bound = "bind:" + std::to_string(nodes.front());
  // The range and its twin.
  const auto policies = PoliciesIn(pool.base(), pool.base() + 6 * kHugePageBytes);
  EXPECT_FALSE(policies.empty());
  for (const std::string& policy : policies) EXPECT_EQ(policy, bound);
}

TEST(PagePoolTest, AFullRegionBecomesAHugePageAndKeepsWhatItHolds) {
  PagePool pool(3 * kPagesOfHuge, kPageBytes);
  std::mt19937_64 random(1);
  std::vector<uint64_t> wrote;
  for (uint32_t p = 0; p < 2 * kPagesOfHuge + 1; ++p) {
    auto* words = reinterpret_cast<uint64_t*>(pool.Take());
    for (size_t w = 0; w < kPageBytes / 8; ++w) wrote.push_back(words[w] = random());
  }
  EXPECT_EQ(pool.NextDue(PagePool::Clock::now()), std::nullopt) << "full since just now";
  const uint32_t made = MakeAll(&pool);
  if (SystemHasHugePages()) {
    EXPECT_EQ(made, 2U) << "the third is not full";
  }
  EXPECT_EQ(pool.huge_bytes(), made * kHugePageBytes);
  EXPECT_EQ(std::memcmp(pool.base(), wrote.data(), wrote.size() * 8), 0);
  EXPECT_EQ(ResidentBytes(pool, 3 * kHugePageBytes), wrote.size() * 8);
  // A page of a huge page goes back to the system; full again, it is made again.
  pool.Give(pool.base() + kPageBytes);
  EXPECT_EQ(ResidentBytes(pool, 3 * kHugePageBytes), wrote.size() * 8 - kPageBytes);
  std::memset(pool.Take(), 0, kPageBytes);
  EXPECT_EQ(MakeAll(&pool), made / 2);
}

TEST(PagePoolTest, ARegionThatLostAPageMeanwhileIsLeftAsItIs) {
  PagePool pool(kPagesOfHuge, kPageBytes);
  for (uint32_t p = 0; p < kPagesOfHuge; ++p) std::memset(pool.Take(), 1, kPageBytes);
  const std::optional<uint32_t> region = pool.NextDue(PagePool::Clock::now() + kFullFor);
  ASSERT_EQ(region, 0U);
  if (!pool.Prepare(*region)) GTEST_SKIP() << "this system has no huge pages";
  pool.Give(pool.base());
  pool.Exchange(*region);
  EXPECT_EQ(pool.huge_bytes(), 0U);
  EXPECT_EQ(ResidentBytes(pool, 2 * kHugePageBytes), kHugePageBytes - kPageBytes);
}

TEST(PagePoolTest, ARegionForWhichThereWasNoHugePageIsDueAgain) {
  PagePool pool(kPagesOfHuge, kPageBytes);
  for (uint32_t p = 0; p < kPagesOfHuge; ++p) pool.Take();
  const auto later = PagePool::Clock::now() + kFullFor;
  ASSERT_EQ(pool.NextDue(later), 0U);
  EXPECT_EQ(pool.NextDue(later + kFullFor), std::nullopt);
  pool.PutBack(0, later);
  EXPECT_EQ(pool.NextDue(later), std::nullopt);
  EXPECT_EQ(pool.NextDue(later + kFullFor), 0U);
}

TEST(PagePoolTest, APageUsedInPartKeepsItsRegionFromBecomingAHugePage) {
  PagePool pool(kPagesOfHuge, kPageBytes);
  for (uint32_t p = 0; p < kPagesOfHuge; ++p) pool.Take(/*whole=*/p != 3);
  const auto later = PagePool::Clock::now() + kFullFor;
  EXPECT_EQ(pool.NextDue(later), std::nullopt);
  pool.Give(pool.base() + 3 * size_t{kPageBytes});
  pool.Take();
  EXPECT_EQ(pool.NextDue(later + kFullFor), 0U);
}

constexpr uint64_t HugeBytes(uint32_t pages) {
  return (pages + kPagesOfHuge - 1) / kPagesOfHuge * kHugePageBytes;
}

// A pool that is being filled, with so many pages taken. A system under load may have no huge page
// for a moment.
std::unique_ptr<PagePool> Filled(uint32_t regions, uint32_t taken) {
  for (int tries = 0;; ++tries) {
    auto pool = std::make_unique<PagePool>(regions * kPagesOfHuge, kPageBytes);
    pool->FillAtOnce(true);
    for (uint32_t p = 0; p < taken; ++p) std::memset(pool->Take(), 0x5a, kPageBytes);
    const bool huge = pool->huge_bytes() == HugeBytes(taken);
    if (huge || !SystemHasHugePages() || tries == 1000) return pool;
  }
}

TEST(PagePoolTest, APoolThatIsFilledAtOnceHasHugePagesAndReturnsTheRest) {
  const bool has = SystemHasHugePages();
  const auto filled = Filled(4, kPagesOfHuge + 3);
  PagePool& pool = *filled;
  EXPECT_EQ(pool.huge_bytes(), has ? 2 * kHugePageBytes : 0) << "the second from its first page on";
  // A page that was given back meanwhile is zeros when it is taken again, by whatever memory.
  pool.Give(pool.base() + kPageBytes);
  EXPECT_EQ(pool.huge_bytes(), has ? kHugePageBytes : 0);
  std::byte* again = pool.Take();
  EXPECT_EQ(again, pool.base() + kPageBytes);
  EXPECT_EQ(std::count(again, again + kPageBytes, std::byte{0}), kPageBytes);
  std::memset(again, 0x5a, kPageBytes);
  pool.FillAtOnce(false);
  const uint64_t bytes = uint64_t{pool.pages_used()} * kPageBytes;
  EXPECT_EQ(ResidentBytes(pool, 4 * kHugePageBytes), bytes);
  EXPECT_EQ(std::count(pool.base(), pool.base() + bytes, std::byte{0x5a}),
            static_cast<ptrdiff_t>(bytes));
  // From then on as before.
  std::memset(pool.Take(), 1, kPageBytes);
  EXPECT_EQ(ResidentBytes(pool, 4 * kHugePageBytes), bytes + kPageBytes);
  EXPECT_EQ(MakeAll(&pool), has ? 1U : 0U) << "the first, which had lost a page";
}

TEST(PagePoolTest, ARegionThatWasFilledAndGivenBackIsFilledAgain) {
  PagePool pool(2 * kPagesOfHuge, kPageBytes);
  pool.FillAtOnce(true);
  for (int turn = 0; turn < 3; ++turn) {
    std::memset(pool.Take(), 1, kPageBytes);
    pool.Give(pool.base());
    EXPECT_EQ(pool.huge_bytes(), 0U);
  }
  pool.FillAtOnce(false);
  EXPECT_EQ(ResidentBytes(pool, 2 * kHugePageBytes), 0U);
}

TEST(PagePoolTest, OfAPageUsedInPartAFilledPoolReturnsWhatNobodyWroteTo) {
  const auto filled = Filled(1, kPagesOfHuge - 1);
  PagePool& pool = *filled;
  std::byte* part = pool.Take(/*whole=*/false);
  EXPECT_EQ(pool.huge_bytes(), SystemHasHugePages() ? kHugePageBytes : 0);
  part[5000] = std::byte{7};
  pool.FillAtOnce(false);
  EXPECT_EQ(pool.huge_bytes(), 0U);
  const uint64_t bytes = ResidentBytes(pool, kHugePageBytes);
  EXPECT_EQ(bytes, kHugePageBytes - kPageBytes + (SystemHasHugePages() ? 8192 : 4096));
  EXPECT_EQ(part[5000], std::byte{7});
}

TEST(PagePoolTest, ReadersSeeTheSameWhileARegionIsExchanged) {
  PagePool pool(kPagesOfHuge, kPageBytes);
  for (uint32_t p = 0; p < kPagesOfHuge; ++p) std::memset(pool.Take(), 0x5a, kPageBytes);
  std::atomic<bool> over = false;
  std::atomic<uint64_t> wrong = 0;
  std::atomic<uint64_t> rounds = 0;
  std::vector<std::thread> readers;
  for (int r = 0; r < 2; ++r) {
    readers.emplace_back([&] {
      auto* words = reinterpret_cast<uint64_t*>(pool.base());
      while (!over) {
        for (size_t w = 0; w < (kHugePageBytes - kPageBytes) / 8; w += 61) {
          if (std::atomic_ref<uint64_t>(words[w]).load() != 0x5a5a5a5a5a5a5a5aULL) ++wrong;
        }
        ++rounds;
      }
    });
  }
  for (int turn = 0; turn < 20; ++turn) {
    MakeAll(&pool);
    const uint64_t before = rounds;
    while (rounds < before + 2) std::this_thread::yield();
    // To small pages again.
    pool.Give(pool.base() + kHugePageBytes - kPageBytes);
    std::memset(pool.Take(), 1, kPageBytes);
  }
  over = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0U);
}

}  // namespace
}  // namespace embertide
