// Counting observed reads.
#include "node/load_meter.h"

#include <time.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

namespace embertide {
namespace {

constexpr size_t kHotKeys = 4096;
constexpr double kToldASecond = 20'000;
constexpr uint32_t kMaxEvery = 1 << 16;

uint64_t ProcessCpuUs() {
  timespec spent{};
  if (clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &spent) != 0) return 0;
  return static_cast<uint64_t>(spent.tv_sec) * 1'000'000 +
         static_cast<uint64_t>(spent.tv_nsec) / 1'000;
}

}  // namespace

LoadMeter::LoadMeter(const std::vector<TableConfig>& tables, std::chrono::milliseconds window)
    : length_(window), begun_(std::chrono::steady_clock::now()), misses_(tables.size()) {
  for (const TableConfig& table : tables) {
    first_.push_back(buckets_);
    buckets_ += table.buckets();
    now_.buckets.emplace_back(table.buckets());
  }
  for (Registers& registers : registers_) {
    registers.reset(new std::atomic<uint8_t>[buckets_ << kRegisterBits]());
  }
  totals_ = TotalsNow();
}

LoadMeter::Totals LoadMeter::TotalsNow() const {
  return {ProcessCpuUs(), requests_.load(std::memory_order_relaxed),
          request_us_.load(std::memory_order_relaxed)};
}

void LoadMeter::NoteAnswered(std::chrono::nanoseconds latency, uint64_t requests) {
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(latency).count();
  requests_.fetch_add(requests, std::memory_order_relaxed);
  request_us_.fetch_add(static_cast<uint64_t>(std::max<int64_t>(0, us)) * requests,
                        std::memory_order_relaxed);
}

void LoadMeter::Turn(std::chrono::steady_clock::time_point now) {
  const auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(now - begun_);
  if (passed < length_) return;
  ++turns_;
  const double seconds = std::chrono::duration<double>(now - begun_).count();
  every_ = static_cast<uint32_t>(
      std::clamp(static_cast<double>(stood_for_) / seconds / kToldASecond, 1.0, double{kMaxEvery}));
  told_ = stood_for_ = 0;
  std::swap(last_, now_);
  misses_.EndWindow(ReadsHere(last_.buckets));
  last_.length = passed;
  const Totals totals = TotalsNow();
  last_.spent = {totals.cpu_us - totals_.cpu_us, totals.requests - totals_.requests,
                 totals.request_us - totals_.request_us};
  totals_ = totals;
  now_.keys.clear();
  now_.least = 0;
  now_.buckets.resize(last_.buckets.size());
  for (size_t t = 0; t < now_.buckets.size(); ++t) {
    now_.buckets[t].assign(last_.buckets[t].size(), {});
  }
  const uint32_t next = 1 - counting_;
  for (size_t i = 0; i < buckets_ << kRegisterBits; ++i) {
    registers_[next][i].store(0, std::memory_order_relaxed);
  }
  counting_ = next;
  begun_ = now;
}

// The number of distinct keys among those that were told.
double LoadMeter::DistinctOf(const Registers& registers, size_t table, size_t bucket) const {
  constexpr double kCount = 32;
  constexpr double kAlpha = 0.697;  // for 32 registers
  double sum = 0;
  double empty = 0;
  const size_t first = (first_[table] + bucket) << kRegisterBits;
  for (size_t r = 0; r < size_t{1} << kRegisterBits; ++r) {
    const uint8_t each = registers[first + r].load(std::memory_order_relaxed);
    sum += std::ldexp(1.0, -each);
    empty += each == 0 ? 1 : 0;
  }
  const double raw = kAlpha * kCount * kCount / sum;
  return raw <= 2.5 * kCount && empty > 0 ? kCount * std::log(kCount / empty) : raw;
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
  if (!mutex_.try_lock()) {
    dropped_ += reads.size();
    return;
  }
  const MutexLock lock(mutex_, std::adopt_lock);
  Turn(std::chrono::steady_clock::now());
  for (const ObservedRead& read : reads) {
    Bucket& bucket = now_.buckets[read.table][read.bucket];
    bucket.bytes += uint64_t{read.bytes} * read.weight;
    bucket.by_source[static_cast<size_t>(read.source)] += read.weight;
    if (read.for_peer) bucket.for_peers += read.weight;
    const auto [at, fresh] = now_.keys.try_emplace({read.table, read.key});
    if (fresh) at->second = {now_.least, now_.least};
    at->second.reads += read.weight;
    stood_for_ += read.weight;
  }
  told_ += reads.size();
  // A burst is not waited out.
  const double most = kToldASecond * std::chrono::duration<double>(length_).count();
  if (static_cast<double>(told_) > 2 * most && every_ < kMaxEvery) {
    every_ = 2 * every_;
    told_ = 0;
  }
  if (now_.keys.size() > 2 * kHotKeys) Prune();
}

std::vector<uint64_t> LoadMeter::ReadsHere(const std::vector<std::vector<Bucket>>& buckets) {
  std::vector<uint64_t> reads;
  for (const std::vector<Bucket>& table : buckets) {
    uint64_t& sum = reads.emplace_back(0);
    for (const Bucket& bucket : table) {
      for (const Source source : {Source::kHbm, Source::kDdr, Source::kSsd, Source::kDefault}) {
        sum += bucket.by_source[static_cast<size_t>(source)];
      }
    }
  }
  return reads;
}

// If two write a register at once, one may be lost: it comes again with the key.
void LoadMeter::Watch(std::span<const WatchedKey> keys) {
  misses_.Note(keys);
  const Registers& registers = registers_[counting_];
  for (const WatchedKey& key : keys) {
    // Mixed again: of those told, some bits of the hash are all alike.
    const uint64_t bits = (key.hash ^ (key.hash >> 29)) * 0xBF58476D1CE4E5B9ULL;
    const size_t bucket = first_[key.table] + key.bucket;
    auto& slot = registers[(bucket << kRegisterBits) + (bits >> (64 - kRegisterBits))];
    const auto rank = static_cast<uint8_t>(1 + std::countl_zero((bits << kRegisterBits) | 1));
    if (slot.load(std::memory_order_relaxed) < rank) slot.store(rank, std::memory_order_relaxed);
  }
}

LoadWindow LoadMeter::Last(size_t hot_keys) const {
  LoadWindow window;
  window.dropped = dropped_.load();
  const MutexLock lock(mutex_);
  const_cast<LoadMeter*>(this)->Turn(std::chrono::steady_clock::now());
  window.number = turns_;
  window.window_ms = static_cast<uint64_t>(last_.length.count());
  window.cpu_us = last_.spent.cpu_us;
  window.requests = last_.spent.requests;
  window.request_us = last_.spent.request_us;
  const Registers& registers = registers_[1 - counting_];
  for (size_t t = 0; t < last_.buckets.size(); ++t) {
    auto& out = window.buckets.emplace_back();
    for (size_t b = 0; b < last_.buckets[t].size(); ++b) {
      const Bucket& bucket = last_.buckets[t][b];
      BucketReads reads;
      reads.bytes = bucket.bytes;
      reads.peer_reads = bucket.for_peers;
      std::ranges::copy(bucket.by_source, reads.by_source.begin());
      reads.asked = std::exchange(reads.by_source[static_cast<size_t>(Source::kRemote)], 0);
      reads.hot_reads = std::exchange(reads.by_source[static_cast<size_t>(Source::kHot)], 0);
      for (const uint64_t count : reads.by_source) reads.reads += count;
      reads.unique_keys =
          static_cast<uint64_t>(std::llround(kWatchEvery * DistinctOf(registers, t, b)));
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
