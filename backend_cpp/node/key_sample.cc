// The sample in memory and as a message: see the header.
#include "node/key_sample.h"

#include <algorithm>
#include <map>
#include <utility>

#include "embertide/v1/key_sample.pb.h"

namespace embertide {

KeySample::Lookup KeySample::KeysOf(std::span<const BagFeature> features, const KeyBags& request) {
  std::map<uint32_t, std::vector<int64_t>> by_table;
  for (size_t b = 0; b < request.bags(); ++b) {
    std::vector<int64_t>& keys = by_table[features[b % features.size()].table];
    const size_t end = request.offsets.empty() ? b + 1 : request.offsets[b + 1];
    for (size_t k = request.begin_of(b); k < end; ++k) {
      if (request.remote_of == nullptr || request.remote_of[k] == 0) {
        keys.push_back(request.keys[k]);
      }
    }
  }
  Lookup lookup;
  for (auto& [table, keys] : by_table) {
    if (!keys.empty()) lookup.push_back({table, std::move(keys)});
  }
  return lookup;
}

uint64_t KeySample::BytesOf(const Lookup& lookup) {
  uint64_t bytes = sizeof(Lookup);
  for (const Keys& of : lookup) bytes += sizeof(Keys) + of.keys.capacity() * sizeof(int64_t);
  return bytes;
}

void KeySample::Add(Lookup lookup) {
  if (lookup.empty()) return;
  for (Keys& of : lookup) {
    std::ranges::sort(of.keys);
    const auto twice = std::ranges::unique(of.keys);
    of.keys.erase(twice.begin(), twice.end());
    of.keys.shrink_to_fit();
  }
  const uint64_t bytes = BytesOf(lookup);
  const MutexLock lock(mutex_);
  if (bytes > max_bytes_ / kLargest) {
    ++too_large_;
    return;
  }
  ++taken_;
  while (bytes_ + bytes > max_bytes_) {
    const size_t gone = HashKey(drawn_++) % lookups_.size();
    bytes_ -= BytesOf(lookups_[gone]);
    std::swap(lookups_[gone], lookups_.back());
    lookups_.pop_back();
  }
  bytes_ += bytes;
  lookups_.push_back(std::move(lookup));
}

KeySample::Figures KeySample::figures() const {
  const MutexLock lock(mutex_);
  return {lookups_.size(), bytes_, taken_, too_large_};
}

std::string KeySample::Serialized(std::span<const TableConfig> tables) const {
  v1::KeySample sample;
  const MutexLock lock(mutex_);
  for (const Lookup& lookup : lookups_) {
    v1::SampledLookup* to = sample.add_lookups();
    for (const Keys& of : lookup) {
      v1::SampledKeys* keys = to->add_tables();
      keys->set_table(tables[of.table].name);
      keys->mutable_keys()->Add(of.keys.begin(), of.keys.end());
    }
  }
  return sample.SerializeAsString();
}

Result<std::vector<KeySample::Lookup>> KeySample::Parse(const std::string& text,
                                                        std::span<const TableConfig> tables,
                                                        uint64_t max_bytes) {
  v1::KeySample sample;
  if (!sample.ParseFromString(text)) {
    return Status(Code::kCorrupt, "it is no sample of keys, or was cut off");
  }
  std::map<std::string, uint32_t> numbers;
  for (size_t t = 0; t < tables.size(); ++t) numbers[tables[t].name] = static_cast<uint32_t>(t);
  std::vector<Lookup> lookups;
  uint64_t bytes = 0;
  for (const v1::SampledLookup& from : sample.lookups()) {
    Lookup lookup;
    for (const v1::SampledKeys& of : from.tables()) {
      bytes += static_cast<uint64_t>(of.keys_size()) * sizeof(int64_t);
      if (bytes > max_bytes) {
        return Status(Code::kCorrupt,
                      "it has more than " + std::to_string(max_bytes) + " bytes of keys");
      }
      const auto number = numbers.find(of.table());
      if (number == numbers.end()) continue;
      lookup.push_back({number->second, {of.keys().begin(), of.keys().end()}});
    }
    if (!lookup.empty()) lookups.push_back(std::move(lookup));
  }
  return lookups;
}

}  // namespace embertide
