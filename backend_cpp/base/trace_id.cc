#include "base/trace_id.h"

#include <algorithm>

namespace embertide {
namespace {

constexpr size_t kIdBegin = 3;
constexpr size_t kIdDigits = 32;
constexpr size_t kParentBegin = 36;
constexpr size_t kParentDigits = 16;
constexpr size_t kFlagsBegin = 53;

bool IsHex(std::string_view text) {
  return std::ranges::all_of(
      text, [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool IsZero(std::string_view text) { return text.find_first_not_of('0') == std::string_view::npos; }

}  // namespace

bool IsTraceId(std::string_view text) {
  return text.size() == kIdDigits && IsHex(text) && !IsZero(text);
}

std::string TraceIdOf(std::string_view text) {
  // Later versions may have more, after another dash.
  if (text.size() < kTraceparentBytes ||
      (text.size() > kTraceparentBytes && text[kTraceparentBytes] != '-'))
    return {};
  const std::string_view version = text.substr(0, 2);
  if (version == "ff" || (version == "00" && text.size() > kTraceparentBytes)) return {};
  const std::string_view id = text.substr(kIdBegin, kIdDigits);
  const std::string_view parent = text.substr(kParentBegin, kParentDigits);
  const bool dashes =
      text[2] == '-' && text[kParentBegin - 1] == '-' && text[kFlagsBegin - 1] == '-';
  if (!dashes || !IsHex(version) || !IsTraceId(id) || !IsHex(parent) ||
      !IsHex(text.substr(kFlagsBegin, 2)) || IsZero(parent)) {
    return {};
  }
  return std::string(id);
}

}  // namespace embertide
