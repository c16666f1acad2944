// NUMA nodes as operators write them, and memory and threads bound to them.
#include "embertide/numa.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <fstream>
#include <sstream>
#include <thread>

namespace embertide {
namespace {

TEST(NumaTest, ListsAreReadAndWhatIsNoNumberIsNamed) {
  using Nodes = std::vector<uint32_t>;
  EXPECT_EQ(ParseNumaNodes("none").value(), Nodes());
  EXPECT_EQ(ParseNumaNodes("0,1,12").value(), (Nodes{0, 1, 12}));
  const Nodes all = NumaNodes();
  EXPECT_EQ(ParseNumaNodes("auto").value(), all.size() > 1 ? all : Nodes());
  for (const char* wrong : {"", "0,", "a", "-1", "0 1", "99999999999"}) {
    EXPECT_EQ(ParseNumaNodes(wrong).status().code(), Code::kInvalidArgument) << wrong;
  }
  EXPECT_NE(ParseNumaNodes("0,x").status().message().find("\"x\""), std::string::npos);
}

TEST(NumaTest, MemoryIsBoundAndANodeThatDoesNotExistIsNamed) {
  constexpr size_t kBytes = 1 << 20;
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  for (const uint32_t node : {1023U, 4096U}) {
    const Status none = BindMemory(memory, kBytes, node);
    EXPECT_EQ(none.code(), Code::kInvalidArgument);
    EXPECT_NE(none.message().find("NUMA node " + std::to_string(node) + " does not exist"),
              std::string::npos)
        << none.ToString();
    EXPECT_EQ(BindThread(node).code(), Code::kInvalidArgument);
  }
  if (NumaNodes().empty()) {
    munmap(memory, kBytes);
    GTEST_SKIP() << "the system lets this process bind no memory";
  }
  const uint32_t node = NumaNodes().back();
  ASSERT_TRUE(BindMemory(memory, kBytes, node).ok());
  std::ostringstream begin;
  begin << std::hex << reinterpret_cast<uintptr_t>(memory) << " bind:" << std::dec << node;
  std::ifstream maps("/proc/self/numa_maps");
  bool found = false;
  for (std::string line; std::getline(maps, line);) found |= line.starts_with(begin.str());
  EXPECT_TRUE(found) << begin.str();
  munmap(memory, kBytes);
  std::thread([node] { EXPECT_TRUE(BindThread(node).ok()); }).join();
}

}  // namespace
}  // namespace embertide
