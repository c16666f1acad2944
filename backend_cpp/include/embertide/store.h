// Store: the tables of one node or one trainer rank, over the tiers of its devices.
//
//   key --HashKey--> bucket --> device (arena) --> index entry --> slot in a tier
//
// Versions. Every read goes through a ReadView, which pins one version. A row that a version of the
// window changed has a chain of (version, slot), newest first; one bit of its index entry says so,
// and a row not lately changed pays nothing. When a version leaves the window and no older pin
// lives, its chains fold into the entries.
//
// Threads. Readers (ReadView) take no lock and may be any number up to kMaxReaders. Writers
// (StageRecords, Commit, training calls) are serialised by the store, one at a time a device.
// The training profile has one writer and updates rows in place: its views read the live state and
// must not run beside a writer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "embertide/hbm.h"
#include "embertide/optimizer.h"
#include "embertide/prune.h"
#include "embertide/row_places.h"
#include "embertide/seal.h"
#include "embertide/ssd.h"
#include "embertide/status.h"
#include "embertide/store_stats.h"
#include "embertide/table.h"

namespace embertide {

inline constexpr uint32_t kMaxReaders = 1024;

enum class Profile : uint8_t {
  kServe,  // index, payload and versions; nothing else
  kTrain,  // beside each payload an aux slot: optimizer state, utility per chunk, decay epoch
};

enum class Pooling : uint8_t { kSum, kMean, kNone };

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
inline constexpr uint64_t kLeastDdrShareBytes = 64 * 1024;

// As operators write them: "TABLE=DDR_BYTES[/SSD_BYTES[/POLICY]]", several with commas between.
// kInvalidArgument naming the part that is wrong.
Result<std::map<std::string, TableBudget>> ParseTableBudgets(const std::string& text);

// What the rows of a bag are added in.
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
  Profile profile = Profile::kServe;
  std::vector<TableConfig> tables;
  uint32_t devices = 1;  // CPU arenas
  // Device d has its rows and their index in memory of the NUMA node [d % their number], but for
  // the index of a few rows, which is the heap's; empty: memory comes from the node of whoever
  // first writes to it.
  std::vector<uint32_t> numa_nodes;
  // All buckets are held from the start, bucket b of table t on device (t + b) % devices; else none
  // is (serving profile) until AddBucket.
  bool hold_all = true;
  uint64_t ddr_budget_bytes = 1ULL << 30;      // of the whole store: payload pages, index, chains
  uint64_t ssd_budget_bytes = 0;               // 0: no SSD tier; a full DDR tier then refuses
  std::string ddr_policy = kDefaultDdrPolicy;  // of the tables that share
  // OPTIONAL, by name of the table. The tables that are not named share what these leave; budgets
  // are cut evenly among the devices.
  std::map<std::string, TableBudget> table_budgets;
  std::string ssd_directory;  // REQUIRED with an SSD budget; made if absent
  SsdEngine ssd_engine = SsdEngine::kAuto;
  // What compaction in the background may read and write, of the whole store. A full SSD tier is
  // compacted whatever this says; 0: then alone.
  uint64_t ssd_compaction_bytes_per_s = 64ULL << 20;
  // Opens with the rows of the seal that lies in ssd_directory: not committed, and as of versions
  // from SealInfo::first to ::last; the caller stages again what changed in between, and commits
  // `last`. Without hold_all, the seal's buckets are then those that are held. Else the tier begins
  // empty, and a seal that lies there is removed. Serving profile.
  bool open_seal = false;
  // OPTIONAL: puts something between the store and each device's file, as tests do with faults.
  std::function<std::unique_ptr<BlockFile>(std::unique_ptr<BlockFile>)> wrap_ssd;
  // Of each HBM device, its directory and all that batches go through included; 0: no HBM tier.
  // What the host holds for it counts against the DDR budget. Serving profile.
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
  // Training: see Prune. Of their rows on the SSD DDR keeps a note of 10 bytes, 4 more a chunk
  // beyond the first and 4 with counters.
  std::vector<PruneGroup> prune_groups;
  // Training: of all tables. A row takes what it keeps (optimizer.h) beside its payload, in DDR and
  // on the SSD, for dead chunks too.
  Optimizer optimizer = Optimizer::kRowwiseAdagrad;
  ReadObserver* observer = nullptr;  // OPTIONAL; outlives the store
};

