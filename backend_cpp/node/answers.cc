// Reading bags for an operator, and explaining a row.
#include "node/answers.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "embertide/hash.h"
#include "node/placed_bags.h"
#include "peer/limits.h"

namespace embertide {
namespace {

constexpr size_t kMaxReadBags = 65536;

Status NotServing() { return {Code::kUnavailable, "loading, or shutting down"}; }

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

}  // namespace

Answers::Answers(Parts parts)
    : parts_(std::move(parts)),
      state_(*parts_.state),
      lookup_(parts_.state, parts_.plan, parts_.versions, parts_.peers) {}

Status Answers::Lookup(const v1::LookupRequest& request, v1::LookupResponse* response) {
  return lookup_.Lookup(request, response);
}

Status Answers::GetStatus(v1::NodeServiceGetStatusResponse* response) {
  return parts_.report->GetStatus(response);
}

Status Answers::GetLoad(uint32_t hot_keys, v1::NodeServiceGetLoadResponse* response) {
  if (!parts_.versions->serving()) return NotServing();
  return parts_.report->GetLoad(hot_keys, response);
}

Status Answers::Read(const v1::ReadRequest& request, Deadline deadline,
                     v1::ReadResponse* response) {
  const auto begun = std::chrono::steady_clock::now();
  Status status = ReadBags(request, deadline, response);
  state_.NoteLatency(std::chrono::steady_clock::now() - begun, 1);
  return status;
}

Status Answers::ReadBags(const v1::ReadRequest& request, Deadline deadline,
                         v1::ReadResponse* response) {
  if (!parts_.versions->serving()) return NotServing();
  const size_t features = state_.features().size();
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
  EMBERTIDE_RETURN_IF_ERROR(CheckWeights(state_.features(), request));
  std::vector<BagFeature> of;
  uint32_t column = 0;
  for (const Feature& feature : state_.features()) {
    of.push_back({feature.table, feature.pooling, column});
    column += feature.dim;
  }
  const std::vector<uint64_t> places = PlaceBags(state_.features(), bags, offsets);
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
  const std::unique_ptr<RemoteLookup> remote = parts_.new_remote_lookup();
  Status status;
  for (const bool last : {false, true}) {
    const Result<Pinned> pinned = parts_.versions->Pin();
    if (!pinned.ok()) return pinned.status();
    const auto plan = parts_.plan->routing();
    status = remote->Fetch(pinned.value(), of, {&bags_of, 1}, deadline, {.may_start_over = !last});
    if (status.ok()) status = remote->ResultOf(0).status;
    if (status.ok()) {
      const BagReader rows(pinned.value().rows);
      const uint64_t* const at = places.data();
      status = HasSequences(state_.features())
                   ? LookupPlaced(rows, state_.features(), {&bags_of, 1}, {&at, 1}, {})
                   : rows.Lookup(of, {&bags_of, 1}, {});
    }
    if (status.ok()) {
      response->mutable_version()->set_number(pinned.value().info->number);
      response->mutable_version()->set_lineage(pinned.value().info->lineage);
      response->set_sources(std::move(sources));
      response->set_plan_epoch(plan->epoch);
      return status;
    }
    if (status.code() == Code::kNotOwner) parts_.plan->RefreshPlan(deadline);
    if (status.code() != Code::kNotOwner && status.code() != Code::kVersionGone) return status;
  }
  return status;
}

Status Answers::Explain(const v1::ExplainRequest& request, v1::ExplainResponse* response) {
  if (!parts_.versions->serving()) return NotServing();
  const auto& tables = state_.manifest().tables;
  const auto table = std::ranges::find(tables, request.table(), &TableConfig::name);
  if (table == tables.end()) {
    std::string names;
    for (const TableConfig& each : tables) names += " " + each.name;
    return {Code::kNotFound, "table \"" + request.table() + "\" does not exist; there are" + names};
  }
  const Result<ReadView> view =
      request.version() == 0 ? state_.store().PinNewest() : state_.store().Pin(request.version());
  if (!view.ok()) return view.status();
  const auto t = static_cast<uint32_t>(table - tables.begin());
  const RowLocation row = view.value().Explain(t, request.key());
  const auto info = state_.InfoOf(view.value().version());
  if (info == nullptr) {
    return {Code::kVersionGone,
            "version " + std::to_string(view.value().version()) + " was never held here"};
  }
  response->mutable_version()->set_number(info->number);
  response->mutable_version()->set_lineage(info->lineage);
  const uint32_t bucket = BucketOfHash(HashKey(request.key()), table->bucket_bits);
  response->set_bucket(bucket);
  const auto plan = parts_.plan->routing();
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
