// Answers of models with sequences: a feature with pooling none gives the row of each key of its
// bag, so samples are of unequal width.
//
//   sample 0                                 sample 1
//   | bag 0: dim | bag 1, none: keys x dim | | bag 0: dim | bag 1, none: keys x dim | ...
//
// Thread-safe: no state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "embertide/node.h"

namespace embertide {

bool HasSequences(std::span<const Feature> features);

// Where each of `bags` bags begins, in floats from the beginning of the answer, and last where the
// last one ends. Bag b is of feature b % F; `offsets` as KeyBags::offsets.
std::vector<uint64_t> PlaceBags(std::span<const Feature> features, size_t bags,
                                std::span<const uint32_t> offsets);

// BagReader::Lookup, but bag b of request r stands at requests[r].out + places[r][b]; `out_stride`
// is not looked at. Errors as there. Requires: requests begin at a sample.
Status LookupPlaced(const BagReader& rows, std::span<const Feature> features,
                    std::span<const KeyBags> requests, std::span<const uint64_t* const> places,
                    std::span<SourceCounts> counts);

}  // namespace embertide
