// Filling in what a node tells of itself.
#include "node/node_report.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

#include "base/clock.h"
#include "node/latency_meter.h"

namespace embertide {
namespace {

constexpr int kMaxFailing = 16;  // tasks that a beat names
// Making them takes a tenth of a second of one core.
constexpr std::chrono::seconds kCurvesEvery{60};

uint32_t HotKeysOf(uint32_t wanted) { return wanted == 0 ? 100 : std::min(wanted, 1000U); }

void FillTask(const TaskHealth& task, v1::TaskHealth* out) {
  out->set_name(task.name);
  out->set_state(task.no_thread ? "no thread" : task.failing ? "failing" : "running");
  out->set_failures(task.failures + task.failed_starts);
  out->set_error(task.last_error);
  out->set_since_ms(task.failing_since_ms);
}

// ms since a version's commit; 0 if that is not known.
uint64_t StalenessMs(const VersionInfo& version) {
  return version.committed_ms == 0 ? 0 : MsSince(version.committed_ms);
}

}  // namespace

NodeReport::NodeReport(Sources sources) : from_(std::move(sources)), state_(*from_.state) {}

void NodeReport::SetAddress(std::string address) {
  address_ = std::move(address);
  started_ = true;
}

// --- the control plane ---------------------------------------------------------------------------

v1::Node NodeReport::Self() const {
  const NodeOptions& options = state_.options();
  v1::Node node;
  node.set_name(options.node);
  node.set_address(address_);
  node.set_group(options.group);
  for (uint32_t d = 0; d < options.devices; ++d) {
    v1::Device* device = node.add_devices();
    device->set_index(d);
    device->set_kind(v1::DEVICE_KIND_CPU);
    v1::TierBudget* ddr = device->add_budgets();
    ddr->set_tier(v1::TIER_DDR);
    ddr->set_budget_bytes(options.ddr_budget_bytes / options.devices);
    if (options.ssd_budget_bytes == 0) continue;
    v1::TierBudget* ssd = device->add_budgets();
    ssd->set_tier(v1::TIER_SSD);
    ssd->set_budget_bytes(options.ssd_budget_bytes / options.devices);
  }
  return node;
}

v1::RegisterNodeRequest NodeReport::Registration() const {
  v1::RegisterNodeRequest registration;
  *registration.mutable_node() = Self();
  registration.set_model(state_.manifest().model);
  registration.set_schema_id(state_.manifest().schema_id);
  std::vector<const TableConfig*> tables;
  tables.reserve(state_.manifest().tables.size());
  for (const TableConfig& table : state_.manifest().tables) tables.push_back(&table);
  std::ranges::sort(tables, {}, &TableConfig::id);
  std::map<std::string, uint64_t> bytes;
  for (const BucketFileInfo& bucket : state_.manifest().buckets) {
    bytes[bucket.table] += bucket.bytes;
  }
  for (const TableConfig* table : tables) {
    registration.add_table_bytes(bytes[table->name]);
    v1::PlannedTable* planned = registration.add_tables();
    planned->set_id(table->id);
    planned->set_name(table->name);
    planned->set_bucket_bits(table->bucket_bits);
    planned->set_chunks(table->layout.chunks);
  }
  return registration;
}

void NodeReport::Beat(v1::HeartbeatRequest* beat) const {
  *beat->mutable_versions() = from_.versions->Range();
  beat->set_plan_epoch(from_.plan->epoch());
  if (state_.versions() != nullptr) beat->set_staleness_ms(StalenessMs(*state_.served()));
  const BucketMover::Progress& moved = from_.mover->progress();
  if (from_.versions->serving()) {
    beat->set_held_epoch(moved.held_epoch);
    beat->set_held_since(moved.held_since);
  }
  beat->set_buckets_left(moved.left);
  beat->set_full(moved.full);
  for (const TaskHealth& task : state_.AllTasks()) {
    if (task.failing && beat->failing_size() < kMaxFailing) FillTask(task, beat->add_failing());
  }
  beat->set_p99_us(state_.latency()->P99Us());
}

// --- whoever asks --------------------------------------------------------------------------------

Status NodeReport::FillUsage(v1::NodeServiceGetStatusResponse* response) const {
  const ServingStore& store = state_.store();
  const Result<ReadView> view = store.PinNewest();
  if (!view.ok()) return view.status();
  for (uint32_t t = 0; t < state_.manifest().tables.size(); ++t) {
    const TableConfig& table = state_.manifest().tables[t];
    std::vector<uint64_t> index_bytes(state_.options().devices);
    for (uint32_t b = 0; b < table.buckets(); ++b) {
      const auto size = store.BucketSizeOf(view.value(), t, b);
      if (size) index_bytes[store.DeviceOf(t, b).value_or(0)] += size->index_bytes;
    }
    for (uint32_t d = 0; d < index_bytes.size(); ++d) {
      const Store::Usage usage = store.UsageOf(t, d);
      const auto add = [&](v1::Tier tier, uint64_t rows, uint64_t payload, uint64_t index) {
        if (rows == 0 && index == 0) return;
        v1::TierUsage* of = response->add_usage();
        of->set_device(d);
        of->set_tier(tier);
        of->set_table(table.name);
        of->set_rows(rows);
        of->set_payload_bytes(payload);
        of->set_index_bytes(index);
      };
      add(v1::TIER_DDR, usage.ddr_rows, usage.ddr_bytes, index_bytes[d]);
      add(v1::TIER_SSD, usage.ssd_rows, usage.ssd_bytes, 0);
    }
  }
  return Status::Ok();
}

Status NodeReport::GetStatus(v1::NodeServiceGetStatusResponse* response) const {
  if (!started_) return {Code::kUnavailable, "starting"};
  *response->mutable_node() = Self();
  *response->mutable_versions() = from_.versions->Range();
  response->set_plan_epoch(from_.plan->epoch());
  if (response->versions().has_newest()) {
    const auto info = state_.served();
    response->mutable_newest_pinned()->set_number(info->number);
    response->mutable_newest_pinned()->set_lineage(info->lineage);
    response->set_staleness_ms(StalenessMs(*info));
    response->set_watermark_ms(info->watermark_ms);
  }
  EMBERTIDE_RETURN_IF_ERROR(FillUsage(response));
  auto& counters = *response->mutable_counters();
  const FleetStats fleet = Counters();
  for (const FleetEvent& event : kFleetEvents) counters[event.name] = fleet.*event.count;
  for (size_t n = 0; n < kNoAnswers; ++n) {
    counters[std::string("degraded_keys_") + kNoAnswerNames[n]] = fleet.degraded_keys[n];
  }
  counters["peers_alive"] = fleet.peers_alive;
  counters["buckets_held"] = fleet.buckets_held;
  counters["buckets_left"] = fleet.buckets_left;
  const StoreStats rows = state_.store().Stats();
  for (size_t s = 0; s < kSources; ++s) {
    counters[std::string("lookups_") + SourceName(static_cast<Source>(s))] = rows.hits[s];
  }
  counters["bad_blocks"] = rows.ssd.bad_blocks;
  counters["mended_rows"] = rows.ssd.mended_rows;
  counters["failed_mends"] = state_.failed_mends();
  state_.tasks().StartMissing();
  for (const TaskHealth& task : state_.AllTasks()) FillTask(task, response->add_tasks());
  return Status::Ok();
}

std::vector<MissCurve> NodeReport::MakeCurves() const {
  const ServingStore& store = state_.store();
  const Result<ReadView> view = store.PinNewest();
  if (!view.ok()) return {};
  std::map<std::pair<uint32_t, uint32_t>, TableRows> rows;
  for (uint32_t t = 0; t < state_.manifest().tables.size(); ++t) {
    // Those with budgets of their own share nothing.
    if (store.options().table_budgets.contains(state_.manifest().tables[t].name)) continue;
    for (uint32_t b = 0; b < state_.manifest().tables[t].buckets(); ++b) {
      const auto size = store.BucketSizeOf(view.value(), t, b);
      const auto device = store.DeviceOf(t, b);
      if (!size || !device) continue;
      rows[{t, *device}].rows += size->rows;
      rows[{t, *device}].bytes += size->payload_bytes;
    }
  }
  return state_.load()->misses().Curves(
      [&](uint32_t table, uint32_t bucket) { return store.DeviceOf(table, bucket); },
      [&](uint32_t table, uint32_t device) {
        const auto found = rows.find({table, device});
        return found == rows.end() ? TableRows() : found->second;
      });
}

void NodeReport::FillTiers(v1::NodeServiceGetLoadResponse* response) {
  const auto now = std::chrono::steady_clock::now();
  {
    const MutexLock lock(curves_mutex_);
    if (!curves_made_ || now - *curves_made_ > kCurvesEvery) {
      curves_ = MakeCurves();
      // With none, again at the next window.
      if (!curves_.empty()) curves_made_ = now;
    }
    for (const MissCurve& curve : curves_) {
      v1::MissCurve* out = response->add_miss_curves();
      out->set_table_id(state_.manifest().tables[curve.table].id);
      out->set_device(curve.device);
      out->mutable_bytes()->Add(curve.bytes.begin(), curve.bytes.end());
      for (const double missed : curve.missed) out->add_missed(static_cast<float>(missed));
    }
  }
  for (uint32_t d = 0; d < state_.options().devices; ++d) {
    const uint64_t bytes = state_.store().RowRoom(d);
    if (bytes == 0) continue;
    v1::RowRoom* room = response->add_row_rooms();
    room->set_device(d);
    room->set_bytes(bytes);
  }
}

void NodeReport::FillSlow(v1::NodeServiceGetLoadResponse* response) const {
  for (const SlowRequest& slow : state_.slow().OfMinute(std::chrono::steady_clock::now())) {
    v1::SlowRequest* out = response->add_slow();
    out->set_ended_ms(slow.ended_ms);
    out->set_trace(slow.trace);
    out->set_refusal(slow.refusal);
    out->set_version(slow.version);
    out->set_samples(slow.samples);
    out->set_keys(slow.keys);
    out->set_requests(slow.requests);
    out->set_whole_us(static_cast<uint64_t>(slow.whole_us));
    out->set_peers_us(static_cast<uint64_t>(slow.peers_us));
    out->set_lookup_us(static_cast<uint64_t>(slow.lookup_us));
    out->set_net_us(static_cast<uint64_t>(slow.net_us));
  }
  for (const SlowLookup& slow : state_.slow_lookups().OfMinute(std::chrono::steady_clock::now())) {
    v1::SlowLookup* out = response->add_slow_lookups();
    out->set_ended_ms(slow.ended_ms);
    out->set_trace(slow.trace);
    out->set_asker(slow.asker);
    out->set_keys(slow.keys);
    out->set_whole_us(static_cast<uint64_t>(slow.whole_us));
  }
}

void NodeReport::FillBuckets(const LoadWindow& window, const ReadView& view,
                             v1::NodeServiceGetLoadResponse* response) const {
  const ServingStore& store = state_.store();
  std::vector<uint32_t> tables(state_.manifest().tables.size());
  for (uint32_t t = 0; t < tables.size(); ++t) tables[t] = t;
  std::ranges::sort(tables, {}, [&](uint32_t t) { return state_.manifest().tables[t].id; });
  for (const uint32_t t : tables) {
    for (uint32_t b = 0; b < state_.manifest().tables[t].buckets(); ++b) {
      const auto size = store.BucketSizeOf(view, t, b);
      const auto device = store.DeviceOf(t, b);
      const BucketReads reads = window.window_ms == 0 ? BucketReads() : window.buckets[t][b];
      const uint64_t elsewhere = reads.asked + reads.hot_reads;
      const bool held = size && device;
      if (!held && elsewhere == 0) continue;
      v1::BucketLoad* load = response->add_buckets();
      load->set_table_id(state_.manifest().tables[t].id);
      load->set_bucket(b);
      load->set_held(held);
      if (held) {
        load->set_device(*device);
        load->set_rows(size->rows);
        load->set_resident_bytes(size->index_bytes + size->payload_bytes);
      }
      if (window.window_ms == 0) continue;
      load->set_reads(reads.reads);
      load->set_peer_reads(reads.peer_reads);
      load->set_asked(reads.asked);
      load->set_hot_reads(reads.hot_reads);
      load->set_unique_keys(std::min(reads.unique_keys, reads.reads + elsewhere));
      load->set_bytes_read(reads.bytes);
      for (const uint64_t count : reads.by_source) load->add_reads_by_source(count);
    }
  }
}

Status NodeReport::GetLoad(uint32_t hot_keys, v1::NodeServiceGetLoadResponse* response) {
  const LoadWindow window = state_.load()->Last(HotKeysOf(hot_keys));
  response->set_window_ms(window.window_ms);
  response->set_window(window.number);
  response->set_cpu_us(window.cpu_us);
  response->set_requests(window.requests);
  response->set_request_us(window.request_us);
  const Result<ReadView> view = state_.store().PinNewest();
  if (!view.ok()) return view.status();
  FillBuckets(window, view.value(), response);
  for (const HotKeyReads& hot : window.hot_keys) {
    v1::HotKey* out = response->add_hot_keys();
    out->set_table_id(state_.manifest().tables[hot.table].id);
    out->set_key(hot.key);
    out->set_reads(hot.reads);
    out->set_error(hot.error);
  }
  FillTraffic(response);
  FillSlow(response);
  if (state_.options().ssd_budget_bytes > 0) FillTiers(response);
  response->set_dropped(window.dropped + state_.load()->misses().dropped());
  if (const auto info = state_.InfoOf(view.value().version())) {
    response->set_watermark_ms(info->watermark_ms);
  }
  return Status::Ok();
}

void NodeReport::FillTraffic(v1::NodeServiceGetLoadResponse* response) const {
  for (const auto& [name, traffic] : from_.peers->Traffic()) {
    if (traffic.calls + traffic.failed == 0) continue;
    v1::PeerTraffic* peer = response->add_peers();
    peer->set_node(name);
    peer->set_calls(traffic.calls);
    peer->set_failed(traffic.failed);
    peer->set_round_trip_us(static_cast<uint64_t>(traffic.round_trip.count()));
    for (const auto& [id, asked] : traffic.tables) {
      v1::TableTraffic* table = peer->add_tables();
      table->set_table_id(id);
      table->set_keys(asked.keys);
      table->set_sum_keys(asked.sum_keys);
      table->set_sums(asked.sums);
      table->set_since_keys(asked.since_keys);
      table->set_bytes(asked.bytes);
    }
  }
}

FleetStats NodeReport::Counters() const {
  FleetStats stats;
  stats.remote_keys = from_.remote->keys;
  const HotStats& hot = *from_.hot;
  stats.hot_reads = hot.reads;
  stats.hot_stale = hot.stale;
  stats.hot_entered = hot.entered;
  stats.hot_left = hot.left;
  stats.hot_unchanged = hot.unchanged;
  stats.hot_changed = hot.changed;
  stats.hot_failed = hot.failed;
  stats.hot_dropped = hot.dropped;
  stats.hot_clipped = hot.clipped;
  stats.hot_rows = hot.rows;
  stats.hot_bytes = hot.bytes;
  stats.next_owners = from_.remote->next_owners;
  std::ranges::copy(from_.remote->degraded_keys, stats.degraded_keys.begin());
  stats.started_over = from_.remote->version_gone + from_.remote->not_owner;
  stats.remote_calls = from_.peers->stats().calls;
  stats.peer_failures = from_.peers->stats().failed;
  stats.peer_deaths = from_.peers->stats().deaths;
  stats.redials = from_.peers->stats().redials;
  stats.refused_calls = from_.refused_calls();
  stats.refused_plans = from_.plan->refused_plans();
  const BucketMover::Progress& moved = from_.mover->progress();
  stats.refused_shares = moved.refused_shares;
  stats.buckets_added = moved.added;
  stats.buckets_dropped = moved.dropped;
  stats.failed_adds = moved.failed_adds;
  stats.peers_alive = from_.peers->Alive();
  stats.buckets_held = moved.held;
  stats.buckets_left = moved.left;
  return stats;
}

}  // namespace embertide
