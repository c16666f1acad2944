// MadeColumns: the columns of a request that the node makes from the others, so that a request
// need carry no more than an event does.
//
//   as sent       KEYS [B, own]    own columns in the order of the manifest
//   as looked up  KEYS [B, F]      the same with the made columns in their places
//
// A crossed column is a hash of the keys of its features (docs/formats.md). Knows no Triton.
// Immutable and thread-safe once it is resolved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "embertide/snapshot.h"
#include "embertide/status.h"

namespace embertide {

// The key of a cross of several keys, in this order.
int64_t CrossKeys(std::span<const int64_t> keys);

// A request with all of its columns, made ones among them.
struct WholeRequest {
  std::vector<int64_t> keys;
  std::vector<uint32_t> offsets;  // jagged: samples x F + 1, ascending; else empty
  std::vector<float> weights;     // one a key; empty without
};

class MadeColumns {
 public:
  // Makes nothing.
  MadeColumns() = default;
  // kCorrupt naming the feature that the manifest describes wrongly.
  static Result<MadeColumns> Resolve(const Manifest& manifest);

  // Whether a request may leave columns out.
  bool any() const { return own_.size() < crossed_.size(); }
  // Columns of KEYS that a request has to carry.
  uint32_t own_columns() const { return static_cast<uint32_t>(own_.size()); }

  // Completes a request of own columns. `offsets`: of a jagged request, samples x own + 1 places in
  // `keys`; else empty, and each bag has one key. `weights`: one a key, or none; made keys weigh 1.
  // kInvalidArgument naming sample and feature: a column is made from a bag of other than one key.
  Status Complete(std::span<const int64_t> keys, std::span<const uint32_t> offsets,
                  std::span<const float> weights, WholeRequest* whole) const;

 private:
  // A request's own keys of one sample, by own column.
  struct Sample {
    std::span<const int64_t> keys;
    std::span<const uint32_t> offsets;
    size_t first_bag = 0;
  };
  Result<int64_t> OneKeyOf(const Sample& sample, size_t feature) const;

  std::vector<uint32_t> own_;  // features that a request carries
  // By feature: the features that it crosses, empty of those that are not crossed.
  std::vector<std::vector<uint32_t>> crossed_;
  std::vector<uint32_t> place_;  // by feature: its place among the own columns, if it is one
  std::vector<std::string> names_;
};

}  // namespace embertide
