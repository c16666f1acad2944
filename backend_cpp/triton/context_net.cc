// Bringing users' and candidates' columns apart, and running the program for them.
#include "triton/context_net.h"

#include <algorithm>

namespace embertide::triton {
namespace {

// By column of the embeddings, whether it is the context's.
std::vector<bool> EmbeddingMarks(const Node& node, const ContextColumns& context) {
  std::vector<bool> marks;
  for (size_t f = 0; f < node.features().size(); ++f) {
    marks.insert(marks.end(), node.features()[f].dim, context.is_context()[f]);
  }
  return marks;
}

// The same by column of DENSE as the net gets it: behind the transforms.
std::vector<bool> DenseMarks(const Node& node, const ContextColumns& context) {
  const std::vector<bool>& raw = context.is_context_dense();
  if (node.transforms() == nullptr) return raw;
  std::vector<bool> marks;
  for (size_t c = 0; c < raw.size(); ++c) {
    marks.insert(marks.end(), node.transforms()->columns()[c].missing ? 2 : 1, raw[c]);
  }
  return marks;
}

}  // namespace

ContextNet::Columns ContextNet::ColumnsOf(const std::vector<bool>& is_context) {
  Columns columns;
  columns.all = is_context.size();
  for (size_t c = 0; c < is_context.size(); ++c) {
    Ranges& ranges = is_context[c] ? columns.context : columns.candidate;
    if (ranges.empty() || ranges.back().second != c) ranges.emplace_back(c, c);
    ++ranges.back().second;
  }
  return columns;
}

size_t ContextNet::WidthOf(const Ranges& ranges) {
  size_t width = 0;
  for (const auto& [begin, end] : ranges) width += end - begin;
  return width;
}

float* ContextNet::Copy(const float* row, const Ranges& ranges, float* to) {
  for (const auto& [begin, end] : ranges) to = std::copy(row + begin, row + end, to);
  return to;
}

ContextNet::ContextNet(const Node& node, const ContextColumns& context,
                       const DenseProgram* program) {
  if (!context.any() || program == nullptr) return;
  const std::vector<bool> dense = DenseMarks(node, context);
  const std::vector<bool> embeddings = EmbeddingMarks(node, context);
  if (program->context_embeddings().empty()) {
    why_off_ =
        "the dense program was made without contexts: train with the same columns in "
        "ModelConfig(context=...)";
    return;
  }
  if (dense != program->context_dense() || embeddings != program->context_embeddings()) {
    why_off_ =
        "the dense program was made for other columns than parameter \"context\" names: name those "
        "of ModelConfig(context=...)";
    return;
  }
  dense_ = ColumnsOf(dense);
  embeddings_ = ColumnsOf(embeddings);
  on_ = true;
}

Status ContextNet::Run(DenseProgram* program, const DenseWeights& weights, const Samples& samples,
                       Memory* memory, std::span<float* const> scores) const {
  const uint32_t first = samples.context_of.front();
  const size_t users = samples.context_of.back() - first + size_t{1};
  memory->context_dense.resize(users * WidthOf(dense_.context));
  memory->context_embeddings.resize(users * WidthOf(embeddings_.context));
  memory->candidate_dense.resize(samples.count * WidthOf(dense_.candidate));
  memory->candidate_embeddings.resize(samples.count * WidthOf(embeddings_.candidate));
  memory->user_of.resize(samples.count);

  float* context_dense = memory->context_dense.data();
  float* context_embeddings = memory->context_embeddings.data();
  float* candidate_dense = memory->candidate_dense.data();
  float* candidate_embeddings = memory->candidate_embeddings.data();
  for (size_t s = 0; s < samples.count; ++s) {
    const uint32_t context = samples.context_of[s];
    const float* dense = samples.dense + s * dense_.all;
    memory->user_of[s] = context - first;
    if (s == 0 || context != samples.context_of[s - 1]) {
      context_dense = Copy(dense, dense_.context, context_dense);
      context_embeddings = Copy(samples.context_embeddings + context * embeddings_.all,
                                embeddings_.context, context_embeddings);
    }
    candidate_dense = Copy(dense, dense_.candidate, candidate_dense);
    candidate_embeddings =
        Copy(samples.embeddings + s * embeddings_.all, embeddings_.candidate, candidate_embeddings);
  }
  const DenseContexts request{.users = static_cast<int64_t>(users),
                              .candidates = static_cast<int64_t>(samples.count),
                              .context_dense = memory->context_dense.data(),
                              .context_embeddings = memory->context_embeddings.data(),
                              .candidate_dense = memory->candidate_dense.data(),
                              .candidate_embeddings = memory->candidate_embeddings.data(),
                              .user_of = memory->user_of.data()};
  return program->RunContexts(weights, request, scores);
}

}  // namespace embertide::triton
