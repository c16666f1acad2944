#include "tls/context.h"

#include <openssl/err.h>

namespace embertide {
namespace {

Status Refuse(const std::string& what, const std::string& path) {
  const unsigned long error = ERR_peek_last_error();
  const char* reason = ERR_reason_error_string(error);
  // Errors of the system have no text there.
  const std::string why = reason != nullptr ? reason : "cannot be read";
  ERR_clear_error();
  return {Code::kInvalidArgument, "TLS: " + what + " " + path + ": " + why};
}

}  // namespace

TlsFiles TlsFolder(const std::string& folder) {
  return {folder + "/tls.crt", folder + "/tls.key", folder + "/ca.crt"};
}

Result<TlsContext> LoadTlsContext(const TlsFiles& files) {
  ERR_clear_error();
  TlsContext context(SSL_CTX_new(TLS_client_method()));
  if (context == nullptr) return Status(Code::kResourceExhausted, "TLS: no memory for a context");
  SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  if (!files.certificate.empty() &&
      SSL_CTX_use_certificate_chain_file(context.get(), files.certificate.c_str()) != 1) {
    return Refuse("certificate", files.certificate);
  }
  if (!files.key.empty() &&
      (SSL_CTX_use_PrivateKey_file(context.get(), files.key.c_str(), SSL_FILETYPE_PEM) != 1 ||
       SSL_CTX_check_private_key(context.get()) != 1)) {
    return Refuse("key", files.key);
  }
  if (SSL_CTX_load_verify_locations(context.get(), files.authorities.c_str(), nullptr) != 1) {
    return Refuse("authorities", files.authorities);
  }
  return context;
}

}  // namespace embertide
