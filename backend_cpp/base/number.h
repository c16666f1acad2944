// Numbers of command lines.
#pragma once

#include <charconv>
#include <string>
#include <system_error>
#include <type_traits>

namespace embertide {

// Empty, or why the text is no number from `least` to `most`.
template <typename Number>
std::string ParseNumber(const std::string& text, std::type_identity_t<Number> least,
                        std::type_identity_t<Number> most, Number* out) {
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, *out);
  if (error == std::errc() && stopped == end && *out >= least && *out <= most) return "";
  const std::string kind = std::is_integral_v<Number> ? "a whole number" : "a number";
  return "\"" + text + "\"; give " + kind + " from " + std::to_string(least) + " to " +
         std::to_string(most);
}

}  // namespace embertide
