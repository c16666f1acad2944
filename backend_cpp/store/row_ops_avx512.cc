// Rows by vectors of 16 floats.
#include <cstdint>

namespace embertide {
namespace {
constexpr uint32_t kWidth = 16;
}  // namespace
}  // namespace embertide

#include "store/row_kernels.h"

namespace embertide {

const RowOps* Avx512RowOps();
const RowOps* Avx512RowOps() { return &kOps; }

}  // namespace embertide
