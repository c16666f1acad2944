#include "node/plan_reader.h"

#include <gtest/gtest.h>

#include <chrono>

#include "bus/fake_redis.h"

namespace embertide {
namespace {

constexpr uint32_t kChunk = 4;  // buckets of a chunk

// A plan of 8 buckets over two nodes, in parts; each chunk is one run.
class PlanReaderTest : public ::testing::Test {
 protected:
  PlanReaderTest() {
    auto address = ParseRedisUrl(state_.url());
    EMBERTIDE_CHECK(address.ok());
    auto opened = RedisConnection::Open(*address, std::chrono::seconds(1));
    EMBERTIDE_CHECK(opened.ok());
    redis_ = std::move(*opened);
    v1::Plan machines;
    for (const char* name : {"node-0", "node-1"}) {
      machines.mutable_topology()->add_nodes()->set_name(name);
    }
    Put("chunk:machines:1", machines.SerializeAsString());
    PutChunk(0, 1, 0);
    PutChunk(1, 1, 0);
  }

  void Put(const std::string& key, const std::string& value) {
    state_.Set("c:{news}:" + key, value);
  }
  void PutChunk(uint32_t number, uint64_t epoch, uint32_t owner, uint32_t buckets = kChunk) {
    v1::PlanChunk chunk;
    chunk.add_holders()->add_owners()->set_node(owner);
    chunk.add_counts(buckets);
    chunk.add_which(0);
    Put("chunk:0." + std::to_string(number) + ":" + std::to_string(epoch),
        chunk.SerializeAsString());
  }
  // A plan whose chunks changed last in these epochs.
  void PutPlan(uint64_t epoch, std::initializer_list<uint64_t> epochs) {
    v1::Plan plan;
    plan.set_epoch(epoch);
    v1::PlannedTable* table = plan.add_tables();
    table->set_name("user");
    table->set_bucket_bits(3);
    plan.mutable_chunks()->set_chunk_buckets(kChunk);
    plan.mutable_chunks()->set_machines_epoch(1);
    for (const uint64_t each : epochs) plan.mutable_chunks()->add_epochs(each);
    Put("plan:" + std::to_string(epoch), plan.SerializeAsString());
    Put("epoch", std::to_string(epoch));
  }

  FakeRedis state_;
  std::unique_ptr<RedisConnection> redis_;
  PlanReader reader_{"news"};
};

TEST_F(PlanReaderTest, WithoutAPlanThereIsNone) {
  const auto plan = reader_.Read(redis_.get(), 0);
  ASSERT_TRUE(plan.ok());
  EXPECT_FALSE(plan.value().has_value());
}

TEST_F(PlanReaderTest, PartsMakeAWholePlan) {
  PutPlan(1, {1, 1});
  const auto plan = reader_.Read(redis_.get(), 0);
  ASSERT_TRUE(plan.ok()) << plan.status().ToString();
  ASSERT_TRUE(plan.value().has_value());
  EXPECT_FALSE(plan.value()->has_chunks());
  EXPECT_EQ(plan.value()->topology().nodes_size(), 2);
  ASSERT_EQ(plan.value()->assignments_size(), 2);
  EXPECT_EQ(plan.value()->assignments(1).bucket_begin(), kChunk);
  EXPECT_EQ(plan.value()->assignments(1).bucket_count(), kChunk);
  EXPECT_FALSE(reader_.Read(redis_.get(), 1).value().has_value());
}

TEST_F(PlanReaderTest, OnlyWhatChangedIsReadAgain) {
  PutPlan(1, {1, 1});
  ASSERT_TRUE(reader_.Read(redis_.get(), 0).ok());
  EXPECT_EQ(reader_.parts_read(), 3);
  PutChunk(1, 2, 1);
  PutPlan(2, {1, 2});
  const auto plan = reader_.Read(redis_.get(), 1);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(reader_.parts_read(), 4);
  EXPECT_EQ(plan.value()->assignments(0).owners(0).node(), 0);
  EXPECT_EQ(plan.value()->assignments(1).owners(0).node(), 1);
}

TEST_F(PlanReaderTest, APartThatWentIsLookedForAgain) {
  PutPlan(1, {1, 7});  // part 7 went: the plan has moved on
  const auto gone = reader_.Read(redis_.get(), 0);
  ASSERT_FALSE(gone.ok());
  EXPECT_EQ(gone.status().code(), Code::kNotFound);
  PutChunk(1, 8, 1);
  PutPlan(8, {1, 8});
  const auto plan = reader_.Read(redis_.get(), 0);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan.value()->epoch(), 8);
}

TEST_F(PlanReaderTest, WhatDoesNotFitIsRefused) {
  PutPlan(1, {1});
  EXPECT_EQ(reader_.Read(redis_.get(), 0).status().message(),
            "plan of epoch 1: it names 2 parts; its tables have 3");
  PutChunk(1, 2, 1, kChunk - 1);
  PutPlan(2, {1, 2});
  EXPECT_EQ(reader_.Read(redis_.get(), 0).status().message(),
            "plan of epoch 2: a chunk does not lay out buckets 4 to 7 of table 0");
  PutChunk(1, 3, 1, kChunk + 1);
  PutPlan(3, {1, 3});
  EXPECT_EQ(reader_.Read(redis_.get(), 0).status().code(), Code::kCorrupt);
}

}  // namespace
}  // namespace embertide
