// A plan is read as it is meant, or refused by the rule that it breaks.
#include "node/routing.h"

#include <gtest/gtest.h>

namespace embertide {
namespace {

class RoutingTest : public ::testing::Test {
 protected:
  RoutingTest() {
    TableConfig table;
    table.name = "item";
    table.id = 7;
    table.layout = {2, 4, DType::kFp32};
    table.bucket_bits = 2;
    manifest_.tables = {table};
    plan_.set_epoch(3);
    v1::PlannedTable* planned = plan_.add_tables();
    planned->set_id(7);
    planned->set_name("item");
    planned->set_bucket_bits(2);
    planned->set_chunks(2);
    for (const char* name : {"a", "b", "other-group"}) {
      v1::Node* node = plan_.mutable_topology()->add_nodes();
      node->set_name(name);
      node->set_address(std::string(name) + ":1");
      node->set_group(name[0] == 'o' ? 1 : 0);
      node->add_devices();
      node->add_devices()->set_index(1);
      for (v1::Device& device : *node->mutable_devices()) {
        v1::TierBudget* ddr = device.add_budgets();
        ddr->set_tier(v1::TIER_DDR);
        ddr->set_budget_bytes(1 << 20);
        v1::TierBudget* ssd = device.add_budgets();
        ssd->set_tier(v1::TIER_SSD);
        ssd->set_budget_bytes(device.index() == 0 ? 1 << 30 : 0);
      }
    }
    Assign(0, 2, {{0, 0}, {2, 0}});
    Assign(2, 2, {{1, 1}, {2, 1}});
  }
  v1::Assignment* Assign(uint32_t begin, uint32_t count,
                         const std::vector<std::pair<uint32_t, uint32_t>>& owners) {
    v1::Assignment* assignment = plan_.add_assignments();
    assignment->set_table_id(7);
    assignment->set_bucket_begin(begin);
    assignment->set_bucket_count(count);
    for (const auto& [node, device] : owners) Place(assignment->add_owners(), node, device);
    return assignment;
  }
  static void Place(v1::Owner* owner, uint32_t node, uint32_t device) {
    owner->set_node(node);
    owner->set_device(device);
  }
  void Share(uint32_t node, uint32_t device, uint64_t bytes, uint32_t table = 7,
             v1::Tier tier = v1::TIER_DDR) {
    v1::TierShare* share = plan_.add_tier_shares();
    Place(share->mutable_device(), node, device);
    share->set_tier(tier);
    share->set_table_id(table);
    share->set_bytes(bytes);
  }
  std::string Refusal() const {
    const auto made = MakeRouting(plan_, manifest_, "a");
    EXPECT_FALSE(made.ok());
    if (made.ok()) return "";
    EXPECT_EQ(made.status().code(), Code::kRejected);
    return made.status().message();
  }
  Manifest manifest_;
  v1::Plan plan_;
};

TEST_F(RoutingTest, ANodeHoldsWhatItOwnsJoinsOrLeavesAndAsksItsGroup) {
  v1::Assignment* third = plan_.mutable_assignments(1);
  Place(third->add_joining(), 0, 1);
  const auto made = MakeRouting(plan_, manifest_, "a");
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  const Routing& routing = *made.value();
  EXPECT_EQ(routing.epoch, 3U);
  ASSERT_EQ(routing.peers.size(), 2U);
  EXPECT_EQ(routing.peers[0].name, "b");
  EXPECT_FALSE(routing.peers[0].spare);
  EXPECT_EQ(routing.peers[1].name, "other-group");
  EXPECT_TRUE(routing.peers[1].spare);
  EXPECT_EQ(routing.buckets[0][0].device, 0);
  EXPECT_TRUE(routing.buckets[0][0].owners.empty());
  EXPECT_EQ(routing.buckets[0][2].device, 1) << "it joins there";
  EXPECT_EQ(routing.buckets[0][2].owners, (std::vector<uint16_t>{0, 1})) << "the own group first";

  third->clear_joining();
  Place(third->add_leaving(), 0, 0);
  EXPECT_EQ(MakeRouting(plan_, manifest_, "a").value()->buckets[0][3].device, 0) << "it leaves";
  EXPECT_EQ(MakeRouting(plan_, manifest_, "nobody").value()->buckets[0][3].device, -1);
}

TEST_F(RoutingTest, ABucketMovesBetweenDevicesWhenItJoins) {
  Place(plan_.mutable_assignments(0)->add_joining(), 0, 1);
  EXPECT_EQ(MakeRouting(plan_, manifest_, "a").value()->buckets[0][0].device, 1);
}

// It holds the bucket still; so does one that leaves by another device, and is asked once.
TEST_F(RoutingTest, NodesThatABucketLeavesAreAskedAfterTheOwnersOfTheGroup) {
  v1::Node* node = plan_.mutable_topology()->add_nodes();
  node->set_name("asker");
  node->set_address("asker:1");
  node->add_devices();
  v1::Assignment* first = plan_.mutable_assignments(0);  // owned by a, and by the other group
  Place(first->add_leaving(), 1, 0);
  Place(first->add_leaving(), 0, 1);
  Place(first->add_leaving(), 3, 0);
  const auto order = [&](const char* asker) {
    const auto made = MakeRouting(plan_, manifest_, asker);
    EXPECT_TRUE(made.ok()) << made.status().ToString();
    std::vector<std::string> names;
    for (const uint16_t peer : made.value()->buckets[0][0].owners) {
      names.push_back(made.value()->peers[peer].name);
    }
    return names;
  };
  EXPECT_EQ(order("asker"), (std::vector<std::string>{"a", "b", "other-group"}));
  EXPECT_EQ(order("a"), (std::vector<std::string>{"b", "asker"})) << "it owns it, and may not hold";
  EXPECT_EQ(order("other-group"), std::vector<std::string>{}) << "it owns it alone in its group";
}

// Each of three owners is asked first for a third of an asker's buckets; askers differ; and of an
// owner that is not there the others get a half each.
TEST_F(RoutingTest, OwnersShareTheBucketsOfEachAsker) {
  constexpr uint32_t kBits = 10;
  constexpr uint32_t kBuckets = 1U << kBits;
  plan_.mutable_tables(0)->set_bucket_bits(kBits);
  manifest_.tables[0].bucket_bits = kBits;
  plan_.clear_assignments();
  plan_.clear_topology();
  for (const char* name : {"one", "two", "three", "asker", "other"}) {
    v1::Node* node = plan_.mutable_topology()->add_nodes();
    node->set_name(name);
    node->set_address("host:1");
    node->add_devices();
  }
  Assign(0, kBuckets, {{0, 0}, {1, 0}, {2, 0}});
  const auto routing = MakeRouting(plan_, manifest_, "asker");
  const auto others = MakeRouting(plan_, manifest_, "other");
  ASSERT_TRUE(routing.ok()) << routing.status().ToString();
  std::map<uint16_t, uint32_t> first;
  std::map<std::pair<uint16_t, uint16_t>, uint32_t> second;
  uint32_t differ = 0;
  for (uint32_t b = 0; b < kBuckets; ++b) {
    const auto& owners = routing.value()->buckets[0][b].owners;
    ASSERT_EQ(owners.size(), 3U);
    ++first[owners[0]];
    ++second[{owners[0], owners[1]}];
    differ += others.value()->buckets[0][b].owners == owners ? 0 : 1;
  }
  for (const auto& [owner, count] : first) EXPECT_NEAR(count, kBuckets / 3, 50) << owner;
  for (const auto& [pair, count] : second) EXPECT_NEAR(count, kBuckets / 6, 40);
  EXPECT_GT(differ, kBuckets / 2);
}

// A partial group, which comes or goes, asks for each key in its own group if that owns the bucket,
// and then in the first whole group.
TEST_F(RoutingTest, APartialGroupAsksAWholeOneForWhatItLacks) {
  v1::Node* node = plan_.mutable_topology()->add_nodes();
  node->set_name("comes");
  node->set_address("comes:1");
  node->set_group(5);
  node->add_devices();
  node = plan_.mutable_topology()->add_nodes();
  *node = plan_.topology().nodes(3);
  node->set_name("comes-too");
  Place(plan_.mutable_assignments(0)->add_owners(), 4, 0);
  EXPECT_NE(Refusal().find("rule 3: group 5 does not own bucket 2"), std::string::npos);
  plan_.mutable_topology()->add_partial_groups(5);
  const auto made = MakeRouting(plan_, manifest_, "comes");
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  const auto names = [&](const std::vector<uint16_t>& owners) {
    std::vector<std::string> found;
    for (const uint16_t owner : owners) found.push_back(made.value()->peers[owner].name);
    return found;
  };
  EXPECT_EQ(names(made.value()->buckets[0][0].owners),
            (std::vector<std::string>{"comes-too", "a"}));
  EXPECT_EQ(names(made.value()->buckets[0][2].owners), std::vector<std::string>{"b"});
  EXPECT_FALSE(made.value()->buckets[0][0].owned);
  EXPECT_FALSE(IsWhole(plan_, 5));
  EXPECT_FALSE(IsWhole(plan_, 6)) << "it has no node";
  EXPECT_TRUE(IsWhole(plan_, 1));
  for (const Routing::Peer& peer : made.value()->peers) {
    EXPECT_FALSE(peer.spare) << peer.name << " has what a partial group lacks";
  }
  const auto of_whole = MakeRouting(plan_, manifest_, "a");
  for (const Routing::Peer& peer : of_whole.value()->peers) {
    EXPECT_NE(peer.name.substr(0, 5), "comes") << "a whole group asks no partial one";
  }

  // Group 0 leaves, and owns less and less: nobody asks it any more.
  plan_.mutable_topology()->clear_partial_groups();
  plan_.mutable_topology()->add_partial_groups(0);
  plan_.mutable_topology()->add_partial_groups(5);
  plan_.mutable_assignments(1)->mutable_owners()->DeleteSubrange(0, 1);
  const auto left = MakeRouting(plan_, manifest_, "comes");
  ASSERT_TRUE(left.ok()) << left.status().ToString();
  const auto& last = left.value()->buckets[0][2].owners;
  ASSERT_EQ(last.size(), 1U);
  EXPECT_EQ(left.value()->peers[last[0]].name, "other-group");
  const auto nobody = MakeRouting(plan_, manifest_, "nobody");
  ASSERT_EQ(nobody.value()->peers.size(), 1U) << "an unknown node asks the first whole group";
  EXPECT_EQ(nobody.value()->peers[0].name, "other-group");

  plan_.mutable_topology()->add_partial_groups(1);
  EXPECT_NE(Refusal().find("rule 3: no group owns every bucket"), std::string::npos);
  plan_.mutable_topology()->mutable_partial_groups()->RemoveLast();
  plan_.mutable_topology()->add_partial_groups(5);
  EXPECT_NE(Refusal().find("rule 3: partial group 5 is out of order"), std::string::npos);
  plan_.mutable_topology()->set_partial_groups(2, 7);
  EXPECT_NE(Refusal().find("rule 3: partial group 7 has no node"), std::string::npos);
}

// Twelve owners share an asker's buckets as three do, and 64 are read in bounded time.
TEST_F(RoutingTest, ManyOwnersShareTheBucketsOfEachAsker) {
  constexpr uint32_t kBits = 12;
  constexpr uint32_t kBuckets = 1U << kBits;
  constexpr uint32_t kOwners = 12;
  plan_.mutable_tables(0)->set_bucket_bits(kBits);
  manifest_.tables[0].bucket_bits = kBits;
  plan_.clear_assignments();
  plan_.clear_topology();
  for (uint32_t n = 0; n < 66; ++n) {
    v1::Node* node = plan_.mutable_topology()->add_nodes();
    node->set_name("node-" + std::to_string(n));
    node->set_address("host:1");
    node->add_devices();
  }
  v1::Assignment* assignment = Assign(0, kBuckets, {});
  for (uint32_t n = 0; n < kOwners; ++n) Place(assignment->add_owners(), n, 0);
  const auto routing = MakeRouting(plan_, manifest_, "node-65");
  ASSERT_TRUE(routing.ok()) << routing.status().ToString();
  std::map<uint16_t, uint32_t> first;
  for (const Routing::Bucket& bucket : routing.value()->buckets[0]) {
    ASSERT_EQ(bucket.owners.size(), kOwners);
    ASSERT_EQ(std::set(bucket.owners.begin(), bucket.owners.end()).size(), kOwners);
    ++first[bucket.owners[0]];
  }
  EXPECT_EQ(first.size(), kOwners);
  // A standard deviation is 18.
  for (const auto& [owner, count] : first) EXPECT_NEAR(count, kBuckets / kOwners, 72) << owner;

  for (uint32_t n = kOwners; n < 64; ++n) Place(assignment->add_owners(), n, 0);
  EXPECT_TRUE(MakeRouting(plan_, manifest_, "node-65").ok());
  Place(assignment->add_owners(), 64, 0);
  const auto refused = MakeRouting(plan_, manifest_, "node-65");
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("bucket 0 of table item has 65 owners; at most 64"),
            std::string::npos);
}

TEST_F(RoutingTest, BrokenRulesAreNamed) {
  const v1::Plan right = plan_;
  Assign(3, 1, {{0, 0}, {2, 0}});
  EXPECT_NE(Refusal().find("rule 1: bucket 3 of table item is assigned twice"), std::string::npos);
  plan_ = right;
  plan_.mutable_assignments(1)->set_bucket_count(1);
  EXPECT_NE(Refusal().find("rule 1: bucket 3 of table item has no assignment"), std::string::npos);
  plan_ = right;
  plan_.mutable_assignments(1)->set_bucket_count(9);
  EXPECT_NE(Refusal().find("has no buckets 2 to 11"), std::string::npos);
  plan_ = right;
  Place(plan_.mutable_assignments(0)->add_owners(), 1, 7);
  EXPECT_NE(Refusal().find("rule 2: node 1, device 7 is not in"), std::string::npos);
  plan_ = right;
  Place(plan_.mutable_assignments(0)->add_leaving(), 0, 0);
  EXPECT_NE(Refusal().find("rule 2: node 0, device 0 stands twice"), std::string::npos);
  plan_ = right;
  plan_.mutable_assignments(0)->mutable_owners()->RemoveLast();
  EXPECT_NE(Refusal().find("rule 3: group 1 does not own bucket 0"), std::string::npos);
  plan_ = right;
  plan_.mutable_assignments(0)->set_chunk_count(1);
  EXPECT_NE(Refusal().find("splits rows of table item by chunks"), std::string::npos);
  plan_ = right;
  plan_.add_hot_rows()->set_table_id(8);
  EXPECT_NE(Refusal().find("rule 5: hot rows of table 8, which"), std::string::npos);
  plan_ = right;
  for (int i = 0; i < 2; ++i) plan_.add_hot_rows()->set_table_id(7);
  EXPECT_NE(Refusal().find("rule 5: hot rows of table 7 stand twice"), std::string::npos);
  const auto refused_share = [&](auto... share) {
    plan_ = right;
    Share(share...);
    return Refusal();
  };
  EXPECT_NE(
      refused_share(0, 0, 1 << 20, 8).find("rule 6: the share of table 8 on node 0, device 0"),
      std::string::npos);
  EXPECT_NE(refused_share(0, 7, 1 << 20).find("a device that is not in"), std::string::npos);
  EXPECT_NE(refused_share(9, 0, 1 << 20).find("a device that is not in"), std::string::npos);
  EXPECT_NE(refused_share(0, 0, 1 << 20, 7, v1::TIER_SSD).find("is not of DDR"), std::string::npos);
  EXPECT_NE(refused_share(0, 0, 100).find("is 100 bytes; at least 65536"), std::string::npos);
  EXPECT_NE(refused_share(0, 1, 1 << 20).find("without an SSD tier"), std::string::npos);
  EXPECT_NE(refused_share(0, 0, (1 << 20) + 1).find("exceeds the DDR budget of 1048576 bytes"),
            std::string::npos);
  plan_ = right;
  for (int i = 0; i < 2; ++i) Share(0, 0, 1 << 19);
  EXPECT_NE(Refusal().find("stands twice"), std::string::npos);
  plan_ = right;
  plan_.mutable_tables(0)->set_bucket_bits(3);
  EXPECT_NE(Refusal().find("other tables: item differs"), std::string::npos);
}

TEST_F(RoutingTest, ANodeTakesTheSharesOfItsOwnDevices) {
  Share(0, 0, 1 << 19);
  Share(1, 0, 1 << 18);
  const auto made = MakeRouting(plan_, manifest_, "a");
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  ASSERT_EQ(made.value()->shares.size(), 1U);
  EXPECT_EQ(made.value()->shares[0].table, 0U);
  EXPECT_EQ(made.value()->shares[0].device, 0U);
  EXPECT_EQ(made.value()->shares[0].bytes, 1U << 19);
}

}  // namespace
}  // namespace embertide
