// Rows by vectors of 4 floats.
#include <cstdint>

namespace embertide {
namespace {
constexpr uint32_t kWidth = 4;
}  // namespace
}  // namespace embertide

#include "store/row_kernels.h"
#include "store/train_kernels.h"

namespace embertide {

const RowOps* PlainRowOps();
const RowOps* PlainRowOps() { return &kOps; }
const TrainOps* PlainTrainOps();
const TrainOps* PlainTrainOps() { return &kTrainOps; }

}  // namespace embertide
