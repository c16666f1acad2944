// Optimizers of a TrainingStore: how a row's merged gradient becomes its next values.
//
// A step sees each row once. g is the sum in fp64 of all its gradients in the batch, in the order
// of the call; dim its dimensions, dead chunks' gradients included. Then, by element d where one is
// named:
//
//   clip             c = max_gradient_norm; where c > 0 and |g| = sqrt(sum_d g_d^2) > c:
//                    g *= c / |g| (Pascanu et al. 2013, arXiv:1211.5063, for one row)
//   rowwise_adagrad  h += mean_d(g_d^2); w -= lr * g / (sqrt(h) + eps)
//                    Adagrad (Duchi et al. 2011, JMLR 12) with one accumulator a row, as FBGEMM's
//                    EXACT_ROWWISE_ADAGRAD (Mudigere et al. 2022, arXiv:2104.05158)
//   adagrad          h_d += g_d^2; w_d -= lr * g_d / (sqrt(h_d) + eps)
//   sgd              w -= lr * g
//   rowwise_adam     t += 1; m_d = b1 * m_d + (1 - b1) * g_d; v = b2 * v + (1 - b2) * mean_d(g_d^2)
//                    w_d -= lr * (m_d / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
//                    Adam (Kingma & Ba 2015, arXiv:1412.6980) with one second moment a row, as
//                    FBGEMM's PARTIAL_ROWWISE_ADAM, but that t counts the row's own steps and not
//                    the run's: rows come at any time, and the first step of each is about lr.
//                    Moments of a row that is not in a batch stay as they are.
//
// An accumulator begins at initial_accumulator. The state of an element (h_d, m_d) is zero while
// its chunk is dead, so a chunk that lives again begins anew; the state of a row (h, v, t) goes
// on. All of it is kept as fp32, t as an integer.
#pragma once

#include <cstdint>
#include <string>

#include "embertide/status.h"

namespace embertide {

// Fixed for a store, for what is kept beside a row depends on it: 4 bytes that all have, and
enum class Optimizer : uint8_t {
  kRowwiseAdagrad,  // nothing more
  kAdagrad,         // 4 bytes an element
  kSgd,             // nothing more
  kRowwiseAdam,     // 4 bytes a row and 4 bytes an element
};
// "rowwise_adagrad", "adagrad", "sgd" or "rowwise_adam".
const char* OptimizerName(Optimizer optimizer);
// kInvalidArgument naming those that there are.
Result<Optimizer> ParseOptimizer(const std::string& name);
// Whether it keeps a float for each element: h_d or m_d.
constexpr bool KeepsElements(Optimizer optimizer) {
  return optimizer == Optimizer::kAdagrad || optimizer == Optimizer::kRowwiseAdam;
}
// Whether it counts a row's steps: t.
constexpr bool CountsSteps(Optimizer optimizer) { return optimizer == Optimizer::kRowwiseAdam; }

// Threads that a step, or its lookups, may be shared by; kInvalidArgument if they are others.
inline constexpr uint32_t kMaxStepThreads = 64;
Status CheckStepThreads(uint32_t threads);

// Options that may differ from step to step.
struct StepOptions {
  float learning_rate = 0.01F;
  float epsilon = 1e-8F;             // more than 0; SGD has none
  float initial_accumulator = 0.0F;  // of both Adagrads
  double beta1 = 0.9;                // row-wise Adam's b1 and b2, from 0 to less than 1
  double beta2 = 0.999;
  float max_gradient_norm = 0.0F;  // c of a clip; 0: none

  // kInvalidArgument naming the value.
  Status Validate() const;
};

}  // namespace embertide
