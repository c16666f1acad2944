// SlotLinks: doubly linked lists over slots, without a node of its own for any: two 4-byte links a
// slot. A slot is in at most one list. Each list is a ring through a head that stands after the
// slots, so that no operation has a special case.
#pragma once

#include <cstdint>
#include <vector>

namespace embertide {

class SlotLinks {
 public:
  SlotLinks(uint32_t slots, uint32_t lists) : slots_(slots), links_(size_t{slots} + lists) {
    for (uint32_t list = 0; list < lists; ++list) Reset(list);
  }

  bool Empty(uint32_t list) const { return links_[Head(list)].next == Head(list); }
  // Requires: the list is not empty.
  uint32_t Back(uint32_t list) const { return links_[Head(list)].previous; }
  void PushFront(uint32_t list, uint32_t slot) {
    const uint32_t head = Head(list);
    links_[slot] = {head, links_[head].next};
    links_[links_[head].next].previous = slot;
    links_[head].next = slot;
  }
  void Remove(uint32_t slot) {
    const Link link = links_[slot];
    links_[link.previous].next = link.next;
    links_[link.next].previous = link.previous;
  }
  // Moves all of `from` in front of all of `to`, in their order.
  void PrependAll(uint32_t to, uint32_t from) {
    if (Empty(from)) return;
    const uint32_t head = Head(to);
    const Link moved = links_[Head(from)];
    links_[moved.previous].next = links_[head].next;
    links_[links_[head].next].previous = moved.previous;
    links_[moved.next].previous = head;
    links_[head].next = moved.next;
    Reset(from);
  }
  uint64_t bytes() const { return links_.size() * sizeof(Link); }

 private:
  struct Link {
    uint32_t previous = 0;
    uint32_t next = 0;
  };
  uint32_t Head(uint32_t list) const { return slots_ + list; }
  void Reset(uint32_t list) { links_[Head(list)] = {Head(list), Head(list)}; }

  const uint32_t slots_;
  std::vector<Link> links_;
};

}  // namespace embertide
