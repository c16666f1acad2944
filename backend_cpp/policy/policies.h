// The makers of each policy, for policy.cc alone; every one has its own file and contract there.
#pragma once

#include <memory>

#include "policy/policy.h"

namespace embertide {

std::unique_ptr<Policy> MakeLru(uint32_t capacity);
std::unique_ptr<Policy> MakeLfu(uint32_t capacity);
std::unique_ptr<Policy> MakeClock(uint32_t capacity);
std::unique_ptr<Policy> MakeS3Fifo(uint32_t capacity, KeyOf key_of);
std::unique_ptr<Policy> MakeTinyLfu(uint32_t capacity, KeyOf key_of);
std::unique_ptr<Policy> MakeReuseDensity(uint32_t capacity, KeyOf key_of);

// MakeReuseDensity with its clock at `now` to begin with: the tests of its wrapping at 2^32.
std::unique_ptr<Policy> MakeReuseDensityAt(uint32_t capacity, KeyOf key_of, uint32_t now);

}  // namespace embertide
