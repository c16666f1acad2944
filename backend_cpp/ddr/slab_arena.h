// SlabArena: the DDR tier of one device. Payloads in pages of one size class each.
//
//   slot:  its byte in the arena / 8      page n: bytes [n, n + 1) x SlabPageBytes of the arena
//   page:  [slot 0][slot 1]...[slot n-1][aux 0][aux 1]...[aux n-1]     aux: training only
//
// Aux lies behind all payload of its page: rows keep the lines that they would have without it, and
// lie in the same huge page as what stands beside them.
//
// The arena is one range of addresses as long as the budget; so a slot is an address but for one
// addition, and a lookup reads nothing else to know where a row lies.
//
// Invariants
//   1. A page holds slots of one (payload bytes, aux bytes) class; free + used = its slots.
//   2. A page without a used slot is given back to the system and its bytes to the budget.
//   3. Free slots of a page form a stack threaded through the slots themselves (16-bit links), so a
//      freed slot is reused first and freeing needs no memory.
//   4. Every page byte is charged to the budget while the page exists.
//   5. Pages lie in a pool whose full regions become huge pages (page_pool.h).
//
// Threads: Address() and Aux() may run on any thread beside one writer, for slots that were
// published to that thread and not yet freed. All else: one writer.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "ddr/byte_budget.h"
#include "ddr/page_pool.h"
#include "embertide/status.h"

namespace embertide {

// Bytes of a page: a 4096th of the budget, so that a class that is hardly used wastes little, but
// no more than are of use (64 small pages of the TLB), and no fewer than PagePool has.
inline constexpr uint32_t kMinSlabPageBytes = 64 * 1024;
inline constexpr uint32_t kMaxSlabPageBytes = 256 * 1024;
constexpr uint32_t SlabPageBytes(uint64_t budget_bytes) {
  return static_cast<uint32_t>(std::clamp<uint64_t>(std::bit_floor(budget_bytes / 4096),
                                                    kMinSlabPageBytes, kMaxSlabPageBytes));
}
inline constexpr uint32_t kSlotUnitBytes = 8;
// A slot of at least 16 bytes keeps ordinals within the 16 bits of a link.
inline constexpr uint32_t kMinSlotBytes = 16;
// Bytes of the slots of a payload's class.
constexpr uint32_t SlotBytesOf(uint32_t payload_bytes) {
  return std::max((payload_bytes + kSlotUnitBytes - 1) / kSlotUnitBytes * kSlotUnitBytes,
                  kMinSlotBytes);
}

class SlabArena {
 public:
  // `budget` must outlive the arena; it bounds the number of pages.
  explicit SlabArena(ByteBudget* budget);
  ~SlabArena();
  SlabArena(const SlabArena&) = delete;
  SlabArena& operator=(const SlabArena&) = delete;

  // A free slot of at least these bytes; the contents are unspecified, aux is zero.
  // kResourceExhausted when it would need a page that the budget does not allow.
  Result<uint64_t> Allocate(uint32_t payload_bytes, uint32_t aux_bytes);
  // Requires: `slot` is allocated and no reader can hold its address.
  void Free(uint64_t slot);

  // Slots are less than this.
  uint64_t slots() const { return max_pages_ << page_slot_bits_; }
  // The address of slot 0; it never moves.
  std::byte* base() const { return pool_.base(); }
  static std::byte* AddressOf(std::byte* base, uint64_t slot) {
    return base + slot * kSlotUnitBytes;
  }
  std::byte* Address(uint64_t slot) const { return AddressOf(base(), slot); }
  // Bytes of payload that the slot's class holds. Any thread, as Address.
  uint32_t SlotBytes(uint64_t slot) const {
    return pages_[PageOf(slot)].load(std::memory_order_acquire)->slot_bytes;
  }
  // Requires: the slot was allocated with aux_bytes > 0.
  std::byte* Aux(uint64_t slot) const {
    const Page& page = *pages_[PageOf(slot)].load(std::memory_order_acquire);
    return page.aux + uint64_t{Ordinal(page, slot)} * page.aux_bytes;
  }

