// Transforms: their JSON, and the arithmetic. Built without contraction to fused operations, which
// some CPUs have and others lack.
#include "embertide/transform.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <limits>

#include "base/json.h"

namespace embertide {
namespace {

constexpr double kMost = std::numeric_limits<float>::max();
constexpr double kMinStd = std::numeric_limits<float>::min();
constexpr std::array<const char*, 5> kKindNames = {"clip", "log1p", "standardise", "quantile",
                                                   "bucketise"};

// --- arithmetic ----------------------------------------------------------------------------------

// log(1 + x) for 0 <= x <= kMost, by operations that IEEE 754 says the bits of: what a libm gives
// differs by its version and by the CPU. Within 2 units in the last place.
double Log1p(double x) {
  constexpr double kRootHalf = 0.70710678118654752;
  // log(2), its upper part with zeros enough for a product with any exponent to be exact.
  constexpr double kLn2Upper = 6.93147180369123816490e-01;
  constexpr double kLn2Lower = 1.90821492927058770002e-10;
  const double sum = 1 + x;
  // The amount that the sum was rounded by; log(sum + lost) is log(sum) + lost / sum.
  const double lost = x < 1 ? x - (sum - 1) : 1 - (sum - x);
  int exponent = 0;
  double fraction = std::frexp(sum, &exponent);
  if (fraction < kRootHalf) {
    fraction *= 2;
    --exponent;
  }
  // log(f) = 2 atanh(s) with s = (f - 1) / (f + 1), at most 0.172: what the 12th term leaves is
  // below 2^-60 of it.
  const double s = (fraction - 1) / (fraction + 1);
  const double square = s * s;
  double series = 0;
  for (int term = 23; term >= 3; term -= 2) series = (series + 1.0 / term) * square;
  const double log_fraction = 2 * s + 2 * s * series;
  return exponent * kLn2Upper + (log_fraction + (exponent * kLn2Lower + lost / sum));
}

float Finite(double x) { return static_cast<float>(std::clamp(x, -kMost, kMost)); }

double Share(const DenseStep& step, double x) {
  const auto after = std::upper_bound(step.values.begin(), step.values.end(), x);
  const auto at = static_cast<size_t>(after - step.values.begin());
  if (step.kind == StepKind::kBucketise) {
    return static_cast<double>(at) / static_cast<double>(step.values.size());
  }
  if (at == 0) return step.shares.front();
  if (at == step.values.size()) return step.shares.back();
  const double way = (x - step.values[at - 1]) / (step.values[at] - step.values[at - 1]);
  return step.shares[at - 1] + way * (step.shares[at] - step.shares[at - 1]);
}

double Take(const DenseStep& step, double x) {
  switch (step.kind) {
    case StepKind::kClip:
      return std::clamp(x, step.low, step.high);
    case StepKind::kLog1p:
      return x < 0 ? -Log1p(-x) : Log1p(x);
    case StepKind::kStandardise:
      return (x - step.mean) / step.std;
    case StepKind::kQuantile:
    case StepKind::kBucketise:
      return Share(step, x);
  }
  return x;
}

// --- JSON ----------------------------------------------------------------------------------------

[[noreturn]] void Refuse(const std::string& what) { throw std::invalid_argument(what); }

// Throws naming a field that is none of these.
void CheckFields(const OrderedJson& object, std::initializer_list<const char*> fields) {
  if (!object.is_object()) Refuse(object.dump() + " is no object");
  for (const auto& [name, value] : object.items()) {
    if (std::find(fields.begin(), fields.end(), name) == fields.end()) {
      Refuse("field \"" + name + "\" is not understood");
    }
  }
}

double Number(const OrderedJson& json, const char* name) {
  if (!json.is_number() || !(std::abs(json.get<double>()) <= kMost)) {
    Refuse(std::string("field \"") + name + "\" cannot be " + json.dump() +
           "; give numbers that fit 32-bit floats");
  }
  return json.get<double>();
}

std::vector<double> Numbers(const OrderedJson& object, const char* name) {
  const OrderedJson& list = object.at(name);
  if (!list.is_array() || list.empty() || list.size() > kMaxDensePoints) {
    Refuse(std::string("field \"") + name + "\" is no list of 1 to " +
           std::to_string(kMaxDensePoints) + " numbers");
  }
  std::vector<double> numbers;
  for (const OrderedJson& each : list) numbers.push_back(Number(each, name));
  return numbers;
}

std::vector<double> Ascending(const OrderedJson& object, const char* name) {
  std::vector<double> numbers = Numbers(object, name);
  const auto wrong = std::adjacent_find(numbers.begin(), numbers.end(), std::greater_equal<>());
  if (wrong != numbers.end()) {
    Refuse(std::string("field \"") + name + "\" does not ascend after " +
           OrderedJson(*wrong).dump());
  }
  return numbers;
}

DenseStep ClipFromJson(const OrderedJson& json) {
  CheckFields(json, {"kind", "low", "high"});
  DenseStep step;
  step.kind = StepKind::kClip;
  step.low = Number(json.at("low"), "low");
  step.high = Number(json.at("high"), "high");
  if (step.low > step.high) Refuse("field \"low\" is above \"high\"");
  return step;
}

DenseStep StandardiseFromJson(const OrderedJson& json) {
  CheckFields(json, {"kind", "mean", "std"});
  DenseStep step;
  step.kind = StepKind::kStandardise;
  step.mean = Number(json.at("mean"), "mean");
  step.std = Number(json.at("std"), "std");
  if (step.std < kMinStd) Refuse("field \"std\" is " + json.at("std").dump() + ", not above 0");
  return step;
}

DenseStep QuantileFromJson(const OrderedJson& json) {
  CheckFields(json, {"kind", "values", "shares"});
  DenseStep step;
  step.kind = StepKind::kQuantile;
  step.values = Ascending(json, "values");
  step.shares = Numbers(json, "shares");
  if (step.shares.size() != step.values.size() ||
      !std::is_sorted(step.shares.begin(), step.shares.end()) || step.shares.front() < 0 ||
      step.shares.back() > 1) {
    Refuse("field \"shares\" is not, for each of \"values\", a number from 0 to 1, ascending");
  }
  return step;
}

DenseStep BucketiseFromJson(const OrderedJson& json) {
  CheckFields(json, {"kind", "edges"});
  DenseStep step;
  step.kind = StepKind::kBucketise;
  step.values = Ascending(json, "edges");
  return step;
}

DenseStep StepFromJson(const OrderedJson& json) {
  std::string kind;
  Read(json, "kind", &kind);
  if (kind == "clip") return ClipFromJson(json);
  if (kind == "standardise") return StandardiseFromJson(json);
  if (kind == "quantile") return QuantileFromJson(json);
  if (kind == "bucketise") return BucketiseFromJson(json);
  if (kind != "log1p") Refuse("step \"" + kind + "\" does not exist");
  CheckFields(json, {"kind"});
  return {};
}

OrderedJson StepToJson(const DenseStep& step) {
  OrderedJson json = {{"kind", kKindNames.at(static_cast<size_t>(step.kind))}};
  switch (step.kind) {
    case StepKind::kClip:
      json.update({{"low", step.low}, {"high", step.high}});
      break;
    case StepKind::kLog1p:
      break;
    case StepKind::kStandardise:
      json.update({{"mean", step.mean}, {"std", step.std}});
      break;
    case StepKind::kQuantile:
      json.update({{"values", step.values}, {"shares", step.shares}});
      break;
    case StepKind::kBucketise:
      json.update({{"edges", step.values}});
      break;
  }
  return json;
}

DenseColumn ColumnFromJson(const OrderedJson& json) {
  DenseColumn column;
  Read(json, "name", &column.name);
  try {
    CheckFields(json, {"name", "steps", "fill", "missing"});
    const OrderedJson& steps = json.at("steps");
    if (!steps.is_array() || steps.size() > kMaxDenseSteps) {
      Refuse("field \"steps\" is no list of " + std::to_string(kMaxDenseSteps) + " at most");
    }
    for (const OrderedJson& step : steps) column.steps.push_back(StepFromJson(step));
    column.fill = Number(json.at("fill"), "fill");
    Read(json, "missing", &column.missing);
  } catch (const std::exception& error) {
    Refuse("column \"" + column.name + "\": " + error.what());
  }
  return column;
}

OrderedJson ColumnToJson(const DenseColumn& column) {
  OrderedJson steps = OrderedJson::array();
  for (const DenseStep& step : column.steps) steps.push_back(StepToJson(step));
  return {
      {"name", column.name}, {"steps", steps}, {"fill", column.fill}, {"missing", column.missing}};
}

}  // namespace

Result<Transforms> Transforms::Parse(const std::string& text) {
  try {
    const OrderedJson json = OrderedJson::parse(text);
    uint32_t format = 0;
    Read(json, "format", &format);
    if (format != kTransformsFormat) {
      return Status(Code::kRejected, "transforms: format is " + std::to_string(format) +
                                         ", this build reads " + std::to_string(kTransformsFormat));
    }
    CheckFields(json, {"format", "columns"});
    const OrderedJson& columns = json.at("columns");
    if (!columns.is_array() || columns.size() > kMaxDenseColumns) {
      Refuse("field \"columns\" is no list of " + std::to_string(kMaxDenseColumns) + " at most");
    }
    Transforms transforms;
    for (const OrderedJson& column : columns) {
      transforms.columns_.push_back(ColumnFromJson(column));
      transforms.outputs_ += transforms.columns_.back().missing ? 2 : 1;
    }
    return transforms;
  } catch (const std::exception& error) {
    return Status(Code::kCorrupt, std::string("transforms: ") + error.what());
  }
}

std::string Transforms::text() const {
  OrderedJson columns = OrderedJson::array();
  for (const DenseColumn& column : columns_) columns.push_back(ColumnToJson(column));
  return OrderedJson{{"format", kTransformsFormat}, {"columns", columns}}.dump(1) + "\n";
}

bool Transforms::ApplyTo(const DenseColumn& column, float raw, float* out) {
  const bool gone = std::isnan(raw);
  float value = gone ? static_cast<float>(column.fill) : Finite(raw);
  for (size_t s = 0; !gone && s < column.steps.size(); ++s) {
    value = Finite(Take(column.steps[s], value));
  }
  *out = value;
  if (column.missing) out[1] = gone ? 1.0F : 0.0F;
  return gone;
}

uint64_t Transforms::Apply(std::span<const float> raw_BD, float* out) const {
  uint64_t missing = 0;
  const size_t values = columns_.empty() ? 0 : raw_BD.size();
  for (size_t at = 0; at < values; at += columns_.size()) {
    for (size_t c = 0; c < columns_.size(); ++c) {
      missing += ApplyTo(columns_[c], raw_BD[at + c], out) ? 1 : 0;
      out += columns_[c].missing ? 2 : 1;
    }
  }
  return missing;
}

uint64_t Transforms::Apply(std::span<const float> raw_BD, std::span<const uint32_t> context_of,
                           const std::vector<bool>& is_context, float* out) const {
  uint64_t missing = 0;
  for (size_t s = 0; s < context_of.size(); ++s) {
    const bool known = s > 0 && context_of[s] != kNoContext && context_of[s] == context_of[s - 1];
    const float* raw = raw_BD.data() + s * columns_.size();
    for (size_t c = 0; c < columns_.size(); ++c) {
      const size_t width = columns_[c].missing ? 2 : 1;
      if (known && is_context[c]) {
        std::copy_n(out - outputs_, width, out);
      } else {
        missing += ApplyTo(columns_[c], raw[c], out) ? 1 : 0;
      }
      out += width;
    }
  }
  return missing;
}

}  // namespace embertide
