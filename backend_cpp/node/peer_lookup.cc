// Proving a peer's parts, and reading what they ask for.
#include "node/peer_lookup.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/trace_id.h"
#include "peer/limits.h"

namespace embertide {
namespace {

// Entries that are kept of one call, which may be for many requests: more would leave no place for
// others.
constexpr size_t kSlowOfOne = 4;

}  // namespace

PeerLookup::PeerLookup(const NodeState* state, const PlanKeeper* plan,
                       const CommonVersions* versions, PeerPool* peers)
    : state_(*state), plan_(plan), versions_(versions), peers_(peers) {}

std::optional<uint32_t> PeerLookup::TableOfId(uint32_t id) const {
  const auto& tables = state_.manifest().tables;
  for (uint32_t t = 0; t < tables.size(); ++t) {
    if (tables[t].id == id) return t;
  }
  return std::nullopt;
}

Status PeerLookup::Prove(const v1::LookupPart& part, uint32_t* table) const {
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
  if (sums && state_.manifest().tables[*table].layout.is_keys()) {
    return refuse("table " + state_.manifest().tables[*table].name + " has rows of keys: no sums");
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
  if (static_cast<size_t>(part.traces_size()) > kMaxTracesAPart ||
      !std::ranges::all_of(part.traces(), IsTraceId)) {
    return refuse("traces are at most " + std::to_string(kMaxTracesAPart) +
                  ", each of 32 digits of lowercase hex");
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
                        state_.manifest().tables[*table].layout.dim() * sizeof(double);
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

Result<ReadView> PeerLookup::PinNamed(const v1::Version& version) const {
  Result<ReadView> view = state_.store().Pin(version.number());
  if (!view.ok()) return view;
  const auto info = state_.InfoOf(version.number());
  if (info != nullptr && info->lineage == version.lineage()) return view;
  return Status(Code::kVersionGone, "another publisher's");
}

Status PeerLookup::Answer(const v1::LookupPart& part, uint32_t table, View* at,
                          v1::LookupResult* result) const {
  const v1::Version& version = part.version();
  if (at->number != version.number() || at->lineage != version.lineage()) {
    Result<ReadView> view = PinNamed(version);
    if (!view.ok() && view.status().code() != Code::kVersionGone) return view.status();
    if (!view.ok()) {
      result->set_refusal(v1::LOOKUP_REFUSAL_VERSION_GONE);
      return Status::Ok();
    }
    at->rows = std::make_unique<ReadView>(std::move(*view));
    at->number = version.number();
    at->lineage = version.lineage();
  }
  // The same bits, read as Triton's signed ids.
  const std::span<const int64_t> keys(reinterpret_cast<const int64_t*>(part.keys().data()),
                                      static_cast<size_t>(part.keys_size()));
  std::string sources(keys.size(), '\0');
  auto* bytes = reinterpret_cast<uint8_t*>(sources.data());
  const BagReader reader(*at->rows);
  Status status;
  if (part.pooling() == v1::PART_POOLING_ROWS) {
    // A version that is not held any more cannot be compared with.
    Result<ReadView> since = Status(Code::kVersionGone, "not named");
    if (part.has_since()) since = PinNamed(part.since());
    status = reader.CopyRows(table, keys, result->mutable_rows(), bytes,
                             since.ok() ? &since.value() : nullptr);
  } else {
    const uint32_t dim = state_.manifest().tables[table].layout.dim();
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

// Copies of rows that a peer keeps are asked about whether somebody reads them or not.
void PeerLookup::NoteLookup(const v1::LookupRequest& request,
                            std::span<const uint32_t> tables) const {
  KeySample* sample = state_.sample();
  if (sample == nullptr || !sample->Takes()) return;
  std::map<uint32_t, std::vector<int64_t>> by_table;
  for (int p = 0; p < request.parts_size(); ++p) {
    const v1::LookupPart& part = request.parts(p);
    if (part.has_since()) continue;
    std::vector<int64_t>& keys = by_table[tables[static_cast<size_t>(p)]];
    keys.insert(keys.end(), part.keys().begin(), part.keys().end());
  }
  KeySample::Lookup lookup;
  for (auto& [table, keys] : by_table) lookup.push_back({table, std::move(keys)});
  sample->Add(std::move(lookup));
}

void PeerLookup::NoteSlow(const v1::LookupRequest& request, Clock::time_point began) const {
  const Clock::time_point now = Clock::now();
  const double whole_us = std::chrono::duration<double, std::micro>(now - began).count();
  if (state_.load() == nullptr || !state_.slow_lookups().IsSlow(whole_us, now)) return;
  const auto ended = std::chrono::system_clock::now().time_since_epoch();
  SlowLookup slow{
      .ended_ms = std::chrono::duration_cast<std::chrono::milliseconds>(ended).count(),
      .trace = {},
      .asker = {},
      .keys = 0,
      .whole_us = whole_us,
  };
  std::set<std::string> traces;
  for (const v1::LookupPart& part : request.parts()) {
    slow.keys += static_cast<uint64_t>(part.keys_size());
    for (const std::string& trace : part.traces()) {
      if (traces.size() < kSlowOfOne) traces.insert(trace);
    }
  }
  // A name is believed if the plan has such a peer.
  const std::shared_ptr<const Routing> plan = plan_->routing();
  if (plan != nullptr &&
      std::ranges::find(plan->peers, request.asker(), &Routing::Peer::name) != plan->peers.end()) {
    slow.asker = request.asker();
  }
  if (traces.empty()) traces.emplace();
  for (const std::string& trace : traces) {
    slow.trace = trace;
    state_.slow_lookups().Add(slow, now);
  }
}

Status PeerLookup::Lookup(const v1::LookupRequest& request, v1::LookupResponse* response) const {
  const Clock::time_point began = Clock::now();
  Status status = AnswerParts(request, response);
  if (status.ok() && !request.parts().empty()) NoteSlow(request, began);
  return status;
}

Status PeerLookup::AnswerParts(const v1::LookupRequest& request,
                               v1::LookupResponse* response) const {
  if (!request.asker().empty() && request.asker_versions().has_newest()) {
    peers_->OnVersionHint(request.asker(), request.asker_versions());
  }
  response->set_plan_epoch(plan_->epoch());
  *response->mutable_versions() = versions_->Range();
  if (request.parts().empty()) return Status::Ok();
  if (!versions_->serving()) return {Code::kUnavailable, "loading, or shutting down"};
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
    const RowLayout& layout = state_.manifest().tables[table].layout;
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
  NoteLookup(request, tables);
  View at;  // parts of one call are mostly of one version
  for (int p = 0; p < request.parts_size(); ++p) {
    EMBERTIDE_RETURN_IF_ERROR(
        Answer(request.parts(p), tables[static_cast<size_t>(p)], &at, response->add_results()));
  }
  return Status::Ok();
}

}  // namespace embertide
