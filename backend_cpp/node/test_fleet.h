// Nodes of one model in this process, which reach each other by gRPC; plans are written by hand.
#pragma once

#include <arpa/inet.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bus/fake_redis.h"
#include "embertide/node.h"
#include "embertide/v1/control.grpc.pb.h"
#include "node/test_model.h"
#include "peer/test_peer.h"

namespace embertide {

// A control plane that takes every node, and keeps the beats. Beats wait while it is told so.
class TestControl : public v1::ControlService::Service {
 public:
  explicit TestControl(uint32_t beat_every_ms = 50) : beat_every_ms_(beat_every_ms) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~TestControl() override {
    Hold(false);
    server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
  }
  TestControl(const TestControl&) = delete;
  TestControl& operator=(const TestControl&) = delete;

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  std::vector<v1::HeartbeatRequest> beats() const {
    const std::lock_guard lock(mutex_);
    return beats_;
  }
  // While true, beats are taken and not answered.
  void Hold(bool hold) {
    const std::lock_guard lock(mutex_);
    hold_ = hold;
    released_.notify_all();
  }

  grpc::Status RegisterNode(grpc::ServerContext*, const v1::RegisterNodeRequest* request,
                            v1::RegisterNodeResponse* response) override {
    response->set_incarnation(request->request_id());
    response->set_heartbeat_interval_ms(beat_every_ms_);
    return grpc::Status::OK;
  }
  grpc::Status Heartbeat(grpc::ServerContext*, const v1::HeartbeatRequest* request,
                         v1::HeartbeatResponse*) override {
    std::unique_lock lock(mutex_);
    beats_.push_back(*request);
    released_.wait(lock, [this] { return !hold_; });
    return grpc::Status::OK;
  }

 private:
  const uint32_t beat_every_ms_;
  int port_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable released_;
  bool hold_ = false;
  std::vector<v1::HeartbeatRequest> beats_;
  std::unique_ptr<grpc::Server> server_;
};

// Who has a bucket, as places of nodes; device 0 each.
struct TestAssignment {
  std::vector<uint32_t> owners;
  std::vector<uint32_t> joining = {};
  std::vector<uint32_t> leaving = {};
};

class TestFleet {
 public:
  explicit TestFleet(uint32_t nodes, uint32_t bucket_bits = 2, uint32_t devices = 1,
                     uint16_t dim = TestModel::kDim)
      : model(bucket_bits, dim), devices_(devices), nodes_(nodes) {
    for (uint32_t n = 0; n < nodes; ++n) {
      addresses_.push_back("127.0.0.1:" + std::to_string(FreePort()));
    }
  }

