// PagePool: see the header.
#include "ddr/page_pool.h"

#include <sys/mman.h>

#include <map>
#include <mutex>
#include <new>
#include <set>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

namespace embertide {
namespace {

constexpr uint32_t kPagesOfHuge = kHugePageBytes / kPoolPageBytes;
// Addresses taken from the system at once; they cost nothing until they are written to.
constexpr uint64_t kReserveBytes = uint64_t{1} << 30;

std::byte* HugePageOf(std::byte* page) {
  return page - reinterpret_cast<uintptr_t>(page) % kHugePageBytes;
}

class PagePool {
 public:
  std::byte* Take() {
    bool full;
    std::byte* page;
    {
      const std::lock_guard lock(mutex_);
      if (free_.empty()) Reserve();
      page = *free_.begin();
      free_.erase(free_.begin());
      full = ++used_[HugePageOf(page)] == kPagesOfHuge;
    }
    if (full) MakeHugePage(HugePageOf(page));
    return page;
  }

  void Give(std::byte* page) {
    madvise(page, kPoolPageBytes, MADV_DONTNEED);
    const std::lock_guard lock(mutex_);
    --used_[HugePageOf(page)];
    free_.insert(page);
  }

 private:
  void Reserve() {
    void* memory = mmap(nullptr, kReserveBytes + kHugePageBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    std::byte* first = HugePageOf(static_cast<std::byte*>(memory)) + kHugePageBytes;
    for (uint64_t at = 0; at < kReserveBytes; at += kPoolPageBytes) free_.insert(first + at);
  }

  std::mutex mutex_;
  std::set<std::byte*> free_;
  std::map<std::byte*, uint32_t> used_;  // pages in use of each huge page
};

// Never destroyed: pages may be given back by other static objects.
PagePool& Pool() {
  static auto* pool = new PagePool;
  return *pool;
}

}  // namespace

void MakeHugePage(void* page) {
  if (madvise(page, kHugePageBytes, MADV_COLLAPSE) != 0) {
    madvise(page, kHugePageBytes, MADV_HUGEPAGE);
  }
}

std::byte* TakePoolPage() { return Pool().Take(); }

void GivePoolPage(std::byte* page) { Pool().Give(page); }

}  // namespace embertide
