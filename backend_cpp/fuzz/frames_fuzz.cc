// What a stranger sends to the ports of a node, as bytes of a connection: no call gets through
// without the token or a certificate, and the node goes on answering those who have it.
//
//   input: [u8 where][u8 how] and the bytes; `where` % 3: peers in plain text, peers by TLS,
//   health;
//          `how` % 2: after a client's preface and its settings, or as they are
#include <arpa/inet.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fstream>

#include "embertide/v1/node.grpc.pb.h"
#include "fuzz/fuzz.h"
#include "peer/node_service.h"
#include "tls/test_authority.h"

namespace embertide::fuzz {
namespace {

constexpr char kToken[] = "f1c0a8e2d4b69577";  // in no seed
constexpr uint64_t kRunsACheck = 64;

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
  // Those who may call are answered.
  void Check() {
    handler.ours = true;
    for (const auto& stub : stubs) {
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
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

void Send(int port, std::string_view bytes) {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  const timeval wait{0, 4'000};
  ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
  // The end of the connection is to leave nothing that waits in the kernel.
  const linger at_once{1, 0};
  ::setsockopt(socket, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  EMBERTIDE_CHECK(::connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  static_cast<void>(::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL));
  char answer[4096];
  static_cast<void>(::recv(socket, answer, sizeof(answer), 0));
  ::close(socket);
}

}  // namespace

std::vector<std::string> Seeds() {
  const std::string lookup = Call("/embertide.v1.NodeService/Lookup", "");
  const std::string guess =
      Call("/embertide.v1.NodeService/GetStatus", Header("authorization", "Bearer guess"));
  const std::string health = Call("/grpc.health.v1.Health/Check", "");
  const std::string hello("\x16\x03\x01\x00\x05\x01\x00\x00\x01\x03", 10);
  return {std::string("\0\1", 2) + lookup,
          std::string("\0\1", 2) + guess,
          std::string("\0\0", 2) + "GET / HTTP/1.1\r\n\r\n",
          std::string("\1\0", 2) + hello,
          std::string("\2\1", 2) + health,
          std::string("\2\1", 2) + Frame(4, 0, 0, "")};
}

void Run(std::string_view input) {
  // It would say of each connection why it was refused.
  static const int quiet = ::setenv("GRPC_VERBOSITY", "NONE", 1);
  EMBERTIDE_CHECK(quiet == 0);
  static Node node;
  static uint64_t runs = 0;
  const int ports[] = {node.plain->port(), node.tls->port(), node.health};
  const int port = ports[Take<uint8_t>(&input) % 3];
  std::string bytes;
  if (Take<uint8_t>(&input) % 2 == 1) {
    bytes = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Frame(4, 0, 0, "");
  }
  Send(port, bytes.append(input));
  if (++runs % kRunsACheck == 0) node.Check();
}

}  // namespace embertide::fuzz
