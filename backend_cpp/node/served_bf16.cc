// Taking versions in bf16, or saying why not.
#include "node/served_bf16.h"

#include <utility>

namespace embertide {
namespace {

enum Outcome : uint8_t { kTaken, kRefused, kNoCpu };

std::string FiguresOf(const Bf16Measurement& measured) {
  return "of " + std::to_string(measured.events) + " events of the run's last day its AUC is " +
         std::to_string(measured.auc_loss) + " lower, and a score differs by " +
         std::to_string(measured.max_error) + " at most";
}

}  // namespace

bool ServedBf16::Take(DenseProgram::Bf16 program, const std::optional<Bf16Measurement>& measured) {
  Outcome outcome = kTaken;
  std::string said;
  if (program == DenseProgram::Bf16::kNoCpu) {
    outcome = kNoCpu;
    said = "in fp32: its program in bf16 needs a CPU with AVX512-BF16 or AMX, which this one lacks";
  } else if (!measured || !measured->taken) {
    outcome = kRefused;
    said = "in fp32, as bf16 is refused: " +
           (measured ? measured->why_refused : "nothing was measured with this version");
  } else {
    said = "in bf16: " + FiguresOf(*measured);
  }
  ++versions_[outcome];
  if (newest_.exchange(outcome) != outcome && log_) log_("the dense net is computed " + said);
  return outcome == kTaken;
}

}  // namespace embertide
