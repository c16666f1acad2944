// Service: the inference protocol (KServe v2) over gRPC, in front of a Core.
//
// A call is answered by its headers alone where its caller may not make it: no message of such a
// one is read. Inferences are InferCalls; what only looks, and what changes what is loaded, has
// threads and bounds of its own, so that neither holds up inferences.
//
// Thread-safe.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/server.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "access/call_threads.h"
#include "access/credentials.h"
#include "access/doorway.h"
#include "access/waiting_calls.h"
#include "front/admission.h"
#include "front/callers.h"
#include "front/core.h"
#include "front/infer_call.h"
#include "front/tally.h"

namespace embertide::front {

struct ServiceOptions {
  std::string listen;      // host:port
  std::string own_socket;  // OPTIONAL: path of a Unix socket, where everything may be asked
  Credentials credentials = Credentials::PlainText();
  AdmissionOptions admission;
  uint64_t max_message_bytes = 64 << 20;  // of a request
  int64_t max_connection_age_ms = 0;      // 0: an hour
  uint32_t max_connections = kMaxConnections;
  InferLane::Options infer;
};

class Service final : public grpc::CallbackGenericService {
 public:
  // Listens; calls wait until Open. kDeviceError if it cannot. Requires: the core outlives it.
  static Result<std::unique_ptr<Service>> Start(const ServiceOptions& options, const Core& core);
  // Ends calls at work within a second.
  ~Service() override;

  // Answers from now on.
  void Open() { doorway_->Open(); }
  // Health says no from now on; calls are answered as before.
  void Leave() { leaving_ = true; }
  bool leaving() const { return leaving_; }
  // Connections are told to go, and calls at work are finished, for so long; then the rest is
  // cancelled. Nothing is taken afterwards.
  void Drain(std::chrono::milliseconds most);
  // Ends calls that take too long to say or to hear anything; called once a second.
  void EndLate();

  // To this service, within this process. Requires: not drained.
  std::shared_ptr<grpc::Channel> InProcess() const;
  const Admission& admission() const { return admission_; }

  int port() const { return doorway_->port(); }
  const Doorway& doorway() const { return *doorway_; }
  const InferLane& inferences() const { return inferences_; }
  void SetSpans(Spans* spans) { inferences_.SetSpans(spans); }
  void SetStageListener(const StageListener* listener) { inferences_.SetListener(listener); }
  const ServiceOptions& options() const { return options_; }
  const Tally& tally() const { return tally_; }
  Tally* mutable_tally() { return &tally_; }
  // Calls cancelled, as their callers said or took nothing for too long.
  uint64_t late() const { return arrivals_.late() + inferences_.late(); }

  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override;

 private:
  friend class LookCall;
  Service(const ServiceOptions& options, const Core& core);
  // The answer to a call that is no inference.
  grpc::Status Answer(std::string_view method, const Guest& guest, grpc::ByteBuffer* question,
                      grpc::ByteBuffer* answer) const;
  bool IsServing() const { return !leaving_ && core_.IsReady(); }

  const ServiceOptions options_;
  const Core& core_;
  std::atomic<bool> leaving_{false};
  Tally tally_;
  const Admission admission_;
  std::atomic<uint32_t> looks_{0};  // at work
  Callers lookers_;                 // those of each caller
  WaitingCalls arrivals_;
  InferLane inferences_;
  CallThreads threads_;
  std::unique_ptr<Doorway> doorway_;
  std::unique_ptr<grpc::Server> server_;  // null once it has drained
};

}  // namespace embertide::front
