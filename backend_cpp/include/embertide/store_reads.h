// Reads of a store, of either face: rows, and sums of the rows of bags, at a pinned version.
//
// Threads. Readers (ReadView) take no lock and may be any number up to kMaxReaders.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "embertide/row_places.h"
#include "embertide/status.h"
#include "embertide/store_stats.h"
#include "embertide/table.h"

namespace embertide {

inline constexpr uint32_t kMaxReaders = 1024;

enum class Pooling : uint8_t { kSum, kMean, kNone };

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
  // Accesses of late, 0 to 63; where no tier moves rows by them, one in 64 counts on average.
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

// The answer from elsewhere for a key whose bucket is not held here.
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

}  // namespace embertide
