// ServedBf16: whether versions' dense nets multiply in bf16, and what is counted of it.
//
// A run that chose it publishes with each version what bf16 cost on its last day (Bf16Measurement).
// The net multiplies in bf16 if that is within the run's bounds and this CPU has the instructions;
// else it is computed in fp32. Each change of that is told.
//
// Thread-safe.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "embertide/dense.h"

namespace embertide {

// Outcomes for a version: label `result` of embertide_dense_bf16_versions_total.
inline constexpr std::array<const char*, 3> kBf16Results = {"taken", "refused", "no_cpu"};

class ServedBf16 {
 public:
  // `log`: told a line; may be empty.
  explicit ServedBf16(std::function<void(const std::string&)> log) : log_(std::move(log)) {}

  // Whether a version's net is to multiply in bf16. Requires: a package with a program in bf16.
  bool Take(DenseProgram::Bf16 program, const std::optional<Bf16Measurement>& measured);

  // Versions that ended so; by place in kBf16Results.
  uint64_t versions(size_t result) const { return versions_[result].load(); }
  // Whether the newest one is taken.
  bool is_taken() const { return newest_.load() == 0; }

 private:
  std::function<void(const std::string&)> log_;
  std::array<std::atomic<uint64_t>, kBf16Results.size()> versions_{};
  std::atomic<size_t> newest_ = kBf16Results.size();  // no version yet
};

}  // namespace embertide
