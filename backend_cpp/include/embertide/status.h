// Status and Result<T>: how every operation of the C++ layers reports an operating error.
//
// Operating errors are values; a broken invariant crashes (EMBERTIDE_CHECK). No exception leaves a
// function of this library. Objects are immutable after construction and safe to copy between
// threads.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <variant>

namespace embertide {

// The closed list of operating errors. Not stored anywhere: numbers may change.
enum class Code : uint8_t {
  kOk = 0,
  kInvalidArgument,    // The caller's input is wrong; repeating it cannot succeed.
  kNotFound,           // The named thing does not exist.
  kRejected,           // A policy said no (admission, schema, plan); nothing was changed.
  kBusy,               // Try again: a bound was reached for now.
  kResourceExhausted,  // A byte budget is full and nothing could be evicted.
  kCorrupt,            // Bytes failed a proof (checksum, length, magic).
  kDeviceError,        // The operating system or a device failed; the message has errno's text.
  kVersionGone,        // The version asked for has left the window; pin a newer one.
  kNotOwner,           // The bucket is not held here; look at the plan again.
  kUnavailable,        // Nobody who could answer is reachable now.
};

// The name of `code` as messages and metrics spell it, for example "VERSION_GONE".
const char* CodeName(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  static Status Ok() { return {}; }

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }
  // "CODE: message", or "OK".
  std::string ToString() const;

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// A value or the Status that explains its absence. Requires: a Status given to it is not ok.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT: implicit on purpose
  Result(Status status) : value_(std::move(status)) {}  // NOLINT: implicit on purpose

  bool ok() const { return std::holds_alternative<T>(value_); }
  // Requires: !ok().
  const Status& status() const { return std::get<Status>(value_); }
  // Requires: ok().
  T& value() { return std::get<T>(value_); }
  const T& value() const { return std::get<T>(value_); }
  T& operator*() { return value(); }
  T* operator->() { return &value(); }

 private:
  std::variant<T, Status> value_;
};

namespace internal {
[[noreturn]] inline void CheckFailed(const char* what, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: invariant broken: %s\n", file, line, what);
  std::abort();
}
}  // namespace internal

#define EMBERTIDE_CHECK(condition) \
  ((condition) ? (void)0 : ::embertide::internal::CheckFailed(#condition, __FILE__, __LINE__))

// Returns the Status of `expression` from the enclosing function unless it is ok.
#define EMBERTIDE_RETURN_IF_ERROR(expression)            \
  do {                                                   \
    ::embertide::Status embertide_status = (expression); \
    if (!embertide_status.ok()) return embertide_status; \
  } while (false)

}  // namespace embertide
