#include "triton/kept_connections.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <vector>

#include "base/sleep.h"

namespace embertide::triton {
namespace {

constexpr auto kLook = std::chrono::milliseconds(200);
constexpr auto kLookAgain = std::chrono::milliseconds(20);
constexpr int kEstablished = 1;  // TCP_ESTABLISHED; the headers that name it clash with linux/tcp.h

// -1: it is no socket of TCP, or has no port.
int PortOf(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return -1;
  if (address.ss_family == AF_INET) {
    return ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
  }
  if (address.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port);
  }
  return -1;
}

bool IsIdle(int fd) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  int unread = 0;
  int unsent = 0;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return false;
  if (ioctl(fd, SIOCINQ, &unread) != 0 || ioctl(fd, SIOCOUTQNSD, &unsent) != 0) return false;
  if (info.tcpi_state != kEstablished || unread != 0 || unsent != 0) return false;
  // A question acknowledges the answer before it: while that is not acknowledged, it was last. So
  // it was if it is younger, in milliseconds; equal ages say nothing.
  return info.tcpi_unacked > 0 || info.tcpi_last_data_sent < info.tcpi_last_data_recv;
}

std::vector<int> Descriptors() {
  std::vector<int> found;
  DIR* folder = opendir("/proc/self/fd");
  if (folder == nullptr) return found;
  while (const dirent* each = readdir(folder)) {
    const std::string_view name = each->d_name;
    int fd = -1;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), fd);
    if (error == std::errc() && end == name.data() + name.size()) found.push_back(fd);
  }
  closedir(folder);
  return found;
}

}  // namespace

size_t EndIdleConnections(uint16_t port) {
  size_t ended = 0;
  for (const int fd : Descriptors()) {
    // Reading alone is ended: the server reads the end of the connection, and closes it itself.
    if (PortOf(fd) == port && IsIdle(fd) && shutdown(fd, SHUT_RD) == 0) ++ended;
  }
  return ended;
}

KeptConnections::KeptConnections(uint16_t port, std::string leaving)
    : task_({.name = "kept-connections"}, [port, leaving = std::move(leaving),
                                           leaves = false](const std::stop_token& stop) mutable {
        std::error_code ignored;
        leaves = leaves || std::filesystem::exists(leaving, ignored);
        if (leaves) EndIdleConnections(port);
        SleepFor(stop, leaves ? kLookAgain : kLook);
        return Status::Ok();
      }) {}

std::unique_ptr<KeptConnections> KeptConnections::OfEnvironment() {
  const char* value = std::getenv("EMBERTIDE_LEAVING");
  if (value == nullptr) return nullptr;
  const std::string_view given = value;
  uint16_t port = 0;
  const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), port);
  const size_t read = static_cast<size_t>(end - given.data());
  if (error != std::errc() || read + 1 >= given.size() || given[read] != '@') return nullptr;
  return std::make_unique<KeptConnections>(port, std::string(given.substr(read + 1)));
}

}  // namespace embertide::triton
