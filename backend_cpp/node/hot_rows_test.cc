// Rows of peers that are read often are answered from copies, equal at every version, within their
// bounds; whatever fails, keys are asked for as ever.
#include "node/hot_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "node/test_fleet.h"

namespace embertide {
namespace {

class HotRowsTest : public testing::Test {
 protected:
  static constexpr uint64_t kKeys = 200;

  static float ValueOf(uint64_t key) { return 1 + static_cast<float>(key); }
  static TestModel::Rows Rows() {
    TestModel::Rows rows;
    for (uint64_t key = 0; key < kKeys; ++key) rows[key] = ValueOf(key);
    return rows;
  }
  // Keys of buckets of node 1, by the plan that Begin writes.
  std::vector<uint64_t> FarKeys(size_t count) const {
    std::vector<uint64_t> keys;
    for (uint64_t key = 0; keys.size() < count; ++key) {
      if (fleet.model.BucketOf(key) % 2 == 1) keys.push_back(key);
    }
    return keys;
  }
  v1::Plan Plan(uint64_t epoch, std::optional<uint32_t> rows) const {
    v1::Plan plan = fleet.MakePlan(epoch);
    if (rows) {
      v1::HotRows* hot = plan.add_hot_rows();
      hot->set_table_id(fleet.model.table().id);
      hot->set_rows(*rows);
    }
    return plan;
  }
  void Begin(std::optional<uint32_t> rows = std::nullopt, uint64_t bytes = 1 << 20) {
    fleet.hot_rows_bytes = bytes;
    fleet.model.WriteSnapshot({1, 1}, Rows());
    fleet.Write(Plan(1, rows));
    fleet.StartAll();
  }
  FleetStats Stats() { return fleet.node(0).fleet_stats(); }
  v1::ReadResponse Read(const std::vector<uint64_t>& keys) {
    v1::ReadResponse response;
    EXPECT_TRUE(fleet.Read(0, keys, &response).ok());
    return response;
  }
  static bool AllHot(const v1::ReadResponse& response) {
    return std::ranges::all_of(response.sources(), [](char source) {
      return static_cast<Source>(source) == Source::kHot;
    });
  }
  // Reads the keys until all of them come from copies.
  bool MakeHot(const std::vector<uint64_t>& keys) {
    return Await([&] { return AllHot(Read(keys)); });
  }
  static void ExpectValues(const v1::ReadResponse& response, const std::vector<float>& values) {
    ASSERT_EQ(response.embeddings_size(), static_cast<int>(values.size() * TestModel::kDim));
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(response.embeddings(static_cast<int>(i * TestModel::kDim)), values[i]) << i;
    }
  }

