// Doorway: accepts connections for a gRPC server, so that how many there are has a bound: gRPC
// itself knows none but the limit of open files. One that comes when all places are taken is closed
// at once, before anything of it is read. Private to access, peer and front.
//
// Thread-safe.
#pragma once

#include <grpcpp/server_builder.h>

#include <atomic>
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
  explicit Doorway(const Options& options)
      : most_(options.max_connections), tasks_(options.tasks) {}
  Status Listen(const std::string& address);
  Status Accept();
  bool HasPlace();

  const uint32_t most_;
  TaskBoard* const tasks_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::vector<int> sockets_;
  int port_ = 0;
  std::atomic<uint64_t> refused_{0};
  std::atomic<uint32_t> connections_{0};
  // By descriptor, the cookie that the kernel gives a socket: gRPC closes it, and the number may
  // be another's by now. Of the thread that accepts.
  std::map<int, uint64_t> taken_;
  std::chrono::steady_clock::time_point swept_;
  std::unique_ptr<BackgroundTask> task_;  // last: it uses the members above
};

}  // namespace embertide
