#include "access/doorway.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "access/address.h"

namespace embertide {
namespace {

constexpr int kBacklog = 1024;
constexpr int kPollMs = 100;
// Looking which connections have ended takes a call for each.
constexpr std::chrono::milliseconds kSweepRest{50};

Status CannotListen(const std::string& address, const std::string& why) {
  return {Code::kDeviceError, "cannot listen at " + address + ": " + why};
}

// False: it is no socket, and was closed by gRPC.
bool CookieOf(int socket, uint64_t* cookie) {
  socklen_t bytes = sizeof(*cookie);
  return ::getsockopt(socket, SOL_SOCKET, SO_COOKIE, cookie, &bytes) == 0;
}

int PortOf(int socket) {
  sockaddr_storage address{};
  socklen_t bytes = sizeof(address);
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &bytes) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

void SetPort(addrinfo* at, int port) {
  if (at->ai_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(at->ai_addr)->sin6_port = htons(static_cast<uint16_t>(port));
  } else {
    reinterpret_cast<sockaddr_in*>(at->ai_addr)->sin_port = htons(static_cast<uint16_t>(port));
  }
}

}  // namespace

Result<std::unique_ptr<Doorway>> Doorway::Of(const Options& options,
                                             std::shared_ptr<grpc::ServerCredentials> credentials,
                                             grpc::ServerBuilder* builder) {
  std::unique_ptr<Doorway> doorway(new Doorway(options));
  EMBERTIDE_RETURN_IF_ERROR(doorway->Listen(options.listen));
  doorway->acceptor_ = builder->experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      std::move(credentials));
  return doorway;
}

Status Doorway::Listen(const std::string& address) {
  const Result<std::shared_ptr<addrinfo>> all = ListenAddresses(address);
  if (!all.ok()) return CannotListen(address, all.status().message());
  for (addrinfo* at = all.value().get(); at != nullptr; at = at->ai_next) {
    if (port_ != 0) SetPort(at, port_);  // 0 was asked for: the same one for each address
    const int socket =
        ::socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, at->ai_protocol);
    // A name may have an address of a family that the machine has not.
    if (socket < 0 && errno == EAFNOSUPPORT && at->ai_next != nullptr) continue;
    if (socket < 0) return CannotListen(address, std::strerror(errno));
    sockets_.push_back(socket);
    const int on = 1;
    ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (at->ai_family == AF_INET6) {
      ::setsockopt(socket, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
    }
    if (::bind(socket, at->ai_addr, at->ai_addrlen) != 0 || ::listen(socket, kBacklog) != 0) {
      return CannotListen(address, std::string(std::strerror(errno)) +
                                       "; the address is in use or not of this machine");
    }
    port_ = PortOf(socket);
  }
  return Status::Ok();
}

void Doorway::Open() {
  task_ = std::make_unique<BackgroundTask>(TaskOptions{.name = "doorway", .board = tasks_},
                                           [this](const std::stop_token&) { return Accept(); });
}

void Doorway::Close() {
  task_.reset();
  for (const int socket : sockets_) ::close(socket);
  sockets_.clear();
}

Doorway::~Doorway() { Close(); }

bool Doorway::HasPlace() {
  if (taken_.size() < most_) return true;
  const auto now = std::chrono::steady_clock::now();
  if (now - swept_ < kSweepRest) return false;
  swept_ = now;
  std::erase_if(taken_, [](const auto& each) {
    uint64_t cookie = 0;
    return !CookieOf(each.first, &cookie) || cookie != each.second;
  });
  return taken_.size() < most_;
}

Status Doorway::Accept() {
  std::vector<pollfd> ready;
  ready.reserve(sockets_.size());
  for (const int socket : sockets_) ready.push_back({socket, POLLIN, 0});
  if (::poll(ready.data(), ready.size(), kPollMs) <= 0) return Status::Ok();
  for (const pollfd& each : ready) {
    if (each.revents == 0) continue;
    const int socket = ::accept4(each.fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (socket < 0) {
      if (errno == EAGAIN || errno == ECONNABORTED || errno == EINTR) continue;
      return {Code::kResourceExhausted,
              std::string("a connection cannot be accepted: ") + std::strerror(errno)};
    }
    uint64_t cookie = 0;
    if (!HasPlace() || !CookieOf(socket, &cookie)) {
      ++refused_;
      ::close(socket);
      continue;
    }
    const int on = 1;
    ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    taken_[socket] = cookie;
    connections_ = static_cast<uint32_t>(taken_.size());
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters given;
    given.listener_fd = each.fd;
    given.fd = socket;
    acceptor_->HandleNewConnection(&given);
  }
  return Status::Ok();
}

}  // namespace embertide
