// Rows by vectors of 16 floats.
#include <cstdint>

namespace embertide {
namespace {
constexpr uint32_t kWidth = 16;
}  // namespace
}  // namespace embertide

#include "store/row_kernels.h"
#include "store/train_kernels.h"

namespace embertide {

const RowOps* Avx512RowOps();
const RowOps* Avx512RowOps() { return &kOps; }
const TrainOps* Avx512TrainOps();
const TrainOps* Avx512TrainOps() { return &kTrainOps; }

}  // namespace embertide
