// A call's way through Triton.
#include "front/infer_call.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <optional>
#include <utility>

#include "access/limits.h"
#include "base/trace_id.h"
#include "front/infer_request.h"

namespace embertide::front {
namespace {

constexpr std::chrono::seconds kSending{10};  // until a caller has taken an answer
constexpr size_t kInferMethod = 0;            // of kMethods
constexpr size_t kMaxNameBytes = 128;         // of a model, in the slow log and in spans

grpc::Status Invalid(const std::string& why) { return {grpc::StatusCode::INVALID_ARGUMENT, why}; }

// Returns the time until the caller's deadline; 0 if there is none.
uint64_t MicrosecondsLeft(const grpc::ServerContextBase& context) {
  const auto left = context.deadline() - std::chrono::system_clock::now();
  if (left > std::chrono::hours(24)) return 0;
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(left).count();
  return static_cast<uint64_t>(std::max<int64_t>(1, us));
}

bool HasExpired(const grpc::ServerContextBase& context) {
  return context.deadline() <= std::chrono::system_clock::now();
}

// Returns the trace that a caller names in metadata; empty: in none that is one.
std::string TraceparentOf(const grpc::CallbackServerContext& context) {
  const auto given = context.client_metadata().find(kTraceparent);
  if (given == context.client_metadata().end()) return {};
  std::string text(given->second.data(), given->second.size());
  return TraceIdOf(text).empty() ? std::string() : text;
}

// Returns the traceparent of a request, by its parameter or by metadata; it may be none.
std::string TraceparentOf(const grpc::CallbackServerContext& context,
                          const inference::ModelInferRequest& head) {
  const auto given = head.parameters().find(kTraceparent);
  return given != head.parameters().end() ? given->second.string_param() : TraceparentOf(context);
}

// Returns the first dimension of the first input; 0: there is none.
int64_t SamplesOf(const inference::ModelInferRequest& head) {
  const bool shaped = head.inputs_size() > 0 && head.inputs(0).shape_size() > 0;
  return shaped ? head.inputs(0).shape(0) : 0;
}

int64_t WallNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

grpc::Status Exhausted(const std::string& why) {
  return {grpc::StatusCode::RESOURCE_EXHAUSTED, why + "; ask again later"};
}

Callers::Limits LimitsOfOne(const InferLane::Options& options) {
  return {.calls = options.max_calls_of_one > 0 ? options.max_calls_of_one
                                                : std::max(1U, options.max_calls / 2),
          .bytes = options.max_bytes_of_one > 0 ? options.max_bytes_of_one : options.max_bytes / 2};
}

}  // namespace

InferLane::InferLane(const Core& core, const Options& options, const Admission& admission,
                     Tally* tally)
    : core_(core),
      options_(options),
      admission_(admission),
      tally_(*tally),
      budget_(options.max_bytes),
      callers_(LimitsOfOne(options)),
      arrivals_(kFirstMessage),
      leaving_(kSending) {
  core_.Worked(core_.calls().ResponseAllocatorNew(&allocator_, InferCall::Allocate,
                                                  InferCall::Release, nullptr),
               "the allocator of answers");
}

InferLane::~InferLane() {
  core_.Worked(core_.calls().ResponseAllocatorDelete(allocator_), "the allocator of answers");
}

void InferLane::EndLate() {
  arrivals_.EndLate();
  leaving_.EndLate();
}

InferCall::InferCall(InferLane* lane, grpc::GenericCallbackServerContext* context, Guest guest)
    : lane_(*lane), context_(context), guest_(std::move(guest)) {
  if (lane_.spans_ != nullptr) begun_ns_ = SteadyNs();
  if (++lane_.at_work_ > lane_.options_.max_calls) {
    Refuse(Refused::kCalls,
           Exhausted(std::to_string(lane_.options_.max_calls) + " requests are at work"));
    return;
  }
  caller_ = lane_.callers_.Enter(guest_.name);
  if (caller_ == nullptr) {
    Refuse(Refused::kCallerCalls, Exhausted(std::to_string(lane_.callers_.limits().calls) +
                                            " requests of this caller are at work"));
    return;
  }
  lane_.arrivals_.Enter(context, &place_);
  StartRead(&question_);
}

InferCall::~InferCall() {
  lane_.budget_.Give(taken_);
  if (caller_ != nullptr) {
    caller_->bytes.Give(taken_);
    lane_.callers_.Leave(caller_);
  }
  --lane_.at_work_;
}

void InferCall::OnReadDone(bool ok) {
  const bool in_time = lane_.arrivals_.Leave(&place_);
  if (HasExpired(*context_)) return RefuseExpired();
  if (!ok) {
    const grpc::Status status(grpc::StatusCode::CANCELLED, "no message came that may be read");
    return in_time ? Refuse(Refused::kMessage, status) : Refuse(status);  // late: counted as such
  }
  moments_.arrived_ns = SteadyNs();
  grpc::Status status;
  try {
    status = Submit();
  } catch (const std::bad_alloc&) {
    status = {grpc::StatusCode::RESOURCE_EXHAUSTED, "out of memory"};
  }
  if (!status.ok()) Refuse(status);
}

void InferCall::OnCancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
  if (request_ == nullptr) return;
  lane_.core_.Worked(lane_.core_.calls().InferenceRequestCancel(request_), "a cancel");
}

