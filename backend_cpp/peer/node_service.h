// The gRPC server of a node: NodeService over a handler, and the health service. Private to peer
// and node.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "access/credentials.h"
#include "access/limits.h"
#include "access/token_file.h"
#include "embertide/deadline.h"
#include "embertide/status.h"
#include "embertide/v1/node.pb.h"

namespace embertide {

class TaskBoard;

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
  std::string model;  // identities of another one are refused; empty: not looked at
  // Calls at once, from their headers on; more get RESOURCE_EXHAUSTED. Each kind is counted apart,
  // so that none holds up another: Lookup, Read, those that look only, and those of readers.
  uint32_t max_calls = 256;
  uint32_t max_looks = 16;                                  // of the last two kinds
  std::chrono::milliseconds first_message = kFirstMessage;  // from a call's headers to its message
  // The handler's Lookup may wait for an SSD: beats are answered meanwhile.
  bool waits = false;
  TaskBoard* tasks = nullptr;  // OPTIONAL: told of threads that the system refuses
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