// A block of the SSD tier that is not what was written.
struct BadBlock {
  std::string file;
  uint64_t offset = 0;  // in the file
  struct Row {
    uint32_t table = 0;  // index into StoreOptions::tables
    uint32_t bucket = 0;
    uint64_t key = 0;
  };
  std::vector<Row> rows;  // of the newest version, that lie in it; not empty
};

// Where one key lives, for `explain`.
struct RowLocation {
  bool held = false;  // its bucket, at the view's version; else there is nothing to say
  bool resident = false;
  Source tier = Source::kDefault;  // kPruned: it was, and no row is left
  uint32_t slot_bytes = 0;         // in DDR: the class of its slot
  uint16_t live = 0;
  uint32_t payload_bytes = 0;
  uint32_t bucket = 0;
  uint32_t device = 0;
  // Of late, 0 to 63; where no tier moves rows by it, of one access in 64 on average.
  uint32_t access_count = 0;
  uint64_t version = 0;  // the version that last changed it, 0 if it has folded into the base
  // The HBM device that has a copy which no version up to the view's has ended.
  std::optional<uint32_t> hbm_copy;
};

// One batched lookup in one table.
struct LookupRequest {
  uint32_t table = 0;  // index into StoreOptions::tables
  std::span<const int64_t> keys;
  Pooling pooling = Pooling::kNone;
  std::span<const uint32_t> offsets;  // kSum, kMean: bags + 1 ascending offsets into keys, from 0
  float* out = nullptr;               // kNone: keys x dim; else bags x dim (an empty bag is zeros)
  size_t out_stride = 0;              // floats between output rows, >= dim
  uint8_t* source = nullptr;          // OPTIONAL: a Source per key
  const float* weights = nullptr;     // OPTIONAL: for each key, what its row is multiplied by
  // OPTIONAL: becomes where the rows of `keys` lie. Left as it is in stores of several devices, and
  // in those that serve.
  RowPlaces* places = nullptr;
};

// One feature of a lookup over several tables.
struct BagFeature {
  uint32_t table = 0;               // index into StoreOptions::tables
  Pooling pooling = Pooling::kSum;  // kSum or kMean; kNone for Node::Fetch alone
  uint32_t column = 0;              // where its dim floats stand in a sample's answer
};

// What came from elsewhere for a key whose bucket is not held here.
struct RemoteRow {
  const std::byte* payload = nullptr;  // a row's payload; null: the default row, or see below
  // fp64, dim of them: the sum of several rows of a bag, of which this key is the first.
  const double* sums = nullptr;
  uint16_t live = 0;
  bool summed = false;  // it is in the sums of a key before it in its bag: nothing is to be added
  Source source = Source::kRemote;
};

// Keys of a request or of some of its samples, over F features; bag b: sample b / F, feature b % F.
struct KeyBags {
  std::span<const int64_t> keys;
  // Bags + 1 ascending places in `keys`, where bags begin and end. Empty: bag b is keys[b] alone.
  std::span<const uint32_t> offsets;
  float* out = nullptr;  // samples x out_stride
  size_t out_stride = 0;
  uint8_t* source = nullptr;  // OPTIONAL: a Source for each of `keys` that is in a bag
  // OPTIONAL: for each of `keys` 0, or 1 + its place in `remote`; such a key is not looked for.
  const uint32_t* remote_of = nullptr;
  const RemoteRow* remote = nullptr;
  const float* weights = nullptr;  // OPTIONAL: for each of `keys`, what its row is multiplied by
  // OPTIONAL: for each of `keys` that is in a bag, a word as RowPlaces has them. Requires: one
  // feature, and a store of one device.
  uint64_t* places = nullptr;

