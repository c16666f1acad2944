#include "simulation/simulate.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <numeric>
#include <queue>
#include <utility>

#include "embertide/hash.h"
#include "simulation/utility.h"

namespace embertide {
namespace {

constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

// Numbers keys by their first appearance: open addressing, at most half full.
class Numbering {
 public:
  uint32_t Of(int64_t key) {
    if (2 * (keys_.size() + 1) > places_.size()) Grow();
    uint32_t& place = Find(key);
    if (place == kNone) {
      place = static_cast<uint32_t>(keys_.size());
      keys_.push_back(key);
    }
    return place;
  }

 private:
  uint32_t& Find(int64_t key) {
    size_t at = HashKey(static_cast<uint64_t>(key)) & (places_.size() - 1);
    while (places_[at] != kNone && keys_[places_[at]] != key) at = (at + 1) & (places_.size() - 1);
    return places_[at];
  }
  void Grow() {
    places_.assign(std::max<size_t>(1024, 2 * places_.size()), kNone);
    for (uint32_t number = 0; number < keys_.size(); ++number) Find(keys_[number]) = number;
  }
  std::vector<uint32_t> places_;
  std::vector<int64_t> keys_;
};

// Utilities of keys as training would publish them, version by version.
class UtilityFeed {
 public:
  UtilityFeed(uint32_t keys, const SimulationOptions& options)
      : options_(options), published_(keys), since_(keys) {}
  void See(uint32_t key) {
    ++since_[key];
    if (++accesses_ < options_.version_accesses) return;
    accesses_ = 0;
    for (size_t k = 0; k < published_.size(); ++k) {
      published_[k] = options_.utility_decay * published_[k] + static_cast<float>(since_[k]);
      since_[k] = 0;
    }
  }
  float Of(uint64_t key) const { return published_[key]; }

 private:
  const SimulationOptions& options_;
  std::vector<float> published_;
  std::vector<uint32_t> since_;
  uint32_t accesses_ = 0;
};

// The loop of policy.h over a trace; `keys` are those in the slots.
template <typename See>
SimulationResult Run(const Trace& trace, std::vector<uint32_t>* keys, Policy* policy,
                     const See& see) {
  SimulationResult result;
  std::vector<uint32_t> slot_of(trace.distinct(), kNone);
  std::vector<uint32_t>& key_in = *keys;
  uint32_t used = 0;
  for (const uint32_t key : trace.numbers()) {
    see(key);
    if (slot_of[key] != kNone) {
      ++result.hits;
      policy->Touch(slot_of[key]);
      continue;
    }
    const bool full = used == key_in.size();
    if (!policy->Admit(key, full)) {
      ++result.refused;
      continue;
    }
    const uint32_t slot = full ? policy->Evict() : used++;
    if (full) {
      ++result.evicted;
      slot_of[key_in[slot]] = kNone;
    }
    key_in[slot] = key;
    policy->Insert(slot, key);
    ++result.inserted;
    slot_of[key] = slot;
  }
  result.policy_bytes = policy->bytes();
  return result;
}

}  // namespace

std::vector<PolicyInfo> SimulatedPolicies() {
  const auto tiers = Policies();
  std::vector<PolicyInfo> all(tiers.begin(), tiers.end());
  all.push_back(kUtilityPolicy);
  return all;
}

Result<Trace> Trace::FromKeys(std::span<const int64_t> keys) {
  if (keys.empty() || keys.size() >= kNone) {
    return Status(Code::kInvalidArgument,
                  "a trace of " + std::to_string(keys.size()) + " accesses; 1 to 2^32 - 2 will do");
  }
  Trace trace;
  trace.numbers_.reserve(keys.size());
  Numbering numbering;
  for (const int64_t key : keys) {
    const uint32_t number = numbering.Of(key);
    trace.numbers_.push_back(number);
    if (number == trace.counts_.size()) trace.counts_.push_back(0);
    ++trace.counts_[number];
  }
  return trace;
}

Result<SimulationResult> Simulate(const Trace& trace, const SimulationOptions& options) {
  if (options.version_accesses == 0) {
    return Status(Code::kInvalidArgument, "a version needs at least one access");
  }
  const Result<PolicyName> parsed = ParsePolicyName(options.policy, SimulatedPolicies());
  if (!parsed.ok()) return parsed.status();
  const bool by_utility = parsed.value().name == kUtilityPolicy.name;
  UtilityFeed feed(by_utility ? trace.distinct() : 0, options);
  std::vector<uint32_t> key_in;
  const KeyOf key_of = [&](uint32_t slot) { return key_in[slot]; };
  Result<std::unique_ptr<Policy>> policy =
      by_utility ? MakeUtility(options.capacity, key_of, [&](uint64_t key) { return feed.Of(key); })
                 : MakePolicy({options.policy, options.capacity, key_of});
  if (!policy.ok()) return policy.status();
  if (const uint32_t accesses = parsed.value().accesses; by_utility && accesses > 1) {
    policy = MakeFrequencyAdmission(std::move(*policy), options.capacity, accesses);
  }
  key_in.resize(options.capacity);
  if (!by_utility) return Run(trace, &key_in, policy->get(), [](uint32_t) {});
  return Run(trace, &key_in, policy->get(), [&](uint32_t key) { feed.See(key); });
}

uint64_t OptimalHits(const Trace& trace, uint32_t capacity) {
  if (capacity == 0) return 0;
  const auto numbers = trace.numbers();
  std::vector<uint32_t> next(numbers.size());
  std::vector<uint32_t> upcoming(trace.distinct(), kNone);
  for (auto i = static_cast<uint32_t>(numbers.size()); i-- > 0;) {
    next[i] = upcoming[numbers[i]];
    upcoming[numbers[i]] = i;
  }
  // When each resident row is asked for next, the last on top. A row that is never asked for again
  // leaves at once. Times that have passed stay below those to come, so the top is a resident's.
  std::priority_queue<uint32_t> times;
  std::vector<bool> resident(trace.distinct());
  uint64_t hits = 0;
  uint32_t used = 0;
  for (uint32_t i = 0; i < numbers.size(); ++i) {
    const uint32_t key = numbers[i];
    if (resident[key]) {
      ++hits;
      --used;
      resident[key] = false;
    }
    if (next[i] == kNone) continue;
    if (used == capacity) {
      if (times.top() < next[i]) continue;
      resident[numbers[times.top()]] = false;
      times.pop();
      --used;
    }
    times.push(next[i]);
    resident[key] = true;
    ++used;
  }
  return hits;
}

uint64_t BestFixedHits(const Trace& trace, uint32_t capacity) {
  std::vector<uint32_t> counts(trace.counts().begin(), trace.counts().end());
  const auto most = std::min<size_t>(capacity, counts.size());
  std::partial_sort(counts.begin(), counts.begin() + static_cast<ptrdiff_t>(most), counts.end(),
                    std::greater<>());
  return std::accumulate(counts.begin(), counts.begin() + static_cast<ptrdiff_t>(most),
                         uint64_t{0});
}

}  // namespace embertide
