#include "embertide/router.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <numeric>
#include <string>

#include "embertide/hash.h"

namespace embertide {
namespace {

constexpr uint32_t kMaxRanks = 4096;
constexpr size_t kMaxKeys = size_t{1} << 28;
constexpr uint32_t kSlotsOverKeys = 2;
constexpr size_t kAhead = 8;  // keys whose slots are asked for ahead

Status Wrong(const std::string& what) { return {Code::kInvalidArgument, what}; }

// Keys of several tables share the slots.
uint64_t SlotHash(uint64_t hash, uint32_t table) { return hash ^ (HashKey(table) >> 7); }

// The bags of a piece: calls use(bag, first key, end).
template <typename Use>
void ForEachBag(size_t keys, std::span<const uint32_t> offsets, const Use& use) {
  if (offsets.empty()) {
    for (size_t k = 0; k < keys; ++k) use(k, k, k + 1);
    return;
  }
  for (size_t b = 0; b + 1 < offsets.size(); ++b) use(b, offsets[b], offsets[b + 1]);
}

}  // namespace

Result<Router> Router::Make(std::vector<RoutedTable> tables, uint32_t ranks, uint32_t rank) {
  if (ranks == 0 || ranks > kMaxRanks || rank >= ranks) {
    return Wrong("rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
                 " ranks; give 1 to " + std::to_string(kMaxRanks));
  }
  Router router;
  size_t buckets = 0;
  for (size_t t = 0; t < tables.size(); ++t) {
    const RoutedTable& table = tables[t];
    if (table.bucket_bits > kMaxBucketBits || table.owners.size() != size_t{1}
                                                                         << table.bucket_bits) {
      return Wrong("table " + std::to_string(t) + " has " + std::to_string(table.owners.size()) +
                   " owners for 2^" + std::to_string(table.bucket_bits) + " buckets");
    }
    for (const uint16_t owner : table.owners) {
      if (owner >= ranks && owner != RoutedTable::kEverywhere) {
        return Wrong("table " + std::to_string(t) + " has owner " + std::to_string(owner) +
                     "; there are " + std::to_string(ranks) + " ranks");
      }
    }
    router.first_bucket_.push_back(buckets);
    buckets += table.owners.size();
  }
  router.load_.assign(buckets, 0);
  router.hot_.resize(tables.size());
  router.tables_ = std::make_unique<std::vector<RoutedTable>>(std::move(tables));
  router.ranks_ = ranks;
  router.rank_ = rank;
  return router;
}

Status Router::SetHosts(uint32_t table, uint32_t as, std::span<const int64_t> keys,
                        std::span<const uint16_t> hosts) {
  const auto& tables = *tables_;
  if (table >= tables.size() || as >= tables.size()) {
    return Wrong("table " + std::to_string(std::max(table, as)) + " does not exist");
  }
  if (tables[table].width != tables[as].width || tables[table].dim != tables[as].dim) {
    return Wrong("rows of table " + std::to_string(as) + " are not as wide as those of " +
                 std::to_string(table));
  }
  if (keys.size() != hosts.size()) {
    return Wrong(std::to_string(hosts.size()) + " ranks for " + std::to_string(keys.size()) +
                 " hot keys");
  }
  for (const uint16_t host : hosts) {
    if (host >= ranks_) {
      return Wrong("a hot key is at rank " + std::to_string(host) + "; there are " +
                   std::to_string(ranks_) + " ranks");
    }
  }
  Hot& hot = hot_[table];
  hot.as = as;
  hot.hosts.clear();
  hot.hosts.reserve(keys.size());
  for (size_t k = 0; k < keys.size(); ++k) {
    hot.hosts.emplace(static_cast<uint64_t>(keys[k]), hosts[k]);
  }
  return Status::Ok();
}

Result<Routed> Router::Route(std::span<const BagKeys> bags) {
  const auto& tables = *tables_;
  Routed routed;
  routed.tables_ = tables_.get();
  size_t occurrences = 0;
  for (const BagKeys& each : bags) {
    if (each.table >= tables.size()) {
      return Wrong("table " + std::to_string(each.table) + " does not exist");
    }
    const auto& offsets = each.offsets;
    if (!offsets.empty() && (offsets.front() != 0 || offsets.back() != each.keys.size() ||
                             !std::is_sorted(offsets.begin(), offsets.end()))) {
      return Wrong("offsets must ascend from 0 to the number of keys (" +
                   std::to_string(each.keys.size()) + ")");
    }
    routed.pieces_.push_back(
        {each.table, occurrences, each.keys.size(), {offsets.begin(), offsets.end()}});
    occurrences += each.keys.size();
  }
  if (occurrences > kMaxKeys) {
    return Wrong(std::to_string(occurrences) + " keys in a batch, more than " +
                 std::to_string(kMaxKeys));
  }
  const size_t blocks = size_t{ranks_} * tables.size();
  routed.places_.resize(occurrences);
  routed.lengths_.assign(blocks, 0);
  const size_t slots = std::bit_ceil(std::max<size_t>(kSlotsOverKeys * occurrences, 16));
  slots_.assign(slots, 0);
  found_.clear();
  size_t at = 0;
  for (const BagKeys& each : bags) {
    const RoutedTable& table = tables[each.table];
    const Hot& hot = hot_[each.table];
    uint64_t* const load = load_.data() + first_bucket_[each.table];
    const size_t n = each.keys.size();
    for (size_t k = 0; k < n; ++k, ++at) {
      if (k + kAhead < n) {
        const uint64_t ahead = HashKey(static_cast<uint64_t>(each.keys[k + kAhead]));
        __builtin_prefetch(&slots_[SlotHash(ahead, each.table) & (slots - 1)]);
      }
      if (each.keys[k] == Routed::kPadding) {
        routed.places_[at] = Routed::kNone;
        continue;
      }
      const auto key = static_cast<uint64_t>(each.keys[k]);
      const uint64_t hash = HashKey(key);
      size_t slot = SlotHash(hash, each.table) & (slots - 1);
      while (slots_[slot] != 0) {
        const Found& there = found_[slots_[slot] - 1];
        if (there.key == key && there.table == each.table) break;
        slot = (slot + 1) & (slots - 1);
      }
      if (slots_[slot] == 0) {
        const uint32_t bucket = BucketOfHash(hash, table.bucket_bits);
        uint32_t owner = table.owners[bucket];
        if (owner == RoutedTable::kEverywhere) owner = rank_;
        uint32_t in = each.table;
        if (!hot.hosts.empty()) {
          if (const auto host = hot.hosts.find(key); host != hot.hosts.end()) {
            owner = host->second;
            in = hot.as;
          }
        }
        const auto block = static_cast<uint32_t>(owner * tables.size() + in);
        ++routed.lengths_[block];
        ++load[bucket];
        found_.push_back({key, each.table, block, 0});
        slots_[slot] = static_cast<uint32_t>(found_.size());
      }
      const uint32_t place = slots_[slot] - 1;
      ++found_[place].count;
      routed.places_[at] = place;
    }
  }
  // From the order in which they were found to that of blocks.
  std::vector<uint32_t> next(blocks);
  std::exclusive_scan(routed.lengths_.begin(), routed.lengths_.end(), next.begin(), 0U);
  std::vector<uint64_t> row_next(blocks);
  std::vector<uint64_t> gradient_next(blocks);
  for (size_t b = 0; b < blocks; ++b) {
    const RoutedTable& table = tables[b % tables.size()];
    row_next[b] = routed.row_floats_;
    gradient_next[b] = routed.gradient_floats_;
    routed.row_floats_ += uint64_t{routed.lengths_[b]} * table.width;
    routed.gradient_floats_ += uint64_t{routed.lengths_[b]} * table.dim;
  }
  const size_t distinct = found_.size();
  routed.keys_.resize(distinct);
  routed.counts_.resize(distinct);
  routed.row_at_.resize(distinct);
  routed.gradient_at_.resize(distinct);
  routed.exact_at_.resize(distinct);
  std::vector<uint32_t> moved(distinct);
  for (size_t i = 0; i < distinct; ++i) {
    const Found& each = found_[i];
    const uint32_t to = next[each.block]++;
    moved[i] = to;
    routed.keys_[to] = static_cast<int64_t>(each.key);
    routed.counts_[to] = each.count;
    routed.row_at_[to] = row_next[each.block];
    routed.gradient_at_[to] = gradient_next[each.block];
    row_next[each.block] += tables[each.table].width;
    gradient_next[each.block] += tables[each.table].dim;
    routed.exact_at_[to] = routed.repeated_floats_;
    if (each.count > 1) routed.repeated_floats_ += tables[each.table].dim;
  }
  for (uint32_t& place : routed.places_) {
    if (place != Routed::kNone) place = moved[place];
  }
  return routed;
}

std::vector<uint16_t> Router::OwnersOf(uint32_t table, std::span<const int64_t> keys) const {
  const RoutedTable& of = tables_->at(table);
  std::vector<uint16_t> owners(keys.size());
  for (size_t k = 0; k < keys.size(); ++k) {
    const uint64_t hash = HashKey(static_cast<uint64_t>(keys[k]));
    const uint16_t owner = of.owners[BucketOfHash(hash, of.bucket_bits)];
    owners[k] = owner == RoutedTable::kEverywhere ? static_cast<uint16_t>(rank_) : owner;
  }
  return owners;
}

std::vector<uint64_t> Router::TakeLoad() {
  std::vector<uint64_t> load(load_.size(), 0);
  load.swap(load_);
  return load;
}

Status Routed::Pool(std::span<const float> rows, std::span<const PooledBags> bags) const {
  if (rows.size() != row_floats_ || bags.size() != pieces_.size()) {
    return Wrong(std::to_string(rows.size()) + " floats of rows for " +
                 std::to_string(bags.size()) + " outputs; give " + std::to_string(row_floats_) +
                 " for " + std::to_string(pieces_.size()));
  }
  std::vector<double> sums;
  for (size_t p = 0; p < pieces_.size(); ++p) {
    const Piece& piece = pieces_[p];
    const PooledBags& to = bags[p];
    const uint32_t width = (*tables_)[piece.table].width;
    const uint32_t* const places = places_.data() + piece.first;
    const bool each = to.pooling == Pooling::kNone;
    const std::span<const uint32_t> offsets =
        each ? std::span<const uint32_t>() : std::span<const uint32_t>(piece.offsets);
    sums.resize(width);
    ForEachBag(piece.keys, offsets, [&](size_t bag, size_t k, size_t end) {
      float* out = to.out + bag * to.stride;
      if (end - k == 1) {
        if (places[k] == kNone) {
          std::fill_n(out, width, 0.0F);
        } else {
          std::copy_n(rows.data() + row_at_[places[k]], width, out);
        }
        return;
      }
      std::ranges::fill(sums, 0.0);
      for (size_t i = k; i < end; ++i) {
        if (places[i] == kNone) continue;
        const float* row = rows.data() + row_at_[places[i]];
        for (uint32_t d = 0; d < width; ++d) sums[d] += static_cast<double>(row[d]);
      }
      const double by =
          to.pooling == Pooling::kMean && end > k ? static_cast<double>(end - k) : 1.0;
      for (uint32_t d = 0; d < width; ++d) out[d] = static_cast<float>(sums[d] / by);
    });
  }
  return Status::Ok();
}

Status Routed::Sum(std::span<const BagGradients> bags, std::span<float> sums) const {
  if (sums.size() != gradient_floats_ || bags.size() != pieces_.size()) {
    return Wrong(std::to_string(sums.size()) + " floats of gradients for " +
                 std::to_string(bags.size()) + " bags; give " + std::to_string(gradient_floats_) +
                 " for " + std::to_string(pieces_.size()));
  }
  std::vector<double> exact(repeated_floats_, 0.0);
  for (size_t p = 0; p < pieces_.size(); ++p) {
    const Piece& piece = pieces_[p];
    const BagGradients& from = bags[p];
    const uint32_t dim = (*tables_)[piece.table].dim;
    if (from.stride < dim) {
      return Wrong("gradients " + std::to_string(from.stride) + " floats apart are less than dim " +
                   std::to_string(dim));
    }
    const uint32_t* const places = places_.data() + piece.first;
    ForEachBag(piece.keys, from.offsets, [&](size_t bag, size_t k, size_t end) {
      const float* gradient = from.gradients + bag * from.stride;
      for (size_t i = k; i < end; ++i) {
        if (places[i] == kNone) continue;
        if (counts_[places[i]] == 1) {
          std::copy_n(gradient, dim, sums.data() + gradient_at_[places[i]]);
          continue;
        }
        double* sum = exact.data() + exact_at_[places[i]];
        for (uint32_t d = 0; d < dim; ++d) sum[d] += static_cast<double>(gradient[d]);
      }
    });
  }
  // Keys that occur several times, which lie apart in `exact`.
  size_t key = 0;
  for (size_t block = 0; block < lengths_.size(); ++block) {
    const uint32_t dim = (*tables_)[block % tables_->size()].dim;
    for (uint32_t n = lengths_[block]; n > 0; --n, ++key) {
      if (counts_[key] == 1) continue;
      const double* sum = exact.data() + exact_at_[key];
      float* out = sums.data() + gradient_at_[key];
      for (uint32_t d = 0; d < dim; ++d) out[d] = static_cast<float>(sum[d]);
    }
  }
  return Status::Ok();
}

}  // namespace embertide
