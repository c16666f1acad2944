#include "front/slow_log.h"

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

namespace embertide::front {
namespace {

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
    if (!call.trace.empty()) one["trace"] = call.trace;
    all.push_back(std::move(one));
  }
  return all;
}

}  // namespace

std::string SlowLog::Json(Time now) const {
  // A model's name may be no UTF-8.
  return nlohmann::json{{"minute", JsonOf(OfMinute(now))}, {"hour", JsonOf(OfHour(now))}}.dump(
             1, ' ', false, nlohmann::json::error_handler_t::replace) +
         "\n";
}

}  // namespace embertide::front
