// A metric on Triton's page, made through Triton's calls: the backend links them, the front end
// opens them when it starts.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "triton/triton_abi.h"

namespace embertide::triton {

using Labels = std::vector<std::pair<const char*, std::string>>;

// Returns a metric of a family, which the caller deletes; null if a call failed.
//
// `buckets`: upper bounds of those of a histogram, none of another kind. `calls` has Triton's calls
// by their names without TRITONSERVER_. `worked` frees an error, logs it, and returns whether there
// was none.
template <typename Calls, typename Worked>
TRITONSERVER_Metric* MakeMetric(const Calls& calls, const Worked& worked,
                                TRITONSERVER_MetricFamily* family, const Labels& labels,
                                std::span<const double> buckets) {
  TRITONSERVER_MetricArgs* args = nullptr;
  if (!buckets.empty()) {
    if (!worked(calls.MetricArgsNew(&args))) return nullptr;
    if (!worked(calls.MetricArgsSetHistogram(args, buckets.data(), buckets.size()))) {
      worked(calls.MetricArgsDelete(args));
      return nullptr;
    }
  }
  std::vector<const TRITONSERVER_Parameter*> parameters;
  for (const auto& [label, text] : labels) {
    parameters.push_back(calls.ParameterNew(label, TRITONSERVER_PARAMETER_STRING, text.c_str()));
  }
  TRITONSERVER_Metric* metric = nullptr;
  const bool made =
      worked(calls.MetricNewWithArgs(&metric, family, parameters.data(), parameters.size(), args));
  if (args != nullptr) worked(calls.MetricArgsDelete(args));
  for (const auto* parameter : parameters) {
    calls.ParameterDelete(const_cast<TRITONSERVER_Parameter*>(parameter));
  }
  return made ? metric : nullptr;
}

}  // namespace embertide::triton
