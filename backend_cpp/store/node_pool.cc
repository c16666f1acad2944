// NodePool: see the header.
#include "store/node_pool.h"

#include <new>

namespace embertide {

void NodePool::Link(Page* page) {
  page->before = nullptr;
  page->next = room_;
  if (room_ != nullptr) room_->before = page;
  room_ = page;
}

void NodePool::Unlink(Page* page) {
  (page->before == nullptr ? room_ : page->before->next) = page->next;
  if (page->next != nullptr) page->next->before = page->before;
}

VersionNode* NodePool::Take() {
  if (room_ == nullptr) {
    if (!budget_->TryCharge(kPageBytes)) return nullptr;
    std::byte* memory = pages_->Take();
    if (memory == nullptr) {  // as if the budget had none left: the version is refused
      budget_->Release(kPageBytes);
      return nullptr;
    }
    Link(new (memory) Page);
    page_count_.fetch_add(1, std::memory_order_relaxed);
  }
  Page* page = room_;
  VersionNode* node = page->free;
  if (node != nullptr) {
    page->free = node->next_staged;
    __builtin_prefetch(page->free, 1);  // the next one's
  } else {
    node = NodesOf(page) + page->fresh++;
  }
  if (++page->used == kPageNodes) Unlink(page);
  ++nodes_;
  return new (node) VersionNode;
}

void NodePool::Give(VersionNode* node) {
  Page* page = PageOf(node);
  node->next_staged = page->free;
  page->free = node;
  if (page->used == kPageNodes) Link(page);
  --nodes_;
  if (--page->used > 0) return;
  Unlink(page);
  pages_->Give(reinterpret_cast<std::byte*>(page));
  budget_->Release(kPageBytes);
  page_count_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace embertide
