// MadeColumns: the columns of a request that the node makes from the others, so that a request
// need carry no more than an event does.
//
//   as sent       KEYS [B, own]   DENSE [B, own]   own columns, in the order of the manifest
//   as looked up  KEYS [B, F]     DENSE [B, D]     the same with the made columns in their places
//
// A crossed column is a hash of the keys of its features (docs/formats.md). The columns of a
// sequence are the items of the sample's user, newest first; they lie in a table of keys, and so
// are known only once a version is pinned. Two columns of DENSE say how many there are, and whether
// the sample's own item is among them; with times, further ones say for each item how many seconds
// before the newest it came. docs/design/0017-columns-made-by-nodes.md.
//
// Knows no Triton. Immutable and thread-safe once it is resolved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "embertide/snapshot.h"
#include "embertide/status.h"

namespace embertide {

// The key of a cross of several keys, in this order.
int64_t CrossKeys(std::span<const int64_t> keys);

// A request with all of its columns, made ones among them. Its rows are its samples; with contexts
// (node/context_columns.h) these come first, and then the samples: a row then has the bags of its
// side alone, and those of the other side are empty.
struct WholeRequest {
  size_t rows = 0;
  size_t contexts = 0;               // of those, the first; 0: it has none
  std::vector<uint32_t> context_of;  // with contexts: by sample
  std::vector<bool> is_context;      // the same: by feature, whether contexts have its bags
  std::vector<int64_t> keys;
  std::vector<uint32_t> offsets;  // jagged: rows x F + 1, ascending; else empty
  std::vector<float> weights;     // one a key; empty without
  std::vector<float> dense;       // samples x D

  size_t samples() const { return rows - contexts; }
  // The row that has a sample's bag of a feature.
  size_t RowOf(size_t sample, uint32_t feature) const {
    if (contexts == 0) return sample;
    return is_context[feature] ? context_of[sample] : contexts + sample;
  }
};

// A sequence whose columns a node makes.
struct MadeSequence {
  uint32_t table = 0;      // of keys, by user; index into Manifest::tables
  uint32_t row_keys = 0;   // keys of its rows
  uint32_t chunk_dim = 0;  // keys of a chunk of them,
  // of which so many are items. With times, behind the items of a chunk stand their seconds before
  // the newest, as fp32, two in a key; else all are items.
  uint32_t chunk_items = 0;
  uint32_t user = 0;             // features
  uint32_t item = 0;             //
  std::vector<uint32_t> places;  // features, the newest item first
  uint32_t dense = 0;  // column of DENSE: places taken; in the next, whether `item` is in one;
  bool times = false;  // and in those behind, a place's seconds before the newest

  // Columns of DENSE that it takes.
  uint32_t dense_columns() const { return 2 + (times ? static_cast<uint32_t>(places.size()) : 0); }
};

class MadeColumns {
 public:
  // Makes nothing.
  MadeColumns() = default;
  // kCorrupt naming the feature or sequence that the manifest describes wrongly.
  static Result<MadeColumns> Resolve(const Manifest& manifest);

  // Whether a request may leave columns out.
  bool any() const { return own_.size() < columns_.size(); }
  // Columns of KEYS and of DENSE that a request has to carry.
  uint32_t own_columns() const { return static_cast<uint32_t>(own_.size()); }
  uint32_t own_dense() const { return own_dense_; }
  // The features of those of KEYS, ascending.
  const std::vector<uint32_t>& own() const { return own_; }
  // Whether a column is made from this feature.
  bool IsSource(uint32_t feature) const { return columns_[feature].is_source; }
  // The features that this one is a cross of; empty: it is none.
  const std::vector<uint32_t>& CrossedOf(uint32_t feature) const {
    return columns_[feature].crossed;
  }
  // Whether it is a place of a sequence.
  bool IsPlace(uint32_t feature) const { return columns_[feature].is_place; }
  const std::vector<MadeSequence>& sequences() const { return sequences_; }

  // Completes a request of own columns; places of sequences get kNoKey. `offsets`: of a jagged
  // request, samples x own + 1 places in `keys`; else empty, and each bag has one key. `weights`:
  // one a key, or none; made keys weigh 1. kInvalidArgument naming sample and feature: a column is
  // made from a bag of other than one key.
  Status Complete(std::span<const int64_t> keys, std::span<const uint32_t> offsets,
                  std::span<const float> weights, WholeRequest* whole) const;
  // Completes DENSE from its own columns, samples x own_dense; those of sequences get 0.
  void CompleteDense(std::span<const float> own, WholeRequest* whole) const;
  // The first of the rows that have the sequence's user and places: of all, or of one side. They
  // are as many as UsersOf gives.
  static size_t FirstRowOf(const MadeSequence& sequence, const WholeRequest& whole);
  // The user of each of those rows.
  std::vector<int64_t> UsersOf(const MadeSequence& sequence, const WholeRequest& whole) const;
  // Puts the rows of the users, UsersOf x row_keys, into the columns of the sequence.
  void PutItems(const MadeSequence& sequence, std::span<const int64_t> rows,
                WholeRequest* whole) const;
  // Where the one key of a made or singular column of a row stands in WholeRequest::keys.
  size_t PlaceOf(const WholeRequest& whole, size_t row, uint32_t feature) const;

 private:
  struct Column {
    std::string name;
    std::vector<uint32_t> crossed;  // features; empty: it is no cross
    bool is_place = false;          // of a sequence
    bool is_source = false;         // another column is made from it
    uint32_t own_place = 0;         // among the own columns
  };
  // The bag of an own column of a sample.
  struct Bag {
    size_t begin = 0;
    size_t keys = 0;
  };
  Status ResolveCrosses(const Manifest& manifest);
  Status ResolveSequence(const Manifest& manifest, const SequenceInfo& info);
  Status ResolveDense(const Manifest& manifest);
  Bag BagOf(std::span<const uint32_t> offsets, size_t sample, uint32_t feature) const;
  // kInvalidArgument: a column that others are made from has a bag of other than one key.
  Status CheckSources(std::span<const uint32_t> offsets, size_t sample) const;

  std::vector<Column> columns_;  // by feature
  std::vector<uint32_t> own_;    // features that a request carries
  std::vector<MadeSequence> sequences_;
  uint32_t own_dense_ = 0;
  uint32_t dense_ = 0;  // columns of DENSE
};

}  // namespace embertide