  size_t bags() const { return offsets.empty() ? keys.size() : offsets.size() - 1; }
  // The place in `keys` where a bag begins, the one before it ends; that of bags() ends the last.
  size_t begin_of(size_t bag) const { return offsets.empty() ? bag : offsets[bag]; }
  // Those of `keys` that are in a bag.
  std::span<const int64_t> bag_keys() const {
    return keys.subspan(begin_of(0), begin_of(bags()) - begin_of(0));
  }
};

// Keys looked up in a table, by Source.
using SourceCounts = std::array<uint64_t, kSources>;

// In place of a Source, where an answer says only that a row is what it was (CopyRows).
inline constexpr uint8_t kUnchangedSource = 254;

class Store;

// A pinned version. Cheap to make and to drop (one slot of a fixed array); movable; used by one
// thread at a time. Requires: the Store outlives it; drop it soon (an execution, not a session),
// for what later versions changed cannot fold past it.
class ReadView {
 public:
  ReadView(ReadView&& other) noexcept;
  ReadView& operator=(ReadView&& other) noexcept;
  ReadView(const ReadView&) = delete;
  ReadView& operator=(const ReadView&) = delete;
  ~ReadView();

  uint64_t version() const { return version_; }

  // Answers every key: unknown keys read as the table's default row. Deduplicates nothing by
  // itself yet answers a key alike however often it stands in the batch.
  // kInvalidArgument: table, offsets or stride are wrong (nothing is written). kDeviceError,
  // kCorrupt: an SSD block could not be read or failed its checksum.
  Status Lookup(const LookupRequest& request) const;
  // Answers several, by 1 to kMaxStepThreads threads where that is worth its while; no answer
  // depends on how many. Errors are those of any request; outputs are then unspecified.
  Status Lookup(std::span<const LookupRequest> requests, uint32_t threads) const;

  // Counts no access.
  RowLocation Explain(uint32_t table, uint64_t key) const;

 private:
  friend class Store;
  friend class BagReader;
  ReadView(const Store* store, uint32_t reader, uint64_t version)
      : store_(store), reader_(reader), version_(version) {}
  const Store* store_;
  uint32_t reader_;
  uint64_t version_;
};

// One read in flight of a view, for any number of threads at once; memory that is retired stays
// until it ends. At most one of a view at a time. Requires: the view outlives it and reads nothing
// else meanwhile.
class BagReader {
 public:
  explicit BagReader(const ReadView& view);
  ~BagReader();
  BagReader(const BagReader&) = delete;
  BagReader& operator=(const BagReader&) = delete;

  // Answers several requests over several tables in one pass: what one key waits for in memory
  // passes behind the others. Bags are summed in fp64, each row times its weight if it has one, in
  // the order of their keys, and rounded once; one row without is copied bit for bit, none is
  // zeros. Weighed requests do without HBM. `counts` (OPTIONAL, by table) is added to. Errors are
  // those of ReadView::Lookup; outputs are then unspecified. Thread-safe. Requires: offsets and
  // places as KeyBags says. kNotOwner: a key's bucket is not held at the view's version.
  Status Lookup(std::span<const BagFeature> features, std::span<const KeyBags> requests,
                std::span<SourceCounts> counts) const;

