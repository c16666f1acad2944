// Pages of 64 KiB that fill huge pages of the system where it has any, so that a lookup at random
// seldom waits for a page table. One pool for the process: large arrays are lists of its pages,
// for ranges that come and go in many sizes would leave no 2 MiB without a hole.
//
// The lowest free page is given first; 2 MiB become a huge page when all 32 pages are in use, so no
// more is resident than is used. A freed page goes back to the system at once. Thread-safe.
// NUMA: a page lies at the node of the thread that first writes to it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace embertide {

inline constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;
// Makes the 2 MiB at `page`, all in use and aligned to their size, one page of the system: at once
// from Linux 6.1 on, else when its daemon comes by, or never where the system refuses.
void MakeHugePage(void* page);

inline constexpr uint64_t kPoolPageBytes = uint64_t{64} << 10;
// A zeroed page. Throws std::bad_alloc when the system has no addresses left.
std::byte* TakePoolPage();
void GivePoolPage(std::byte* page);

}  // namespace embertide
