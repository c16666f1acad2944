// The keeper: who enters, and what owners say of a new version.
#include "node/hot_rows.h"

#include <algorithm>
#include <tuple>

#include "embertide/hash.h"
#include "peer/limits.h"

namespace embertide {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr uint32_t kMinSlots = 8;
// The largest part of `bytes` for reads that wait for the keeper.
constexpr uint64_t kMaxLogBytes = 4 << 20;
// Reads a second that the keeper hears of: some 100 ns each, more for a row that enters.
constexpr double kHeardASecond = 20'000;
constexpr milliseconds kRateEvery{100};
constexpr milliseconds kGather{2};    // reads, before they are looked at
constexpr milliseconds kIdle{100};    // with nothing to do
constexpr milliseconds kAskFor{250};  // an owner has so long to answer
// Until owners that lack the newest version are looked at again, twice as long each time.
constexpr milliseconds kSoonest{1};
constexpr milliseconds kLatest{200};
// A row that nobody read for so many versions is not kept up to date.
constexpr uint8_t kIdleVersions = 2;
constexpr uint8_t kFree = 255;
constexpr size_t kMaxWishes = 4096;
// Few enough that a request which shares the call does not wait for long.
constexpr size_t kKeysAPart = 2048;

uint64_t IdOf(const HotRows::Name& name) { return HashKey(name.key ^ HashKey(name.table)); }

uint32_t MostPayload(const TableConfig& table) {
  return table.layout.PayloadBytes(table.layout.full_mask());
}

}  // namespace

// Slots, who is in them, and who is to leave.
struct HotRows::Sets::Part {
  Part(uint32_t slots, uint32_t payload_bytes) : set(slots, payload_bytes), idle(slots, kFree) {
    for (uint32_t slot = slots; slot-- > 0;) free.push_back(slot);
  }
  HotSet set;
  std::unique_ptr<Policy> policy;
  std::vector<uint32_t> free;
  std::vector<uint8_t> idle;  // versions without a read; kFree: the slot is
};

HotRows::HotRows(const Manifest& manifest, PeerPool* peers, Options options)
    : manifest_(manifest),
      peers_(peers),
      options_(std::move(options)),
      rated_(steady_clock::now()) {
  MakeSets({});
  again_ = kIdle;
  if (options_.bytes == 0) return;
  task_ =
      std::make_unique<BackgroundTask>(TaskOptions{.name = "hot-rows", .board = options_.tasks},
                                       [this](const std::stop_token& stop) { return Round(stop); });
}

HotRows::~HotRows() = default;

// --- what is kept --------------------------------------------------------------------------------

std::shared_ptr<HotRows::Part> HotRows::MakePart(uint64_t bytes, uint32_t slots,
                                                 uint32_t payload_bytes) {
  const uint64_t fixed = MostPolicyBytes(options_.policy, 0);
  const uint64_t each = HotSet::SlotBytes(payload_bytes) + MostPolicyBytes(options_.policy, 1) -
                        fixed + sizeof(uint32_t) + 1;
  if (bytes < fixed + each * std::min(slots, kMinSlots)) return nullptr;
  slots = static_cast<uint32_t>(std::min<uint64_t>(slots, (bytes - fixed) / each));
  auto part = std::make_shared<Part>(slots, payload_bytes);
  PolicyOptions made;
  made.name = options_.policy;
  made.capacity = slots;
  made.key_of = [part = part.get()](uint32_t slot) { return IdOf(part->set.NameOf(slot)); };
  auto policy = MakePolicy(made);
  if (!policy.ok()) return nullptr;
  part->policy = std::move(*policy);
  return part;
}

