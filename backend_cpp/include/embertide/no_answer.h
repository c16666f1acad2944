// Why no owner of a key answered for it: the label `reason` of embertide_degraded_keys_total.
#pragma once

#include <cstddef>
#include <cstdint>

namespace embertide {

enum class NoAnswer : uint8_t {
  kDead,      // no owner can be reached
  kVersion,   // an owner lives and does not hold the version
  kDeadline,  // the time was up before an owner answered
  kOverload,  // an owner, or the way to it, has too much to do
  kNotOwner,  // those that the plan names as owners do not hold the bucket
  kRefused,   // an owner failed: wrong token, a block of its SSD that is corrupt
};
inline constexpr size_t kNoAnswers = 6;
// The reasons as metrics and messages spell them, in the order of the enum.
inline constexpr const char* kNoAnswerNames[kNoAnswers] = {"dead",     "version",   "deadline",
                                                           "overload", "not_owner", "refused"};

}  // namespace embertide
