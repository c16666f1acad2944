// NUMA: see the header.
#include "embertide/numa.h"

#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <limits>

namespace embertide {
namespace {

constexpr uint32_t kMaxNodes = 1024;  // as the kernel's own bound
constexpr uint32_t kWordBits = std::numeric_limits<unsigned long>::digits;
using NodeMask = std::array<unsigned long, kMaxNodes / kWordBits>;

// False: it is no number.
bool ParseNumber(const std::string& text, uint32_t* number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
  return error == std::errc() && end == text.data() + text.size();
}

std::string ListOf(const std::vector<uint32_t>& nodes) {
  std::string list;
  for (const uint32_t node : nodes) list += (list.empty() ? "" : ", ") + std::to_string(node);
  return list.empty() ? "none that this process may bind memory to" : list;
}

Status CheckNode(uint32_t node) {
  const std::vector<uint32_t> nodes = NumaNodes();
  for (const uint32_t each : nodes) {
    if (each == node) return Status::Ok();
  }
  return {Code::kInvalidArgument,
          "NUMA node " + std::to_string(node) + " does not exist; there are: " + ListOf(nodes)};
}

Status Refused(const char* what, uint32_t node) {
  return {Code::kDeviceError, std::string(what) + " to NUMA node " + std::to_string(node) + ": " +
                                  strerror(errno) + " (a container needs CAP_SYS_NICE)"};
}

}  // namespace

std::vector<uint32_t> NumaNodes() {
  NodeMask mask{};
  std::vector<uint32_t> nodes;
  if (syscall(SYS_get_mempolicy, nullptr, mask.data(), kMaxNodes, nullptr, MPOL_F_MEMS_ALLOWED) !=
      0) {
    return nodes;
  }
  for (uint32_t node = 0; node < kMaxNodes; ++node) {
    if ((mask[node / kWordBits] >> node % kWordBits & 1U) != 0) nodes.push_back(node);
  }
  return nodes;
}

Result<std::vector<uint32_t>> ParseNumaNodes(const std::string& text) {
  std::vector<uint32_t> nodes;
  if (text == "none") return nodes;
  if (text == "auto") {
    nodes = NumaNodes();
    if (nodes.size() < 2) nodes.clear();
    return nodes;
  }
  for (size_t from = 0; from <= text.size();) {
    const size_t comma = std::min(text.find(',', from), text.size());
    const std::string part = text.substr(from, comma - from);
    if (!ParseNumber(part, &nodes.emplace_back())) {
      return Status(Code::kInvalidArgument,
                    "NUMA node \"" + part + "\"; give auto, none or numbers as \"0,1\"");
    }
    from = comma + 1;
  }
  return nodes;
}

Status BindMemory(void* memory, uint64_t bytes, uint32_t node) {
  EMBERTIDE_RETURN_IF_ERROR(CheckNode(node));
  NodeMask mask{};
  mask[node / kWordBits] = 1UL << node % kWordBits;
  // The kernel takes one bit less than it is told of.
  if (syscall(SYS_mbind, memory, bytes, MPOL_BIND, mask.data(), kMaxNodes + 1, 0) == 0) {
    return Status::Ok();
  }
  return Refused("binding memory", node);
}

Status BindThread(uint32_t node) {
  EMBERTIDE_RETURN_IF_ERROR(CheckNode(node));
  cpu_set_t allowed;
  cpu_set_t wanted;
  CPU_ZERO(&wanted);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0)
    return Refused("binding a thread", node);
  std::ifstream list("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
  // "0-3,8": ranges and single ones.
  for (std::string part; std::getline(list, part, ',');) {
    while (!part.empty() && part.back() == '\n') part.pop_back();
    const size_t dash = std::min(part.find('-'), part.size());
    uint32_t first = 0;
    if (!ParseNumber(part.substr(0, dash), &first)) continue;
    uint32_t last = first;
    if (dash < part.size() && !ParseNumber(part.substr(dash + 1), &last)) continue;
    for (uint32_t cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &wanted);
    }
  }
  if (CPU_COUNT(&wanted) == 0) {
    return {Code::kInvalidArgument,
            "NUMA node " + std::to_string(node) + " has no CPU that this process may run on"};
  }
  if (sched_setaffinity(0, sizeof(wanted), &wanted) == 0) return Status::Ok();
  return Refused("binding a thread", node);
}

}  // namespace embertide
