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

Doorway::Doorway(const Options& options)
    : max_connections_(options.max_connections),
      max_connections_of_address_(options.max_connections_of_address != 0
                                      ? options.max_connections_of_address
                                      : options.max_connections - options.max_connections / 4),
      tasks_(options.tasks) {}

Doorway::Caller Doorway::CallerAt(const sockaddr_storage& address) {
  Caller caller{};
  if (address.ss_family == AF_INET) {
    const auto& at = reinterpret_cast<const sockaddr_in&>(address);
    caller[10] = caller[11] = 0xff;
    std::memcpy(&caller[12], &at.sin_addr, 4);
  } else if (address.ss_family == AF_INET6) {
    const auto& at = reinterpret_cast<const sockaddr_in6&>(address);
    std::memcpy(caller.data(), &at.sin6_addr, IN6_IS_ADDR_V4MAPPED(&at.sin6_addr) ? 16 : 8);
  }
  return caller;
}

bool Doorway::IsFull(const Caller& caller) const {
  if (taken_.size() >= max_connections_) return true;
  const auto found = taken_by_.find(caller);
  return found != taken_by_.end() && found->second >= max_connections_of_address_;
}

void Doorway::Forget(int socket) {
  const auto taken = taken_.find(socket);
  if (taken == taken_.end()) return;
  const auto by = taken_by_.find(taken->second.caller);
  if (--by->second == 0) taken_by_.erase(by);
  taken_.erase(taken);
}

bool Doorway::HasPlace(const Caller& caller) {
  if (!IsFull(caller)) return true;
  const auto now = std::chrono::steady_clock::now();
  if (now - swept_ < kSweepRest) return false;
  swept_ = now;
  std::vector<int> ended;
  for (const auto& [socket, connection] : taken_) {
    uint64_t cookie = 0;
    if (!CookieOf(socket, &cookie) || cookie != connection.cookie) ended.push_back(socket);
  }
  for (const int socket : ended) Forget(socket);
  return !IsFull(caller);
}

Status Doorway::Accept() {
  std::vector<pollfd> ready;
  ready.reserve(sockets_.size());
  for (const int socket : sockets_) ready.push_back({socket, POLLIN, 0});
  if (::poll(ready.data(), ready.size(), kPollMs) <= 0) return Status::Ok();
  for (const pollfd& each : ready) {
    if (each.revents == 0) continue;
    sockaddr_storage from{};
    socklen_t bytes = sizeof(from);
    const int socket = ::accept4(each.fd, reinterpret_cast<sockaddr*>(&from), &bytes,
                                 SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (socket < 0) {
      if (errno == EAGAIN || errno == ECONNABORTED || errno == EINTR) continue;
      return {Code::kResourceExhausted,
              std::string("a connection cannot be accepted: ") + std::strerror(errno)};
    }
    Forget(socket);  // whose number it is: that connection has ended
    uint64_t cookie = 0;
    const Caller caller = CallerAt(from);
    if (!HasPlace(caller) || !CookieOf(socket, &cookie)) {
      ++refused_;
      ::close(socket);
      continue;
    }
    const int on = 1;
    ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    taken_[socket] = {cookie, caller};
    ++taken_by_[caller];
    connections_ = static_cast<uint32_t>(taken_.size());
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters given;
    given.listener_fd = each.fd;
    given.fd = socket;
    acceptor_->HandleNewConnection(&given);
  }
  return Status::Ok();
}

}  // namespace embertide
