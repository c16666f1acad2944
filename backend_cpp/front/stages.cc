#include "front/stages.h"

#include <algorithm>
#include <chrono>

#include "triton/stage_names.h"

namespace embertide::front {

bool TakeStage(std::string_view name, TRITONSERVER_ParameterType type, const void* value,
               BackendStages* stages) {
  if (!name.starts_with(triton::kStagePrefix)) return false;
  if (type != TRITONSERVER_PARAMETER_INT) return true;
  const int64_t ns = std::max<int64_t>(0, *static_cast<const int64_t*>(value));
  if (name == triton::kStageBegan) stages->began_ns = ns;
  if (name == triton::kStagePeers) stages->peers_ns = ns;
  if (name == triton::kStageLookup) stages->lookup_ns = ns;
  if (name == triton::kStageNet) stages->net_ns = ns;
  return true;
}

int64_t SteadyNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

StageTimes TimesOf(const Moments& moments, const BackendStages& backend) {
  const auto us = [](int64_t ns) { return static_cast<double>(std::max<int64_t>(0, ns)) / 1e3; };
  const auto told = [&](int64_t ns) { return backend.began_ns == 0 ? -1 : us(ns); };
  return {us(moments.sent_ns - moments.arrived_ns),
          {us(moments.handed_ns - moments.arrived_ns), told(backend.began_ns - moments.handed_ns),
           told(backend.peers_ns), told(backend.lookup_ns), told(backend.net_ns),
           us(moments.sent_ns - moments.answered_ns)}};
}

}  // namespace embertide::front
