// OpenSSL over a socket of ours. Its own way to write to one raises SIGPIPE where the other end has
// gone, hence a BIO that does not.
#include "tls/stream.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include "tls/socket.h"

namespace embertide {
namespace {

int SocketOf(BIO* bio) { return static_cast<int>(reinterpret_cast<intptr_t>(BIO_get_data(bio))); }

int WriteSocket(BIO* bio, const char* bytes, int size) {
  return static_cast<int>(SendSome(SocketOf(bio), bytes, static_cast<size_t>(size)));
}

int ReadSocket(BIO* bio, char* bytes, int size) {
  return static_cast<int>(ReceiveSome(SocketOf(bio), bytes, static_cast<size_t>(size)));
}

long ControlSocket(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

BIO_METHOD* SocketMethod() {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "socket");
    BIO_meth_set_write(made, WriteSocket);
    BIO_meth_set_read(made, ReadSocket);
    BIO_meth_set_ctrl(made, ControlSocket);
    return made;
  }();
  return method;
}

bool IsAddress(const std::string& host) {
  in6_addr address{};
  return ::inet_pton(AF_INET, host.c_str(), &address) == 1 ||
         ::inet_pton(AF_INET6, host.c_str(), &address) == 1;
}

}  // namespace

Result<std::unique_ptr<TlsStream>> TlsStream::Connect(const TlsFiles& files, int socket,
                                                      const std::string& host) {
  Result<TlsContext> context = LoadTlsContext(files);
  if (!context.ok()) return context.status();
  std::unique_ptr<TlsStream> stream(new TlsStream(std::move(*context)));
  stream->ssl_ = SSL_new(stream->context_.get());
  BIO* bio = BIO_new(SocketMethod());
  if (stream->ssl_ == nullptr || bio == nullptr) {
    BIO_free(bio);
    return Status(Code::kResourceExhausted, "TLS: no memory for a connection");
  }
  BIO_set_data(bio, reinterpret_cast<void*>(static_cast<intptr_t>(socket)));
  BIO_set_init(bio, 1);
  SSL_set_bio(stream->ssl_, bio, bio);
  X509_VERIFY_PARAM* wanted = SSL_get0_param(stream->ssl_);
  if (IsAddress(host)) {
    X509_VERIFY_PARAM_set1_ip_asc(wanted, host.c_str());
  } else {
    X509_VERIFY_PARAM_set1_host(wanted, host.c_str(), host.size());
    SSL_set_tlsext_host_name(stream->ssl_, host.c_str());
  }
  ERR_clear_error();
  errno = 0;
  const int result = SSL_connect(stream->ssl_);
  if (result == 1) return stream;
  const long proof = SSL_get_verify_result(stream->ssl_);
  if (proof != X509_V_OK) {
    return Status(Code::kDeviceError,
                  "TLS: the certificate of " + host + ": " + X509_verify_cert_error_string(proof));
  }
  stream->Done(result);
  return Status(Code::kDeviceError, "TLS with " + host + ": " + stream->error_);
}

TlsStream::~TlsStream() { SSL_free(ssl_); }

ptrdiff_t TlsStream::Done(int result) {
  if (result > 0) return result;
  const int kind = SSL_get_error(ssl_, result);
  if (kind == SSL_ERROR_ZERO_RETURN) return 0;
  const char* reason = ERR_reason_error_string(ERR_peek_last_error());
  if (reason != nullptr) {
    error_ = reason;
  } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
    error_ = "nothing came in time";
  } else {
    error_ = errno == 0 ? "the other end hung up" : std::strerror(errno);
  }
  ERR_clear_error();
  return -1;
}

ptrdiff_t TlsStream::Send(const char* bytes, size_t size) {
  ERR_clear_error();
  errno = 0;
  return Done(SSL_write(ssl_, bytes, static_cast<int>(std::min<size_t>(size, INT_MAX))));
}

ptrdiff_t TlsStream::Receive(char* bytes, size_t size) {
  ERR_clear_error();
  errno = 0;
  return Done(SSL_read(ssl_, bytes, static_cast<int>(std::min<size_t>(size, INT_MAX))));
}

}  // namespace embertide
