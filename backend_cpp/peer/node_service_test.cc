// The answers that strangers get from a node's server.
#include "peer/node_service.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <future>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/background_task.h"
#include "base/task_faults.h"
#include "embertide/v1/node.grpc.pb.h"
#include "peer/limits.h"

namespace embertide {
namespace {

// Answers everything with nothing.
class TestHandler : public NodeHandler {
 public:
  Status Lookup(const v1::LookupRequest& request, v1::LookupResponse* response) override {
    ++lookups;
    response->set_plan_epoch(request.plan_epoch() + 1);
    return Status::Ok();
  }
  Status Read(const v1::ReadRequest&, Deadline, v1::ReadResponse*) override { return Status::Ok(); }
  Status GetStatus(v1::NodeServiceGetStatusResponse*) override { return Status::Ok(); }
  Status GetLoad(uint32_t, v1::NodeServiceGetLoadResponse*) override { return Status::Ok(); }
  Status Explain(const v1::ExplainRequest&, v1::ExplainResponse*) override { return Status::Ok(); }
  std::atomic<uint32_t> lookups{0};
};

class NodeServiceNodeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string path =
        ::testing::TempDir() + "/embertide_node_tokens" + std::to_string(::getpid());
    std::ofstream(path) << "secret-of-tests-\n";
    auto tokens = TokenFile::Open({path});
    ASSERT_TRUE(tokens.ok());
    options_.listen = "127.0.0.1:0";
    options_.tokens = tokens.value();
    options_.max_calls = 20;
    options_.tasks = &board_;
    auto server = NodeServer::Start(options_, &handler_);
    ASSERT_TRUE(server.ok()) << server.status().ToString();
    server_ = std::move(*server);
    Dial(*server_);
  }
  void Dial(const NodeServer& server) {
    channel_ = grpc::CreateChannel("127.0.0.1:" + std::to_string(server.port()),
                                   grpc::InsecureChannelCredentials());
  }
  // Sends bytes to a method, whatever they are.
  grpc::Status Send(const std::string& method, const std::string& token, const std::string& bytes,
                    std::string* answer = nullptr) {
    const grpc::Slice slice(bytes);
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
    grpc::CompletionQueue queue;
    grpc::GenericStub stub(channel_);
    const auto call =
        stub.PrepareUnaryCall(&context, "/embertide.v1.NodeService/" + method, request, &queue);
    call->StartCall();
    grpc::ByteBuffer response;
    grpc::Status status;
    call->Finish(&response, &status, this);
    void* tag = nullptr;
    bool ok = false;
    EXPECT_TRUE(queue.Next(&tag, &ok));
    grpc::Slice whole;
    if (status.ok() && answer != nullptr && response.DumpToSingleSlice(&whole).ok()) {
      answer->assign(reinterpret_cast<const char*>(whole.begin()), whole.size());
    }
    return status;
  }

