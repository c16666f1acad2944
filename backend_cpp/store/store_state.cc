// StoreState, the state that all parts of a store share: made, and its pools opened.
#include "store/store_state.h"

#include <algorithm>
#include <bit>
#include <filesystem>
#include <system_error>
#include <utility>

#include "policy/policy.h"
#include "store/option_checks.h"

namespace embertide {
namespace {

// The sketch of new keys, 8 bytes a slot: this part of the budget, and for 2^26 keys at most.
constexpr uint64_t kMinOverSketch = 128;
constexpr uint64_t kMaxSketchSlots = 1 << 26;
// Reads that a pool's policy can hear of between two calls of Maintain, by the size of its
// budget: a log and its copy take a hundredth, or the least that says anything.
constexpr uint64_t kMinOverLogs = 100;
constexpr uint64_t kMinAccesses = 512;
constexpr uint64_t kMaxAccesses = 1 << 16;
// A pool of less than so many pages has none to spare: where it is full, no row can be pruned.
constexpr uint64_t kMinOverReserve = 16;

void MakeNotes(const StoreState& store, RowPool* pool) {
  uint32_t words = 0;
  uint64_t least = ~0ULL;  // bytes of a row
  for (const uint32_t t : pool->tables) {
    const Table& table = store.tables[t];
    if (table.pruned_with == nullptr) continue;
    words = std::max(words, 1 + table.cost.utilities());
    least = std::min<uint64_t>(least, table.config.layout.PayloadBytes(1) + store.AuxBytes(table));
  }
  if (pool->ssd == nullptr || words == 0) return;
  pool->notes = std::make_unique<SsdNotes>(&pool->budget, pool->ssd->segments(), words,
                                           pool->arena.slab_bytes() / least);
  pool->ssd->OnClose([pool](uint32_t segment) { pool->notes->Drop(segment); });
}

Status OpenPolicy(RowPool* pool, const std::string& text) {
  if (pool->ssd == nullptr) return Status::Ok();  // nothing leaves DDR or comes back
  const Result<PolicyName> name = ParsePolicyName(text);
  if (!name.ok()) return name.status();
  const uint64_t share = pool->budget.limit_bytes() / (kMinOverLogs * 2 * sizeof(Access));
  pool->most_accesses = std::clamp<uint64_t>(share, kMinAccesses, kMaxAccesses);
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

}  // namespace

StoreState::StoreState(StoreOptions opts, Profile face) : options(std::move(opts)), profile(face) {
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
    const SlabArena& arena = PoolOf(table, 0)->arena;
    const RowLayout& layout = table.config.layout;
    table.plain_shape = RowShape::OfPlain(layout, arena.base());
    if (options.index == IndexKind::kLean) {
      const LeanShape lean = LeanShape::Of(layout, 0, table.config.bucket_bits, arena.slots());
      table.lean_shape = RowShape::OfLean(layout, arena.base(), lean);
    }
    for (uint32_t b = 0; b < table.buckets.size() && options.hold_all; ++b) {
      // Shifted by the table, or the many tables of one bucket would all lie on device 0.
      const uint32_t device = (table.ordinal + b) % options.devices;
      table.buckets[b].newest = new Bucket(PoolOf(table, device), table, b);
      table.buckets[b].held_since = 0;
      table.buckets[b].device = device;
    }
  }
}

void StoreState::MakePools() {
  const auto add_part = [&](uint64_t ddr_bytes, uint64_t ssd_bytes,
                            const std::vector<uint32_t>& of) {
    for (const uint32_t t : of) {
      tables[t].part = static_cast<uint32_t>(pools.size()) / options.devices;
    }
    for (uint32_t d = 0; d < options.devices; ++d) {
      pools.push_back(std::make_unique<RowPool>(d, ddr_bytes / options.devices,
                                                ssd_bytes / options.devices, options.index, of,
                                                tables.size()));
    }
  };
  std::vector<uint32_t> sharing;
  for (const Table& table : tables) {
    if (!options.table_budgets.contains(table.config.name)) sharing.push_back(table.ordinal);
  }
  if (!sharing.empty()) {
    add_part(LeftToShare(options, /*ssd=*/false), LeftToShare(options, /*ssd=*/true), sharing);
  }
  for (const Table& table : tables) {
    const auto own = options.table_budgets.find(table.config.name);
    if (own != options.table_budgets.end()) {
      add_part(own->second.ddr_bytes, own->second.ssd_bytes, {table.ordinal});
    }
  }
}

std::string StoreState::LogOf(const RowPool& pool) const {
  if (pool.ssd_bytes == 0) return "";
  const std::string& name = tables[pool.tables.front()].config.name;
  const bool shared = !options.table_budgets.contains(name);
  return "device-" + std::to_string(pool.number) + (shared ? "" : "-" + name) + ".log";
}

uint64_t StoreState::DirectoryBytes(const RowPool& pool) const {
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

Status StoreState::OpenPool(RowPool* pool, const std::vector<SealedSegment>* sealed) {
  const std::string& name = tables[pool->tables.front()].config.name;
  const auto own = options.table_budgets.find(name);
  const bool shared = own == options.table_budgets.end();
  if (pool->ssd_bytes > 0) {
    std::error_code error;
    std::filesystem::create_directories(options.ssd_directory, error);
    auto opened = OpenBlockFile(options.ssd_directory + "/" + LogOf(*pool), options.ssd_engine,
                                nullptr, /*keep=*/sealed != nullptr);
    if (!opened.ok()) return opened.status();
    std::unique_ptr<BlockFile> file = std::move(*opened);
    if (options.wrap_ssd) file = options.wrap_ssd(std::move(file));
    pool->ssd = std::make_unique<BlockLog>(std::move(file), pool->ssd_bytes);
    if (sealed != nullptr) EMBERTIDE_RETURN_IF_ERROR(pool->ssd->Reopen(*sealed));
  }
  MakeNotes(*this, pool);
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
  counters.index_bytes += directory;
  EMBERTIDE_RETURN_IF_ERROR(OpenPolicy(pool, shared ? options.ddr_policy : own->second.ddr_policy));
  if (!training()) return Status::Ok();
  if (options.new_row_accesses > 1) {
    const auto slots = static_cast<uint32_t>(
        std::bit_floor(std::min(kMaxSketchSlots, pool->budget.limit_bytes() / kMinOverSketch / 8)));
    if (!pool->budget.TryCharge(FrequencySketch::BytesFor(slots))) {
      return {Code::kInvalidArgument, "ddr_budget_bytes is too small to count new keys"};
    }
    pool->new_keys = std::make_unique<FrequencySketch>(slots);
  }
  pool->hold_bytes = static_cast<uint64_t>(static_cast<double>(options.hold_bytes) *
                                           static_cast<double>(pool->budget.limit_bytes()) /
                                           static_cast<double>(options.ddr_budget_bytes));
  for (const uint32_t t : pool->tables) {
    pool->page_kinds += tables[t].pruned_with == nullptr ? 1 : tables[t].config.layout.chunks;
  }
  if (pool->notes != nullptr && !pool->notes->ChargeAhead()) {
    return {Code::kInvalidArgument,
            "ddr_budget_bytes is too small for what pruning keeps of rows on the SSD"};
  }
  if (pool->ssd != nullptr) return Status::Ok();
  const uint64_t page = pool->arena.slab_bytes();
  if (page <= pool->budget.limit_bytes() / kMinOverReserve && pool->budget.TryCharge(page)) {
    pool->reserve_bytes = page;
  }
  return Status::Ok();
}

Status StoreState::CheckTable(uint32_t table) const {
  if (table < tables.size()) return Status::Ok();
  return {Code::kInvalidArgument, "table " + std::to_string(table) + " does not exist; there are " +
                                      std::to_string(tables.size())};
}

Status StoreState::CheckValues(uint32_t table) const {
  EMBERTIDE_RETURN_IF_ERROR(CheckTable(table));
  if (!tables[table].config.layout.is_keys()) return Status::Ok();
  return {Code::kInvalidArgument,
          "table " + tables[table].config.name + " has rows of keys, which are no values"};
}

Status StoreState::CheckBucket(uint32_t table, uint32_t bucket) const {
  EMBERTIDE_RETURN_IF_ERROR(CheckTable(table));
  if (bucket < tables[table].buckets.size()) return Status::Ok();
  return {Code::kInvalidArgument, "bucket " + std::to_string(bucket) + " of table " +
                                      tables[table].config.name + " does not exist; there are " +
                                      std::to_string(tables[table].buckets.size())};
}

Status StoreState::CheckGroup(uint32_t group) const {
  if (group < groups.size()) return Status::Ok();
  return {Code::kInvalidArgument, "prune group " + std::to_string(group) +
                                      " does not exist; there are " +
                                      std::to_string(groups.size())};
}

void StoreState::CountPlace(RowPool* pool, const Table& table, Location place, bool taken) const {
  TierCount& count = (place.tier() == TierId::kSsd ? pool->in_ssd : pool->in_ddr)[table.ordinal];
  const uint64_t bytes = table.config.layout.PayloadBytes(place.live()) + AuxBytes(table);
  if (taken) {
    ++count.rows;
    count.bytes += bytes;
  } else {
    --count.rows;
    count.bytes -= bytes;
  }
}

Crew* StoreState::TakeCrew(uint32_t threads, std::unique_lock<std::mutex>* lock) {
  *lock = std::unique_lock(crew_mutex_);
  if (crew_ == nullptr || crew_->size() != threads) crew_ = std::make_unique<Crew>(threads);
  return crew_.get();
}

}  // namespace embertide
