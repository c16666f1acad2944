// The gRPC server of a node: NodeService over a handler, and the health service. Private to peer
// and node.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "embertide/deadline.h"
#include "embertide/status.h"
#include "embertide/v1/node.pb.h"
#include "peer/credentials.h"
#include "peer/token_file.h"

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

// A caller may call where it knows a token, which makes it a node, or where its certificate says
// who it is (docs/security.md): a node calls everything; an operator what is not Lookup; a reader
// and the control plane what looks only. Without tokens and TLS everyone may call.
struct NodeServerOptions {
  std::string listen;         // host:port
  std::string health_listen;  // OPTIONAL: the health service alone, in plain text, for probes
  std::shared_ptr<TokenFile> tokens = nullptr;  // OPTIONAL
  Credentials credentials = Credentials::PlainText();
  std::string model;         // identities of another one are refused; empty: not looked at
  uint32_t max_calls = 256;  // at work at once; more get RESOURCE_EXHAUSTED
  uint32_t max_looks = 16;   // the same of those that look only, counted apart: no lookup waits
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
  uint64_t refused() const;       // calls over these, or of those who may not

 private:
  struct Impl;
  explicit NodeServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace embertide
