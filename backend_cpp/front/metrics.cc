// The front's metrics, through Triton's calls for metrics of others.
#include "front/metrics.h"

#include <utility>

namespace embertide::front {
namespace {

// Upper bounds of buckets, about three a decade.
constexpr double kDurationsUs[] = {5,    10,   20,    50,    100,   200,    500,    1000,
                                   2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000};

}  // namespace

Metrics::Metrics(const Core& core, Service& service, const Spans* spans)
    : core_(core), service_(service) {
  const auto counter = [this](const char* name, const char* help) {
    return Family(name, TRITONSERVER_METRIC_KIND_COUNTER, help);
  };
  const auto gauge = [this](const char* name, const char* help) {
    return Family(name, TRITONSERVER_METRIC_KIND_GAUGE, help);
  };
  auto* family = counter("embertide_front_calls_total",
                         "Calls that have ended, by method and the code of their end");
  for (size_t method = 0; method < kMethods.size(); ++method) {
    for (size_t code = 0; code < kCodes; ++code) {
      Add(family, Kind::kCounter,
          {{"method", std::string(kMethods[method])}, {"code", std::string(CodeName(code))}},
          [this, method, code] { return service_.tally().calls(method, code); });
    }
  }
  family = counter("embertide_front_refused_total",
                   "Calls refused before Triton heard of them, by reason");
  for (size_t why = 0; why < kRefusedNames.size(); ++why) {
    Add(family, Kind::kCounter, {{"reason", std::string(kRefusedNames[why])}},
        [this, why] { return service_.tally().refused(why); });
  }
  Add(family, Kind::kCounter, {{"reason", "late"}}, [this] { return service_.late(); });
  Add(counter("embertide_front_connections_refused_total",
              "Connections closed at once, as all places were taken"),
      Kind::kCounter, {}, [this] { return service_.doorway().refused(); });
  Add(gauge("embertide_front_connections", "Connections of callers"), Kind::kGauge, {},
      [this] { return service_.doorway().connections(); });
  Add(gauge("embertide_front_inferences", "Inferences at work"), Kind::kGauge, {},
      [this] { return service_.inferences().at_work(); });
  Add(gauge("embertide_front_bytes", "Bytes of requests and answers at work"), Kind::kGauge, {},
      [this] { return service_.inferences().bytes(); });
  family = gauge("embertide_front_limit", "The most that there may be, by what");
  const ServiceOptions& options = service.options();
  const Callers::Limits& of_one = service.inferences().limits_of_one();
  for (const auto& [of, most] :
       {std::pair<const char*, uint64_t>("connections", options.max_connections),
        std::pair<const char*, uint64_t>("inferences", options.infer.max_calls),
        std::pair<const char*, uint64_t>("bytes", options.infer.max_bytes),
        std::pair<const char*, uint64_t>("caller_inferences", of_one.calls),
        std::pair<const char*, uint64_t>("caller_bytes", of_one.bytes)}) {
    Add(family, Kind::kGauge, {{"of", of}}, [most = most] { return most; });
  }
  if (spans != nullptr) {
    family = counter("embertide_front_spans_total",
                     "Spans, by whether the collector took them, or too many waited for it");
    Add(family, Kind::kCounter, {{"what", "sent"}}, [spans] { return spans->sent(); });
    Add(family, Kind::kCounter, {{"what", "dropped"}}, [spans] { return spans->dropped(); });
    Add(family, Kind::kCounter, {{"what", "failed"}}, [spans] { return spans->failed(); });
  }
  whole_us_ = Make(Family("embertide_front_request_us", TRITONSERVER_METRIC_KIND_HISTOGRAM,
                          "From the last byte of a request to its answer's sending"),
                   {}, kDurationsUs);
  family = Family("embertide_front_stage_us", TRITONSERVER_METRIC_KIND_HISTOGRAM,
                  "Where the time of a request went, by stage");
  for (size_t s = 0; s < kStages.size(); ++s) {
    stage_us_[s] = Make(family, {{"stage", std::string(kStages[s])}}, kDurationsUs);
  }
  Publish();
  service_.SetStageListener(this);
}

Metrics::~Metrics() {
  service_.SetStageListener(nullptr);
  const Calls& calls = core_.calls();
  std::vector<TRITONSERVER_Metric*> metrics(stage_us_.begin(), stage_us_.end());
  metrics.push_back(whole_us_);
  for (const Series& series : series_) metrics.push_back(series.metric);
  for (TRITONSERVER_Metric* metric : metrics) {
    if (metric != nullptr) core_.Worked(calls.MetricDelete(metric), "a metric");
  }
  for (TRITONSERVER_MetricFamily* family : families_) {
    core_.Worked(calls.MetricFamilyDelete(family), "a family of metrics");
  }
}

TRITONSERVER_MetricFamily* Metrics::Family(const char* name, TRITONSERVER_MetricKind kind,
                                           const char* help) {
  TRITONSERVER_MetricFamily* family = nullptr;
  if (!core_.Worked(core_.calls().MetricFamilyNew(&family, kind, name, help), name)) return nullptr;
  families_.push_back(family);
  return family;
}

TRITONSERVER_Metric* Metrics::Make(TRITONSERVER_MetricFamily* family, const Labels& labels,
                                   std::span<const double> buckets) const {
  if (family == nullptr) return nullptr;
  const auto worked = [this](TRITONSERVER_Error* error) { return core_.Worked(error, "a metric"); };
  return triton::MakeMetric(core_.calls(), worked, family, labels, buckets);
}

void Metrics::Add(TRITONSERVER_MetricFamily* family, Kind kind, Labels labels,
                  std::function<uint64_t()> value) {
  const std::lock_guard lock(mutex_);
  if (family != nullptr) series_.push_back({family, kind, std::move(labels), std::move(value)});
}

void Metrics::Publish() {
  const Calls& calls = core_.calls();
  const std::lock_guard lock(mutex_);
  for (Series& series : series_) {
    const uint64_t value = series.value();
    // Most pairs of method and code never are. Those of inferences are shown from the start: a
    // rate knows nothing of what a series began with.
    const bool is_rare = series.labels.size() > 1 && series.labels[0].second != kMethods[0];
    if (series.metric == nullptr && value == 0 && is_rare) continue;
    if (series.metric == nullptr) series.metric = Make(series.family, series.labels, {});
    if (series.metric == nullptr || series.shown == value) continue;
    core_.Worked(
        series.kind == Kind::kCounter
            ? calls.MetricIncrement(series.metric, static_cast<double>(value - series.shown))
            : calls.MetricSet(series.metric, static_cast<double>(value)),
        "a metric");
    series.shown = value;
  }
}

void Metrics::Hear(const StageTimes& times) const {
  Observe(whole_us_, times.whole_us);
  for (size_t s = 0; s < kStages.size(); ++s) Observe(stage_us_[s], times.us[s]);
}

void Metrics::Observe(TRITONSERVER_Metric* metric, double us) const {
  if (metric != nullptr && us >= 0)
    core_.Worked(core_.calls().MetricObserve(metric, us), "a metric");
}

}  // namespace embertide::front