  NodeOptions Options(uint32_t n) const {
    NodeOptions options;
    options.node = "node-" + std::to_string(n);
    options.publication = model.path();
    options.devices = devices_;
    options.ddr_budget_bytes = 64ULL << 20;
    options.state = state.url();
    options.peer_address = addresses_[n];
    options.plan_wait = std::chrono::seconds(20);
    options.hot_rows_bytes = hot_rows_bytes;
    return options;
  }
  uint64_t hot_rows_bytes = 0;  // of nodes from now on
  // From the next plan on; for a node that is none of these.
  void SetAddress(uint32_t n, const std::string& address) { addresses_[n] = address; }
  // A plan; bucket b goes to node b % nodes unless `of` says otherwise.
  v1::Plan MakePlan(uint64_t epoch, const std::map<uint32_t, TestAssignment>& of = {}) const {
    v1::Plan plan;
    plan.set_epoch(epoch);
    v1::PlannedTable* table = plan.add_tables();
    table->set_name(model.table().name);
    table->set_bucket_bits(model.table().bucket_bits);
    table->set_chunks(1);
    for (uint32_t n = 0; n < addresses_.size(); ++n) {
      v1::Node* node = plan.mutable_topology()->add_nodes();
      node->set_name("node-" + std::to_string(n));
      node->set_address(addresses_[n]);
      for (uint32_t d = 0; d < devices_; ++d) node->add_devices()->set_index(d);
    }
    for (uint32_t b = 0; b < model.table().buckets(); ++b) {
      v1::Assignment* assignment = plan.add_assignments();
      assignment->set_bucket_begin(b);
      assignment->set_bucket_count(1);
      const auto given = of.find(b);
      const TestAssignment each =
          given != of.end() ? given->second
                            : TestAssignment{{b % static_cast<uint32_t>(addresses_.size())}};
      for (const uint32_t owner : each.owners) assignment->add_owners()->set_node(owner);
      for (const uint32_t owner : each.joining) assignment->add_joining()->set_node(owner);
      for (const uint32_t owner : each.leaving) assignment->add_leaving()->set_node(owner);
    }
    return plan;
  }
  void Write(const v1::Plan& plan) {
    const std::string epoch = std::to_string(plan.epoch());
    state.Set("c:{news}:plan:" + epoch, plan.SerializeAsString());
    state.Set("c:{news}:epoch", epoch);
  }
  void Start(uint32_t n, NodeOptions options) {
    auto node = Node::Open(std::move(options));
    ASSERT_TRUE(node.ok()) << node.status().ToString();
    nodes_[n] = std::move(*node);
  }
  void Stop(uint32_t n) { nodes_[n].reset(); }
  // Starts all, and waits until they reach each other.
  void StartAll() {
    for (uint32_t n = 0; n < nodes_.size(); ++n) Start(n, Options(n));
    for (uint32_t n = 0; n < nodes_.size(); ++n) {
      ASSERT_TRUE(Await([&] { return node(n).fleet_stats().peers_alive + 1 == nodes_.size(); }));
    }
  }
  Node& node(uint32_t n) { return *nodes_[n]; }
  const std::string& address(uint32_t n) const { return addresses_[n]; }
  std::unique_ptr<v1::NodeService::Stub> Stub(uint32_t n) const {
    return v1::NodeService::NewStub(
        grpc::CreateChannel(addresses_[n], grpc::InsecureChannelCredentials()));
  }
  // One key a bag, by NodeService.
  grpc::Status Read(uint32_t n, const std::vector<uint64_t>& keys, v1::ReadResponse* response,
                    std::chrono::milliseconds timeout = std::chrono::seconds(20)) const {
    v1::ReadRequest request;
    for (const uint64_t key : keys) {
      request.add_keys(key);
      request.add_lengths(1);
    }
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + timeout);
    return Stub(n)->Read(&context, request, response);
  }

  // Bags of one feature, by NodeService.
  grpc::Status ReadBags(uint32_t n, const std::vector<std::vector<uint64_t>>& bags,
                        v1::ReadResponse* response) const {
    v1::ReadRequest request;
    for (const auto& bag : bags) {
      for (const uint64_t key : bag) request.add_keys(key);
      request.add_lengths(static_cast<uint32_t>(bag.size()));
    }
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    return Stub(n)->Read(&context, request, response);
  }
  // Addresses of those that a node asks for a key, in order.
  std::vector<std::string> PeersOf(uint32_t n, uint64_t key) const {
    v1::ExplainRequest request;
    request.set_table(model.table().name);
    request.set_key(key);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    v1::ExplainResponse response;
    EXPECT_TRUE(Stub(n)->Explain(&context, request, &response).ok());
    return {response.peers().begin(), response.peers().end()};
  }
  v1::NodeServiceGetLoadResponse Load(uint32_t n) const {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    v1::NodeServiceGetLoadResponse response;
    EXPECT_TRUE(Stub(n)->GetLoad(&context, {}, &response).ok());
    return response;
  }

  v1::NodeServiceGetStatusResponse Status(uint32_t n) const {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    v1::NodeServiceGetStatusResponse response;
    EXPECT_TRUE(Stub(n)->GetStatus(&context, {}, &response).ok());
    return response;
  }
  // The first key of a bucket, at or after `from`.
  uint64_t KeyOf(uint32_t bucket, uint64_t from = 0) const {
    for (uint64_t key = from;; ++key) {
      if (model.BucketOf(key) == bucket) return key;
    }
  }

  TestModel model;
  FakeRedis state;

 private:
  static int FreePort() {
    const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* any = reinterpret_cast<sockaddr*>(&address);
    EMBERTIDE_CHECK(::bind(listener, any, size) == 0);
    EMBERTIDE_CHECK(::getsockname(listener, any, &size) == 0);
    ::close(listener);
    return ntohs(address.sin_port);
  }

  const uint32_t devices_;
  std::vector<std::string> addresses_;
  std::vector<std::unique_ptr<Node>> nodes_;  // end before what they follow
};

}  // namespace embertide
