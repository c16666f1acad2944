// IEEE 754's binary16 by the compiler's name for it.
#pragma once

namespace embertide {

// Converted to and from float by the rounding of IEEE 754. GCC 12 has _Float16 in C++ on x86-64
// alone.
#if defined(__aarch64__)
using Float16 = __fp16;
#else
using Float16 = _Float16;
#endif

}  // namespace embertide
