#include "access/listener.h"

#include <absl/synchronization/mutex.h>
#include <grpcpp/support/slice.h>

#include "access/limits.h"

namespace embertide {

grpc::ByteBuffer HealthAnswer(bool serving) {
  // The message has one field: SERVING is 1, NOT_SERVING 2.
  const char bytes[] = {8, static_cast<char>(serving ? 1 : 2)};
  const grpc::Slice slice(bytes, sizeof(bytes));
  return {&slice, 1};
}

void SetListenerBounds(grpc::ServerBuilder* builder) {
  // Debian builds Abseil to look for cycles of gRPC's mutexes at each lock.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  // A connection that never says anything, that has no call, and one that would have as many calls
  // as it likes.
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMs);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kMaxConnectionIdleMs);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreams);
  // Else who was let in once would be for ever, whatever became of his certificate.
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, kMaxConnectionAgeMs);
  // Two processes on one port would each get a part of the calls.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // A message of a few KiB may be GiB once it is decompressed: nobody of ours compresses.
  builder->SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder->SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  builder->AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  // A fast connection does not raise the bytes that a call may send before it is read.
  builder->AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
}

}  // namespace embertide
