// Who gets in at a node's server, and with what: certificates, tokens, and new ones of both.
#include "access/credentials.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "access/identity.h"
#include "embertide/v1/node.grpc.pb.h"
#include "peer/node_service.h"
#include "peer/test_peer.h"
#include "tls/test_authority.h"

namespace embertide {
namespace {

using grpc::StatusCode;

class SilentHandler : public NodeHandler {
 public:
  Status Lookup(const v1::LookupRequest&, v1::LookupResponse*) override { return Status::Ok(); }
  Status Read(const v1::ReadRequest&, Deadline, v1::ReadResponse*) override { return Status::Ok(); }
  Status GetStatus(v1::NodeServiceGetStatusResponse*) override { return Status::Ok(); }
  Status GetLoad(uint32_t, v1::NodeServiceGetLoadResponse*) override { return Status::Ok(); }
  Status Explain(const v1::ExplainRequest&, v1::ExplainResponse*) override { return Status::Ok(); }
};

class CredentialsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = ::testing::TempDir() + "/embertide_credentials" + std::to_string(::getpid());
    std::filesystem::remove_all(folder_);
    authority_.Issue(folder_ + "/node", "spiffe://t/role/node");
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // A server of model "news"; `tokens` are lines of its token file, none: it has none.
  void Start(const std::string& tokens = "") {
    NodeServerOptions options;
    options.listen = "127.0.0.1:0";
    options.model = "news";
    options.credentials = *Credentials::Of(folder_ + "/node");
    if (!tokens.empty()) {
      std::ofstream(folder_ + "/tokens") << tokens;
      options.tokens = *TokenFile::Open({folder_ + "/tokens"});
    }
    auto server = NodeServer::Start(options, &handler_);
    ASSERT_TRUE(server.ok()) << server.status().ToString();
    server_ = std::move(*server);
  }
  // Calls from a certificate with this URI, over a connection of its own.
  StatusCode Call(const std::string& method, const std::string& uri,
                  const TestAuthority* authority = nullptr, long seconds = 3600) {
    const std::string folder = folder_ + "/caller";
    (authority == nullptr ? authority_ : *authority).Issue(folder, uri, seconds);
    if (authority != nullptr) {
      std::filesystem::copy(folder_ + "/node/ca.crt", folder + "/ca.crt",
                            std::filesystem::copy_options::overwrite_existing);
    }
    return CallWith(method, *Credentials::Of(folder), "");
  }
  StatusCode CallWith(const std::string& method, const Credentials& credentials,
                      const std::string& token) const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    v1::NodeService::Stub stub(grpc::CreateCustomChannel(
        "127.0.0.1:" + std::to_string(server_->port()), credentials.channel(), arguments));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
    if (method == "Lookup") {
      v1::LookupResponse response;
      return stub.Lookup(&context, {}, &response).error_code();
    }
    if (method == "Read") {
      v1::ReadResponse response;
      return stub.Read(&context, {}, &response).error_code();
    }
    if (method == "GetLoad") {
      v1::NodeServiceGetLoadResponse response;
      return stub.GetLoad(&context, {}, &response).error_code();
    }
    if (method == "Explain") {
      v1::ExplainResponse response;
      return stub.Explain(&context, {}, &response).error_code();
    }
    v1::NodeServiceGetStatusResponse response;
    return stub.GetStatus(&context, {}, &response).error_code();
  }

  std::string folder_;
  TestAuthority authority_;
  SilentHandler handler_;
  std::unique_ptr<NodeServer> server_;
};

