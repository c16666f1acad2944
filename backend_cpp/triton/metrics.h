// Our metrics on Triton's /metrics page: families of the backend, values of each model. The name
// and meaning of each stand in docs/serving.md, once more in kFamilies (metrics.cc); every value
// has the label `model`.
//
// Labels are of closed lists and of the model's tables, devices and HBM devices, so the page is
// bounded. Executions add to atomics of ours; a thread of each model brings them to Triton once a
// second and once at the end. Durations alone go there at once, since Triton takes them one by one:
// an execution's lookup pays one short lock.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/background_task.h"
#include "base/mutex.h"
#include "embertide/node.h"
#include "triton/make_metric.h"
#include "triton/request.h"
#include "triton/triton_abi.h"

namespace embertide::triton {

// The families; one of it in the backend, outliving every ModelMetrics. With a server that has
// metrics off, everything here does nothing.
class MetricFamilies {
 public:
  MetricFamilies();
  ~MetricFamilies();
  MetricFamilies(const MetricFamilies&) = delete;
  MetricFamilies& operator=(const MetricFamilies&) = delete;

  struct Family {
    TRITONSERVER_MetricFamily* family = nullptr;  // null: metrics are off
    TRITONSERVER_MetricKind kind = TRITONSERVER_METRIC_KIND_GAUGE;
  };
  // Requires: `name` is one of kFamilies.
  const Family& Of(const std::string& name) const { return families_.at(name); }

  // A metric of a model, which the caller deletes; null where metrics are off.
  TRITONSERVER_Metric* Make(const std::string& name, const std::string& model,
                            const Labels& labels) const;

  // A load of a model has ended.
  void AddLoad(const std::string& model, bool loaded);

  // While Triton loads a model again, two of its name are alive, whose series are the same: the
  // one that came last says what gauges are, and both add to counters. Thread-safe.
  void Enter(const std::string& model, const void* who);
  void Leave(const std::string& model, const void* who);
  bool IsLast(const std::string& model, const void* who) const;

 private:
  mutable Mutex mutex_;
  // By model, in the order they came.
  std::map<std::string, std::vector<const void*>> alive_ EMBERTIDE_GUARDED_BY(mutex_);
  std::map<std::pair<std::string, bool>, TRITONSERVER_Metric*> loads_ EMBERTIDE_GUARDED_BY(mutex_);
  std::map<std::string, Family> families_;
};

// Thread-safe. Requires: families and node outlive it.
class ModelMetrics {
 public:
  // `server_version` is Triton's.
  ModelMetrics(MetricFamilies& families, const std::string& model, const Node& node,
               const std::string& server_version);
  ~ModelMetrics();
  ModelMetrics(const ModelMetrics&) = delete;
  ModelMetrics& operator=(const ModelMetrics&) = delete;

  void AddKeys(uint32_t table, const SourceCounts& counts);
  void AddRefused(Reason reason) { ++refused_[static_cast<size_t>(reason)]; }
  void AddFormer() { ++former_; }
  // A request with contexts; `keys_saved`: what their samples would have had more.
  void AddContexts(uint64_t contexts, uint64_t samples, uint64_t keys_saved) {
    ++of_contexts_[0];
    of_contexts_[1] += contexts;
    of_contexts_[2] += samples;
    of_contexts_[3] += keys_saved;
  }
  // Candidates whose context's part of the dense net was computed once for all of them.
  void AddOnceAContext(uint64_t candidates) { of_contexts_[4] += candidates; }
  void AddMissing(uint64_t values) { missing_ += values; }
  // Rows of one group of requests were found and pooled, peers' among them, in so long.
  void AddLookup(std::chrono::nanoseconds duration) const;

 private:
  // The values that one round of publishing reads, once.
  struct Sample {
    StoreStats store;
    FleetStats fleet;
    std::vector<Store::Usage> tables;  // of all devices
    std::vector<TaskHealth> tasks;     // by name, of the node and the process
  };
  // A metric, and what says its value. A counter gets the difference, a gauge the value.
  struct Series {
    TRITONSERVER_Metric* metric = nullptr;
    bool counter = false;
    uint64_t shown = 0;
    std::function<uint64_t(const Sample&)> value;
  };
  void Add(const char* family, const Labels& labels, std::function<uint64_t(const Sample&)> value);
  void AddOfServer(const std::string& version);
  void AddOfTables();
  void AddOfStore();
  void AddOfGuard();
  void AddOfSsd();
  void AddOfHbm(size_t devices);
  void AddOfBus();
  void AddOfFleet();
  void AddOfWarmUp();
  void AddOfTasks();
  void Publish();

  MetricFamilies& families_;
  const Node& node_;
  std::string model_;
  std::vector<std::array<std::atomic<uint64_t>, kSources>> keys_;  // by table
  std::array<std::atomic<uint64_t>, kReasons> refused_{};
  std::atomic<uint64_t> missing_ = 0;
  std::atomic<uint64_t> former_ = 0;
  std::array<std::atomic<uint64_t>, 5> of_contexts_{};  // as kOfContexts (metrics.cc)
  std::vector<Series> series_;
  TRITONSERVER_Metric* lookup_us_ = nullptr;
  std::string bus_error_;   // shown last in the log
  std::string seal_error_;  // the same
  std::string why_not_ready_;
  std::unique_ptr<BackgroundTask> task_;  // last: it uses the members above
};

}  // namespace embertide::triton