// Limited tables have sets of their own; the others share one for each size of row.
void HotRows::MakeSets(const std::map<uint32_t, uint32_t>& limits, bool keep) {
  auto made = std::make_shared<Sets>();
  made->by_table_.resize(manifest_.tables.size());
  uint64_t left = options_.bytes - std::min(kMaxLogBytes, options_.bytes / 8);
  const auto bytes_of = [](const Part& part) {
    return part.set.bytes() + part.policy->bytes() + part.idle.size() * (sizeof(uint32_t) + 1);
  };
  bool clipped = false;
  const auto add = [&](std::span<const uint32_t> tables, uint64_t bytes, uint32_t slots) {
    const auto part = MakePart(bytes, slots, MostPayload(manifest_.tables[tables.front()]));
    clipped = clipped || (slots != kNoLimit && (part == nullptr || part->set.capacity() < slots));
    if (part == nullptr) return;
    left -= std::min(left, bytes_of(*part));
    for (const uint32_t t : tables) made->by_table_[t] = &part->set;
    made->parts_.push_back(part);
    for (const uint32_t t : tables) made->part_of_[t] = part.get();
  };
  made->part_of_.resize(manifest_.tables.size());
  std::map<uint32_t, std::vector<uint32_t>> sharing;  // by size of a row
  for (uint32_t t = 0; t < manifest_.tables.size(); ++t) {
    const auto limit = limits.find(t);
    if (limit == limits.end()) {
      sharing[MostPayload(manifest_.tables[t])].push_back(t);
    } else if (limit->second > 0) {
      add({&t, 1}, left, std::min(limit->second, kNoLimit - 1));
    }
  }
  // As many rows for each table, by and large.
  const auto weight = [](const auto& size) {
    return HotSet::SlotBytes(size.first) * size.second.size();
  };
  uint64_t weights = 0;
  for (const auto& size : sharing) weights += weight(size);
  const uint64_t shared = left;
  for (const auto& size : sharing) {
    add(size.second,
        static_cast<uint64_t>(static_cast<double>(shared) * static_cast<double>(weight(size)) /
                              static_cast<double>(weights)),
        kNoLimit);
  }
  if (clipped) ++stats_.clipped;
  stats_.bytes = 0;
  for (const auto& part : made->parts_) stats_.bytes += bytes_of(*part);
  limits_ = limits;
  stats_.rows = 0;
  std::shared_ptr<const Sets> before = std::move(made);
  {
    const MutexLock lock(mutex_);
    sets_.swap(before);
  }
  if (before != nullptr && keep) TakeOver(*before);
}

// Rows of sets that have gone, as far as they fit.
void HotRows::TakeOver(const Sets& before) {
  for (const auto& part : before.parts_) {
    for (uint32_t slot = 0; slot < part->set.capacity(); ++slot) {
      if (part->idle[slot] == kFree) continue;
      const Name name = part->set.NameOf(slot);
      const Version version = part->set.VersionOf(slot);
      Part* const to = PartOf(name.table);
      Row row;
      scratch_.clear();
      if (to == nullptr || to->free.empty() || !to->set.HasPlace(name)) continue;
      if (part->set.Find(name, version, &row, &scratch_) != HotSet::Found::kYes) continue;
      Enter(to, name, row, scratch_.data(), version);
    }
  }
}

HotRows::Part* HotRows::PartOf(uint32_t table) { return sets_->part_of_[table]; }

std::map<uint32_t, uint32_t> HotRows::LimitsOf(const Routing& routing) const {
  std::map<uint32_t, uint32_t> limits;
  for (const v1::HotRows& each : routing.plan.hot_rows()) {
    for (uint32_t t = 0; t < manifest_.tables.size(); ++t) {
      if (manifest_.tables[t].id == each.table_id()) limits[t] = each.rows();
    }
  }
  return limits;
}

void HotRows::FollowPlan() {
  const auto plan = options_.routing();
  if (plan == nullptr || plan->epoch == epoch_) return;
  epoch_ = plan->epoch;
  const auto limits = LimitsOf(*plan);
  if (limits != limits_) MakeSets(limits);
}

void HotRows::Enter(Part* part, const Name& name, const Row& row, const std::byte* payload,
                    Version version) {
  if (!part->set.HasPlace(name)) {
    const uint32_t other = part->set.OneOfGroup(name);
    part->policy->Erase(other);
    Leave(part, other);
  }
  if (part->free.empty()) Leave(part, part->policy->Evict());
  const uint32_t slot = part->free.back();
  part->free.pop_back();
  part->idle[slot] = 0;
  part->set.Insert(slot, name, row, payload, version);
  part->policy->Insert(slot, IdOf(name));
  ++stats_.entered;
  ++stats_.rows;
}

// Requires: the policy has forgotten it.
void HotRows::Leave(Part* part, uint32_t slot) {
  part->set.Remove(slot);
  part->idle[slot] = kFree;
  part->free.push_back(slot);
  ++stats_.left;
  --stats_.rows;
}

// --- what was read -------------------------------------------------------------------------------

void HotRows::Note(std::span<const Asked> asked, size_t met) {
  met_.fetch_add(met, std::memory_order_relaxed);
  if (asked.empty() || task_ == nullptr) return;
  const uint64_t most = std::min(kMaxLogBytes, options_.bytes / 8) / 2;  // two logs take turns
  constexpr size_t kEach = sizeof(Asked) + sizeof(size_t);
  bool first = false;
  size_t taken = 0;
  if (log_mutex_.try_lock()) {
    const MutexLock lock(log_mutex_, std::adopt_lock);
    first = log_.empty();
    for (const Asked& each : asked) {
      if (log_.asked.size() * kEach + log_.payloads.size() + each.row.bytes > most) break;
      log_.asked.push_back(each);
      log_.payload_at.push_back(log_.payloads.size());
      if (each.row.bytes > 0) {
        log_.payloads.insert(log_.payloads.end(), each.payload, each.payload + each.row.bytes);
      }
      ++taken;
    }
  }
  stats_.dropped += asked.size() - taken;
  if (first) wake_.notify_all();
}

