// TrainingStore: a store whose rows are learned in place; made, updated, counted and pruned.
//
// Threads. One writer. Views read the live state and must not run beside a writer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "embertide/store.h"

namespace embertide {

// The state that training keeps of a row beside its values.
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

// Which chunks a store has of rows whose other chunks are learned elsewhere.
struct RowPart {
  uint16_t first = 0;   // of the row's chunks
  uint16_t chunks = 0;  // of the whole row; 0: the store has whole rows
  bool operator==(const RowPart&) const = default;
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
  // OPTIONAL, the same of all bags of a table: its rows are parts of wider ones. part.chunks
  // doubles stand behind the `dim` floats of each gradient, in any alignment: the squares of what
  // the whole row's gradients add up to, by chunk (SquaresOfKeys), the same for all occurrences of
  // a key. Clips and steps are reckoned by them, as if the row were whole. A key without a row in
  // DDR is skipped and counted: whoever has the whole row makes it.
  RowPart part = {};
};

// The squares of what the gradients of keys add up to, as a step adds them up, in their order.
struct KeySquares {
  std::vector<uint32_t> places;  // of each occurrence: its key, numbered as they first come
  std::vector<double> squares;   // keys x chunks
};
// `gradients`: a row of layout.dim() floats for each of `keys`, which may come several times,
// `stride` floats apart. Requires: fewer than 2^28 keys.
KeySquares SquaresOfKeys(const RowLayout& layout, std::span<const int64_t> keys,
                         const float* gradients, size_t stride);

// Keys of one table, in any order and as often as they come.
struct TableKeys {
  uint32_t table = 0;  // index into StoreOptions::tables
  std::span<const int64_t> keys;
};

// The keys, each once, in the order in which they first come.
std::vector<int64_t> KeysOnce(std::span<const int64_t> keys);

class TrainingStore : public Store {
 public:
  // kInvalidArgument naming the option; kDeviceError if the SSD directory cannot be used, or memory
  // not be bound.
  static Result<std::unique_ptr<TrainingStore>> Open(StoreOptions options);

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
  // Holds the rows of these keys in DDR: what makes room passes over them until ReleaseRows of the
  // same keys. It brings none there: BringRows does, after it. A key is held as often as it stands
  // in the calls, and whether it has a row or not: a row that is made, or that comes again after it
  // was removed, is held from its first moment. Returns for each of `keys` those that were not held
  // before, each once: the others are there, or are brought by who held them. No result depends on
  // it. Any thread, beside readers and writers.
  // kResourceExhausted, naming what it would take and what there is: the keys do not fit
  // StoreOptions::hold_bytes, or half of what index and directories leave of DDR; none is held by
  // this call. kInvalidArgument: there is no such table, or hold_bytes is 0.
  Result<std::vector<std::vector<int64_t>>> HoldRows(std::span<const TableKeys> keys);
  // Lets go of keys that a call of HoldRows has held. kInvalidArgument: one was not held as often;
  // all others were let go.
  Status ReleaseRows(std::span<const TableKeys> keys);
  // Keys that are held, what whole rows of them take in pages of DDR, and what they may take now.
  // Any thread.
  struct HeldSize {
    uint64_t rows = 0;
    uint64_t bytes = 0;
    uint64_t most_bytes = 0;
  };
  HeldSize Held() const;
  // The first hold of a key of a table adds this to HeldSize::bytes. Requires: the table exists.
  uint64_t HoldBytes(uint32_t table) const;
  // One exact step of StoreOptions::optimizer, for all bags of a batch at once, after EnsureRows
  // for their keys. A key's gradients, of all its occurrences in all bags of its table, are summed
  // in fp64 in the order of the call before the one update. A key with a count (BagGradients) is as
  // many occurrences to everything that counts them: admission and utilities. Keys that wait for a
  // row are skipped, as are sums that are not finite; both are counted, as are sums that are
  // clipped. A value that would pass the largest of its dtype becomes that one. Bitwise repeatable,
  // and the same bits whatever the vectors of the CPU, the number of devices and the number of
  // `threads`, the caller's among them. They are kept for the next call. Calls
  // of several threads at once go one after the other. Returns the number of rows updated.
  // kInvalidArgument naming what is wrong with bags or options: nothing has changed. Else the error
  // of the first key whose row could be neither made nor read (counted): all others are updated, so
  // the call is not to be repeated.
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
  // A sample of the rows here, for Prune's price: some hundred KB in this machine's byte order.
  // `rows`: PruneRows of all the stores that prune as one, added up, which says how many of them to
  // take. Costs a pass over all rows. kInvalidArgument as Prune.
  Result<std::string> PruneSample(uint32_t group, uint64_t rows);
  // Records how much the loss depends on a table's rows, if its utilities are squares: of samples
  // that had rows of it, with e what a sample got of them and g its gradient, the sums of
  // (g . e)^2, by which the loss would change without e (twice, to second order, with the square of
  // the gradient for the curvature: Theis et al., arXiv:1801.05787), and of |g|^2. From the next
  // pass on the utilities of a table count as much as its ratio of the two, of late. Those of
  // tables without any count 1, as the greatest does. Any thread. kInvalidArgument: the table is
  // not pruned, or these are no sums of squares.
  Status RecordSensitivity(uint32_t table, double at_stake, double squares);
  // Bytes that new rows of a group may take until the next pass; where few are left, one is due.
  // ~0: none was made yet. Any thread. kInvalidArgument as Prune.
  Result<uint64_t> PruneRoom(uint32_t group) const;
  Status SetPruneRoom(uint32_t group, uint64_t bytes);
  // Bytes that whole rows of all keys would take that ever asked for one in a step, within some 3
  // %: what a share of can be a target. Any thread. kInvalidArgument as Prune.
  Result<uint64_t> SeenBytes(uint32_t group) const;
  // The state that Prune and the steps since keep of a group beside its rows, for checkpoints, in
  // this machine's byte order. SetPruneState: kCorrupt, it is not of such a group.
  Result<std::string> PruneState(uint32_t group) const;
  Status SetPruneState(uint32_t group, const std::string& state);
  // For a store that goes on with some of the rows of several: their states, whose waiting_bytes
  // may be others. It keeps the keys without a row that are worth most, for nobody can
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
  // The utility of a chunk now, from that of `age` steps ago. Any thread.
  float UtilityNow(float utility, uint32_t age) const;
  // ExportBucket, and what StateOf gives of each row.
  Status ExportBucketWithStates(const ReadView& view, uint32_t table, uint32_t bucket,
                                std::vector<std::byte>* records,
                                std::vector<RowState>* states) const;
  // Appends the records of those of `keys` that have a row, in their order, and what StateOf gives
  // of each: for another store, which learns them for a while. The rows stay.
  Status ExportRows(uint32_t table, std::span<const uint64_t> keys, std::vector<std::byte>* records,
                    std::vector<RowState>* states) const;
  // Has rows be as another store has learned them, which had them of ExportRows: values and state
  // are written in their places, and the next TakeChanges gives them. kInvalidArgument, kNotFound:
  // a record is of a key without a row, or of other live chunks, or there is not one state a
  // record; the rows before it have changed.
  Status PutRows(uint32_t table, std::span<const std::byte> records,
                 std::span<const RowState> states);
  // Inserts records as rows as they are (restore from a snapshot).
  Status ImportRecords(uint32_t table, uint32_t bucket, std::span<const std::byte> records);

 private:
  explicit TrainingStore(std::unique_ptr<Impl> impl);
};

}  // namespace embertide