  TestFleet fleet{2};
};

TEST_F(HotRowsTest, WhatIsReadOftenIsAskedForOnce) {
  Begin();
  const std::vector<uint64_t> keys = FarKeys(5);
  ExpectValues(Read(keys), {ValueOf(keys[0]), ValueOf(keys[1]), ValueOf(keys[2]), ValueOf(keys[3]),
                            ValueOf(keys[4])});
  ASSERT_TRUE(MakeHot(keys));
  const uint64_t asked = Stats().remote_keys;
  const uint64_t hot = Stats().hot_reads;
  for (int i = 0; i < 10; ++i) {
    const v1::ReadResponse response = Read(keys);
    EXPECT_TRUE(AllHot(response));
    ExpectValues(response, {ValueOf(keys[0]), ValueOf(keys[1]), ValueOf(keys[2]), ValueOf(keys[3]),
                            ValueOf(keys[4])});
  }
  EXPECT_EQ(Stats().remote_keys, asked);
  EXPECT_EQ(Stats().hot_reads, hot + 50);
  EXPECT_EQ(Stats().hot_rows, 5U);
}

TEST_F(HotRowsTest, AKeyWithoutARowIsKeptAsOne) {
  Begin();
  const uint64_t unknown = fleet.KeyOf(1, 1000);
  ASSERT_TRUE(Await([&] {
    const v1::ReadResponse response = Read({unknown});
    EXPECT_EQ(static_cast<Source>(response.sources()[0]), Source::kDefault);
    ExpectValues(response, {-1});
    return Stats().hot_reads > 0;
  }));
  fleet.model.WriteDelta({2, 1}, {1, 1}, {{unknown, 7}});
  ASSERT_TRUE(Await([&] { return Read({unknown}).version().number() == 2; }));
  ExpectValues(Read({unknown}), {7});
}

// A version changes one of two rows: both are copies again without a request that asks for them.
TEST_F(HotRowsTest, AVersionIsFollowedWithoutBeingAskedFor) {
  Begin();
  const std::vector<uint64_t> keys = FarKeys(2);
  ASSERT_TRUE(MakeHot(keys));
  fleet.model.WriteDelta({2, 1}, {1, 1}, {{keys[0], 99}});
  ASSERT_TRUE(Await([&] { return Stats().hot_changed == 1 && Stats().hot_unchanged == 1; }));
  const uint64_t asked = Stats().remote_keys;
  v1::ReadResponse response;
  ASSERT_TRUE(Await([&] {
    response = Read(keys);
    return response.version().number() == 2;
  }));
  EXPECT_TRUE(AllHot(response));
  ExpectValues(response, {99, ValueOf(keys[1])});
  EXPECT_EQ(Stats().remote_keys, asked);
}

// Many versions, each of which changes some rows: no answer is of another version than it says.
TEST_F(HotRowsTest, AnswersAreEqualAtEveryVersion) {
  Begin();
  const std::vector<uint64_t> keys = FarKeys(20);
  std::map<uint64_t, std::map<uint64_t, float>> at;  // version -> key -> value
  for (const uint64_t key : keys) at[1][key] = ValueOf(key);
  ASSERT_TRUE(MakeHot(keys));
  uint64_t hot = 0;
  for (uint64_t version = 2; version < 20; ++version) {
    TestModel::Rows changed;
    for (size_t k = 0; k < keys.size(); ++k) {
      if ((k + version) % 5 == 0) changed[keys[k]] = static_cast<float>(1000 * version + k);
    }
    at[version] = at[version - 1];
    for (const auto& [key, value] : changed) at[version][key] = value;
    fleet.model.WriteDelta({version, 1}, {version - 1, 1}, changed);
    // Through the moments at which one node has it and the other has not, or nobody has asked yet.
    for (int after = 0; after < 20;) {
      const v1::ReadResponse response = Read(keys);
      if (response.version().number() == version) ++after;
      std::vector<float> expected;
      for (const uint64_t key : keys) expected.push_back(at[response.version().number()][key]);
      ExpectValues(response, expected);
      hot += static_cast<uint64_t>(
          std::ranges::count(response.sources(), static_cast<char>(Source::kHot)));
    }
  }
  EXPECT_GT(hot, 18 * 20 * 20 * 3 / 4) << "most of them";
}

TEST_F(HotRowsTest, RowsThatNobodyReadsAreNotFollowed) {
  Begin();
  const std::vector<uint64_t> keys = FarKeys(3);
  ASSERT_TRUE(MakeHot(keys));
  uint64_t version = 1;
  const auto next = [&] {
    fleet.model.WriteDelta({version + 1, 1}, {version, 1}, {{fleet.KeyOf(0), 5}});
    ++version;
    ASSERT_TRUE(Await([&] { return fleet.node(0).newest()->number == version; }));
  };
  for (int i = 0; i < 4; ++i) {
    next();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
  const uint64_t before = Stats().hot_unchanged;
  EXPECT_LE(before, 6U) << "two versions, three rows";
  next();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(Stats().hot_unchanged, before);
  EXPECT_TRUE(MakeHot(keys)) << "who is read again is followed again";
}

TEST_F(HotRowsTest, KeysOfBagsEnterToo) {
  Begin();
  const std::vector<uint64_t> keys = FarKeys(4);
  const std::vector<std::vector<uint64_t>> bags = {{keys[0], keys[1], keys[2]}, {keys[3], 0, 1}};
  float sums[2] = {};
  for (int b = 0; b < 2; ++b) {
    for (const uint64_t key : bags[static_cast<size_t>(b)]) sums[b] += ValueOf(key);
  }
  v1::ReadResponse response;
  ASSERT_TRUE(Await([&] {
    EXPECT_TRUE(fleet.ReadBags(0, bags, &response).ok());
    ExpectValues(response, {sums[0], sums[1]});
    return std::ranges::count(response.sources(), static_cast<char>(Source::kRemote)) == 0;
  }));
  EXPECT_GE(std::ranges::count(response.sources(), static_cast<char>(Source::kHot)), 4);
}

TEST_F(HotRowsTest, ATableKeepsAsManyRowsAsThePlanSays) {
  Begin(8);
  const std::vector<uint64_t> keys = FarKeys(50);
  for (int i = 0; i < 100; ++i) Read(keys);
  ASSERT_TRUE(Await([&] {
    Read(keys);
    return Stats().hot_rows == 8;
  }));
  EXPECT_LE(Stats().hot_bytes, 1U << 20);
  // A new plan may give more, and take all.
  fleet.Write(Plan(2, 40));
  EXPECT_TRUE(Await([&] {
    Read(keys);
    return Stats().hot_rows > 30;
  }));
  fleet.Write(Plan(3, 0));
  EXPECT_TRUE(Await([&] {
    Read(keys);
    return Stats().hot_rows == 0 && Stats().hot_bytes == 0;
  }));
  const uint64_t hot = Stats().hot_reads;
  Read(keys);
  EXPECT_EQ(Stats().hot_reads, hot);
}

TEST_F(HotRowsTest, APlanThatAsksForMoreThanItsBytesGetsWhatFits) {
  Begin(1'000'000, 200 << 10);
  const std::vector<uint64_t> keys = FarKeys(50);
  ASSERT_TRUE(MakeHot(keys));
  EXPECT_EQ(Stats().hot_clipped, 1U);
  EXPECT_LE(Stats().hot_bytes, 200U << 10);
}

TEST_F(HotRowsTest, NoBytesKeepNothing) {
  Begin(std::nullopt, 0);
  const std::vector<uint64_t> keys = FarKeys(5);
  for (int i = 0; i < 20; ++i) {
    const v1::ReadResponse response = Read(keys);
    for (const char source : response.sources()) {
      EXPECT_EQ(static_cast<Source>(source), Source::kRemote);
    }
  }
  EXPECT_EQ(Stats().hot_rows, 0U);
  EXPECT_EQ(Stats().hot_dropped, 0U);
}

// An owner that is gone takes no copy with it, at the versions that it has proved.
TEST_F(HotRowsTest, CopiesAnswerForAnOwnerThatDied) {
  Begin();
  const std::vector<uint64_t> keys = FarKeys(3);
  ASSERT_TRUE(MakeHot(keys));
  fleet.Stop(1);
  ASSERT_TRUE(Await([&] { return Stats().peers_alive == 0; }));
  const v1::ReadResponse response = Read(keys);
  EXPECT_TRUE(AllHot(response));
  ExpectValues(response, {ValueOf(keys[0]), ValueOf(keys[1]), ValueOf(keys[2])});
  fleet.model.WriteDelta({2, 1}, {1, 1}, {{keys[0], 99}});
  ASSERT_TRUE(Await([&] { return fleet.node(0).newest()->number == 2; }));
  v1::ReadResponse none;
  EXPECT_FALSE(fleet.Read(0, keys, &none).ok()) << "nobody can say what they are at version 2";
}

TEST_F(HotRowsTest, ABucketThatComesHereTakesItsCopiesAway) {
  Begin();
  const std::vector<uint64_t> keys = FarKeys(30);
  ASSERT_TRUE(MakeHot(keys));
  fleet.Write(fleet.MakePlan(2, {{1, {{0, 1}}}, {3, {{0, 1}}}}));
  ASSERT_TRUE(Await([&] {
    const v1::ReadResponse response = Read(keys);
    return std::ranges::all_of(response.sources(), [](char source) {
      return static_cast<Source>(source) == Source::kDdr;
    });
  }));
  fleet.model.WriteDelta({2, 1}, {1, 1}, {{keys[0], 99}});
  ASSERT_TRUE(Await([&] { return Stats().hot_rows == 0; }));
}

// A version that waits for the guard is not served: copies stay what they are until it is.
TEST_F(HotRowsTest, WithAGuardCopiesAreOfTheVersionThatIsServed) {
  fleet.hot_rows_bytes = 1 << 20;
  fleet.model.WriteSnapshot({1, 1}, Rows());
  fleet.model.WritePromotion(1, 1);
  fleet.Write(Plan(1, std::nullopt));
  for (uint32_t n = 0; n < 2; ++n) {
    NodeOptions options = fleet.Options(n);
    options.guard = true;
    fleet.Start(n, options);
  }
  ASSERT_TRUE(Await([&] { return Stats().peers_alive == 1; }));
  const std::vector<uint64_t> keys = FarKeys(2);
  ASSERT_TRUE(MakeHot(keys));
  fleet.model.WriteDelta({2, 1}, {1, 1}, {{keys[0], 99}});
  for (uint32_t n = 0; n < 2; ++n) {
    ASSERT_TRUE(Await([&] { return fleet.node(n).newest()->number == 2; }));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  v1::ReadResponse response = Read(keys);
  EXPECT_EQ(response.version().number(), 1U);
  EXPECT_TRUE(AllHot(response));
  ExpectValues(response, {ValueOf(keys[0]), ValueOf(keys[1])});
  fleet.model.WritePromotion(2, 2);
  ASSERT_TRUE(Await([&] {
    response = Read(keys);
    return response.version().number() == 2 && AllHot(response);
  }));
  ExpectValues(response, {99, ValueOf(keys[1])});
}

TEST_F(HotRowsTest, LoadTellsWhoAskedForWhat) {
  Begin(0);  // no copies at first
  const std::vector<uint64_t> keys = FarKeys(8);
  const auto sum = [](const v1::NodeServiceGetLoadResponse& load, bool held, const auto& field) {
    uint64_t total = 0;
    for (const v1::BucketLoad& bucket : load.buckets()) {
      if (bucket.held() == held) total += field(bucket);
    }
    return total;
  };
  const auto asked = [](const v1::BucketLoad& b) { return b.asked(); };
  const auto hot = [](const v1::BucketLoad& b) { return b.hot_reads(); };
  const auto reads = [](const v1::BucketLoad& b) { return b.reads(); };
  const auto for_peers = [](const v1::BucketLoad& b) { return b.peer_reads(); };
  ASSERT_TRUE(Await([&] {
    for (int i = 0; i < 50; ++i) Read(keys);
    const auto here = fleet.Load(0);
    const auto there = fleet.Load(1);
    return sum(here, false, asked) > 1000 && sum(there, true, for_peers) > 1000;
  }));
  EXPECT_EQ(sum(fleet.Load(0), false, reads), 0U);
  EXPECT_EQ(sum(fleet.Load(0), false, hot), 0U);
  const auto there = fleet.Load(1);
  EXPECT_EQ(sum(there, true, for_peers), sum(there, true, reads));
  EXPECT_FALSE(fleet.Load(0).hot_keys().empty()) << "also of keys that are not here";
  const auto traffic = fleet.Load(0).peers();
  ASSERT_EQ(traffic.size(), 1);
  EXPECT_EQ(traffic[0].node(), "node-1");
  EXPECT_GT(traffic[0].calls(), 0U);
  EXPECT_GT(traffic[0].round_trip_us(), 0U);
  ASSERT_EQ(traffic[0].tables_size(), 1);
  EXPECT_EQ(traffic[0].tables(0).keys(), Stats().remote_keys);
  EXPECT_GT(traffic[0].tables(0).bytes(), 8 * Stats().remote_keys);
  fleet.Write(Plan(2, 100));
  EXPECT_TRUE(Await([&] {
    for (int i = 0; i < 50; ++i) Read(keys);
    return sum(fleet.Load(0), false, hot) > 1000;
  }));
}

// --- what an owner says of a version -------------------------------------------------------------

class SinceTest : public HotRowsTest {
 protected:
  grpc::Status Ask(uint64_t version, uint64_t since, v1::LookupResponse* response,
                   const std::vector<uint64_t>& keys,
                   v1::PartPooling pooling = v1::PART_POOLING_ROWS) {
    v1::LookupRequest request;
    v1::LookupPart* part = request.add_parts();
    part->mutable_version()->set_number(version);
    part->mutable_version()->set_lineage(1);
    part->set_pooling(pooling);
    part->mutable_since()->set_number(since);
    part->mutable_since()->set_lineage(1);
    for (const uint64_t key : keys) part->add_keys(key);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    return fleet.Stub(1)->Lookup(&context, request, response);
  }
  static std::vector<int> SourcesOf(const v1::LookupResponse& response) {
    std::vector<int> sources;
    for (const char each : response.results(0).sources()) {
      sources.push_back(static_cast<uint8_t>(each));
    }
    return sources;
  }
  void Versions(uint64_t last) {
    for (uint64_t version = 2; version <= last; ++version) {
      fleet.model.WriteDelta({version, 1}, {version - 1, 1},
                             {{far[version % far.size()], static_cast<float>(100 * version)}});
    }
    ASSERT_TRUE(Await([&] { return fleet.node(1).newest()->number == last; }));
  }
  void SetUp() override {
    Begin();
    far = FarKeys(4);
  }
  static constexpr int kDdr = static_cast<int>(Source::kDdr);
  static constexpr int kSame = kUnchangedSource;
  std::vector<uint64_t> far;
};

TEST_F(SinceTest, OnlyWhatChangedIsSent) {
  Versions(4);  // far[2], far[3], far[0]
  v1::LookupResponse response;
  const auto ask = [&](uint64_t version, uint64_t since) {
    EXPECT_TRUE(Ask(version, since, &response, far).ok());
    return SourcesOf(response);
  };
  EXPECT_EQ(ask(4, 3), (std::vector<int>{kDdr, kSame, kSame, kSame}));
  EXPECT_EQ(ask(4, 2), (std::vector<int>{kDdr, kSame, kSame, kDdr}));
  EXPECT_EQ(ask(3, 2), (std::vector<int>{kSame, kSame, kSame, kDdr}));
  EXPECT_EQ(ask(4, 1), (std::vector<int>{kDdr, kSame, kDdr, kDdr}));
  const RowLayout& layout = fleet.model.table().layout;
  EXPECT_EQ(response.results(0).rows().size(),
            3 * (kRecordHeaderBytes + layout.PayloadBytes(layout.full_mask())));
}

TEST_F(SinceTest, OfAVersionThatIsGoneAllIsSent) {
  Versions(30);
  v1::LookupResponse response;
  ASSERT_TRUE(Ask(30, 5, &response, far).ok());
  EXPECT_EQ(SourcesOf(response), (std::vector<int>{kDdr, kDdr, kDdr, kDdr}));
}

// A bucket that came after `since` may hold rows that changed in between.
TEST_F(SinceTest, OfABucketThatCameLaterAllIsSent) {
  Versions(2);
  const uint64_t near = fleet.KeyOf(0);
  fleet.Write(fleet.MakePlan(2, {{0, {{0, 1}}}}));
  v1::LookupResponse response;
  ASSERT_TRUE(Await([&] {
    EXPECT_TRUE(Ask(2, 1, &response, {near}).ok());
    return response.results(0).refusal() == v1::LOOKUP_REFUSAL_UNSPECIFIED;
  }));
  EXPECT_EQ(SourcesOf(response), (std::vector<int>{kDdr}));
}

TEST_F(SinceTest, WhatCannotBeIsRefused) {
  Versions(3);
  v1::LookupResponse response;
  for (const uint64_t since : {0, 3, 4}) {
    EXPECT_EQ(Ask(3, since, &response, far).error_code(), grpc::StatusCode::INVALID_ARGUMENT)
        << since;
  }
  EXPECT_EQ(Ask(3, 2, &response, far, v1::PART_POOLING_SUM).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

}  // namespace
}  // namespace embertide
