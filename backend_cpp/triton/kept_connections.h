// KeptConnections: connections of HTTP that callers keep, of a process that is about to end.
//
// Triton's HTTP server never says that a connection will close. A caller that keeps one asks on
// over it until the process ends, and loses the request that is under way then. So, from the moment
// that the process is leaving, connections that nobody uses are ended from within: the server reads
// their end and closes them, and their callers, between two requests, make new ones, which a load
// balancer that knows of the leaving leads elsewhere.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/background_task.h"

namespace embertide::triton {

// Ends connections that this process has accepted at a port of its own and that nobody uses: the
// last answer was sent after the last question came, and nothing is on its way either way. Returns
// how many. Thread-safe.
size_t EndIdleConnections(uint16_t port);

class KeptConnections {
 public:
  // Ends those at `port` from when a file named `leaving` is there.
  KeptConnections(uint16_t port, std::string leaving);
  // By EMBERTIDE_LEAVING, which is PORT@FILE. Null: it is not set, or is not that.
  static std::unique_ptr<KeptConnections> OfEnvironment();

 private:
  BackgroundTask task_;
};

}  // namespace embertide::triton
