// Resolving a manifest's former layouts, and bringing requests of one into today's columns.
#include "node/former_layouts.h"

#include <algorithm>

namespace embertide {
namespace {

std::optional<uint32_t> PlaceOf(const std::vector<std::string>& names, const std::string& name) {
  const auto at = std::ranges::find(names, name);
  if (at == names.end()) return std::nullopt;
  return static_cast<uint32_t>(at - names.begin());
}

}  // namespace

Result<FormerLayouts> FormerLayouts::Resolve(const Manifest& manifest, const MadeColumns& made) {
  FormerLayouts all;
  if (manifest.former.empty()) return all;
  if (manifest.dense_names.size() != manifest.dense_features) {
    return Status(Code::kCorrupt, "manifest.json: has former layouts, and names " +
                                      std::to_string(manifest.dense_names.size()) + " of its " +
                                      std::to_string(manifest.dense_features) +
                                      " columns of DENSE");
  }
  for (const uint32_t f : made.own()) all.is_source_.push_back(made.IsSource(f));
  for (const RequestLayout& former : manifest.former) {
    FormerLayout& layout = all.layouts_.emplace_back();
    layout.keys = static_cast<uint32_t>(former.keys.size());
    layout.dense_names = former.dense;
    for (const uint32_t f : made.own()) {
      layout.key_of.push_back(PlaceOf(former.keys, manifest.features[f].name));
    }
    for (uint32_t d = 0; d < made.own_dense(); ++d) {
      layout.dense_of.push_back(PlaceOf(former.dense, manifest.dense_names[d]));
    }
  }
  return all;
}

void FormerLayouts::BringKeys(const FormerLayout& layout, std::span<const int64_t> keys,
                              std::span<const uint32_t> offsets, std::span<const float> weights,
                              BroughtRequest* brought) const {
  const bool jagged = !offsets.empty();
  const size_t samples = (jagged ? offsets.size() - 1 : keys.size()) / layout.keys;
  brought->keys.clear();
  brought->offsets.clear();
  brought->weights.clear();
  if (jagged) brought->offsets.push_back(0);
  for (size_t s = 0; s < samples; ++s) {
    for (size_t column = 0; column < layout.key_of.size(); ++column) {
      const std::optional<uint32_t> from = layout.key_of[column];
      if (from) {
        const size_t bag = s * layout.keys + *from;
        const size_t begin = jagged ? offsets[bag] : bag;
        const size_t count = jagged ? offsets[bag + 1] - begin : 1;
        const auto its = keys.subspan(begin, count);
        brought->keys.insert(brought->keys.end(), its.begin(), its.end());
        if (!weights.empty()) {
          const auto weigh = weights.subspan(begin, count);
          brought->weights.insert(brought->weights.end(), weigh.begin(), weigh.end());
        }
      } else if (!jagged || is_source_[column]) {
        brought->keys.push_back(kNoKey);
        if (!weights.empty()) brought->weights.push_back(1.0F);
      }
      if (jagged) brought->offsets.push_back(static_cast<uint32_t>(brought->keys.size()));
    }
  }
}

void FormerLayouts::BringDense(const FormerLayout& layout, std::span<const float> dense,
                               size_t samples, float missing, BroughtRequest* brought) {
  brought->dense.clear();
  for (size_t s = 0; s < samples; ++s) {
    for (const std::optional<uint32_t>& from : layout.dense_of) {
      brought->dense.push_back(from ? dense[s * layout.dense() + *from] : missing);
    }
  }
}

}  // namespace embertide
