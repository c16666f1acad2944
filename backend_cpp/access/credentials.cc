// gRPC's own watcher of certificate files, behind two values.
#include "access/credentials.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

#include "tls/context.h"

namespace embertide {
namespace {

constexpr unsigned kLookEverySeconds = 2;  // at the files

}  // namespace

Credentials Credentials::PlainText() {
  Credentials plain;
  plain.server_ = grpc::InsecureServerCredentials();
  plain.channel_ = grpc::InsecureChannelCredentials();
  return plain;
}

Result<Credentials> Credentials::Of(const std::string& folder, CallerCertificate callers) {
  if (folder.empty()) return PlainText();
  const TlsFiles files = TlsFolder(folder);
  // The watcher would wait for files that are wrong, and every connection would fail.
  const Result<TlsContext> proved = LoadTlsContext(files);
  if (!proved.ok()) return proved.status();
  namespace tls = grpc::experimental;
  const auto provider = std::make_shared<tls::FileWatcherCertificateProvider>(
      files.key, files.certificate, files.authorities, kLookEverySeconds);
  tls::TlsServerCredentialsOptions server(provider);
  server.watch_identity_key_cert_pairs();
  server.watch_root_certs();
  server.set_cert_request_type(callers == CallerCertificate::kRequired
                                   ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                                   : GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_AND_VERIFY);
  tls::TlsChannelCredentialsOptions channel;
  channel.set_certificate_provider(provider);
  channel.watch_identity_key_cert_pairs();
  channel.watch_root_certs();
  Credentials credentials;
  credentials.tls_ = true;
  credentials.server_ = tls::TlsServerCredentials(server);
  credentials.channel_ = tls::TlsCredentials(channel);
  return credentials;
}

}  // namespace embertide
