// Table: what a store knows of one table beside its rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "embertide/hash.h"
#include "embertide/store.h"
#include "store/bucket.h"
#include "store/prune_price.h"
#include "store/row_shape.h"

namespace embertide {

struct GroupPrice;

struct Table {
  TableConfig config;
  uint32_t ordinal = 0;            // index into StoreOptions::tables
  std::vector<float> default_row;  // dim values
  std::vector<BucketSlot> buckets;
  // With one device, all its rows of DDR lie in one pool: how words of plain and of lean groups say
  // where.
  RowShape plain_shape{};
  RowShape lean_shape{};
  uint32_t part = 0;  // its rows lie in pools[part * options.devices ...]
  RowCost cost{};
  GroupPrice* pruned_with = nullptr;  // null: its rows are not pruned
  size_t place_in_group = 0;          // among its tables

  uint32_t BucketOf(uint64_t hash) const { return BucketOfHash(hash, config.bucket_bits); }
  // The newest copy of a bucket. Requires: the caller is its writer, or the store is of the
  // TrainingStore, whose buckets are always held.
  Bucket* Newest(uint32_t bucket) const { return buckets[bucket].newest.load(); }
  Bucket* NewestOf(uint64_t hash) const { return Newest(BucketOf(hash)); }
  // The pool's copy of a hash's bucket; null: it has none. Requires: the pool's writer.
  Bucket* In(const RowPool* pool, uint64_t hash) const { return buckets[BucketOf(hash)].On(pool); }
};

// All records are of the table and the bucket; kCorrupt naming what is not. Tells how many of them
// are rows, if asked.
Status ValidateRecords(const Table& table, uint32_t bucket, std::span<const std::byte> records,
                       uint32_t* rows = nullptr);

}  // namespace embertide
