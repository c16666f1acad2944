// HttpInfer: inferences of KServe v2 over HTTP with JSON, for those who have no gRPC. By choice.
//
//   POST /v2/models/NAME[/versions/V]/infer
//   GET  /v2/models/NAME[/versions/V]         what the model takes and gives
//   GET  /v2/models/NAME[/versions/V]/ready   200 or 503
//
// Each request becomes the same call over gRPC, inside this process: who may make it, its bounds,
// counters, stages and deadlines are those of the front end. Before a body is read, its headers
// have to say its length and who asks. Connections, the silence of each, bytes of bodies and time
// are bounded. In plain text; all callers without a token are one caller.
//
// One thread reads and parses; gRPC's threads write the answers. Thread-safe.
#pragma once

#include <grpcpp/channel.h>

#include <cstdint>
#include <memory>
#include <string>

#include "embertide/status.h"
#include "front/admission.h"
#include "front/tally.h"

namespace embertide::front {

struct HttpInferOptions {
  std::string listen;                    // host:port
  uint64_t max_body_bytes = 4 << 20;     // of one request
  uint64_t max_bodies_bytes = 64 << 20;  // of all that are at work
  const Admission* admission = nullptr;
  Tally* tally = nullptr;
};

class HttpInfer {
 public:
  // kDeviceError if it cannot listen there. Requires: the channel leads to this process' Service,
  // which has been drained when this ends; admission and tally outlive it.
  static Result<std::unique_ptr<HttpInfer>> Start(const HttpInferOptions& options,
                                                  std::shared_ptr<grpc::Channel> channel);
  // Cancels calls at work and waits for them.
  ~HttpInfer();
  HttpInfer(const HttpInfer&) = delete;
  HttpInfer& operator=(const HttpInfer&) = delete;

 private:
  struct Impl;
  explicit HttpInfer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace embertide::front
