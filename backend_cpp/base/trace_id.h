// The id by which callers find a request again: the trace-id of a W3C traceparent. Pure.
//
//   00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
//      `------- trace-id: 32 -------'   `- parent id -' flags
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace embertide {

// Name of a request's parameter, and of a header of gRPC or HTTP.
inline constexpr const char* kTraceparent = "traceparent";
// Bytes of a traceparent of version 00.
inline constexpr size_t kTraceparentBytes = 55;

// Views of the text that it was read from, in digits of lowercase hex.
struct Traceparent {
  std::string_view trace_id;   // 32 digits, not all 0
  std::string_view parent_id;  // 16 digits, not all 0
  uint8_t flags = 0;

  // Whether the caller keeps the trace.
  bool sampled() const { return (flags & 1) != 0; }
};
// nullopt for all that is no traceparent.
std::optional<Traceparent> ParseTraceparent(std::string_view text);

// Whether a text is a trace-id: 32 digits of lowercase hex, not all 0.
bool IsTraceId(std::string_view text);
// Returns the trace-id: 32 digits of lowercase hex. Empty for all that is no traceparent, so
// nothing else of a caller's text is ever kept or shown.
std::string TraceIdOf(std::string_view traceparent);

}  // namespace embertide
