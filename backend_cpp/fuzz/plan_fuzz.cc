// Plans: one that is taken keeps the rules of plan.proto, checked here a second time.
//
//   input: [u8 node][Plan]
#include <algorithm>
#include <set>

#include "fuzz/fuzz.h"
#include "node/routing.h"

namespace embertide::fuzz {
namespace {

Manifest Model() {
  Manifest manifest;
  for (const uint32_t id : {0U, 3U}) {
    TableConfig table;
    table.name = "t" + std::to_string(id);
    table.id = id;
    table.layout = {2, 2, DType::kFp32};
    table.bucket_bits = 1 + id % 2;
    manifest.tables.push_back(table);
  }
  return manifest;
}

v1::Plan Example() {
  v1::Plan plan;
  plan.set_epoch(4);
  for (uint32_t n = 0; n < 4; ++n) {
    v1::Node* node = plan.mutable_topology()->add_nodes();
    node->set_name("node-" + std::to_string(n));
    node->set_address("host:1");
    node->set_group(n / 2);
    for (uint32_t d = 0; d < 2; ++d) node->add_devices()->set_index(d);
  }
  for (const TableConfig& table : Model().tables) {
    v1::PlannedTable* planned = plan.add_tables();
    planned->set_id(table.id);
    planned->set_name(table.name);
    planned->set_bucket_bits(table.bucket_bits);
    for (uint32_t half = 0; half < 2; ++half) {
      v1::Assignment* assignment = plan.add_assignments();
      assignment->set_table_id(table.id);
      assignment->set_bucket_begin(half * table.buckets() / 2);
      assignment->set_bucket_count(table.buckets() / 2);
      for (const uint32_t n : {half, 2 + half}) assignment->add_owners()->set_node(n);
      v1::Owner* joining = assignment->add_joining();
      joining->set_node(1 - half);
      joining->set_device(1);
    }
  }
  return plan;
}

v1::Plan WithPartialGroup() {
  v1::Plan plan = Example();
  v1::Node* node = plan.mutable_topology()->add_nodes();
  *node = plan.topology().nodes(0);
  node->set_name("node-4");
  node->set_group(2);
  plan.mutable_topology()->add_partial_groups(2);
  return plan;
}

// Each (table, bucket) in one assignment; its owners known, each once, of every whole group.
void CheckRules(const v1::Plan& plan, const Manifest& manifest) {
  std::set<uint32_t> groups;
  for (const v1::Node& node : plan.topology().nodes()) groups.insert(node.group());
  for (const uint32_t group : plan.topology().partial_groups()) {
    EMBERTIDE_CHECK(groups.erase(group) == 1);
  }
  EMBERTIDE_CHECK(!groups.empty());
  std::map<std::pair<uint32_t, uint64_t>, int> assigned;
  for (const v1::Assignment& assignment : plan.assignments()) {
    std::set<uint32_t> owning;
    std::set<std::pair<uint32_t, uint32_t>> places;
    for (const auto* owners :
         {&assignment.owners(), &assignment.joining(), &assignment.leaving()}) {
      for (const v1::Owner& owner : *owners) {
        EMBERTIDE_CHECK(owner.node() < static_cast<uint32_t>(plan.topology().nodes_size()));
        const v1::Node& node = plan.topology().nodes(static_cast<int>(owner.node()));
        EMBERTIDE_CHECK(owner.device() < static_cast<uint32_t>(node.devices_size()));
        EMBERTIDE_CHECK(places.emplace(owner.node(), owner.device()).second);
        if (owners == &assignment.owners()) owning.insert(node.group());
      }
    }
    EMBERTIDE_CHECK(std::ranges::includes(owning, groups));
    for (uint64_t b = 0; b < assignment.bucket_count(); ++b) {
      ++assigned[{assignment.table_id(), assignment.bucket_begin() + b}];
    }
  }
  size_t buckets = 0;
  for (const TableConfig& table : manifest.tables) {
    for (uint32_t b = 0; b < table.buckets(); ++b) EMBERTIDE_CHECK((assigned[{table.id, b}] == 1));
    buckets += table.buckets();
  }
  EMBERTIDE_CHECK(assigned.size() == buckets);
}

}  // namespace

std::vector<std::string> Seeds() {
  google::protobuf::SetLogHandler(nullptr);  // of strings that are no UTF-8
  return {Raw<uint8_t>(1) + Example().SerializeAsString(),
          Raw<uint8_t>(9) + Example().SerializeAsString(),
          Raw<uint8_t>(4) + WithPartialGroup().SerializeAsString()};
}

void Run(std::string_view input) {
  static const Manifest manifest = Model();
  const std::string self = "node-" + std::to_string(Take<uint8_t>(&input));
  v1::Plan plan;
  if (!plan.ParseFromArray(input.data(), static_cast<int>(input.size()))) return;
  const auto routing = MakeRouting(plan, manifest, self);
  if (!routing.ok()) {
    EMBERTIDE_CHECK(routing.status().code() == Code::kRejected);
    return;
  }
  CheckRules(plan, manifest);
  for (const auto& table : routing.value()->buckets) {
    for (const Routing::Bucket& bucket : table) {
      EMBERTIDE_CHECK(bucket.owned || !bucket.owners.empty());
      EMBERTIDE_CHECK(!bucket.owned || bucket.device >= 0);
      for (const uint16_t owner : bucket.owners) {
        EMBERTIDE_CHECK(owner < routing.value()->peers.size());
      }
    }
  }
}

}  // namespace embertide::fuzz
