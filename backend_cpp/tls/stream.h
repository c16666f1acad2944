// TLS over a connected, blocking socket that has timeouts: the client's end. Private to the wire.
//
// Used by one thread.
#pragma once

#include <openssl/ssl.h>

#include <cstddef>
#include <memory>
#include <string>

#include "embertide/status.h"
#include "tls/context.h"

namespace embertide {

class TlsStream {
 public:
  // Shakes hands. `host` is whom the other end's certificate must name, as a name or an address.
  // kDeviceError: it does not, is not signed by the authorities, has expired, or the other end does
  // not speak TLS. Requires: the socket outlives it.
  static Result<std::unique_ptr<TlsStream>> Connect(const TlsFiles& files, int socket,
                                                    const std::string& host);
  ~TlsStream();
  TlsStream(const TlsStream&) = delete;
  TlsStream& operator=(const TlsStream&) = delete;

  // As send and recv on the socket: bytes, 0 at the end of the stream, or -1; Error says why.
  ptrdiff_t Send(const char* bytes, size_t size);
  ptrdiff_t Receive(char* bytes, size_t size);
  // The error of the last Send or Receive that gave -1.
  std::string Error() const { return error_; }

 private:
  explicit TlsStream(TlsContext context) : context_(std::move(context)) {}
  ptrdiff_t Done(int result);

  TlsContext context_;
  SSL* ssl_ = nullptr;
  std::string error_;
};

}  // namespace embertide
