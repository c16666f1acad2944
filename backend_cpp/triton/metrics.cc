// Publishing of metrics through Triton's custom metrics API.
#include "triton/metrics.h"

#include <algorithm>
#include <chrono>

#include "triton/edge.h"

namespace embertide::triton {
namespace {

constexpr std::chrono::seconds kPublishEvery{1};
// What the follower counts: label `event` of embertide_bus_events_total.
struct BusEvent {
  const char* name;
  std::atomic<uint64_t> FollowerStats::* count;
};
constexpr std::array<BusEvent, kBusEvents> kBusEventList = {{
    {"version", &FollowerStats::versions},
    {"row", &FollowerStats::rows},
    {"repeat", &FollowerStats::repeats},
    {"stale_lineage", &FollowerStats::stale_lineage},
    {"gap", &FollowerStats::gaps},
    {"corrupt", &FollowerStats::corrupt},
    {"other_schema", &FollowerStats::other_schema},
    {"catch_up", &FollowerStats::catch_ups},
    {"reconnect", &FollowerStats::reconnects},
    {"refused", &FollowerStats::refused},
}};
constexpr std::array<const char*, 4> kTierNames = {"ddr", "ssd", "index", "hbm"};
constexpr std::array<const char*, 4> kSsdBytes = {"read", "written", "rows", "compacted"};
constexpr std::array<const char*, 3> kSsdErrors = {"read", "corrupt", "write"};
constexpr uint64_t kSsdBlockBytes = 4096;

TRITONSERVER_MetricFamily* MakeFamily(TRITONSERVER_MetricKind kind, const char* name,
                                      const char* help) {
  TRITONSERVER_MetricFamily* family = nullptr;
  const Status status = FromTriton(TRITONSERVER_MetricFamilyNew(&family, kind, name, help));
  if (!status.ok()) {
    Log(TRITONSERVER_LOG_WARN, std::string("no metric ") + name + ": " + status.message());
    return nullptr;
  }
  return family;
}

}  // namespace

MetricFamilies::MetricFamilies() {
  const auto counter = TRITONSERVER_METRIC_KIND_COUNTER;
  const auto gauge = TRITONSERVER_METRIC_KIND_GAUGE;
  keys = MakeFamily(counter, "embertide_lookup_keys_total",
                    "Keys looked up, by where the answer came from");
  defaults = MakeFamily(counter, "embertide_default_returned_total",
                        "Keys answered with the default row because the model has none");
  refused = MakeFamily(counter, "embertide_requests_refused_total",
                       "Requests answered with an error, by reason");
  rows = MakeFamily(gauge, "embertide_rows", "Rows resident in the node");
  tier_bytes = MakeFamily(gauge, "embertide_tier_bytes", "Bytes resident, by tier");
  version = MakeFamily(gauge, "embertide_version", "Newest version that requests are answered at");
  bus_events = MakeFamily(counter, "embertide_bus_events_total",
                          "What the follower of the bus applied, dropped or mended, by event");
  bus_connected = MakeFamily(gauge, "embertide_bus_connected", "1 while Redis can be read");
  fleet_events = MakeFamily(counter, "embertide_fleet_events_total",
                            "What a node with peers asked, missed, refused or moved, by event");
  buckets = MakeFamily(gauge, "embertide_buckets",
                       "Buckets that the plan gives this node, by state: held, left");
  peers = MakeFamily(gauge, "embertide_peers_alive", "Other nodes of the group that answer");
  watermark = MakeFamily(gauge, "embertide_watermark_ms",
                         "Event time up to which the newest version has learned");
  freshness = MakeFamily(gauge, "embertide_freshness_ms",
                         "From the trainer's commit of the newest version to its answers here");
  rows_moved = MakeFamily(counter, "embertide_rows_moved_total",
                          "Rows moved between DDR and SSD, by direction: evicted, promoted");
  rows_refused = MakeFamily(counter, "embertide_rows_refused_total",
                            "Rows of versions that no tier had room for");
  plan_epoch = MakeFamily(gauge, "embertide_plan_epoch", "Epoch of the plan in force");
  ssd_engine = MakeFamily(gauge, "embertide_ssd_engine",
                          "1, by how the SSD tier is read, and whether past the page cache");
  ssd_bytes = MakeFamily(counter, "embertide_ssd_bytes_total",
                         "Bytes of the SSD tier, by kind: read, written, rows, compacted");
  ssd_errors = MakeFamily(counter, "embertide_ssd_errors_total",
                          "Batches and writes that the SSD tier failed, by kind");
}

MetricFamilies::~MetricFamilies() {
  for (auto* family : {keys, defaults, refused, rows, tier_bytes, version, plan_epoch, bus_events,
                       bus_connected, fleet_events, buckets, peers, watermark, freshness,
                       rows_moved, rows_refused, ssd_engine, ssd_bytes, ssd_errors}) {
    if (family != nullptr) LogIfError(TRITONSERVER_MetricFamilyDelete(family), "metric family");
  }
}

ModelMetrics::ModelMetrics(const MetricFamilies& families, const std::string& model,
                           const Node& node)
    : node_(node), model_(model), keys_(node.manifest().tables.size()) {
  for (const TableConfig& table : node.manifest().tables) {
    auto& series = keys_series_.emplace_back();
    for (size_t s = 0; s < kSources; ++s) {
      series[s] = Make(families.keys, true,
                       {{"table", table.name}, {"source", SourceName(static_cast<Source>(s))}});
    }
  }
  for (size_t r = 1; r < kReasons; ++r) {
    refused_series_[r] =
        Make(families.refused, true, {{"reason", ReasonName(static_cast<Reason>(r))}});
  }
  for (size_t t = 0; t < tier_series_.size(); ++t) {
    tier_series_[t] = Make(families.tier_bytes, false, {{"tier", kTierNames[t]}});
  }
  defaults_series_ = Make(families.defaults, true, {});
  rows_series_ = Make(families.rows, false, {});
  evicted_series_ = Make(families.rows_moved, true, {{"direction", "evicted"}});
  promoted_series_ = Make(families.rows_moved, true, {{"direction", "promoted"}});
  rows_refused_series_ = Make(families.rows_refused, true, {});
  version_series_ = Make(families.version, false, {});
  epoch_series_ = Make(families.plan_epoch, false, {});
  watermark_series_ = Make(families.watermark, false, {});
  if (const SsdStats ssd = node.store().Stats().ssd; ssd.engine[0] != '\0') {
    ssd_engine_series_ = Make(families.ssd_engine, false,
                              {{"engine", ssd.engine}, {"direct", ssd.direct ? "true" : "false"}});
    for (size_t k = 0; k < kSsdBytes.size(); ++k) {
      ssd_bytes_series_[k] = Make(families.ssd_bytes, true, {{"kind", kSsdBytes[k]}});
    }
    for (size_t k = 0; k < kSsdErrors.size(); ++k) {
      ssd_errors_series_[k] = Make(families.ssd_errors, true, {{"kind", kSsdErrors[k]}});
    }
  }
  if (node.follower_stats() != nullptr) {
    for (size_t e = 0; e < kBusEvents; ++e) {
      bus_series_[e] = Make(families.bus_events, true, {{"event", kBusEventList[e].name}});
    }
    connected_series_ = Make(families.bus_connected, false, {});
    freshness_series_ = Make(families.freshness, false, {});
  }
  if (!node.options().state.empty()) {
    for (size_t e = 0; e < kFleetEvents.size(); ++e) {
      fleet_series_[e] = Make(families.fleet_events, true, {{"event", kFleetEvents[e].name}});
    }
    buckets_series_[0] = Make(families.buckets, false, {{"state", "held"}});
    buckets_series_[1] = Make(families.buckets, false, {{"state", "left"}});
    peers_series_ = Make(families.peers, false, {});
  }
  Publish();
  thread_ = std::thread([this] { Run(); });
}

ModelMetrics::~ModelMetrics() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
  const auto drop = [](Series& series) {
    if (series.metric != nullptr) LogIfError(TRITONSERVER_MetricDelete(series.metric), "metric");
  };
  for (auto& table : keys_series_) {
    for (Series& series : table) drop(series);
  }
  for (Series& series : refused_series_) drop(series);
  for (Series& series : tier_series_) drop(series);
  for (Series& series : bus_series_) drop(series);
  for (Series& series : fleet_series_) drop(series);
  for (Series& series : buckets_series_) drop(series);
  for (Series& series : ssd_bytes_series_) drop(series);
  for (Series& series : ssd_errors_series_) drop(series);
  drop(ssd_engine_series_);
  drop(peers_series_);
  for (Series* series : {&defaults_series_, &rows_series_, &version_series_, &epoch_series_,
                         &watermark_series_, &connected_series_, &freshness_series_,
                         &evicted_series_, &promoted_series_, &rows_refused_series_}) {
    drop(*series);
  }
}

