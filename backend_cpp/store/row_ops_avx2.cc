// Rows by vectors of 8 floats.
#include <cstdint>

namespace embertide {
namespace {
constexpr uint32_t kWidth = 8;
}  // namespace
}  // namespace embertide

#include "store/row_kernels.h"
#include "store/train_kernels.h"

namespace embertide {

const RowOps* Avx2RowOps();
const RowOps* Avx2RowOps() { return &kOps; }
const TrainOps* Avx2TrainOps();
const TrainOps* Avx2TrainOps() { return &kTrainOps; }

}  // namespace embertide
