// What a node answers its peers, the control plane and operators.
#include <algorithm>
#include <cmath>
#include <map>

#include "base/clock.h"
#include "embertide/hash.h"
#include "node/fleet.h"
#include "node/load_meter.h"
#include "node/placed_bags.h"
#include "peer/limits.h"

namespace embertide {
namespace {

constexpr size_t kMaxReadBags = 65536;
// Making them takes a tenth of a second of one core.
constexpr std::chrono::seconds kCurvesEvery{60};

Status CheckWeights(std::span<const Feature> features, const v1::ReadRequest& request) {
  const auto weighed = std::ranges::find_if(features, &Feature::weighed);
  if (request.weights().empty() && weighed == features.end()) return Status::Ok();
  if (request.weights_size() != request.keys_size()) {
    return {Code::kInvalidArgument, std::to_string(request.weights_size()) + " weights for " +
                                        std::to_string(request.keys_size()) + " keys"};
  }
  if (std::ranges::all_of(request.weights(), [](float weight) { return std::isfinite(weight); })) {
    return Status::Ok();
  }
  return {Code::kInvalidArgument, "a weight is not finite"};
}

uint32_t HotKeysOf(uint32_t wanted) { return wanted == 0 ? 100 : std::min(wanted, 1000U); }

}  // namespace

void Fleet::FillTask(const TaskHealth& task, v1::TaskHealth* out) {
  out->set_name(task.name);
  out->set_state(task.no_thread ? "no thread" : task.failing ? "failing" : "running");
  out->set_failures(task.failures + task.failed_starts);
  out->set_error(task.last_error);
  out->set_since_ms(task.failing_since_ms);
}

uint64_t Fleet::StalenessMs(const VersionInfo& version) {
  return version.committed_ms == 0 ? 0 : MsSince(version.committed_ms);
}

std::optional<uint32_t> Fleet::TableOfId(uint32_t id) const {
  const auto& tables = state_->manifest().tables;
  for (uint32_t t = 0; t < tables.size(); ++t) {
    if (tables[t].id == id) return t;
  }
  return std::nullopt;
}

Status Fleet::Prove(const v1::LookupPart& part, uint32_t* table) const {
  const auto refuse = [](const std::string& why) { return Status(Code::kInvalidArgument, why); };
  const auto found = TableOfId(part.table_id());
  if (!found) return refuse("table " + std::to_string(part.table_id()) + " is not served here");
  *table = *found;
  if (part.version().number() == 0) return refuse("a part names no version");
  if (part.keys().empty()) return refuse("a part has no key");
  const bool weighed = part.pooling() == v1::PART_POOLING_WEIGHED_SUM;
  const bool sums = weighed || part.pooling() == v1::PART_POOLING_SUM;
  if (!sums && part.pooling() != v1::PART_POOLING_ROWS) {
    return refuse("pooling " + std::to_string(part.pooling()) + " is neither rows nor sums");
  }
  if (sums && state_->manifest().tables[*table].layout.is_keys()) {
    return refuse("table " + state_->manifest().tables[*table].name + " has rows of keys: no sums");
  }
  if (part.bag_weights_size() != (weighed ? part.bag_keys_size() : 0)) {
    return refuse(std::to_string(part.bag_weights_size()) + " bag_weights for " +
                  std::to_string(part.bag_keys_size()) + " bag_keys");
  }
  for (const float weight : part.bag_weights()) {
    if (!std::isfinite(weight)) return refuse("a weight is not finite");
  }
  if (part.has_since() &&
      (sums || part.since().number() == 0 || part.since().number() >= part.version().number())) {
    return refuse("since names version " + std::to_string(part.since().number()) +
                  "; it goes with rows, and with a version before that of the part");
  }
  if (!sums) return Status::Ok();
  const auto& offsets = part.bag_offsets();
  const auto keys = static_cast<uint32_t>(part.keys_size());
  const auto places = static_cast<uint32_t>(part.bag_keys_size());
  if (offsets.size() < 2 || offsets[0] != 0 || offsets[offsets.size() - 1] != places ||
      !std::is_sorted(offsets.begin(), offsets.end())) {
    return refuse("bag_offsets must ascend from 0 to the " + std::to_string(places) + " bag_keys");
  }
  const size_t answer = (static_cast<size_t>(offsets.size()) - 1) *
                        state_->manifest().tables[*table].layout.dim() * sizeof(double);
  if (answer > kMaxAnswerBytes) {
    return refuse("sums of " + std::to_string(answer) + " bytes are more than " +
                  std::to_string(kMaxAnswerBytes));
  }
  for (const uint32_t place : part.bag_keys()) {
    if (place >= keys)
      return refuse("bag_keys names key " + std::to_string(place) + " of " + std::to_string(keys));
  }
  return Status::Ok();
}

Result<ReadView> Fleet::PinNamed(const v1::Version& version) const {
  Result<ReadView> view = state_->store().Pin(version.number());
  if (!view.ok()) return view;
  const auto info = state_->InfoOf(version.number());
  if (info != nullptr && info->lineage == version.lineage()) return view;
  return Status(Code::kVersionGone, "another publisher's");
}

Status Fleet::Answer(const v1::LookupPart& part, uint32_t table, AnswerView* at,
                     v1::LookupResult* result) {
  const v1::Version& version = part.version();
  if (at->number != version.number() || at->lineage != version.lineage()) {
    Result<ReadView> view = PinNamed(version);
    if (!view.ok() && view.status().code() != Code::kVersionGone) return view.status();
    if (!view.ok()) {
      result->set_refusal(v1::LOOKUP_REFUSAL_VERSION_GONE);
      return Status::Ok();
    }
    at->view = std::make_unique<ReadView>(std::move(*view));
    at->number = version.number();
    at->lineage = version.lineage();
  }
  // The same bits, read as Triton's signed ids.
  const std::span<const int64_t> keys(reinterpret_cast<const int64_t*>(part.keys().data()),
                                      static_cast<size_t>(part.keys_size()));
  std::string sources(keys.size(), '\0');
  auto* bytes = reinterpret_cast<uint8_t*>(sources.data());
  const BagReader reader(*at->view);
  Status status;
  if (part.pooling() == v1::PART_POOLING_ROWS) {
    // What is not held any more cannot be compared with.
    Result<ReadView> since = Status(Code::kVersionGone, "not named");
    if (part.has_since()) since = PinNamed(part.since());
    status = reader.CopyRows(table, keys, result->mutable_rows(), bytes,
                             since.ok() ? &since.value() : nullptr);
  } else {
    const uint32_t dim = state_->manifest().tables[table].layout.dim();
    const int bags = part.bag_offsets_size() - 1;
    result->mutable_sums()->Resize(bags * static_cast<int>(dim), 0.0);
    status =
        reader.SumBags(table, keys, {part.bag_offsets().data(), static_cast<size_t>(bags) + 1},
                       {part.bag_keys().data(), static_cast<size_t>(part.bag_keys_size())},
                       {part.bag_weights().data(), static_cast<size_t>(part.bag_weights_size())},
                       result->mutable_sums()->mutable_data(), bytes);
  }
  if (status.ok()) {
    result->set_sources(std::move(sources));
  } else if (status.code() == Code::kNotOwner) {
    result->Clear();
    result->set_refusal(v1::LOOKUP_REFUSAL_NOT_OWNER);
    status = Status::Ok();
  }
  return status;
}

Status Fleet::Lookup(const v1::LookupRequest& request, v1::LookupResponse* response) {
  if (!request.asker().empty() && request.asker_versions().has_newest()) {
    peers_->OnVersionHint(request.asker(), request.asker_versions());
  }
  response->set_plan_epoch(plan_->epoch());
  *response->mutable_versions() = Range();
  if (request.parts().empty()) return Status::Ok();
  if (!serving_) return {Code::kUnavailable, "loading, or shutting down"};
  size_t keys = 0;
  size_t rows = 0;  // bytes that are read
  size_t answer = 0;
  std::vector<uint32_t> tables;  // by part
  tables.reserve(static_cast<size_t>(request.parts_size()));
  for (const v1::LookupPart& part : request.parts()) {
    uint32_t& table = tables.emplace_back();
    EMBERTIDE_RETURN_IF_ERROR(Prove(part, &table));
    const auto here = static_cast<size_t>(part.keys_size());
    keys += here;
    const RowLayout& layout = state_->manifest().tables[table].layout;
    const size_t row = layout.dim() * (layout.is_keys() ? sizeof(int64_t) : sizeof(float));
    rows += here * row;
    answer += part.pooling() == v1::PART_POOLING_ROWS
                  ? here * (kRecordHeaderBytes + row)
                  : static_cast<size_t>(part.bag_offsets_size()) * layout.dim() * sizeof(double);
  }
  if (rows > kMaxAnswerBytes) {
    return {Code::kInvalidArgument, "the keys' rows may have " + std::to_string(rows) +
                                        " bytes; at most " + std::to_string(kMaxAnswerBytes)};
  }
  if (answer > static_cast<size_t>(kMaxMessageBytes)) {
    return {Code::kInvalidArgument, "the answer would have " + std::to_string(answer) +
                                        " bytes; at most " + std::to_string(kMaxMessageBytes)};
  }
  if (static_cast<size_t>(request.parts_size()) > kMaxPartsACall || keys > kMaxKeysACall) {
    return {Code::kInvalidArgument, std::to_string(request.parts_size()) + " parts with " +
                                        std::to_string(keys) + " keys; a call has at most " +
                                        std::to_string(kMaxPartsACall) + " and " +
                                        std::to_string(kMaxKeysACall)};
  }
  AnswerView at;  // parts of one call are mostly of one version
  for (int p = 0; p < request.parts_size(); ++p) {
    EMBERTIDE_RETURN_IF_ERROR(
        Answer(request.parts(p), tables[static_cast<size_t>(p)], &at, response->add_results()));
  }
  return Status::Ok();
}

Status Fleet::Read(const v1::ReadRequest& request, Deadline deadline, v1::ReadResponse* response) {
  const auto begun = std::chrono::steady_clock::now();
  Status status = ReadBags(request, deadline, response);
  state_->NoteLatency(std::chrono::steady_clock::now() - begun, 1);
  return status;
}

Status Fleet::ReadBags(const v1::ReadRequest& request, Deadline deadline,
                       v1::ReadResponse* response) {
  if (!serving_) return {Code::kUnavailable, "loading, or shutting down"};
  const size_t features = state_->features().size();
  const auto bags = static_cast<size_t>(request.lengths_size());
  if (bags == 0 || bags % features != 0 || bags > kMaxReadBags) {
    return {Code::kInvalidArgument, std::to_string(bags) + " lengths; give samples x " +
                                        std::to_string(features) + ", at most " +
                                        std::to_string(kMaxReadBags)};
  }
  std::vector<uint32_t> offsets = {0};
  uint64_t total = 0;
  for (const uint32_t length : request.lengths()) {
    total += length;
    if (total > static_cast<uint64_t>(request.keys_size())) break;
    offsets.push_back(static_cast<uint32_t>(total));
  }
  if (total != static_cast<uint64_t>(request.keys_size()) || total > kMaxKeysACall) {
    return {Code::kInvalidArgument, "lengths add up to " + std::to_string(total) + ", there are " +
                                        std::to_string(request.keys_size()) + " keys (at most " +
                                        std::to_string(kMaxKeysACall) + ")"};
  }
  EMBERTIDE_RETURN_IF_ERROR(CheckWeights(state_->features(), request));
  std::vector<BagFeature> of;
  uint32_t column = 0;
  for (const Feature& feature : state_->features()) {
    of.push_back({feature.table, feature.pooling, column});
    column += feature.dim;
  }
  const std::vector<uint64_t> places = PlaceBags(state_->features(), bags, offsets);
  if (places.back() * sizeof(float) > kMaxAnswerBytes) {
    return {Code::kInvalidArgument,
            std::to_string(bags / features) + " samples of " + std::to_string(places.back()) +
                " values in all are more than " + std::to_string(kMaxAnswerBytes) + " bytes"};
  }
  const std::vector<int64_t> keys(request.keys().begin(), request.keys().end());
  std::string sources(keys.size(), '\0');
  response->mutable_embeddings()->Resize(static_cast<int>(places.back()), 0.0F);
  KeyBags bags_of{keys, offsets, response->mutable_embeddings()->mutable_data(), column,
                  reinterpret_cast<uint8_t*>(sources.data())};
  if (!request.weights().empty()) bags_of.weights = request.weights().data();
  const std::unique_ptr<RemoteLookup> remote = NewRemoteLookup();
  Status status;
  for (const bool last : {false, true}) {
    const Result<Pinned> pinned = Pin();
    if (!pinned.ok()) return pinned.status();
    const auto plan = routing();
    status = remote->Fetch(pinned.value(), of, {&bags_of, 1}, deadline, {.may_start_over = !last});
    if (status.ok()) status = remote->ResultOf(0).status;
    if (status.ok()) {
      const BagReader rows(pinned.value().rows);
      const uint64_t* const at = places.data();
      status = HasSequences(state_->features())
                   ? LookupPlaced(rows, state_->features(), {&bags_of, 1}, {&at, 1}, {})
                   : rows.Lookup(of, {&bags_of, 1}, {});
    }
    if (status.ok()) {
      response->mutable_version()->set_number(pinned.value().info->number);
      response->mutable_version()->set_lineage(pinned.value().info->lineage);
      response->set_sources(std::move(sources));
      response->set_plan_epoch(plan->epoch);
      return status;
    }
    if (status.code() == Code::kNotOwner) RefreshPlan(deadline);
    if (status.code() != Code::kNotOwner && status.code() != Code::kVersionGone) return status;
  }
  return status;
}

Status Fleet::FillUsage(v1::NodeServiceGetStatusResponse* response) const {
  const Store& store = state_->store();
  const Result<ReadView> view = store.PinNewest();
  if (!view.ok()) return view.status();
  for (uint32_t t = 0; t < state_->manifest().tables.size(); ++t) {
    const TableConfig& table = state_->manifest().tables[t];
    std::vector<uint64_t> index_bytes(state_->options().devices);
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

Status Fleet::GetStatus(v1::NodeServiceGetStatusResponse* response) {
  if (!started_) return {Code::kUnavailable, "starting"};
  *response->mutable_node() = Self();
  *response->mutable_versions() = Range();
  response->set_plan_epoch(plan_->epoch());
  if (response->versions().has_newest()) {
    const auto info = state_->served();
    response->mutable_newest_pinned()->set_number(info->number);
    response->mutable_newest_pinned()->set_lineage(info->lineage);
    response->set_staleness_ms(StalenessMs(*info));
    response->set_watermark_ms(info->watermark_ms);
  }
  EMBERTIDE_RETURN_IF_ERROR(FillUsage(response));
  auto& counters = *response->mutable_counters();
  const FleetStats fleet = stats();
  for (const FleetEvent& event : kFleetEvents) counters[event.name] = fleet.*event.count;
  for (size_t n = 0; n < kNoAnswers; ++n) {
    counters[std::string("degraded_keys_") + kNoAnswerNames[n]] = fleet.degraded_keys[n];
  }
  counters["peers_alive"] = fleet.peers_alive;
  counters["buckets_held"] = fleet.buckets_held;
  counters["buckets_left"] = fleet.buckets_left;
  const StoreStats rows = state_->store().Stats();
  for (size_t s = 0; s < kSources; ++s) {
    counters[std::string("lookups_") + SourceName(static_cast<Source>(s))] = rows.hits[s];
  }
  counters["bad_blocks"] = rows.ssd.bad_blocks;
  counters["mended_rows"] = rows.ssd.mended_rows;
  counters["failed_mends"] = state_->failed_mends();
  state_->tasks().StartMissing();
  for (const TaskHealth& task : state_->AllTasks()) FillTask(task, response->add_tasks());
  return Status::Ok();
}

std::vector<MissCurve> Fleet::MakeCurves() const {
  const Store& store = state_->store();
  const Result<ReadView> view = store.PinNewest();
  if (!view.ok()) return {};
  std::map<std::pair<uint32_t, uint32_t>, TableRows> rows;
  for (uint32_t t = 0; t < state_->manifest().tables.size(); ++t) {
    // Those with budgets of their own share nothing.
    if (store.options().table_budgets.contains(state_->manifest().tables[t].name)) continue;
    for (uint32_t b = 0; b < state_->manifest().tables[t].buckets(); ++b) {
      const auto size = store.BucketSizeOf(view.value(), t, b);
      const auto device = store.DeviceOf(t, b);
      if (!size || !device) continue;
      rows[{t, *device}].rows += size->rows;
      rows[{t, *device}].bytes += size->payload_bytes;
    }
  }
  return state_->load()->misses().Curves(
      [&](uint32_t table, uint32_t bucket) { return store.DeviceOf(table, bucket); },
      [&](uint32_t table, uint32_t device) {
        const auto found = rows.find({table, device});
        return found == rows.end() ? TableRows() : found->second;
      });
}

void Fleet::FillTiers(v1::NodeServiceGetLoadResponse* response) {
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
      out->set_table_id(state_->manifest().tables[curve.table].id);
      out->set_device(curve.device);
      out->mutable_bytes()->Add(curve.bytes.begin(), curve.bytes.end());
      for (const double missed : curve.missed) out->add_missed(static_cast<float>(missed));
    }
  }
  for (uint32_t d = 0; d < state_->options().devices; ++d) {
    const uint64_t bytes = state_->store().RowRoom(d);
    if (bytes == 0) continue;
    v1::RowRoom* room = response->add_row_rooms();
    room->set_device(d);
    room->set_bytes(bytes);
  }
}

Status Fleet::GetLoad(uint32_t hot_keys, v1::NodeServiceGetLoadResponse* response) {
  if (!serving_) return {Code::kUnavailable, "loading, or shutting down"};
  const LoadWindow window = state_->load()->Last(HotKeysOf(hot_keys));
  response->set_window_ms(window.window_ms);
  response->set_window(window.number);
  response->set_cpu_us(window.cpu_us);
  response->set_requests(window.requests);
  response->set_request_us(window.request_us);
  const Store& store = state_->store();
  const Result<ReadView> view = store.PinNewest();
  if (!view.ok()) return view.status();
  std::vector<uint32_t> tables(state_->manifest().tables.size());
  for (uint32_t t = 0; t < tables.size(); ++t) tables[t] = t;
  std::ranges::sort(tables, {}, [&](uint32_t t) { return state_->manifest().tables[t].id; });
  for (const uint32_t t : tables) {
    for (uint32_t b = 0; b < state_->manifest().tables[t].buckets(); ++b) {
      const auto size = store.BucketSizeOf(view.value(), t, b);
      const auto device = store.DeviceOf(t, b);
      const BucketReads reads = window.window_ms == 0 ? BucketReads() : window.buckets[t][b];
      const uint64_t elsewhere = reads.asked + reads.hot_reads;
      const bool held = size && device;
      if (!held && elsewhere == 0) continue;
      v1::BucketLoad* load = response->add_buckets();
      load->set_table_id(state_->manifest().tables[t].id);
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
  for (const HotKeyReads& hot : window.hot_keys) {
    v1::HotKey* out = response->add_hot_keys();
    out->set_table_id(state_->manifest().tables[hot.table].id);
    out->set_key(hot.key);
    out->set_reads(hot.reads);
    out->set_error(hot.error);
  }
  FillTraffic(response);
  if (state_->options().ssd_budget_bytes > 0) FillTiers(response);
  response->set_dropped(window.dropped + state_->load()->misses().dropped());
  if (const auto info = state_->InfoOf(view.value().version())) {
    response->set_watermark_ms(info->watermark_ms);
  }
  return Status::Ok();
}

void Fleet::FillTraffic(v1::NodeServiceGetLoadResponse* response) const {
  for (const auto& [name, traffic] : peers_->Traffic()) {
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

Status Fleet::Explain(const v1::ExplainRequest& request, v1::ExplainResponse* response) {
  if (!serving_) return {Code::kUnavailable, "loading, or shutting down"};
  const auto& tables = state_->manifest().tables;
  const auto table = std::ranges::find(tables, request.table(), &TableConfig::name);
  if (table == tables.end()) {
    std::string names;
    for (const TableConfig& each : tables) names += " " + each.name;
    return {Code::kNotFound, "table \"" + request.table() + "\" does not exist; there are" + names};
  }
  const Result<ReadView> view =
      request.version() == 0 ? state_->store().PinNewest() : state_->store().Pin(request.version());
  if (!view.ok()) return view.status();
  const auto t = static_cast<uint32_t>(table - tables.begin());
  const RowLocation row = view.value().Explain(t, request.key());
  const auto info = state_->InfoOf(view.value().version());
  if (info == nullptr) {
    return {Code::kVersionGone,
            "version " + std::to_string(view.value().version()) + " was never held here"};
  }
  response->mutable_version()->set_number(info->number);
  response->mutable_version()->set_lineage(info->lineage);
  const uint32_t bucket = BucketOfHash(HashKey(request.key()), table->bucket_bits);
  response->set_bucket(bucket);
  const auto plan = routing();
  response->set_plan_epoch(plan->epoch);
  for (const v1::Assignment& assignment : plan->plan.assignments()) {
    if (assignment.table_id() != table->id || bucket < assignment.bucket_begin() ||
        bucket - assignment.bucket_begin() >= assignment.bucket_count()) {
      continue;
    }
    *response->mutable_owners() = assignment.owners();
  }
  for (const uint16_t peer : plan->buckets[t][bucket].owners) {
    response->add_peers(plan->peers[peer].address);
  }
  response->set_held(row.held);
  response->set_resident(row.resident);
  if (row.tier == Source::kPruned) response->set_tombstone(v1::TOMBSTONE_REASON_PRUNED);
  if (!row.resident) return Status::Ok();
  response->set_slot_bytes(row.slot_bytes);
  response->set_device(row.device);
  response->set_tier(row.tier == Source::kSsd ? v1::TIER_SSD : v1::TIER_DDR);
  response->set_live(row.live);
  response->set_payload_bytes(row.payload_bytes);
  response->set_access_count(row.access_count);
  response->set_changed_version(row.version);
  if (row.hbm_copy) response->set_hbm_copy(1 + *row.hbm_copy);
  return Status::Ok();
}

}  // namespace embertide
