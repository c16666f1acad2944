// A link against control planes of this process: streams, calls, several addresses.
#include "peer/control_link.h"

#include <arpa/inet.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "base/background_task.h"
#include "base/task_faults.h"
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

// A proxy that the environment names would read the token, and this one answers nobody.
TEST(ControlLinkTest, NoProxyIsAsked) {
  ::setenv("http_proxy", "http://127.0.0.1:1", 1);
  OneControl control({});
  const auto link = Link({control.address()});
  EXPECT_GE(control.Await(&control.streamed, 1), 1);
  ::unsetenv("http_proxy");
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

bool Eventually(const std::function<bool()>& condition) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::yield();
  }
  return true;
}

TaskHealth HealthOf(const TaskBoard& board, const std::string& name) {
  for (const TaskHealth& task : board.Tasks()) {
    if (task.name == name) return task;
  }
  return {};
}

TEST(ControlLinkTest, WhyARegistrationFailsIsInTheNodesLogWithTheRemedy) {
  std::mutex mutex;
  std::string log;
  TaskBoard board([&](const std::string& line) {
    const std::lock_guard lock(mutex);
    log += line + "\n";
  });
  OneControl standby({.leads = false});
  ControlLinkOptions options{standby.address()};
  options.tasks = &board;
  const auto link = Link(options);
  ASSERT_TRUE(Eventually([&] { return HealthOf(board, "control-link").failures >= 3; }));
  const std::lock_guard lock(mutex);
  EXPECT_EQ(log, "task control-link fails, and is tried again: UNAVAILABLE: registration at " +
                     standby.address() +
                     ": this one stands by; is the control plane up, and is its address right?\n");
}

// Beats go on as calls while nothing reads a stream's answers, and over a stream once something
// does.
TEST(ControlLinkTest, WithoutAThreadForTheAnswersEachBeatIsACall) {
  static std::atomic<bool> refuses{true};
  SetFaultHook([](const char* task, FaultPoint point) {
    if (refuses && point == FaultPoint::kStart && std::string(task) == "control-replies") {
      throw std::system_error(EAGAIN, std::generic_category());
    }
  });
  TaskBoard board;
  OneControl control({});
  ControlLinkOptions options{control.address()};
  options.tasks = &board;
  const auto link = Link(options);
  EXPECT_GE(control.Await(&control.called, 3), 3);
  EXPECT_TRUE(HealthOf(board, "control-replies").no_thread);
  refuses = false;
  EXPECT_GE(control.Await(&control.streamed, 3), 3);
  EXPECT_FALSE(HealthOf(board, "control-replies").failing);
  SetFaultHook(nullptr);
}

TEST(ControlLinkTest, BeatsGoOnWhileTheThreadForTheAnswersThrows) {
  static std::atomic<bool> throws{true};
  SetFaultHook([](const char* task, FaultPoint point) {
    if (throws && point == FaultPoint::kRound && std::string(task) == "control-replies") {
      throw std::bad_alloc();
    }
  });
  TaskBoard board;
  OneControl control({});
  ControlLinkOptions options{control.address()};
  options.tasks = &board;
  const auto link = Link(options);
  EXPECT_GE(control.Await(&control.called, 1), 1);
  throws = false;
  EXPECT_GE(control.Await(&control.streamed, 3), 3);
  SetFaultHook(nullptr);
}

// A server that accepts and never answers would hold a registration for 5 s.
TEST(ControlLinkTest, ALinkEndsWhileItsRegistrationHangs) {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* any = reinterpret_cast<sockaddr*>(&address);
  ASSERT_EQ(::bind(listener, any, size), 0);
  ASSERT_EQ(::listen(listener, 8), 0);
  ASSERT_EQ(::getsockname(listener, any, &size), 0);
  auto link = Link({"127.0.0.1:" + std::to_string(ntohs(address.sin_port))});
  const int connection = ::accept(listener, nullptr, nullptr);
  const auto begun = std::chrono::steady_clock::now();
  link.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(2));
  ::close(connection);
  ::close(listener);
}

}  // namespace
}  // namespace embertide
