// Nodes that share a model: what they tell the control plane, and what they ask each other.
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <stdexcept>
#include <stop_token>
#include <system_error>

#include "base/task_faults.h"
#include "node/test_fleet.h"

namespace embertide {
namespace {

TestModel::Rows ManyRows(uint64_t keys, float value) {
  TestModel::Rows rows;
  for (uint64_t key = 0; key < keys; ++key) rows[key] = value + static_cast<float>(key);
  return rows;
}

TEST(FleetNodeTest, BeatsTellTheP99OfWhatWasAnsweredInTheLastSecond) {
  TestFleet fleet(1);
  TestControl control;
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  fleet.Write(fleet.MakePlan(1));
  NodeOptions options = fleet.Options(0);
  options.control = control.address();
  fleet.Start(0, options);
  const auto last = [&] {
    const auto beats = control.beats();
    return beats.empty() ? ~0ULL : beats.back().p99_us();
  };
  ASSERT_TRUE(Await([&] { return last() == 0; })) << "nothing was answered yet";
  v1::ReadResponse response;
  EXPECT_TRUE(Await([&] {
    EXPECT_TRUE(fleet.Read(0, {1, 2, 3}, &response).ok());
    return last() > 0;
  }));
  EXPECT_LT(last(), 1'000'000U);
  // The latencies of Triton's answers come by this way.
  EXPECT_TRUE(Await([&] {
    fleet.node(0).NoteLatency(std::chrono::milliseconds(300), 1);
    return last() >= 300'000;
  }));
  EXPECT_TRUE(Await([&] { return last() == 0; })) << "a second without requests";
}

// The one value of each key, as one feature of one key gives it.
std::vector<float> ValuesOf(const v1::ReadResponse& response) {
  std::vector<float> values;
  for (int i = 0; i < response.embeddings_size(); i += TestModel::kDim) {
    values.push_back(response.embeddings(i));
  }
  return values;
}

std::string Sources(std::initializer_list<Source> sources) {
  std::string bytes;
  for (const Source each : sources) bytes += static_cast<char>(each);
  return bytes;
}

// Peers send one another rows as they are encoded.
class FleetRowsTest : public testing::TestWithParam<DType> {};

// Every key of a sequence gives its row, wherever it lies; bags beside it are pooled.
TEST_P(FleetRowsTest, ASequenceIsReadRowByRowFromItsOwners) {
  TestFleet fleet(2);
  fleet.model.UseDType(GetParam());
  fleet.model.features = {
      {"first", "item", "sum"}, {"seen", "item", "none"}, {"last", "item", "mean"}};
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  fleet.Write(fleet.MakePlan(1));
  fleet.StartAll();
  const uint64_t near = fleet.KeyOf(0);
  const uint64_t far = fleet.KeyOf(1);
  const uint64_t further = fleet.KeyOf(3);
  const uint64_t unknown = fleet.KeyOf(1, 1000);
  const auto value = [](uint64_t key) { return 1 + static_cast<float>(key); };
  v1::ReadRequest request;
  // Two keys of one peer stand side by side in a sequence, and make a sum in the bag after it.
  for (const uint64_t key : {near, far, /**/ far, near, further, unknown, /**/ far, further,  //
                             /**/ further, near}) {
    request.add_keys(key);
  }
  for (const uint32_t length : {2, 4, 2, 1, 0, 1}) request.add_lengths(length);
  for (const uint32_t node : {0U, 1U}) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    v1::ReadResponse response;
    const grpc::Status read = fleet.Stub(node)->Read(&context, request, &response);
    ASSERT_TRUE(read.ok()) << read.error_message();
    EXPECT_EQ(
        ValuesOf(response),
        std::vector<float>({value(near) + value(far), value(far), value(near), value(further), -1,
                            (value(far) + value(further)) / 2, value(further), value(near)}));
    const Source here = node == 0 ? Source::kDdr : Source::kRemote;
    const Source there = node == 0 ? Source::kRemote : Source::kDdr;
    EXPECT_EQ(response.sources(), Sources({here, there, there, here, there, Source::kDefault, there,
                                           there, there, here}));
  }
}

// Rows are multiplied wherever they lie: in sums of a peer, in single rows of it, and here.
TEST_P(FleetRowsTest, WeighedBagsAreOneAnswerWhoeverOwnsTheirKeys) {
  TestFleet fleet(2);
  fleet.model.UseDType(GetParam());
  fleet.model.features = {
      {"first", "item", "sum", true}, {"seen", "item", "none"}, {"last", "item", "mean"}};
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  fleet.Write(fleet.MakePlan(1));
  fleet.StartAll();
  const uint64_t near = fleet.KeyOf(0);
  const uint64_t far = fleet.KeyOf(1);
  const uint64_t further = fleet.KeyOf(3);
  const uint64_t unknown = fleet.KeyOf(1, 1000);
  const auto value = [](uint64_t key) { return 1 + static_cast<float>(key); };
  v1::ReadRequest request;
  // Twice one key in a bag, with other weights; the second bag of each sample is a sequence.
  for (const uint64_t key : {far, further, far, near, /**/ near, far, /**/ unknown, far, unknown,
                             /**/ further, /**/ near}) {
    request.add_keys(key);
  }
  for (const uint32_t length : {4, 2, 3, 1, 0, 1}) request.add_lengths(length);
  for (const uint32_t node : {0U, 1U}) {
    const auto read = [&](v1::ReadResponse* response) {
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
      return fleet.Stub(node)->Read(&context, request, response);
    };
    v1::ReadResponse response;
    request.clear_weights();
    EXPECT_EQ(read(&response).error_message(), "0 weights for 11 keys");
    for (const float weight : {2.0F, 0.5F, -1.0F, 4.0F, 3.0F, -3.0F, 8.0F, 2.0F, -2.0F, 0.25F}) {
      request.add_weights(weight);
    }
    request.add_weights(std::numeric_limits<float>::infinity());
    EXPECT_EQ(read(&response).error_message(), "a weight is not finite");
    request.set_weights(10, 5);
    const grpc::Status answered = read(&response);
    ASSERT_TRUE(answered.ok()) << answered.error_message();
    EXPECT_EQ(ValuesOf(response),
              std::vector<float>({value(far) + 0.5F * value(further) + 4 * value(near),
                                  3 * value(near), -3 * value(far), (-6 + 2 * value(far)) / 3,
                                  0.25F * value(further), 5 * value(near)}));
  }
}

// Who does not know that a part is weighed refuses it, and so does who finds no weight.
TEST(FleetNodeTest, PartsOfOtherWeightsAreRefused) {
  TestFleet fleet(1);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  fleet.Write(fleet.MakePlan(1));
  fleet.StartAll();
  const auto ask = [&](v1::PartPooling pooling, const std::vector<float>& weights) {
    v1::LookupRequest request;
    request.set_plan_epoch(1);
    v1::LookupPart* part = request.add_parts();
    part->mutable_version()->set_number(1);
    part->mutable_version()->set_lineage(1);
    part->set_pooling(pooling);
    for (const uint64_t key : {3, 7}) part->add_keys(key);
    if (pooling != v1::PART_POOLING_ROWS) {
      for (const uint32_t offset : {0, 3}) part->add_bag_offsets(offset);
      for (const uint32_t place : {1, 0, 1}) part->add_bag_keys(place);
    }
    for (const float weight : weights) part->add_bag_weights(weight);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    v1::LookupResponse response;
    const grpc::Status status = fleet.Stub(0)->Lookup(&context, request, &response);
    return status.ok() && pooling != v1::PART_POOLING_ROWS
               ? std::to_string(response.results(0).sums(0))
               : status.error_message();
  };
  // Rows are 4 and 8.
  EXPECT_EQ(ask(v1::PART_POOLING_WEIGHED_SUM, {0.5F, 3, -2}), std::to_string(4.0 + 12 - 16));
  EXPECT_EQ(ask(v1::PART_POOLING_SUM, {}), std::to_string(20.0));
  EXPECT_EQ(ask(v1::PART_POOLING_WEIGHED_SUM, {1, 1}), "2 bag_weights for 3 bag_keys");
  EXPECT_EQ(ask(v1::PART_POOLING_SUM, {1, 1, 1}), "3 bag_weights for 3 bag_keys");
  EXPECT_EQ(ask(v1::PART_POOLING_ROWS, {1}), "1 bag_weights for 0 bag_keys");
  EXPECT_EQ(ask(v1::PART_POOLING_WEIGHED_SUM, {1, 1, std::numeric_limits<float>::quiet_NaN()}),
            "a weight is not finite");
}

// However few sums are asked for: the rows that they are made of lie in a thread's memory.
TEST(FleetNodeTest, RowsOfACallAreBoundedInBytes) {
  constexpr uint16_t kWide = 512;  // 2 KiB a row
  TestFleet fleet(1, 2, 1, kWide);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  fleet.Write(fleet.MakePlan(1));
  fleet.StartAll();
  const auto ask = [&](uint32_t keys) {
    v1::LookupRequest request;
    request.set_plan_epoch(1);
    v1::LookupPart* part = request.add_parts();
    part->mutable_version()->set_number(1);
    part->mutable_version()->set_lineage(1);
    part->set_pooling(v1::PART_POOLING_SUM);
    for (uint32_t key = 0; key < keys; ++key) {
      part->add_keys(key);
      part->add_bag_keys(key);
    }
    for (const uint32_t offset : {0U, keys}) part->add_bag_offsets(offset);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    v1::LookupResponse response;
    return fleet.Stub(0)->Lookup(&context, request, &response);
  };
  EXPECT_TRUE(ask(16384).ok());
  const grpc::Status refused = ask(16385);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(refused.error_message(), "the keys' rows may have 33556480 bytes; at most 33554432");
}

TEST(FleetNodeTest, ALookAtThePlanEndsAtTheCallersDeadline) {
  TestFleet fleet(1);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  fleet.Write(fleet.MakePlan(1));
  fleet.StartAll();
  fleet.state.AnswerGetWith("$8", "");  // and no more: a look waits for the rest
  const auto timed = [&](Deadline deadline) {
    const auto begun = std::chrono::steady_clock::now();
    fleet.node(0).RefreshPlan(deadline);
    return std::chrono::steady_clock::now() - begun;
  };
  EXPECT_GE(timed(kNoDeadline), std::chrono::milliseconds(240));
  EXPECT_LT(timed(DeadlineAfter(std::chrono::milliseconds(20))), std::chrono::milliseconds(200));
}

TEST(FleetNodeTest, StatusCountsByTheNamesOfTheMetrics) {
  TestFleet fleet(2);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  fleet.Write(fleet.MakePlan(1));
  fleet.StartAll();
  v1::ReadResponse read;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(fleet.Read(0, {fleet.KeyOf(1)}, &read).ok());
  const FleetStats stats = fleet.node(0).fleet_stats();
  const auto status = fleet.Status(0);
  for (const FleetEvent& event : kFleetEvents) {
    ASSERT_TRUE(status.counters().contains(event.name)) << event.name;
    EXPECT_EQ(status.counters().at(event.name), stats.*event.count) << event.name;
  }
  EXPECT_EQ(status.counters().at("remote_key"), 3U);
  EXPECT_EQ(status.counters().at("peers_alive"), 1U);
}

TEST(FleetNodeTest, WhereAnOwnerLacksABucketTheNextOneIsAsked) {
  TestFleet fleet(3);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  fleet.Write(fleet.MakePlan(1));
  // Node 1 knows the first plan for ever: by that bucket 2 is node 2's alone.
  FakeRedis old;
  const v1::Plan first = fleet.MakePlan(1);
  old.Set("c:{news}:plan:1", first.SerializeAsString());
  old.Set("c:{news}:epoch", "1");
  for (uint32_t n = 0; n < 3; ++n) {
    NodeOptions options = fleet.Options(n);
    if (n == 1) options.state = old.url();
    fleet.Start(n, options);
  }
  fleet.Write(fleet.MakePlan(2, {{2, {{1, 2}, {}}}}));
  ASSERT_TRUE(Await([&] { return fleet.node(0).plan_epoch() == 2; }));
  ASSERT_TRUE(Await([&] { return fleet.node(0).fleet_stats().peers_alive == 2; }));
  // One call to node 1 for both; the key of bucket 1 has no other owner.
  const uint64_t own = fleet.KeyOf(1);
  const uint64_t refused = fleet.KeyOf(2);
  v1::ReadResponse response;
  const grpc::Status status = fleet.Read(0, {own, refused}, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(ValuesOf(response),
            std::vector<float>({1 + static_cast<float>(own), 1 + static_cast<float>(refused)}));
  EXPECT_EQ(fleet.node(0).fleet_stats().next_owners, 1U);
  EXPECT_EQ(fleet.node(0).fleet_stats().started_over, 0U);
  // Without another owner it is started over, and then refused.
  fleet.Write(fleet.MakePlan(3, {{2, {{1}, {}}}}));
  ASSERT_TRUE(Await([&] { return fleet.node(0).plan_epoch() == 3; }));
  const uint64_t another = fleet.KeyOf(2, refused + 1);
  EXPECT_EQ(fleet.Read(0, {another}, &response).error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(fleet.node(0).fleet_stats().started_over, 1U);
}

grpc::Status HasNoRows(const v1::LookupRequest& request, v1::LookupResponse*) {
  if (request.parts().empty()) return grpc::Status::OK;
  return {grpc::StatusCode::UNIMPLEMENTED, "it has no rows"};
}

// The answer of a peer that has no rows and notes at which version it is asked.
TestPeer::Answer NotesVersion(std::atomic<uint64_t>* asked) {
  return [asked](const v1::LookupRequest& request, v1::LookupResponse* response) {
    if (!request.parts().empty()) *asked = request.parts(0).version().number();
    return HasNoRows(request, response);
  };
}

// The time that node 0 of two waits for a peer that a test makes: longer than any test.
constexpr auto kPatience = std::chrono::seconds(20);

// Starts node 0 beside it; whether they know one another then.
bool StartsBeside(const TestPeer& peer, TestFleet* fleet) {
  fleet->SetAddress(1, peer.address());
  fleet->Write(fleet->MakePlan(1));
  NodeOptions options = fleet->Options(0);
  options.peer_timeout = kPatience;
  fleet->Start(0, options);
  return Await([&] { return fleet->node(0).fleet_stats().peers_alive == 1; });
}

// Its owner does not answer, and meanwhile the bucket has come here: as often as that may be.
TEST(FleetNodeTest, ABucketThatComesWhileItsOwnerIsAskedIsReadHere) {
  TestFleet fleet(2);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  std::atomic<uint32_t> asked{0};
  const uint64_t own = fleet.model.table().buckets() / 2;
  TestPeer peer(1, [&](const v1::LookupRequest& request, v1::LookupResponse*) -> grpc::Status {
    if (request.parts().empty()) return grpc::Status::OK;
    if (++asked == 1) fleet.Write(fleet.MakePlan(2, {{1, {{1}, {0}}}}));
    EXPECT_TRUE(Await([&] { return fleet.node(0).fleet_stats().buckets_held > own; }));
    return {grpc::StatusCode::UNAVAILABLE, "it ends"};
  });
  ASSERT_TRUE(StartsBeside(peer, &fleet));
  v1::ReadResponse response;
  const uint64_t key = fleet.KeyOf(1);
  const grpc::Status status = fleet.Read(0, {key}, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(ValuesOf(response), std::vector<float>({1 + static_cast<float>(key)}));
  EXPECT_EQ(response.sources(), Sources({Source::kDdr}));
  EXPECT_GE(asked, 1U);
}

// A bucket that leaves may be dropped by the next plan while a request reads it.
TEST(FleetNodeTest, WhatLeavesIsAskedOfItsOwners) {
  TestFleet fleet(2);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  fleet.Write(fleet.MakePlan(1));
  fleet.StartAll();
  const uint64_t key = fleet.KeyOf(0);
  const auto source_under = [&](uint64_t epoch, const TestAssignment& given) {
    fleet.Write(fleet.MakePlan(epoch, {{0, given}}));
    for (uint32_t n = 0; n < 2; ++n) {
      EXPECT_TRUE(Await([&] {
        return fleet.node(n).plan_epoch() == epoch && fleet.node(n).fleet_stats().buckets_left == 0;
      }));
    }
    v1::ReadResponse response;
    const grpc::Status status = fleet.Read(0, {key}, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(ValuesOf(response), std::vector<float>({1 + static_cast<float>(key)}));
    return response.sources();
  };
  EXPECT_EQ(source_under(2, {{0}, {1}, {}}), Sources({Source::kDdr}));
  EXPECT_EQ(source_under(3, {{0, 1}, {}, {}}), Sources({Source::kDdr}));
  EXPECT_EQ(source_under(4, {{1}, {}, {0}}), Sources({Source::kRemote}));
  EXPECT_EQ(fleet.node(0).fleet_stats().buckets_held, 2U) << "it is held for those who still ask";
  EXPECT_EQ(source_under(5, {{1}, {}, {}}), Sources({Source::kRemote}));
}

// A target that was killed and has not loaded what it took over, or is away: its source has it.
TEST(FleetNodeTest, WhereNoOwnerHasABucketTheNodeThatItLeavesIsAsked) {
  TestFleet fleet(3);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  fleet.Write(fleet.MakePlan(1));
  fleet.StartAll();
  fleet.Write(fleet.MakePlan(2, {{1, {{2}, {}, {1}}}}));
  for (uint32_t n = 0; n < 3; ++n) {
    ASSERT_TRUE(Await([&] { return fleet.node(n).plan_epoch() == 2; }));
  }
  fleet.Stop(2);
  const uint64_t key = fleet.KeyOf(1);
  v1::ReadResponse response;
  for (int i = 0; i < 3; ++i) {
    const grpc::Status status = fleet.Read(0, {key}, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(ValuesOf(response), std::vector<float>({1 + static_cast<float>(key)}));
  }
  EXPECT_EQ(fleet.node(0).fleet_stats().degraded_keys[0], 0U);
  fleet.Write(fleet.MakePlan(3, {{1, {{2}, {}, {}}}}));
  ASSERT_TRUE(Await([&] { return fleet.node(0).plan_epoch() == 3; }));
  EXPECT_EQ(fleet.Read(0, {key}, &response).error_code(), grpc::StatusCode::UNAVAILABLE);
}

// No thread waits for versions that may never come.
TEST(FleetNodeTest, ANodeBehindItsPeersAnswersWhatItCanAndRefusesTheRestAtOnce) {
  TestFleet fleet(2);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  std::atomic<uint64_t> asked{0};
  TestPeer ahead(1, NotesVersion(&asked));
  ASSERT_TRUE(StartsBeside(ahead, &fleet));
  const Node& node = fleet.node(0);
  EXPECT_FALSE(node.IsBehindPeers());
  ahead.SetVersions(2, 2);
  ASSERT_TRUE(Await([&] { return node.IsBehindPeers(); }));
  ASSERT_TRUE(
      Await([&] { return node.why_not_ready().starts_with("most peers have no version"); }));
  v1::ReadResponse response;
  EXPECT_TRUE(fleet.Read(0, {fleet.KeyOf(0)}, &response).ok()) << "it holds this one itself";
  const auto begun = std::chrono::steady_clock::now();
  const grpc::Status refused = fleet.Read(0, {fleet.KeyOf(0), fleet.KeyOf(1)}, &response);
  EXPECT_LT(std::chrono::steady_clock::now() - begun, kPatience / 2);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(
      refused.error_message(),
      "no owner answers for 1 of 2 keys (1 version), more than max_degraded_share = 0 allows; "
      "at version 1, node-1 holds versions 2 to 2: try again in a second, or at another node");
  EXPECT_EQ(asked, 0U);
  fleet.model.WriteDelta({2, 1}, {1, 1}, {{fleet.KeyOf(0), 9}});
  ASSERT_TRUE(Await([&] { return !node.IsBehindPeers(); }));
  ASSERT_TRUE(Await([&] { return node.why_not_ready().empty(); }));
  EXPECT_FALSE(fleet.Read(0, {fleet.KeyOf(1)}, &response).ok());
  EXPECT_EQ(asked, 2U);
}

// Who restarts begins at the newest version, which may be on its way to the others.
TEST(FleetNodeTest, ANodeThatStartsServesOnceItsPeersHaveItsFirstVersion) {
  TestFleet fleet(2);
  fleet.model.WriteSnapshot({2, 1}, ManyRows(50, 1));
  std::atomic<uint32_t> beats{0};
  std::atomic<bool> too_early{false};
  TestPeer peer(1, [&](const v1::LookupRequest& request, v1::LookupResponse* response) {
    const bool follows = response->versions().newest().number() == 2;
    if (request.asker_versions().has_newest() && !follows) too_early = true;
    if (++beats == 10) peer.SetVersions(1, 2);
    return grpc::Status::OK;
  });
  fleet.SetAddress(1, peer.address());
  fleet.Write(fleet.MakePlan(1));
  fleet.Start(0, fleet.Options(0));
  EXPECT_GE(beats, 10U);
  EXPECT_FALSE(too_early);
}

// The result of each of some requests of an execution, at a pin.
std::vector<FetchedRequest> Fetched(const Node& node, const Pinned& pinned,
                                    const std::vector<std::vector<int64_t>>& keys, FetchTerms terms,
                                    Status* status) {
  std::vector<KeyBags> requests;
  for (const auto& each : keys) requests.push_back({each, {}, nullptr, TestModel::kDim});
  const std::vector<BagFeature> features = {{0, Pooling::kSum, 0}};
  const RemoteLookupPtr remote = node.NewRemoteLookup();
  *status = node.Fetch(pinned, features, requests, kNoDeadline, remote.get(), terms);
  std::vector<FetchedRequest> results;
  for (size_t r = 0; r < keys.size(); ++r) results.push_back(Node::ResultOf(*remote, r));
  return results;
}

TEST(FleetNodeTest, ALivePeerThatLostTheVersionMeansAnotherPin) {
  TestFleet fleet(2);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  TestPeer peer(1, HasNoRows);
  fleet.SetAddress(1, peer.address());
  fleet.Write(fleet.MakePlan(1));
  fleet.Start(0, fleet.Options(0));
  const Node& node = fleet.node(0);
  ASSERT_TRUE(Await([&] { return node.fleet_stats().peers_alive == 1; }));
  fleet.model.WriteDelta({2, 1}, {1, 1}, {{fleet.KeyOf(0), 9}});
  ASSERT_TRUE(Await([&] { return node.newest()->number == 2; }));
  const auto pinned_version = [&] { return node.Pin().value().rows.version(); };
  const Result<Pinned> old = node.Pin();
  ASSERT_EQ(old.value().rows.version(), 1U) << "the peer has no newer one";
  peer.SetVersions(2, 2);
  ASSERT_TRUE(Await([&] { return pinned_version() == 2; })) << "the peer has lost version 1";
  const auto near = static_cast<int64_t>(fleet.KeyOf(0));
  const auto far = static_cast<int64_t>(fleet.KeyOf(1));
  Status status;
  Fetched(node, old.value(), {{near, far}}, {.may_start_over = true}, &status);
  EXPECT_EQ(status.code(), Code::kVersionGone);
  EXPECT_EQ(node.fleet_stats().started_over, 1U);
  // A version that was asked for by name: its requests alone, and never defaults.
  auto results = Fetched(node, old.value(), {{near, far}, {near}},
                         {.named = true, .may_start_over = true}, &status);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(results[0].status.code(), Code::kVersionGone);
  EXPECT_EQ(results[0].status.message(),
            "version 1 is gone at the owners of 1 of 2 keys: node-1 holds versions 2 to 2");
  EXPECT_TRUE(results[1].status.ok());
  // At the last attempt it is what the policy says.
  results = Fetched(node, old.value(), {{near, far}, {near}}, {}, &status);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(results[0].status.code(), Code::kUnavailable);
  EXPECT_EQ(results[0].degraded_keys, 1U);
  EXPECT_TRUE(results[1].status.ok());
  const auto& by_reason = node.fleet_stats().degraded_keys;
  EXPECT_EQ(by_reason[static_cast<size_t>(NoAnswer::kVersion)], 2U);
  EXPECT_EQ(std::accumulate(by_reason.begin(), by_reason.end(), uint64_t{0}), 2U);
}

// A caller finds its request again at every node that worked for it, and at no other.
TEST(FleetNodeTest, APeersSlowLookUpsHaveTheTracesOfTheRequestsThatAsk) {
  TestFleet fleet(2);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  fleet.Write(fleet.MakePlan(1));
  fleet.StartAll();
  const Node& node = fleet.node(0);
  const Result<Pinned> pinned = node.Pin();
  const auto key = [&](uint32_t bucket) { return static_cast<int64_t>(fleet.KeyOf(bucket)); };
  const std::string far(32, 'a');
  const std::string near(32, 'b');
  const auto ask = [&](std::vector<std::string_view> traces) {
    Status status;
    Fetched(node, pinned.value(), {{key(1)}, {key(0)}, {key(1), key(3)}}, {.traces = traces},
            &status);
    ASSERT_TRUE(status.ok()) << status.ToString();
  };
  ask({});
  auto slow = fleet.Load(1).slow_lookups();
  ASSERT_EQ(slow.size(), 1);
  EXPECT_EQ(slow[0].trace(), "");
  EXPECT_EQ(slow[0].asker(), "node-0");
  EXPECT_EQ(slow[0].keys(), 2U);  // each once
  EXPECT_GT(slow[0].ended_ms(), 0);
  ask({far, near, {}});
  slow = fleet.Load(1).slow_lookups();
  ASSERT_EQ(slow.size(), 2);
  EXPECT_EQ(std::ranges::count(slow, far, &v1::SlowLookup::trace), 1);
  EXPECT_EQ(fleet.Load(0).slow_lookups_size(), 0);
  // At most four entries a call.
  std::vector<std::vector<int64_t>> keys(9, {key(1)});
  std::vector<std::string> many;
  for (char digit = '1'; digit <= '9'; ++digit) many.emplace_back(32, digit);
  const std::vector<std::string_view> traces(many.begin(), many.end());
  Status status;
  Fetched(node, pinned.value(), keys, {.traces = traces}, &status);
  EXPECT_EQ(fleet.Load(1).slow_lookups_size(), 2 + 4);
}

TEST(FleetNodeTest, TracesThatAreNoneAreRefusedAndAnUnknownAskerIsNotNamed) {
  TestFleet fleet(1);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  fleet.Write(fleet.MakePlan(1));
  fleet.StartAll();
  const auto ask = [&](const std::vector<std::string>& traces) {
    v1::LookupRequest request;
    request.set_plan_epoch(1);
    request.set_asker("<b>somebody</b>");
    v1::LookupPart* part = request.add_parts();
    part->mutable_version()->set_number(1);
    part->mutable_version()->set_lineage(1);
    part->set_pooling(v1::PART_POOLING_ROWS);
    part->add_keys(3);
    part->mutable_traces()->Add(traces.begin(), traces.end());
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    v1::LookupResponse response;
    return fleet.Stub(0)->Lookup(&context, request, &response).error_message();
  };
  const std::string refusal = "traces are at most 4, each of 32 digits of lowercase hex";
  EXPECT_EQ(ask({std::string(32, 'a')}), "");
  EXPECT_EQ(ask({"<b>" + std::string(29, 'a')}), refusal);
  EXPECT_EQ(ask({""}), refusal);
  EXPECT_EQ(ask(std::vector<std::string>(5, std::string(32, 'a'))), refusal);
  const auto slow = fleet.Load(0).slow_lookups();
  ASSERT_EQ(slow.size(), 1);
  EXPECT_EQ(slow[0].asker(), "");
}

// One that is a version behind is about to have it; one that is further behind may never.
TEST(FleetNodeTest, AnOwnerThatIsOneVersionBehindIsWaitedForAndNoOther) {
  TestFleet fleet(2);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  std::atomic<uint64_t> asked{0};
  TestPeer peer(1, NotesVersion(&asked));
  ASSERT_TRUE(StartsBeside(peer, &fleet));
  const Node& node = fleet.node(0);
  fleet.model.WriteDelta({2, 1}, {1, 1}, {{fleet.KeyOf(0), 9}});
  fleet.model.WriteDelta({3, 1}, {2, 1}, {{fleet.KeyOf(0), 9}});
  // A version is known a moment before it can be pinned.
  ASSERT_TRUE(Await([&] { return node.Pin(3).ok(); }));
  const auto far = static_cast<int64_t>(fleet.KeyOf(1));
  const auto fetch = [&](uint64_t version) {
    const Result<Pinned> pinned = node.Pin(version);
    Status status;
    const auto begun = std::chrono::steady_clock::now();
    Fetched(node, pinned.value(), {{far}}, {}, &status);
    return std::chrono::steady_clock::now() - begun;
  };
  EXPECT_LT(fetch(3), std::chrono::seconds(5)) << "two versions behind";
  EXPECT_EQ(asked, 0U);
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    peer.SetVersions(1, 2);
  });
  const auto took = fetch(2);
  later.join();
  EXPECT_EQ(asked, 2U) << "it was waited for";
  EXPECT_GT(took, std::chrono::milliseconds(90));
  EXPECT_LT(took, std::chrono::seconds(5));
}

// Parts that its old address did not answer are asked at the new one.
TEST(FleetNodeTest, APeerThatMovesWhileItIsAskedIsAskedAtItsNewAddress) {
  TestFleet fleet(2);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  std::atomic<bool> asked{false};
  std::atomic<bool> moved{false};
  TestPeer old(1, [&](const v1::LookupRequest& request, v1::LookupResponse*) {
    if (request.parts().empty()) return grpc::Status::OK;
    asked = true;
    moved.wait(false);
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "shutting down");
  });
  const std::string address = fleet.address(1);
  fleet.SetAddress(1, old.address());
  fleet.Write(fleet.MakePlan(1));
  NodeOptions options = fleet.Options(0);
  options.peer_timeout = std::chrono::seconds(20);
  fleet.Start(0, options);
  ASSERT_TRUE(Await([&] { return fleet.node(0).fleet_stats().peers_alive == 1; }));
  v1::ReadResponse response;
  grpc::Status status;
  const uint64_t far = fleet.KeyOf(1);
  std::thread reader([&] { status = fleet.Read(0, {far}, &response); });
  EXPECT_TRUE(Await([&] { return asked.load(); }));
  fleet.SetAddress(1, address);
  fleet.Write(fleet.MakePlan(2));
  NodeOptions there = fleet.Options(1);
  there.peer_address = address;
  fleet.Start(1, there);
  EXPECT_TRUE(Await([&] { return fleet.node(0).plan_epoch() == 2; }));
  moved = true;
  moved.notify_all();
  reader.join();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(ValuesOf(response), std::vector<float>({1 + static_cast<float>(far)}));
}

// Anyone may say that he is a peer, and has any version.
TEST(FleetNodeTest, AMadeUpRangeHoldsUpNoRequest) {
  TestFleet fleet(2);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  fleet.Write(fleet.MakePlan(1));
  fleet.StartAll();
  v1::LookupRequest made_up;
  made_up.set_asker("node-1");
  for (auto* each : {made_up.mutable_asker_versions()->mutable_oldest(),
                     made_up.mutable_asker_versions()->mutable_newest()}) {
    each->set_number(1'000'000'000'000'000'000);
    each->set_lineage(1);
  }
  const auto stub = fleet.Stub(0);
  for (int i = 0; i < 20; ++i) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    v1::LookupResponse beat;
    ASSERT_TRUE(stub->Lookup(&context, made_up, &beat).ok());
    v1::ReadResponse response;
    const auto begun = std::chrono::steady_clock::now();
    const grpc::Status read = fleet.Read(0, {fleet.KeyOf(0), fleet.KeyOf(1)}, &response);
    EXPECT_TRUE(read.ok()) << read.error_message();
    EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(5));
  }
  EXPECT_FALSE(fleet.node(0).IsBehindPeers());
}

TEST(FleetNodeTest, TheCallersDeadlineHoldsForAllOwners) {
  TestFleet fleet(4, /*bucket_bits=*/4);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  std::atomic<bool> over{false};
  const auto hang = [&](const v1::LookupRequest& request, v1::LookupResponse*) {
    if (!request.parts().empty()) over.wait(false);
    return grpc::Status::OK;
  };
  TestPeer silent(1, hang);
  TestPeer silent_too(1, hang);
  // However the test ends: a peer waits for its calls before it goes.
  const auto release = [&over](const void*) {
    over = true;
    over.notify_all();
  };
  const std::unique_ptr<const void, decltype(release)> released(&over, release);
  fleet.SetAddress(1, silent.address());
  fleet.SetAddress(2, silent_too.address());
  std::map<uint32_t, TestAssignment> owners = {{1, {{1, 2}}}};
  for (uint32_t bucket = 2; bucket < 16; ++bucket) owners[bucket] = {{1, 2, 3}};
  fleet.Write(fleet.MakePlan(1, owners));
  fleet.Start(0, fleet.Options(0));
  fleet.Start(3, fleet.Options(3));
  ASSERT_TRUE(Await([&] { return fleet.node(0).fleet_stats().peers_alive == 3; }));
  // Each bucket has an order of its own.
  uint32_t bucket = 2;
  while (fleet.PeersOf(0, fleet.KeyOf(bucket)).back() != fleet.address(3)) ++bucket;
  // The caller's deadline is twenty times peer_timeout: the first owner gets almost half of it, the
  // second half of the rest, and the third answers.
  const std::chrono::milliseconds timeout{2000};
  const auto timed = [&](uint64_t key, grpc::StatusCode* code) {
    v1::ReadResponse response;
    const auto begun = std::chrono::steady_clock::now();
    *code = fleet.Read(0, {key}, &response, timeout).error_code();
    return std::chrono::steady_clock::now() - begun;
  };
  grpc::StatusCode code{};
  EXPECT_TRUE(Await([&] {
    const uint64_t before = fleet.node(0).fleet_stats().next_owners;
    EXPECT_GT(timed(fleet.KeyOf(bucket), &code), timeout / 2);
    // On a busy machine one may be counted as dead for a moment, and is not asked.
    return code == grpc::StatusCode::OK && fleet.node(0).fleet_stats().next_owners == before + 2;
  }));
  EXPECT_LT(timed(fleet.KeyOf(1), &code), timeout);
  EXPECT_EQ(code, grpc::StatusCode::UNAVAILABLE) << "it is told before its deadline";
}

TEST(FleetNodeTest, ADeadOwnerCostsOnlyTheRequestsThatNeedTooMuchOfIt) {
  TestFleet fleet(3);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  fleet.Write(fleet.MakePlan(1));
  NodeOptions options = fleet.Options(0);
  options.max_degraded_share = 0.25;
  fleet.Start(0, options);
  fleet.Start(1, fleet.Options(1));
  fleet.Start(2, fleet.Options(2));
  ASSERT_TRUE(Await([&] { return fleet.node(0).fleet_stats().peers_alive == 2; }));
  fleet.Stop(2);
  ASSERT_TRUE(Await([&] { return fleet.node(0).fleet_stats().peers_alive == 1; }));
  const Node& node = fleet.node(0);
  auto pinned = node.Pin();
  ASSERT_TRUE(pinned.ok());
  const auto key = [&](uint32_t bucket) { return static_cast<int64_t>(fleet.KeyOf(bucket)); };
  // Four requests, as of one execution; bucket 2 is the dead node's.
  const std::vector<std::vector<int64_t>> keys = {
      {key(0), key(1)}, {key(1), key(2), key(0)}, {key(1), key(2), key(0), key(3)}, {key(1)}};
  std::vector<std::vector<float>> out;
  std::vector<std::string> sources;
  std::vector<KeyBags> requests;
  for (const auto& each : keys) {
    out.emplace_back(each.size() * TestModel::kDim);
    sources.emplace_back(each.size(), '\0');
  }
  for (size_t r = 0; r < keys.size(); ++r) {
    requests.push_back({keys[r],
                        {},
                        out[r].data(),
                        TestModel::kDim,
                        reinterpret_cast<uint8_t*>(sources[r].data())});
  }
  const std::vector<BagFeature> features = {{0, Pooling::kSum, 0}};
  const RemoteLookupPtr remote = node.NewRemoteLookup();
  const Status status = node.Fetch(*pinned, features, requests, kNoDeadline, remote.get(), {});
  ASSERT_TRUE(status.ok()) << status.ToString();
  const std::vector<uint32_t> degraded = {0, 1, 1, 0};
  for (size_t r = 0; r < keys.size(); ++r) {
    EXPECT_EQ(Node::ResultOf(*remote, r).degraded_keys, degraded[r]) << r;
    EXPECT_EQ(Node::ResultOf(*remote, r).status.ok(), r != 1) << r;
  }
  EXPECT_EQ(
      Node::ResultOf(*remote, 1).status.ToString(),
      "UNAVAILABLE: no owner answers for 1 of 3 keys (1 dead), more than max_degraded_share = "
      "0.25 allows: try again in a second, or at another node");
  ASSERT_TRUE(BagReader(pinned->rows).Lookup(features, requests, {}).ok());
  const float unknown = -1;
  for (const size_t r : {0, 2, 3}) {
    for (size_t k = 0; k < keys[r].size(); ++k) {
      const bool dead = keys[r][k] == key(2);
      const float value = dead ? unknown : 1 + static_cast<float>(keys[r][k]);
      EXPECT_EQ(out[r][k * TestModel::kDim], value);
      EXPECT_EQ(sources[r][k] == static_cast<char>(Source::kUnanswered), dead);
    }
  }
  const auto counters = fleet.Status(0).counters();
  EXPECT_EQ(counters.at("degraded_keys_dead"), 2U);
  EXPECT_EQ(counters.at("degraded_keys_version"), 0U);
  EXPECT_EQ(counters.at("lookups_unanswered"), 2U);
}

TEST(FleetNodeTest, WhyAnOwnerDidNotAnswerIsCounted) {
  struct Case {
    grpc::StatusCode code;
    NoAnswer why;
  };
  for (const Case& each : {Case{grpc::StatusCode::UNAVAILABLE, NoAnswer::kDead},
                           {grpc::StatusCode::DEADLINE_EXCEEDED, NoAnswer::kDeadline},
                           {grpc::StatusCode::RESOURCE_EXHAUSTED, NoAnswer::kOverload},
                           {grpc::StatusCode::UNAUTHENTICATED, NoAnswer::kRefused},
                           {grpc::StatusCode::DATA_LOSS, NoAnswer::kRefused}}) {
    TestFleet fleet(2);
    fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
    TestPeer peer(1, [&](const v1::LookupRequest& request, v1::LookupResponse*) {
      return request.parts().empty() ? grpc::Status::OK : grpc::Status(each.code, "as it says");
    });
    fleet.SetAddress(1, peer.address());
    fleet.Write(fleet.MakePlan(1));
    fleet.Start(0, fleet.Options(0));
    ASSERT_TRUE(Await([&] { return fleet.node(0).fleet_stats().peers_alive == 1; }));
    v1::ReadResponse response;
    EXPECT_EQ(fleet.Read(0, {fleet.KeyOf(1)}, &response).error_code(),
              grpc::StatusCode::UNAVAILABLE);
    const auto& by_reason = fleet.node(0).fleet_stats().degraded_keys;
    for (size_t n = 0; n < kNoAnswers; ++n) {
      EXPECT_EQ(by_reason[n], static_cast<NoAnswer>(n) == each.why ? 1U : 0U)
          << kNoAnswerNames[n] << " of " << each.code;
    }
  }
}

TEST(FleetNodeTest, ACopyThatAMoveLeftBehindIsFreedWithoutFurtherVersions) {
  TestFleet fleet(1, /*bucket_bits=*/1, /*devices=*/2);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(1000, 1));
  fleet.model.WriteDelta({2, 1}, {1, 1}, {{0, 7}});
  fleet.Write(fleet.MakePlan(1));
  fleet.StartAll();
  const ServingStore& store = fleet.node(0).store();
  const uint64_t rows = store.Stats().rows;
  const auto rows_on = [&](uint32_t device) { return store.UsageOf(0, device).ddr_rows; };
  const auto both = [&] { return rows_on(0) + rows_on(1); };
  for (uint64_t epoch = 2; epoch < 5; ++epoch) {
    v1::Plan plan = fleet.MakePlan(epoch);
    const auto device = static_cast<uint32_t>(epoch % 2 == 0 ? 1 : 0);
    plan.mutable_assignments(0)->mutable_owners(0)->set_device(device);
    fleet.Write(plan);
    // A move back is possible once the move before it is over.
    ASSERT_TRUE(Await([&] { return store.DeviceOf(0, 0) == device; })) << fleet.node(0).newest();
    ASSERT_TRUE(Await([&] { return store.Stats().rows == rows; }));
    ASSERT_TRUE(Await([&] { return both() <= rows + 1; })) << "its memory is given back";
  }
  v1::ReadResponse response;
  ASSERT_TRUE(fleet.Read(0, {0, 1, 2}, &response).ok());
  EXPECT_EQ(ValuesOf(response), std::vector<float>({7, 2, 3}));
  EXPECT_EQ(response.version().number(), 2U);
}

