// Checks of a store's options.
#include <algorithm>
#include <cmath>
#include <set>
#include <string>

#include "ddr/slab_arena.h"
#include "policy/frequency_sketch.h"
#include "policy/policy.h"
#include "ssd/block_log.h"
#include "store/option_checks.h"
#include "store/row_ops.h"
#include "store/train_ops.h"

namespace embertide {
namespace {

uint64_t BytesOf(const TableBudget& budget, bool ssd) {
  return ssd ? budget.ssd_bytes : budget.ddr_bytes;
}

// Tables that share room share a policy, and one that names rows by key knows those of one table.
Status ValidatePolicies(const StoreOptions& options) {
  const size_t sharing = options.tables.size() - options.table_budgets.size();
  const Result<PolicyName> shared = ParsePolicyName(options.ddr_policy);
  if (!shared.ok()) return {shared.status().code(), "ddr_policy: " + shared.status().message()};
  if (shared.value().name != "clock" && sharing > 1) {
    return {Code::kInvalidArgument, "ddr_policy = " + options.ddr_policy + ": " +
                                        std::to_string(sharing) +
                                        " tables share the room, which clock alone can do; give "
                                        "each table a budget of its own"};
  }
  for (const auto& [name, budget] : options.table_budgets) {
    const Result<PolicyName> policy = ParsePolicyName(budget.ddr_policy);
    if (!policy.ok()) {
      return {policy.status().code(), "table " + name + ": " + policy.status().message()};
    }
    if (policy.value().name != "clock" && budget.ssd_bytes == 0) {
      return {Code::kInvalidArgument,
              "table " + name + ": policy " + budget.ddr_policy +
                  " has nothing to choose, since no row can leave DDR; give ssd_bytes"};
    }
  }
  return Status::Ok();
}

// Checks the budgets of each table, and of all of them in each tier.
Status ValidateBudgets(const StoreOptions& options, const std::set<std::string>& names) {
  for (const bool ssd : {false, true}) {
    const std::string what = ssd ? "ssd_budget_bytes" : "ddr_budget_bytes";
    const uint64_t all = ssd ? options.ssd_budget_bytes : options.ddr_budget_bytes;
    const uint64_t least =
        options.devices * (ssd ? 2 * kSegmentBytes : uint64_t{4} * kMaxSlabPageBytes);
    const std::string too_little = " is less than " + std::to_string(least) + " (" +
                                   std::to_string(least / options.devices) + " a device)";
    uint64_t left = all;
    for (const auto& [name, budget] : options.table_budgets) {
      const uint64_t bytes = BytesOf(budget, ssd);
      std::string its = what;
      its.append(" of table ").append(name).append(" = ").append(std::to_string(bytes));
      if (!names.contains(name)) {
        return {Code::kInvalidArgument, its + ": there is no such table"};
      }
      if (bytes < least && !(ssd && bytes == 0)) return {Code::kInvalidArgument, its + too_little};
      if (bytes > left) {
        return {Code::kInvalidArgument,
                its + ": with the tables before it, it exceeds the " + std::to_string(all) +
                    " bytes of the store; give the store more or the tables less"};
      }
      left -= bytes;
    }
    if (options.table_budgets.size() < names.size() && left < least && !(ssd && all == 0)) {
      std::string all_but_theirs = what;
      all_but_theirs.append(": the ").append(std::to_string(left));
      all_but_theirs.append(" bytes that tables with budgets of their own leave to the others");
      return {Code::kInvalidArgument, all_but_theirs.append(too_little)};
    }
  }
  return Status::Ok();
}

Status ValidateCounts(const StoreOptions& options, const PruneGroup& group) {
  for (const PrunedCounts& each : group.counts) {
    const bool of_group = std::ranges::find(group.tables, each.table) != group.tables.end();
    const TableConfig* table =
        of_group && each.table < options.tables.size() ? &options.tables[each.table] : nullptr;
    const uint32_t counters = table == nullptr ? 0 : table->layout.dim() - table->learned().dim();
    if (each.counter < counters && each.worth >= 0.0F && std::isfinite(each.worth)) continue;
    return {Code::kInvalidArgument,
            "prune_groups: counts of table " + std::to_string(each.table) + ", counter " +
                std::to_string(each.counter) + ", worth " + std::to_string(each.worth) +
                ": name a table of the group, one of its counters and a worth of 0 or more"};
  }
  return Status::Ok();
}

Status ValidateGroups(const StoreOptions& options, Profile profile) {
  if (!options.prune_groups.empty() && profile != Profile::kTrain) {
    return {Code::kInvalidArgument, "prune_groups: rows are pruned in a trainer alone"};
  }
  std::set<uint32_t> pruned;
  for (const PruneGroup& group : options.prune_groups) {
    if (group.tables.empty()) {
      return {Code::kInvalidArgument, "prune_groups: a group without tables"};
    }
    if (group.waiting_bytes > options.ddr_budget_bytes / 4) {
      return {Code::kInvalidArgument,
              "prune_groups: waiting_bytes = " + std::to_string(group.waiting_bytes) +
                  " is more than a fourth of ddr_budget_bytes"};
    }
    EMBERTIDE_RETURN_IF_ERROR(ValidateCounts(options, group));
    for (const uint32_t t : group.tables) {
      if (t >= options.tables.size()) {
        return {Code::kInvalidArgument,
                "prune_groups: table " + std::to_string(t) + " does not exist"};
      }
      if (options.tables[t].layout.is_keys()) {
        return {Code::kInvalidArgument, "prune_groups: table " + options.tables[t].name +
                                            " has rows of keys, whose worth nothing says"};
      }
      if (!pruned.insert(t).second) {
        return {Code::kInvalidArgument, "prune_groups: table " + options.tables[t].name +
                                            " stands twice; it can be of one group"};
      }
    }
  }
  return Status::Ok();
}

Status ValidateSums(const StoreOptions& options, Profile profile) {
  if (options.sums == SumKind::kFp64) return Status::Ok();
  const std::string refused = "sums = fp32: ";
  if (profile == Profile::kTrain) {
    return {Code::kInvalidArgument, refused + "a trainer adds in fp64; use fp64"};
  }
  if (!options.hold_all) {
    return {Code::kInvalidArgument,
            refused + "nodes that share a model send each other fp64 sums of bags; use fp64"};
  }
  if (options.hbm_budget_bytes > 0) {
    return {Code::kInvalidArgument,
            refused + "GPUs add in fp64; use fp64, or no HBM tier (hbm_budget_bytes = 0)"};
  }
  return Status::Ok();
}

Status ValidateHolds(const StoreOptions& options, Profile profile) {
  const uint64_t bytes = options.hold_bytes;
  if (bytes == 0) return Status::Ok();
  const std::string given = "hold_bytes = " + std::to_string(bytes) + ": ";
  if (profile != Profile::kTrain) {
    return {Code::kInvalidArgument, given + "rows are held in a trainer alone; give 0"};
  }
  if (options.ssd_budget_bytes == 0) {
    return {Code::kInvalidArgument,
            given + "without an SSD no row leaves DDR; give ssd_budget_bytes, or 0"};
  }
  if (bytes > options.ddr_budget_bytes / 2) {
    return {Code::kInvalidArgument,
            given +
                "more than half of ddr_budget_bytes, and other rows need room beside those "
                "that are held; give at most " +
                std::to_string(options.ddr_budget_bytes / 2) + ", or more DDR"};
  }
  return Status::Ok();
}

Status ValidateIndex(const StoreOptions& options) {
  if (options.index == IndexKind::kPlain) return Status::Ok();
  const std::string refused = "index = lean: ";
  const std::string instead = "; use plain, or ";
  if (options.ssd_budget_bytes > 0) {
    return {Code::kInvalidArgument, refused +
                                        "rows go to the SSD by access counts, which it lacks" +
                                        instead + "no SSD tier (ssd_budget_bytes = 0)"};
  }
  if (options.hbm_budget_bytes > 0) {
    return {Code::kInvalidArgument, refused + "rows go to GPUs by access counts, which it lacks" +
                                        instead + "no HBM tier (hbm_budget_bytes = 0)"};
  }
  return Status::Ok();
}

}  // namespace

uint64_t LeftToShare(const StoreOptions& options, bool ssd) {
  uint64_t left = ssd ? options.ssd_budget_bytes : options.ddr_budget_bytes;
  for (const auto& [name, budget] : options.table_budgets) left -= BytesOf(budget, ssd);
  return left;
}

Status ValidateOptions(const StoreOptions& options, Profile profile) {
  EMBERTIDE_RETURN_IF_ERROR(VectorStatus());
  if (options.tables.empty()) return {Code::kInvalidArgument, "a store needs at least one table"};
  std::set<std::string> names;
  std::set<uint32_t> ids;
  for (const TableConfig& table : options.tables) {
    EMBERTIDE_RETURN_IF_ERROR(table.Validate());
    if (!names.insert(table.name).second || !ids.insert(table.id).second) {
      return {Code::kInvalidArgument, "table " + table.name + ": name or id is used twice"};
    }
    if (profile == Profile::kTrain && table.layout.dtype == DType::kInt4) {
      return {Code::kInvalidArgument,
              "table " + table.name +
                  ": rows of int4 are served, not trained, as steps smaller than half a scale would"
                  " change nothing; train in fp32 and serve int4"};
    }
    const uint32_t aux =
        profile == Profile::kTrain ? RowAux::Bytes(options.optimizer, table.learned()) : 0;
    const uint32_t bytes = table.layout.PayloadBytes(table.layout.full_mask()) + aux;
    if (bytes > kMaxEntryBytes) {
      return {Code::kInvalidArgument, "table " + table.name + ": a row of " +
                                          std::to_string(bytes) + " bytes exceeds " +
                                          std::to_string(kMaxEntryBytes)};
    }
  }
  if (options.devices == 0 || options.devices > 64) {
    return {Code::kInvalidArgument,
            "devices = " + std::to_string(options.devices) + "; give 1 to 64"};
  }
  if (options.ddr_budget_bytes < uint64_t{options.devices} * 4 * kMaxSlabPageBytes) {
    return {Code::kInvalidArgument,
            "ddr_budget_bytes = " + std::to_string(options.ddr_budget_bytes) +
                " is less than 1 MiB a device; give more"};
  }
  if (!(options.utility_decay > 0.0 && options.utility_decay <= 1.0)) {
    return {Code::kInvalidArgument, "utility_decay = " + std::to_string(options.utility_decay) +
                                        "; give more than 0 and at most 1"};
  }
  const bool one = options.new_row_accesses == 1;
  if (options.new_row_accesses == 0 || options.new_row_accesses > FrequencySketch::kMost ||
      (!one && profile != Profile::kTrain)) {
    return {Code::kInvalidArgument,
            "new_row_accesses = " + std::to_string(options.new_row_accesses) +
                "; a trainer may give 1 to 15, serving takes the rows that it is given"};
  }
  if (options.window_versions == 0) {
    return {Code::kInvalidArgument, "window_versions = 0; give at least 1"};
  }
  if (options.open_seal && (profile == Profile::kTrain || options.ssd_budget_bytes == 0)) {
    return {Code::kInvalidArgument, "open_seal: seals are of the SSD tier of a store that serves"};
  }
  if (options.ssd_budget_bytes > 0) {
    if (options.ssd_directory.empty()) {
      return {Code::kInvalidArgument, "an SSD budget needs ssd_directory"};
    }
    if (options.ssd_budget_bytes / options.devices < 2 * kSegmentBytes) {
      return {Code::kInvalidArgument,
              "ssd_budget_bytes = " + std::to_string(options.ssd_budget_bytes) +
                  " is less than 2 MiB a device; give more or 0"};
    }
  }
  if (profile == Profile::kTrain && options.hbm_budget_bytes > 0) {
    return {Code::kInvalidArgument, "an HBM tier serves lookups; a trainer has none"};
  }
  EMBERTIDE_RETURN_IF_ERROR(ValidateSums(options, profile));
  EMBERTIDE_RETURN_IF_ERROR(ValidateIndex(options));
  EMBERTIDE_RETURN_IF_ERROR(ValidateHolds(options, profile));
  EMBERTIDE_RETURN_IF_ERROR(ValidateGroups(options, profile));
  EMBERTIDE_RETURN_IF_ERROR(ValidateBudgets(options, names));
  return ValidatePolicies(options);
}

const char* SourceName(Source source) {
  static constexpr const char* kNames[kSources] = {"hbm",     "ddr",    "ssd",        "remote",
                                                   "default", "pruned", "unanswered", "hot"};
  return kNames[static_cast<size_t>(source)];
}

const char* SumKindName(SumKind kind) { return kind == SumKind::kFp32 ? "fp32" : "fp64"; }

Result<SumKind> ParseSumKind(const std::string& name) {
  for (const SumKind kind : {SumKind::kFp64, SumKind::kFp32}) {
    if (name == SumKindName(kind)) return kind;
  }
  return Status(Code::kInvalidArgument, "sums \"" + name + "\"; use fp64 or fp32");
}

const char* IndexKindName(IndexKind kind) { return kind == IndexKind::kLean ? "lean" : "plain"; }

Result<IndexKind> ParseIndexKind(const std::string& name) {
  for (const IndexKind kind : {IndexKind::kPlain, IndexKind::kLean}) {
    if (name == IndexKindName(kind)) return kind;
  }
  return Status(Code::kInvalidArgument, "index \"" + name + "\"; use plain or lean");
}

const char* UtilityKindName(UtilityKind kind) {
  static constexpr const char* kNames[] = {"squares", "norms", "accesses"};
  return kNames[static_cast<size_t>(kind)];
}

Result<UtilityKind> ParseUtilityKind(const std::string& name) {
  for (const UtilityKind kind :
       {UtilityKind::kSquares, UtilityKind::kNorms, UtilityKind::kAccesses}) {
    if (name == UtilityKindName(kind)) return kind;
  }
  return Status(Code::kInvalidArgument, "utility \"" + name + "\"; use squares, norms or accesses");
}

}  // namespace embertide