  // For a peer: appends the records of `keys` that have a row, in their order. `sources` gets a
  // Source per key. With `since` (OPTIONAL), a key that no version after it up to this one changed
  // gets kUnchangedSource and no record; one of which that cannot be told is as if it had changed.
  // Errors as above; thread-safe.
  Status CopyRows(uint32_t table, std::span<const int64_t> keys, std::string* records,
                  uint8_t* sources, const ReadView* since = nullptr) const;
  // Copies the rows of request.keys in a table of keys to `out`, layout.dim() keys each, kNoKey
  // where there is none. Of `request`, keys, remote_of and remote are looked at. `sources`
  // (OPTIONAL) gets a Source per key, `counts` (OPTIONAL, by table) is added to. Thread-safe;
  // errors as above, and kInvalidArgument: the table has rows of values.
  Status CopyKeys(uint32_t table, const KeyBags& request, int64_t* out, uint8_t* sources,
                  std::span<SourceCounts> counts) const;
  // For a peer: bag b is the keys at places[offsets[b]] .. places[offsets[b + 1]]; `sums` gets bags
  // x dim fp64 sums in that order, default rows included, times `weights`: one for each of `places`
  // or none. `sources` gets a Source per key. Errors as above; thread-safe.
  Status SumBags(uint32_t table, std::span<const int64_t> keys, std::span<const uint32_t> offsets,
                 std::span<const uint32_t> places, std::span<const float> weights, double* sums,
                 uint8_t* sources) const;

 private:
  const ReadView& view_;
};

// What training keeps of a row beside its values.
struct RowState {
  float accumulator = 0.0F;  // row-wise Adagrad's h, row-wise Adam's v; else 0
  uint32_t age = 0;          // steps since the row was last updated, below 2^31
  // By chunk, as it was then: what it keeps over the steps since is taken off when it is next used
  // (StoreOptions::utility_decay), so that a row which is not in a batch costs the step nothing.
  std::array<float, kMaxChunks> utility{};
  uint32_t steps = 0;                // row-wise Adam's t; else 0
  std::vector<float> elements = {};  // dim of Adagrad's h_d or row-wise Adam's m_d; else none
  bool operator==(const RowState&) const = default;
};

// The gradients of some bags of one table. A key of several bags, or several times in one, has a
// gradient from each.
struct BagGradients {
  uint32_t table = 0;  // index into StoreOptions::tables
  std::span<const int64_t> keys;
  // Bags + 1 ascending places in `keys`: bag b is keys[offsets[b]] .. keys[offsets[b + 1]]. Empty:
  // bag b is keys[b] alone.
  std::span<const uint32_t> offsets;
  // Bags x stride: of each bag's sum, by its `dim` values; of a mean, divided by the bag's size.
  const float* gradients = nullptr;
  size_t stride = 0;  // floats from one bag's to the next one's, >= dim
  // OPTIONAL: how many occurrences each of `keys` stands for, none of them 0. Its gradient is the
  // sum of theirs and is added once. Requires: no offsets. Empty: one occurrence each.
  std::span<const uint32_t> counts = {};
  // OPTIONAL: what a lookup of the same keys, in the same order, has found; the step adds to it
  // what that did not find. Used if all bags of the table have one, each as of the same moment.
  RowPlaces* places = nullptr;
};

// Keys of one table, in any order and as often as they come.
struct TableKeys {
  uint32_t table = 0;  // index into StoreOptions::tables
  std::span<const int64_t> keys;
};

class Store {
 public:
  // kInvalidArgument naming the option; kDeviceError if the SSD directory cannot be used, or memory
  // not be bound. With
  // open_seal also kNotFound: there is none; kRejected, naming both values: it is of other tables
  // or budgets; kCorrupt: it is not what was written, or the log is not what it names;
  // kResourceExhausted: its rows do not fit.
  static Result<std::unique_ptr<Store>> Open(StoreOptions options);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  const StoreOptions& options() const;

  // Pins a committed version of the window. kVersionGone (the message names the range held) if it
  // left or is not there yet; kBusy if kMaxReaders views live.
  Result<ReadView> Pin(uint64_t version) const;
  // Pins the newest committed version (in the training profile: the live state).
  Result<ReadView> PinNewest() const;

