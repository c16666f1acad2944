// Proving and reading plans.
#include "node/routing.h"

#include <algorithm>
#include <map>
#include <ranges>
#include <set>
#include <span>

#include "embertide/hash.h"

namespace embertide {
namespace {

using Place = std::pair<uint32_t, uint32_t>;  // node, device

// The bound on the owners of an assignment, as in plan.proto.
constexpr int kMaxOwners = 64;

// FNV-1a: the same in every build, as all askers need not agree but one asker must with itself.
uint64_t HashName(const std::string& name) {
  uint64_t hash = 0xCBF29CE484222325ULL;
  for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001B3ULL;
  return hash;
}

class Reader {
 public:
  Reader(const v1::Plan& plan, const Manifest& manifest, const std::string& node)
      : plan_(plan),
        manifest_(manifest),
        self_hash_(HashName(node)),
        routing_(std::make_shared<Routing>()) {
    for (int n = 0; n < plan.topology().nodes_size(); ++n) {
      if (plan.topology().nodes(n).name() == node) self_ = n;
    }
    partial_.insert(plan.topology().partial_groups().begin(),
                    plan.topology().partial_groups().end());
    for (const v1::Node& each : plan.topology().nodes()) {
      if (!partial_.contains(each.group())) whole_.insert(each.group());
    }
    const uint32_t first = whole_.empty() ? 0 : *whole_.begin();
    group_ = self_ < 0 ? first : plan.topology().nodes(self_).group();
    const auto next = whole_.upper_bound(group_);
    other_ = partial_.contains(group_) || next == whole_.end() ? first : *next;
  }

  Result<std::shared_ptr<const Routing>> Read() {
    routing_->epoch = plan_.epoch();
    routing_->plan = plan_;
    if (plan_.epoch() == 0) return Refuse("its epoch is 0");
    EMBERTIDE_RETURN_IF_ERROR(CheckGroups());
    ReadPeers();
    EMBERTIDE_RETURN_IF_ERROR(CheckTables());
    std::map<uint32_t, size_t> tables;
    for (size_t t = 0; t < manifest_.tables.size(); ++t) {
      routing_->buckets.emplace_back(manifest_.tables[t].buckets());
      assigned_.emplace_back(manifest_.tables[t].buckets(), false);
      tables[manifest_.tables[t].id] = t;
    }
    for (const v1::Assignment& assignment : plan_.assignments()) {
      const auto table = tables.find(assignment.table_id());
      if (table == tables.end()) {
        return Refuse("rule 1: table " + std::to_string(assignment.table_id()) + " is not served");
      }
      EMBERTIDE_RETURN_IF_ERROR(ReadAssignment(assignment, table->second));
    }
    std::set<uint32_t> hot;
    for (const v1::HotRows& each : plan_.hot_rows()) {
      const std::string name = "rule 5: hot rows of table " + std::to_string(each.table_id());
      if (!tables.contains(each.table_id())) return Refuse(name + ", which is not served");
      if (!hot.insert(each.table_id()).second) return Refuse(name + " stand twice");
    }
    EMBERTIDE_RETURN_IF_ERROR(ReadShares(tables));
    for (size_t t = 0; t < assigned_.size(); ++t) {
      for (size_t b = 0; b < assigned_[t].size(); ++b) {
        if (!assigned_[t][b]) return Refuse("rule 1: " + Name(t, b) + " has no assignment");
      }
    }
    for (const auto& table : routing_->buckets) {
      routing_->all_owned.push_back(std::ranges::all_of(table, &Routing::Bucket::owned));
    }
    return std::shared_ptr<const Routing>(routing_);
  }

 private:
  Status Refuse(const std::string& why) const {
    return {Code::kRejected, "plan of epoch " + std::to_string(plan_.epoch()) + ": " + why};
  }
  std::string Name(size_t table, size_t bucket) const {
    return "bucket " + std::to_string(bucket) + " of table " + manifest_.tables[table].name;
  }

  Status CheckGroups() const {
    if (whole_.empty()) return Refuse("rule 3: no group owns every bucket");
    std::set<uint32_t> known;
    for (const v1::Node& node : plan_.topology().nodes()) known.insert(node.group());
    uint64_t least = 0;
    for (const uint32_t group : plan_.topology().partial_groups()) {
      const std::string name = "rule 3: partial group " + std::to_string(group);
      if (group < least) return Refuse(name + " is out of order");
      if (!known.contains(group)) return Refuse(name + " has no node");
      least = uint64_t{group} + 1;
    }
    return Status::Ok();
  }

  void ReadPeers() {
    const bool lacks = partial_.contains(group_);  // so that the other group's are no spare ones
    for (int n = 0; n < plan_.topology().nodes_size(); ++n) {
      const v1::Node& node = plan_.topology().nodes(n);
      if (n == self_ || (node.group() != group_ && node.group() != other_)) continue;
      peer_of_[static_cast<uint32_t>(n)] = static_cast<uint16_t>(routing_->peers.size());
      routing_->peers.push_back({node.name(), node.address(), !lacks && node.group() != group_});
      peer_hash_.push_back(HashKey(HashName(node.name()) ^ HashKey(self_hash_)));
    }
  }

