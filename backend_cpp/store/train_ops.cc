// Which vectors a training step uses: those of row_ops.cc.
#include "store/train_ops.h"

#include "store/row_ops.h"

namespace embertide {

// The functions of the row_ops files for each kind of vectors.
const TrainOps* PlainTrainOps();
#if defined(__x86_64__)
const TrainOps* Avx2TrainOps();
const TrainOps* Avx512TrainOps();
#endif

const TrainOps* TrainOpsOf(std::string_view level) {
  if (RowOpsOf(level) == nullptr) return nullptr;
#if defined(__x86_64__)
  if (level == "avx512") return Avx512TrainOps();
  if (level == "avx2") return Avx2TrainOps();
#endif
  return PlainTrainOps();
}

const TrainOps& ChosenTrainOps() {
  static const TrainOps& chosen = *TrainOpsOf(VectorLevel());
  return chosen;
}

}  // namespace embertide