  // --- serving profile -------------------------------------------------------------------------
  // Applies records of one bucket for a version not yet committed; invisible until Commit.
  // Staging the same records again changes nothing. Before the first Commit, rows go straight into
  // the base. kCorrupt: the bytes are no records of this table or a key is not of this bucket;
  // kResourceExhausted: the budgets are full (counted; DropStaged, for a part of them is staged).
  Status StageRecords(uint64_t version, uint32_t table, uint32_t bucket,
                      std::span<const std::byte> records);
  // Forgets what is staged and not committed, as if it had not been. Before the first Commit there
  // is no such thing.
  void DropStaged();
  // From now on, or no longer, much is staged or added at once and nobody reads: memory comes in
  // huge pages, each of which a writer waits for. To be ended before the first reader.
  void FillAtOnce(bool fill);
  // Makes `version` the newest. Requires: > newest_version. Folds versions that left the window.
  Status Commit(uint64_t version);
  // Holds a bucket from now on, on a device, with these records as its rows at the newest version;
  // it answers that version and later ones. A bucket that is held on another device moves: pins
  // below are answered by the copy there until none is left (see Forget). Requires: the caller is
  // who stages and commits. kRejected: it is on that device already; kBusy: its last move is not
  // over (a version must leave the window first); kCorrupt, kResourceExhausted as StageRecords, or
  // less than `leave_bytes` of the device's DDR budget would be left (nothing is changed then).
  // With an SSD tier, which makes room, `leave_bytes` is not looked at.
  Status AddBucket(uint32_t table, uint32_t bucket, uint32_t device,
                   std::span<const std::byte> records, uint64_t leave_bytes = 0);
  // The least version below which nothing must be pinned any more for all copies that a move left
  // behind to be freed; 0: there is none. Any thread.
  uint64_t SupersededUntil() const;
  // Versions below `version` leave the window, whatever their count, and what they alone need is
  // freed once no pin is left there; to be called again while SupersededUntil says so. The newest
  // version stays. Requires: as AddBucket.
  void Forget(uint64_t version);
  // Holds a bucket no longer; reads in flight end well, later ones get kNotOwner. Ok if it was not
  // held. Requires: as AddBucket.
  Status DropBucket(uint32_t table, uint32_t bucket);

