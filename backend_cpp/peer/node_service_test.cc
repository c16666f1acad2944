// What strangers get of a node's server.
#include "peer/node_service.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <string>

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
    std::ofstream(path) << "secret\n";
    auto tokens = TokenFile::Open({path});
    ASSERT_TRUE(tokens.ok());
    NodeServerOptions options;
    options.listen = "127.0.0.1:0";
    options.tokens = tokens.value();
    auto server = NodeServer::Start(options, &handler_);
    ASSERT_TRUE(server.ok()) << server.status().ToString();
    server_ = std::move(*server);
    channel_ = grpc::CreateChannel("127.0.0.1:" + std::to_string(server_->port()),
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
  std::unique_ptr<NodeServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(NodeServiceNodeTest, TheTokenIsLookedAtBeforeALookupIsParsed) {
  const std::string garbage(1000, '\xff');
  for (const std::string token : {"", "wrong"}) {
    EXPECT_EQ(Send("Lookup", token, garbage).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  }
  EXPECT_EQ(server_->refused(), 2U);
  const grpc::Status refused = Send("Lookup", "secret", garbage);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(refused.error_message(), "the message is no LookupRequest");
  EXPECT_EQ(handler_.lookups, 0U);
  v1::LookupRequest request;
  request.set_plan_epoch(7);
  std::string answer;
  EXPECT_TRUE(Send("Lookup", "secret", request.SerializeAsString(), &answer).ok());
  v1::LookupResponse response;
  EXPECT_TRUE(response.ParseFromString(answer));
  EXPECT_EQ(response.plan_epoch(), 8U);
}

TEST_F(NodeServiceNodeTest, ALargeMessageIsNotTaken) {
  const std::string large(kMaxRequestBytes + 1, '\0');
  for (const std::string method : {"Lookup", "Read", "GetStatus", "GetLoad", "Explain"}) {
    EXPECT_EQ(Send(method, "secret", large).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED)
        << method;
  }
}

}  // namespace
}  // namespace embertide