TEST_F(CredentialsTest, ARoleCallsWhatItMayAndNothingElse) {
  Start();
  const std::set<std::pair<std::string, std::string>> allowed = {
      {"node", "Lookup"},      {"node", "Read"},        {"node", "GetStatus"},
      {"node", "GetLoad"},     {"node", "Explain"},     {"operator", "Read"},
      {"operator", "GetLoad"}, {"operator", "Explain"}, {"operator", "GetStatus"},
      {"reader", "GetLoad"},   {"reader", "Explain"},   {"reader", "GetStatus"},
      {"control", "GetLoad"},  {"control", "Explain"},  {"control", "GetStatus"}};
  for (const std::string role : {"node", "operator", "reader", "control", "trainer"}) {
    for (const std::string method : {"Lookup", "Read", "GetStatus", "GetLoad", "Explain"}) {
      EXPECT_EQ(Call(method, "spiffe://t/role/" + role),
                allowed.contains({role, method}) ? StatusCode::OK : StatusCode::PERMISSION_DENIED)
          << role << " " << method;
    }
  }
  EXPECT_EQ(server_->refused(), 10U);
}

TEST_F(CredentialsTest, WhoIsNobodyOrOfAnotherModelIsRefused) {
  Start();
  EXPECT_EQ(Call("Lookup", ""), StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(Call("Lookup", "spiffe://t/role/king"), StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(Call("Lookup", "spiffe://t/role/node/model/ads"), StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(Call("Lookup", "spiffe://t/role/node/model/news/name/node-7"), StatusCode::OK);
}

TEST_F(CredentialsTest, AStrangersCertificateAnExpiredOneAndPlainTextDoNotConnect) {
  Start();
  const TestAuthority stranger;
  const std::string uri = "spiffe://t/role/node";
  EXPECT_EQ(Call("Lookup", uri, &stranger), StatusCode::UNAVAILABLE);
  EXPECT_EQ(Call("Lookup", uri, nullptr, -60), StatusCode::UNAVAILABLE);
  EXPECT_EQ(CallWith("Lookup", Credentials::PlainText(), ""), StatusCode::UNAVAILABLE);
  EXPECT_EQ(Call("Lookup", uri), StatusCode::OK);
}

TEST_F(CredentialsTest, AServerThatIsNamedOtherwiseOrSignedByAStrangerIsNotTalkedTo) {
  Start();
  const TestAuthority stranger;
  stranger.Issue(folder_ + "/stranger", "spiffe://t/role/node");
  EXPECT_EQ(CallWith("Lookup", *Credentials::Of(folder_ + "/stranger"), ""),
            StatusCode::UNAVAILABLE);
}

TEST_F(CredentialsTest, ATokenMakesANodeOfACertificateWithoutARole) {
  Start("the-first-of-two\n\nthe-second-of-two\n");
  const std::string folder = folder_ + "/caller";
  authority_.Issue(folder, "");
  const Credentials credentials = *Credentials::Of(folder);
  EXPECT_EQ(CallWith("Lookup", credentials, "the-first-of-two"), StatusCode::OK);
  EXPECT_EQ(CallWith("Lookup", credentials, "the-second-of-two"), StatusCode::OK);
  for (const std::string wrong : {"", "the-first-of-tw", "first\n", "third"}) {
    if (wrong.find('\n') != std::string::npos) continue;  // metadata cannot hold it
    EXPECT_EQ(CallWith("Lookup", credentials, wrong), StatusCode::UNAUTHENTICATED) << wrong;
  }
}

TEST_F(CredentialsTest, NewTokensNeedNoRestart) {
  Start("the-old-one-of-all\n");
  const Credentials credentials = *Credentials::Of(folder_ + "/node");
  authority_.Issue(folder_ + "/caller", "");
  const Credentials nobody = *Credentials::Of(folder_ + "/caller");
  EXPECT_EQ(CallWith("Lookup", nobody, "the-new-one-of-all"), StatusCode::UNAUTHENTICATED);
  std::ofstream(folder_ + "/tokens") << "the-new-one-of-all\n";
  EXPECT_TRUE(
      Await([&] { return CallWith("Lookup", nobody, "the-new-one-of-all") == StatusCode::OK; }));
  EXPECT_EQ(CallWith("Lookup", nobody, "the-old-one-of-all"), StatusCode::UNAUTHENTICATED);
  // One that is gone for a while, or empty, closes nobody out.
  std::ofstream(folder_ + "/tokens") << "\n";
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  EXPECT_EQ(CallWith("Lookup", nobody, "the-new-one-of-all"), StatusCode::OK);
}

TEST_F(CredentialsTest, NewCertificatesOfAnotherAuthorityNeedNoRestart) {
  Start();
  const TestAuthority next;
  next.Issue(folder_ + "/next", "spiffe://t/role/node");
  const Credentials credentials = *Credentials::Of(folder_ + "/next");
  EXPECT_EQ(CallWith("Lookup", credentials, ""), StatusCode::UNAVAILABLE);
  next.Issue(folder_ + "/node", "spiffe://t/role/node");
  EXPECT_TRUE(Await([&] { return CallWith("Lookup", credentials, "") == StatusCode::OK; }));
  EXPECT_EQ(Call("Lookup", "spiffe://t/role/node"), StatusCode::UNAVAILABLE);
}

TEST_F(CredentialsTest, FilesThatCannotBeRightAreNamed) {
  EXPECT_NE(Credentials::Of("/nowhere").status().message().find("/nowhere/tls.crt"),
            std::string::npos);
  authority_.Issue(folder_ + "/other", "");
  std::filesystem::copy(folder_ + "/other/tls.key", folder_ + "/node/tls.key",
                        std::filesystem::copy_options::overwrite_existing);
  const auto wrong = Credentials::Of(folder_ + "/node");
  ASSERT_FALSE(wrong.ok());
  EXPECT_EQ(wrong.status().code(), Code::kInvalidArgument);
  EXPECT_NE(wrong.status().message().find("/node/tls.key"), std::string::npos)
      << wrong.status().message();
}

TEST(TokenFileTest, ATokenThatCanBeGuessedIsRefused) {
  const std::string path =
      ::testing::TempDir() + "/embertide_short_token" + std::to_string(::getpid());
  for (const std::string token : {"x", "fifteen-letters"}) {
    std::ofstream(path) << token << "\n";
    const Status refused = TokenFile::Open({path}).status();
    EXPECT_EQ(refused.code(), Code::kInvalidArgument);
    EXPECT_NE(refused.message().find("16 is the least"), std::string::npos);
    EXPECT_EQ(refused.message().find(" " + token + " "), std::string::npos);
  }
  std::ofstream(path) << "sixteen-letters-\n";
  EXPECT_TRUE(TokenFile::Open({path}).ok());
  std::filesystem::remove(path);
}

TEST(TokenFileTest, AFileWithoutATokenIsRefused) {
  const std::string path =
      ::testing::TempDir() + "/embertide_no_tokens" + std::to_string(::getpid());
  std::ofstream(path) << " \n\n";
  EXPECT_NE(TokenFile::Open({path}).status().message().find(path), std::string::npos);
  std::filesystem::remove(path);
  EXPECT_EQ(TokenFile::Open({path}).status().code(), Code::kInvalidArgument);
}

TEST(IdentityTest, IsReadOfAUri) {
  const auto whole = ParseIdentity("spiffe://a.b/role/reader/model/news/name/alice");
  ASSERT_TRUE(whole.has_value());
  EXPECT_EQ(whole->role, "reader");
  EXPECT_EQ(whole->model, "news");
  EXPECT_EQ(whole->name, "alice");
  EXPECT_EQ(ParseIdentity("spiffe://a.b/role/node")->model, "");
  for (const std::string none :
       {"", "spiffe://", "spiffe://a", "spiffe://a/role", "spiffe://a/role/", "spiffe:///role/node",
        "https://a/role/node", "spiffe://a/role/node/", "spiffe://a/role/node/model",
        "spiffe://a/role/node/name/x/model/y", "spiffe://a/role/node/role/node",
        "spiffe://a/role/node/model/a b", "spiffe://a/role/Node", "spiffe://a/model/x/role/node"}) {
    EXPECT_FALSE(ParseIdentity(none).has_value()) << none;
  }
}

}  // namespace
}  // namespace embertide
