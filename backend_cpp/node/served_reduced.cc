// Taking versions in reduced precision, or saying why not.
#include "node/served_reduced.h"

#include <utility>

namespace embertide {
namespace {

enum Outcome : uint8_t { kTaken, kRefused, kNoCpu, kUnknown };

std::string FiguresOf(const ReducedMeasurement& measured) {
  return "of " + std::to_string(measured.events) + " events of the run's last day its AUC is " +
         std::to_string(measured.auc_loss) + " lower, and a score differs by " +
         std::to_string(measured.max_error) + " at most";
}

const char* Instructions(const std::string& type) {
  return type == "int8" ? "AVX512-VNNI, AVX-VNNI or AMX" : "AVX512-BF16 or AMX";
}

}  // namespace

bool ServedReduced::Take(DenseProgram::Reduced program,
                         const std::optional<ReducedMeasurement>& measured) {
  Outcome outcome = kTaken;
  std::string said;
  if (program == DenseProgram::Reduced::kUnknown) {
    outcome = kUnknown;
    said = "in fp32: this build does not know " + type_ + ", the type of its other program";
  } else if (program == DenseProgram::Reduced::kNoCpu) {
    outcome = kNoCpu;
    said = "in fp32: its program in " + type_ + " needs a CPU with " + Instructions(type_) +
           ", which this one lacks";
  } else if (!measured || measured->type != type_ || !measured->taken) {
    outcome = kRefused;
    said = "in fp32, as " + type_ + " is refused: ";
    if (!measured) {
      said += "nothing was measured with this version";
    } else {
      said +=
          measured->type != type_ ? "it was measured in " + measured->type : measured->why_refused;
    }
  } else {
    said = "in " + type_ + ": " + FiguresOf(*measured);
  }
  ++versions_[outcome];
  if (newest_.exchange(outcome) != outcome && log_) log_("the dense net is computed " + said);
  return outcome == kTaken;
}

}  // namespace embertide
