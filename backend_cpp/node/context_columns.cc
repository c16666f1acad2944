// Which columns contexts have, and bringing requests of contexts and samples to rows.
#include "node/context_columns.h"

#include <algorithm>
#include <set>

namespace embertide {
namespace {

Status Wrong(const std::string& name, const std::string& what) {
  return {Code::kInvalidArgument, "context names \"" + name + "\", " + what};
}

// Names of the columns of DENSE that a request carries; "" where the snapshot tells none.
std::vector<std::string> OwnDense(const Manifest& manifest, const MadeColumns& made,
                                  const Transforms* transforms) {
  std::vector<std::string> names(made.own_dense());
  for (uint32_t c = 0; c < names.size(); ++c) {
    if (transforms != nullptr) {
      names[c] = transforms->columns()[c].name;
    } else if (!manifest.dense_names.empty()) {
      names[c] = manifest.dense_names[c];
    }
  }
  return names;
}

}  // namespace

Result<ContextColumns> ContextColumns::Resolve(const Manifest& manifest, const MadeColumns& made,
                                               const Transforms* transforms,
                                               std::span<const std::string> names) {
  ContextColumns columns;
  if (names.empty()) return columns;
  const std::set<std::string> named(names.begin(), names.end());
  std::set<std::string> unknown = named;
  columns.own_ = made.own();
  const size_t features = manifest.features.size();
  columns.is_context_.resize(features);
  columns.place_.resize(features);
  for (const FeatureConfig& feature : manifest.features) columns.names_.push_back(feature.name);
  for (uint32_t own = 0; own < columns.own_.size(); ++own) {
    const uint32_t f = columns.own_[own];
    const bool context = named.contains(columns.names_[f]);
    unknown.erase(columns.names_[f]);
    columns.is_context_[f] = context;
    columns.place_[f] = context ? columns.context_keys_ : own - columns.context_keys_;
    columns.context_keys_ += context ? 1 : 0;
  }
  const std::vector<std::string> dense = OwnDense(manifest, made, transforms);
  columns.is_context_dense_.resize(manifest.dense_features);
  for (uint32_t c = 0; c < dense.size(); ++c) {
    const bool context = !dense[c].empty() && named.contains(dense[c]);
    unknown.erase(dense[c]);
    columns.is_context_dense_[c] = context;
    columns.dense_names_[context ? 1 : 0].push_back(dense[c].empty() ? "column " + std::to_string(c)
                                                                     : dense[c]);
    columns.dense_at_[context ? 1 : 0].push_back(c);
  }
  for (const std::string& name : unknown) {
    const auto at = std::ranges::find(columns.names_, name);
    return Wrong(name, at == columns.names_.end()
                           ? "which is no feature of the model, nor a named column of DENSE"
                           : "which nodes make: it is the context's if what it is made from is");
  }
  if (columns.context_keys_ == 0) {
    return Wrong(names.front(), "and no feature: one at least has to be the context's");
  }
  if (columns.sample_keys() == 0) {
    return Wrong(names.front(), "and all other features: one at least has to be a candidate's");
  }
  for (uint32_t f = 0; f < features; ++f) {
    const std::vector<uint32_t>& crossed = made.CrossedOf(f);
    if (crossed.empty()) continue;
    columns.is_context_[f] =
        std::ranges::all_of(crossed, [&](uint32_t of) -> bool { return columns.is_context_[of]; });
  }
  for (const MadeSequence& sequence : made.sequences()) {
    const bool context = columns.is_context_[sequence.user];
    for (const uint32_t place : sequence.places) columns.is_context_[place] = context;
    for (uint32_t c = 0; c < sequence.dense_columns(); ++c) {
      columns.is_context_dense_[sequence.dense + c] = context;
    }
    columns.is_context_dense_[sequence.dense + 1] = context && columns.is_context_[sequence.item];
  }
  return columns;
}

ContextColumns::Bag ContextColumns::BagOf(const RequestSide& side, size_t row,
                                          uint32_t feature) const {
  const size_t columns = is_context_[feature] ? context_keys_ : sample_keys();
  const size_t bag = row * columns + place_[feature];
  return {side.offsets[bag], side.offsets[bag + 1] - side.offsets[bag]};
}

Status ContextColumns::CheckSources(const MadeColumns& made, const RequestSide& side, bool contexts,
                                    size_t row) const {
  for (const uint32_t f : own_) {
    if (is_context_[f] != contexts || !made.IsSource(f)) continue;
    const size_t n = BagOf(side, row, f).keys;
    if (n == 1) continue;
    return {Code::kInvalidArgument,
            "feature " + names_[f] + " of " + (contexts ? "context " : "sample ") +
                std::to_string(row) + " has " + std::to_string(n) +
                " keys; columns are made from it, which takes exactly one key: send one"};
  }
  return Status::Ok();
}

Status ContextColumns::Complete(const MadeColumns& made, const RequestSide& contexts,
                                const RequestSide& samples, std::span<const uint32_t> context_of,
                                WholeRequest* whole) const {
  const size_t features = names_.size();
  const bool weighs = !contexts.weights.empty() || !samples.weights.empty();
  whole->contexts = (contexts.offsets.size() - 1) / context_keys_;
  whole->rows = whole->contexts + context_of.size();
  whole->context_of.assign(context_of.begin(), context_of.end());
  whole->is_context = is_context_;
  whole->keys.clear();
  whole->weights.clear();
  whole->offsets.clear();
  whole->keys.reserve(contexts.keys.size() + samples.keys.size() +
                      whole->rows * (features - own_.size()));
  whole->offsets.reserve(whole->rows * features + 1);
  whole->offsets.push_back(0);
  std::vector<int64_t> together;
  for (size_t row = 0; row < whole->rows; ++row) {
    const bool of_context = row < whole->contexts;
    const RequestSide& side = of_context ? contexts : samples;
    const size_t at = of_context ? row : row - whole->contexts;
    EMBERTIDE_RETURN_IF_ERROR(CheckSources(made, side, of_context, at));
    for (uint32_t f = 0; f < features; ++f) {
      if (is_context_[f] != of_context) {
        whole->offsets.push_back(whole->offsets.back());
        continue;
      }
      if (made.IsPlace(f)) {
        whole->keys.push_back(kNoKey);
      } else if (const auto& crossed = made.CrossedOf(f); !crossed.empty()) {
        together.clear();
        for (const uint32_t of : crossed) {
          // A candidate's cross may be of its context's features, too.
          const bool from_context = is_context_[of];
          const size_t from = from_context && !of_context ? context_of[at] : at;
          const RequestSide& source = from_context ? contexts : samples;
          together.push_back(source.keys[BagOf(source, from, of).begin]);
        }
        whole->keys.push_back(CrossKeys(together));
      } else {
        const Bag bag = BagOf(side, at, f);
        const auto own = side.keys.subspan(bag.begin, bag.keys);
        whole->keys.insert(whole->keys.end(), own.begin(), own.end());
        if (!side.weights.empty()) {
          const auto own_weights = side.weights.subspan(bag.begin, bag.keys);
          whole->weights.insert(whole->weights.end(), own_weights.begin(), own_weights.end());
        }
      }
      if (weighs) whole->weights.resize(whole->keys.size(), 1.0F);
      whole->offsets.push_back(static_cast<uint32_t>(whole->keys.size()));
    }
  }
  return Status::Ok();
}

void ContextColumns::CompleteDense(std::span<const float> contexts, std::span<const float> samples,
                                   WholeRequest* whole) const {
  const size_t columns = is_context_dense_.size();
  whole->dense.assign(whole->samples() * columns, 0.0F);
  for (size_t s = 0; s < whole->samples(); ++s) {
    float* row = whole->dense.data() + s * columns;
    const float* of_context = contexts.data() + whole->context_of[s] * dense_at_[1].size();
    const float* of_sample = samples.data() + s * dense_at_[0].size();
    for (size_t c = 0; c < dense_at_[1].size(); ++c) row[dense_at_[1][c]] = of_context[c];
    for (size_t c = 0; c < dense_at_[0].size(); ++c) row[dense_at_[0][c]] = of_sample[c];
  }
}

uint64_t ContextColumns::KeysSaved(const WholeRequest& whole) {
  if (whole.contexts == 0) return 0;
  const size_t features = (whole.offsets.size() - 1) / whole.rows;
  uint64_t repeated = 0;
  for (const uint32_t c : whole.context_of) {
    repeated += whole.offsets[(c + 1) * features] - whole.offsets[c * features];
  }
  return repeated - whole.offsets[whole.contexts * features];
}

}  // namespace embertide
