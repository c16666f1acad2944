// How a process speaks gRPC with others of its fleet: TLS both ways, or plain text. Private to
// access, peer, node and front.
//
// The files are watched: new ones hold for connections that are made from some seconds later on,
// and nothing is restarted. Thread-safe.
#pragma once

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

#include <cstdint>
#include <memory>
#include <string>

#include "embertide/status.h"

namespace embertide {

// Whether every caller has to show a certificate. One that is shown is always checked against the
// authorities.
enum class CallerCertificate : uint8_t { kRequired, kOptional };

class Credentials {
 public:
  // TLS by tls.crt, tls.key and ca.crt of a folder: whoever connects shows a certificate that the
  // authorities of ca.crt signed. Empty: plain text. kInvalidArgument, naming the file that is
  // wrong.
  static Result<Credentials> Of(const std::string& folder,
                                CallerCertificate callers = CallerCertificate::kRequired);
  static Credentials PlainText();

  bool tls() const { return tls_; }
  const std::shared_ptr<grpc::ServerCredentials>& server() const { return server_; }
  // Proves that the other end is signed by the authorities and named as it was dialled.
  const std::shared_ptr<grpc::ChannelCredentials>& channel() const { return channel_; }

 private:
  Credentials() = default;
  bool tls_ = false;
  std::shared_ptr<grpc::ServerCredentials> server_;
  std::shared_ptr<grpc::ChannelCredentials> channel_;
};

}  // namespace embertide
