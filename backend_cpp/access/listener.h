// Bounds that every gRPC port of ours has, whoever connects: of connections, calls and messages;
// and the answer to a question of health. Private to access, peer and front.
#pragma once

#include <grpcpp/server_builder.h>
#include <grpcpp/support/byte_buffer.h>

#include <string_view>

namespace embertide {

// The full name of the health service's one call that is answered.
inline constexpr std::string_view kHealthCheck = "/grpc.health.v1.Health/Check";

// A health.v1.HealthCheckResponse.
grpc::ByteBuffer HealthAnswer(bool serving);

void SetListenerBounds(grpc::ServerBuilder* builder);

}  // namespace embertide