  // --- training profile ------------------------------------------------------------------------
  // Ensures that every key has a row (new rows: all chunks live, InitialValue), but for those that
  // wait for their new_row_accesses-th occurrence. Returns how many were new. kResourceExhausted
  // when the budgets are full; the other keys have their rows.
  Result<uint64_t> EnsureRows(uint32_t table, std::span<const int64_t> keys);
  // Brings those rows of these keys that lie on the SSD to DDR, all in one batch of reads: for who
  // is about to read and update them, as far as they have room together; one may leave again before
  // it is used. No result depends on it. Returns how many were brought. Any thread, beside readers
  // and writers. kDeviceError, kCorrupt, kResourceExhausted of the first that was not; all others
  // were.
  Result<uint64_t> BringRows(std::span<const TableKeys> keys, uint32_t threads = 1);
  // One exact step of StoreOptions::optimizer, for all bags of a batch at once, after EnsureRows
  // for their keys. A key's gradients, of all its occurrences in all bags of its table, are summed
  // in fp64 in the order of the call before the one update. A key with a count (BagGradients) is as
  // many occurrences to everything that counts them: admission and utilities. Keys that wait for a
  // row are skipped, as are sums that are not finite; both are counted, as are sums that are
  // clipped. A value that would pass the largest of its dtype becomes that one. Bitwise repeatable,
  // and the same bits whatever the vectors of the CPU, the number of devices and the number of
  // `threads`, the caller's among them. They are kept for the next call. Of calls at once, those of
  // several threads go one after the other. Returns the number of rows updated. kInvalidArgument
  // naming what is wrong with bags or options: nothing has changed. Else the error of the first key
  // whose row could be neither made nor read (counted): all others are updated, so the call is not
  // to be repeated.
  Result<uint64_t> ApplyGradients(std::span<const BagGradients> bags, const StepOptions& options,
                                  uint32_t threads = 1);
  // Adds events to the counters of rows: the values of the table's counter chunks, C of them, the
  // log2 of a sum each, 0 where nothing was added yet: x becomes log2(2^x + 2^y), or y. `keys` N,
  // those without a row left out, but for keys whose counts, with what they earned, are worth a row
  // of counters (PruneGroup::counts) for which there is room; `logs` [N, C], rows `stride` floats
  // apart, a y of 0 adds nothing.
  // How they decay: docs/design/0009-counters.md. Bitwise repeatable.
  // Returns how many of the keys had a row. kInvalidArgument: the table has no counters, or a log
  // is not finite (nothing has changed); else the error of a row that could not be read from the
  // SSD, those before it have been counted.
  Result<uint64_t> AddCounts(uint32_t table, std::span<const int64_t> keys, const float* logs,
                             size_t stride);
  // Sets the live mask of a row; a chunk that becomes live starts at zero, what the optimizer keeps
  // of its elements too, and mask 0 removes the row. kNotFound if the key has none;
  // kResourceExhausted when the budgets are full.
  Status SetLive(uint32_t table, uint64_t key, uint16_t live);
  // Prunes the rows of a group of StoreOptions::prune_groups to `bytes` at most, by the utility of
  // their chunks: those that are worth less than a price are dropped, dead ones that are worth more
  // come back as zeros, and rows worth nothing beside their chunks go; the price is what makes it
  // fit. Bytes are those of payload, of what training keeps of a row, and 24 for its index entry.
  // The price comes of 65,536 rows at most, which the keys' hashes choose, so up to 1 % more may be
  // left; 5 % are left free, for keys that come until the next call. From the first call on a key
  // without a row of these tables gets one once it has earned the price of a whole row, if it
  // fits; what it earns is remembered in PruneGroup::waiting_bytes. `max_age`: rows that no step
  // updated in so many steps go, too; 0: none.
  // Costs a pass over all rows; the writer's lock is held for some thousand at a time. Depends on
  // nothing but the rows, their state and the calls before.
  // `samples`: of stores that prune as one, each of which has some of the rows: what PruneSample
  // gave on each, this one among them, in the same order everywhere, since no step was made.
  // `bytes` is then what all their rows may take; scales, what counts are worth and the price are
  // the same on each, bit for bit, and those of a store that had all rows. Keys without a row get
  // none until SetPruneRoom says how much of the rest is for this one. Empty: this store alone.
  // kInvalidArgument: there is no such group, `bytes` do not hold one row of it, or a sample is
  // none, or is of another step, other stakes or another number of rows; nothing has changed.
  Result<PruneOutcome> Prune(uint32_t group, uint64_t bytes, uint32_t max_age = 0,
                             std::span<const std::string> samples = {});
  // Rows of a group's tables here.
  Result<uint64_t> PruneRows(uint32_t group) const;
  // What the rows here say of the price, for Prune: some hundred KB in this machine's byte order.
  // `rows`: PruneRows of all the stores that prune as one, added up, which says how many of them to
  // take. Costs a pass over all rows. kInvalidArgument as Prune.
  Result<std::string> PruneSample(uint32_t group, uint64_t rows);
  // What a table's utilities, if those are squares, say of the loss: of samples that had rows of
  // it, with e what a sample got of them and g its gradient, the sums of (g . e)^2, which is what
  // the loss would change by without e (twice, to second order, with the square of the gradient for
  // the curvature: Theis et al., arXiv:1801.05787), and of |g|^2. From the next pass on the
  // utilities of a table count as much as their table's ratio of the two, of late. Of tables
  // without any, 1 as that of the greatest. Any thread. kInvalidArgument: the table is not pruned,
  // or these are no sums of squares.
  Status RecordSensitivity(uint32_t table, double at_stake, double squares);
  // Bytes that new rows of a group may take until the next pass; where few are left, one is due.
  // ~0: none was made yet. Any thread. kInvalidArgument as Prune.
  Result<uint64_t> PruneRoom(uint32_t group) const;
  Status SetPruneRoom(uint32_t group, uint64_t bytes);
  // Bytes that whole rows of all keys would take that ever asked for one in a step, within some 3
  // %: what a share of can be a target. Any thread. kInvalidArgument as Prune.
  Result<uint64_t> SeenBytes(uint32_t group) const;
  // What Prune and the steps since keep of a group beside its rows, for checkpoints, in this
  // machine's byte order. SetPruneState: kCorrupt, it is not of such a group.
  Result<std::string> PruneState(uint32_t group) const;
  Status SetPruneState(uint32_t group, const std::string& state);
  // For a store that goes on with some of the rows of several: their states, whose waiting_bytes
  // may be others. Of the keys without a row it keeps those that are worth most, for nobody can
  // tell which of them come here; price, step, scales, what counts are worth, and the room until
  // SetPruneRoom, are those of the first. `seen`: SeenBytes counts the keys that any of them saw,
  // each once; else none, since another store counts them. kCorrupt: one is of another group;
  // nothing has changed.
  Status LoadPruneStates(uint32_t group, std::span<const std::string> states, bool seen);
  // A state of checkpoint format 5 in today's form: keys were counted by table, and neither counts
  // nor tables had a worth of their own. kCorrupt as above.
  Result<std::string> PruneStateOfFormat5(uint32_t group, std::string_view state) const;
  // Appends the records of rows changed since the last call for this bucket (tombstones included),
  // in ascending key order. Bitwise repeatable. On failure nothing is appended, and the next call
  // gives all of them.
  Status TakeChanges(uint32_t table, uint32_t bucket, std::vector<std::byte>* records);
  // Makes the next TakeChanges give these keys of one bucket too: as they are, or, where there is
  // no row, as tombstones. For a publisher that must make good what another one sent.
  // kResourceExhausted when the budgets are full; the keys before are marked.
  Status MarkChanged(uint32_t table, uint32_t bucket, std::span<const uint64_t> keys);
  // Training state of a key, for checkpoints and for who prunes. kNotFound if it has no row;
  // kInvalidArgument: the state is of another optimizer, or another dim.
  Result<RowState> StateOf(uint32_t table, uint64_t key) const;
  Status SetState(uint32_t table, uint64_t key, const RowState& state);
  // What a chunk's utility is now, of what it was `age` steps ago. Any thread.
  float UtilityNow(float utility, uint32_t age) const;

