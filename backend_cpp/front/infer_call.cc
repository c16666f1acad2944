// A call's way through Triton.
#include "front/infer_call.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <new>
#include <string_view>
#include <utility>

#include "access/limits.h"
#include "triton/stage_names.h"

namespace embertide::front {
namespace {

constexpr std::chrono::seconds kSending{10};  // until a caller has taken an answer
constexpr size_t kInferMethod = 0;            // of kMethods
constexpr size_t kMaxNameBytes = 128;         // of a model, in the slow log

grpc::Status Invalid(const std::string& why) { return {grpc::StatusCode::INVALID_ARGUMENT, why}; }

// Returns the time until the caller's deadline; 0 if there is none.
uint64_t MicrosecondsLeft(const grpc::ServerContextBase& context) {
  const auto left = context.deadline() - std::chrono::system_clock::now();
  if (left > std::chrono::hours(24)) return 0;
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(left).count();
  return static_cast<uint64_t>(std::max<int64_t>(1, us));
}

// Whether as many bytes are a tensor of the shape. Sizes of BYTES are the tensor's own.
grpc::Status CheckShape(const Calls& calls,
                        const inference::ModelInferRequest::InferInputTensor& input,
                        TRITONSERVER_DataType type, uint64_t bytes) {
  uint64_t elements = 1;
  for (const int64_t dim : input.shape()) {
    if (dim < 0) {
      return Invalid("input " + input.name() + " has a dimension of " + std::to_string(dim) +
                     "; it must not be negative");
    }
    if (__builtin_mul_overflow(elements, static_cast<uint64_t>(dim), &elements)) {
      return Invalid("input " + input.name() + " has a shape of more elements than there can be");
    }
  }
  const uint32_t element = calls.DataTypeByteSize(type);
  uint64_t want = 0;
  if (element == 0) return grpc::Status::OK;
  if (!__builtin_mul_overflow(elements, uint64_t{element}, &want) && want == bytes) {
    return grpc::Status::OK;
  }
  return Invalid("input " + input.name() + " has " + std::to_string(bytes) +
                 " bytes; its shape has " + std::to_string(elements) + " elements of " +
                 input.datatype());
}

bool HasExpired(const grpc::ServerContextBase& context) {
  return context.deadline() <= std::chrono::system_clock::now();
}

grpc::Status Exhausted(const std::string& why) {
  return {grpc::StatusCode::RESOURCE_EXHAUSTED, why + "; ask again later"};
}

bool IsSharedMemory(const std::string& parameter) {
  return parameter.starts_with("shared_memory_");
}

grpc::Status NoSharedMemory(const std::string& tensor) {
  return {grpc::StatusCode::UNIMPLEMENTED,
          "tensor " + tensor + ": this server maps no shared memory; send it in the message"};
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
  status = Make(request);
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

grpc::Status InferCall::Make(TRITONSERVER_InferenceRequest* request) {
  const Core& core = lane_.core_;
  const Calls& calls = core.calls();
  if (grpc::Status status =
          core.StatusOf(calls.InferenceRequestSetId(request, message_.head().id().c_str()));
      !status.ok()) {
    return status;
  }
  if (grpc::Status status = SetParameters(request); !status.ok()) return status;
  if (grpc::Status status = AddInputs(request); !status.ok()) return status;
  if (grpc::Status status = AddOutputs(request); !status.ok()) return status;
  if (grpc::Status status = core.StatusOf(
          calls.InferenceRequestSetReleaseCallback(request, InferCall::Released, this));
      !status.ok()) {
    return status;
  }
  return core.StatusOf(calls.InferenceRequestSetResponseCallback(request, lane_.allocator_, this,
                                                                 InferCall::Completed, this));
}

grpc::Status InferCall::SetParameters(TRITONSERVER_InferenceRequest* request) {
  const Core& core = lane_.core_;
  const Calls& calls = core.calls();
  uint64_t timeout_us = MicrosecondsLeft(*context_);
  uint32_t flags = 0;
  for (const auto& [name, value] : message_.head().parameters()) {
    using Parameter = inference::InferParameter;
    if (name == triton::kAskStages) continue;  // it is ours to ask
    TRITONSERVER_Error* error = nullptr;
    const bool number = value.parameter_choice_case() == Parameter::kInt64Param ||
                        value.parameter_choice_case() == Parameter::kUint64Param;
    const uint64_t unsigned_value = value.parameter_choice_case() == Parameter::kUint64Param
                                        ? value.uint64_param()
                                        : static_cast<uint64_t>(value.int64_param());
    const auto wrong = [&name = name](const char* kind) {
      return Invalid("parameter " + name + " must be " + kind);
    };
    if (name == "timeout") {
      if (!number ||
          (value.parameter_choice_case() == Parameter::kInt64Param && value.int64_param() < 0)) {
        return wrong("a whole number of microseconds");
      }
      if (unsigned_value > 0) {
        timeout_us = timeout_us == 0 ? unsigned_value : std::min(timeout_us, unsigned_value);
      }
    } else if (name == "priority") {
      if (!number) return wrong("a whole number");
      error = calls.InferenceRequestSetPriorityUInt64(request, unsigned_value);
    } else if (name == "sequence_id") {
      if (value.parameter_choice_case() == Parameter::kStringParam) {
        error = calls.InferenceRequestSetCorrelationIdString(request, value.string_param().c_str());
      } else if (number) {
        error = calls.InferenceRequestSetCorrelationId(request, unsigned_value);
      } else {
        return wrong("a whole number or a text");
      }
    } else if (name == "sequence_start" || name == "sequence_end") {
      if (value.parameter_choice_case() != Parameter::kBoolParam) return wrong("true or false");
      if (value.bool_param()) {
        flags |= name == "sequence_start" ? TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
                                          : TRITONSERVER_REQUEST_FLAG_SEQUENCE_END;
      }
    } else {
      switch (value.parameter_choice_case()) {
        case Parameter::kBoolParam:
          error = calls.InferenceRequestSetBoolParameter(request, name.c_str(), value.bool_param());
          break;
        case Parameter::kInt64Param:
          error = calls.InferenceRequestSetIntParameter(request, name.c_str(), value.int64_param());
          break;
        case Parameter::kStringParam:
          error = calls.InferenceRequestSetStringParameter(request, name.c_str(),
                                                           value.string_param().c_str());
          break;
        case Parameter::kDoubleParam:
          error =
              calls.InferenceRequestSetDoubleParameter(request, name.c_str(), value.double_param());
          break;
        default:
          return wrong("true or false, a whole number up to 2^63 - 1, a text or a number");
      }
    }
    if (grpc::Status status = core.StatusOf(error); !status.ok()) return status;
  }
  TRITONSERVER_Error* error =
      calls.InferenceRequestSetBoolParameter(request, triton::kAskStages, true);
  if (error == nullptr && flags != 0) error = calls.InferenceRequestSetFlags(request, flags);
  if (error == nullptr && timeout_us != 0) {
    error = calls.InferenceRequestSetTimeoutMicroseconds(request, timeout_us);
  }
  return core.StatusOf(error);
}

grpc::Status InferCall::AddInputs(TRITONSERVER_InferenceRequest* request) {
  const Core& core = lane_.core_;
  const Calls& calls = core.calls();
  const auto& inputs = message_.head().inputs();
  const bool raw = message_.raw_tensors() > 0;
  if (raw && message_.raw_tensors() != static_cast<size_t>(inputs.size())) {
    return Invalid("the request has " + std::to_string(inputs.size()) + " inputs and " +
                   std::to_string(message_.raw_tensors()) +
                   " raw_input_contents; each input needs one");
  }
  typed_.reserve(raw ? 0 : static_cast<size_t>(inputs.size()));
  for (int i = 0; i < inputs.size(); ++i) {
    const auto& input = inputs[i];
    for (const auto& [name, value] : input.parameters()) {
      if (IsSharedMemory(name)) return NoSharedMemory(input.name());
    }
    const TRITONSERVER_DataType type = calls.StringToDataType(input.datatype().c_str());
    if (type == TRITONSERVER_TYPE_INVALID) {
      return Invalid("input " + input.name() + " has the unknown type \"" +
                     input.datatype().substr(0, 40) + "\"");
    }
    if (input.has_contents() && raw) {
      return Invalid("input " + input.name() +
                     " has contents beside raw_input_contents; send one of them");
    }
    std::vector<Bytes> pieces;
    uint64_t bytes = 0;
    if (raw) {
      const auto number = static_cast<size_t>(i);
      pieces.assign(message_.raw(number).begin(), message_.raw(number).end());
      bytes = message_.raw_bytes(number);
    } else {
      std::string& typed = typed_.emplace_back();
      if (grpc::Status status = TypedBytes(input, &typed); !status.ok()) return status;
      pieces = {{reinterpret_cast<const uint8_t*>(typed.data()), typed.size()}};
      bytes = typed.size();
    }
    if (grpc::Status status = CheckShape(calls, input, type, bytes); !status.ok()) return status;
    grpc::Status status = core.StatusOf(
        calls.InferenceRequestAddInput(request, input.name().c_str(), type, input.shape().data(),
                                       static_cast<uint64_t>(input.shape_size())));
    for (const Bytes piece : pieces) {
      if (!status.ok()) break;
      status = core.StatusOf(calls.InferenceRequestAppendInputData(
          request, input.name().c_str(), piece.data(), piece.size(), TRITONSERVER_MEMORY_CPU, 0));
    }
    if (!status.ok()) return status;
  }
  return grpc::Status::OK;
}

grpc::Status InferCall::AddOutputs(TRITONSERVER_InferenceRequest* request) {
  const Core& core = lane_.core_;
  for (const auto& output : message_.head().outputs()) {
    for (const auto& [name, value] : output.parameters()) {
      if (IsSharedMemory(name)) return NoSharedMemory(output.name());
      if (name == "classification") {
        return {grpc::StatusCode::UNIMPLEMENTED,
                "output " + output.name() +
                    ": this server has no classification; sort the scores where they are read"};
      }
    }
    if (grpc::Status status = core.StatusOf(
            core.calls().InferenceRequestAddRequestedOutput(request, output.name().c_str()));
        !status.ok()) {
      return status;
    }
  }
  return grpc::Status::OK;
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
      status = last ? call->AnswerFrom(response)
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

grpc::Status InferCall::AnswerFrom(TRITONSERVER_InferenceResponse* response) {
  const Core& core = lane_.core_;
  const Calls& calls = core.calls();
  grpc::Status status = core.StatusOfBorrowed(calls.InferenceResponseError(response));
  if (!status.ok()) return status;
  google::protobuf::Arena arena;
  auto* const head = google::protobuf::Arena::CreateMessage<inference::ModelInferResponse>(&arena);
  const char* name = nullptr;
  int64_t version = 0;
  status = core.StatusOf(calls.InferenceResponseModel(response, &name, &version));
  if (!status.ok()) return status;
  head->set_model_name(name);
  head->set_model_version(std::to_string(version));
  status = core.StatusOf(calls.InferenceResponseId(response, &name));
  if (!status.ok()) return status;
  if (name != nullptr) head->set_id(name);

  uint32_t count = 0;
  status = core.StatusOf(calls.InferenceResponseParameterCount(response, &count));
  for (uint32_t i = 0; status.ok() && i < count; ++i) {
    TRITONSERVER_ParameterType type{};
    const void* value = nullptr;
    status = core.StatusOf(calls.InferenceResponseParameter(response, i, &name, &type, &value));
    if (!status.ok()) break;
    if (TakeStage(name, type, value, &stages_)) continue;
    if (type == TRITONSERVER_PARAMETER_INT && std::string_view(name) == "version") {
      version_ = *static_cast<const int64_t*>(value);
    }
    inference::InferParameter& parameter = (*head->mutable_parameters())[name];
    switch (type) {
      case TRITONSERVER_PARAMETER_BOOL:
        parameter.set_bool_param(*static_cast<const bool*>(value));
        break;
      case TRITONSERVER_PARAMETER_INT:
        parameter.set_int64_param(*static_cast<const int64_t*>(value));
        break;
      case TRITONSERVER_PARAMETER_DOUBLE:
        parameter.set_double_param(*static_cast<const double*>(value));
        break;
      case TRITONSERVER_PARAMETER_STRING:
        parameter.set_string_param(static_cast<const char*>(value));
        break;
      case TRITONSERVER_PARAMETER_BYTES:
        break;
    }
  }
  if (!status.ok()) return status;
  status = core.StatusOf(calls.InferenceResponseOutputCount(response, &count));
  std::vector<grpc::Slice> tensors;
  tensors.reserve(count);
  for (uint32_t i = 0; status.ok() && i < count; ++i) {
    TRITONSERVER_DataType type{};
    const int64_t* shape = nullptr;
    uint64_t dims = 0;
    const void* base = nullptr;
    size_t bytes = 0;
    TRITONSERVER_MemoryType memory{};
    int64_t memory_id = 0;
    void* held = nullptr;
    status = core.StatusOf(calls.InferenceResponseOutput(
        response, i, &name, &type, &shape, &dims, &base, &bytes, &memory, &memory_id, &held));
    if (!status.ok()) break;
    auto* const output = head->add_outputs();
    output->set_name(name);
    output->set_datatype(calls.DataTypeString(type));
    output->mutable_shape()->Add(shape, shape + dims);
    const auto made = std::ranges::find_if(
        tensors_, [&](const grpc::Slice& tensor) { return tensor.begin() == base; });
    tensors.push_back(made == tensors_.end() ? grpc::Slice() : *made);
  }
  if (status.ok()) answer_ = AnswerOf(*head, tensors);
  return status;
}

void InferCall::End(const grpc::Status& status) {
  // The backend says of a timeout that the node is not available; this one was the caller's own.
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE && HasExpired(*context_)) {
    return Refuse({grpc::StatusCode::DEADLINE_EXCEEDED, status.error_message()});
  }
  if (!status.ok()) return Refuse(status);
  code_ = status.error_code();
  lane_.leaving_.Enter(context_, &place_);
  StartWriteAndFinish(&answer_, grpc::WriteOptions(), status);
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
  const StageTimes times = TimesOf(moments_, stages_);
  if (const StageListener* const listener = lane_.listener_; listener != nullptr) {
    listener->Hear(times);
  }
  if (!lane_.slow_.IsSlow(times.whole_us, now)) return;
  const auto& head = message_.head();
  const bool shaped = head.inputs_size() > 0 && head.inputs(0).shape_size() > 0;
  const auto wall = std::chrono::system_clock::now().time_since_epoch();
  try {
    lane_.slow_.Add(
        {.ended_ms = std::chrono::duration_cast<std::chrono::milliseconds>(wall).count(),
         .model = head.model_name().substr(0, kMaxNameBytes),
         .samples = shaped ? head.inputs(0).shape(0) : 0,
         .version = version_,
         .times = times},
        now);
  } catch (const std::bad_alloc&) {
    return;  // the log lacks one
  }
}

}  // namespace embertide::front
