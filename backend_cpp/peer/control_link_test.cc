// A link against control planes of this process: streams, calls, several addresses.
#include "peer/control_link.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "embertide/v1/control.grpc.pb.h"

namespace embertide {
namespace {

using std::chrono::milliseconds;

struct Ways {
  bool streams = true;
  bool leads = true;
  bool answers = true;  // beats of a stream
  uint32_t interval_ms = 20;
};

class OneControl : public v1::ControlService::Service {
 public:
  explicit OneControl(Ways ways) : ways_(ways) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~OneControl() override {
    server_->Shutdown(std::chrono::system_clock::now() + milliseconds(100));
  }
  OneControl(const OneControl&) = delete;
  OneControl& operator=(const OneControl&) = delete;

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  // Waits until there are so many of them; how many there are then.
  size_t Await(const size_t* count, size_t wanted) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(10), [&] { return *count >= wanted; });
    return *count;
  }
  uint64_t newest_epoch() {
    const std::lock_guard lock(mutex_);
    return newest_epoch_;
  }
  size_t registered = 0, streamed = 0, called = 0, streams = 0;

  grpc::Status RegisterNode(grpc::ServerContext*, const v1::RegisterNodeRequest* request,
                            v1::RegisterNodeResponse* response) override {
    if (!ways_.leads) return {grpc::StatusCode::UNAVAILABLE, "this one stands by"};
    response->set_incarnation(request->request_id());
    response->set_heartbeat_interval_ms(ways_.interval_ms);
    Count(&registered, 0);
    return grpc::Status::OK;
  }
  grpc::Status Heartbeat(grpc::ServerContext*, const v1::HeartbeatRequest* request,
                         v1::HeartbeatResponse*) override {
    Count(&called, request->plan_epoch());
    return grpc::Status::OK;
  }
  grpc::Status StreamBeats(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::StreamBeatsResponse, v1::StreamBeatsRequest>* stream) override {
    if (!ways_.streams) return {grpc::StatusCode::UNIMPLEMENTED, "no streams"};
    Count(&streams, 0);
    v1::StreamBeatsRequest request;
    while (stream->Read(&request)) {
      Count(&streamed, request.beat().plan_epoch());
      if (ways_.answers) stream->Write(v1::StreamBeatsResponse());
    }
    return grpc::Status::OK;
  }

 private:
  void Count(size_t* count, uint64_t epoch) {
    const std::lock_guard lock(mutex_);
    ++*count;
    newest_epoch_ = std::max(newest_epoch_, epoch);
    changed_.notify_all();
  }

  const Ways ways_;
  int port_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t newest_epoch_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

std::unique_ptr<ControlLink> Link(ControlLinkOptions options,
                                  std::atomic<uint64_t>* epoch = nullptr) {
  v1::RegisterNodeRequest registration;
  registration.mutable_node()->set_name("node-0");
  options.retry_every = milliseconds(10);
  options.look_every = milliseconds(10);
  return std::make_unique<ControlLink>(std::move(options), std::move(registration),
                                       [epoch](v1::HeartbeatRequest* beat) {
                                         if (epoch != nullptr) beat->set_plan_epoch(*epoch);
                                       });
}

TEST(ControlLinkTest, BeatsGoOverOneStream) {
  OneControl control({});
  const auto link = Link({control.address()});
  EXPECT_GE(control.Await(&control.streamed, 5), 5);
  EXPECT_EQ(control.streams, 1);
  EXPECT_EQ(control.called, 0);
}

TEST(ControlLinkTest, WhatChangesIsSaidBeforeTheIntervalIsOver) {
  OneControl control({.interval_ms = 60'000});
  std::atomic<uint64_t> epoch{1};
  const auto link = Link({control.address()}, &epoch);
  EXPECT_EQ(control.Await(&control.streamed, 1), 1);
  epoch = 2;
  EXPECT_EQ(control.Await(&control.streamed, 2), 2);
  EXPECT_EQ(control.newest_epoch(), 2);
}

// The last of twelve comes 100 ms after the first: by chance they are closer once in 4 million
// runs.
TEST(ControlLinkTest, NodesOfALargeFleetDoNotBeatAtOnce) {
  constexpr size_t kNodes = 12;
  OneControl control({.interval_ms = 60'000});
  std::atomic<uint64_t> epoch{1};
  std::vector<std::unique_ptr<ControlLink>> links;
  for (size_t i = 0; i < kNodes; ++i) links.push_back(Link({control.address()}, &epoch));
  ASSERT_EQ(control.Await(&control.streamed, kNodes), kNodes);
  epoch = 2;
  for (const auto& link : links) link->BeatNow();
  EXPECT_GE(control.Await(&control.streamed, kNodes + 1), kNodes + 1);
  const auto first = std::chrono::steady_clock::now();
  EXPECT_EQ(control.Await(&control.streamed, 2 * kNodes), 2 * kNodes);
  EXPECT_GE(std::chrono::steady_clock::now() - first, milliseconds(100));
}

TEST(ControlLinkTest, WithoutStreamsEachBeatIsACall) {
  OneControl control({.streams = false});
  const auto link = Link({control.address()});
  EXPECT_GE(control.Await(&control.called, 3), 3);
  EXPECT_EQ(control.registered, 1);
}

TEST(ControlLinkTest, TheOneThatLeadsIsFound) {
  OneControl standby({.leads = false});
  OneControl leader({});
  const auto link = Link({standby.address() + "," + leader.address()});
  EXPECT_GE(leader.Await(&leader.streamed, 2), 2);
  EXPECT_EQ(standby.registered, 0);
  EXPECT_TRUE(link->refusal().empty());
}

TEST(ControlLinkTest, OneThatSaysNothingIsLeftForAnother) {
  OneControl silent({.answers = false});
  OneControl other({});
  ControlLinkOptions options{silent.address() + "," + other.address()};
  options.longest_silence = milliseconds(150);
  const auto link = Link(options);
  EXPECT_GE(other.Await(&other.streamed, 1), 1);
}

}  // namespace
}  // namespace embertide
