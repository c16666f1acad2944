// FormerLayouts: requests whose columns are those of a model as it was before it was changed, for
// clients that do not know yet that it was.
//
//   as sent      KEYS [B, former]   DENSE [B, former]   columns as the manifest lists them
//   (`former`) brought to   KEYS [B, own]      DENSE [B, own]      those that a request of today
//   has to carry
//
// Columns are matched by name. One that came since is a key without a row (in a jagged request an
// empty bag, unless others are made from it), of DENSE a missing value; one that went is dropped.
//
// Knows no Triton. Immutable and thread-safe once it is resolved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "embertide/snapshot.h"
#include "embertide/status.h"
#include "node/made_columns.h"

namespace embertide {

struct FormerLayout {
  uint32_t keys = 0;                     // columns of KEYS as sent
  std::vector<std::string> dense_names;  // columns of DENSE as sent
  // By column that a request is brought to: the column of it that was sent, if any.
  std::vector<std::optional<uint32_t>> key_of;
  std::vector<std::optional<uint32_t>> dense_of;

  uint32_t dense() const { return static_cast<uint32_t>(dense_names.size()); }
};

// A request in today's columns.
struct BroughtRequest {
  std::vector<int64_t> keys;
  std::vector<uint32_t> offsets;  // jagged: samples x columns + 1, ascending; else empty
  std::vector<float> weights;     // one a key; empty without
  std::vector<float> dense;
};

class FormerLayouts {
 public:
  // Knows none.
  FormerLayouts() = default;
  // kCorrupt: the manifest has former layouts and does not name today's columns of DENSE.
  static Result<FormerLayouts> Resolve(const Manifest& manifest, const MadeColumns& made);

  // The newest first.
  const std::vector<FormerLayout>& layouts() const { return layouts_; }

  // `offsets`: of a jagged request, samples x layout.keys + 1 places in `keys`; else empty, and
  // each bag has one key. `weights`: one a key, or none; keys that are added weigh 1.
  void BringKeys(const FormerLayout& layout, std::span<const int64_t> keys,
                 std::span<const uint32_t> offsets, std::span<const float> weights,
                 BroughtRequest* brought) const;
  // `dense`: samples x layout.dense(); what came since gets `missing`.
  static void BringDense(const FormerLayout& layout, std::span<const float> dense, size_t samples,
                         float missing, BroughtRequest* brought);

 private:
  std::vector<FormerLayout> layouts_;
  std::vector<bool> is_source_;  // by column brought to: others are made from it
};

}  // namespace embertide
