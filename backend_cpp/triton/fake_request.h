// A request as Triton hands it over, for programs without a server: its C functions in this
// process, as far as tensor_io.cc calls them. Outputs cannot be made.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "triton/tensor_io.h"

namespace embertide::triton {

struct FakeInput {
  std::string name;
  TRITONSERVER_DataType dtype = TRITONSERVER_TYPE_INVALID;
  std::vector<int64_t> shape;
  std::vector<std::string> buffers;  // pieces of its bytes, at any address
  TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
};

struct FakeRequest {
  std::vector<FakeInput> inputs;
  std::optional<int64_t> version;  // the request parameter
  uint64_t timeout_us = 0;
  bool cancelled = false;

  // Lives as long as this does.
  TRITONBACKEND_Request* handle() { return reinterpret_cast<TRITONBACKEND_Request*>(this); }
};

}  // namespace embertide::triton
