// Spans: what the front tells a collector of OpenTelemetry about inferences, one span for each, as
// OTLP over gRPC in plain text.
//
// Spans neither hold up a request nor fill memory. A thread of their own sends them each kPeriod,
// or when kMaxInBatch wait, which is the most that are sent at once. At most kMaxWaiting wait: more
// are dropped. A batch that the collector does not take within kDeadline is not sent again. All of
// it is counted.
//
// Thread-safe.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "base/background_task.h"
#include "front/stages.h"
#include "otlp/trace.grpc.pb.h"

namespace embertide::front {

// Where a span stands in its trace. Ids are bytes, not digits.
struct SpanPlace {
  std::string trace_id;  // 16 bytes
  std::string span_id;   // 8 bytes
  std::string parent;    // 8 bytes, of the caller's span; empty: there is none
};

struct InferSpan {
  SpanPlace place;
  int64_t began_ns = 0;  // since the Unix epoch
  int64_t ended_ns = 0;
  std::string model;    // empty: not known
  int64_t samples = 0;  // 0: not known
  int64_t version = 0;  // of the answer; 0: the backend says none
  grpc::StatusCode code = grpc::StatusCode::UNKNOWN;
  // The time of each of kStages; negative: not known.
  std::array<double, kStages.size()> stage_us{};
};

class Spans {
 public:
  static constexpr size_t kMaxWaiting = 4096;
  static constexpr size_t kMaxInBatch = 512;
  static constexpr std::chrono::seconds kPeriod{1};
  static constexpr std::chrono::seconds kDeadline{5};
  struct Options {
    std::string collector;  // HOST:PORT; empty: no spans are wanted
    uint32_t every = 1;     // of requests without a traceparent one in so many has a span; not 0
    std::string instance;   // the server's name, as its listening address
    std::string version;    // the program's; OPTIONAL
  };
  // Connects with the first span.
  explicit Spans(const Options& options);
  // Sends those that wait, for at most a second. Requires: nothing is added any more.
  ~Spans();
  Spans(const Spans&) = delete;
  Spans& operator=(const Spans&) = delete;

  // The place of a request's span, if the request has one: below the caller's span if the caller
  // keeps its trace, and in a trace of its own for one in `every` whose text is no traceparent.
  std::optional<SpanPlace> PlaceOf(std::string_view traceparent);
  void Add(InferSpan span);
  // There was no memory for a span.
  void Drop() { dropped_.fetch_add(1, std::memory_order_relaxed); }

  uint64_t sent() const { return sent_; }        // the collector has taken them
  uint64_t dropped() const { return dropped_; }  // as too many waited
  uint64_t failed() const { return failed_; }    // the collector did not take them

 private:
  using Batch = std::vector<InferSpan>;
  Status Round(const std::stop_token& stop);
  // Requires: under mutex_.
  Batch Take();
  // kUnavailable, with gRPC's reason.
  Status Export(const Batch& batch, grpc::ClientContext* context);
  void Fill(const Batch& batch,
            opentelemetry::proto::collector::trace::v1::ExportTraceServiceRequest* request) const;

  const Options options_;
  const std::string host_;
  std::unique_ptr<opentelemetry::proto::collector::trace::v1::TraceService::Stub> stub_;
  std::atomic<uint64_t> unnamed_{0};  // requests without a traceparent
  std::atomic<uint64_t> sent_{0};
  std::atomic<uint64_t> dropped_{0};
  std::atomic<uint64_t> failed_{0};
  std::mutex mutex_;
  std::condition_variable_any more_;      // kMaxInBatch wait
  std::condition_variable idle_;          // call_ is null
  std::deque<InferSpan> waiting_;         // under mutex_
  grpc::ClientContext* call_ = nullptr;   // under mutex_; that of the batch that is being sent
  std::unique_ptr<BackgroundTask> task_;  // last: it uses the members above
};

// The first bytes of a text, at most `most`, whole characters of UTF-8 all of them. Requires: the
// text is UTF-8.
std::string_view FirstOf(std::string_view text, size_t most);

}  // namespace embertide::front
