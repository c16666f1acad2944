// Transforms: what is read is read as the same again, and makes finite values of any.
//
//   input: the text, a zero byte, and floats to transform
#include <cmath>
#include <limits>

#include "embertide/transform.h"
#include "fuzz/fuzz.h"

namespace embertide::fuzz {

std::vector<std::string> Seeds() {
  const std::string steps = R"({"kind": "clip", "low": -2.5, "high": 1e6}, {"kind": "log1p"},
      {"kind": "standardise", "mean": 0.1, "std": 3}, {"kind": "quantile", "values": [-1, 0.5, 2],
      "shares": [0, 0.25, 1]}, {"kind": "bucketise", "edges": [0.1, 0.7]})";
  const std::string text = R"({"format": 1, "columns": [
      {"name": "a", "steps": [)" +
                           steps + R"(], "fill": -1, "missing": true},
      {"name": "b", "steps": [], "fill": 0, "missing": false}]})";
  return {text + '\0' + Raw(1.5F) + Raw(std::numeric_limits<float>::quiet_NaN()), "{}"};
}

void Run(std::string_view input) {
  const std::string_view text = input.substr(0, input.find('\0'));
  input.remove_prefix(std::min(input.size(), text.size() + 1));
  const auto transforms = Transforms::Parse(std::string(text));
  if (!transforms.ok()) {
    const Code code = transforms.status().code();
    EMBERTIDE_CHECK(code == Code::kCorrupt || code == Code::kRejected);
    return;
  }
  const Transforms& read = transforms.value();
  const auto again = Transforms::Parse(read.text());
  EMBERTIDE_CHECK(again.ok() && again.value().text() == read.text());
  std::vector<float> raw(read.inputs() * 3);
  uint64_t missing = 0;
  for (float& value : raw) {
    value = Take<float>(&input);
    missing += std::isnan(value) ? 1 : 0;
  }
  std::vector<float> out(read.outputs() * 3);
  EMBERTIDE_CHECK(read.Apply(raw, out.data()) == missing);
  for (const float value : out) EMBERTIDE_CHECK(std::isfinite(value));
}

}  // namespace embertide::fuzz
