// Our metrics on Triton's /metrics page: families of the backend, values of each model.
//
//   embertide_lookup_keys_total{model,table,source}     embertide_rows{model}
//   embertide_default_returned_total{model}             embertide_tier_bytes{model,tier}
//   embertide_requests_refused_total{model,reason}      embertide_version{model}
//   embertide_bus_events_total{model,event}             embertide_plan_epoch{model}
//   embertide_fleet_events_total{model,event}           embertide_buckets{model,state}
//   embertide_peers_alive{model}
//   embertide_bus_connected{model}                      embertide_watermark_ms{model}
//
// Executions add to atomics of ours; a thread of each model brings them to Triton once a second and
// once at the end, so a request pays no lock of Triton's.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "embertide/node.h"
#include "triton/request.h"
#include "triton/triton_abi.h"

namespace embertide::triton {

inline constexpr size_t kBusEvents = 10;

// The families; one of it in the backend, outliving every ModelMetrics. With a server that has
// metrics off, everything here does nothing.
struct MetricFamilies {
  MetricFamilies();
  ~MetricFamilies();
  MetricFamilies(const MetricFamilies&) = delete;
  MetricFamilies& operator=(const MetricFamilies&) = delete;

  TRITONSERVER_MetricFamily* keys = nullptr;
  TRITONSERVER_MetricFamily* defaults = nullptr;
  TRITONSERVER_MetricFamily* refused = nullptr;
  TRITONSERVER_MetricFamily* rows = nullptr;
  TRITONSERVER_MetricFamily* tier_bytes = nullptr;
  TRITONSERVER_MetricFamily* version = nullptr;
  TRITONSERVER_MetricFamily* plan_epoch = nullptr;
  TRITONSERVER_MetricFamily* bus_events = nullptr;
  TRITONSERVER_MetricFamily* bus_connected = nullptr;
  TRITONSERVER_MetricFamily* fleet_events = nullptr;
  TRITONSERVER_MetricFamily* buckets = nullptr;
  TRITONSERVER_MetricFamily* peers = nullptr;
  TRITONSERVER_MetricFamily* watermark = nullptr;
  TRITONSERVER_MetricFamily* freshness = nullptr;
  TRITONSERVER_MetricFamily* rows_moved = nullptr;
  TRITONSERVER_MetricFamily* rows_refused = nullptr;
  TRITONSERVER_MetricFamily* ssd_engine = nullptr;
  TRITONSERVER_MetricFamily* ssd_bytes = nullptr;
  TRITONSERVER_MetricFamily* ssd_errors = nullptr;
};

// Thread-safe. Requires: families and node outlive it.
class ModelMetrics {
 public:
  ModelMetrics(const MetricFamilies& families, const std::string& model, const Node& node);
  ~ModelMetrics();
  ModelMetrics(const ModelMetrics&) = delete;
  ModelMetrics& operator=(const ModelMetrics&) = delete;

  void AddKeys(uint32_t table, const SourceCounts& counts);
  void AddRefused(Reason reason) { ++refused_[static_cast<size_t>(reason)]; }

 private:
  // A value of ours and its metric. A counter gets the difference, a gauge the value.
  struct Series {
    TRITONSERVER_Metric* metric = nullptr;
    bool counter = false;
    uint64_t shown = 0;
  };
  using Labels = std::vector<std::pair<const char*, std::string>>;

  Series Make(TRITONSERVER_MetricFamily* family, bool counter, const Labels& labels);
  static void Show(Series* series, uint64_t value);
  void Publish();
  void Run();

  const Node& node_;
  std::string model_;
  std::vector<std::array<std::atomic<uint64_t>, kSources>> keys_;  // by table
  std::array<std::atomic<uint64_t>, kReasons> refused_{};
  std::vector<std::array<Series, kSources>> keys_series_;
  std::array<Series, kReasons> refused_series_;
  std::array<Series, 4> tier_series_;  // ddr, ssd, index, hbm
  std::array<Series, kBusEvents> bus_series_;
  std::array<Series, kFleetEvents.size()> fleet_series_;
  std::array<Series, 2> buckets_series_;  // held, left
  Series peers_series_;
  Series ssd_engine_series_;
  std::array<Series, 4> ssd_bytes_series_;   // as kSsdBytes
  std::array<Series, 3> ssd_errors_series_;  // as kSsdErrors
  Series defaults_series_, rows_series_, version_series_, epoch_series_, watermark_series_,
      connected_series_, freshness_series_, evicted_series_, promoted_series_, rows_refused_series_;
  std::string bus_error_;  // shown last in the log
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses the members above
};

}  // namespace embertide::triton
