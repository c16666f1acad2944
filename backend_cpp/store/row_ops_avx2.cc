// Rows by vectors of 8 floats.
#include <cstdint>

namespace embertide {
namespace {
constexpr uint32_t kWidth = 8;
}  // namespace
}  // namespace embertide

#include "store/row_kernels.h"

namespace embertide {

const RowOps* Avx2RowOps();
const RowOps* Avx2RowOps() { return &kOps; }

}  // namespace embertide