ModelMetrics::Series ModelMetrics::Make(TRITONSERVER_MetricFamily* family, bool counter,
                                        const Labels& labels) {
  Series series;
  series.counter = counter;
  if (family == nullptr) return series;
  std::vector<const TRITONSERVER_Parameter*> parameters;
  const auto add = [&](const char* name, const std::string& value) {
    parameters.push_back(
        TRITONSERVER_ParameterNew(name, TRITONSERVER_PARAMETER_STRING, value.c_str()));
  };
  add("model", model_);
  for (const auto& [name, value] : labels) add(name, value);
  LogIfError(TRITONSERVER_MetricNew(&series.metric, family, parameters.data(), parameters.size()),
             "metric");
  for (const auto* parameter : parameters) {
    TRITONSERVER_ParameterDelete(const_cast<TRITONSERVER_Parameter*>(parameter));
  }
  return series;
}

void ModelMetrics::AddKeys(uint32_t table, const SourceCounts& counts) {
  for (size_t s = 0; s < kSources; ++s) {
    if (counts[s] > 0) keys_[table][s].fetch_add(counts[s], std::memory_order_relaxed);
  }
}

void ModelMetrics::Show(Series* series, uint64_t value) {
  if (series->metric == nullptr || (series->shown == value && series->shown != 0)) return;
  LogIfError(series->counter ? TRITONSERVER_MetricIncrement(
                                   series->metric, static_cast<double>(value - series->shown))
                             : TRITONSERVER_MetricSet(series->metric, static_cast<double>(value)),
             "metric");
  series->shown = value;
}

