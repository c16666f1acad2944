// Bytes that a stranger sends to the ports of a node on a connection: no call gets through
// without the token or a certificate, every connection that hangs up is ended by the node too, the
// node goes on answering those who may call, and its memory stays within a bound.
//
//   input: [u8 where][u8 how] and the bytes; `where` % 3: peers in plain text, peers by TLS,
//   health;
//          `how` % 2: after a client's preface and its settings, or as they are
//
// Some hundred connections are open at once, so that no run waits for an answer, and what breaks
// may be of any of them: the inputs of all lie in FINDINGS-last/ while the target runs, and stay
// there if it does not end well. `frames_fuzz FINDINGS-last/*` runs them again, one after the
// other.
#include <arpa/inet.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sanitizer/allocator_interface.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <deque>
#include <thread>

#include "embertide/v1/node.grpc.pb.h"
#include "fuzz/fuzz.h"
#include "peer/node_service.h"
#include "tls/test_authority.h"

namespace embertide::fuzz {
namespace {

constexpr char kToken[] = "f1c0a8e2d4b69577";  // in no seed
constexpr uint64_t kRunsACheck = 256;
// Connections that may still send, and as many that have hung up and were not looked at since. With
// the node's ends of them these are 512 descriptors.
constexpr size_t kOpen = 128;
// From hanging up until the node has ended a connection, on a machine with other work.
constexpr int kEndMs = 60'000;
constexpr size_t kMaxAnswer = 64 << 10;  // bytes that a stranger is sent
// Memory allocated in this process: the node, its connections, the fuzzer's own corpus.
constexpr size_t kMaxAllocated = 96 << 20;

// Is called by those alone who may.
class Handler : public NodeHandler {
 public:
  Status Lookup(const v1::LookupRequest&, v1::LookupResponse*) override { return Called(); }
  Status Read(const v1::ReadRequest&, Deadline, v1::ReadResponse*) override { return Called(); }
  Status GetStatus(v1::NodeServiceGetStatusResponse*) override { return Called(); }
  Status GetLoad(uint32_t, v1::NodeServiceGetLoadResponse*) override { return Called(); }
  Status Explain(const v1::ExplainRequest&, v1::ExplainResponse*) override { return Called(); }
  std::atomic<bool> ours{false};

