// TableConfig: what makes a table impossible.
#include "embertide/table.h"

#include <algorithm>
#include <cmath>

namespace embertide {

Status TableConfig::Validate() const {
  const auto bad = [&](const std::string& what) {
    return Status(Code::kInvalidArgument, "table \"" + name + "\": " + what);
  };
  const bool plain = std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
  });
  if (name.empty() || name.size() > 64 || !plain) {
    return bad("a name is 1 to 64 characters of a-z, 0-9 and _");
  }
  if (const Status layout_status = layout.Validate(); !layout_status.ok()) {
    return bad(layout_status.message());
  }
  if (bucket_bits > kMaxBucketBits) {
    return bad("bucket_bits = " + std::to_string(bucket_bits) + " exceeds " +
               std::to_string(kMaxBucketBits));
  }
  if (!std::isfinite(init_scale) || init_scale < 0) {
    return bad("init_scale = " + std::to_string(init_scale) + " is not finite, or negative");
  }
  if (counter_chunks > 0 && (counter_chunks >= layout.chunks || layout.dtype != DType::kFp32)) {
    return bad("counter_chunks = " + std::to_string(counter_chunks) + " of " +
               std::to_string(layout.chunks) + " chunks of " + DTypeName(layout.dtype) +
               ": counts need fp32, and a row something that is learned");
  }
  if (layout.is_keys() && !default_row.empty()) return bad("default_row: rows of keys have none");
  if (!default_row.empty() && default_row.size() != layout.dim()) {
    return bad("default_row has " + std::to_string(default_row.size()) + " values, dim is " +
               std::to_string(layout.dim()));
  }
  for (const float value : default_row) {
    if (!std::isfinite(value)) return bad("default_row holds " + std::to_string(value));
  }
  return Status::Ok();
}

}  // namespace embertide
