#include "front/spans.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <new>
#include <utility>

#include "base/trace_id.h"
#include "front/tally.h"

namespace embertide::front {
namespace otlp = opentelemetry::proto::collector::trace::v1;
namespace {

constexpr std::chrono::seconds kLast{1};  // for those that wait at the end
constexpr int kReconnectMs = 5000;        // the longest between two attempts
constexpr size_t kTraceIdBytes = 16;
constexpr size_t kSpanIdBytes = 8;
// Of Span.flags: the trace is kept; it is known whether the parent is elsewhere; it is.
constexpr uint32_t kSampled = 1;
constexpr uint32_t kParentIsKnown = 0x100;
constexpr uint32_t kParentIsRemote = 0x200;

std::string HostName() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

// Requires: `digits` are an even number of hex digits.
std::string BytesOfHex(std::string_view digits) {
  std::string bytes;
  bytes.reserve(digits.size() / 2);
  for (; !digits.empty(); digits.remove_prefix(2)) {
    uint8_t byte = 0;
    std::from_chars(digits.begin(), digits.begin() + 2, byte, 16);
    bytes.push_back(static_cast<char>(byte));
  }
  return bytes;
}

// Random bytes, not all 0; empty: the system has none.
std::string NewId(size_t bytes) {
  std::string id(bytes, '\0');
  do {
    if (::getrandom(id.data(), bytes, GRND_NONBLOCK) != static_cast<ssize_t>(bytes)) return {};
  } while (std::ranges::all_of(id, [](char byte) { return byte == 0; }));
  return id;
}

otlp::AnyValue* ValueOf(const std::string& key,
                        google::protobuf::RepeatedPtrField<otlp::KeyValue>* attributes) {
  otlp::KeyValue* const made = attributes->Add();
  made->set_key(key);
  return made->mutable_value();
}

void FillSpan(const InferSpan& span, otlp::Span* out) {
  out->set_trace_id(span.place.trace_id);
  out->set_span_id(span.place.span_id);
  out->set_flags(kSampled);
  if (!span.place.parent.empty()) {
    out->set_parent_span_id(span.place.parent);
    out->set_flags(kSampled | kParentIsKnown | kParentIsRemote);
  }
  out->set_name("embertide.infer");
  out->set_kind(otlp::Span::SPAN_KIND_SERVER);
  out->set_start_time_unix_nano(static_cast<uint64_t>(span.began_ns));
  out->set_end_time_unix_nano(static_cast<uint64_t>(span.ended_ns));
  auto* const attributes = out->mutable_attributes();
  ValueOf("rpc.system", attributes)->set_string_value("grpc");
  ValueOf("rpc.grpc.status_code", attributes)->set_int_value(span.code);
  if (!span.model.empty()) ValueOf("embertide.model", attributes)->set_string_value(span.model);
  if (span.samples > 0) ValueOf("embertide.samples", attributes)->set_int_value(span.samples);
  if (span.version > 0) ValueOf("embertide.version", attributes)->set_int_value(span.version);
  for (size_t s = 0; s < kStages.size(); ++s) {
    if (span.stage_us[s] < 0) continue;
    const std::string key = "embertide.stage." + std::string(kStages[s]) + "_us";
    ValueOf(key, attributes)->set_double_value(span.stage_us[s]);
  }
  if (span.code == grpc::StatusCode::OK) return;
  out->mutable_status()->set_code(otlp::Status::STATUS_CODE_ERROR);
  const auto code = static_cast<size_t>(span.code);
  out->mutable_status()->set_message(std::string(code < kCodes ? CodeName(code) : "UNKNOWN"));
}

}  // namespace

Spans::Spans(const Options& options) : options_(options), host_(HostName()) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectMs);
  stub_ = otlp::TraceService::NewStub(
      grpc::CreateCustomChannel(options_.collector, grpc::InsecureChannelCredentials(), arguments));
  task_ =
      std::make_unique<BackgroundTask>(TaskOptions{.name = "spans", .own_pace = true},
                                       [this](const std::stop_token& stop) { return Round(stop); });
}

Spans::~Spans() {
  const auto until = std::chrono::system_clock::now() + kLast;
  task_->RequestStop();
  {
    std::unique_lock lock(mutex_);
    if (!idle_.wait_for(lock, kLast, [this] { return call_ == nullptr; })) call_->TryCancel();
  }
  task_.reset();
  while (std::chrono::system_clock::now() < until) {
    grpc::ClientContext context;
    context.set_deadline(until);
    Batch batch;
    try {
      {
        const std::lock_guard lock(mutex_);
        batch = Take();
      }
      if (batch.empty() || !Export(batch, &context).ok()) return;
    } catch (const std::bad_alloc&) {
      return;
    }
  }
}