TEST(FleetNodeTest, ANodeWithoutRoomForABucketSaysSoAndGoesOnTakingVersions) {
  TestFleet fleet(2, /*bucket_bits=*/6);
  TestControl control;
  fleet.model.WriteSnapshot({1, 1}, ManyRows(60'000, 1));
  fleet.Write(fleet.MakePlan(1));
  fleet.Start(0, fleet.Options(0));
  NodeOptions options = fleet.Options(1);
  options.control = control.address();
  options.ddr_budget_bytes = 2ULL << 20;  // of which its own buckets take more than half
  fleet.Start(1, options);
  const auto last = [&] {
    const auto beats = control.beats();
    return beats.empty() ? v1::HeartbeatRequest() : beats.back();
  };
  ASSERT_TRUE(Await([&] { return last().held_epoch() == 1; }));
  EXPECT_FALSE(last().full());
  std::map<uint32_t, TestAssignment> joins;
  for (uint32_t b = 0; b < 64; b += 2) joins[b] = {{0}, {1}};
  fleet.Write(fleet.MakePlan(2, joins));
  ASSERT_TRUE(Await([&] { return last().full() && last().buckets_left() > 0; }));
  EXPECT_LT(last().held_epoch(), 2U);
  for (uint64_t version = 2; version < 12; ++version) {
    TestModel::Rows changed;
    for (uint64_t key = 0; key < 60; ++key) changed[7 * key] = static_cast<float>(version);
    fleet.model.WriteDelta({version, 1}, {version - 1, 1}, changed);
    ASSERT_TRUE(Await([&] { return fleet.node(1).newest()->number == version; }))
        << fleet.node(1).follower_error();
  }
  fleet.Write(fleet.MakePlan(3));
  EXPECT_TRUE(Await([&] { return last().held_epoch() == 3 && !last().full(); }));
}

TEST(FleetNodeTest, AStatusNamesTheAddressFromTheFirstOn) {
  for (int round = 0; round < 5; ++round) {
    TestFleet fleet(1);
    fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
    fleet.Write(fleet.MakePlan(1));
    std::atomic<bool> stop{false};
    std::thread caller([&] {
      const auto stub = fleet.Stub(0);
      while (!stop) {
        grpc::ClientContext context;
        context.set_wait_for_ready(true);
        context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
        v1::NodeServiceGetStatusResponse status;
        if (!stub->GetStatus(&context, {}, &status).ok()) continue;
        EXPECT_EQ(status.node().address(), fleet.address(0));
      }
    });
    fleet.StartAll();
    stop = true;
    caller.join();
  }
}

TEST(FleetNodeTest, StatusTellsWhatEachTierHolds) {
  TestFleet fleet(1);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(1000, 1));
  fleet.Write(fleet.MakePlan(1));
  fleet.StartAll();
  const auto status = fleet.Status(0);
  ASSERT_EQ(status.usage_size(), 1);
  const StoreStats stats = fleet.node(0).store().Stats();
  EXPECT_EQ(status.usage(0).tier(), v1::TIER_DDR);
  EXPECT_EQ(status.usage(0).rows(), 1000U);
  EXPECT_EQ(status.usage(0).payload_bytes(), stats.ddr_payload_bytes);
  EXPECT_GT(status.usage(0).index_bytes(), 1000U * 16);
}

TEST(FleetNodeTest, ASealIsBroughtInLineWithThePlan) {
  TestFleet fleet(2);
  constexpr uint64_t kKeys = 400;
  const std::string directory = fleet.model.path() + "-ssd";
  fleet.model.WriteSnapshot({1, 1}, ManyRows(kKeys, 1));
  fleet.Write(fleet.MakePlan(1));
  NodeOptions sealed = fleet.Options(1);
  sealed.ssd_budget_bytes = 8ULL << 20;
  sealed.ssd_directory = directory;
  sealed.ssd_seal_interval = std::chrono::milliseconds(1);
  fleet.Start(0, fleet.Options(0));
  fleet.Start(1, sealed);
  fleet.model.WriteDelta({2, 1}, {1, 1}, ManyRows(kKeys / 2, 100));
  ASSERT_TRUE(Await([&] { return fleet.node(1).store().Stats().seal.version == 2; }));
  fleet.Stop(1);
  // While it is away: bucket 1 leaves it, bucket 2 comes to it, and some rows change.
  fleet.Write(fleet.MakePlan(2, {{0, {{0}}}, {1, {{0}}}, {2, {{1}}}, {3, {{1}}}}));
  fleet.model.WriteDelta({3, 1}, {2, 1}, ManyRows(kKeys / 4, 1000));
  ASSERT_TRUE(Await([&] {
    const FleetStats stats = fleet.node(0).fleet_stats();
    return fleet.node(0).plan_epoch() == 2 && stats.buckets_held == 2 && stats.buckets_left == 0 &&
           fleet.node(0).newest()->number == 3;
  }));
  fleet.Start(1, sealed);
  EXPECT_TRUE(fleet.node(1).opened_from_seal()) << fleet.node(1).seal_refusal();
  const ServingStore& store = fleet.node(1).store();
  for (uint32_t b = 0; b < 4; ++b) EXPECT_EQ(store.HeldSince(0, b).has_value(), b >= 2) << b;
  std::vector<uint64_t> keys(kKeys);
  std::vector<float> expected(kKeys);
  for (uint64_t key = 0; key < kKeys; ++key) {
    keys[key] = key;
    const float base = key < kKeys / 4 ? 1000 : key < kKeys / 2 ? 100 : 1;
    expected[key] = base + static_cast<float>(key);
  }
  ASSERT_TRUE(Await([&] { return fleet.node(1).fleet_stats().peers_alive == 1; }));
  v1::ReadResponse response;
  const grpc::Status read = fleet.Read(1, keys, &response);
  ASSERT_TRUE(read.ok()) << read.error_message();
  EXPECT_EQ(ValuesOf(response), expected);
  EXPECT_TRUE(store.CheckIntegrity().ok());
  fleet.Stop(1);
  std::filesystem::remove_all(directory);
}

// --- tasks ---------------------------------------------------------------------------------------

v1::TaskHealth TaskOf(const TestFleet& fleet, uint32_t n, const std::string& name) {
  const v1::NodeServiceGetStatusResponse status = fleet.Status(n);
  for (const v1::TaskHealth& task : status.tasks()) {
    if (task.name() == name) return task;
  }
  return {};
}

std::atomic<const char*> faulty_task{nullptr};
void FailTask(const char* task, FaultPoint point) {
  const char* const faulty = faulty_task;
  if (faulty == nullptr || point != FaultPoint::kRound || std::string(task) != faulty) return;
  throw std::runtime_error("a fault on purpose");
}

// Each in turn: the node answers on, its status says what fails, and it heals.
TEST(FleetNodeTest, AnyTaskMayThrowAndTheNodeGoesOn) {
  TestFleet fleet(2);
  TestControl control;
  fleet.hot_rows_bytes = 1 << 20;
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  fleet.Write(fleet.MakePlan(1));
  NodeOptions options = fleet.Options(0);
  options.control = control.address();
  fleet.Start(0, options);
  fleet.Start(1, fleet.Options(1));
  SetFaultHook(FailTask);
  v1::ReadResponse response;
  for (const char* task :
       {"follower", "plan-keeper", "hot-rows", "upkeep", "readiness", "control-link"}) {
    faulty_task = task;
    // Beats of a busy machine may have failed before by themselves.
    EXPECT_TRUE(Await([&] {
      const v1::TaskHealth now = TaskOf(fleet, 0, task);
      return now.failures() >= 2 && now.state() == "failing" && now.error() == "a fault on purpose";
    })) << task;
    EXPECT_TRUE(Await([&] {
      return fleet.Read(0, {fleet.KeyOf(0), fleet.KeyOf(1)}, &response).ok();
    })) << task;
    faulty_task = nullptr;
    EXPECT_TRUE(Await([&] { return TaskOf(fleet, 0, task).state() == "running"; })) << task;
  }
  // Without beats its peers seem dead to it, for as long.
  faulty_task = "peers";
  EXPECT_TRUE(Await([&] { return TaskOf(fleet, 0, "peers").failures() >= 2; }));
  faulty_task = nullptr;
  EXPECT_TRUE(Await([&] { return fleet.Read(0, {fleet.KeyOf(1)}, &response).ok(); }));
  EXPECT_TRUE(Await([&] { return TaskOf(fleet, 0, "peers").state() == "running"; }));
  SetFaultHook(nullptr);
}

// gRPC goes on without a thread that it cannot start, and never tries again. Before, such a node
// was up, answered nobody and did not end.
TEST(FleetNodeTest, WithoutThreadsForGrpcANodeIsNotOpenedAndSaysWhy) {
  TestFleet fleet(1);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  fleet.Write(fleet.MakePlan(1));
  static int left = 3;
  SetFaultHook([](const char* task, FaultPoint point) {
    if (point != FaultPoint::kStart || std::string(task) != "gRPC") return;
    if (left-- == 0) throw std::system_error(EAGAIN, std::generic_category());
  });
  const auto refused = Node::Open(fleet.Options(0));
  SetFaultHook(nullptr);
  ASSERT_EQ(refused.status().code(), Code::kResourceExhausted);
  const std::string& said = refused.status().message();
  EXPECT_NE(said.find("threads, and 3 can be started: "), std::string::npos) << said;
  EXPECT_NE(said.find("raise the limit of threads"), std::string::npos) << said;
  fleet.Start(0, fleet.Options(0));
}

// Before: it dropped the connection to `state`, and the plan was never written.
TEST(FleetNodeTest, APlanThatCannotBeKeptIsActedByAndKeptLater) {
  TestFleet fleet(1);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  fleet.Write(fleet.MakePlan(1));
  NodeOptions options = fleet.Options(0);
  const std::filesystem::path folder = fleet.model.path() + "-plan";
  std::filesystem::remove_all(folder);
  std::ofstream(folder) << "a file where the folder should be";
  options.plan_file = folder / "plan.bin";
  fleet.Start(0, options);
  EXPECT_EQ(fleet.node(0).plan_epoch(), 1U);
  EXPECT_TRUE(Await([&] { return TaskOf(fleet, 0, "plan-keeper").state() == "failing"; }));
  EXPECT_NE(TaskOf(fleet, 0, "plan-keeper").error().find(folder), std::string::npos);
  fleet.Write(fleet.MakePlan(2));
  EXPECT_TRUE(Await([&] { return fleet.node(0).plan_epoch() == 2; }));
  std::filesystem::remove(folder);
  EXPECT_TRUE(Await([&] { return std::filesystem::exists(folder / "plan.bin"); }));
  EXPECT_TRUE(Await([&] { return TaskOf(fleet, 0, "plan-keeper").state() == "running"; }));
  fleet.Stop(0);
  std::filesystem::remove_all(folder);
}

TEST(FleetNodeTest, ANodeThatWaitsForItsPlanGivesUpWhenItIsToEnd) {
  TestFleet fleet(1);
  fleet.model.WriteSnapshot({1, 1}, ManyRows(50, 1));
  NodeOptions options = fleet.Options(0);
  std::stop_source stop;
  options.stop = stop.get_token();
  options.plan_wait = std::chrono::hours(1);
  std::thread ends([&] { stop.request_stop(); });
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_EQ(Node::Open(options).status().code(), Code::kUnavailable);
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(2));
  ends.join();
}

INSTANTIATE_TEST_SUITE_P(DTypes, FleetRowsTest, testing::Values(DType::kFp32, DType::kInt4),
                         [](const auto& each) { return std::string(DTypeName(each.param)); });

}  // namespace
}  // namespace embertide