  // --- both --------------------------------------------------------------------------------------
  // The first version at which a bucket is answered, and the device of its newest copy; nullopt if
  // it is not held. Any thread. Requires: table and bucket exist.
  std::optional<uint64_t> HeldSince(uint32_t table, uint32_t bucket) const;
  std::optional<uint32_t> DeviceOf(uint32_t table, uint32_t bucket) const;
  // Size of a bucket's newest copy; nullopt if it is not held. `payload_bytes` is what its rows
  // take with all their chunks, in whatever tier: an upper bound. Any thread; waits for nobody.
  // Requires: the view, which keeps the bucket's memory, reads nothing else meanwhile.
  struct BucketSize {
    uint64_t rows = 0;
    uint64_t index_bytes = 0;
    uint64_t payload_bytes = 0;
  };
  std::optional<BucketSize> BucketSizeOf(const ReadView& view, uint32_t table,
                                         uint32_t bucket) const;
  // What the tiers of a device hold of a table: rows, also those that versions of the window
  // changed since, and the table's share of the tier's bytes, waste included. Any thread; waits for
  // nobody. Requires: table and device exist.
  struct Usage {
    uint64_t ddr_rows = 0;
    uint64_t ddr_bytes = 0;
    uint64_t ssd_rows = 0;
    uint64_t ssd_bytes = 0;
    // Of the DDR budget that the table has to itself or shares there: pages, index and all else.
    uint64_t budget_bytes = 0;
    uint64_t budget_used_bytes = 0;
    uint64_t ddr_row_bytes = 0;      // what a share of the table bounds
    uint64_t ddr_share_bytes = 0;    // 0: it has none
    uint64_t ddr_allowed_bytes = 0;  // more than the share while that is being emptied
  };
  Usage UsageOf(uint32_t table, uint32_t device) const;
  // Bytes that the rows of tables which share a device's DDR may take together now: the budget less
  // index, versions, policies and what is kept ready. 0: no tables share. Any thread.
  uint64_t RowRoom(uint32_t device) const;
  // Gives tables shares of the DDR budgets, in place of all that were given before; a table that is
  // not named has none, and takes what the others leave. The rows of a table with a share never
  // take more than it. They leave DDR only for other rows of the table, or when the device lacks
  // room that no other table can give. A share that is lowered below what the rows take is emptied
  // by Maintain, in batches; until then the rows take no more than they did. Answers do not change.
  // Any thread, beside readers and writers. Serving profile.
  // kInvalidArgument, and nothing is changed: no such table or device; fewer bytes than
  // kLeastDdrShareBytes; the shares of a device exceed its budget; a table stands twice; rows of a
  // table cannot leave DDR, for want of an SSD tier.
  Status SetDdrShares(std::span<const DdrShare> shares);
  // Appends all rows of a bucket as records at the view's version, in ascending key order; in the
  // training profile, with `states`, also what StateOf gives of each. No row changes its tier.
  // kNotOwner if it is not held at that version.
  Status ExportBucket(const ReadView& view, uint32_t table, uint32_t bucket,
                      std::vector<std::byte>* records,
                      std::vector<RowState>* states = nullptr) const;
  // Training profile: inserts records as rows as they are (restore from a snapshot).
  Status ImportRecords(uint32_t table, uint32_t bucket, std::span<const std::byte> records);
  // Work for a background thread: promotes hot SSD rows, frees retired memory, compacts segments,
  // makes room in DDR and on the SSD before somebody needs it, makes full regions of memory huge
  // pages. Bounded, and holds up writers for less than a millisecond at a time; none waits for the
  // SSD. Safe beside readers and writers; of two calls at once, one passes over the device that the
  // other is at.
  void Maintain();
  // The same, of one device: for a thread at its NUMA node. What is of no device, of the first.
  void Maintain(uint32_t device);
  // Seals the SSD tier: what of it can be used after a kill (docs/design/0006-seals.md). Blocks for
  // as long as it takes; readers never wait for it, writers for a slice of a millisecond or so at a
  // time. One at a time; safe beside everything else. kRejected: nothing is committed, the versions
  // have no name, or it was given up; kDeviceError from the files. Serving profile, with an SSD.
  Status Seal(const SealOptions& options);
  // The blocks that reads found bad since Open and in which rows of the newest version still lie,
  // at most 256 a device and table budget. Costs a pass over the index if there are any; holds up
  // writers for a bucket at a time. Any thread.
  std::vector<BadBlock> FindBadBlocks();
  // Gives the rows of a bucket that the view's version has in bad blocks their bytes again, in DDR,
  // out of `records`: the bucket's, as they are at that version. Rows that left those blocks
  // meanwhile stay as they are. Any thread, beside readers and writers. kNotOwner: the bucket is
  // not held at that version; kNotFound, kCorrupt naming a key whose row `records` lacks, or has
  // with other live chunks; kResourceExhausted as StageRecords; the rows before it are mended.
  // Serving profile.
  Status Mend(const ReadView& view, uint32_t table, uint32_t bucket,
              std::span<const std::byte> records);
  // Verifies every invariant of the store: free + used = capacity, the index is injective on slots,
  // budgets hold, every entry is found by its key. kCorrupt naming the first that fails.
  // Requires: no concurrent writer.
  Status CheckIntegrity() const;
  StoreStats Stats() const;
  // The versions that can be pinned; 0: none yet. Two loads.
  struct Window {
    uint64_t oldest = 0;
    uint64_t newest = 0;
  };
  Window window() const;
  // Bytes of all budgets, DDR and SSD, that nothing uses.
  uint64_t FreeBytes() const;
  // Why rows cannot be written to the SSD; empty: they can.
  std::string SsdFailure() const;

  struct Impl;  // defined in backend_cpp/store/store_impl.h, for that folder alone

 private:
  friend class ReadView;
  friend class BagReader;
  explicit Store(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace embertide
