// StoreOptions: the tables of a store, its tiers and their budgets; the kinds and names in them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "embertide/hbm.h"
#include "embertide/optimizer.h"
#include "embertide/prune.h"
#include "embertide/ssd.h"
#include "embertide/status.h"
#include "embertide/store_stats.h"
#include "embertide/table.h"

namespace embertide {

// A key that was read, of those that chance chose.
struct ObservedRead {
  uint64_t key = 0;
  uint64_t hash = 0;
  uint32_t table = 0;  // index into StoreOptions::tables
  uint32_t bucket = 0;
  uint32_t bytes = 0;   // of payload
  uint32_t weight = 1;  // reads that it stands for
  Source source = Source::kDefault;
  bool for_peer = false;  // a peer asked for it
};

// A key of the kWatchEvery-th part of all keys, of which every read is told: so distinct keys can
// be counted.
struct WatchedKey {
  uint64_t hash = 0;
  uint32_t table = 0;  // index into StoreOptions::tables
  uint32_t bucket = 0;
};
inline constexpr uint32_t kWatchEvery = 64;
// By bits that neither bucket nor index group depend on alone.
constexpr bool IsWatched(uint64_t hash) { return (hash >> 20) % kWatchEvery == 0; }

// Told of some of the keys read. Called by readers, from any thread, and must not make them wait.
class ReadObserver {
 public:
  virtual ~ReadObserver() = default;
  // One read in so many is to be told of.
  virtual uint32_t every() const = 0;
  virtual void Observe(std::span<const ObservedRead> reads) = 0;
  virtual void Watch(std::span<const WatchedKey> keys) = 0;
};

class BlockFile;

// Which rows of the SSD tier are brought into DDR, and which leave it for them: a name of
// policy/policy.h. "clock" lives in the index, which counts reads anyhow, and needs no memory; it
// is all that tables which share room can have. The others keep what `Policies()` says of each row
// of DDR and 13 bytes more, charged to the budget, and hear of reads by a log that is bounded.
inline constexpr const char* kDefaultDdrPolicy = "clock";

// Which rows enter HBM, as "clock" or "clock:n" (at the first, or the n-th read of late, 2 to 15,
// that a row came counted as one) or "none"; then, for tables that are to differ, ",TABLE=" and one
// of those, as "clock:2,item=none". Which leave is always a clock's choice, on the device: a row
// takes a way of its set and a slot of its size, and the other policies choose among all rows of a
// tier.
inline constexpr const char* kDefaultHbmPolicy = "clock:2";

// Room that one table has to itself: no other table takes of it, and the table takes no more.
struct TableBudget {
  uint64_t ddr_bytes = 0;  // of all devices: its payload pages, its index, its chains
  uint64_t ssd_bytes = 0;  // 0: no SSD tier for this table; where it is full, it refuses
  std::string ddr_policy = kDefaultDdrPolicy;
};
// Bytes of rows, index and unused room of pages excluded, that a table may have in DDR on a device.
struct DdrShare {
  uint32_t table = 0;  // index into StoreOptions::tables
  uint32_t device = 0;
  uint64_t bytes = 0;
};
// Evictions of a table go by batches of a 64th of its share; less would be a row at a time.
inline constexpr uint64_t kMinDdrShareBytes = 64 * 1024;

// As operators write them: "TABLE=DDR_BYTES[/SSD_BYTES[/POLICY]]", several with commas between.
// kInvalidArgument naming the part that is wrong.
Result<std::map<std::string, TableBudget>> ParseTableBudgets(const std::string& text);

// The arithmetic in which the rows of a bag are added.
//
// kFp64: rounded once, so that any split of a bag over nodes gives the same floats.
// kFp32: bags of 2 to 64 keys that all have rows, without weights, are added in fp32 in the order
// of their keys. A sum of n rows is then within n x 2^-24 x (|x_1| + ... + |x_n|) of the exact
// one, to first order (Higham, Accuracy and Stability of Numerical Algorithms, 4.2); a mean is
// rounded once more. Every other bag is added in fp64.
enum class SumKind : uint8_t { kFp64, kFp32 };
// "fp64" or "fp32".
const char* SumKindName(SumKind kind);
Result<SumKind> ParseSumKind(const std::string& name);

// How a bucket's index keeps its entries.
//
// kPlain: 16 bytes each, 21 to 26 a row with what is free.
// kLean: 10 bytes each, 12.5 to 15 a row, which hold of a key what their place does not say of it;
// lookups are slower by some ns a key. Tables that are small beside their device keep plain ones,
// and lean entries count no accesses.
enum class IndexKind : uint8_t { kPlain, kLean };
// "plain" or "lean".
const char* IndexKindName(IndexKind kind);
Result<IndexKind> ParseIndexKind(const std::string& name);

struct StoreOptions {
  std::vector<TableConfig> tables;
  uint32_t devices = 1;  // CPU arenas
  // Device d has its rows and their index in memory of the NUMA node [d % their number], but for
  // the index of a few rows, which is the heap's; empty: memory comes from the node of whoever
  // first writes to it.
  std::vector<uint32_t> numa_nodes;
  // All buckets are held from the start, bucket b of table t on device (t + b) % devices; else none
  // is (of a ServingStore) until AddBucket.
  bool hold_all = true;
  uint64_t ddr_budget_bytes = 1ULL << 30;      // of the whole store: payload pages, index, chains
  uint64_t ssd_budget_bytes = 0;               // 0: no SSD tier; a full DDR tier then refuses
  std::string ddr_policy = kDefaultDdrPolicy;  // of the tables that share
  // OPTIONAL, by name of the table. The tables that are not named share what these leave; budgets
  // are cut evenly among the devices.
  std::map<std::string, TableBudget> table_budgets;
  std::string ssd_directory;  // REQUIRED with an SSD budget; made if absent
  SsdEngine ssd_engine = SsdEngine::kAuto;
  // Bytes that compaction in the background may read and write, in the whole store. A full SSD tier
  // is compacted whatever this says; 0: then alone.
  uint64_t ssd_compaction_bytes_per_s = 64ULL << 20;
  // Opens with the rows of the seal that lies in ssd_directory: not committed, and as of versions
  // from SealInfo::first to ::last; the caller stages again what changed in between, and commits
  // `last`. Without hold_all, the seal's buckets are then those that are held. Else the tier begins
  // empty, and a seal that lies there is removed. For a ServingStore.
  bool open_seal = false;
  // OPTIONAL: puts something between the store and each device's file, as tests do with faults.
  std::function<std::unique_ptr<BlockFile>(std::unique_ptr<BlockFile>)> wrap_ssd;
  // Bytes of each HBM device, its directory and all that batches go through included; 0: no HBM
  // tier. The host's part of it counts against the DDR budget. For a ServingStore.
  uint64_t hbm_budget_bytes = 0;
  uint32_t hbm_devices = 1;
  HbmKind hbm_kind = HbmKind::kGpu;
  std::string hbm_policy = kDefaultHbmPolicy;
  uint32_t window_versions = 8;  // committed versions a Pin may still name
  // kFp32 needs a store that serves, holds all buckets and has no HBM tier: whoever else pools
  // parts of a bag adds in fp64.
  SumKind sums = SumKind::kFp64;
  // kLean needs rows that stay in DDR: neither an SSD nor an HBM tier.
  IndexKind index = IndexKind::kPlain;
  // How long a writer that needs room waits for one read in flight that holds memory retired before
  // it; then its rows are refused, and the reader is named and counted.
  uint32_t reader_wait_ms = 5000;
  // Training: EnsureRows gives a key its row at its so many-th occurrence of late, 1 to 15; until
  // then it reads as the default row and its gradients are dropped, both counted. Occurrences are
  // counted in a sketch, which may take keys that share its counters for one: 1/128 of the DDR
  // budget. It is no part of a checkpoint: after a restart counting begins anew.
  uint32_t new_row_accesses = 1;
  // Training: what a step (ApplyGradients) adds to the utility of the chunks of its rows, and what
  // all utilities keep over a step, more than 0 and at most 1. The default halves them in 2,000.
  UtilityKind utility = UtilityKind::kSquares;
  double utility_decay = 0.99965;
  // Training: see Prune. DDR keeps a note of each of their rows on the SSD: 10 bytes, 4 more
  // a chunk beyond the first and 4 with counters.
  std::vector<PruneGroup> prune_groups;
  // Training: of all tables. A row takes what it keeps (optimizer.h) beside its payload, in DDR and
  // on the SSD, for dead chunks too.
  Optimizer optimizer = Optimizer::kRowwiseAdagrad;
  // Training: what held rows (TrainingStore::HoldRows) may take of DDR, cut as the budget is among
  // devices and tables; at most half of it, and needs an SSD. 0: none is held.
  uint64_t hold_bytes = 0;
  ReadObserver* observer = nullptr;  // OPTIONAL; outlives the store
};

}  // namespace embertide
