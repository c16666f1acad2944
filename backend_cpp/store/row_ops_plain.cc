// Rows by vectors of 4 floats.
#include <cstdint>

namespace embertide {
namespace {
constexpr uint32_t kWidth = 4;
}  // namespace
}  // namespace embertide

#include "store/row_kernels.h"

namespace embertide {

const RowOps* PlainRowOps();
const RowOps* PlainRowOps() { return &kOps; }

}  // namespace embertide
