// Spans against a collector of gRPC in this process: what it is sent, and what happens when it is
// slow, refuses, or is not there.
#include "front/spans.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <thread>

namespace embertide::front {
namespace otlp = opentelemetry::proto::collector::trace::v1;
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr const char* kKept = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
constexpr const char* kNotKept = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";

class Collector final : public otlp::TraceService::Service {
 public:
  Collector() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~Collector() override {
    Hold(false);
    server_->Shutdown(std::chrono::system_clock::now());
    server_.reset();
    const std::lock_guard lock(mutex_);
    requests_.clear();
  }

  grpc::Status Export(grpc::ServerContext* /*context*/,
                      const otlp::ExportTraceServiceRequest* request,
                      otlp::ExportTraceServiceResponse* response) override {
    std::unique_lock lock(mutex_);
    ++entered_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !held_; });
    requests_.push_back(*request);
    response->mutable_partial_success()->set_rejected_spans(rejects_);
    return answer_;
  }

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  void Hold(bool held) {
    const std::lock_guard lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }
  void Answer(const grpc::Status& answer, int64_t rejects) {
    const std::lock_guard lock(mutex_);
    answer_ = answer;
    rejects_ = rejects;
  }
  void WaitForCall() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return entered_ > 0; });
  }
  std::vector<otlp::ExportTraceServiceRequest> requests() {
    const std::lock_guard lock(mutex_);
    return requests_;
  }
  std::vector<otlp::Span> spans() {
    std::vector<otlp::Span> all;
    for (const auto& request : requests()) {
      const auto& some = request.resource_spans(0).scope_spans(0).spans();
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  }

 private:
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
  int entered_ = 0;
  int64_t rejects_ = 0;
  grpc::Status answer_;
  std::vector<otlp::ExportTraceServiceRequest> requests_;
};

