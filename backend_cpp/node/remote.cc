// Splitting keys by owner, asking, and putting answers where lookups find them.
#include "node/remote.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <memory>
#include <thread>

#include "embertide/hash.h"
#include "peer/limits.h"

namespace embertide {
namespace {

// A larger bag comes as several sums.
constexpr size_t kKeysASum = 4096;

// Bytes that the answers to one execution may take.
constexpr size_t kMaxFetchBytes = 512 << 20;

// Bytes that a RemoteLookup keeps of each kind of memory between executions, about.
constexpr size_t kKeptBytes = 1 << 20;

template <typename T>
void Trim(std::vector<T>* values) {
  if (values->capacity() * sizeof(T) > kKeptBytes) std::vector<T>().swap(*values);
}

// How long an execution looks for answers before its thread sleeps.
constexpr std::chrono::microseconds kSpin{400};

// The largest size of one key in an answer: a row, or the sum of a bag that it is alone in.
size_t AnswerBytes(const TableConfig& table) {
  return kRecordHeaderBytes + table.layout.dim() * sizeof(double);
}

Source SourceOf(char byte) {
  const auto source = static_cast<Source>(byte);
  // Where an owner found a row is its own affair; that there is none is the asker's, too.
  return source == Source::kDefault || source == Source::kPruned ? source : Source::kRemote;
}

}  // namespace

bool RemoteLookup::IsHere(const Routing::Bucket& planned, uint32_t table, uint32_t bucket,
                          uint64_t version) const {
  // A bucket that leaves may be dropped while it is read: by this plan, its owners answer.
  if (!planned.owned) return false;
  if (all_held_) return true;
  const auto since = store_.HeldSince(table, bucket);
  return since && *since <= version;
}

// Who refused a part may hold this key's bucket all the same: without another owner it is asked
// again.
RemoteLookup::Owner RemoteLookup::OwnerOf(const Routing& routing, const Wanted& wanted, int64_t key,
                                          uint64_t version) const {
  const uint32_t bucket =
      BucketOfHash(HashKey(static_cast<uint64_t>(key)), manifest_.tables[wanted.table].bucket_bits);
  const Routing::Bucket& planned = routing.buckets[wanted.table][bucket];
  if (IsHere(planned, wanted.table, bucket, version)) return {Owner::kHere};
  Owner found;
  bool again = false;
  for (const uint16_t owner : planned.owners) {
    if (const auto why = passed_over_[owner]) {
      // An owner that lives and lacks the version is a better reason to give than a dead one.
      if (found.why == NoAnswer::kDead) found.why = *why;
    } else if (owner == wanted.refused_by) {
      again = true;
    } else if (found.peer == Owner::kNone) {
      found.peer = owner;
    } else {
      found.more = true;
    }
  }
  if (found.peer == Owner::kNone && again) found.peer = wanted.refused_by;
  if (found.peer != Owner::kNone) return found;
  const auto since = store_.HeldSince(wanted.table, bucket);
  if (since && *since <= version) found.peer = Owner::kHere;
  return found;
}

bool RemoteLookup::TakeHot(Wanted* wanted, uint64_t key, HotSet::Version version) {
  ++met_;
  wanted->noted = until_noted_ == 0;
  until_noted_ = wanted->noted ? gaps_.Gap(hot_->every()) : until_noted_ - 1;
  HotKey hot{*wanted, {}, payloads_.size()};
  const HotSet::Name name{wanted->table, key};
  const HotSet::Found found = sets_->Find(name, version, &hot.row, &payloads_);
  if (found == HotSet::Found::kOtherVersion) ++stale_;
  if (found != HotSet::Found::kYes) return false;
  hot_keys_.push_back(hot);
  if (wanted->noted) asked_.push_back({name, version, HotRows::Asked::How::kHere});
  return true;
}

void RemoteLookup::Observe(uint32_t table, uint64_t key, uint64_t hash, uint32_t bucket, bool hot) {
  if (options_.observer == nullptr) return;
  if (IsWatched(hash)) watched_.push_back({hash, table, bucket});
  if (until_observed_-- > 0) return;
  const uint32_t every = options_.observer->every();
  until_observed_ = gaps_.Gap(every);
  observed_.push_back({key, hash, table, bucket, 0, every, hot ? Source::kHot : Source::kRemote});
}

void RemoteLookup::Tell() {
  if (met_ == 0) return;
  hot_->stats().reads += hot_keys_.size();
  hot_->stats().stale += stale_;
  hot_->Note(asked_, met_);
  if (!observed_.empty()) options_.observer->Observe(observed_);
  if (!watched_.empty()) options_.observer->Watch(watched_);
  asked_.clear();
  observed_.clear();
  watched_.clear();
  met_ = stale_ = 0;
}

// Requires: at most `keys` keys come.
void RemoteLookup::BeginParts(const Routing& routing, size_t keys, Parts* parts) {
  parts->all.clear();
  parts->more = false;
  parts->answer_bytes = 0;
  parts->open.assign(routing.peers.size() * manifest_.tables.size() * v1::PartPooling_ARRAYSIZE,
                     -1);
  const size_t size = std::bit_ceil(2 * keys + 1);
  if (seen_.size() < size) seen_.assign(size, {});
  ++round_;
}

// Owners that are asked for more than a part may carry get several.
uint32_t RemoteLookup::OpenPart(uint16_t peer, uint32_t table, v1::PartPooling pooling,
                                Parts* parts) const {
  constexpr size_t kUsual = 64;
  const size_t of_peer = peer * manifest_.tables.size() + table;
  int32_t& open = parts->open[of_peer * v1::PartPooling_ARRAYSIZE + static_cast<size_t>(pooling)];
  const size_t bytes = AnswerBytes(manifest_.tables[table]);
  const size_t most = std::min(kMaxKeysACall, kMaxAnswerBytes / bytes) / 2;
  if (open >= 0 && parts->all[static_cast<size_t>(open)].users.size() < most) {
    return static_cast<uint32_t>(open);
  }
  open = static_cast<int32_t>(parts->all.size());
  Part& part = parts->all.emplace_back();
  part.peer = peer;
  part.table = table;
  part.pooling = pooling;
  part.keys.reserve(kUsual);
  part.users.reserve(kUsual);
  part.user_place.reserve(kUsual);
  if (part.sums()) part.offsets.push_back(0);
  return static_cast<uint32_t>(open);
}

void RemoteLookup::AddUser(const Wanted& wanted, int64_t key, uint32_t number, Parts* parts) {
  Part& part = parts->all[number];
  parts->answer_bytes += AnswerBytes(manifest_.tables[part.table]);
  const size_t mask = seen_.size() - 1;
  size_t at = (HashKey(static_cast<uint64_t>(key)) + number * 0x9E3779B97F4A7C15ULL) & mask;
  while (seen_[at].round == round_ && (seen_[at].key != key || seen_[at].part != number)) {
    at = (at + 1) & mask;
  }
  if (seen_[at].round != round_) {
    seen_[at] = {key, number, static_cast<uint32_t>(part.keys.size()), round_};
    part.keys.push_back(key);
  }
  part.users.push_back(wanted);
  part.user_place.push_back(seen_[at].place);
}

void RemoteLookup::Split(const Routing& routing, uint64_t version, uint64_t lineage,
                         std::span<const BagFeature> features, std::span<KeyBags> requests,
                         Parts* parts) {
  std::vector<std::pair<int32_t, Wanted>> bag;  // owner, key: of one bag's remote keys
  for (uint32_t r = 0; r < requests.size(); ++r) {
    const KeyBags& request = requests[r];
    const bool jagged = !request.offsets.empty();
    const size_t bags = jagged ? request.offsets.size() - 1 : request.keys.size();
    size_t feature = 0;
    for (size_t b = 0; b < bags; ++b) {
      const uint32_t table = features[feature].table;
      const bool sequence = features[feature].pooling == Pooling::kNone;  // of rows, not of sums
      if (++feature == features.size()) feature = 0;
      const auto first = static_cast<uint32_t>(jagged ? request.offsets[b] : b);
      const auto end = static_cast<uint32_t>(jagged ? request.offsets[b + 1] : b + 1);
      if (all_held_ && routing.all_owned[table]) continue;
      bag.clear();
      for (uint32_t k = first; k < end; ++k) {
        Wanted wanted{r, k, table};
        const auto key = static_cast<uint64_t>(request.keys[k]);
        const uint64_t hash = HashKey(key);
        const uint32_t bucket = BucketOfHash(hash, manifest_.tables[table].bucket_bits);
        if (IsHere(routing.buckets[table][bucket], table, bucket, version)) continue;
        const bool hot = TakeHot(&wanted, key, {version, lineage});
        Observe(table, key, hash, bucket, hot);
        if (hot) continue;
        const Owner owner = OwnerOf(routing, wanted, request.keys[k], version);
        if (owner.peer == Owner::kHere) continue;
        parts->more |= owner.more;
        if (owner.peer == Owner::kNone) {
          wanted.why = owner.why;
          unanswered_.push_back(wanted);
        } else {
          bag.emplace_back(owner.peer, wanted);
        }
      }
      // Keys of one owner side by side, each owner's in their order.
      if (bag.size() > 1) {
        std::stable_sort(bag.begin(), bag.end(),
                         [](const auto& x, const auto& y) { return x.first < y.first; });
      }
      for (size_t i = 0; i < bag.size();) {
        const int32_t owner = bag[i].first;
        size_t until = i + 1;
        while (!sequence && until < bag.size() && until - i < kKeysASum &&
               bag[until].first == owner) {
          ++until;
        }
        // A single row is weighed here.
        const v1::PartPooling pooling = until - i == 1               ? v1::PART_POOLING_ROWS
                                        : request.weights == nullptr ? v1::PART_POOLING_SUM
                                                                     : v1::PART_POOLING_WEIGHED_SUM;
        const uint32_t part = OpenPart(static_cast<uint16_t>(owner), table, pooling, parts);
        Part& made = parts->all[part];
        for (; i < until; ++i) {
          const Wanted& wanted = bag[i].second;
          AddUser(wanted, request.keys[wanted.key], part, parts);
          if (pooling == v1::PART_POOLING_WEIGHED_SUM) {
            made.weights.push_back(request.weights[wanted.key]);
          }
        }
        if (!made.sums()) continue;
        made.offsets.push_back(static_cast<uint32_t>(made.users.size()));
      }
    }
  }
}

void RemoteLookup::AddTraces(const Part& part, std::span<const std::string_view> traces,
                             v1::LookupPart* out) {
  uint32_t last = std::numeric_limits<uint32_t>::max();
  for (const Wanted& user : part.users) {
    if (user.request == last || traces[user.request].empty()) continue;
    last = user.request;
    if (std::ranges::find(out->traces(), traces[last]) != out->traces().end()) continue;
    out->add_traces(std::string(traces[last]));
    if (static_cast<size_t>(out->traces_size()) == kMaxTracesAPart) return;
  }
}

void RemoteLookup::Ask(const Routing& routing, uint64_t version, uint64_t lineage,
                       Clock::time_point deadline, FetchTerms terms, Parts* parts) {
  // Parts for one peer stand side by side: they may share a call.
  std::ranges::stable_sort(parts->all, {}, &Part::peer);
  std::vector<PartCall>& calls = calls_.emplace_back(parts->all.size());
  size_t c = 0;
  std::map<uint16_t, std::pair<size_t, size_t>> by_peer;  // first call, number of calls
  for (const Part& part : parts->all) {
    const TableConfig& table = manifest_.tables[part.table];
    v1::LookupPart& out = calls[c].part;
    out.mutable_version()->set_number(version);
    out.mutable_version()->set_lineage(lineage);
    out.set_table_id(table.id);
    for (const int64_t key : part.keys) out.add_keys(static_cast<uint64_t>(key));
    out.set_pooling(part.pooling);
    calls[c].answer_bytes = part.users.size() * AnswerBytes(table);
    if (part.sums()) {
      for (const uint32_t offset : part.offsets) out.add_bag_offsets(offset);
      for (const uint32_t place : part.user_place) out.add_bag_keys(place);
      for (const float weight : part.weights) out.add_bag_weights(weight);
    }
    if (!terms.traces.empty()) AddTraces(part, terms.traces, &out);
    auto [at, fresh] = by_peer.try_emplace(part.peer, c, 0);
    ++at->second.second;
    ++c;
    stats_->keys += part.keys.size();
  }
  std::vector<PeerPool::Ask> asks;
  asks.reserve(by_peer.size());
  for (const auto& [peer, range] : by_peer) {
    asks.push_back({routing.peers[peer].name, std::span(calls).subspan(range.first, range.second)});
  }
  // Waking this thread takes some 50 us, of an answer that takes 400.
  peers_->LookupAll(asks, routing.epoch, deadline, kSpin);
}

Status RemoteLookup::TakeRows(const Part& part, HotSet::Version version,
                              const v1::LookupResult& result) {
  const RowLayout& layout = manifest_.tables[part.table].layout;
  std::vector<RemoteRow> rows(part.keys.size());
  auto rest = std::as_bytes(std::span(result.rows()));
  for (size_t i = 0; i < part.keys.size(); ++i) {
    rows[i].source = SourceOf(result.sources()[i]);
    if (rows[i].source != Source::kRemote) continue;
    const Result<RowRecord> record = ReadRecord(layout, &rest);
    if (!record.ok()) return record.status();
    if (record.value().key != static_cast<uint64_t>(part.keys[i])) {
      return {Code::kCorrupt, "a peer answered another key than it was asked for"};
    }
    rows[i].payload = record.value().payload.data();
    rows[i].live = record.value().live;
  }
  for (size_t u = 0; u < part.users.size(); ++u) {
    const Wanted& user = part.users[u];
    const RemoteRow& row = rows[part.user_place[u]];
    *RowOf(user) = row;
    if (!user.noted) continue;
    const HotSet::Name name{part.table, static_cast<uint64_t>(part.keys[part.user_place[u]])};
    const bool there = row.source == Source::kRemote;
    asked_.push_back(
        {name,
         version,
         HotRows::Asked::How::kRow,
         {there ? layout.PayloadBytes(row.live) : 0, row.live, there ? Source::kHot : row.source},
         row.payload});
  }
  return Status::Ok();
}

Status RemoteLookup::TakeSums(const Part& part, HotSet::Version version,
                              const v1::LookupResult& result) {
  const uint32_t dim = manifest_.tables[part.table].layout.dim();
  const size_t bags = part.offsets.size() - 1;
  if (static_cast<size_t>(result.sums_size()) != bags * dim) {
    return {Code::kCorrupt, "a peer answered " + std::to_string(result.sums_size()) +
                                " sums, asked for " + std::to_string(bags * dim)};
  }
  for (size_t b = 0; b < bags; ++b) {
    for (uint32_t u = part.offsets[b]; u < part.offsets[b + 1]; ++u) {
      RemoteRow* row = RowOf(part.users[u]);
      const Wanted& user = part.users[u];
      if (user.noted) {
        const auto key = static_cast<uint64_t>(part.keys[part.user_place[u]]);
        asked_.push_back({{part.table, key}, version, HotRows::Asked::How::kSum});
      }
      *row = {};
      row->source = SourceOf(result.sources()[part.user_place[u]]);
      row->summed = u > part.offsets[b];
      if (!row->summed) row->sums = result.sums().data() + b * dim;
    }
  }
  return Status::Ok();
}

// Puts answers into the rows; keys of calls that failed, or that a peer refused, go to `failed`.
// Peers that did not answer are passed over from now on.
Status RemoteLookup::Take(const Parts& parts, uint64_t version, uint64_t lineage, FetchTerms terms,
                          std::vector<Wanted>* failed) {
  size_t c = 0;
  for (const Part& part : parts.all) {
    const PartCall& call = calls_.back()[c++];
    if (call.status.code() == Code::kInvalidArgument) return call.status;
    const bool gone = call.result.refusal() == v1::LOOKUP_REFUSAL_VERSION_GONE;
    if (gone && MayStartOver(version, terms)) {
      ++stats_->version_gone;
      return {Code::kVersionGone, "a peer no longer has the pinned version"};
    }
    if (!call.status.ok() || gone) {
      passed_over_[part.peer] = gone ? NoAnswer::kVersion : call.why;
      failed->insert(failed->end(), part.users.begin(), part.users.end());
      continue;
    }
    if (call.result.refusal() != v1::LOOKUP_REFUSAL_UNSPECIFIED) {
      for (Wanted wanted : part.users) {
        if (wanted.refused_by == kNobody) {
          wanted.refused_by = part.peer;
          failed->push_back(wanted);
          continue;
        }
        if (terms.may_start_over) {
          ++stats_->not_owner;
          return {Code::kNotOwner,
                  "no peer holds the bucket under epoch " + std::to_string(call.epoch)};
        }
        wanted.why = NoAnswer::kNotOwner;
        unanswered_.push_back(wanted);
      }
      continue;
    }
    if (call.result.sources().size() != part.keys.size()) {
      return {Code::kCorrupt, "a peer's answer has another length than the question"};
    }
    const HotSet::Version at{version, lineage};
    EMBERTIDE_RETURN_IF_ERROR(part.sums() ? TakeSums(part, at, call.result)
                                          : TakeRows(part, at, call.result));
  }
  return Status::Ok();
}

// Gives every key that is not held here its row, those of the cache theirs at once.
void RemoteLookup::Number(std::span<const KeyBags> requests, const Parts& parts) {
  size_t users = unanswered_.size() + hot_keys_.size();
  for (const Part& part : parts.all) users += part.users.size();
  rows_.reserve(users);
  for (size_t r = 0; r < requests.size(); ++r) row_of_[r].assign(requests[r].keys.size(), 0);
  const auto number = [&](const Wanted& wanted) {
    rows_.push_back({});
    row_of_[wanted.request][wanted.key] = static_cast<uint32_t>(rows_.size());
  };
  for (const Part& part : parts.all) std::ranges::for_each(part.users, number);
  std::ranges::for_each(unanswered_, number);
  for (const HotKey& hot : hot_keys_) {
    number(hot.wanted);
    RemoteRow& row = rows_.back();
    row.source = hot.row.source;
    row.live = hot.row.live;
    if (row.source == Source::kHot) row.payload = payloads_.data() + hot.payload;
  }
}

Status RemoteLookup::Fetch(const Pinned& pinned, std::span<const BagFeature> features,
                           std::span<KeyBags> requests, Deadline deadline, FetchTerms terms) {
  const std::shared_ptr<const Routing> plan = options_.routing();
  const Routing& routing = *plan;
  const uint64_t version = pinned.rows.version();
  const uint64_t lineage = pinned.info->lineage;
  const Clock::time_point begun = Clock::now();
  const Deadline peers_until =
      deadline == kNoDeadline ? begun + options_.peer_timeout : begun + (deadline - begun) / 10 * 9;
  calls_.clear();
  rows_.clear();
  hot_keys_.clear();
  payloads_.clear();
  asked_.clear();
  observed_.clear();
  watched_.clear();
  met_ = stale_ = 0;
  sets_ = hot_->sets();
  all_held_ = options_.holds(routing.epoch, version);
  unanswered_.clear();
  results_.assign(requests.size(), {});
  row_of_.resize(std::max(row_of_.size(), requests.size()));
  for (KeyBags& request : requests) request.remote_of = nullptr;
  Parts parts;
  size_t keys = 0;
  for (const KeyBags& request : requests) keys += request.bag_keys().size();
  BeginParts(routing, keys, &parts);
  passed_over_.clear();
  for (const Routing::Peer& peer : routing.peers) {
    passed_over_.push_back(peers_->WhyNot(peer.name, version, lineage));
  }
  Split(routing, version, lineage, features, requests, &parts);
  if (parts.all.empty() && unanswered_.empty() && hot_keys_.empty()) return Status::Ok();
  if (parts.answer_bytes > kMaxFetchBytes) {
    return {Code::kResourceExhausted,
            "peers would answer " + std::to_string(keys) + " keys with up to " +
                std::to_string(parts.answer_bytes) + " bytes; an execution takes at most " +
                std::to_string(kMaxFetchBytes) + ": send fewer keys, or lower max_keys"};
  }
  if (std::ranges::any_of(unanswered_, LacksVersion) && MayStartOver(version, terms)) {
    ++stats_->version_gone;
    return {Code::kVersionGone, "a peer no longer has the pinned version"};
  }
  Number(requests, parts);

  // The rounds end: each passes over another peer, finds keys refused for the first time, or has
  // waited for a version, which goes on until half of the time is over.
  const Clock::time_point asked = Clock::now();
  const Clock::time_point half = asked + (peers_until - asked) / 2;
  std::vector<Wanted> failed;
  while (true) {
    if (parts.all.empty()) {
      if (!AwaitVersion(routing, version, lineage, half)) break;
      const auto last = std::ranges::partition(unanswered_, std::not_fn(LacksVersion));
      failed.assign(last.begin(), last.end());
      unanswered_.erase(last.begin(), last.end());
    } else {
      const Clock::time_point now = Clock::now();
      Ask(routing, version, lineage, parts.more ? now + (peers_until - now) / 2 : peers_until,
          terms, &parts);
      failed.clear();
      EMBERTIDE_RETURN_IF_ERROR(Take(parts, version, lineage, terms, &failed));
    }
    BeginParts(routing, failed.size(), &parts);
    SplitAgain(routing, version, requests, failed, &parts);
  }
  if (!unanswered_.empty() && terms.may_start_over && options_.routing()->epoch != routing.epoch) {
    ++stats_->not_owner;
    return {Code::kNotOwner, "an owner did not answer, and there is a newer plan"};
  }
  for (size_t r = 0; r < requests.size(); ++r) {
    requests[r].remote_of = row_of_[r].data();
    requests[r].remote = rows_.data();
  }
  Degrade(routing, version, requests, terms);
  Tell();
  return Status::Ok();
}

bool RemoteLookup::AwaitVersion(const Routing& routing, uint64_t version, uint64_t lineage,
                                Clock::time_point until) {
  if (std::ranges::none_of(unanswered_, LacksVersion)) return false;
  while (Clock::now() < until) {
    bool behind = false;
    for (size_t p = 0; p < passed_over_.size(); ++p) {
      if (passed_over_[p] != NoAnswer::kVersion) continue;
      const std::string& name = routing.peers[p].name;
      if (!peers_->WhyNot(name, version, lineage)) {
        passed_over_[p] = std::nullopt;
        return true;
      }
      behind |= peers_->IsJustBehind(name, version);
    }
    if (!behind) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

void RemoteLookup::SplitAgain(const Routing& routing, uint64_t version,
                              std::span<const KeyBags> requests, std::span<const Wanted> failed,
                              Parts* parts) {
  for (Wanted wanted : failed) {
    const int64_t key = requests[wanted.request].keys[wanted.key];
    const Owner owner = OwnerOf(routing, wanted, key, version);
    if (owner.peer == Owner::kHere) {  // its bucket came meanwhile
      row_of_[wanted.request][wanted.key] = 0;
      continue;
    }
    if (owner.peer == Owner::kNone) {
      wanted.why = owner.why;
      unanswered_.push_back(wanted);
      continue;
    }
    parts->more |= owner.more;
    if (owner.peer != wanted.refused_by) ++stats_->next_owners;
    const uint32_t part =
        OpenPart(static_cast<uint16_t>(owner.peer), wanted.table, v1::PART_POOLING_ROWS, parts);
    AddUser(wanted, key, part, parts);
  }
}

// Keys that no owner answers read as default rows, and are marked; who has too many of them fails.
void RemoteLookup::Degrade(const Routing& routing, uint64_t version,
                           std::span<const KeyBags> requests, FetchTerms terms) {
  for (const Wanted& wanted : unanswered_) {
    *RowOf(wanted) = {};
    RowOf(wanted)->source = Source::kUnanswered;
    ++results_[wanted.request].degraded_keys;
    ++stats_->degraded_keys[static_cast<size_t>(wanted.why)];
  }
  if (unanswered_.empty()) return;
  for (size_t r = 0; r < requests.size(); ++r) {
    if (results_[r].degraded_keys == 0) continue;
    results_[r].status = Refusal(routing, version, r, requests[r].bag_keys().size(), terms);
  }
}

Status RemoteLookup::Refusal(const Routing& routing, uint64_t version, size_t request, size_t keys,
                             FetchTerms terms) const {
  std::array<size_t, kNoAnswers> by_reason{};
  for (const Wanted& wanted : unanswered_) {
    if (wanted.request == request) ++by_reason[static_cast<size_t>(wanted.why)];
  }
  const size_t lacking = by_reason[static_cast<size_t>(NoAnswer::kVersion)];
  std::string ranges;
  for (size_t p = 0; lacking > 0 && p < passed_over_.size(); ++p) {
    if (passed_over_[p] != NoAnswer::kVersion) continue;
    ranges += (ranges.empty() ? "" : ", ") + peers_->Describe(routing.peers[p].name);
  }
  if (terms.named && lacking > 0) {
    return {Code::kVersionGone, "version " + std::to_string(version) +
                                    " is gone at the owners of " + std::to_string(lacking) +
                                    " of " + std::to_string(keys) + " keys: " + ranges};
  }
  const size_t degraded = results_[request].degraded_keys;
  const double share = options_.max_degraded_share;
  if (static_cast<double>(degraded) <= share * static_cast<double>(keys)) return Status::Ok();
  std::string reasons;
  for (size_t n = 0; n < kNoAnswers; ++n) {
    if (by_reason[n] == 0) continue;
    reasons +=
        (reasons.empty() ? "" : ", ") + std::to_string(by_reason[n]) + " " + kNoAnswerNames[n];
  }
  char allowed[32];
  std::snprintf(allowed, sizeof(allowed), "%g", share);
  return {Code::kUnavailable,
          "no owner answers for " + std::to_string(degraded) + " of " + std::to_string(keys) +
              " keys (" + reasons + "), more than max_degraded_share = " + allowed + " allows" +
              (ranges.empty() ? "" : "; at version " + std::to_string(version) + ", " + ranges) +
              ": try again in a second, or at another node"};
}

void RemoteLookup::Release() {
  calls_.clear();
  Trim(&rows_);
  Trim(&hot_keys_);
  Trim(&payloads_);
  Trim(&asked_);
  Trim(&observed_);
  Trim(&watched_);
  sets_.reset();
  Trim(&unanswered_);
  Trim(&seen_);
  for (std::vector<uint32_t>& places : row_of_) Trim(&places);
}

}  // namespace embertide
