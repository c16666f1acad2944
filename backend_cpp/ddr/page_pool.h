// PagePool: pages of one size in a range of addresses, in regions of 2 MiB that become huge pages
// of the system, so that a lookup at random seldom waits for a page table.
//
//   range  [ region 0: page 0, page 1, ... ][ region 1 ] ...     page n: bytes [n, n + 1) x its
//   size twin   [ as long; a region's new memory ][          ] ...     without memory but for a
//   moment
//
// The lowest free page is taken first, so regions fill. A page that is given back goes back to the
// system at once. A region whose pages have all been in use for kFullFor is copied into one huge
// page, which then takes its place: the system would collapse it by itself, but while it does,
// nothing in the whole range can be faulted in, for milliseconds (docs/results/store.md, "Growth").
// While a pool is filled at once, a region is a huge page from its first page on.
//
// Invariant: no more is resident than the pages in use, but for one region at a time in Prepare,
// and for regions with free pages while the pool is filled at once.
//
// Threads: one writer; Prepare on any thread. Readers of the pages wait for nothing but the moment
// in which the system exchanges the mapping, and what they write to a region just then may be lost.
// NUMA: a page lies where Bind says; without it, at the node of the thread that first writes to it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "embertide/status.h"

namespace embertide {

inline constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;
// Arrays of a growing bucket come and go sooner.
inline constexpr std::chrono::milliseconds kFullFor{1000};

class PagePool {
 public:
  using Clock = std::chrono::steady_clock;

  // `page_bytes` is a power of two from 64 KiB to 2 MiB. Takes addresses, no memory.
  PagePool(uint64_t pages, uint32_t page_bytes);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // All pages come from this NUMA node. To be called before the first is taken. Errors are those of
  // BindMemory.
  Status Bind(uint32_t numa_node);
  // The address of page 0; null: the system had no addresses.
  std::byte* base() const { return base_; }
  // A page of zeros; null when all are taken. One that is not to be written to `whole` keeps its
  // region from becoming a huge page.
  std::byte* Take(bool whole = true);
  // Pages that follow one another: one call for them costs a quarter of one call each.
  void Give(std::byte* first, uint32_t pages = 1);
  // From now on, or no longer, much is taken and little given back, and nobody waits: regions come
  // as huge pages, where the system has some. At the end what was not taken of them goes back.
  void FillAtOnce(bool fill);
  // No page from here on was ever taken.
  uint32_t pages_seen() const { return seen_; }
  uint32_t pages_used() const { return used_; }
  // Bytes of the table of regions.
  uint64_t directory_bytes() const { return regions_.size() * sizeof(Region); }
  // Any thread.
  uint64_t huge_bytes() const { return huge_.load(std::memory_order_relaxed) * kHugePageBytes; }

  // --- huge pages, in three steps, of which the one that takes long needs no writer
  // A region that has been full for a while by now; the caller goes on with the others.
  std::optional<uint32_t> NextDue(Clock::time_point now);
  // Takes a huge page for it; false if the system has none now. At most one thread a region.
  bool Prepare(uint32_t region) const;
  // It had none: the region is due again when as much time has passed once more.
  void PutBack(uint32_t region, Clock::time_point now);
  // Copies the region there and puts it in the region's place, or gives the huge page back if the
  // region is not full any more. Copies 2 MiB.
  void Exchange(uint32_t region);

 private:
  struct Region {
    uint32_t used = 0;   // a bit each page
    uint32_t whole = 0;  // the same, of those that are used whole
    bool due = false;    // stands in due_
    bool huge = false;
    Clock::time_point full_since;
  };
  uint32_t FullMask() const { return pages_of_region_ == 32 ? ~0U : (1U << pages_of_region_) - 1; }
  void BeginHuge(uint32_t at);
  void ReturnUnused(uint32_t at);

  const uint32_t page_bytes_;
  const uint32_t pages_of_region_;
  const uint64_t range_bytes_;
  std::byte* range_ = nullptr;  // as the system gave it, with its twin; null: it had none
  std::byte* base_ = nullptr;   // the first region in it
  std::byte* twin_ = nullptr;
  std::vector<Region> regions_;
  std::deque<uint32_t> due_;  // those full once, the longest first; each at most once
  uint32_t first_free_ = 0;   // no region below has a free page
  uint32_t seen_ = 0;
  uint32_t used_ = 0;
  bool fills_ = false;
  std::atomic<uint64_t> huge_{0};  // regions
};

}  // namespace embertide
