// SlabArena: see the header for the layout and the invariants.
#include "ddr/slab_arena.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace embertide {
SlabArena::SlabArena(ByteBudget* budget)
    : budget_(budget),
      slab_bytes_(SlabPageBytes(budget->limit_bytes())),
      page_slot_bits_(std::countr_zero(slab_bytes_ / kSlotUnitBytes)),
      max_pages_(budget->limit_bytes() / slab_bytes_ + 1),
      pool_(max_pages_, slab_bytes_),
      pages_(new std::atomic<Page*>[max_pages_]()) {}

SlabArena::~SlabArena() {
  for (uint32_t n = 0; n < pool_.pages_seen(); ++n) {
    if (Page* page = pages_[n].load(std::memory_order_relaxed); page != nullptr) DropPage(page);
  }
}

Result<SlabArena::Page*> SlabArena::AddPage(ClassKey key) {
  auto page = std::make_unique<Page>();
  page->slot_bytes = key.first;
  page->aux_bytes = key.second;
  page->slots = slab_bytes_ / (key.first + key.second);
  if (pool_.pages_used() == max_pages_ || !budget_->TryCharge(slab_bytes_)) {
    return Status(Code::kResourceExhausted, "a DDR page of " + std::to_string(slab_bytes_) +
                                                " bytes does not fit the budget of " +
                                                std::to_string(budget_->limit_bytes()) +
                                                " bytes (" + std::to_string(budget_->used_bytes()) +
                                                " used)");
  }
  if (base() == nullptr) {
    budget_->Release(slab_bytes_);
    return Status(Code::kDeviceError, "mmap of a DDR page: " + std::string(strerror(ENOMEM)));
  }
  page->payload = pool_.Take();
  page->aux = page->payload + size_t{page->slots} * page->slot_bytes;
  page->number = static_cast<uint32_t>((page->payload - base()) / slab_bytes_);
  page_bytes_.fetch_add(slab_bytes_, std::memory_order_relaxed);
  pages_[page->number].store(page.get(), std::memory_order_release);
  return page.release();
}

void SlabArena::DropPage(Page* page) {
  if (page->listed) {
    auto& list = room_[{page->slot_bytes, page->aux_bytes}];
    list.erase(std::find(list.begin(), list.end(), page));
  }
  if (page->condemned) --condemned_pages_;
  pages_[page->number].store(nullptr, std::memory_order_release);
  pool_.Give(page->payload);
  page_bytes_.fetch_sub(slab_bytes_, std::memory_order_relaxed);
  budget_->Release(slab_bytes_);
  delete page;
}

SlabArena::ClassKey SlabArena::ClassOf(uint32_t payload_bytes, uint32_t aux_bytes) {
  return {SlotBytesOf(payload_bytes), (aux_bytes + 7U) & ~7U};
}

Result<uint64_t> SlabArena::Allocate(uint32_t payload_bytes, uint32_t aux_bytes) {
  const ClassKey key = ClassOf(payload_bytes, aux_bytes);
  auto& room = room_[key];
  if (room.empty()) {
    Result<Page*> added = AddPage(key);
    if (!added.ok()) return added.status();
    (*added)->listed = true;
    room.push_back(*added);
  }
  return Take(&room);
}

Result<uint64_t> SlabArena::AllocateInRoom(uint32_t payload_bytes, uint32_t aux_bytes) {
  auto& room = room_[ClassOf(payload_bytes, aux_bytes)];
  if (room.empty()) return Status(Code::kResourceExhausted, "no page of this class has room");
  return Take(&room);
}

uint64_t SlabArena::Take(std::vector<Page*>* room) {
  Page* page = room->back();
  uint32_t ordinal;
  if (page->free_head != kNoSlot) {
    ordinal = page->free_head;
    std::memcpy(&page->free_head, page->payload + size_t{ordinal} * page->slot_bytes, 2);
    if (page->free_head != kNoSlot) {  // the next one's
      __builtin_prefetch(page->payload + size_t{page->free_head} * page->slot_bytes, 1);
    }
  } else {
    ordinal = page->fresh++;
  }
  if (++page->used == page->slots) {
    page->listed = false;
    room->pop_back();
  }
  ++used_slots_;
  if (page->aux_bytes > 0) {
    std::memset(page->aux + size_t{ordinal} * page->aux_bytes, 0, page->aux_bytes);
  }
  return (uint64_t{page->number} << page_slot_bits_) +
         uint64_t{ordinal} * page->slot_bytes / kSlotUnitBytes;
}

void SlabArena::Free(uint64_t slot) {
  Page* page = pages_[PageOf(slot)].load(std::memory_order_relaxed);
  EMBERTIDE_CHECK(page != nullptr && page->used > 0);
  const auto ordinal = static_cast<uint16_t>(Ordinal(*page, slot));
  std::memcpy(page->payload + size_t{ordinal} * page->slot_bytes, &page->free_head, 2);
  page->free_head = ordinal;
  --used_slots_;
  if (--page->used == 0) {
    DropPage(page);
  } else if (!page->listed && !page->condemned) {
    page->listed = true;
    room_[{page->slot_bytes, page->aux_bytes}].push_back(page);
  }
}