void HotRows::Wake() {
  {
    const MutexLock lock(log_mutex_);
    woken_ = true;
  }
  wake_.notify_all();
}

Status HotRows::Round(const std::stop_token& stop) {
  {
    MutexLock lock(log_mutex_);
    wake_.wait_for(lock, stop, again_,
                   [this]() EMBERTIDE_REQUIRES(log_mutex_) { return woken_ || !log_.empty(); });
    // A version cannot wait; reads can.
    if (!stop.stop_requested() && !woken_ && !log_.empty()) {
      wake_.wait_for(lock, stop, kGather,
                     [this]() EMBERTIDE_REQUIRES(log_mutex_) { return woken_; });
    }
    if (stop.stop_requested()) return Status::Ok();
    if (woken_) look_again_ = {};
    woken_ = false;
    std::swap(log_, taken_);
  }
  if (broken_) {
    taken_ = {};
    MakeSets(limits_, /*keep=*/false);
  }
  broken_ = true;
  FollowPlan();
  Replay();
  again_ = Refresh();
  broken_ = false;
  return Status::Ok();
}

void HotRows::Replay() {
  for (size_t i = 0; i < taken_.asked.size(); ++i) {
    Asked& asked = taken_.asked[i];
    asked.payload = taken_.payloads.data() + taken_.payload_at[i];
    Take(asked);
  }
  taken_.asked.clear();
  taken_.payload_at.clear();
  taken_.payloads.clear();
  const auto now = steady_clock::now();
  if (now - rated_ < kRateEvery) return;
  const double seconds = std::chrono::duration<double>(now - rated_).count();
  const auto met = static_cast<double>(met_.exchange(0, std::memory_order_relaxed));
  every_ = static_cast<uint32_t>(std::clamp(met / seconds / kHeardASecond, 1.0, 65536.0));
  rated_ = now;
}

void HotRows::Take(const Asked& asked) {
  Part* const part = PartOf(asked.name.table);
  if (part == nullptr) return;
  if (const auto slot = part->set.SlotOf(asked.name)) {
    part->policy->Touch(*slot);
    if (asked.how == Asked::How::kRow && asked.version.number > part->set.VersionOf(*slot).number) {
      part->set.Replace(*slot, asked.row, asked.payload, asked.version);
    }
    if (part->set.VersionOf(*slot) != aged_) NoteBehind();
    return;
  }
  if (!part->policy->Admit(IdOf(asked.name), part->free.empty())) return;
  if (asked.how == Asked::How::kRow) {
    Enter(part, asked.name, asked.row, asked.payload, asked.version);
    if (asked.version != aged_) NoteBehind();
  } else if (wishes_.size() < kMaxWishes) {
    wishes_.push_back(asked.name);
  }
}

// --- a new version -------------------------------------------------------------------------------

bool HotRows::Put(const Routing& routing, const Name& name, Version since, Version at,
                  std::vector<Question>* questions) {
  const uint32_t bucket = BucketOfHash(HashKey(name.key), manifest_.tables[name.table].bucket_bits);
  for (const uint16_t peer : routing.buckets[name.table][bucket].owners) {
    if (peers_->WhyNot(routing.peers[peer].name, at.number, at.lineage)) continue;
    // Questions of a version stand together: most rows are of the version before.
    for (auto question = questions->rbegin(); question != questions->rend(); ++question) {
      if (question->peer != peer || question->table != name.table || question->since != since ||
          question->keys.size() == kKeysAPart) {
        continue;
      }
      question->keys.push_back(name.key);
      return true;
    }
    questions->push_back({peer, name.table, since, {name.key}});
    return true;
  }
  return false;
}

bool HotRows::Collect(const Routing& routing, Version to, std::vector<Question>* questions) {
  bool all = true;
  const bool first = aged_ != to;
  aged_ = to;
  for (const auto& part : sets_->parts_) {
    for (uint32_t slot = 0; slot < part->set.capacity(); ++slot) {
      uint8_t& idle = part->idle[slot];
      if (idle == kFree) continue;
      if (first) idle = part->set.TakeRead(slot) ? 0 : std::min<uint8_t>(idle + 1, kFree - 1);
      const Version have = part->set.VersionOf(slot);
      if (have.number >= to.number || idle >= kIdleVersions) continue;
      const Name name = part->set.NameOf(slot);
      const uint32_t bucket =
          BucketOfHash(HashKey(name.key), manifest_.tables[name.table].bucket_bits);
      if (routing.buckets[name.table][bucket].owned) {
        part->policy->Erase(slot);
        Leave(part.get(), slot);
      } else {
        all = Put(routing, name, have, to, questions) && all;
      }
    }
  }
  return all;
}

