// A lookup a feature, of requests of one bag each: their outputs may stand anywhere.
#include "node/placed_bags.h"

#include <algorithm>

namespace embertide {

bool HasSequences(std::span<const Feature> features) {
  return std::ranges::any_of(
      features, [](const Feature& feature) { return feature.pooling == Pooling::kNone; });
}

std::vector<uint64_t> PlaceBags(std::span<const Feature> features, size_t bags,
                                std::span<const uint32_t> offsets) {
  std::vector<uint64_t> places = {0};
  places.reserve(bags + 1);
  for (size_t b = 0; b < bags; ++b) {
    const Feature& feature = features[b % features.size()];
    const uint64_t keys = offsets.empty() ? 1 : offsets[b + 1] - offsets[b];
    places.push_back(places.back() + feature.dim * (feature.pooling == Pooling::kNone ? keys : 1));
  }
  return places;
}

Status LookupPlaced(const BagReader& rows, std::span<const Feature> features,
                    std::span<const KeyBags> requests, std::span<const uint64_t* const> places,
                    std::span<SourceCounts> counts) {
  std::vector<KeyBags> alone;
  for (size_t f = 0; f < features.size(); ++f) {
    const Feature& feature = features[f];
    const bool sequence = feature.pooling == Pooling::kNone;
    alone.clear();
    for (size_t r = 0; r < requests.size(); ++r) {
      const KeyBags& request = requests[r];
      const bool jagged = !request.offsets.empty();
      const size_t bags = jagged ? request.offsets.size() - 1 : request.keys.size();
      for (size_t b = f; b < bags; b += features.size()) {
        const size_t first = jagged ? request.offsets[b] : b;
        const size_t end = jagged ? request.offsets[b + 1] : b + 1;
        if (sequence && first == end) continue;
        KeyBags bag = request;
        bag.out += places[r][b];
        bag.out_stride = feature.dim;
        if (jagged && !sequence) {
          bag.offsets = request.offsets.subspan(b, 2);
        } else {
          // Each key is a bag of its own.
          bag.offsets = {};
          bag.keys = request.keys.subspan(first, end - first);
          if (bag.source != nullptr) bag.source += first;
          if (bag.remote_of != nullptr) bag.remote_of += first;
          if (bag.weights != nullptr) bag.weights += first;
        }
        alone.push_back(bag);
      }
    }
    const BagFeature as{feature.table, sequence ? Pooling::kSum : feature.pooling, 0};
    EMBERTIDE_RETURN_IF_ERROR(rows.Lookup({&as, 1}, alone, counts));
  }
  return Status::Ok();
}

}  // namespace embertide
