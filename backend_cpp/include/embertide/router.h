// Router: which rank of a trainer is asked for which keys of a batch, each key once.
//
// A rank looks at its part of a batch. Keys of one table that occur several times, in one feature
// or in several, become one; they are sorted by the rank that owns their bucket, then by table, and
// are within a table in the order of their first occurrence. Rows, which owners answer with,
// and sums of gradients, which they are sent later, lie in the same order:
//
//   keys       [ rank 0: table 0, table 1, ... ][ rank 1: table 0, ... ] ...
//   rows       width of the table floats for each key
//   gradients  dim of the table floats for each key
//
// A table of which every rank has all rows (kEverywhere) is asked of the rank itself.
//
// Some keys may have a rank of their own, whoever owns their bucket (SetHosts): these are hot. They
// stand in blocks of a table of their own, for their rows lie in another store than the others'.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "embertide/status.h"
#include "embertide/training_store.h"

namespace embertide {

struct RoutedTable {
  // The owner of a bucket of which every rank has all rows.
  static constexpr uint16_t kEverywhere = 0xffff;
  uint32_t bucket_bits = 0;
  uint32_t width = 0;            // floats of a row: what is learned, then counters
  uint32_t dim = 0;              // of a gradient
  std::vector<uint16_t> owners;  // by bucket: a rank, or kEverywhere
};

// The keys of some bags of one table, as BagGradients has them.
struct BagKeys {
  uint32_t table = 0;
  std::span<const int64_t> keys;
  std::span<const uint32_t> offsets;  // empty: each key is a bag of its own
};

// Where a pass brings what it makes of the rows.
struct PooledBags {
  Pooling pooling = Pooling::kSum;  // of several keys; kNone: a row a key
  float* out = nullptr;             // bags (keys, with kNone) x stride
  size_t stride = 0;                // floats, >= the table's width
};

// A batch's keys, as they are asked for. Immutable; any number of threads.
class Routed {
 public:
  // No bag asks for it: it reads as zeros and takes no gradient.
  static constexpr int64_t kPadding = INT64_MIN;

  std::span<const int64_t> keys() const { return keys_; }
  // How often each occurs.
  std::span<const uint32_t> counts() const { return counts_; }
  // ranks x tables: how many keys of each table each rank is asked for.
  std::span<const uint32_t> lengths() const { return lengths_; }
  // Floats of all rows, and of all gradients.
  uint64_t row_floats() const { return row_floats_; }
  uint64_t gradient_floats() const { return gradient_floats_; }

  // Pools rows into bags, those of the call that routed them: sums in fp64, rounded once, in the
  // order of the bag, as a store's own lookup does. kInvalidArgument: not as many bags or floats.
  Status Pool(std::span<const float> rows, std::span<const PooledBags> bags) const;
  // Sums the gradients of each key in the order of the call, in fp64, rounded once, into `sums`
  // (gradient_floats() of them). `bags` are those that were routed, with their gradients; where
  // offsets are empty though the call had some, each key has a gradient of its own.
  Status Sum(std::span<const BagGradients> bags, std::span<float> sums) const;

 private:
  friend class Router;
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Piece {  // the keys of one BagKeys
    uint32_t table;
    size_t first;  // in `places_`
    size_t keys;
    std::vector<uint32_t> offsets;
  };
  std::vector<RoutedTable> const* tables_ = nullptr;
  std::vector<Piece> pieces_;
  std::vector<uint32_t> places_;  // of each occurrence: its key; kNone: padding
  std::vector<int64_t> keys_;
  std::vector<uint32_t> counts_;
  std::vector<uint32_t> lengths_;
  std::vector<uint64_t> row_at_;       // by key: its first float among the rows
  std::vector<uint64_t> gradient_at_;  // ... and among the gradients
  std::vector<uint64_t> exact_at_;     // ... and among the sums of keys that occur several times
  uint64_t row_floats_ = 0;
  uint64_t gradient_floats_ = 0;
  uint64_t repeated_floats_ = 0;
};

// Used by one thread at a time; outlives what it routed.
class Router {
 public:
  // kInvalidArgument naming the table whose owners are not one a bucket, or no ranks.
  static Result<Router> Make(std::vector<RoutedTable> tables, uint32_t ranks, uint32_t rank);

  // kInvalidArgument: a table that does not exist, offsets that do not ascend.
  Result<Routed> Route(std::span<const BagKeys> bags);
  // From the next call of Route on, keys of `table` with a rank of their own: `hosts` has it for
  // each of `keys`, and they stand in the blocks of table `as`, which no call routes by itself.
  // Those set before have none any more. A key's bucket is asked for all the same, as TakeLoad
  // counts. kInvalidArgument naming what is wrong: a table that does not exist, another width or
  // dim, not one rank a key; nothing has changed.
  Status SetHosts(uint32_t table, uint32_t as, std::span<const int64_t> keys,
                  std::span<const uint16_t> hosts);
  // The rank of each key's bucket, hot or not; `rank` itself for kEverywhere.
  std::vector<uint16_t> OwnersOf(uint32_t table, std::span<const int64_t> keys) const;
  // Keys asked of each bucket since the last call, tables after tables: what a bucket costs.
  std::vector<uint64_t> TakeLoad();

  const std::vector<RoutedTable>& tables() const { return *tables_; }

 private:
  Router() = default;
  struct Found {
    uint64_t key;
    uint32_t table;
    uint32_t block;  // rank x tables + table
    uint32_t count;
  };
  struct Hot {
    uint32_t as = 0;                               // table
    std::unordered_map<uint64_t, uint16_t> hosts;  // by key
  };
  std::unique_ptr<std::vector<RoutedTable>> tables_;
  std::vector<Hot> hot_;              // by table
  std::vector<size_t> first_bucket_;  // by table, in `load_`
  std::vector<uint64_t> load_;
  uint32_t ranks_ = 1;
  uint32_t rank_ = 0;
  // Kept from call to call.
  std::vector<uint32_t> slots_;
  std::vector<Found> found_;
};

}  // namespace embertide