  TestHandler handler_;
  TaskBoard board_;
  NodeServerOptions options_;
  std::unique_ptr<NodeServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(NodeServiceNodeTest, TheTokenIsLookedAtBeforeALookupIsParsed) {
  const std::string garbage(1000, '\xff');
  for (const std::string token : {"", "wrong"}) {
    EXPECT_EQ(Send("Lookup", token, garbage).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  }
  EXPECT_EQ(server_->refused(), 2U);
  const grpc::Status refused = Send("Lookup", "secret-of-tests-", garbage);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(refused.error_message(), "the message is no LookupRequest");
  EXPECT_EQ(handler_.lookups, 0U);
  v1::LookupRequest request;
  request.set_plan_epoch(7);
  std::string answer;
  EXPECT_TRUE(Send("Lookup", "secret-of-tests-", request.SerializeAsString(), &answer).ok());
  v1::LookupResponse response;
  EXPECT_TRUE(response.ParseFromString(answer));
  EXPECT_EQ(response.plan_epoch(), 8U);
}

// Calls whose message does not come, of somebody who may call.
class Silent : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  Silent(grpc::GenericStub* stub, const std::string& method) {
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    context_.AddMetadata("authorization", "Bearer secret-of-tests-");
    stub->PrepareBidiStreamingCall(&context_, "/embertide.v1.NodeService/" + method,
                                   grpc::StubOptions(), this);
    AddHold();  // it never writes
    StartCall();
  }
  void OnDone(const grpc::Status& status) override { done_.set_value(status.error_code()); }
  void End() {
    context_.TryCancel();
    RemoveHold();
    done_.get_future().wait();
  }

 private:
  grpc::ClientContext context_;
  std::promise<grpc::StatusCode> done_;
};

TEST_F(NodeServiceNodeTest, CallsWhoseMessageDoesNotComeHoldUpTheirOwnKindAlone) {
  grpc::GenericStub stub(channel_);
  std::vector<std::unique_ptr<Silent>> calls;
  for (int i = 0; i < 40; ++i) calls.push_back(std::make_unique<Silent>(&stub, "GetStatus"));
  // Those that are over the bound are refused by their headers.
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (server_->refused() < 24 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(server_->refused(), 24U);
  EXPECT_EQ(Send("GetStatus", "secret-of-tests-", "").error_message(), "16 calls are at work");
  EXPECT_TRUE(Send("Lookup", "secret-of-tests-", v1::LookupRequest().SerializeAsString()).ok());
  EXPECT_TRUE(Send("Read", "secret-of-tests-", "").ok());
  for (const auto& call : calls) call->End();
  // Their places are free again.
  while (!Send("GetStatus", "secret-of-tests-", "").ok() &&
         std::chrono::steady_clock::now() < until) {
  }
  EXPECT_TRUE(Send("GetStatus", "secret-of-tests-", "").ok());
}

// Before, they held their places as long as their connection, unless calls of another kind came.
TEST_F(NodeServiceNodeTest, CallsWhoseMessageDoesNotComeGiveTheirPlacesUp) {
  NodeServerOptions options = options_;
  options.first_message = std::chrono::milliseconds(300);
  auto server = NodeServer::Start(options, &handler_);
  ASSERT_TRUE(server.ok()) << server.status().ToString();
  Dial(**server);
  grpc::GenericStub stub(channel_);
  std::vector<std::unique_ptr<Silent>> calls;
  for (int i = 0; i < 40; ++i) calls.push_back(std::make_unique<Silent>(&stub, "GetStatus"));
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  const auto expired = [&] { return std::chrono::steady_clock::now() >= until; };
  while ((*server)->refused() < 24 && !expired()) std::this_thread::yield();
  while (!Send("GetStatus", "secret-of-tests-", "").ok() && !expired()) std::this_thread::yield();
  EXPECT_FALSE(expired());
  for (const auto& call : calls) call->End();
}

// Before, both had one bound: two nodes whose reads waited for each other's lookups were refused.
TEST_F(NodeServiceNodeTest, ReadsAndLookupsHoldUpTheirOwnKindAlone) {
  grpc::GenericStub stub(channel_);
  uint64_t refused = 0;
  for (const std::string method : {"Read", "Lookup"}) {
    const std::string other = method == "Read" ? "Lookup" : "Read";
    std::vector<std::unique_ptr<Silent>> calls;
    for (int i = 0; i < 25; ++i) calls.push_back(std::make_unique<Silent>(&stub, method));
    refused += 5;
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (server_->refused() < refused && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(server_->refused(), refused);
    EXPECT_EQ(Send(method, "secret-of-tests-", "").error_message(), "20 calls are at work");
    ++refused;
    EXPECT_TRUE(Send(other, "secret-of-tests-", "").ok()) << other;
    for (const auto& call : calls) call->End();
  }
}

// Where the system starts no thread, gRPC's own do the work.
TEST_F(NodeServiceNodeTest, WithoutThreadsOfItsOwnItAnswersAllTheSame) {
  static std::atomic<bool> refuses{true};
  SetFaultHook([](const char* task, FaultPoint point) {
    if (refuses && point == FaultPoint::kStart && std::string(task) == "answers") {
      throw std::system_error(EAGAIN, std::generic_category());
    }
  });
  const auto health = [this] { return board_.Tasks().at(0); };
  for (const std::string method : {"Read", "GetStatus", "GetLoad", "Explain", "Lookup"}) {
    EXPECT_TRUE(Send(method, "secret-of-tests-", "").ok()) << method;
  }
  EXPECT_TRUE(health().failing);
  EXPECT_EQ(health().failed_starts, 4U);
  EXPECT_NE(health().last_error.find("thread cannot be started"), std::string::npos);
  refuses = false;
  EXPECT_TRUE(Send("Read", "secret-of-tests-", "").ok());
  EXPECT_FALSE(health().failing);
  SetFaultHook(nullptr);
}

TEST_F(NodeServiceNodeTest, ACompressedMessageIsNotTaken) {
  const std::string zeros(1 << 20, '\0');
  for (const auto by : {GRPC_COMPRESS_GZIP, GRPC_COMPRESS_DEFLATE}) {
    grpc::ChannelArguments arguments;
    arguments.SetCompressionAlgorithm(by);
    channel_ = grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(server_->port()),
                                         grpc::InsecureChannelCredentials(), arguments);
    for (const std::string token : {"", "secret-of-tests-"}) {
      EXPECT_EQ(Send("Lookup", token, zeros).error_code(), grpc::StatusCode::UNIMPLEMENTED);
    }
  }
  EXPECT_EQ(handler_.lookups, 0U);
}

TEST_F(NodeServiceNodeTest, HealthIsAnsweredByHeadersAlone) {
  for (const bool serving : {false, true}) {
    server_->SetServing(serving);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    grpc::CompletionQueue queue;
    grpc::GenericStub stub(channel_);
    const auto call = stub.PrepareCall(&context, "/grpc.health.v1.Health/Check", &queue);
    const auto await = [&queue] {
      void* tag = nullptr;
      bool ok = false;
      return queue.Next(&tag, &ok) && ok;
    };
    call->StartCall(nullptr);
    ASSERT_TRUE(await());
    grpc::ByteBuffer answer;
    call->Read(&answer, nullptr);
    ASSERT_TRUE(await());
    grpc::Slice whole;
    ASSERT_TRUE(answer.DumpToSingleSlice(&whole).ok());
    EXPECT_EQ(std::string(whole.begin(), whole.end()), serving ? "\x08\x01" : "\x08\x02");
    grpc::Status status;
    call->Finish(&status, nullptr);
    await();
    EXPECT_TRUE(status.ok());
  }
}

TEST_F(NodeServiceNodeTest, ALargeMessageIsNotTaken) {
  const std::string large(kMaxRequestBytes + 1, '\0');
  for (const std::string method : {"Lookup", "Read", "GetStatus", "GetLoad", "Explain"}) {
    EXPECT_EQ(Send(method, "secret-of-tests-", large).error_code(),
              grpc::StatusCode::RESOURCE_EXHAUSTED)
        << method;
  }
}

// Holds lookups with parts until it is let go, as an SSD that stalls does; beats are answered.
class StallingHandler : public TestHandler {
 public:
  Status Lookup(const v1::LookupRequest& request, v1::LookupResponse* response) override {
    if (!request.parts().empty()) {
      ++stalled;
      for (bool held = stalls; held; held = stalls) stalls.wait(true);
    }
    return TestHandler::Lookup(request, response);
  }
  std::atomic<bool> stalls{true};
  std::atomic<int> stalled{0};
};

TEST(NodeServiceSsdNodeTest, BeatsAreAnsweredWhileLookupsWaitForADrive) {
  StallingHandler handler;
  NodeServerOptions options;
  options.listen = "127.0.0.1:0";
  options.waits = true;
  auto server = NodeServer::Start(options, &handler);
  ASSERT_TRUE(server.ok());
  const auto stub = v1::NodeService::NewStub(grpc::CreateChannel(
      "127.0.0.1:" + std::to_string((*server)->port()), grpc::InsecureChannelCredentials()));
  constexpr int kLookups = 6;  // more than gRPC has threads on two cores
  std::vector<std::thread> callers;
  std::atomic<int> answered{0};
  for (int i = 0; i < kLookups; ++i) {
    callers.emplace_back([&] {
      grpc::ClientContext context;
      v1::LookupRequest request;
      request.add_parts()->add_keys(1);
      v1::LookupResponse response;
      if (stub->Lookup(&context, request, &response).ok()) ++answered;
    });
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (handler.stalled < kLookups && std::chrono::steady_clock::now() < until) {
    std::this_thread::yield();
  }
  EXPECT_EQ(handler.stalled, kLookups);
  for (int beat = 0; beat < 20; ++beat) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(500));
    v1::LookupRequest request;
    request.set_asker("node-1");
    request.set_plan_epoch(1);
    v1::LookupResponse response;
    EXPECT_TRUE(stub->Lookup(&context, request, &response).ok()) << "beat " << beat;
  }
  handler.stalls = false;
  handler.stalls.notify_all();
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(answered, kLookups);
}

}  // namespace
}  // namespace embertide
