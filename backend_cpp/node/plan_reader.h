// PlanReader: plans from `state`, whole or in parts (PlanChunks in plan.proto, docs/formats.md).
//
// It reads only those parts of a plan that it does not have under the same epoch, so that a step of
// a move costs a node the chunks that the step changes. Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bus/redis.h"
#include "embertide/status.h"
#include "embertide/v1/plan.pb.h"

namespace embertide {

class PlanReader {
 public:
  explicit PlanReader(const std::string& model) : prefix_("c:{" + model + "}:") {}

  // The newest plan, whole, if its epoch is above `have`. kNotFound: it was replaced again and
  // again while it was read; kCorrupt: it is no Plan, or a part does not fit; kDeviceError: the
  // connection failed.
  Result<std::optional<v1::Plan>> Read(RedisConnection* redis, uint64_t have);

  uint64_t parts_read() const { return parts_read_; }

 private:
  struct Part {
    uint64_t epoch = 0;
    std::string bytes;
  };
  struct Name {
    std::string place;
    uint64_t epoch = 0;
  };

  // Nothing: the plan went meanwhile.
  Result<std::optional<v1::Plan>> ReadEpoch(RedisConnection* redis, const std::string& epoch);
  static Result<std::vector<Name>> NamesOf(const v1::Plan& head);
  // False: a part went meanwhile.
  Result<bool> Fetch(RedisConnection* redis, const std::vector<Name>& names);
  Status Join(const std::vector<Name>& names, v1::Plan* plan) const;

  const std::string prefix_;
  std::map<std::string, Part> parts_;  // by place
  uint64_t parts_read_ = 0;
};

}  // namespace embertide
