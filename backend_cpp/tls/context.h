// The files of one end of TLS, proved as they are loaded. Private to the wire.
#pragma once

#include <openssl/ssl.h>

#include <memory>
#include <string>

#include "embertide/status.h"

namespace embertide {

// Paths of PEM files. Without a certificate this end shows none.
struct TlsFiles {
  std::string certificate;  // ours first, then those that signed it
  std::string key;
  std::string authorities;  // whom the other end's certificate must be signed by

  bool operator==(const TlsFiles&) const = default;
};

// Those of a folder as cert-manager lays a secret out: tls.crt, tls.key, ca.crt.
TlsFiles TlsFolder(const std::string& folder);

struct TlsContextDeleter {
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
};
using TlsContext = std::unique_ptr<SSL_CTX, TlsContextDeleter>;

// A client's context: TLS 1.2 or later, the other end is proved. kInvalidArgument, naming
// the file and what is wrong with it: it cannot be read, is no PEM, the key is of another
// certificate.
Result<TlsContext> LoadTlsContext(const TlsFiles& files);

}  // namespace embertide
