// Resolving a manifest's made columns, and making those of one request.
#include "node/made_columns.h"

#include <algorithm>

#include "embertide/hash.h"

namespace embertide {

int64_t CrossKeys(std::span<const int64_t> keys) {
  uint64_t hash = 0;
  for (const int64_t key : keys) hash = HashKey(hash ^ static_cast<uint64_t>(key));
  return static_cast<int64_t>(hash);
}

Result<MadeColumns> MadeColumns::Resolve(const Manifest& manifest) {
  MadeColumns made;
  const auto wrong = [](const FeatureConfig& feature, const std::string& what) {
    return Status(Code::kCorrupt, "manifest.json: feature \"" + feature.name + "\" " + what);
  };
  for (uint32_t f = 0; f < manifest.features.size(); ++f) {
    const FeatureConfig& feature = manifest.features[f];
    made.names_.push_back(feature.name);
    made.place_.push_back(made.own_columns());
    std::vector<uint32_t>& crossed = made.crossed_.emplace_back();
    if (feature.crossed.empty()) made.own_.push_back(f);
    if (feature.crossed.size() == 1) return wrong(feature, "is crossed of one feature");
    for (const std::string& name : feature.crossed) {
      const auto of = std::ranges::find(manifest.features, name, &FeatureConfig::name);
      if (of == manifest.features.end() || !of->crossed.empty()) {
        return wrong(feature, "is crossed of \"" + name + "\", which is no feature of a request");
      }
      crossed.push_back(static_cast<uint32_t>(of - manifest.features.begin()));
    }
  }
  return made;
}

Result<int64_t> MadeColumns::OneKeyOf(const Sample& sample, size_t feature) const {
  const size_t bag = sample.first_bag + place_[feature];
  if (sample.offsets.empty()) return sample.keys[bag];
  const uint32_t n = sample.offsets[bag + 1] - sample.offsets[bag];
  if (n == 1) return sample.keys[sample.offsets[bag]];
  return Status(Code::kInvalidArgument,
                "feature " + names_[feature] + " of sample " +
                    std::to_string(sample.first_bag / own_.size()) + " has " + std::to_string(n) +
                    " keys; columns are made from it, which takes exactly one key: send one, or "
                    "send all " +
                    std::to_string(crossed_.size()) + " columns");
}

Status MadeColumns::Complete(std::span<const int64_t> keys, std::span<const uint32_t> offsets,
                             std::span<const float> weights, WholeRequest* whole) const {
  const bool jagged = !offsets.empty();
  const size_t bags = jagged ? offsets.size() - 1 : keys.size();
  const size_t samples = bags / own_.size();
  whole->keys.clear();
  whole->offsets.clear();
  whole->weights.clear();
  whole->keys.reserve(keys.size() + samples * (crossed_.size() - own_.size()));
  if (jagged) whole->offsets.push_back(0);
  std::vector<int64_t> together;
  for (size_t s = 0; s < samples; ++s) {
    const Sample sample{keys, offsets, s * own_.size()};
    for (size_t f = 0; f < crossed_.size(); ++f) {
      if (crossed_[f].empty()) {
        const size_t bag = sample.first_bag + place_[f];
        const size_t begin = jagged ? offsets[bag] : bag;
        const size_t n = jagged ? offsets[bag + 1] - begin : 1;
        const auto own = keys.subspan(begin, n);
        whole->keys.insert(whole->keys.end(), own.begin(), own.end());
        if (!weights.empty()) {
          const auto weighs = weights.subspan(begin, n);
          whole->weights.insert(whole->weights.end(), weighs.begin(), weighs.end());
        }
      } else {
        together.clear();
        for (const uint32_t of : crossed_[f]) {
          const Result<int64_t> key = OneKeyOf(sample, of);
          if (!key.ok()) return key.status();
          together.push_back(key.value());
        }
        whole->keys.push_back(CrossKeys(together));
        if (!weights.empty()) whole->weights.push_back(1.0F);
      }
      if (jagged) whole->offsets.push_back(static_cast<uint32_t>(whole->keys.size()));
    }
  }
  return Status::Ok();
}

}  // namespace embertide
