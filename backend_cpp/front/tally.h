// Tally: what the front counts of calls, by closed lists. Thread-safe: calls add to atomics, and
// metrics.h brings them to the page.
#pragma once

#include <grpcpp/support/status.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace embertide::front {

// Calls that are answered, each under its name; whatever else is asked for is kOther.
inline constexpr std::array<std::string_view, 13> kMethods = {"ModelInfer",
                                                              "ServerLive",
                                                              "ServerReady",
                                                              "ModelReady",
                                                              "ServerMetadata",
                                                              "ModelMetadata",
                                                              "ModelConfig",
                                                              "ModelStatistics",
                                                              "RepositoryIndex",
                                                              "RepositoryModelLoad",
                                                              "RepositoryModelUnload",
                                                              "Health",
                                                              "other"};
inline constexpr size_t kOther = kMethods.size() - 1;
// The number of a method; kOther for one that is not of the list.
size_t MethodOf(std::string_view name);

inline constexpr size_t kCodes = 17;  // of gRPC
std::string_view CodeName(size_t code);

// Why a call was refused before Triton heard of it.
enum class Refused : uint8_t {
  kIdentity,
  kRight,
  kMethod,
  kCalls,
  kBytes,
  kLooks,
  kCallerCalls,  // the same three of one caller
  kCallerBytes,
  kCallerLooks,
  kMessage,  // none came that may be read
  kExpired,  // the caller's deadline had passed
};
inline constexpr std::array<std::string_view, 11> kRefusedNames = {
    "identity",     "right",        "method",       "calls",   "bytes",  "looks",
    "caller_calls", "caller_bytes", "caller_looks", "message", "expired"};

class Tally {
 public:
  // A call has ended. Requires: method is one of kMethods.
  void AddCall(size_t method, grpc::StatusCode code) {
    const auto number = static_cast<size_t>(code);
    calls_[method][number < kCodes ? number : size_t{grpc::StatusCode::UNKNOWN}].fetch_add(
        1, std::memory_order_relaxed);
  }
  void AddRefused(Refused why) {
    refused_[static_cast<size_t>(why)].fetch_add(1, std::memory_order_relaxed);
  }
  uint64_t calls(size_t method, size_t code) const { return calls_[method][code]; }
  uint64_t refused(size_t why) const { return refused_[why]; }

 private:
  std::array<std::array<std::atomic<uint64_t>, kCodes>, kMethods.size()> calls_{};
  std::array<std::atomic<uint64_t>, kRefusedNames.size()> refused_{};
};

}  // namespace embertide::front
