// SlowLookup: one of the slowest look-ups that a node made for a peer.
#pragma once

#include <cstdint>
#include <string>

namespace embertide {

struct SlowLookup {
  int64_t ended_ms = 0;  // of the wall clock
  std::string trace;     // of a request that it was for (base/trace_id.h); empty: none gave one
  std::string asker;     // name of the peer; empty: it is none of the plan's
  uint64_t keys = 0;     // of all requests that it was for
  double whole_us = 0;

  double WholeUs() const { return whole_us; }
};

}  // namespace embertide
