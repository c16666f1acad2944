#include "triton/kept_connections.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

namespace embertide::triton {
namespace {

constexpr auto kApart = std::chrono::milliseconds(30);  // longer than the kernel's clock ticks

// A connection from its caller to a server of this process.
struct Connection {
  explicit Connection(int listener) {
    sockaddr_in at{};
    socklen_t length = sizeof(at);
    getsockname(listener, reinterpret_cast<sockaddr*>(&at), &length);
    caller = socket(AF_INET, SOCK_STREAM, 0);
    EXPECT_EQ(connect(caller, reinterpret_cast<sockaddr*>(&at), length), 0);
    server = accept(listener, nullptr, nullptr);
  }
  ~Connection() {
    close(caller);
    close(server);
  }
  void Ask() const {
    EXPECT_EQ(send(caller, "?", 1, 0), 1);
    char got = 0;
    EXPECT_EQ(recv(server, &got, 1, 0), 1);
  }
  void Answer() const {
    std::this_thread::sleep_for(kApart);
    EXPECT_EQ(send(server, "!", 1, 0), 1);
    char got = 0;
    EXPECT_EQ(recv(caller, &got, 1, 0), 1);
    std::this_thread::sleep_for(kApart);
  }
  // Whether the server reads the end of it.
  bool HasEnded() const {
    char got = 0;
    return recv(server, &got, 1, MSG_DONTWAIT) == 0;
  }
  int caller = -1;
  int server = -1;
};

struct Listener {
  Listener() {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    fd = socket(AF_INET, SOCK_STREAM, 0);
    EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof(at)), 0);
    EXPECT_EQ(listen(fd, 16), 0);
    socklen_t length = sizeof(at);
    getsockname(fd, reinterpret_cast<sockaddr*>(&at), &length);
    port = ntohs(at.sin_port);
  }
  ~Listener() { close(fd); }
  int fd = -1;
  uint16_t port = 0;
};

TEST(KeptConnectionsTest, OnlyAConnectionThatNobodyUsesIsEnded) {
  const Listener listener;
  const Listener other;
  const Connection fresh(listener.fd);
  const Connection asked(listener.fd);
  const Connection again(listener.fd);
  const Connection unread(listener.fd);
  const Connection idle(listener.fd);
  const Connection elsewhere(other.fd);
  for (const Connection* each : {&again, &unread, &idle, &elsewhere}) {
    each->Ask();
    each->Answer();
  }
  asked.Ask();
  again.Ask();
  EXPECT_EQ(send(unread.caller, "?", 1, 0), 1);
  std::this_thread::sleep_for(kApart);
  EXPECT_EQ(EndIdleConnections(listener.port), 1U);
  EXPECT_TRUE(idle.HasEnded());
  for (const Connection* each : {&fresh, &asked, &again, &elsewhere}) {
    EXPECT_FALSE(each->HasEnded());
  }
  // A request that was sent is still answered, and then there is no more to wait for.
  again.Answer();
  EndIdleConnections(listener.port);
  EXPECT_TRUE(again.HasEnded());
}

TEST(KeptConnectionsTest, TheyEndOnceTheProcessIsLeaving) {
  const Listener listener;
  const Connection idle(listener.fd);
  idle.Ask();
  idle.Answer();
  const std::string file = testing::TempDir() + "/leaving-" + std::to_string(getpid());
  std::filesystem::remove(file);
  const KeptConnections kept(listener.port, file);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_FALSE(idle.HasEnded());
  std::ofstream{file};
  pollfd ended{idle.server, POLLIN, 0};
  EXPECT_EQ(poll(&ended, 1, 10'000), 1);
  EXPECT_TRUE(idle.HasEnded());
  std::filesystem::remove(file);
}

TEST(KeptConnectionsTest, TheEnvironmentSaysWhichAndWhen) {
  for (const char* wrong : {"", "8000", "8000@", "@/tmp/x", "port@/tmp/x", "99999@/tmp/x"}) {
    setenv("EMBERTIDE_LEAVING", wrong, 1);
    EXPECT_EQ(KeptConnections::OfEnvironment(), nullptr) << wrong;
  }
  setenv("EMBERTIDE_LEAVING", "8000@/nowhere/leaving", 1);
  EXPECT_NE(KeptConnections::OfEnvironment(), nullptr);
  unsetenv("EMBERTIDE_LEAVING");
  EXPECT_EQ(KeptConnections::OfEnvironment(), nullptr);
}

}  // namespace
}  // namespace embertide::triton
