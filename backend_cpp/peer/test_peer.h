// A peer for tests that answers where no real one would: late, or never.
#pragma once

#include <grpcpp/grpcpp.h>

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
  TestPeer(uint64_t number, Answer answer) : number_(number), answer_(std::move(answer)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~TestPeer() override {
    server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
  }
  TestPeer(const TestPeer&) = delete;
  TestPeer& operator=(const TestPeer&) = delete;

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  grpc::Status Lookup(grpc::ServerContext*, const v1::LookupRequest* request,
                      v1::LookupResponse* response) override {
    for (auto* each : {response->mutable_versions()->mutable_oldest(),
                       response->mutable_versions()->mutable_newest()}) {
      each->set_number(number_);
      each->set_lineage(1);
    }
    return answer_(*request, response);
  }

 private:
  const uint64_t number_;
  const Answer answer_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace embertide