void InferCall::OnDone() {
  lane_.leaving_.Leave(&place_);
  bool cancelled = false;
  {
    const std::lock_guard lock(mutex_);
    cancelled = cancelled_;
  }
  if (cancelled && code_ == grpc::StatusCode::OK) code_ = grpc::StatusCode::CANCELLED;
  lane_.tally_.AddCall(kInferMethod, code_);
  if (code_ == grpc::StatusCode::OK) NoteStages();
  if (Spans* const spans = lane_.spans_; spans != nullptr) NoteSpan(spans);
  LetGo();
}

void InferCall::LetGo() {
  if (--holds_ == 0) delete this;
}

grpc::Status InferCall::Take(uint64_t bytes) {
  if (!caller_->bytes.Take(bytes)) {
    lane_.tally_.AddRefused(Refused::kCallerBytes);
    return Exhausted("requests of this caller would take more than " +
                     std::to_string(caller_->bytes.bytes()) + " bytes");
  }
  if (!lane_.budget_.Take(bytes)) {
    caller_->bytes.Give(bytes);
    lane_.tally_.AddRefused(Refused::kBytes);
    return Exhausted("requests at work would take more than " +
                     std::to_string(lane_.budget_.bytes()) + " bytes");
  }
  taken_ += bytes;
  return grpc::Status::OK;
}