  // Marks the sparsest pages, enough to bring waste (free slots) under 5 % of the pages' bytes, as
  // condemned: nothing is allocated from them, and the owner moves their rows away.
  void CondemnSparsePages();
  // Condemns up to `pages` pages whatever the waste, those with the least used bytes first: what
  // must go when another size class, or the index, needs their bytes. `must_fit`: only those whose
  // rows have room in the other pages of their class, as there is nowhere else.
  void CondemnPages(uint32_t pages, bool must_fit = false);
  // Takes back that pages are condemned: rows that can go nowhere keep some, whose free slots are
  // then of use again.
  void PardonPages();
  // As Allocate, but never adds a page.
  Result<uint64_t> AllocateInRoom(uint32_t payload_bytes, uint32_t aux_bytes);
  uint32_t page_count() const { return pool_.pages_used(); }
  bool Condemned(uint64_t slot) const {
    return pages_[PageOf(slot)].load(std::memory_order_relaxed)->condemned;
  }
  bool has_condemned() const { return condemned_pages_ > 0; }

  // Bytes of one page.
  uint32_t slab_bytes() const { return slab_bytes_; }
  // Bytes of pages.
  uint64_t page_bytes() const { return page_bytes_.load(std::memory_order_relaxed); }
  // Bytes of the page directory, charged to the budget when the arena is made.
  uint64_t directory_bytes() const {
    return max_pages_ * sizeof(pages_[0]) + pool_.directory_bytes();
  }
  // The memory of the pages, for who makes huge pages of it.
  PagePool* pool() { return &pool_; }
  uint64_t used_slots() const { return used_slots_; }

  // Verifies invariants 1 to 4, and that `slots` (all that the index names) are distinct, allocated
  // and all there are. kCorrupt naming the page.
  Status CheckIntegrity(std::span<const uint64_t> slots) const;

 private:
  struct Page {
    std::byte* payload = nullptr;
    std::byte* aux = nullptr;  // behind the last slot
    uint32_t slot_bytes = 0;
    uint32_t aux_bytes = 0;
    uint32_t slots = 0;
    uint32_t used = 0;
    uint32_t fresh = 0;  // slots from here on were never used
    uint16_t free_head = kNoSlot;
    bool condemned = false;
    bool listed = false;  // in its class's list of pages with room
    uint32_t number = 0;
  };
  static constexpr uint16_t kNoSlot = 0xffff;
  using ClassKey = std::pair<uint32_t, uint32_t>;
  static ClassKey ClassOf(uint32_t payload_bytes, uint32_t aux_bytes);
  uint64_t Take(std::vector<Page*>* room);
  void Condemn(Page* page);

  uint32_t PageOf(uint64_t slot) const { return static_cast<uint32_t>(slot >> page_slot_bits_); }
  uint32_t Ordinal(const Page& page, uint64_t slot) const {
    // By 32 bits, of which a page has fewer: a division by 64 takes several times as long.
    const auto in_page = static_cast<uint32_t>(slot & ((uint64_t{1} << page_slot_bits_) - 1));
    return in_page * kSlotUnitBytes / page.slot_bytes;
  }
  Result<Page*> AddPage(ClassKey key);
  void DropPage(Page* page);

  ByteBudget* budget_;
  const uint32_t slab_bytes_;
  const int page_slot_bits_;  // of a slot, within its page
  const uint64_t max_pages_;
  PagePool pool_;
  std::unique_ptr<std::atomic<Page*>[]> pages_;
  std::map<ClassKey, std::vector<Page*>> room_;  // pages with room, by class
  std::atomic<uint64_t> page_bytes_{0};
  uint64_t used_slots_ = 0;
  uint32_t condemned_pages_ = 0;
};

}  // namespace embertide
