// ContextNet: the dense net's program for users and candidates, over samples that have contexts.
//
//   contexts  rows of all columns, one a user     -> users x the user's columns
//   samples   rows of all columns, a candidate's  -> candidates x the other columns
//
// The program computes once a user what depends on the user alone (docs/design/0029-rewriting.md).
// It was compiled for the columns that the trainer was told of, and is run if those are the ones
// that requests have (node/context_columns.h); else each sample gets its context's columns, and the
// plain program is run.
//
// Immutable; shared by the threads of an execution, each with a memory and a program of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "embertide/dense.h"
#include "embertide/node.h"
#include "node/context_columns.h"

namespace embertide::triton {

class ContextNet {
 public:
  // Samples of one thread, all with contexts. Embeddings are as wide as a row of all features.
  struct Samples {
    size_t count = 0;
    const float* dense = nullptr;               // what the net gets: count x its dense columns
    const float* embeddings = nullptr;          // a sample's own columns are set, no others
    const float* context_embeddings = nullptr;  // by context; its own columns are set
    std::span<const uint32_t> context_of;       // by sample, never descending
  };
  // The memory of one thread, kept between executions.
  struct Memory {
    std::vector<float> context_dense;
    std::vector<float> context_embeddings;
    std::vector<float> candidate_dense;
    std::vector<float> candidate_embeddings;
    std::vector<int64_t> user_of;
  };

  // Off: nothing has contexts.
  ContextNet() = default;
  // `program`: one of the model's; null: off.
  ContextNet(const Node& node, const ContextColumns& context, const DenseProgram* program);

  bool on() const { return on_; }
  // Why requests with contexts run the plain program; empty if they do not, or there are none.
  const std::string& why_off() const { return why_off_; }

  // Scores of each sample, into an array for each head. Requires: `on`, at least one sample.
  // Errors are those of DenseProgram::RunContexts.
  Status Run(DenseProgram* program, const DenseWeights& weights, const Samples& samples,
             Memory* memory, std::span<float* const> scores) const;

 private:
  using Ranges = std::vector<std::pair<size_t, size_t>>;  // begin and end; ascending
  // Columns of one of the net's inputs.
  struct Columns {
    size_t all = 0;
    Ranges context;
    Ranges candidate;
  };
  static Columns ColumnsOf(const std::vector<bool>& is_context);
  static size_t WidthOf(const Ranges& ranges);
  static float* Copy(const float* row, const Ranges& ranges, float* to);

  Columns dense_;
  Columns embeddings_;
  bool on_ = false;
  std::string why_off_;
};

}  // namespace embertide::triton