grpc::Status InferCall::Submit() {
  if (!question_.Dump(&slices_).ok()) return Invalid("the message cannot be read");
  std::vector<Bytes> bytes;
  bytes.reserve(slices_.size());
  for (const grpc::Slice& slice : slices_) bytes.emplace_back(slice.begin(), slice.size());
  if (grpc::Status status = message_.Split(bytes); !status.ok()) return status;
  if (grpc::Status status = Take(question_.Length() + kHeadGrowth * message_.head_bytes());
      !status.ok()) {
    return status;
  }
  if (grpc::Status status = message_.Parse(); !status.ok()) return status;
  if (grpc::Status status = lane_.admission_.CheckModel(guest_, message_.head().model_name());
      !status.ok()) {
    return status;
  }
  const Core& core = lane_.core_;
  int64_t version = 0;
  if (grpc::Status status = ReadVersion("model_version", message_.head().model_version(), &version);
      !status.ok()) {
    return status;
  }
  TRITONSERVER_InferenceRequest* request = nullptr;
  grpc::Status status = core.StatusOf(core.calls().InferenceRequestNew(
      &request, core.server(), message_.head().model_name().c_str(), version));
  if (!status.ok()) return status;
  status = FillRequest(core, message_, MicrosecondsLeft(*context_), &typed_, request);
  // The backend knows parameters alone.
  if (const std::string trace = TraceparentOf(*context_);
      status.ok() && !trace.empty() && !message_.head().parameters().contains(kTraceparent)) {
    status = core.StatusOf(
        core.calls().InferenceRequestSetStringParameter(request, kTraceparent, trace.c_str()));
  }
  if (status.ok()) {
    status = core.StatusOf(
        core.calls().InferenceRequestSetReleaseCallback(request, InferCall::Released, this));
  }
  if (status.ok()) {
    status = core.StatusOf(core.calls().InferenceRequestSetResponseCallback(
        request, lane_.allocator_, this, InferCall::Completed, this));
  }
  if (status.ok()) {
    const std::lock_guard lock(mutex_);
    request_ = request;  // whole: it may be cancelled from now on
    if (cancelled_) status = {grpc::StatusCode::CANCELLED, "the caller no longer waits"};
  }
  if (status.ok()) {
    holds_ += 2;
    moments_.handed_ns = SteadyNs();
    status = core.StatusOf(core.calls().ServerInferAsync(core.server(), request, nullptr));
    if (status.ok()) return status;  // Triton calls Released and Completed from now on
    holds_ -= 2;
  }
  const std::lock_guard lock(mutex_);
  request_ = nullptr;
  core.Worked(core.calls().InferenceRequestDelete(request), "a request");
  return status;
}

TRITONSERVER_Error* InferCall::Allocate(TRITONSERVER_ResponseAllocator* /*allocator*/,
                                        const char* tensor_name, size_t byte_size,
                                        TRITONSERVER_MemoryType /*memory_type*/,
                                        int64_t /*memory_type_id*/, void* userp, void** buffer,
                                        void** buffer_userp,
                                        TRITONSERVER_MemoryType* actual_memory_type,
                                        int64_t* actual_memory_type_id) {
  auto& call = *static_cast<InferCall*>(userp);
  *buffer = nullptr;
  *buffer_userp = nullptr;
  *actual_memory_type = TRITONSERVER_MEMORY_CPU;
  *actual_memory_type_id = 0;
  if (byte_size == 0) return nullptr;
  auto* const bytes = call.Take(byte_size).ok() ? new (std::nothrow) char[byte_size] : nullptr;
  if (bytes == nullptr) {
    return call.lane_.core_.calls().ErrorNew(
        TRITONSERVER_ERROR_UNAVAILABLE,
        ("embertide: no memory for the answer's " + std::string(tensor_name)).c_str());
  }
  call.tensors_.emplace_back(
      bytes, byte_size, [](void* held) { delete[] static_cast<char*>(held); }, bytes);
  *buffer = bytes;
  return nullptr;
}

TRITONSERVER_Error* InferCall::Release(TRITONSERVER_ResponseAllocator* /*allocator*/,
                                       void* /*buffer*/, void* /*buffer_userp*/,
                                       size_t /*byte_size*/,
                                       TRITONSERVER_MemoryType /*memory_type*/,
                                       int64_t /*memory_type_id*/) {
  return nullptr;  // slices hold the memory
}

void InferCall::Released(TRITONSERVER_InferenceRequest* request, uint32_t /*flags*/, void* userp) {
  auto* const call = static_cast<InferCall*>(userp);
  {
    const std::lock_guard lock(call->mutex_);
    call->request_ = nullptr;
    call->lane_.core_.Worked(call->lane_.core_.calls().InferenceRequestDelete(request),
                             "a request");
  }
  call->LetGo();
}

