// NodePool: what it takes is charged, and what it cannot have is refused.
#include "store/node_pool.h"

#include <gtest/gtest.h>

#include <vector>

namespace embertide {
namespace {

// The system may have no memory where the budget has room. Before, that ended the process.
TEST(NodePoolTest, WithoutMemoryItRefusesAndTheBudgetStaysRight) {
  ByteBudget budget(64ULL << 20);
  constexpr uint64_t kPages = kHugePageBytes / NodePool::kPageBytes;  // it has no fewer
  PagePool pages(kPages, NodePool::kPageBytes);
  NodePool pool(&budget, &pages);
  std::vector<VersionNode*> nodes;
  while (VersionNode* const node = pool.Take()) nodes.push_back(node);
  EXPECT_EQ(pool.bytes(), kPages * NodePool::kPageBytes);
  EXPECT_EQ(budget.used_bytes(), pool.bytes());
  pool.Give(nodes.back());
  EXPECT_EQ(pool.Take(), nodes.back()) << "a node that comes free is taken";
  EXPECT_EQ(pool.Take(), nullptr);
  for (VersionNode* const node : nodes) pool.Give(node);
  EXPECT_EQ(budget.used_bytes(), 0U);
  EXPECT_EQ(pool.nodes(), 0U);
}

}  // namespace
}  // namespace embertide
