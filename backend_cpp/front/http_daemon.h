// The common part of our listeners over HTTP, by GNU libmicrohttpd: how one is started, and how it
// answers. Each has one thread; connections, their memory and their silence are bounded.
#pragma once

#include <microhttpd.h>

#include <memory>
#include <string>
#include <string_view>

#include "embertide/status.h"

namespace embertide::front {

struct HttpDaemonOptions {
  std::string listen;  // host:port; of a name its first address
  std::string what;    // is answered here, for errors: "health and metrics cannot be answered"
  unsigned flags = 0;  // beside those that all have
  unsigned max_connections = 0;
  unsigned max_connections_of_one = 0;  // of one address
  size_t connection_bytes = 0;
  // Called by the daemon's thread alone, with `self`. `answer` throws nothing.
  MHD_AccessHandlerCallback answer = nullptr;
  MHD_RequestCompletedCallback completed = nullptr;  // of every request, whatever became of it
  void* self = nullptr;                              // outlives the daemon
};

struct StopHttpDaemon {
  void operator()(MHD_Daemon* daemon) const { MHD_stop_daemon(daemon); }
};
// Ends connections at once; none may be suspended then.
using HttpDaemon = std::unique_ptr<MHD_Daemon, StopHttpDaemon>;

// kInvalidArgument if `listen` is no address, kDeviceError if nothing can listen there.
Result<HttpDaemon> StartHttpDaemon(const HttpDaemonOptions& options);

// Answers a request with a copy of the body.
MHD_Result Reply(MHD_Connection* connection, unsigned code, std::string_view body,
                 const char* type);

}  // namespace embertide::front
