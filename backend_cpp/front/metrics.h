// Metrics: what the front counts, on Triton's page of metrics; docs/serving.md says what each is.
//
// Labels are of closed lists, so the page is bounded. Counters are atomics of the front's, which
// Publish brings to Triton. Durations go there one by one, once their answer has been sent: that
// takes a short lock each.
//
// Thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "front/core.h"
#include "front/service.h"
#include "front/stages.h"
#include "triton/make_metric.h"

namespace embertide::front {

class Metrics final : public StageListener {
 public:
  // `spans`: OPTIONAL. Requires: all outlive it, and no inference is answered once it ends.
  Metrics(const Core& core, Service& service, const Spans* spans);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  void Publish();
  void Hear(const StageTimes& times) const override;

 private:
  using Labels = triton::Labels;
  enum class Kind : uint8_t { kCounter, kGauge };
  struct Series {
    TRITONSERVER_MetricFamily* family = nullptr;
    Kind kind = Kind::kGauge;
    Labels labels;
    std::function<uint64_t()> value;
    TRITONSERVER_Metric* metric = nullptr;  // null until it is shown
    uint64_t shown = 0;
  };
  TRITONSERVER_MetricFamily* Family(const char* name, TRITONSERVER_MetricKind kind,
                                    const char* help);
  TRITONSERVER_Metric* Make(TRITONSERVER_MetricFamily* family, const Labels& labels,
                            std::span<const double> buckets) const;
  void Add(TRITONSERVER_MetricFamily* family, Kind kind, Labels labels,
           std::function<uint64_t()> value);
  void Observe(TRITONSERVER_Metric* metric, double us) const;

  const Core& core_;
  Service& service_;
  std::vector<TRITONSERVER_MetricFamily*> families_;
  TRITONSERVER_Metric* whole_us_ = nullptr;
  std::array<TRITONSERVER_Metric*, kStages.size()> stage_us_{};
  std::mutex mutex_;
  std::vector<Series> series_;  // under mutex_
};

}  // namespace embertide::front
