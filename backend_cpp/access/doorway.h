// Doorway: accepts connections for a gRPC server, so that how many there are has a bound: gRPC
// itself knows none but the limit of open files. One that comes when all places are taken, or as
// many as one address may take, is closed at once, before anything of it is read. Private to
// access, peer and front.
//
// Thread-safe.
#pragma once

#include <grpcpp/server_builder.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "access/limits.h"
#include "base/background_task.h"
#include "embertide/status.h"

namespace embertide {

class Doorway {
 public:
  struct Options {
    std::string listen;  // host:port; port 0 takes a free one
    uint32_t max_connections = kMaxConnections;
    // 0: three quarters of them. So one machine alone cannot shut all others out.
    uint32_t max_connections_of_address = 0;
    TaskBoard* tasks = nullptr;  // OPTIONAL: else the process's; told of `doorway`, its thread
  };
  // Listens, and tells `builder` of it; connections wait until Open. kDeviceError, naming the
  // address, if it cannot listen there.
  static Result<std::unique_ptr<Doorway>> Of(const Options& options,
                                             std::shared_ptr<grpc::ServerCredentials> credentials,
                                             grpc::ServerBuilder* builder);
  ~Doorway();
  Doorway(const Doorway&) = delete;
  Doorway& operator=(const Doorway&) = delete;

  // Accepts from now on. Requires: the server runs.
  void Open();
  // Accepts nothing more; connections that there are stay. To be called before the server ends.
  void Close();

  int port() const { return port_; }
  uint64_t refused() const { return refused_; }
  // Places taken, when one was last looked for.
  uint32_t connections() const { return connections_; }

 private:
  // An IPv4 address as it is mapped into IPv6; of an IPv6 address its first 64 bits, the rest of
  // which one machine may choose as it likes.
  using Caller = std::array<uint8_t, 16>;
  struct Connection {
    uint64_t cookie;
    Caller caller;
  };

  explicit Doorway(const Options& options);
  Status Listen(const std::string& address);
  Status Accept();
  static Caller CallerAt(const sockaddr_storage& address);
  bool HasPlace(const Caller& caller);
  bool IsFull(const Caller& caller) const;
  void Forget(int socket);

  const uint32_t max_connections_;
  const uint32_t max_connections_of_address_;
  TaskBoard* const tasks_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::vector<int> sockets_;
  int port_ = 0;
  std::atomic<uint64_t> refused_{0};
  std::atomic<uint32_t> connections_{0};
  // By descriptor, with the cookie that the kernel gives a socket: gRPC closes it, and the number
  // may be another's by now. This and what follows belongs to the thread that accepts.
  std::map<int, Connection> taken_;
  std::map<Caller, uint32_t> taken_by_;
  std::chrono::steady_clock::time_point swept_;
  std::unique_ptr<BackgroundTask> task_;  // last: it uses the members above
};

}  // namespace embertide
