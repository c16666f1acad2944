// Connections of a real gRPC server, counted where they come in.
#include "access/doorway.h"

#include <arpa/inet.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "access/listener.h"

namespace embertide {
namespace {

class Health final : public grpc::CallbackGenericService {
 public:
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    class Reply final : public grpc::ServerGenericBidiReactor {
     public:
      Reply() { StartWriteAndFinish(&answer_, grpc::WriteOptions(), grpc::Status::OK); }
      void OnDone() override { delete this; }

     private:
      grpc::ByteBuffer answer_ = HealthAnswer(true);
    };
    return new Reply();
  }
};

// A server with a doorway of `most` connections, of one address `of_one`; 0: as many.
struct Serving {
  explicit Serving(uint32_t most, const std::string& listen = "127.0.0.1:0", uint32_t of_one = 0) {
    grpc::ServerBuilder builder;
    SetListenerBounds(&builder);
    auto made = Doorway::Of({.listen = listen,
                             .max_connections = most,
                             .max_connections_of_address = of_one == 0 ? most : of_one},
                            grpc::InsecureServerCredentials(), &builder);
    EXPECT_TRUE(made.ok()) << made.status().ToString();
    doorway = std::move(*made);
    builder.RegisterCallbackGenericService(&service);
    server = builder.BuildAndStart();
    doorway->Open();
  }
  ~Serving() {
    doorway->Close();
    server->Shutdown(std::chrono::system_clock::now());
    server->Wait();
  }
  Health service;
  std::unique_ptr<Doorway> doorway;
  std::unique_ptr<grpc::Server> server;
};

// A TCP connection; closed as it ends.
class Stranger {
 public:
  // `from`: an address of this machine, 127.0.0.N.
  explicit Stranger(int port, int from = 1) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in own{};
    own.sin_family = AF_INET;
    own.sin_addr.s_addr = htonl(INADDR_LOOPBACK - 1 + static_cast<uint32_t>(from));
    EXPECT_EQ(::bind(socket_, reinterpret_cast<sockaddr*>(&own), sizeof(own)), 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    at.sin_port = htons(static_cast<uint16_t>(port));
    EXPECT_EQ(::connect(socket_, reinterpret_cast<sockaddr*>(&at), sizeof(at)), 0);
    const timeval patience{5, 0};
    ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  }
  ~Stranger() { ::close(socket_); }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;
  // The server's first bytes, or its end.
  bool IsLetIn() {
    char byte = 0;
    return ::recv(socket_, &byte, 1, 0) == 1;
  }

 private:
  const int socket_;
};

bool Ask(int port) {
  const auto channel =
      grpc::CreateChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials());
  return channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(5));
}

TEST(Doorway, LetsInAsManyAsItHasPlacesFor) {
  Serving serving(3);
  const int port = serving.doorway->port();
  ASSERT_GT(port, 0);
  std::vector<std::unique_ptr<Stranger>> in;
  for (int i = 0; i < 3; ++i) {
    in.push_back(std::make_unique<Stranger>(port));
    EXPECT_TRUE(in.back()->IsLetIn());
  }
  Stranger fourth(port);
  EXPECT_FALSE(fourth.IsLetIn());
  EXPECT_EQ(serving.doorway->refused(), 1U);
  EXPECT_EQ(serving.doorway->connections(), 3U);
}

TEST(Doorway, OneAddressLeavesPlacesToOthers) {
  Serving serving(4, "127.0.0.1:0", 2);
  const int port = serving.doorway->port();
  Stranger first(port, 2);
  Stranger second(port, 2);
  Stranger third(port, 2);
  EXPECT_TRUE(first.IsLetIn());
  EXPECT_TRUE(second.IsLetIn());
  EXPECT_FALSE(third.IsLetIn());
  Stranger other(port, 3);
  EXPECT_TRUE(other.IsLetIn());
  EXPECT_EQ(serving.doorway->refused(), 1U);
}

TEST(Doorway, PlacesOfAnAddressAreTakenAgain) {
  Serving serving(8, "127.0.0.1:0", 1);
  const int port = serving.doorway->port();
  for (int round = 0; round < 5; ++round) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    bool let_in = false;
    while (!let_in && std::chrono::steady_clock::now() < deadline) {
      Stranger one(port, 2);
      let_in = one.IsLetIn();
    }
    ASSERT_TRUE(let_in) << round;
  }
}

TEST(Doorway, APlaceThatIsLeftIsTakenAgain) {
  Serving serving(2);
  const int port = serving.doorway->port();
  for (int round = 0; round < 5; ++round) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    // gRPC sees an end a little later than it happens.
    bool let_in = false;
    while (!let_in && std::chrono::steady_clock::now() < deadline) {
      Stranger one(port);
      Stranger two(port);
      let_in = one.IsLetIn() && two.IsLetIn();
    }
    ASSERT_TRUE(let_in) << round;
  }
  EXPECT_TRUE(Ask(port));
}

TEST(Doorway, SaysWhereItCannotListen) {
  Serving first(1);
  grpc::ServerBuilder builder;
  const std::string taken = "127.0.0.1:" + std::to_string(first.doorway->port());
  for (const auto& [listen, why] : std::vector<std::pair<std::string, std::string>>{
           {taken, "cannot listen at " + taken +
                       ": Address already in use; the address is in use or not of this machine"},
           {"nowhere", "cannot listen at nowhere: give HOST:PORT"}}) {
    const auto made = Doorway::Of({.listen = listen}, grpc::InsecureServerCredentials(), &builder);
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.status().message(), why);
  }
}

TEST(Doorway, ANameHasAllItsAddresses) {
  Serving serving(8, "localhost:0");
  EXPECT_TRUE(Ask(serving.doorway->port()));
}

}  // namespace
}  // namespace embertide
