// SlowLog: the slowest inferences of the last minute and of the last hour (base/slowest.h).
// Nobody's name or key is in it.
//
// Thread-safe; an inference that is not slow pays for two atomic loads.
#pragma once

#include <cstdint>
#include <string>

#include "base/slowest.h"
#include "front/stages.h"

namespace embertide::front {

struct SlowCall {
  int64_t ended_ms = 0;  // of the wall clock
  std::string model;
  int64_t samples = 0;  // 0: not known
  int64_t version = 0;  // of the answer; 0: the backend says none
  std::string trace;    // the caller's (base/trace_id.h); empty: it gave none
  StageTimes times;

  double WholeUs() const { return times.whole_us; }
};

class SlowLog : public Slowest<SlowCall> {
 public:
  // {"minute": [...], "hour": [...]}, each with the slowest first.
  std::string Json(Time now) const;
};

}  // namespace embertide::front