void ModelMetrics::Publish() {
  uint64_t defaults = 0;
  for (size_t t = 0; t < keys_.size(); ++t) {
    for (size_t s = 0; s < kSources; ++s) Show(&keys_series_[t][s], keys_[t][s]);
    defaults += keys_[t][static_cast<size_t>(Source::kDefault)];
  }
  Show(&defaults_series_, defaults);
  for (size_t r = 1; r < kReasons; ++r) Show(&refused_series_[r], refused_[r]);
  const StoreStats stats = node_.store().Stats();
  Show(&rows_series_, stats.rows);
  Show(&tier_series_[0], stats.ddr_payload_bytes);
  Show(&tier_series_[1], stats.ssd_bytes);
  Show(&tier_series_[2], stats.index_bytes);
  uint64_t hbm_bytes = 0;
  for (const HbmDeviceStats& device : stats.hbm) hbm_bytes += device.used_bytes;
  Show(&tier_series_[3], hbm_bytes);
  Show(&evicted_series_, stats.evictions_to_ssd);
  Show(&promoted_series_, stats.promotions);
  Show(&rows_refused_series_, stats.refused_rows);
  Show(&ssd_engine_series_, 1);
  Show(&ssd_bytes_series_[0], stats.ssd.blocks_read * kSsdBlockBytes);
  Show(&ssd_bytes_series_[1], stats.ssd.bytes_written);
  Show(&ssd_bytes_series_[2], stats.ssd.row_bytes);
  Show(&ssd_bytes_series_[3], stats.ssd.compacted_bytes);
  Show(&ssd_errors_series_[0], stats.ssd.read_errors);
  Show(&ssd_errors_series_[1], stats.ssd.corrupt);
  Show(&ssd_errors_series_[2], stats.ssd.write_errors);
  Show(&version_series_, stats.newest_version);
  Show(&epoch_series_, node_.plan_epoch());
  Show(&watermark_series_,
       static_cast<uint64_t>(std::max<int64_t>(0, node_.newest()->watermark_ms)));
  if (const FollowerStats* bus = node_.follower_stats(); bus != nullptr) {
    for (size_t e = 0; e < kBusEvents; ++e) Show(&bus_series_[e], bus->*kBusEventList[e].count);
    Show(&connected_series_, bus->connected ? 1 : 0);
    Show(&freshness_series_, bus->freshness_ms);
    std::string error = node_.follower_error();
    if (error != bus_error_ && !error.empty()) {
      Log(TRITONSERVER_LOG_WARN, "model " + model_ + " does not follow: " + error);
    }
    bus_error_ = std::move(error);
  }
  if (!node_.options().state.empty()) {
    const FleetStats fleet = node_.fleet_stats();
    for (size_t e = 0; e < kFleetEvents.size(); ++e) {
      Show(&fleet_series_[e], fleet.*kFleetEvents[e].count);
    }
    Show(&buckets_series_[0], fleet.buckets_held);
    Show(&buckets_series_[1], fleet.buckets_left);
    Show(&peers_series_, fleet.peers_alive);
  }
}

void ModelMetrics::Run() {
  std::unique_lock lock(mutex_);
  bool stop = false;
  while (!stop) {
    stop = wake_.wait_for(lock, kPublishEvery, [this] { return stop_; });
    Publish();
  }
}

}  // namespace embertide::triton
