// ContextColumns: requests of contexts and samples. A context is what a user's samples have in
// common; it is sent, looked up and transformed once, however many candidates the user has.
//
//   as sent       contexts x their own columns            samples x the other own columns
//   as looked up  contexts + samples rows of F features; a row's bags of the other side are empty
//   as ranked     samples x F, samples x D: what a context has is repeated for each of its samples
//
// A cross is the context's if all features that it is made from are; the places of a sequence are
// if its user is. Own columns and made ones: node/made_columns.h.
//
// Knows no Triton. Immutable and thread-safe once it is resolved.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "embertide/snapshot.h"
#include "embertide/status.h"
#include "embertide/transform.h"
#include "node/made_columns.h"

namespace embertide {

// One side of a request: rows x its own columns.
struct RequestSide {
  std::span<const int64_t> keys;
  std::span<const uint32_t> offsets;  // rows x own columns + 1 ascending places in `keys`
  std::span<const float> weights;     // one a key; empty: each is 1
};

class ContextColumns {
 public:
  // No request has a context.
  ContextColumns() = default;
  // `names`: of the features, and of the columns of DENSE, that are the context's; those are known
  // where the snapshot names them. kInvalidArgument naming one that a request does not carry, or
  // what is left without a column.
  static Result<ContextColumns> Resolve(const Manifest& manifest, const MadeColumns& made,
                                        const Transforms* transforms,
                                        std::span<const std::string> names);

  bool any() const { return context_keys_ > 0; }
  // Own columns of KEYS and of DENSE that contexts have, and that samples have.
  uint32_t context_keys() const { return context_keys_; }
  uint32_t sample_keys() const { return static_cast<uint32_t>(own_.size()) - context_keys_; }
  const std::vector<std::string>& context_dense() const { return dense_names_[1]; }
  const std::vector<std::string>& sample_dense() const { return dense_names_[0]; }
  // By feature; by column of DENSE, those of sequences included.
  const std::vector<bool>& is_context() const { return is_context_; }
  const std::vector<bool>& is_context_dense() const { return is_context_dense_; }

  // Completes the keys of a request; places of sequences get kNoKey. `context_of`: by sample.
  // `weighs`: whether keys have weights; made ones weigh 1. kInvalidArgument naming row and
  // feature: a column is made from a bag of other than one key.
  Status Complete(const MadeColumns& made, const RequestSide& contexts, const RequestSide& samples,
                  std::span<const uint32_t> context_of, WholeRequest* whole) const;
  // Completes DENSE, samples x D, from contexts x context_dense and samples x sample_dense; columns
  // of sequences get 0. Requires: a completed `whole`.
  void CompleteDense(std::span<const float> contexts, std::span<const float> samples,
                     WholeRequest* whole) const;
  // The number of keys more that the request would have if each sample had its context's keys.
  static uint64_t KeysSaved(const WholeRequest& whole);

 private:
  // The bag of an own feature, in its side.
  struct Bag {
    size_t begin = 0;
    size_t keys = 0;
  };
  Bag BagOf(const RequestSide& side, size_t row, uint32_t feature) const;
  Status CheckSources(const MadeColumns& made, const RequestSide& side, bool contexts,
                      size_t row) const;

  std::vector<std::string> names_;  // by feature
  std::vector<uint32_t> own_;       // features that a request carries
  std::vector<uint32_t> place_;     // by feature: among the own columns of its side
  uint32_t context_keys_ = 0;
  std::vector<bool> is_context_;
  std::vector<bool> is_context_dense_;
  std::array<std::vector<std::string>, 2>
      dense_names_;                                // own columns of DENSE: samples', contexts'
  std::array<std::vector<uint32_t>, 2> dense_at_;  // where they are among all
};

}  // namespace embertide
