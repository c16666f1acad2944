// Stages of an inference: where its time went, from the last byte of its message to the moment that
// gRPC has taken its answer. Pure.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "front/server_abi.h"

namespace embertide::front {

// In the order of StageTimes::us.
inline constexpr std::array<std::string_view, 6> kStages = {"parse",  "queue", "peers",
                                                            "lookup", "net",   "send"};

// Times that our backend put into a response; all 0 if another backend answered.
struct BackendStages {
  int64_t began_ns = 0;
  int64_t peers_ns = 0;
  int64_t lookup_ns = 0;
  int64_t net_ns = 0;
};
// Whether a parameter of a response is of ours alone, and so none of the caller's; notes its value.
bool TakeStage(std::string_view name, TRITONSERVER_ParameterType type, const void* value,
               BackendStages* stages);

// Returns the time of the steady clock.
int64_t SteadyNs();
struct Moments {
  int64_t arrived_ns = 0;   // the message is here
  int64_t handed_ns = 0;    // Triton has it
  int64_t answered_ns = 0;  // the answer is here
  int64_t sent_ns = 0;      // gRPC has taken it
};

struct StageTimes {
  double whole_us = 0;
  // The time of each of kStages; negative if the backend did not tell it. They add up to no more
  // than the whole: the rest is Triton's and the backend's own work on requests and answers.
  std::array<double, kStages.size()> us{};
};
StageTimes TimesOf(const Moments& moments, const BackendStages& backend);

}  // namespace embertide::front