std::optional<SpanPlace> Spans::PlaceOf(std::string_view traceparent) {
  SpanPlace place;
  if (const std::optional<Traceparent> given = ParseTraceparent(traceparent); given) {
    if (!given->sampled()) return std::nullopt;
    place.trace_id = BytesOfHex(given->trace_id);
    place.parent = BytesOfHex(given->parent_id);
  } else {
    const uint64_t number = unnamed_.fetch_add(1, std::memory_order_relaxed) + 1;
    if (number % options_.every != 0) return std::nullopt;
    place.trace_id = NewId(kTraceIdBytes);
  }
  place.span_id = NewId(kSpanIdBytes);
  if (!place.trace_id.empty() && !place.span_id.empty()) return place;
  Drop();
  return std::nullopt;
}

void Spans::Add(InferSpan span) {
  bool enough = false;
  {
    const std::lock_guard lock(mutex_);
    if (waiting_.size() >= kMaxWaiting) return Drop();
    waiting_.push_back(std::move(span));
    enough = waiting_.size() == kMaxInBatch;
  }
  if (enough) more_.notify_one();
}

Spans::Batch Spans::Take() {
  const auto count = static_cast<std::ptrdiff_t>(std::min(waiting_.size(), kMaxInBatch));
  const auto end = waiting_.begin() + count;
  Batch batch(std::make_move_iterator(waiting_.begin()), std::make_move_iterator(end));
  waiting_.erase(waiting_.begin(), end);
  return batch;
}

Status Spans::Round(const std::stop_token& stop) {
  grpc::ClientContext context;
  Batch batch;
  {
    std::unique_lock lock(mutex_);
    while (batch.empty()) {
      more_.wait_for(lock, stop, kPeriod, [this] { return waiting_.size() >= kMaxInBatch; });
      if (stop.stop_requested()) return Status::Ok();
      batch = Take();
    }
    call_ = &context;
  }
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  Status status;
  try {
    status = Export(batch, &context);
  } catch (const std::bad_alloc&) {
    status = Status(Code::kResourceExhausted, "out of memory");
  }
  {
    const std::lock_guard lock(mutex_);
    call_ = nullptr;
  }
  idle_.notify_all();
  return status;
}

Status Spans::Export(const Batch& batch, grpc::ClientContext* context) {
  uint64_t rejected = batch.size();  // unless the collector says less
  const auto count = [&] {
    failed_.fetch_add(rejected, std::memory_order_relaxed);
    sent_.fetch_add(batch.size() - rejected, std::memory_order_relaxed);
  };
  otlp::ExportTraceServiceResponse response;
  grpc::Status sent;
  try {
    otlp::ExportTraceServiceRequest request;
    Fill(batch, &request);
    sent = stub_->Export(context, request, &response);
  } catch (const std::bad_alloc&) {
    count();
    throw;
  }
  if (sent.ok()) {
    const int64_t said = response.partial_success().rejected_spans();
    rejected = static_cast<uint64_t>(std::clamp<int64_t>(said, 0, std::ssize(batch)));
  }
  count();
  if (rejected == 0) return Status::Ok();
  const std::string why = sent.ok() ? "it rejects spans" : sent.error_message();
  return {Code::kUnavailable, "the collector at " + options_.collector + ": " + why};
}

void Spans::Fill(const Batch& batch, otlp::ExportTraceServiceRequest* request) const {
  otlp::ResourceSpans* const of = request->add_resource_spans();
  auto* const attributes = of->mutable_resource()->mutable_attributes();
  ValueOf("service.name", attributes)->set_string_value("embertide");
  ValueOf("service.instance.id", attributes)->set_string_value(options_.instance);
  if (!host_.empty()) ValueOf("host.name", attributes)->set_string_value(host_);
  if (!options_.version.empty()) {
    ValueOf("service.version", attributes)->set_string_value(options_.version);
  }
  otlp::ScopeSpans* const spans = of->add_scope_spans();
  spans->mutable_scope()->set_name("embertide.front");
  spans->mutable_scope()->set_version(options_.version);
  for (const InferSpan& span : batch) FillSpan(span, spans->add_spans());
}

std::string_view FirstOf(std::string_view text, size_t most) {
  if (text.size() <= most) return text;
  constexpr unsigned char kHead = 0xC0;
  constexpr unsigned char kContinuation = 0x80;
  while (most > 0 && (static_cast<unsigned char>(text[most]) & kHead) == kContinuation) --most;
  return text.substr(0, most);
}

}  // namespace embertide::front
