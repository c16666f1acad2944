// Store: opening, pinning, counters. The rest of the class is in the files beside this one.
#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <set>
#include <system_error>

#include "store/row_ops.h"
#include "store/store_impl.h"

namespace embertide {
namespace {

// The sketch of new keys, 8 bytes a slot: this part of the budget, and for 2^26 keys at most.
constexpr uint64_t kLeastOverSketch = 128;
constexpr uint64_t kMostSketchSlots = 1 << 26;
// Reads that a pool's policy can hear of between two calls of Maintain, by the size of its
// budget: a log and its copy take a hundredth, or the least that says anything.
constexpr uint64_t kLeastOverLogs = 100;
constexpr uint64_t kLeastAccesses = 512;
constexpr uint64_t kMostAccesses = 1 << 16;
// A pool of less than so many pages has none to spare: where it is full, no row can be pruned.
constexpr uint64_t kLeastOverReserve = 16;

uint64_t BytesOf(const TableBudget& budget, bool ssd) {
  return ssd ? budget.ssd_bytes : budget.ddr_bytes;
}

// A policy of DDR that a store can follow.
Result<PolicyName> ParseDdrPolicy(const std::string& text) {
  Result<PolicyName> policy = ParsePolicyName(text);
  if (policy.ok() && policy.value().name == "utility") {
    return Status(Code::kInvalidArgument,
                  "policy '" + text +
                      "' goes by what training says of each row, which no snapshot and no delta "
                      "carries; give reuse-density, which learns from reads, or clock");
  }
  return policy;
}

// Tables that share room share a policy, and one that names rows by key knows those of one table.
Status ValidatePolicies(const StoreOptions& options) {
  const size_t sharing = options.tables.size() - options.table_budgets.size();
  const Result<PolicyName> shared = ParseDdrPolicy(options.ddr_policy);
  if (!shared.ok()) return {shared.status().code(), "ddr_policy: " + shared.status().message()};
  if (shared.value().name != "clock" && sharing > 1) {
    return {Code::kInvalidArgument, "ddr_policy = " + options.ddr_policy + ": " +
                                        std::to_string(sharing) +
                                        " tables share the room, which clock alone can do; give "
                                        "each table a budget of its own"};
  }
  for (const auto& [name, budget] : options.table_budgets) {
    const Result<PolicyName> policy = ParseDdrPolicy(budget.ddr_policy);
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

// What the tables with budgets of their own leave to the others.
uint64_t LeftToShare(const StoreOptions& options, bool ssd) {
  uint64_t left = ssd ? options.ssd_budget_bytes : options.ddr_budget_bytes;
  for (const auto& [name, budget] : options.table_budgets) left -= BytesOf(budget, ssd);
  return left;
}

// Of each table, and of all of them in each tier.
Status ValidateBudgets(const StoreOptions& options, const std::set<std::string>& names) {
  for (const bool ssd : {false, true}) {
    const std::string what = ssd ? "ssd_budget_bytes" : "ddr_budget_bytes";
    const uint64_t all = ssd ? options.ssd_budget_bytes : options.ddr_budget_bytes;
    const uint64_t least =
        options.devices * (ssd ? 2 * kSegmentBytes : uint64_t{4} * kMostSlabPageBytes);
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

Status ValidateGroups(const StoreOptions& options) {
  if (!options.prune_groups.empty() && options.profile != Profile::kTrain) {
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

Status ValidateSums(const StoreOptions& options) {
  if (options.sums == SumKind::kFp64) return Status::Ok();
  const std::string refused = "sums = fp32: ";
  if (options.profile == Profile::kTrain) {
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

Status ValidateOptions(const StoreOptions& options) {
  EMBERTIDE_RETURN_IF_ERROR(VectorStatus());
  if (options.tables.empty()) return {Code::kInvalidArgument, "a store needs at least one table"};
  std::set<std::string> names;
  std::set<uint32_t> ids;
  for (const TableConfig& table : options.tables) {
    EMBERTIDE_RETURN_IF_ERROR(table.Validate());
    if (!names.insert(table.name).second || !ids.insert(table.id).second) {
      return {Code::kInvalidArgument, "table " + table.name + ": name or id is used twice"};
    }
    const uint32_t aux =
        options.profile == Profile::kTrain ? RowAux::Bytes(options.optimizer, table.learned()) : 0;
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
  if (options.ddr_budget_bytes < uint64_t{options.devices} * 4 * kMostSlabPageBytes) {
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
      (!one && options.profile != Profile::kTrain)) {
    return {Code::kInvalidArgument,
            "new_row_accesses = " + std::to_string(options.new_row_accesses) +
                "; a trainer may give 1 to 15, serving takes the rows that it is given"};
  }
  if (options.window_versions == 0) {
    return {Code::kInvalidArgument, "window_versions = 0; give at least 1"};
  }
  if (options.open_seal && (options.profile == Profile::kTrain || options.ssd_budget_bytes == 0)) {
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
  EMBERTIDE_RETURN_IF_ERROR(ValidateSums(options));
  EMBERTIDE_RETURN_IF_ERROR(ValidateGroups(options));
  EMBERTIDE_RETURN_IF_ERROR(ValidateBudgets(options, names));
  return ValidatePolicies(options);
}

}  // namespace

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

Store::Impl::Impl(StoreOptions opts) : options(std::move(opts)) {
  tables.reserve(options.tables.size());
  for (const TableConfig& config : options.tables) {
    Table table{config, static_cast<uint32_t>(tables.size()), config.default_row,
                std::vector<BucketSlot>(config.buckets())};
    table.default_row.resize(config.layout.dim(), 0.0F);
    table.cost = RowCost::Of(config, AuxBytes(table));
    tables.push_back(std::move(table));
  }
  for (const PruneGroup& group : options.prune_groups) {
    std::vector<uint64_t> row_bytes;
    row_bytes.reserve(group.tables.size());
    for (const uint32_t t : group.tables) row_bytes.push_back(tables[t].cost.FullBytes());
    groups.push_back(std::make_unique<GroupPrice>(group, row_bytes, &decay));
    for (size_t i = 0; i < group.tables.size(); ++i) {
      tables[group.tables[i]].pruned_with = groups.back().get();
      tables[group.tables[i]].place_in_group = i;
    }
  }
  MakePools();
  for (Table& table : tables) {
    for (uint32_t b = 0; b < table.buckets.size() && options.hold_all; ++b) {
      // Shifted by the table, or the many tables of one bucket would all lie on device 0.
      const uint32_t device = (table.ordinal + b) % options.devices;
      table.buckets[b].newest = new Bucket(PoolOf(table, device), table);
      table.buckets[b].held_since = 0;
      table.buckets[b].device = device;
    }
  }
}

void Store::Impl::MakePools() {
  const auto add_part = [&](uint64_t ddr_bytes, const std::vector<uint32_t>& of) {
    for (const uint32_t t : of) {
      tables[t].part = static_cast<uint32_t>(pools.size()) / options.devices;
    }
    for (uint32_t d = 0; d < options.devices; ++d) {
      pools.push_back(std::make_unique<RowPool>(d, ddr_bytes / options.devices, of, tables.size()));
    }
  };
  std::vector<uint32_t> sharing;
  for (const Table& table : tables) {
    if (!options.table_budgets.contains(table.config.name)) sharing.push_back(table.ordinal);
  }
  if (!sharing.empty()) add_part(LeftToShare(options, /*ssd=*/false), sharing);
  for (const Table& table : tables) {
    const auto own = options.table_budgets.find(table.config.name);
    if (own != options.table_budgets.end()) add_part(own->second.ddr_bytes, {table.ordinal});
  }
}

std::string Store::Impl::LogOf(const RowPool& pool) const {
  const std::string& name = tables[pool.tables.front()].config.name;
  const auto own = options.table_budgets.find(name);
  const bool shared = own == options.table_budgets.end();
  if ((shared ? LeftToShare(options, /*ssd=*/true) : own->second.ssd_bytes) == 0) return "";
  return "device-" + std::to_string(pool.number) + (shared ? "" : "-" + name) + ".log";
}

uint64_t Store::Impl::DirectoryBytes(const RowPool& pool) const {
  uint64_t bytes = pool.arena.directory_bytes() + pool.index_pages.directory_bytes();
  for (const uint32_t t : pool.tables) {
    bytes += tables[t].buckets.size() * sizeof(BucketSlot) / options.devices;
  }
  if (hbm != nullptr && tables[pool.tables.front()].part == 0) bytes += hbm->HostBytesOfArena();
  if (pool.ssd != nullptr) bytes += pool.ssd->directory_bytes();
  if (pool.notes != nullptr) bytes += pool.notes->directory_bytes();
  for (const auto& group : groups) {
    if (PoolOf(tables[group->tables.front()], 0) == &pool) bytes += group->bytes();
  }
  return bytes;
}

void Store::Impl::MakeNotes(RowPool* pool) {
  uint32_t words = 0;
  uint64_t least = ~0ULL;  // bytes of a row
  for (const uint32_t t : pool->tables) {
    const Table& table = tables[t];
    if (table.pruned_with == nullptr) continue;
    words = std::max(words, 1 + table.cost.utilities());
    least = std::min<uint64_t>(least, table.config.layout.PayloadBytes(1) + AuxBytes(table));
  }
  if (pool->ssd == nullptr || words == 0) return;
  pool->notes = std::make_unique<SsdNotes>(&pool->budget, pool->ssd->segments(), words,
                                           pool->arena.slab_bytes() / least);
  pool->ssd->OnClose([pool](uint32_t segment) { pool->notes->Drop(segment); });
}

Status Store::Impl::OpenPool(RowPool* pool, const std::vector<SealedSegment>* sealed) {
  const std::string& name = tables[pool->tables.front()].config.name;
  const auto own = options.table_budgets.find(name);
  const bool shared = own == options.table_budgets.end();
  const uint64_t ssd_bytes = shared ? LeftToShare(options, /*ssd=*/true) : own->second.ssd_bytes;
  if (ssd_bytes > 0) {
    std::error_code error;
    std::filesystem::create_directories(options.ssd_directory, error);
    auto opened = OpenBlockFile(options.ssd_directory + "/" + LogOf(*pool), options.ssd_engine,
                                nullptr, /*keep=*/sealed != nullptr);
    if (!opened.ok()) return opened.status();
    std::unique_ptr<BlockFile> file = std::move(*opened);
    if (options.wrap_ssd) file = options.wrap_ssd(std::move(file));
    pool->ssd = std::make_unique<BlockLog>(std::move(file), ssd_bytes / options.devices);
    if (sealed != nullptr) EMBERTIDE_RETURN_IF_ERROR(pool->ssd->Reopen(*sealed));
  }
  MakeNotes(pool);
  uint64_t directory = DirectoryBytes(*pool);
  for (const uint32_t t : pool->tables) {
    for (const BucketSlot& slot : tables[t].buckets) {
      if (slot.On(pool) != nullptr) directory += kBucketBytes;
    }
  }
  if (!pool->budget.TryCharge(directory)) {
    return {Code::kInvalidArgument,
            "ddr_budget_bytes is too small for its directories and waiting_bytes" +
                (shared ? "" : ": table " + name)};
  }
  index_bytes += directory;
  EMBERTIDE_RETURN_IF_ERROR(OpenPolicy(pool, shared ? options.ddr_policy : own->second.ddr_policy));
  if (!training()) return Status::Ok();
  if (options.new_row_accesses > 1) {
    const auto slots = static_cast<uint32_t>(std::bit_floor(
        std::min(kMostSketchSlots, pool->budget.limit_bytes() / kLeastOverSketch / 8)));
    if (!pool->budget.TryCharge(FrequencySketch::BytesFor(slots))) {
      return {Code::kInvalidArgument, "ddr_budget_bytes is too small to count new keys"};
    }
    pool->new_keys = std::make_unique<FrequencySketch>(slots);
  }
  if (pool->notes != nullptr && !pool->notes->ChargeAhead()) {
    return {Code::kInvalidArgument,
            "ddr_budget_bytes is too small for what pruning keeps of rows on the SSD"};
  }
  if (pool->ssd != nullptr) return Status::Ok();
  const uint64_t page = pool->arena.slab_bytes();
  if (page <= pool->budget.limit_bytes() / kLeastOverReserve && pool->budget.TryCharge(page)) {
    pool->reserve_bytes = page;
  }
  return Status::Ok();
}

Status Store::Impl::OpenPolicy(RowPool* pool, const std::string& text) {
  if (pool->ssd == nullptr) return Status::Ok();  // nothing leaves DDR or comes back
  const Result<PolicyName> name = ParsePolicyName(text);
  if (!name.ok()) return name.status();
  const uint64_t share = pool->budget.limit_bytes() / (kLeastOverLogs * 2 * sizeof(Access));
  pool->most_accesses = std::clamp<uint64_t>(share, kLeastAccesses, kMostAccesses);
  if (!pool->budget.TryCharge(pool->LogBytes())) {
    return {Code::kInvalidArgument, "ddr_budget_bytes is too small for the log of its policy"};
  }
  {
    const MutexLock lock(pool->accesses_mutex);
    pool->accesses.reserve(pool->most_accesses);
  }
  pool->replayed.reserve(pool->most_accesses);
  pool->least_count = name.value().accesses;
  if (name.value().name == "clock") return Status::Ok();
  Result<std::unique_ptr<TierPolicy>> policy = TierPolicy::Make(text, &pool->budget);
  if (!policy.ok()) return policy.status();
  pool->policy = std::move(*policy);
  return Status::Ok();
}

Store::Impl::~Impl() {
  for (auto& pool : pools) {
    for (Retired& retired : pool->retired) {
      while (!Free(pool.get(), &retired)) continue;
    }
  }
  for (const Table& table : tables) {
    for (const BucketSlot& slot : table.buckets) {
      for (Bucket* bucket = slot.newest; bucket != nullptr;) {
        Bucket* older = bucket->older;
        uint32_t entry = 0;
        FreeBucket(table, bucket, &entry, ~0U);
        bucket = older;
      }
    }
  }
}

Store::Store(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Store::~Store() = default;

Result<std::unique_ptr<Store>> Store::Open(StoreOptions options) {
  EMBERTIDE_RETURN_IF_ERROR(ValidateOptions(options));
  auto impl = std::make_unique<Impl>(std::move(options));
  if (const StoreOptions& opts = impl->options; opts.hbm_budget_bytes > 0) {
    auto hbm = HbmTier::Open(opts);
    if (!hbm.ok()) return hbm.status();
    impl->hbm = std::move(*hbm);
  }
  const std::vector<uint32_t>& numa_nodes = impl->options.numa_nodes;
  for (const auto& pool : impl->pools) {
    if (numa_nodes.empty()) break;
    const uint32_t node = numa_nodes[pool->number % numa_nodes.size()];
    EMBERTIDE_RETURN_IF_ERROR(pool->arena.pool()->Bind(node));
    EMBERTIDE_RETURN_IF_ERROR(pool->index_pages.Bind(node));
  }
  std::unique_ptr<SealReader> seal;
  if (impl->options.open_seal) {
    auto opened = SealReader::Open(impl->options.ssd_directory, impl->DescribeSeal());
    if (!opened.ok()) return opened.status();
    seal = std::move(*opened);
  } else if (impl->options.ssd_budget_bytes > 0) {
    // What it names is about to be gone.
    EMBERTIDE_RETURN_IF_ERROR(RemoveSeal(impl->options.ssd_directory));
  }
  for (size_t d = 0; d < impl->pools.size(); ++d) {
    EMBERTIDE_RETURN_IF_ERROR(
        impl->OpenPool(impl->pools[d].get(), seal ? &seal->segments()[d] : nullptr));
  }
  std::unique_ptr<Store> store(new Store(std::move(impl)));
  if (seal != nullptr) EMBERTIDE_RETURN_IF_ERROR(store->LoadSeal(seal.get()));
  return store;
}

const StoreOptions& Store::options() const { return impl_->options; }

Status Store::Impl::CheckTable(uint32_t table) const {
  if (table < tables.size()) return Status::Ok();
  return {Code::kInvalidArgument, "table " + std::to_string(table) + " does not exist; there are " +
                                      std::to_string(tables.size())};
}

Status Store::Impl::CheckValues(uint32_t table) const {
  EMBERTIDE_RETURN_IF_ERROR(CheckTable(table));
  if (!tables[table].config.layout.is_keys()) return Status::Ok();
  return {Code::kInvalidArgument,
          "table " + tables[table].config.name + " has rows of keys, which are no values"};
}

Status Store::Impl::CheckBucket(uint32_t table, uint32_t bucket) const {
  EMBERTIDE_RETURN_IF_ERROR(CheckTable(table));
  if (bucket < tables[table].buckets.size()) return Status::Ok();
  return {Code::kInvalidArgument, "bucket " + std::to_string(bucket) + " of table " +
                                      tables[table].config.name + " does not exist; there are " +
                                      std::to_string(tables[table].buckets.size())};
}

// --- pins ----------------------------------------------------------------------------------------

Result<ReadView> Store::Pin(uint64_t version) const {
  Result<uint32_t> reader = impl_->readers.Enter(version);
  if (!reader.ok()) return reader.status();
  // The slot shows the version before the window is read: a fold either sees the slot, or moved
  // `oldest` before this line reads it.
  const uint64_t oldest = impl_->oldest.load();
  const uint64_t newest = impl_->newest.load();
  if (!impl_->training() && (version < oldest || version > newest)) {
    impl_->readers.Leave(*reader);
    return Status(Code::kVersionGone, "version " + std::to_string(version) +
                                          " is not held; this node holds " +
                                          std::to_string(oldest) + " to " + std::to_string(newest));
  }
  return ReadView(this, *reader, version);
}

Result<ReadView> Store::PinNewest() const {
  uint64_t version = impl_->newest.load();
  Result<uint32_t> reader = impl_->readers.Enter(version);
  if (!reader.ok()) return reader.status();
  // Newest may have moved on, and the window past us, between the two lines above.
  while (version < impl_->oldest.load()) {
    version = impl_->newest.load();
    impl_->readers.Repin(*reader, version);
  }
  return ReadView(this, *reader, version);
}

ReadView::ReadView(ReadView&& other) noexcept
    : store_(other.store_), reader_(other.reader_), version_(other.version_) {
  other.store_ = nullptr;
}

ReadView& ReadView::operator=(ReadView&& other) noexcept {
  std::swap(store_, other.store_);
  std::swap(reader_, other.reader_);
  std::swap(version_, other.version_);
  return *this;
}

ReadView::~ReadView() {
  if (store_ != nullptr) store_->impl_->readers.Leave(reader_);
}

// --- counters ------------------------------------------------------------------------------------

Store::Usage Store::UsageOf(uint32_t table, uint32_t d) const {
  const RowPool& pool = *impl_->PoolOf(impl_->tables[table], d);
  // Pages and segments are shared by the tables: each has as much of them as of the rows.
  const auto share = [&](const std::vector<TierCount>& tier, uint64_t bytes) {
    uint64_t all = 0;
    for (const TierCount& each : tier) all += each.bytes.load();
    const double part = static_cast<double>(tier[table].bytes.load());
    return all == 0 ? 0
                    : static_cast<uint64_t>(static_cast<double>(bytes) * part /
                                            static_cast<double>(all));
  };
  Usage usage;
  usage.ddr_rows = pool.in_ddr[table].rows;
  usage.ddr_bytes = share(pool.in_ddr, pool.arena.page_bytes());
  usage.budget_bytes = pool.budget.limit_bytes();
  usage.budget_used_bytes = pool.budget.used_bytes();
  usage.ddr_row_bytes = pool.in_ddr[table].bytes;
  const TableShare& ddr_share = pool.shares[table];
  usage.ddr_share_bytes = ddr_share.given() ? ddr_share.bytes.load() : 0;
  usage.ddr_allowed_bytes = ddr_share.given() ? ddr_share.allowed.load() : 0;
  usage.ssd_rows = pool.in_ssd[table].rows;
  if (pool.ssd != nullptr) usage.ssd_bytes = share(pool.in_ssd, pool.ssd->used_bytes());
  return usage;
}

static void AddSsd(const BlockLog& log, StoreStats* stats) {
  const LogStats counted = log.Stats();
  stats->ssd_bytes += log.used_bytes();
  stats->seal.kept_bytes += log.kept_bytes();
  stats->ssd.engine = log.file().engine();
  stats->ssd.direct = log.file().direct();
  stats->ssd.blocks_read += counted.blocks_read;
  stats->ssd.bytes_written += counted.bytes_written;
  stats->ssd.row_bytes += counted.row_bytes;
  stats->ssd.read_errors += counted.read_errors;
  stats->ssd.corrupt += counted.corrupt;
  stats->ssd.write_errors += counted.write_errors;
  stats->ssd.bad_blocks += log.bad_blocks().found();
  stats->ssd.bad_blocks_dropped += log.bad_blocks().dropped();
}

StoreStats Store::Stats() const {
  StoreStats stats;
  stats.rows = impl_->rows.load();
  for (const auto& pool : impl_->pools) {
    stats.ddr_payload_bytes += pool->arena.page_bytes();
    stats.huge_bytes += pool->arena.pool()->huge_bytes() + pool->index_pages.huge_bytes();
    if (pool->ssd != nullptr) AddSsd(*pool->ssd, &stats);
    if (pool->notes != nullptr) stats.index_bytes += pool->notes->bytes();
  }
  stats.index_bytes += impl_->index_bytes.load();
  for (const auto& pool : impl_->pools) stats.index_bytes += pool->nodes.bytes();
  stats.ddr_budget_bytes = impl_->options.ddr_budget_bytes;
  for (size_t s = 0; s < kSources; ++s) stats.hits[s] = impl_->hits[s].load();
  stats.evictions_to_ssd = impl_->evictions.load();
  stats.evictions_by_writers = impl_->evictions_by_writers.load();
  stats.promotions = impl_->promoted.load();
  stats.refused_promotions = impl_->refused_promotions.load();
  stats.ssd.compacted_bytes = impl_->compacted_bytes.load();
  stats.ssd.compacted_rows = impl_->compacted_rows.load();
  stats.ssd.compactions_forced = impl_->compactions_forced.load();
  stats.ssd.mended_rows = impl_->mended_rows.load();
  stats.refused_rows = impl_->refused_rows.load();
  stats.reader_waits_given_up = impl_->reader_waits_given_up.load();
  stats.seal.written = impl_->seals_written;
  stats.seal.failed = impl_->seals_failed;
  stats.seal.dropped = impl_->seals_dropped;
  stats.seal.bytes = impl_->seal_bytes;
  stats.seal.seconds = impl_->seal_seconds;
  stats.seal.version = impl_->sealed_version;
  if (impl_->hbm != nullptr) {
    stats.hbm = impl_->hbm->cache().Stats();
    stats.hbm_tables = impl_->hbm->cache().TableStats();
    stats.hbm_dropped_misses = impl_->hbm->wishes_dropped();
    stats.hbm_fallbacks = impl_->hbm->fallbacks();
    stats.hbm_failed = !impl_->hbm->cache().healthy();
  }
  stats.new_keys_waiting = impl_->new_keys_waiting.load();
  stats.dropped_gradients = impl_->dropped_gradients.load();
  stats.refused_gradients = impl_->refused_gradients.load();
  stats.clipped_gradients = impl_->clipped_gradients.load();
  stats.failed_keys = impl_->failed_keys.load();
  stats.unworthy_keys = impl_->unworthy_keys.load();
  stats.worthy_keys_without_room = impl_->worthy_keys_without_room.load();
  stats.dropped_accesses = impl_->dropped_accesses.load();
  for (const auto& pool : impl_->pools) stats.policy_bytes += pool->PolicyBytes();
  stats.oldest_version = impl_->oldest.load();
  stats.newest_version = impl_->newest.load();
  return stats;
}

}  // namespace embertide