  Status CheckTables() const {
    std::map<std::string, const v1::PlannedTable*> planned;
    for (const v1::PlannedTable& table : plan_.tables()) planned[table.name()] = &table;
    for (const TableConfig& table : manifest_.tables) {
      const auto found = planned.find(table.name);
      if (found == planned.end() || found->second->id() != table.id ||
          found->second->bucket_bits() != table.bucket_bits) {
        return Refuse("it is made for other tables: " + table.name + " differs");
      }
    }
    return Status::Ok();
  }

  // Owners, joining or leaving ones; `seen` finds what stands twice.
  Status CheckOwner(const v1::Owner& owner, std::set<Place>* seen) const {
    const v1::Topology& topology = plan_.topology();
    const bool known =
        owner.node() < static_cast<uint32_t>(topology.nodes_size()) &&
        owner.device() <
            static_cast<uint32_t>(topology.nodes(static_cast<int>(owner.node())).devices_size());
    const std::string name =
        "node " + std::to_string(owner.node()) + ", device " + std::to_string(owner.device());
    if (!known) return Refuse("rule 2: " + name + " is not in its topology");
    if (!seen->emplace(owner.node(), owner.device()).second) {
      return Refuse("rule 2: " + name + " stands twice in an assignment");
    }
    return Status::Ok();
  }

  Status ReadAssignment(const v1::Assignment& assignment, size_t table) {
    auto& buckets = routing_->buckets[table];
    const uint64_t end = uint64_t{assignment.bucket_begin()} + assignment.bucket_count();
    if (assignment.bucket_count() == 0 || end > buckets.size()) {
      return Refuse("rule 1: table " + manifest_.tables[table].name + " has no buckets " +
                    std::to_string(assignment.bucket_begin()) + " to " + std::to_string(end));
    }
    if (assignment.chunk_begin() != 0 ||
        (assignment.chunk_count() != 0 &&
         assignment.chunk_count() != manifest_.tables[table].layout.chunks)) {
      return Refuse("it splits rows of table " + manifest_.tables[table].name +
                    " by chunks, which serving does not");
    }
    if (assignment.owners_size() > kMaxOwners) {
      return Refuse(Name(table, assignment.bucket_begin()) + " has " +
                    std::to_string(assignment.owners_size()) + " owners; at most " +
                    std::to_string(kMaxOwners));
    }
    std::set<Place> seen;
    std::set<uint32_t> groups;
    std::set<uint32_t> nodes;
    std::vector<uint16_t> of_other;
    Routing::Bucket bucket;
    for (const v1::Owner& owner : assignment.owners()) {
      EMBERTIDE_RETURN_IF_ERROR(CheckOwner(owner, &seen));
      if (!nodes.insert(owner.node()).second) {
        return Refuse("rule 2: node " + std::to_string(owner.node()) + " owns twice");
      }
      const uint32_t group = plan_.topology().nodes(static_cast<int>(owner.node())).group();
      groups.insert(group);
      if (const auto peer = peer_of_.find(owner.node()); peer != peer_of_.end()) {
        (group == group_ ? bucket.owners : of_other).push_back(peer->second);
      }
      if (static_cast<int>(owner.node()) == self_) {
        bucket.device = static_cast<int32_t>(owner.device());
        bucket.owned = true;
      }
    }
    const size_t own = bucket.owners.size();
    for (const v1::Owner& owner : assignment.leaving()) {
      EMBERTIDE_RETURN_IF_ERROR(CheckOwner(owner, &seen));
      if (static_cast<int>(owner.node()) == self_ && bucket.device < 0) {
        bucket.device = static_cast<int32_t>(owner.device());
      }
      // One that owns it too is asked already: the bucket moved between its devices.
      const bool of_own = plan_.topology().nodes(static_cast<int>(owner.node())).group() == group_;
      if (const auto peer = peer_of_.find(owner.node());
          of_own && peer != peer_of_.end() && nodes.insert(owner.node()).second) {
        bucket.owners.push_back(peer->second);
      }
    }
    // Last: to another device of this node a bucket moves when it joins there.
    for (const v1::Owner& owner : assignment.joining()) {
      EMBERTIDE_RETURN_IF_ERROR(CheckOwner(owner, &seen));
      if (static_cast<int>(owner.node()) == self_) {
        bucket.device = static_cast<int32_t>(owner.device());
      }
    }
    // A bucket that is owned here is asked of no other group.
    const size_t of_group = bucket.owners.size();
    if (!bucket.owned) bucket.owners.insert(bucket.owners.end(), of_other.begin(), of_other.end());
    for (const uint32_t group : whole_) {
      if (!groups.contains(group)) {
        return Refuse("rule 3: group " + std::to_string(group) + " does not own " +
                      Name(table, assignment.bucket_begin()));
      }
    }
    for (uint64_t b = assignment.bucket_begin(); b < end; ++b) {
      if (assigned_[table][b]) return Refuse("rule 1: " + Name(table, b) + " is assigned twice");
      assigned_[table][b] = true;
      buckets[b] = bucket;
      const std::span owners = buckets[b].owners;
      Order(table, static_cast<uint32_t>(b), owners.first(own));
      Order(table, static_cast<uint32_t>(b), owners.subspan(of_group));
    }
    return Status::Ok();
  }