void SlabArena::Condemn(Page* page) {
  if (page->listed) {
    auto& list = room_[{page->slot_bytes, page->aux_bytes}];
    list.erase(std::find(list.begin(), list.end(), page));
  }
  page->condemned = true;
  page->listed = false;
  ++condemned_pages_;
}

void SlabArena::CondemnSparsePages() {
  for (auto& [key, list] : room_) {
    if (list.empty()) continue;
    // Per class: emptying a page needs room for its rows in the class's other pages.
    uint64_t free_slots = 0;
    for (const Page* page : list) free_slots += page->slots - page->used;
    const uint64_t allowed = std::max<uint64_t>(used_slots_ / 20, list.front()->slots);
    std::sort(list.begin(), list.end(),
              [](const Page* a, const Page* b) { return a->used > b->used; });
    while (list.size() > 1 && free_slots > allowed) {
      Page* page = list.back();
      const uint64_t room_elsewhere = free_slots - (page->slots - page->used);
      if (room_elsewhere < page->used) break;
      Condemn(page);
      free_slots = room_elsewhere - page->used;
    }
  }
}

void SlabArena::CondemnPages(uint32_t pages, bool must_fit) {
  std::vector<Page*> candidates;
  for (uint32_t n = 0; n < pool_.pages_seen(); ++n) {
    Page* page = pages_[n].load(std::memory_order_relaxed);
    if (page != nullptr && !page->condemned) candidates.push_back(page);
  }
  const auto used_bytes = [](const Page* page) { return uint64_t{page->used} * page->slot_bytes; };
  std::stable_sort(candidates.begin(), candidates.end(),
                   [&](const Page* a, const Page* b) { return used_bytes(a) < used_bytes(b); });
  std::map<ClassKey, uint64_t> room;  // slots free in pages that are not condemned
  for (const auto& [key, list] : room_) {
    for (const Page* page : list) room[key] += page->slots - page->used;
  }
  for (Page* page : candidates) {
    if (pages == 0) break;
    uint64_t& elsewhere = room[{page->slot_bytes, page->aux_bytes}];
    const uint32_t own = page->slots - page->used;
    if (must_fit && elsewhere < uint64_t{own} + page->used) continue;
    elsewhere -= std::min<uint64_t>(elsewhere, uint64_t{own} + page->used);
    Condemn(page);
    --pages;
  }
}

void SlabArena::PardonPages() {
  for (uint32_t n = 0; condemned_pages_ > 0 && n < pool_.pages_seen(); ++n) {
    Page* page = pages_[n].load(std::memory_order_relaxed);
    if (page == nullptr || !page->condemned) continue;
    page->condemned = false;
    --condemned_pages_;
    if (page->used == page->slots) continue;
    page->listed = true;
    room_[{page->slot_bytes, page->aux_bytes}].push_back(page);
  }
}

Status SlabArena::CheckIntegrity(std::span<const uint64_t> slots) const {
  std::map<uint32_t, std::vector<bool>> seen;
  for (const uint64_t slot : slots) {
    const uint32_t number = PageOf(slot);
    const Page* page = number < pool_.pages_seen() ? pages_[number].load() : nullptr;
    if (page == nullptr || Ordinal(*page, slot) >= page->fresh ||
        Address(slot) != page->payload + uint64_t{Ordinal(*page, slot)} * page->slot_bytes) {
      return {Code::kCorrupt, "slot " + std::to_string(slot) + " lies in no page"};
    }
    auto& bits = seen[number];
    bits.resize(page->slots);
    if (bits[Ordinal(*page, slot)]) {
      return {Code::kCorrupt, "slot " + std::to_string(slot) + " is named twice"};
    }
    bits[Ordinal(*page, slot)] = true;
  }
  uint64_t bytes = 0;
  for (uint32_t n = 0; n < pool_.pages_seen(); ++n) {
    const Page* page = pages_[n].load();
    if (page == nullptr) continue;
    bytes += slab_bytes_;
    uint32_t free_slots = page->slots - page->fresh;
    auto& bits = seen[n];
    bits.resize(page->slots);
    for (uint16_t head = page->free_head; head != kNoSlot; ++free_slots) {
      if (head >= page->fresh || bits[head]) {
        return {Code::kCorrupt, "the free stack of page " + std::to_string(n) + " is broken"};
      }
      bits[head] = true;
      std::memcpy(&head, page->payload + size_t{head} * page->slot_bytes, 2);
    }
    if (free_slots + page->used != page->slots || page->used == 0) {
      return {Code::kCorrupt, "page " + std::to_string(n) + ": free + used is not capacity"};
    }
  }
  if (bytes != page_bytes()) return {Code::kCorrupt, "page bytes do not add up"};
  if (slots.size() != used_slots_) {
    return {Code::kCorrupt, "the index names " + std::to_string(slots.size()) + " slots, " +
                                std::to_string(used_slots_) + " are allocated"};
  }
  return Status::Ok();
}

}  // namespace embertide
