// TableConfig: what a table is. Shared by store, files and node.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "embertide/row.h"

namespace embertide {

inline constexpr uint32_t kMaxBucketBits = 17;

struct TableConfig {
  std::string name;  // unique in a model; [a-z0-9_]+
  uint32_t id = 0;   // unique in a model; the number that init, bus and files use
  RowLayout layout;
  uint32_t bucket_bits = 0;        // 2^bucket_bits buckets, fixed at creation
  uint64_t init_seed = 0;          // of InitialValue
  float init_scale = 0.01F;        // of InitialValue
  std::vector<float> default_row;  // dim values, what an unknown key reads as; empty = zeros
  // Training: so many chunks, the last ones, hold counts (Store::AddCounts) and not what gradients
  // teach. They live as long as their row. To who reads a row they are values like others.
  uint16_t counter_chunks = 0;

  uint32_t buckets() const { return 1U << bucket_bits; }
  // The part of a row that gradients teach; no chunk of a row of keys.
  RowLayout learned() const {
    RowLayout learned = layout;
    learned.chunks = static_cast<uint16_t>(layout.is_keys() ? 0 : layout.chunks - counter_chunks);
    return learned;
  }
  // kInvalidArgument naming the table and the field.
  Status Validate() const;
};

}  // namespace embertide
