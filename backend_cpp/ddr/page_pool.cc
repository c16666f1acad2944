// PagePool: see the header.
#include "ddr/page_pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>

#include "embertide/numa.h"
#include "embertide/status.h"

namespace embertide {
namespace {

// Regions that one call of NextDue looks at.
constexpr size_t kMaxLookedAt = 16;

std::byte* Map(uint64_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
}

// 4 KiB on x86-64; an aarch64 kernel may have 16 or 64.
size_t SmallPageBytes() {
  static const auto kBytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return kBytes;
}

// Touches a region of which nothing is in memory; whether that brought a huge page.
bool TouchHuge(std::byte* region) {
  *static_cast<volatile std::byte*>(region) = std::byte{0};
  std::byte* last = region + kHugePageBytes - SmallPageBytes();
  unsigned char resident = 0;
  return mincore(last, SmallPageBytes(), &resident) == 0 && (resident & 1U) != 0;
}

// Gives back what of a page lies behind all that was written to it.
void ReturnZeros(std::byte* page, uint32_t bytes) {
  const auto* words = reinterpret_cast<const uint64_t*>(page);
  size_t used = bytes / sizeof(uint64_t);
  while (used > 0 && words[used - 1] == 0) --used;
  const size_t kept = (used * sizeof(uint64_t) + SmallPageBytes() - 1) / SmallPageBytes();
  const size_t first = kept * SmallPageBytes();
  if (first < bytes) madvise(page + first, bytes - first, MADV_DONTNEED);
}

}  // namespace

PagePool::PagePool(uint64_t pages, uint32_t page_bytes)
    : page_bytes_(page_bytes),
      pages_of_region_(static_cast<uint32_t>(kHugePageBytes / page_bytes)),
      range_bytes_((pages + pages_of_region_ - 1) / pages_of_region_ * kHugePageBytes),
      range_(Map(2 * range_bytes_ + kHugePageBytes)),
      regions_(range_bytes_ / kHugePageBytes) {
  if (range_ == nullptr) return;
  base_ = range_ + (kHugePageBytes - reinterpret_cast<uintptr_t>(range_) % kHugePageBytes);
  twin_ = base_ + range_bytes_;
  // Not where the system gives huge pages unasked either: a page is what is charged.
  madvise(base_, range_bytes_, MADV_NOHUGEPAGE);
  madvise(twin_, range_bytes_, MADV_HUGEPAGE);
}

PagePool::~PagePool() {
  if (range_ != nullptr) munmap(range_, 2 * range_bytes_ + kHugePageBytes);
}

Status PagePool::Bind(uint32_t numa_node) {
  if (base_ == nullptr) return Status::Ok();
  // The twin too: its huge pages come to stand here.
  return BindMemory(base_, 2 * range_bytes_, numa_node);
}

std::byte* PagePool::Take(bool whole) {
  if (base_ == nullptr) return nullptr;
  while (first_free_ < regions_.size() && regions_[first_free_].used == FullMask()) ++first_free_;
  if (first_free_ == regions_.size()) return nullptr;
  Region& region = regions_[first_free_];
  if (fills_ && region.used == 0) BeginHuge(first_free_);
  const auto at = static_cast<uint32_t>(std::countr_one(region.used));
  const uint32_t number = first_free_ * pages_of_region_ + at;
  region.used |= 1U << at;
  if (whole) region.whole |= 1U << at;
  if (region.whole == FullMask() && !region.huge) {
    region.full_since = Clock::now();
    if (!region.due) due_.push_back(first_free_);
    region.due = true;
  }
  ++used_;
  seen_ = std::max(seen_, number + 1);
  return base_ + uint64_t{number} * page_bytes_;
}

void PagePool::Give(std::byte* first, uint32_t pages) {
  madvise(first, uint64_t{pages} * page_bytes_, MADV_DONTNEED);
  const auto from = static_cast<uint32_t>((first - base_) / page_bytes_);
  for (uint32_t number = from; number < from + pages; ++number) {
    Region& region = regions_[number / pages_of_region_];
    const uint32_t bit = 1U << number % pages_of_region_;
    EMBERTIDE_CHECK((region.used & bit) != 0);
    region.used &= ~bit;
    region.whole &= ~bit;
    if (region.huge) --huge_;
    region.huge = false;
  }
  first_free_ = std::min(first_free_, from / pages_of_region_);
  used_ -= pages;
}

void PagePool::FillAtOnce(bool fill) {
  if (fills_ && !fill) {
    const uint32_t begun = (seen_ + pages_of_region_ - 1) / pages_of_region_;
    for (uint32_t at = 0; at < begun; ++at) ReturnUnused(at);
  }
  fills_ = fill;
}

// Makes a region of which no page is used a huge page, if the system has one.
void PagePool::BeginHuge(uint32_t at) {
  std::byte* first = base_ + at * kHugePageBytes;
  // Remains of a filled region whose pages were all given back would keep it from that.
  madvise(first, kHugePageBytes, MADV_DONTNEED);
  madvise(first, kHugePageBytes, MADV_HUGEPAGE);
  regions_[at].huge = TouchHuge(first);
  if (regions_[at].huge) ++huge_;
  madvise(first, kHugePageBytes, MADV_NOHUGEPAGE);
}

// Returns the memory of a filled region that is not used.
void PagePool::ReturnUnused(uint32_t at) {
  Region& region = regions_[at];
  if (region.whole == FullMask()) return;
  if (region.huge) --huge_;
  region.huge = false;
  for (uint32_t n = 0; n < pages_of_region_; ++n) {
    std::byte* page = base_ + at * kHugePageBytes + uint64_t{n} * page_bytes_;
    if ((region.used >> n & 1U) == 0) {
      madvise(page, page_bytes_, MADV_DONTNEED);
    } else if ((region.whole >> n & 1U) == 0) {
      ReturnZeros(page, page_bytes_);
    }
  }
}

std::optional<uint32_t> PagePool::NextDue(Clock::time_point now) {
  for (size_t left = std::min(due_.size(), kMaxLookedAt); left > 0; --left) {
    const uint32_t at = due_.front();
    Region& region = regions_[at];
    if (region.whole == FullMask() && now < region.full_since + kFullFor) {
      // Those behind it were full later, or have not been full throughout.
      due_.pop_front();
      due_.push_back(at);
      continue;
    }
    due_.pop_front();
    region.due = false;
    if (region.whole == FullMask() && !region.huge) return at;
  }
  return std::nullopt;
}

bool PagePool::Prepare(uint32_t region) const {
  std::byte* fresh = twin_ + region * kHugePageBytes;
  if (TouchHuge(fresh)) return true;
  madvise(fresh, kHugePageBytes, MADV_DONTNEED);
  return false;
}

void PagePool::PutBack(uint32_t at, Clock::time_point now) {
  Region& region = regions_[at];
  if (region.whole != FullMask() || region.due) return;
  region.full_since = now;
  region.due = true;
  due_.push_back(at);
}

void PagePool::Exchange(uint32_t at) {
  Region& region = regions_[at];
  std::byte* fresh = twin_ + at * kHugePageBytes;
  std::byte* old = base_ + at * kHugePageBytes;
  if (region.whole != FullMask() || region.huge) {
    madvise(fresh, kHugePageBytes, MADV_DONTNEED);
    return;
  }
  // Word by word, as readers may write to what they read meanwhile.
  auto* from = reinterpret_cast<uint64_t*>(old);
  auto* to = reinterpret_cast<uint64_t*>(fresh);
  for (size_t i = 0; i < kHugePageBytes / sizeof(uint64_t); ++i) {
    to[i] = std::atomic_ref<uint64_t>(from[i]).load(std::memory_order_relaxed);
  }
  // The twin keeps its addresses.
  const void* moved = mremap(fresh, kHugePageBytes, kHugePageBytes,
                             MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, old);
  if (moved != old) {
    // The system has no room for its own notes; then nothing has changed.
    unsigned char there = 0;
    EMBERTIDE_CHECK(mincore(old, 1, &there) == 0);
    madvise(fresh, kHugePageBytes, MADV_DONTNEED);
    return;
  }
  madvise(old, kHugePageBytes, MADV_NOHUGEPAGE);
  region.huge = true;
  ++huge_;
}

}  // namespace embertide
