// CheckThreadRoom: whether the system lets this process have threads that a library starts by
// itself.
#pragma once

#include <cstddef>

#include "embertide/status.h"

namespace embertide {

// Starts so many threads at once, and ends them. kResourceExhausted where one cannot be started.
// `what`: whose they will be, as the subject of a sentence.
Status CheckThreadRoom(size_t threads, const char* what);

}  // namespace embertide