  // Rule 6; keeps the shares of this node's devices.
  Status ReadShares(const std::map<uint32_t, size_t>& tables) {
    std::map<Place, std::set<uint32_t>> seen;
    std::map<Place, uint64_t> shared_out;
    for (const v1::TierShare& each : plan_.tier_shares()) {
      const Place at{each.device().node(), each.device().device()};
      const std::string name = "rule 6: the share of table " + std::to_string(each.table_id()) +
                               " on node " + std::to_string(at.first) + ", device " +
                               std::to_string(at.second);
      const auto table = tables.find(each.table_id());
      if (table == tables.end()) return Refuse(name + " is of a table that is not served");
      const v1::Topology& topology = plan_.topology();
      if (at.first >= static_cast<uint32_t>(topology.nodes_size()) ||
          at.second >=
              static_cast<uint32_t>(topology.nodes(static_cast<int>(at.first)).devices_size())) {
        return Refuse(name + " is of a device that is not in its topology");
      }
      if (each.tier() != v1::TIER_DDR) return Refuse(name + " is not of DDR");
      if (!seen[at].insert(each.table_id()).second) return Refuse(name + " stands twice");
      if (each.bytes() < kMinDdrShareBytes) {
        return Refuse(name + " is " + std::to_string(each.bytes()) + " bytes; at least " +
                      std::to_string(kMinDdrShareBytes));
      }
      uint64_t ddr = 0;
      bool ssd = false;
      for (const v1::TierBudget& budget : topology.nodes(static_cast<int>(at.first))
                                              .devices(static_cast<int>(at.second))
                                              .budgets()) {
        if (budget.tier() == v1::TIER_DDR) ddr = budget.budget_bytes();
        ssd |= budget.tier() == v1::TIER_SSD && budget.budget_bytes() > 0;
      }
      if (!ssd) return Refuse(name + " is of a device without an SSD tier");
      uint64_t& all = shared_out[at];
      if (each.bytes() > ddr || all > ddr - each.bytes()) {
        return Refuse(name + ", with those before it, exceeds the DDR budget of " +
                      std::to_string(ddr) + " bytes");
      }
      all += each.bytes();
      if (static_cast<int>(at.first) == self_) {
        routing_->shares.push_back({static_cast<uint32_t>(table->second), at.second, each.bytes()});
      }
    }
    return Status::Ok();
  }

  // Puts the owner with the highest hash first.
  void Order(size_t table, uint32_t bucket, std::span<uint16_t> owners) {
    if (owners.size() < 2) return;
    const uint64_t about = HashKey(uint64_t{manifest_.tables[table].id} << 32 | bucket);
    ranked_.clear();
    for (const uint16_t peer : owners) {
      ranked_.emplace_back(HashKey(peer_hash_[peer] ^ about), peer);
    }
    std::ranges::sort(ranked_, std::greater());
    std::ranges::copy(ranked_ | std::views::values, owners.begin());
  }

  const v1::Plan& plan_;
  const Manifest& manifest_;
  const uint64_t self_hash_;
  std::vector<uint64_t> peer_hash_;  // by place in peers; of this node's own
  std::shared_ptr<Routing> routing_;
  int self_ = -1;
  std::set<uint32_t> partial_;
  std::set<uint32_t> whole_;
  uint32_t group_ = 0;
  uint32_t other_ = 0;  // the whole group that is asked where nobody of the own answers; or the own
  std::map<uint32_t, uint16_t> peer_of_;     // node of the topology -> place in peers
  std::vector<std::vector<bool>> assigned_;  // by table, by bucket
  std::vector<std::pair<uint64_t, uint16_t>> ranked_;
};

}  // namespace

Result<std::shared_ptr<const Routing>> MakeRouting(const v1::Plan& plan, const Manifest& manifest,
                                                   const std::string& node) {
  return Reader(plan, manifest, node).Read();
}

bool IsWhole(const v1::Plan& plan, uint32_t group) {
  const auto& partial = plan.topology().partial_groups();
  return std::ranges::find(partial, group) == partial.end() &&
         std::ranges::any_of(plan.topology().nodes(),
                             [&](const v1::Node& node) { return node.group() == group; });
}

}  // namespace embertide
