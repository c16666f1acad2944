// The bounds of node.proto that both ends keep. Private to peer and node.
#pragma once

#include <cstddef>
#include <cstdint>

namespace embertide {

inline constexpr int kMaxMessageBytes = 64 << 20;  // of an answer
inline constexpr int kMaxRequestBytes = 4 << 20;
// Bytes of all messages that a node is receiving; beyond it, gRPC ends connections.
inline constexpr size_t kMaxReceivedBytes = 512 << 20;
inline constexpr int kMaxProbeBytes = 4096;
inline constexpr size_t kMaxProbesBytes = 16 << 20;  // of all that ask for health at once
inline constexpr size_t kMaxLookupBytes = 1 << 20;   // of a LookupRequest, its parts
inline constexpr size_t kMaxPartsACall = 256;
inline constexpr size_t kMaxKeysACall = 65536;
inline constexpr size_t kMaxTracesAPart = 4;
// A part is at most half of these, so that a call carries at least one. The rows that an answer is
// made of have the same bound.
inline constexpr size_t kMaxAnswerBytes = 32 << 20;
// Bytes that an asker puts together before it sends.
inline constexpr size_t kCoalesceBytes = 64 << 10;

}  // namespace embertide
