// SlowRequest: one of the slowest requests that a node answered or refused, and where its time
// went.
#pragma once

#include <cstdint>
#include <string>

namespace embertide {

// Times are of the execution that it was part of, in us, from the moment that work on it began: how
// long it waited before, only the server knows.
struct SlowRequest {
  int64_t ended_ms = 0;  // of the wall clock
  std::string trace;     // of its caller's traceparent: 32 digits of hex; empty: it gave none
  std::string refusal;   // reason, as the metrics have it; empty: it was answered
  uint64_t version = 0;  // of its answer; 0: none
  uint32_t samples = 0;
  uint64_t keys = 0;
  uint32_t requests = 0;  // answered together, it among them
  double whole_us = 0;
  double peers_us = 0;   // rows of peers
  double lookup_us = 0;  // rows of this node
  double net_us = 0;     // the dense net

  double WholeUs() const { return whole_us; }
};

}  // namespace embertide