void InferCall::Completed(TRITONSERVER_InferenceResponse* response, uint32_t flags, void* userp) {
  auto* const call = static_cast<InferCall*>(userp);
  call->moments_.answered_ns = SteadyNs();
  const Core& core = call->lane_.core_;
  const bool last = (flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL) != 0;
  grpc::Status status(grpc::StatusCode::INTERNAL, "the model gave no answer");
  if (response != nullptr) {
    try {
      status = last ? ReadAnswer(core, response, call->tensors_, &call->answer_)
                    : grpc::Status(grpc::StatusCode::UNIMPLEMENTED,
                                   "the model gives several answers to a request");
    } catch (const std::bad_alloc&) {
      status = {grpc::StatusCode::RESOURCE_EXHAUSTED, "out of memory"};
    }
    core.Worked(core.calls().InferenceResponseDelete(response), "a response");
  }
  if (!last) return;
  call->End(status);
  call->LetGo();
}

void InferCall::End(const grpc::Status& status) {
  // The backend says of a timeout that the node is not available; this one was the caller's own.
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE && HasExpired(*context_)) {
    return Refuse({grpc::StatusCode::DEADLINE_EXCEEDED, status.error_message()});
  }
  if (!status.ok()) return Refuse(status);
  code_ = status.error_code();
  lane_.leaving_.Enter(context_, &place_);
  StartWriteAndFinish(&answer_.bytes, grpc::WriteOptions(), status);
}

void InferCall::Refuse(const grpc::Status& status) {
  code_ = status.error_code();
  Finish(status);
}

void InferCall::Refuse(Refused why, const grpc::Status& status) {
  lane_.tally_.AddRefused(why);
  Refuse(status);
}

void InferCall::RefuseExpired() {
  Refuse(Refused::kExpired,
         {grpc::StatusCode::DEADLINE_EXCEEDED, "the deadline passed before any work was done"});
}

void InferCall::NoteStages() {
  const auto now = std::chrono::steady_clock::now();
  moments_.sent_ns = SteadyNs();
  const StageTimes times = TimesOf(moments_, answer_.stages);
  if (const StageListener* const listener = lane_.listener_; listener != nullptr) {
    listener->Hear(times);
  }
  if (!lane_.slow_.IsSlow(times.whole_us, now)) return;
  const auto& head = message_.head();
  const auto wall = std::chrono::system_clock::now().time_since_epoch();
  try {
    lane_.slow_.Add(
        {.ended_ms = std::chrono::duration_cast<std::chrono::milliseconds>(wall).count(),
         .model = head.model_name().substr(0, kMaxNameBytes),
         .samples = SamplesOf(head),
         .version = answer_.version,
         .trace = TraceIdOf(TraceparentOf(*context_, head)),
         .times = times},
        now);
  } catch (const std::bad_alloc&) {
    return;  // the log lacks one
  }
}

void InferCall::NoteSpan(Spans* spans) {
  try {
    const bool parsed = message_.parsed();
    const std::optional<SpanPlace> place = spans->PlaceOf(
        parsed ? TraceparentOf(*context_, message_.head()) : TraceparentOf(*context_));
    if (!place) return;
    const int64_t now_ns = SteadyNs();
    if (moments_.sent_ns == 0) moments_.sent_ns = now_ns;
    const int64_t begun_ns = moments_.arrived_ns > 0 ? moments_.arrived_ns : begun_ns_;
    InferSpan span;
    span.place = *place;
    span.version = answer_.version;
    span.code = code_;
    span.stage_us = TimesOf(moments_, answer_.stages).us;
    // A refused one has been through none of the stages, or the first ones.
    if (moments_.handed_ns == 0) span.stage_us.front() = -1;
    if (moments_.answered_ns == 0) span.stage_us.back() = -1;
    span.ended_ns = WallNs();
    span.began_ns = span.ended_ns - (begun_ns > 0 ? now_ns - begun_ns : 0);
    if (parsed) {
      span.model = FirstOf(message_.head().model_name(), kMaxNameBytes);
      span.samples = SamplesOf(message_.head());
    }
    spans->Add(std::move(span));
  } catch (const std::bad_alloc&) {
    spans->Drop();
  }
}

}  // namespace embertide::front
