#include "front/slow_log.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

namespace embertide::front {
namespace {

bool IsSlower(const SlowCall& one, const SlowCall& other) {
  return one.times.whole_us > other.times.whole_us;
}

int64_t NumberAt(std::chrono::seconds slot, SlowLog::Time now) {
  return now.time_since_epoch() / slot;
}

nlohmann::json JsonOf(const std::vector<SlowCall>& calls) {
  nlohmann::json all = nlohmann::json::array();
  for (const SlowCall& call : calls) {
    nlohmann::json stages = nlohmann::json::object();
    for (size_t s = 0; s < kStages.size(); ++s) {
      if (call.times.us[s] >= 0) stages[std::string(kStages[s])] = call.times.us[s];
    }
    nlohmann::json one = {{"ended_ms", call.ended_ms},
                          {"model", call.model},
                          {"us", call.times.whole_us},
                          {"stages_us", std::move(stages)}};
    if (call.samples > 0) one["samples"] = call.samples;
    if (call.version > 0) one["version"] = call.version;
    all.push_back(std::move(one));
  }
  return all;
}

}  // namespace

void SlowLog::Add(const SlowCall& call, Time now) {
  const std::lock_guard lock(mutex_);
  double floor_us = std::numeric_limits<double>::infinity();
  for (Span* span : {&minute_, &hour_}) {
    const int64_t number = NumberAt(span->slot, now);
    Slot& slot = span->slots[static_cast<size_t>(number) % span->slots.size()];
    if (slot.number != number) slot = {number, {}};
    slot.calls.push_back(call);
    std::ranges::push_heap(slot.calls, IsSlower);
    if (slot.calls.size() > kKept) {
      std::ranges::pop_heap(slot.calls, IsSlower);
      slot.calls.pop_back();
    }
    floor_us =
        slot.calls.size() < kKept ? 0 : std::min(floor_us, slot.calls.front().times.whole_us);
  }
  floor_us_ = floor_us;
  const Time ends{(NumberAt(minute_.slot, now) + 1) * minute_.slot};
  slot_ends_ = ends.time_since_epoch().count();
}

std::vector<SlowCall> SlowLog::SlowestOf(const Span& span, Time now) {
  const int64_t oldest = NumberAt(span.slot, now) - static_cast<int64_t>(span.slots.size()) + 1;
  std::vector<SlowCall> slowest;
  for (const Slot& slot : span.slots) {
    if (slot.number < oldest) continue;
    slowest.insert(slowest.end(), slot.calls.begin(), slot.calls.end());
  }
  std::ranges::sort(slowest, IsSlower);
  if (slowest.size() > kKept) slowest.resize(kKept);
  return slowest;
}

std::string SlowLog::Json(Time now) const {
  std::vector<SlowCall> minute;
  std::vector<SlowCall> hour;
  {
    const std::lock_guard lock(mutex_);
    minute = SlowestOf(minute_, now);
    hour = SlowestOf(hour_, now);
  }
  // A model's name may be no UTF-8.
  return nlohmann::json{{"minute", JsonOf(minute)}, {"hour", JsonOf(hour)}}.dump(
             1, ' ', false, nlohmann::json::error_handler_t::replace) +
         "\n";
}

}  // namespace embertide::front
