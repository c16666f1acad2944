// Counting observed reads.
#include "node/load_meter.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

namespace embertide {
namespace {

constexpr size_t kHotKeys = 4096;
constexpr uint32_t kRegisterBits = 5;

// Distinct keys of those told by key, from their registers.
double Distinct(const std::array<uint8_t, 32>& registers) {
  constexpr double kCount = 32;
  constexpr double kAlpha = 0.697;  // for 32 registers
  double sum = 0;
  double empty = 0;
  for (const uint8_t each : registers) {
    sum += std::ldexp(1.0, -each);
    empty += each == 0 ? 1 : 0;
  }
  const double raw = kAlpha * kCount * kCount / sum;
  return raw <= 2.5 * kCount && empty > 0 ? kCount * std::log(kCount / empty) : raw;
}

}  // namespace

LoadMeter::LoadMeter(const std::vector<TableConfig>& tables, std::chrono::milliseconds window)
    : length_(window), begun_(std::chrono::steady_clock::now()) {
  for (const TableConfig& table : tables) now_.buckets.emplace_back(table.buckets());
}

void LoadMeter::Turn(std::chrono::steady_clock::time_point now) {
  const auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(now - begun_);
  if (passed < length_) return;
  ++turns_;
  std::swap(last_, now_);
  last_.length = passed;
  now_.keys.clear();
  now_.least = 0;
  now_.buckets.resize(last_.buckets.size());
  for (size_t t = 0; t < now_.buckets.size(); ++t) {
    now_.buckets[t].assign(last_.buckets[t].size(), {});
  }
  begun_ = now;
}

// Keeps the most read half; what was left out is how far a count may be off from now on.
void LoadMeter::Prune() {
  std::vector<uint64_t> counts;
  counts.reserve(now_.keys.size());
  for (const auto& [key, count] : now_.keys) counts.push_back(count.reads);
  const auto middle = counts.begin() + static_cast<ptrdiff_t>(counts.size() - kHotKeys);
  std::nth_element(counts.begin(), middle, counts.end());
  const uint64_t least = *middle;
  std::erase_if(now_.keys, [&](const auto& each) { return each.second.reads <= least; });
  now_.least = std::max(now_.least, least);
}

void LoadMeter::Observe(std::span<const ObservedRead> reads) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    dropped_ += reads.size();
    return;
  }
  Turn(std::chrono::steady_clock::now());
  for (const ObservedRead& read : reads) {
    Bucket& bucket = now_.buckets[read.table][read.bucket];
    if (read.by_place) {
      bucket.bytes += uint64_t{read.bytes} * kObserveEvery;
      bucket.by_source[static_cast<size_t>(read.source)] += kObserveEvery;
      if (read.for_peer) bucket.for_peers += kObserveEvery;
      const auto [at, fresh] = now_.keys.try_emplace({read.table, read.key});
      if (fresh) at->second = {now_.least, now_.least};
      at->second.reads += kObserveEvery;
    }
    if (read.by_key) {
      // Mixed again: of those told, some bits of the hash are all alike.
      const uint64_t bits = (read.hash ^ (read.hash >> 29)) * 0xBF58476D1CE4E5B9ULL;
      uint8_t& slot = bucket.registers[bits >> (64 - kRegisterBits)];
      const auto rank = static_cast<uint8_t>(1 + std::countl_zero((bits << kRegisterBits) | 1));
      slot = std::max(slot, rank);
    }
  }
  if (now_.keys.size() > 2 * kHotKeys) Prune();
}

LoadWindow LoadMeter::Last(size_t hot_keys) const {
  LoadWindow window;
  window.dropped = dropped_.load();
  const std::lock_guard lock(mutex_);
  const_cast<LoadMeter*>(this)->Turn(std::chrono::steady_clock::now());
  window.number = turns_;
  window.window_ms = static_cast<uint64_t>(last_.length.count());
  for (const auto& table : last_.buckets) {
    auto& out = window.buckets.emplace_back();
    for (const Bucket& bucket : table) {
      BucketReads reads;
      reads.bytes = bucket.bytes;
      reads.peer_reads = bucket.for_peers;
      std::ranges::copy(bucket.by_source, reads.by_source.begin());
      reads.asked = std::exchange(reads.by_source[static_cast<size_t>(Source::kRemote)], 0);
      reads.hot_reads = std::exchange(reads.by_source[static_cast<size_t>(Source::kHot)], 0);
      for (const uint64_t count : reads.by_source) reads.reads += count;
      reads.unique_keys =
          static_cast<uint64_t>(std::llround(kObserveEvery * Distinct(bucket.registers)));
      out.push_back(reads);
    }
  }
  for (const auto& [key, count] : last_.keys) {
    window.hot_keys.push_back({key.first, key.second, count.reads, count.error});
  }
  std::ranges::sort(window.hot_keys, std::greater(), &HotKeyReads::reads);
  if (window.hot_keys.size() > hot_keys) window.hot_keys.resize(hot_keys);
  return window;
}

}  // namespace embertide
