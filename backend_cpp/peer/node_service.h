// The gRPC server of a node: NodeService over a handler, and the health service. Private to peer
// and node.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "embertide/deadline.h"
#include "embertide/status.h"
#include "embertide/v1/node.pb.h"

namespace embertide {

// Answers peers, the control plane and operators. Called from gRPC's threads, many at once.
class NodeHandler {
 public:
  virtual ~NodeHandler() = default;
  virtual Status Lookup(const v1::LookupRequest& request, v1::LookupResponse* response) = 0;
  virtual Status Read(const v1::ReadRequest& request, Deadline deadline,
                      v1::ReadResponse* response) = 0;
  virtual Status GetStatus(v1::NodeServiceGetStatusResponse* response) = 0;
  virtual Status GetLoad(uint32_t hot_keys, v1::NodeServiceGetLoadResponse* response) = 0;
  virtual Status Explain(const v1::ExplainRequest& request, v1::ExplainResponse* response) = 0;
};

struct NodeServerOptions {
  std::string listen;        // host:port
  std::string token;         // empty: everyone may call
  uint32_t max_calls = 256;  // at work at once; more get RESOURCE_EXHAUSTED
};

class NodeServer {
 public:
  // kDeviceError if it cannot listen. Requires: the handler outlives it.
  static Result<std::unique_ptr<NodeServer>> Start(const NodeServerOptions& options,
                                                   NodeHandler* handler);
  // Ends calls at work within a second.
  ~NodeServer();
  NodeServer(const NodeServer&) = delete;
  NodeServer& operator=(const NodeServer&) = delete;

  int port() const;               // that it listens on; useful where 0 was asked for
  void SetServing(bool serving);  // what the health service says
  uint64_t refused() const;       // calls over max_calls or without the token

 private:
  struct Impl;
  explicit NodeServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace embertide
