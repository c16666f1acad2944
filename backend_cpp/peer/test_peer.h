// A peer for tests that answers where no real one would: late, or never.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "embertide/v1/node.grpc.pb.h"

namespace embertide {

// True once it holds; false after 20 s.
inline bool Await(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

// Answers what a test says.
class TestPeer : public v1::NodeService::Service {
 public:
  using Answer = std::function<grpc::Status(const v1::LookupRequest&, v1::LookupResponse*)>;
  // It has version `number` of lineage 1; calls wait for `answer` to return.
  TestPeer(uint64_t number, Answer answer, const std::string& listen = "127.0.0.1:0")
      : oldest_(number), newest_(number), answer_(std::move(answer)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(listen, grpc::InsecureServerCredentials(), &port_);
    // Two servers on one port would each get a part of the calls.
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~TestPeer() override {
    server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
  }
  TestPeer(const TestPeer&) = delete;
  TestPeer& operator=(const TestPeer&) = delete;

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  int port() const { return port_; }
  // From the next call on.
  void SetVersions(uint64_t oldest, uint64_t newest) {
    oldest_ = oldest;
    newest_ = newest;
  }
  grpc::Status Lookup(grpc::ServerContext*, const v1::LookupRequest* request,
                      v1::LookupResponse* response) override {
    v1::VersionRange* versions = response->mutable_versions();
    versions->mutable_oldest()->set_number(oldest_);
    versions->mutable_oldest()->set_lineage(1);
    versions->mutable_newest()->set_number(newest_);
    versions->mutable_newest()->set_lineage(1);
    return answer_(*request, response);
  }

 private:
  std::atomic<uint64_t> oldest_;
  std::atomic<uint64_t> newest_;
  const Answer answer_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace embertide
