// InferCall: one ModelInfer, from its headers to its answer.
//
// No thread waits for it: gRPC's threads read the message and hand it to Triton, and the thread of
// Triton's that has the answer sends it. The request's raw tensors are read by the backend where
// gRPC has put them, and the answer's are sent from where the backend has written them. A caller
// that goes away, or whose deadline passes, is told to the backend, which stops.
#pragma once

#include <grpcpp/generic/async_generic_service.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "access/waiting_calls.h"
#include "front/admission.h"
#include "front/budget.h"
#include "front/callers.h"
#include "front/core.h"
#include "front/infer_answer.h"
#include "front/infer_message.h"
#include "front/slow_log.h"
#include "front/spans.h"
#include "front/stages.h"
#include "front/tally.h"

namespace embertide::front {

// Hears of how long inferences took. Thread-safe.
class StageListener {
 public:
  virtual void Hear(const StageTimes& times) const = 0;

 protected:
  ~StageListener() = default;
};

// InferLane: the state that all calls share. It outlives them.
class InferLane {
 public:
  struct Options {
    uint32_t max_calls = 4096;               // at work at once
    uint64_t max_bytes = uint64_t{1} << 30;  // of requests and answers of these
    // Bounds for one caller within these; 0: half of all.
    uint32_t max_calls_of_one = 0;
    uint64_t max_bytes_of_one = 0;
  };
  // Requires: core, admission and tally outlive it.
  InferLane(const Core& core, const Options& options, const Admission& admission, Tally* tally);
  ~InferLane();
  InferLane(const InferLane&) = delete;
  InferLane& operator=(const InferLane&) = delete;

  // Ends calls whose callers neither send nor take anything; called once a second.
  void EndLate();
  uint32_t at_work() const { return at_work_; }
  uint64_t bytes() const { return budget_.taken(); }
  const Callers::Limits& limits_of_one() const { return callers_.limits(); }
  uint64_t late() const { return arrivals_.late() + leaving_.late(); }
  const SlowLog& slow() const { return slow_; }
  // Who hears of each inference that is answered well; null for nobody.
  void SetListener(const StageListener* listener) { listener_ = listener; }
  // Where spans of inferences go, refused ones among them; null for nowhere. Requires: it outlives
  // all calls.
  void SetSpans(Spans* spans) { spans_ = spans; }

 private:
  friend class InferCall;
  const Core& core_;
  const Options options_;
  const Admission& admission_;
  Tally& tally_;
  std::atomic<const StageListener*> listener_{nullptr};
  std::atomic<Spans*> spans_{nullptr};
  SlowLog slow_;
  TRITONSERVER_ResponseAllocator* allocator_ = nullptr;
  Budget budget_;
  Callers callers_;
  std::atomic<uint32_t> at_work_{0};
  WaitingCalls arrivals_;  // calls whose message is on its way
  WaitingCalls leaving_;   // calls whose answer is
};

// Deletes itself.
class InferCall final : public grpc::ServerGenericBidiReactor {
 public:
  // Requires: the guest has been admitted.
  InferCall(InferLane* lane, grpc::GenericCallbackServerContext* context, Guest guest);

  void OnReadDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  friend class InferLane;
  ~InferCall() override;

  static TRITONSERVER_Error* Allocate(TRITONSERVER_ResponseAllocator* allocator,
                                      const char* tensor_name, size_t byte_size,
                                      TRITONSERVER_MemoryType memory_type, int64_t memory_type_id,
                                      void* userp, void** buffer, void** buffer_userp,
                                      TRITONSERVER_MemoryType* actual_memory_type,
                                      int64_t* actual_memory_type_id);
  static TRITONSERVER_Error* Release(TRITONSERVER_ResponseAllocator* allocator, void* buffer,
                                     void* buffer_userp, size_t byte_size,
                                     TRITONSERVER_MemoryType memory_type, int64_t memory_type_id);
  static void Released(TRITONSERVER_InferenceRequest* request, uint32_t flags, void* userp);
  static void Completed(TRITONSERVER_InferenceResponse* response, uint32_t flags, void* userp);

  grpc::Status Submit();
  grpc::Status Take(uint64_t bytes);
  void End(const grpc::Status& status);
  // Finish, noting its code.
  void Refuse(const grpc::Status& status);
  void Refuse(Refused why, const grpc::Status& status);
  void RefuseExpired();
  // Tells the listener and the slow log how long the stages took. Requires: gRPC has the answer.
  void NoteStages();
  // Adds its span, if it has one. Requires: it has ended with code_.
  void NoteSpan(Spans* spans);
  // One of those that use it no longer does.
  void LetGo();

  InferLane& lane_;
  grpc::GenericCallbackServerContext* const context_;
  const Guest guest_;
  Callers::Caller* caller_ = nullptr;  // null: no place was left
  std::atomic<uint32_t> holds_{1};     // gRPC, then Triton's two callbacks
  WaitingCalls::Place place_;

  grpc::ByteBuffer question_;
  std::vector<grpc::Slice> slices_;
  InferMessage message_;
  std::vector<std::string> typed_;  // tensors that came as lists of numbers
  uint64_t taken_ = 0;              // of the budget

  std::mutex mutex_;
  // Under mutex_; null before it is whole and once Triton has given it back.
  TRITONSERVER_InferenceRequest* request_ = nullptr;
  bool cancelled_ = false;  // under mutex_

  grpc::StatusCode code_ = grpc::StatusCode::UNKNOWN;  // that it ends with
  int64_t begun_ns_ = 0;  // the headers are here; 0 if nobody wants spans
  Moments moments_;

  std::vector<grpc::Slice> tensors_;  // of the answer, as the backend asks for them
  InferAnswer answer_;
};

}  // namespace embertide::front
