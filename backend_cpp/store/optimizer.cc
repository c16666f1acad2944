// Optimizers by name, and what their numbers may be.
#include "embertide/optimizer.h"

#include <array>
#include <cmath>

namespace embertide {
namespace {

constexpr std::array<const char*, 4> kNames = {"rowwise_adagrad", "adagrad", "sgd", "rowwise_adam"};

Status Refuse(const char* name, double value, const char* remedy) {
  return {Code::kInvalidArgument,
          std::string(name) + " = " + std::to_string(value) + "; give " + remedy};
}

}  // namespace

const char* OptimizerName(Optimizer optimizer) { return kNames[static_cast<size_t>(optimizer)]; }

Result<Optimizer> ParseOptimizer(const std::string& name) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) return static_cast<Optimizer>(i);
  }
  return Status(Code::kInvalidArgument, "optimizer \"" + name +
                                            "\"; use rowwise_adagrad, adagrad, sgd or "
                                            "rowwise_adam");
}

Status CheckStepThreads(uint32_t threads) {
  if (threads >= 1 && threads <= kMaxStepThreads) return Status::Ok();
  return {Code::kInvalidArgument, "a step of " + std::to_string(threads) + " threads; give 1 to " +
                                      std::to_string(kMaxStepThreads)};
}

Status StepOptions::Validate() const {
  if (!std::isfinite(learning_rate)) {
    return Refuse("learning_rate", learning_rate, "a finite number");
  }
  if (!(epsilon > 0.0F) || !std::isfinite(epsilon)) {
    return Refuse("epsilon", epsilon, "more than 0: a gradient of zeros would be divided by it");
  }
  if (!(initial_accumulator >= 0.0F) || !std::isfinite(initial_accumulator)) {
    return Refuse("initial_accumulator", initial_accumulator, "0 or more");
  }
  if (!(beta1 >= 0.0 && beta1 < 1.0)) return Refuse("beta1", beta1, "0 or more and less than 1");
  if (!(beta2 >= 0.0 && beta2 < 1.0)) return Refuse("beta2", beta2, "0 or more and less than 1");
  if (!(max_gradient_norm >= 0.0F)) {
    return Refuse("max_gradient_norm", max_gradient_norm, "the largest norm, or 0 for none");
  }
  return Status::Ok();
}

}  // namespace embertide
