// ServedReduced: whether versions' dense nets multiply in reduced precision, and what is counted of
// it.
//
// A run that chose a type, bf16 or int8, publishes with each version what that cost on its last day
// (ReducedMeasurement). The net multiplies in it if that is within the run's bounds and this CPU
// has the instructions; else it is computed in fp32. Each change of that is told.
//
// Thread-safe.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "embertide/dense.h"

namespace embertide {

// Outcomes for a version: label `result` of embertide_dense_reduced_versions_total.
inline constexpr std::array<const char*, 4> kReducedResults = {"taken", "refused", "no_cpu",
                                                               "unknown"};

class ServedReduced {
 public:
  // `type`: that of the package's program. `log`: told a line; may be empty.
  ServedReduced(std::string type, std::function<void(const std::string&)> log)
      : type_(std::move(type)), log_(std::move(log)) {}

  // Whether a version's net is to multiply in the type. Requires: a package with such a program.
  bool Take(DenseProgram::Reduced program, const std::optional<ReducedMeasurement>& measured);

  const std::string& type() const { return type_; }
  // Versions that ended so; by place in kReducedResults.
  uint64_t versions(size_t result) const { return versions_[result].load(); }
  // Whether the newest one is taken.
  bool is_taken() const { return newest_.load() == 0; }

 private:
  std::string type_;
  std::function<void(const std::string&)> log_;
  std::array<std::atomic<uint64_t>, kReducedResults.size()> versions_{};
  std::atomic<size_t> newest_ = kReducedResults.size();  // no version yet
};

}  // namespace embertide
