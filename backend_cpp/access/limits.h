// The bounds that every gRPC port of ours keeps, whoever connects.
#pragma once

#include <chrono>
#include <cstdint>

namespace embertide {

// A port has at most so many connections; a further one is closed at once.
inline constexpr uint32_t kMaxConnections = 1024;
inline constexpr int kHandshakeMs = 10'000;          // until a connection must have begun
inline constexpr int kMaxConnectionIdleMs = 10'000;  // without a call
inline constexpr int kMaxConnectionAgeMs = 3'600'000;
inline constexpr int kMaxStreams = 512;                   // calls of one connection at once
inline constexpr std::chrono::seconds kFirstMessage{10};  // from a call's headers to its message

}  // namespace embertide
