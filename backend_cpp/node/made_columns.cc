// Resolving a manifest's made columns, and making those of one request.
#include "node/made_columns.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "embertide/hash.h"

namespace embertide {
namespace {

Status Wrong(const std::string& kind, const std::string& name, const std::string& what) {
  return {Code::kCorrupt, "manifest.json: " + kind + " \"" + name + "\" " + what};
}

std::optional<uint32_t> FeatureOf(const Manifest& manifest, const std::string& name) {
  const auto at = std::ranges::find(manifest.features, name, &FeatureConfig::name);
  if (at == manifest.features.end()) return std::nullopt;
  return static_cast<uint32_t>(at - manifest.features.begin());
}

}  // namespace

int64_t CrossKeys(std::span<const int64_t> keys) {
  uint64_t hash = 0;
  for (const int64_t key : keys) hash = HashKey(hash ^ static_cast<uint64_t>(key));
  return static_cast<int64_t>(hash);
}

Result<MadeColumns> MadeColumns::Resolve(const Manifest& manifest) {
  MadeColumns made;
  for (const FeatureConfig& feature : manifest.features) {
    made.columns_.emplace_back().name = feature.name;
  }
  for (const SequenceInfo& sequence : manifest.sequences) {
    EMBERTIDE_RETURN_IF_ERROR(made.ResolveSequence(manifest, sequence));
  }
  EMBERTIDE_RETURN_IF_ERROR(made.ResolveCrosses(manifest));
  EMBERTIDE_RETURN_IF_ERROR(made.ResolveDense(manifest));
  for (uint32_t f = 0; f < made.columns_.size(); ++f) {
    Column& column = made.columns_[f];
    const bool is_made = column.is_place || !column.crossed.empty();
    if (is_made && column.is_source) {
      return Wrong("feature", column.name, "is made by nodes, and others are made from it");
    }
    column.own_place = made.own_columns();
    if (!is_made) made.own_.push_back(f);
  }
  return made;
}

Status MadeColumns::ResolveCrosses(const Manifest& manifest) {
  for (size_t f = 0; f < manifest.features.size(); ++f) {
    const FeatureConfig& feature = manifest.features[f];
    if (feature.crossed.size() == 1) {
      return Wrong("feature", feature.name, "is crossed of one feature");
    }
    for (const std::string& name : feature.crossed) {
      const std::optional<uint32_t> of = FeatureOf(manifest, name);
      if (!of || columns_[f].is_place) {
        return Wrong("feature", feature.name,
                     "is crossed of \"" + name + "\", which is no feature of a request");
      }
      columns_[*of].is_source = true;
      columns_[f].crossed.push_back(*of);
    }
  }
  return Status::Ok();
}

Status MadeColumns::ResolveSequence(const Manifest& manifest, const SequenceInfo& info) {
  const auto wrong = [&](const std::string& what) { return Wrong("sequence", info.name, what); };
  MadeSequence sequence;
  const auto table = std::ranges::find(manifest.tables, info.table, &TableConfig::name);
  if (table == manifest.tables.end() || !table->layout.is_keys()) {
    return wrong("names table \"" + info.table + "\", which is no table of keys");
  }
  sequence.table = static_cast<uint32_t>(table - manifest.tables.begin());
  sequence.row_keys = table->layout.dim();
  sequence.chunk_dim = sequence.chunk_items = table->layout.chunk_dim;
  sequence.times = info.times;
  if (info.times) {
    if (sequence.chunk_dim % 3 != 0) {
      return wrong("has times, and chunks of table " + info.table + " have " +
                   std::to_string(sequence.chunk_dim) + " keys, which is no multiple of 3");
    }
    sequence.chunk_items = sequence.chunk_dim / 3 * 2;
  }
  for (const auto& [name, feature] :
       {std::pair(&info.user, &sequence.user), std::pair(&info.item, &sequence.item)}) {
    const std::optional<uint32_t> of = FeatureOf(manifest, *name);
    if (!of) return wrong("names feature \"" + *name + "\", which the manifest does not have");
    columns_[*of].is_source = true;
    *feature = *of;
  }
  for (const std::string& name : info.columns) {
    const std::optional<uint32_t> of = FeatureOf(manifest, name);
    if (!of || columns_[*of].is_place) {
      return wrong("has column \"" + name + "\", which is no feature, or stands twice");
    }
    columns_[*of].is_place = true;
    sequence.places.push_back(*of);
  }
  const uint32_t items = sequence.row_keys / sequence.chunk_dim * sequence.chunk_items;
  if (sequence.places.empty() || sequence.places.size() > items) {
    return wrong("has " + std::to_string(sequence.places.size()) + " columns; rows of table " +
                 info.table + " have " + std::to_string(items) + " keys");
  }
  sequence.dense = info.dense;
  sequences_.push_back(std::move(sequence));
  return Status::Ok();
}

// Sequences' columns of DENSE are the last ones.
Status MadeColumns::ResolveDense(const Manifest& manifest) {
  dense_ = own_dense_ = manifest.dense_features;
  std::vector<bool> is_made(dense_);
  for (size_t s = 0; s < sequences_.size(); ++s) {
    const std::string& name = manifest.sequences[s].name;
    const uint64_t first = sequences_[s].dense;
    for (uint64_t at = first; at < first + sequences_[s].dense_columns(); ++at) {
      if (at >= dense_ || is_made[at]) {
        return Wrong("sequence", name,
                     "has column " + std::to_string(at) + " of DENSE, of which " + "there are " +
                         std::to_string(dense_) + "; or another sequence has it");
      }
      is_made[at] = true;
      --own_dense_;
    }
  }
  for (uint32_t at = 0; at < own_dense_; ++at) {
    if (is_made[at]) {
      return {Code::kCorrupt, "manifest.json: column " + std::to_string(at) +
                                  " of DENSE is a sequence's, and own columns stand behind it"};
    }
  }
  return Status::Ok();
}

MadeColumns::Bag MadeColumns::BagOf(std::span<const uint32_t> offsets, size_t sample,
                                    uint32_t feature) const {
  const size_t bag = sample * own_.size() + columns_[feature].own_place;
  if (offsets.empty()) return {bag, 1};
  return {offsets[bag], offsets[bag + 1] - offsets[bag]};
}

Status MadeColumns::CheckSources(std::span<const uint32_t> offsets, size_t sample) const {
  for (const uint32_t f : own_) {
    const size_t n = BagOf(offsets, sample, f).keys;
    if (!columns_[f].is_source || n == 1) continue;
    return {Code::kInvalidArgument,
            "feature " + columns_[f].name + " of sample " + std::to_string(sample) + " has " +
                std::to_string(n) +
                " keys; columns are made from it, which takes exactly one key: send one, or send "
                "all " +
                std::to_string(columns_.size()) + " columns"};
  }
  return Status::Ok();
}

Status MadeColumns::Complete(std::span<const int64_t> keys, std::span<const uint32_t> offsets,
                             std::span<const float> weights, WholeRequest* whole) const {
  const bool jagged = !offsets.empty();
  const size_t samples = (jagged ? offsets.size() - 1 : keys.size()) / own_.size();
  const auto key_of = [&](size_t sample, uint32_t feature) {
    return keys[BagOf(offsets, sample, feature).begin];
  };
  whole->rows = samples;
  whole->contexts = 0;
  whole->keys.clear();
  whole->offsets.clear();
  whole->weights.clear();
  whole->keys.reserve(keys.size() + samples * (columns_.size() - own_.size()));
  if (jagged) whole->offsets.push_back(0);
  std::vector<int64_t> together;
  for (size_t s = 0; s < samples; ++s) {
    EMBERTIDE_RETURN_IF_ERROR(CheckSources(offsets, s));
    for (uint32_t f = 0; f < columns_.size(); ++f) {
      const Column& column = columns_[f];
      if (column.is_place) {
        whole->keys.push_back(kNoKey);
      } else if (!column.crossed.empty()) {
        together.clear();
        for (const uint32_t of : column.crossed) together.push_back(key_of(s, of));
        whole->keys.push_back(CrossKeys(together));
      } else {
        const Bag bag = BagOf(offsets, s, f);
        const auto own = keys.subspan(bag.begin, bag.keys);
        whole->keys.insert(whole->keys.end(), own.begin(), own.end());
        if (!weights.empty()) {
          const auto weighs = weights.subspan(bag.begin, bag.keys);
          whole->weights.insert(whole->weights.end(), weighs.begin(), weighs.end());
        }
      }
      if (!weights.empty()) whole->weights.resize(whole->keys.size(), 1.0F);
      if (jagged) whole->offsets.push_back(static_cast<uint32_t>(whole->keys.size()));
    }
  }
  return Status::Ok();
}

void MadeColumns::CompleteDense(std::span<const float> own, WholeRequest* whole) const {
  whole->dense.assign(whole->rows * dense_, 0.0F);
  for (size_t s = 0; s < whole->rows; ++s) {
    std::ranges::copy(own.subspan(s * own_dense_, own_dense_), &whole->dense[s * dense_]);
  }
}

size_t MadeColumns::PlaceOf(const WholeRequest& whole, size_t row, uint32_t feature) const {
  const size_t bag = row * columns_.size() + feature;
  return whole.offsets.empty() ? bag : whole.offsets[bag];
}

size_t MadeColumns::FirstRowOf(const MadeSequence& sequence, const WholeRequest& whole) {
  return whole.contexts == 0 || whole.is_context[sequence.user] ? 0 : whole.contexts;
}

std::vector<int64_t> MadeColumns::UsersOf(const MadeSequence& sequence,
                                          const WholeRequest& whole) const {
  const size_t first = FirstRowOf(sequence, whole);
  const bool of_contexts = whole.contexts != 0 && whole.is_context[sequence.user];
  std::vector<int64_t> users(of_contexts ? whole.contexts : whole.samples());
  for (size_t u = 0; u < users.size(); ++u) {
    users[u] = whole.keys[PlaceOf(whole, first + u, sequence.user)];
  }
  return users;
}

void MadeColumns::PutItems(const MadeSequence& sequence, std::span<const int64_t> rows,
                           WholeRequest* whole) const {
  const size_t first = FirstRowOf(sequence, *whole);
  const size_t places = sequence.places.size();
  const size_t users = rows.size() / sequence.row_keys;
  std::vector<int64_t> items(users * places);
  std::vector<float> gaps(sequence.times ? items.size() : 0);
  std::vector<float> taken(users);
  for (size_t u = 0; u < users; ++u) {
    const int64_t* row = rows.data() + u * sequence.row_keys;
    for (size_t place = 0; place < places; ++place) {
      const size_t in_chunk = place % sequence.chunk_items;
      const int64_t* chunk = row + place / sequence.chunk_items * sequence.chunk_dim;
      const int64_t item = chunk[in_chunk];
      items[u * places + place] = item;
      whole->keys[PlaceOf(*whole, first + u, sequence.places[place])] = item;
      if (item == kNoKey) continue;
      taken[u] += 1.0F;
      if (!sequence.times) continue;
      const auto* seconds = reinterpret_cast<const std::byte*>(chunk + sequence.chunk_items);
      std::memcpy(&gaps[u * places + place], seconds + in_chunk * sizeof(float), sizeof(float));
    }
  }
  if (whole->dense.empty()) return;  // of a model that is only looked up
  for (size_t s = 0; s < whole->samples(); ++s) {
    const size_t u = whole->RowOf(s, sequence.user) - first;
    const auto of_user = std::span(items).subspan(u * places, places);
    const size_t item = PlaceOf(*whole, whole->RowOf(s, sequence.item), sequence.item);
    const int64_t own = whole->keys[item];
    float* dense = &whole->dense[s * dense_ + sequence.dense];
    dense[0] = taken[u];
    dense[1] = std::ranges::find(of_user, own) != of_user.end() ? 1.0F : 0.0F;
    if (sequence.times) std::copy_n(&gaps[u * places], places, dense + 2);
  }
}

}  // namespace embertide