template <typename Condition>
bool WaitUntil(const Condition& condition) {
  const auto until = steady_clock::now() + seconds(60);
  while (!condition()) {
    if (steady_clock::now() > until) return false;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return true;
}

Spans::Options To(const std::string& collector, uint32_t every = 1) {
  return {.collector = collector, .every = every, .instance = "10.0.0.1:8001", .version = "1.2.3"};
}

InferSpan SpanAt(int64_t ns) {
  InferSpan span;
  span.place = {std::string(16, 't'), std::string(8, 's'), ""};
  span.began_ns = ns;
  span.ended_ns = ns + 1;
  span.code = grpc::StatusCode::OK;
  return span;
}

void AddSome(Spans* spans, size_t count) {
  for (size_t i = 0; i < count; ++i) spans->Add(SpanAt(static_cast<int64_t>(i)));
}

using Attributes = std::map<std::string, otlp::AnyValue>;
Attributes AttributesOf(const google::protobuf::RepeatedPtrField<otlp::KeyValue>& given) {
  Attributes made;
  for (const otlp::KeyValue& each : given) made[each.key()] = each.value();
  return made;
}

TEST(Spans, SayWhatBecameOfAnInference) {
  Collector collector;
  Spans spans(To(collector.address()));
  std::optional<SpanPlace> place = spans.PlaceOf(kKept);
  ASSERT_TRUE(place);
  InferSpan span{.place = *place,
                 .began_ns = 1'000,
                 .ended_ns = 4'000,
                 .model = "news",
                 .samples = 7,
                 .version = 41,
                 .code = grpc::StatusCode::OK,
                 .stage_us = {1.5, -1, -1, -1, -1, 0}};
  spans.Add(span);
  span.place = SpanAt(0).place;
  span.code = grpc::StatusCode::RESOURCE_EXHAUSTED;
  span.model.clear();
  span.samples = span.version = 0;
  spans.Add(span);
  ASSERT_TRUE(WaitUntil([&] { return spans.sent() == 2; }));

  const otlp::ResourceSpans of = collector.requests().at(0).resource_spans(0);
  Attributes said = AttributesOf(of.resource().attributes());
  EXPECT_EQ(said["service.name"].string_value(), "embertide");
  EXPECT_EQ(said["service.instance.id"].string_value(), "10.0.0.1:8001");
  EXPECT_EQ(said["service.version"].string_value(), "1.2.3");
  EXPECT_EQ(of.scope_spans(0).scope().name(), "embertide.front");

  const std::vector<otlp::Span> got = collector.spans();
  ASSERT_EQ(got.size(), 2);
  EXPECT_EQ(got[0].trace_id(), "\x4b\xf9\x2f\x35\x77\xb3\x4d\xa6\xa3\xce\x92\x9d\x0e\x0e\x47\x36");
  EXPECT_EQ(got[0].parent_span_id(), std::string("\x00\xf0\x67\xaa\x0b\xa9\x02\xb7", 8));
  EXPECT_EQ(got[0].span_id(), place->span_id);
  EXPECT_EQ(got[0].flags(), 0x301);
  EXPECT_EQ(got[0].name(), "embertide.infer");
  EXPECT_EQ(got[0].kind(), otlp::Span::SPAN_KIND_SERVER);
  EXPECT_EQ(got[0].start_time_unix_nano(), 1'000);
  EXPECT_EQ(got[0].end_time_unix_nano(), 4'000);
  EXPECT_EQ(got[0].status().code(), otlp::Status::STATUS_CODE_UNSET);
  said = AttributesOf(got[0].attributes());
  EXPECT_EQ(said["embertide.model"].string_value(), "news");
  EXPECT_EQ(said["embertide.samples"].int_value(), 7);
  EXPECT_EQ(said["embertide.version"].int_value(), 41);
  EXPECT_EQ(said["embertide.stage.parse_us"].double_value(), 1.5);
  EXPECT_TRUE(said.contains("embertide.stage.send_us"));
  EXPECT_FALSE(said.contains("embertide.stage.queue_us"));
  ASSERT_TRUE(said.contains("rpc.grpc.status_code"));
  EXPECT_EQ(said["rpc.grpc.status_code"].int_value(), 0);

  EXPECT_EQ(got[1].parent_span_id(), "");
  EXPECT_EQ(got[1].flags(), 1);
  EXPECT_EQ(got[1].status().code(), otlp::Status::STATUS_CODE_ERROR);
  EXPECT_EQ(got[1].status().message(), "RESOURCE_EXHAUSTED");
  said = AttributesOf(got[1].attributes());
  EXPECT_EQ(said["rpc.grpc.status_code"].int_value(), 8);
  EXPECT_FALSE(said.contains("embertide.model"));
}

TEST(Spans, AreOfTracesThatTheCallerKeepsAndOfAShareOfTheOthers) {
  Collector collector;
  Spans spans(To(collector.address(), 3));
  std::set<std::string> ids;
  std::set<std::string> traces;
  for (int round = 0; round < 30; ++round) {
    const std::optional<SpanPlace> kept = spans.PlaceOf(kKept);
    ASSERT_TRUE(kept);
    ids.insert(kept->span_id);
    EXPECT_FALSE(spans.PlaceOf(kNotKept));
    const std::optional<SpanPlace> own = spans.PlaceOf(round % 2 == 0 ? "" : "no traceparent");
    ASSERT_EQ(own.has_value(), round % 3 == 2) << round;
    if (!own) continue;
    EXPECT_EQ(own->parent, "");
    ids.insert(own->span_id);
    traces.insert(own->trace_id);
  }
  EXPECT_EQ(ids.size(), 40);
  EXPECT_EQ(traces.size(), 10);
  for (const std::string& id : ids) EXPECT_EQ(id.size(), 8);
  for (const std::string& id : traces) EXPECT_EQ(id.size(), 16);
}

TEST(Spans, AreDroppedWhereTooManyWaitForASlowCollector) {
  Collector collector;
  collector.Hold(true);
  Spans spans(To(collector.address()));
  AddSome(&spans, 1);
  collector.WaitForCall();
  const auto began = steady_clock::now();
  AddSome(&spans, Spans::kMaxWaiting);
  EXPECT_EQ(spans.dropped(), 0);
  AddSome(&spans, 7);
  EXPECT_LT(steady_clock::now() - began, Spans::kDeadline / 2);
  EXPECT_EQ(spans.dropped(), 7);
  EXPECT_EQ(spans.sent(), 0);
  collector.Hold(false);
  ASSERT_TRUE(WaitUntil([&] { return spans.sent() + spans.failed() == 1 + Spans::kMaxWaiting; }));
  for (const auto& request : collector.requests()) {
    EXPECT_LE(request.resource_spans(0).scope_spans(0).spans_size(), Spans::kMaxInBatch);
  }
  EXPECT_EQ(spans.dropped(), 7);
}

TEST(Spans, AreSentAtOnceWhereABatchWaitsAndElseEachSecond) {
  Collector collector;
  Spans spans(To(collector.address()));
  const auto sending = [&](size_t count) {
    std::this_thread::sleep_for(milliseconds(100));  // its thread waits by then
    const auto began = steady_clock::now();
    const uint64_t before = spans.sent();
    AddSome(&spans, count);
    EXPECT_TRUE(WaitUntil([&] { return spans.sent() == before + count; }));
    return steady_clock::now() - began;
  };
  const auto half = milliseconds(Spans::kPeriod) / 2;
  // On a machine that is busy, one of several.
  auto fastest = sending(Spans::kMaxInBatch);
  auto slowest = sending(1);
  for (int i = 0; i < 3; ++i) {
    fastest = std::min(fastest, sending(Spans::kMaxInBatch));
    slowest = std::max(slowest, sending(1));
  }
  EXPECT_LT(fastest, half);
  EXPECT_GE(slowest, half);
}

TEST(Spans, AreCountedAsFailedWhereNobodyTakesThem) {
  std::string nobody;
  {
    const Collector gone;
    nobody = gone.address();
  }
  Spans absent(To(nobody));
  AddSome(&absent, 5);
  ASSERT_TRUE(WaitUntil([&] { return absent.failed() == 5; }));
  EXPECT_EQ(absent.sent(), 0);

  Collector collector;
  collector.Answer({grpc::StatusCode::RESOURCE_EXHAUSTED, "full"}, 0);
  Spans spans(To(collector.address()));
  AddSome(&spans, 5);
  ASSERT_TRUE(WaitUntil([&] { return spans.failed() == 5; }));
  EXPECT_EQ(collector.requests().size(), 1);
  collector.Answer(grpc::Status::OK, 2);
  AddSome(&spans, 5);
  ASSERT_TRUE(WaitUntil([&] { return spans.sent() + spans.failed() == 10; }));
  EXPECT_EQ(spans.failed(), 7);
  // A number that cannot be.
  collector.Answer(grpc::Status::OK, -1);
  AddSome(&spans, 5);
  ASSERT_TRUE(WaitUntil([&] { return spans.sent() + spans.failed() == 15; }));
  EXPECT_EQ(spans.failed(), 7);
}

TEST(Spans, ThatWaitAreSentAtTheEnd) {
  Collector collector;
  {
    Spans spans(To(collector.address()));
    AddSome(&spans, Spans::kMaxInBatch / 2);
  }
  EXPECT_EQ(collector.spans().size(), Spans::kMaxInBatch / 2);
}

TEST(Spans, DoNotHoldUpTheEnd) {
  Collector collector;
  collector.Hold(true);
  auto spans = std::make_unique<Spans>(To(collector.address()));
  AddSome(spans.get(), 2 * Spans::kMaxInBatch);
  collector.WaitForCall();
  const auto began = steady_clock::now();
  spans.reset();
  EXPECT_LT(steady_clock::now() - began, Spans::kDeadline - seconds(1));
}

TEST(Spans, ComeFromManyThreads) {
  Collector collector;
  Spans spans(To(collector.address()));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) threads.emplace_back([&] { AddSome(&spans, 1000); });
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(
      WaitUntil([&] { return spans.sent() + spans.dropped() + spans.failed() == 4 * 1000; }));
  EXPECT_EQ(collector.spans().size(), spans.sent());
}

TEST(Spans, CutNamesBetweenCharacters) {
  EXPECT_EQ(FirstOf("abc", 3), "abc");
  EXPECT_EQ(FirstOf("abc", 2), "ab");
  EXPECT_EQ(FirstOf("a\xc3\xa9z", 3), "a\xc3\xa9");
  EXPECT_EQ(FirstOf("a\xc3\xa9z", 2), "a");
  EXPECT_EQ(FirstOf("\xf0\x9f\x98\x80", 3), "");
  EXPECT_EQ(FirstOf("", 3), "");
}

}  // namespace
}  // namespace embertide::front
