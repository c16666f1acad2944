// NodePool: the version nodes of one pool, in pages of the pool of its index arrays.
//
//   page  [ header ][ node ][ node ] ...     aligned to its size, so a node knows its page
//
// Versions come and fold in order, so pages empty as they filled; an empty one goes back to the
// system and its bytes to the budget. From the ordinary heap they would not: what lies above them
// there keeps it.
//
// Invariant: the bytes of all pages are charged to the budget; a page without a node is given back.
//
// Threads: one writer, but for bytes(). Readers read the nodes.
#pragma once

#include <atomic>
#include <cstdint>

#include "ddr/byte_budget.h"
#include "ddr/page_pool.h"
#include "store/bucket_index.h"
#include "store/location.h"

namespace embertide {

class NodePool {
 public:
  static constexpr uint32_t kPageBytes = BucketIndex::kPageBytes;
  // Both outlive it. `pages` are of kPageBytes.
  NodePool(ByteBudget* budget, PagePool* pages) : budget_(budget), pages_(pages) {}
  NodePool(const NodePool&) = delete;
  NodePool& operator=(const NodePool&) = delete;

  // Null if the budget has no room for a page more.
  VersionNode* Take();
  // Requires: no reader can be at it.
  void Give(VersionNode* node);

  uint64_t nodes() const { return nodes_; }
  uint64_t bytes() const { return page_count_.load(std::memory_order_relaxed) * kPageBytes; }

 private:
  struct Page {
    Page* next = nullptr;  // of those with room
    Page* before = nullptr;
    VersionNode* free = nullptr;  // linked by next_staged
    uint32_t used = 0;
    uint32_t fresh = 0;  // nodes from here on were never used
  };
  static constexpr uint32_t kPageNodes = (kPageBytes - sizeof(Page)) / sizeof(VersionNode);
  static Page* PageOf(VersionNode* node) {
    return reinterpret_cast<Page*>(reinterpret_cast<uintptr_t>(node) & ~uintptr_t{kPageBytes - 1});
  }
  static VersionNode* NodesOf(Page* page) { return reinterpret_cast<VersionNode*>(page + 1); }
  void Link(Page* page);
  void Unlink(Page* page);

  ByteBudget* const budget_;
  PagePool* const pages_;
  Page* room_ = nullptr;
  uint64_t nodes_ = 0;
  std::atomic<uint64_t> page_count_{0};
};

}  // namespace embertide