void HotRows::NoteBehind() {
  if (behind_) return;
  behind_ = true;
  back_off_ = kSoonest;
  look_again_ = steady_clock::now() + back_off_;
}

milliseconds HotRows::Refresh() {
  const auto routing = options_.routing();
  const Version to = options_.served();
  if (routing == nullptr || to.number == 0) return kIdle;
  std::vector<Question> questions;
  std::vector<Name> wishes;
  wishes.swap(wishes_);
  for (const Name& name : wishes) Put(*routing, name, {}, to, &questions);
  if (to != aged_) {
    back_off_ = kSoonest;
    look_again_ = {};
    behind_ = true;
  }
  const bool look = behind_ && steady_clock::now() >= look_again_;
  bool all = !look || Collect(*routing, to, &questions);
  if (!questions.empty()) all = Ask(*routing, to, questions) && all;
  const auto now = steady_clock::now();
  if (look) {
    behind_ = !all;
    look_again_ = now + back_off_;
    back_off_ = std::min(2 * back_off_, kLatest);
  }
  if (!behind_) return kIdle;
  return std::clamp(std::chrono::ceil<milliseconds>(look_again_ - now), kSoonest, kLatest);
}

bool HotRows::Ask(const Routing& routing, Version at, const std::vector<Question>& questions) {
  std::vector<PartCall> calls(questions.size());
  std::vector<PeerPool::Ask> asks;
  for (size_t q = 0; q < questions.size(); ++q) {
    const Question& question = questions[q];
    const TableConfig& table = manifest_.tables[question.table];
    v1::LookupPart& part = calls[q].part;
    part.mutable_version()->set_number(at.number);
    part.mutable_version()->set_lineage(at.lineage);
    part.set_table_id(table.id);
    part.mutable_keys()->Add(question.keys.begin(), question.keys.end());
    part.set_pooling(v1::PART_POOLING_ROWS);
    if (question.since.number != 0) {
      part.mutable_since()->set_number(question.since.number);
      part.mutable_since()->set_lineage(question.since.lineage);
    }
    calls[q].answer_bytes =
        question.keys.size() *
        (kRecordHeaderBytes + table.layout.PayloadBytes(table.layout.full_mask()));
    asks.push_back({routing.peers[question.peer].name, {&calls[q], 1}});
  }
  peers_->LookupAll(asks, routing.epoch, steady_clock::now() + kAskFor);
  bool all = true;
  for (size_t q = 0; q < questions.size(); ++q) {
    const bool gone = calls[q].result.refusal() == v1::LOOKUP_REFUSAL_VERSION_GONE;
    if (!calls[q].status.ok() || calls[q].result.refusal() != v1::LOOKUP_REFUSAL_UNSPECIFIED) {
      stats_.failed += questions[q].keys.size();
      all = all && calls[q].status.ok() && !gone;
      continue;
    }
    TakeAnswer(questions[q], at, calls[q].result);
  }
  return all;
}

void HotRows::TakeAnswer(const Question& question, Version at, const v1::LookupResult& result) {
  const RowLayout& layout = manifest_.tables[question.table].layout;
  Part* const part = PartOf(question.table);
  auto rest = std::as_bytes(std::span(result.rows()));
  for (size_t i = 0; i < question.keys.size(); ++i) {
    const Name name{question.table, question.keys[i]};
    const auto slot = part->set.SlotOf(name);
    const auto source =
        i < result.sources().size() ? static_cast<uint8_t>(result.sources()[i]) : uint8_t{255};
    if (source == kUnchangedSource && question.since.number != 0) {
      ++stats_.unchanged;
      if (slot) part->set.Extend(*slot, at);
      continue;
    }
    Row row;
    const std::byte* payload = nullptr;
    if (source < kSources) row.source = static_cast<Source>(source);
    if (row.source != Source::kDefault && row.source != Source::kPruned) {
      const Result<RowRecord> record = ReadRecord(layout, &rest);
      if (!record.ok() || record.value().key != name.key) {
        stats_.failed += question.keys.size() - i;
        return;
      }
      payload = record.value().payload.data();
      row = {static_cast<uint32_t>(record.value().payload.size()), record.value().live,
             Source::kHot};
    } else if (source >= kSources) {
      stats_.failed += question.keys.size() - i;
      return;
    }
    if (slot) {
      ++stats_.changed;
      part->set.Replace(*slot, row, payload, at);
    } else if (question.since.number == 0) {
      Enter(part, name, row, payload, at);
    }
  }
}

}  // namespace embertide