 private:
  Status Called() const {
    EMBERTIDE_CHECK(ours);
    return Status::Ok();
  }
};

int FreePort() {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  EMBERTIDE_CHECK(::bind(socket, reinterpret_cast<sockaddr*>(&address), size) == 0);
  EMBERTIDE_CHECK(::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  ::close(socket);
  return ntohs(address.sin_port);
}

struct Node {
  Node() : health(FreePort()) {
    NodeServerOptions options;
    options.listen = "127.0.0.1:0";
    options.health_listen = "127.0.0.1:" + std::to_string(health);
    options.tokens = *TokenFile::Open({Write("tokens", kToken)});
    plain = Start(options);
    authority.Issue(Folder() + "/node", "spiffe://t/role/node");
    options.credentials = *Credentials::Of(Folder() + "/node");
    options.health_listen = "";
    options.tokens = nullptr;
    tls = Start(options);
    const Credentials both[] = {Credentials::PlainText(), options.credentials};
    const int ports[] = {plain->port(), tls->port()};
    for (size_t i = 0; i < 2; ++i) {
      stubs.push_back(v1::NodeService::NewStub(
          grpc::CreateChannel("127.0.0.1:" + std::to_string(ports[i]), both[i].channel())));
    }
  }
  std::unique_ptr<NodeServer> Start(const NodeServerOptions& options) {
    auto server = NodeServer::Start(options, &handler);
    EMBERTIDE_CHECK(server.ok());
    return std::move(*server);
  }
  // Those who may call are answered, and what strangers left behind is bounded.
  void Check() {
    const size_t allocated = __sanitizer_get_current_allocated_bytes();
    EMBERTIDE_CHECK(allocated <= kMaxAllocated);
    handler.ours = true;
    for (const auto& stub : stubs) {
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
      context.AddMetadata("authorization", std::string("Bearer ") + kToken);
      v1::NodeServiceGetStatusResponse response;
      EMBERTIDE_CHECK(stub->GetStatus(&context, {}, &response).ok());
    }
    handler.ours = false;
  }

  Handler handler;
  TestAuthority authority;
  int health;
  std::unique_ptr<NodeServer> plain;
  std::unique_ptr<NodeServer> tls;
  std::vector<std::unique_ptr<v1::NodeService::Stub>> stubs;
};

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, const std::string& payload) {
  std::string frame;
  for (const int shift : {16, 8, 0}) frame += static_cast<char>(payload.size() >> shift & 0xff);
  frame += static_cast<char>(type);
  frame += static_cast<char>(flags);
  for (const int shift : {24, 16, 8, 0}) frame += static_cast<char>(stream >> shift & 0xff);
  return frame + payload;
}

// A header as HPACK has one that is not to be remembered.
std::string Header(const std::string& name, const std::string& value) {
  std::string out(1, '\0');
  out += static_cast<char>(name.size());
  out += name;
  out += static_cast<char>(value.size());
  return out + value;
}

std::string Call(const std::string& path, const std::string& more) {
  const std::string headers = Header(":method", "POST") + Header(":scheme", "http") +
                              Header(":path", path) + Header(":authority", "x") +
                              Header("content-type", "application/grpc") +
                              Header("te", "trailers") + more;
  return Frame(1, 4, 1, headers) + Frame(0, 1, 1, std::string(5, '\0'));
}

// The first words of a client of TLS, by OpenSSL.
std::string ClientHello() {
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context(SSL_CTX_new(TLS_client_method()),
                                                                  SSL_CTX_free);
  const std::unique_ptr<SSL, decltype(&SSL_free)> ssl(SSL_new(context.get()), SSL_free);
  const unsigned char http2[] = {2, 'h', '2'};
  SSL_set_alpn_protos(ssl.get(), http2, sizeof(http2));
  SSL_set_bio(ssl.get(), BIO_new(BIO_s_mem()), BIO_new(BIO_s_mem()));
  SSL_connect(ssl.get());  // comes no further than its first words
  char* bytes = nullptr;
  const long size = BIO_get_mem_data(SSL_get_wbio(ssl.get()), &bytes);
  EMBERTIDE_CHECK(size > 0);
  return {bytes, static_cast<size_t>(size)};
}

// Connections that are open at once, bounded.
class Strangers {
 public:
  // Sends all bytes over a connection of their own, and waits for the oldest only.
  void Send(int port, std::string_view bytes) {
    talking_.push_back(Connect(port));
    // Less than a socket's buffer holds; a server that closed already has read what it wanted.
    static_cast<void>(
        ::send(talking_.back(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
    if (talking_.size() > kOpen) HangUp();
    if (leaving_.size() > kOpen) AwaitEnd();
  }
  void EndAll() {
    while (!talking_.empty()) HangUp();
    while (!leaving_.empty()) AwaitEnd();
  }

 private:
  // Each from an address of its own, of the many that are this machine: the kernel keeps a closed
  // connection's pair of addresses for a minute, and one address has ports for 28,000. REUSEADDR
  // lets servers listen on them meanwhile.
  int Connect(int port) {
    const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EMBERTIDE_CHECK(socket >= 0);
    const int on = 1;
    ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    ::setsockopt(socket, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof(on));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK + (1U << 16) + connected_++ % (1U << 16));
    EMBERTIDE_CHECK(::bind(socket, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    if (::connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
      // It waits where the node has not accepted all who came before.
      EMBERTIDE_CHECK(errno == EINTR);
      AwaitEvent(socket, POLLOUT);
      int error = 0;
      socklen_t size = sizeof(error);
      EMBERTIDE_CHECK(::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0);
    }
    return socket;
  }
  static void AwaitEvent(int socket, short event) {
    pollfd at{socket, event, 0};
    int ready = 0;
    do {
      ready = ::poll(&at, 1, kEndMs);
    } while (ready < 0 && errno == EINTR);  // by libFuzzer's alarm
    EMBERTIDE_CHECK(ready == 1);
  }
  void HangUp() {
    ::shutdown(talking_.front(), SHUT_WR);
    leaving_.push_back(talking_.front());
    talking_.pop_front();
  }
  // The node ends a connection once it has read all of it.
  void AwaitEnd() {
    const int socket = leaving_.front();
    leaving_.pop_front();
    size_t answered = 0;
    while (true) {
      AwaitEvent(socket, POLLIN);
      char answer[4096];
      const ssize_t size = ::recv(socket, answer, sizeof(answer), 0);
      if (size <= 0) break;
      answered += static_cast<size_t>(size);
      EMBERTIDE_CHECK(answered <= kMaxAnswer);
    }
    ::close(socket);
  }

  std::deque<int> talking_;
  std::deque<int> leaving_;
  uint32_t connected_ = 0;
};

}  // namespace

std::vector<std::string> Seeds() {
  const std::string lookup = Call("/embertide.v1.NodeService/Lookup", "");
  const std::string guess =
      Call("/embertide.v1.NodeService/GetStatus", Header("authorization", "Bearer guess"));
  const std::string health = Call("/grpc.health.v1.Health/Check", "");
  const std::string short_hello("\x16\x03\x01\x00\x05\x01\x00\x00\x01\x03", 10);
  const std::string settings = Frame(4, 0, 0, std::string("\0\3\0\0\0\5\0\4\0\0\1\0", 12));
  const std::string ping = Frame(6, 0, 0, "12345678");
  const std::string window = Frame(8, 0, 0, std::string("\0\0\1\0", 4));
  const std::string reset = Frame(3, 0, 1, std::string("\0\0\0\10", 4));
  const std::string away = Frame(7, 0, 0, std::string(8, '\0'));
  // Headers that go on in a second frame.
  const std::string pieces =
      Frame(1, 0, 1, Header(":method", "POST")) + Frame(9, 4, 1, Header(":path", "/"));
  const std::string plain("\0\1", 2);
  const std::string bare("\0\0", 2);
  const std::string tls("\1\0", 2);
  const std::string probe("\2\1", 2);
  return {plain + lookup,
          plain + guess,
          plain + settings + ping + window + lookup + reset + away,
          plain + pieces,
          bare + "GET / HTTP/1.1\r\n\r\n",
          tls + short_hello,
          tls + ClientHello(),
          probe + health,
          probe + settings};
}

void Run(std::string_view input) {
  // It would say of each connection why it was refused.
  static const int quiet = ::setenv("GRPC_VERBOSITY", "NONE", 1);
  EMBERTIDE_CHECK(quiet == 0);
  static LastInputs last(2 * kOpen + 1);
  last.Keep(input);
  static Node node;
  static Strangers strangers;
  static uint64_t runs = 0;
  const int ports[] = {node.plain->port(), node.tls->port(), node.health};
  const int port = ports[Take<uint8_t>(&input) % 3];
  std::string bytes;
  if (Take<uint8_t>(&input) % 2 == 1) {
    bytes = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Frame(4, 0, 0, "");
  }
  strangers.Send(port, bytes.append(input));
  if (Replays()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the node has read all by then
    strangers.EndAll();
  }
  if (Replays() || ++runs % kRunsACheck == 0) node.Check();
}

}  // namespace embertide::fuzz
