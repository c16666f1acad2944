#include "base/trace_id.h"

#include <algorithm>
#include <charconv>

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

std::optional<Traceparent> ParseTraceparent(std::string_view text) {
  // Later versions may have more, after another dash.
  if (text.size() < kTraceparentBytes ||
      (text.size() > kTraceparentBytes && text[kTraceparentBytes] != '-'))
    return std::nullopt;
  const std::string_view version = text.substr(0, 2);
  if (version == "ff" || (version == "00" && text.size() > kTraceparentBytes)) return std::nullopt;
  Traceparent given{.trace_id = text.substr(kIdBegin, kIdDigits),
                    .parent_id = text.substr(kParentBegin, kParentDigits)};
  const std::string_view flags = text.substr(kFlagsBegin, 2);
  const bool dashes =
      text[2] == '-' && text[kParentBegin - 1] == '-' && text[kFlagsBegin - 1] == '-';
  if (!dashes || !IsHex(version) || !IsTraceId(given.trace_id) || !IsHex(given.parent_id) ||
      !IsHex(flags) || IsZero(given.parent_id)) {
    return std::nullopt;
  }
  std::from_chars(flags.begin(), flags.end(), given.flags, 16);
  return given;
}

std::string TraceIdOf(std::string_view text) {
  const std::optional<Traceparent> given = ParseTraceparent(text);
  return given ? std::string(given->trace_id) : std::string();
}

}  // namespace embertide
