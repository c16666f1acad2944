// NUMA: from which node of the machine memory is taken, and on whose CPUs a thread runs.
//
// By the kernel's calls themselves: three of them are all that is needed of libnuma. A container
// without CAP_SYS_NICE is refused them by the usual seccomp profiles.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "embertide/status.h"

namespace embertide {

// The nodes whose memory this process may bind, ascending; none where the system lets it bind none.
std::vector<uint32_t> NumaNodes();

// As operators write them: "auto" (all of NumaNodes if they are several, else none), "none", or
// numbers, "0,1". kInvalidArgument naming the part that is no number.
Result<std::vector<uint32_t>> ParseNumaNodes(const std::string& text);

// Pages of this memory that are not there yet come from the node, and from no other. Requires: it
// begins at a page of the system. kInvalidArgument naming the node, if there is none such, and
// those there are; kDeviceError if the system refuses.
Status BindMemory(void* memory, uint64_t bytes, uint32_t node);

// The calling thread runs on CPUs of the node from now on, of those that it may run on. Errors as
// above; kInvalidArgument also if there are none.
Status BindThread(uint32_t node);

}  // namespace embertide
