// Publishing of metrics through Triton's custom metrics API.
#include "triton/metrics.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <filesystem>

#include "base/clock.h"
#include "base/sleep.h"
#include "node/served_reduced.h"
#include "triton/edge.h"

namespace embertide::triton {
namespace {

constexpr std::chrono::seconds kPublishEvery{1};
constexpr uint64_t kSsdBlockBytes = 4096;
const char* const kOwnTask = "metrics";

constexpr auto kCounter = TRITONSERVER_METRIC_KIND_COUNTER;
constexpr auto kGauge = TRITONSERVER_METRIC_KIND_GAUGE;
constexpr auto kHistogram = TRITONSERVER_METRIC_KIND_HISTOGRAM;
// Upper bounds of a duration's buckets, about three a decade: from a few keys in DDR to a deadline.
constexpr double kDurationsUs[] = {20,   50,    100,   200,   500,    1000,   2000,
                                   5000, 10000, 20000, 50000, 100000, 200000, 500000};

// For MakeMetric.
struct LinkedCalls {
  static constexpr auto MetricArgsNew = &TRITONSERVER_MetricArgsNew;
  static constexpr auto MetricArgsSetHistogram = &TRITONSERVER_MetricArgsSetHistogram;
  static constexpr auto MetricArgsDelete = &TRITONSERVER_MetricArgsDelete;
  static constexpr auto MetricNewWithArgs = &TRITONSERVER_MetricNewWithArgs;
  static constexpr auto ParameterNew = &TRITONSERVER_ParameterNew;
  static constexpr auto ParameterDelete = &TRITONSERVER_ParameterDelete;
};

struct FamilyInfo {
  const char* name;
  TRITONSERVER_MetricKind kind;
  const char* help;
};
constexpr FamilyInfo kFamilies[] = {
    {"embertide_lookup_keys_total", kCounter, "Keys looked up, by where the answer came from"},
    {"embertide_default_returned_total", kCounter,
     "Keys answered with the default row because the model has none"},
    {"embertide_requests_refused_total", kCounter, "Requests answered with an error, by reason"},
    {"embertide_dense_missing_total", kCounter,
     "Values of DENSE that were missing and read as their column's fill"},
    {"embertide_former_requests_total", kCounter,
     "Requests in the columns of a former model, brought into today's"},
    {"embertide_contexts_total", kCounter,
     "Of requests with contexts: requests, contexts, candidates, keys that were not repeated, and "
     "candidates whose context the dense net computed once"},
    {"embertide_dense_reduced", kGauge,
     "1 while the newest version's dense net multiplies in the type that its run chose"},
    {"embertide_dense_reduced_versions_total", kCounter,
     "Versions loaded of a model that chose bf16 or int8, by result: taken, refused, no_cpu, "
     "unknown"},
    {"embertide_lookup_duration_us", kHistogram,
     "Time in which the rows of requests answered together were found and pooled"},
    {"embertide_rows", kGauge, "Rows resident in the node"},
    {"embertide_table_rows", kGauge, "Rows held, by table and tier: ddr, ssd; copies in hbm"},
    {"embertide_table_bytes", kGauge, "Bytes of those rows, waste included, by table and tier"},
    {"embertide_tier_bytes", kGauge, "Bytes resident, by tier"},
    {"embertide_model_loads_total", kCounter,
     "Times that Triton had the model loaded, by result: loaded, failed"},
    {"embertide_server_info", kGauge, "1, by the version of the server"},
    {"embertide_server_restarts_total", kCounter,
     "Times that the server ended and was started again by who started it"},
    {"embertide_server_silences_total", kCounter,
     "Times that it was ended by who started it, as it ran and answered nobody"},
    {"embertide_schema", kGauge, "1, by the schema of the versions that are served"},
    {"embertide_version", kGauge, "Newest version that requests are answered at"},
    {"embertide_plan_epoch", kGauge, "Epoch of the plan in force"},
    {"embertide_watermark_ms", kGauge,
     "Event time up to which the version of the answers has learned"},
    {"embertide_version_age_ms", kGauge,
     "Since the trainer's commit of the version that requests are answered at; 0: it is not known"},
    {"embertide_drive_bytes", kGauge, "Size of the drive that a folder lies on, by folder"},
    {"embertide_drive_free_bytes", kGauge, "What is free of it"},
    {"embertide_rows_moved_total", kCounter,
     "Rows moved between DDR and SSD, by direction: evicted, promoted"},
    {"embertide_evictions_by_writers_total", kCounter,
     "Of the rows evicted, those for whose room a writer had to wait"},
    {"embertide_promotions_refused_total", kCounter,
     "Rows read from the SSD that the policy of DDR did not let in"},
    {"embertide_accesses_dropped_total", kCounter,
     "Reads that the choice of a tier's rows was to hear of and did not, by tier: ddr, hbm"},
    {"embertide_policy_bytes", kGauge, "Bytes of the DDR budget that its policies take"},
    {"embertide_rows_refused_total", kCounter, "Rows of versions that no tier had room for"},
    {"embertide_reader_waits_given_up_total", kCounter,
     "Rows refused as a read that went on too long held what was to give room"},
    {"embertide_huge_page_bytes", kGauge, "Bytes of DDR that lie in huge pages"},
    {"embertide_numa_node", kGauge, "1, by device and the NUMA node that its memory is bound to"},
    {"embertide_ssd_engine", kGauge,
     "1, by how the SSD tier is read, and whether past the page cache"},
    {"embertide_ssd_bytes_total", kCounter,
     "Bytes of the SSD tier, by kind: read, written, rows, compacted"},
    {"embertide_ssd_errors_total", kCounter,
     "Batches and writes that the SSD tier failed, by kind"},
    {"embertide_ssd_mending_total", kCounter,
     "What became of SSD blocks that are not what was written, by event: bad_block, dropped, "
     "mended_row, failed"},
    {"embertide_opened_from", kGauge,
     "1, by what the rows came from at the start: seal, snapshot, or snapshot as the seal was "
     "refused"},
    {"embertide_warm_up", kGauge,
     "Lookups that were made again at the start, by what: lookups, keys, first_from_ssd, "
     "last_from_ssd, ms; and kept for the next one: sampled_lookups, sampled_bytes, too_large, "
     "failed_files"},
    {"embertide_seals_total", kCounter,
     "Seals of the SSD tier, by result: written, failed, dropped for room"},
    {"embertide_seal_bytes_total", kCounter, "Bytes of rows written to seals"},
    {"embertide_seal_ms_total", kCounter,
     "Time spent writing seals, waits for their budget included"},
    {"embertide_seal_version", kGauge, "Version of the newest complete seal; 0: there is none"},
    {"embertide_seal_kept_bytes", kGauge, "Bytes on the SSD that no row uses and a seal names"},
    {"embertide_hbm_events_total", kCounter,
     "Keys that an HBM device was asked for and rows that it took, by device and event"},
    {"embertide_hbm_rows", kGauge, "Rows in HBM, by device"},
    {"embertide_hbm_bytes", kGauge, "Bytes of HBM in use, by device"},
    {"embertide_hbm_fallbacks_total", kCounter, "Lookups that were answered without HBM"},
    {"embertide_hbm_failed", kGauge, "1 once a device failed, and HBM is used no more"},
    {"embertide_bus_events_total", kCounter,
     "What the follower of the bus applied, dropped or mended, by event"},
    {"embertide_promoted_version", kGauge, "Newest version that the guard promoted; 0: none yet"},
    {"embertide_candidate_version", kGauge,
     "Newest version held that waits for the guard; 0: none"},
    {"embertide_versions_held", kGauge,
     "1 while newer versions wait, as the window is full of candidates"},
    {"embertide_unguarded_versions_total", kCounter,
     "Versions served though no guard promoted them"},
    {"embertide_versions_withdrawn_total", kCounter,
     "Withdrawals by guard, rollback and operator, by reason"},
    {"embertide_ready", kGauge,
     "1 while the node holds what is published, but for ready_staleness_ms at most"},
    {"embertide_bus_connected", kGauge, "1 while Redis can be read"},
    {"embertide_freshness_ms", kGauge,
     "From the trainer's commit of the newest version to its answers here"},
    {"embertide_fleet_events_total", kCounter,
     "What a node with peers asked, missed, refused or moved, by event"},
    {"embertide_degraded_keys_total", kCounter,
     "Keys that no owner answered, by reason; they read as default rows or fail their request"},
    {"embertide_buckets", kGauge, "Buckets that the plan gives this node, by state: held, left"},
    {"embertide_peers_alive", kGauge, "Other nodes of the group that answer"},
    {"embertide_hot_rows", kGauge, "Copies of other nodes' rows that are kept here"},
    {"embertide_task_failing", kGauge,
     "1 while a task in the background fails, or its thread cannot be started"},
    {"embertide_task_failures_total", kCounter,
     "Rounds of a task in the background that failed, by task"},
    {"embertide_task_failed_starts_total", kCounter,
     "Threads that the system refused to start, by task"},
    {"embertide_hot_bytes", kGauge, "What these copies take, with their index and policy"},
};

// Counts of requests with contexts: label `of` of embertide_contexts_total.
constexpr const char* kOfContexts[] = {"requests", "contexts", "candidates", "keys_saved",
                                       "candidates_in_context_program"};

// Counts of the follower: label `event` of embertide_bus_events_total.
struct BusEvent {
  const char* name;
  std::atomic<uint64_t> FollowerStats::* count;
};
constexpr BusEvent kBusEvents[] = {
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
    {"held", &FollowerStats::held},
    {"skipped", &FollowerStats::skipped},
    {"unnoted", &FollowerStats::unnoted},
};

// Counts of an HBM device: label `event` of embertide_hbm_events_total.
struct HbmEvent {
  const char* name;
  uint64_t HbmDeviceStats::* count;
};
constexpr HbmEvent kHbmEvents[] = {
    {"hit", &HbmDeviceStats::hits},          {"miss", &HbmDeviceStats::misses},
    {"placed", &HbmDeviceStats::placed},     {"evicted", &HbmDeviceStats::evictions},
    {"ended", &HbmDeviceStats::ended},       {"in_use", &HbmDeviceStats::in_use},
    {"deferred", &HbmDeviceStats::deferred},
};

}  // namespace

MetricFamilies::MetricFamilies() {
  for (const FamilyInfo& info : kFamilies) {
    Family& made = families_[info.name];
    made.kind = info.kind;
    const Status status =
        FromTriton(TRITONSERVER_MetricFamilyNew(&made.family, info.kind, info.name, info.help));
    if (status.ok()) continue;
    Log(TRITONSERVER_LOG_WARN, std::string("no metric ") + info.name + ": " + status.message());
    made.family = nullptr;
  }
}

MetricFamilies::~MetricFamilies() {
  for (const auto& [which, metric] : loads_) {
    if (metric != nullptr) LogIfError(TRITONSERVER_MetricDelete(metric), "metric");
  }
  for (const auto& [name, made] : families_) {
    if (made.family != nullptr) LogIfError(TRITONSERVER_MetricFamilyDelete(made.family), "family");
  }
}

TRITONSERVER_Metric* MetricFamilies::Make(const std::string& name, const std::string& model,
                                          const Labels& labels) const {
  const Family& family = Of(name);
  if (family.family == nullptr) return nullptr;
  Labels all = {{"model", model}};
  all.insert(all.end(), labels.begin(), labels.end());
  const auto worked = [](TRITONSERVER_Error* error) {
    const bool good = error == nullptr;
    LogIfError(error, "metric");
    return good;
  };
  std::span<const double> buckets;
  if (family.kind == kHistogram) buckets = kDurationsUs;
  return MakeMetric(LinkedCalls{}, worked, family.family, all, buckets);
}

void MetricFamilies::AddLoad(const std::string& model, bool loaded) {
  const MutexLock lock(mutex_);
  const auto [at, is_new] = loads_.try_emplace({model, loaded}, nullptr);
  if (is_new) {
    at->second =
        Make("embertide_model_loads_total", model, {{"result", loaded ? "loaded" : "failed"}});
  }
  if (at->second != nullptr) LogIfError(TRITONSERVER_MetricIncrement(at->second, 1), "metric");
}

void MetricFamilies::Enter(const std::string& model, const void* who) {
  const MutexLock lock(mutex_);
  alive_[model].push_back(who);
}

void MetricFamilies::Leave(const std::string& model, const void* who) {
  const MutexLock lock(mutex_);
  std::erase(alive_.at(model), who);
}

bool MetricFamilies::IsLast(const std::string& model, const void* who) const {
  const MutexLock lock(mutex_);
  return alive_.at(model).back() == who;
}

ModelMetrics::ModelMetrics(MetricFamilies& families, const std::string& model, const Node& node,
                           const std::string& server_version)
    : families_(families), node_(node), model_(model), keys_(node.manifest().tables.size()) {
  const StoreStats stats = node.store().Stats();
  lookup_us_ = families_.Make("embertide_lookup_duration_us", model_, {});
  AddOfTables();
  AddOfServer(server_version);
  AddOfStore();
  if (stats.ssd.engine[0] != '\0') AddOfSsd();
  if (!stats.hbm.empty()) AddOfHbm(stats.hbm.size());
  if (node.follower_stats() != nullptr) AddOfBus();
  if (node.guard_stats()) AddOfGuard();
  if (!node.options().state.empty()) AddOfFleet();
  if (node.options().warm_up_bytes > 0) AddOfWarmUp();
  AddOfTasks();
  families_.Enter(model_, this);
  Publish();
  task_ =
      std::make_unique<BackgroundTask>(TaskOptions{.name = kOwnTask, .board = &node.task_board()},
                                       [this](const std::stop_token& stop) {
                                         SleepFor(stop, kPublishEvery);
                                         if (!stop.stop_requested()) Publish();
                                         return Status::Ok();
                                       });
}

ModelMetrics::~ModelMetrics() {
  task_.reset();
  try {
    Publish();  // what came since
  } catch (const std::exception& error) {
    Log(TRITONSERVER_LOG_WARN, "metrics of model " + model_ + ": " + error.what());
  }
  families_.Leave(model_, this);
  if (lookup_us_ != nullptr) LogIfError(TRITONSERVER_MetricDelete(lookup_us_), "metric");
  for (const Series& series : series_) {
    if (series.metric != nullptr) LogIfError(TRITONSERVER_MetricDelete(series.metric), "metric");
  }
}

void ModelMetrics::Add(const char* family, const Labels& labels,
                       std::function<uint64_t(const Sample&)> value) {
  TRITONSERVER_Metric* metric = families_.Make(family, model_, labels);
  if (metric == nullptr) return;
  series_.push_back({metric, families_.Of(family).kind == kCounter, 0, std::move(value)});
}

void ModelMetrics::AddOfTables() {
  for (size_t t = 0; t < keys_.size(); ++t) {
    const std::string& table = node_.manifest().tables[t].name;
    for (size_t s = 0; s < kSources; ++s) {
      Add("embertide_lookup_keys_total",
          {{"table", table}, {"source", SourceName(static_cast<Source>(s))}},
          [this, t, s](const Sample&) { return keys_[t][s].load(); });
    }
    const auto add = [&](const char* family, const char* tier, uint64_t Store::Usage::* value) {
      Add(family, {{"table", table}, {"tier", tier}},
          [t, value](const Sample& now) { return now.tables[t].*value; });
    };
    add("embertide_table_rows", "ddr", &Store::Usage::ddr_rows);
    add("embertide_table_rows", "ssd", &Store::Usage::ssd_rows);
    add("embertide_table_bytes", "ddr", &Store::Usage::ddr_bytes);
    add("embertide_table_bytes", "ssd", &Store::Usage::ssd_bytes);
  }
  Add("embertide_default_returned_total", {}, [this](const Sample&) {
    uint64_t defaults = 0;
    for (const auto& table : keys_) defaults += table[static_cast<size_t>(Source::kDefault)];
    return defaults;
  });
  for (size_t r = 1; r < kReasons; ++r) {
    Add("embertide_requests_refused_total", {{"reason", ReasonName(static_cast<Reason>(r))}},
        [this, r](const Sample&) { return refused_[r].load(); });
  }
  Add("embertide_former_requests_total", {}, [this](const Sample&) { return former_.load(); });
  for (size_t of = 0; of < of_contexts_.size(); ++of) {
    Add("embertide_contexts_total", {{"of", kOfContexts[of]}},
        [this, of](const Sample&) { return of_contexts_[of].load(); });
  }
  Add("embertide_dense_missing_total", {}, [this](const Sample&) { return missing_.load(); });
  const ServedReduced* reduced = node_.served_reduced();
  if (reduced == nullptr) return;
  Add("embertide_dense_reduced", {{"type", reduced->type()}},
      [reduced](const Sample&) { return reduced->is_taken() ? 1U : 0U; });
  for (size_t r = 0; r < kReducedResults.size(); ++r) {
    Add("embertide_dense_reduced_versions_total",
        {{"type", reduced->type()}, {"result", kReducedResults[r]}},
        [reduced, r](const Sample&) { return reduced->versions(r); });
  }
}

// Who starts the server, `embertide serve` for one, says how often it has done so again.
void ModelMetrics::AddOfServer(const std::string& version) {
  Add("embertide_server_info", {{"version", version}}, [](const Sample&) { return 1; });
  const auto add = [this](const char* family, const char* variable) {
    const char* text = std::getenv(variable);
    if (text == nullptr) return;
    const uint64_t times = std::strtoull(text, nullptr, 10);
    Add(family, {}, [times](const Sample&) { return times; });
  };
  add("embertide_server_restarts_total", "EMBERTIDE_RESTARTS");
  add("embertide_server_silences_total", "EMBERTIDE_SILENCES");
}

void ModelMetrics::AddOfStore() {
  const auto add = [this](const char* family, const Labels& labels, uint64_t StoreStats::* value) {
    Add(family, labels, [value](const Sample& now) { return now.store.*value; });
  };
  add("embertide_rows", {}, &StoreStats::rows);
  add("embertide_tier_bytes", {{"tier", "ddr"}}, &StoreStats::ddr_payload_bytes);
  add("embertide_tier_bytes", {{"tier", "ssd"}}, &StoreStats::ssd_bytes);
  add("embertide_tier_bytes", {{"tier", "index"}}, &StoreStats::index_bytes);
  Add("embertide_tier_bytes", {{"tier", "hbm"}}, [](const Sample& now) {
    uint64_t bytes = 0;
    for (const HbmDeviceStats& device : now.store.hbm) bytes += device.used_bytes;
    return bytes;
  });
  add("embertide_rows_moved_total", {{"direction", "evicted"}}, &StoreStats::evictions_to_ssd);
  add("embertide_rows_moved_total", {{"direction", "promoted"}}, &StoreStats::promotions);
  add("embertide_evictions_by_writers_total", {}, &StoreStats::evictions_by_writers);
  add("embertide_promotions_refused_total", {}, &StoreStats::refused_promotions);
  add("embertide_accesses_dropped_total", {{"tier", "ddr"}}, &StoreStats::dropped_accesses);
  add("embertide_policy_bytes", {}, &StoreStats::policy_bytes);
  add("embertide_rows_refused_total", {}, &StoreStats::refused_rows);
  add("embertide_reader_waits_given_up_total", {}, &StoreStats::reader_waits_given_up);
  add("embertide_huge_page_bytes", {}, &StoreStats::huge_bytes);
  const StoreOptions& options = node_.store().options();
  for (uint32_t d = 0; !options.numa_nodes.empty() && d < options.devices; ++d) {
    const uint32_t numa_node = options.numa_nodes[d % options.numa_nodes.size()];
    Add("embertide_numa_node", {{"device", std::to_string(d)}, {"node", std::to_string(numa_node)}},
        [](const Sample&) { return 1; });
  }
  Add("embertide_schema", {{"schema", std::to_string(node_.manifest().schema_id)}},
      [](const Sample&) { return 1; });
  Add("embertide_version", {}, [this](const Sample& now) {
    return node_.guard_stats() ? node_.guard_stats()->served : now.store.newest_version;
  });
  Add("embertide_plan_epoch", {}, [this](const Sample&) { return node_.plan_epoch(); });
  Add("embertide_watermark_ms", {}, [this](const Sample&) {
    return static_cast<uint64_t>(std::max<int64_t>(0, node_.served()->watermark_ms));
  });
  Add("embertide_version_age_ms", {}, [this](const Sample&) -> uint64_t {
    const int64_t committed_ms = node_.served()->committed_ms;
    return committed_ms == 0 ? 0 : MsSince(committed_ms);
  });
}

void ModelMetrics::AddOfGuard() {
  const auto add = [this](const char* family, const Labels& labels, auto value) {
    Add(family, labels,
        [this, value](const Sample&) -> uint64_t { return value(*node_.guard_stats()); });
  };
  add("embertide_promoted_version", {}, [](const GuardStats& now) { return now.promoted; });
  add("embertide_candidate_version", {}, [](const GuardStats& now) { return now.candidate; });
  add("embertide_versions_held", {}, [](const GuardStats& now) { return now.holding ? 1 : 0; });
  add("embertide_unguarded_versions_total", {},
      [](const GuardStats& now) { return now.unguarded; });
  for (size_t i = 0; i < kWithdrawReasons.size(); ++i) {
    add("embertide_versions_withdrawn_total", {{"reason", kWithdrawReasons[i]}},
        [i](const GuardStats& now) { return now.withdrawn[i]; });
  }
}

void ModelMetrics::AddOfSsd() {
  using SpaceInfo = std::filesystem::space_info;
  const std::string& directory = node_.store().options().ssd_directory;
  const auto add_drive = [&](const char* family, std::uintmax_t SpaceInfo::* value) {
    Add(family, {{"folder", directory}}, [directory, value](const Sample&) -> uint64_t {
      std::error_code error;
      const SpaceInfo space = std::filesystem::space(directory, error);
      return error ? 0 : space.*value;
    });
  };
  add_drive("embertide_drive_bytes", &SpaceInfo::capacity);
  add_drive("embertide_drive_free_bytes", &SpaceInfo::available);
  const SsdStats ssd = node_.store().Stats().ssd;
  Add("embertide_ssd_engine", {{"engine", ssd.engine}, {"direct", ssd.direct ? "true" : "false"}},
      [](const Sample&) { return 1; });
  Add("embertide_ssd_bytes_total", {{"kind", "read"}},
      [](const Sample& now) { return now.store.ssd.blocks_read * kSsdBlockBytes; });
  const auto add = [this](const char* family, const char* kind, uint64_t SsdStats::* value) {
    Add(family, {{"kind", kind}}, [value](const Sample& now) { return now.store.ssd.*value; });
  };
  add("embertide_ssd_bytes_total", "written", &SsdStats::bytes_written);
  add("embertide_ssd_bytes_total", "rows", &SsdStats::row_bytes);
  add("embertide_ssd_bytes_total", "compacted", &SsdStats::compacted_bytes);
  add("embertide_ssd_errors_total", "read", &SsdStats::read_errors);
  add("embertide_ssd_errors_total", "corrupt", &SsdStats::corrupt);
  add("embertide_ssd_errors_total", "write", &SsdStats::write_errors);
  const auto add_mending = [this](const char* event, std::function<uint64_t(const Sample&)> value) {
    Add("embertide_ssd_mending_total", {{"event", event}}, std::move(value));
  };
  add_mending("bad_block", [](const Sample& now) { return now.store.ssd.bad_blocks; });
  add_mending("dropped", [](const Sample& now) { return now.store.ssd.bad_blocks_dropped; });
  add_mending("mended_row", [](const Sample& now) { return now.store.ssd.mended_rows; });
  add_mending("failed", [this](const Sample&) { return node_.failed_mends(); });
  const char* from = node_.seal_refusal().empty() ? "snapshot" : "snapshot, seal refused";
  Add("embertide_opened_from", {{"source", node_.opened_from_seal() ? "seal" : from}},
      [](const Sample&) { return 1; });
  const auto add_seal = [this](const char* family, const Labels& labels,
                               uint64_t SealStats::* value) {
    Add(family, labels, [value](const Sample& now) { return now.store.seal.*value; });
  };
  add_seal("embertide_seals_total", {{"result", "written"}}, &SealStats::written);
  add_seal("embertide_seals_total", {{"result", "failed"}}, &SealStats::failed);
  add_seal("embertide_seals_total", {{"result", "dropped"}}, &SealStats::dropped);
  add_seal("embertide_seal_bytes_total", {}, &SealStats::bytes);
  Add("embertide_seal_ms_total", {},
      [](const Sample& now) { return static_cast<uint64_t>(now.store.seal.seconds * 1000); });
  add_seal("embertide_seal_version", {}, &SealStats::version);
  add_seal("embertide_seal_kept_bytes", {}, &SealStats::kept_bytes);
}

void ModelMetrics::AddOfHbm(size_t devices) {
  for (size_t d = 0; d < devices; ++d) {
    const std::string device = std::to_string(d);
    const auto add = [&](const char* family, Labels labels, uint64_t HbmDeviceStats::* value) {
      labels.emplace_back("device", device);
      Add(family, labels, [d, value](const Sample& now) { return now.store.hbm[d].*value; });
    };
    add("embertide_hbm_rows", {}, &HbmDeviceStats::rows);
    add("embertide_hbm_bytes", {}, &HbmDeviceStats::used_bytes);
    for (const HbmEvent& event : kHbmEvents) {
      add("embertide_hbm_events_total", {{"event", event.name}}, event.count);
    }
  }
  for (size_t t = 0; t < keys_.size(); ++t) {
    const Labels labels = {{"table", node_.manifest().tables[t].name}, {"tier", "hbm"}};
    Add("embertide_table_rows", labels,
        [t](const Sample& now) { return now.store.hbm_tables[t].rows; });
    Add("embertide_table_bytes", labels,
        [t](const Sample& now) { return now.store.hbm_tables[t].bytes; });
  }
  Add("embertide_accesses_dropped_total", {{"tier", "hbm"}},
      [](const Sample& now) { return now.store.hbm_dropped_misses; });
  Add("embertide_hbm_fallbacks_total", {},
      [](const Sample& now) { return now.store.hbm_fallbacks; });
  Add("embertide_hbm_failed", {}, [](const Sample& now) { return now.store.hbm_failed ? 1 : 0; });
}

void ModelMetrics::AddOfBus() {
  const FollowerStats* bus = node_.follower_stats();
  for (const BusEvent& event : kBusEvents) {
    Add("embertide_bus_events_total", {{"event", event.name}},
        [bus, count = event.count](const Sample&) { return (bus->*count).load(); });
  }
  Add("embertide_ready", {}, [this](const Sample&) { return node_.why_not_ready().empty(); });
  Add("embertide_bus_connected", {}, [bus](const Sample&) { return bus->connected ? 1 : 0; });
  Add("embertide_freshness_ms", {}, [bus](const Sample&) { return bus->freshness_ms.load(); });
}

void ModelMetrics::AddOfFleet() {
  const auto add = [this](const char* family, const Labels& labels, uint64_t FleetStats::* value) {
    Add(family, labels, [value](const Sample& now) { return now.fleet.*value; });
  };
  for (const FleetEvent& event : kFleetEvents) {
    add("embertide_fleet_events_total", {{"event", event.name}}, event.count);
  }
  for (size_t n = 0; n < kNoAnswers; ++n) {
    Add("embertide_degraded_keys_total", {{"reason", kNoAnswerNames[n]}},
        [n](const Sample& now) { return now.fleet.degraded_keys[n]; });
  }
  add("embertide_buckets", {{"state", "held"}}, &FleetStats::buckets_held);
  add("embertide_buckets", {{"state", "left"}}, &FleetStats::buckets_left);
  add("embertide_peers_alive", {}, &FleetStats::peers_alive);
  add("embertide_hot_rows", {}, &FleetStats::hot_rows);
  add("embertide_hot_bytes", {}, &FleetStats::hot_bytes);
}

void ModelMetrics::AddOfWarmUp() {
  const auto add = [this](const char* what, uint64_t WarmUpStats::* value) {
    Add("embertide_warm_up", {{"what", what}},
        [this, value](const Sample&) { return node_.warm_up_stats().*value; });
  };
  add("lookups", &WarmUpStats::lookups);
  add("keys", &WarmUpStats::keys);
  add("first_from_ssd", &WarmUpStats::first_from_ssd);
  add("last_from_ssd", &WarmUpStats::last_from_ssd);
  add("ms", &WarmUpStats::took_ms);
  add("sampled_lookups", &WarmUpStats::sampled_lookups);
  add("sampled_bytes", &WarmUpStats::sampled_bytes);
  add("too_large", &WarmUpStats::too_large);
  add("failed_files", &WarmUpStats::failed_files);
}

void ModelMetrics::AddOfTasks() {
  // Those of this thread and of the executions come later; names are of a closed list.
  node_.task_board().Of(kOwnTask);
  node_.task_board().Of("crew");
  for (const TaskHealth& task : node_.tasks()) {
    const auto add = [&](const char* family, auto value) {
      Add(family, {{"task", task.name}}, [name = task.name, value](const Sample& now) -> uint64_t {
        const auto found = std::ranges::find(now.tasks, name, &TaskHealth::name);
        return found == now.tasks.end() ? 0 : value(*found);
      });
    };
    add("embertide_task_failing", [](const TaskHealth& now) { return now.failing ? 1 : 0; });
    add("embertide_task_failures_total", [](const TaskHealth& now) { return now.failures; });
    add("embertide_task_failed_starts_total",
        [](const TaskHealth& now) { return now.failed_starts; });
  }
}

void ModelMetrics::AddKeys(uint32_t table, const SourceCounts& counts) {
  for (size_t s = 0; s < kSources; ++s) {
    if (counts[s] > 0) keys_[table][s].fetch_add(counts[s], std::memory_order_relaxed);
  }
}

void ModelMetrics::AddLookup(std::chrono::nanoseconds duration) const {
  if (lookup_us_ == nullptr) return;
  LogIfError(TRITONSERVER_MetricObserve(lookup_us_, static_cast<double>(duration.count()) / 1e3),
             "metric");
}

void ModelMetrics::Publish() {
  const ServingStore& store = node_.store();
  Sample now{store.Stats(), node_.fleet_stats(), {}, node_.tasks()};
  for (uint32_t t = 0; t < keys_.size(); ++t) {
    Store::Usage& all = now.tables.emplace_back();
    for (uint32_t d = 0; d < store.options().devices; ++d) {
      const Store::Usage usage = store.UsageOf(t, d);
      all.ddr_rows += usage.ddr_rows;
      all.ddr_bytes += usage.ddr_bytes;
      all.ssd_rows += usage.ssd_rows;
      all.ssd_bytes += usage.ssd_bytes;
    }
  }
  const bool last = families_.IsLast(model_, this);
  for (Series& series : series_) {
    if (!series.counter && !last) {
      series.shown = 0;  // another one's value is shown
      continue;
    }
    const uint64_t value = series.value(now);
    if (series.shown == value && value != 0) continue;
    LogIfError(series.counter ? TRITONSERVER_MetricIncrement(
                                    series.metric, static_cast<double>(value - series.shown))
                              : TRITONSERVER_MetricSet(series.metric, static_cast<double>(value)),
               "metric");
    series.shown = value;
  }
  std::string error = node_.follower_error();
  if (error != bus_error_ && !error.empty()) {
    Log(TRITONSERVER_LOG_WARN, "model " + model_ + " does not follow: " + error);
  }
  bus_error_ = std::move(error);
  error = node_.why_not_ready();
  if (error.empty() != why_not_ready_.empty()) {
    Log(TRITONSERVER_LOG_WARN,
        "model " + model_ + " is " + (error.empty() ? "ready again" : "not ready: " + error));
  }
  why_not_ready_ = std::move(error);
  error = node_.seal_error();
  if (error != seal_error_ && !error.empty()) {
    Log(TRITONSERVER_LOG_WARN, "model " + model_ + " wrote no seal: " + error);
  }
  seal_error_ = std::move(error);
}

}  // namespace embertide::triton
