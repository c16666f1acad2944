// Transforms: what is done to DENSE before the net sees it; one code for trainer and serving.
//
// Each column of DENSE goes through its steps, one after the other, and becomes one column of the
// net's input; a column that says so becomes two, the second 1 where the value is missing and 0
// elsewhere. A missing value is NaN: it takes no step and reads as the column's fill.
//
//   clip         low where x < low, high where x > high
//   log1p        sign(x) log(1 + |x|)
//   standardise  (x - mean) / std
//   quantile     x as a share of fitted values, linear between them, constant beyond them
//   bucketise    the share of the edges that are not above x
//
// Equal bytes go in, equal bytes come out, on every CPU and with every libm: a step is additions,
// multiplications, divisions and comparisons of doubles, and what it gives is rounded to a float,
// so that the next step gets what it was fitted to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "embertide/status.h"

namespace embertide {

inline constexpr uint32_t kTransformsFormat = 1;
// Bounds of a file of transforms: what a request's sample may cost.
inline constexpr size_t kMaxDenseColumns = 4096;
inline constexpr size_t kMaxDenseSteps = 8;
inline constexpr size_t kMaxDensePoints = 256;

enum class StepKind : uint8_t { kClip, kLog1p, kStandardise, kQuantile, kBucketise };

struct DenseStep {
  StepKind kind = StepKind::kLog1p;
  double low = 0;  // these two of clip
  double high = 0;
  double mean = 0;  // these two of standardise
  double std = 1;
  std::vector<double> values;  // of quantile, and the edges of bucketise: strictly ascending
  std::vector<double> shares;  // of quantile: one a value, from 0 to 1, never descending
};

struct DenseColumn {
  std::string name;
  std::vector<DenseStep> steps;
  double fill = 0;       // what a missing value reads as
  bool missing = false;  // whether a second column says so
};

// Immutable after Parse; any number of threads may use one.
class Transforms {
 public:
  // Reads the JSON of docs/formats.md, "Transforms". kCorrupt naming column and field for what is
  // no such text; kRejected for another format.
  static Result<Transforms> Parse(const std::string& text);
  // The JSON; the same for equal transforms.
  std::string text() const;

  const std::vector<DenseColumn>& columns() const { return columns_; }
  size_t inputs() const { return columns_.size(); }  // columns of DENSE
  size_t outputs() const { return outputs_; }        // columns that the net gets

  // Writes the net's samples x outputs() for raw_BD, samples x inputs(). Returns how many values
  // were missing. The values written are finite, whatever comes in.
  // Requires: raw_BD holds whole samples, and `out` has room for as many.
  uint64_t Apply(std::span<const float> raw_BD, float* out) const;
  // The same, where neighbouring samples of one number in `context_of` (kNoContext: of none) have
  // equal values in the columns of `is_context`: those are transformed, and counted, once.
  // Requires: one of `context_of` a sample, one of `is_context` a column.
  uint64_t Apply(std::span<const float> raw_BD, std::span<const uint32_t> context_of,
                 const std::vector<bool>& is_context, float* out) const;
  static constexpr uint32_t kNoContext = ~uint32_t{0};

 private:
  // Writes what one value becomes; whether it was missing.
  static bool ApplyTo(const DenseColumn& column, float raw, float* out);
  Transforms() = default;
  std::vector<DenseColumn> columns_;
  size_t outputs_ = 0;
};

}  // namespace embertide
