// Sampling reads, and replaying them.
#include "node/miss_meter.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <utility>

#include "simulation/simulate.h"

namespace embertide {
namespace {

constexpr uint64_t kSamples = 1 << 16;  // of the ring
constexpr size_t kMaxWindows = 256;
constexpr size_t kMinWindows = 8;
// More samples a window than this, and the ring would cover too few windows.
constexpr uint64_t kMaxAWindow = kSamples / (2 * kMinWindows);
// Fewer say nothing.
constexpr size_t kMinSamples = 200;
constexpr uint32_t kPoints = 16;
constexpr uint32_t kMinOfDistinct = 512;  // the first point is a so-manieth of the distinct keys

// Geometric, from a small part of the distinct keys to all of them.
std::vector<uint32_t> Capacities(uint32_t distinct) {
  std::vector<uint32_t> capacities;
  const double first = std::max(1.0, static_cast<double>(distinct) / kMinOfDistinct);
  for (uint32_t p = 0; p < kPoints; ++p) {
    const double share = static_cast<double>(p) / (kPoints - 1);
    const auto capacity =
        static_cast<uint32_t>(std::lround(first * std::pow(distinct / first, share)));
    if (capacities.empty() || capacity > capacities.back()) capacities.push_back(capacity);
  }
  return capacities;
}

// Misses among the keys after the first `warm`, with room for so many keys.
Result<uint64_t> Misses(const Trace& all, const Trace* warm, uint64_t counted, uint32_t capacity) {
  const Result<SimulationResult> whole = Simulate(all, {"clock", capacity});
  if (!whole.ok()) return whole.status();
  uint64_t hits = whole.value().hits;
  if (warm != nullptr) {
    const Result<SimulationResult> first = Simulate(*warm, {"clock", capacity});
    if (!first.ok()) return first.status();
    hits -= first.value().hits;
  }
  return counted - hits;
}

// The keys of one table on one device, in the order in which they were read.
struct Stream {
  std::vector<int64_t> keys;
  size_t warm = 0;
  size_t counted() const { return keys.size() - warm; }
};

// `reads`: of all keys that the counted samples stand for.
std::optional<MissCurve> CurveOf(const Stream& stream, double factor, double reads,
                                 const TableRows& rows) {
  const Result<Trace> all = Trace::FromKeys(stream.keys);
  const auto warm = Trace::FromKeys(std::span(stream.keys).first(stream.warm));
  if (!all.ok() || rows.rows == 0) return std::nullopt;
  const double row_bytes = static_cast<double>(rows.bytes) / static_cast<double>(rows.rows);
  MissCurve curve;
  curve.bytes.push_back(0);
  curve.missed.push_back(1);
  for (const uint32_t capacity : Capacities(all.value().distinct())) {
    const Result<uint64_t> misses =
        Misses(all.value(), stream.warm > 0 ? &warm.value() : nullptr, stream.counted(), capacity);
    if (!misses.ok()) return std::nullopt;
    const auto bytes = static_cast<uint64_t>(capacity * factor * row_bytes);
    if (bytes >= rows.bytes) break;
    const double missed = static_cast<double>(misses.value()) * factor / reads;
    if (bytes <= curve.bytes.back()) continue;
    curve.bytes.push_back(bytes);
    curve.missed.push_back(std::min(curve.missed.back(), missed));
  }
  curve.bytes.push_back(rows.bytes);  // all of them: none is missed
  curve.missed.push_back(0);
  return curve;
}

}  // namespace

bool MissMeter::Samples(uint64_t hash) const {
  // Mixed again: of the watched ones, some bits are all alike, and buckets share others.
  const uint64_t bits = (hash ^ (hash >> 29)) * 0xBF58476D1CE4E5B9ULL;
  return (bits >> 40 & ((uint64_t{1} << halvings_) - 1)) == 0;
}

void MissMeter::Note(std::span<const WatchedKey> keys) {
  if (!mutex_.try_lock()) {
    dropped_ += keys.size();
    return;
  }
  const MutexLock lock(mutex_, std::adopt_lock);
  for (const WatchedKey& key : keys) {
    if (!Samples(key.hash)) continue;
    if (ring_.size() < kSamples) {
      ring_.push_back(key);
    } else {
      ring_[told_ % kSamples] = key;
    }
    ++told_;
  }
}

void MissMeter::Restart() {
  ring_.clear();
  windows_.clear();
  told_ = 0;
}

void MissMeter::EndWindow(std::vector<uint64_t> reads) {
  const MutexLock lock(mutex_);
  const uint64_t samples = told_ - window_begin_;
  windows_.push_back({window_begin_, std::move(reads)});
  if (samples > kMaxAWindow) {
    halvings_ += std::bit_width(samples / kMaxAWindow);
    Restart();
  } else if (halvings_ > 0 && windows_.size() >= kMaxWindows && told_ < kSamples / 8) {
    --halvings_;
    Restart();
  }
  while (windows_.size() > kMaxWindows ||
         (!windows_.empty() && windows_.front().begin + kSamples < told_)) {
    windows_.pop_front();
  }
  window_begin_ = told_;
}

std::optional<MissMeter::Sample> MissMeter::Take() const {
  const MutexLock lock(mutex_);
  if (windows_.size() < kMinWindows) return std::nullopt;
  const size_t middle = windows_.size() / 2;
  Sample sample;
  sample.factor = static_cast<double>(uint64_t{kWatchEvery} << halvings_);
  for (uint64_t at = windows_.front().begin; at < window_begin_; ++at) {
    sample.keys.push_back(ring_[at % kSamples]);
  }
  sample.warm = windows_[middle].begin - windows_.front().begin;
  sample.reads.resize(tables_);
  for (size_t w = middle; w < windows_.size(); ++w) {
    for (size_t t = 0; t < tables_; ++t) sample.reads[t] += windows_[w].reads[t];
  }
  return sample;
}

std::vector<MissCurve> MissMeter::Curves(
    const std::function<std::optional<uint32_t>(uint32_t, uint32_t)>& device_of,
    const std::function<TableRows(uint32_t, uint32_t)>& rows_of) const {
  const std::optional<Sample> sample = Take();
  if (!sample) return {};
  std::map<std::pair<uint32_t, uint32_t>, Stream> streams;  // by table and device
  std::vector<size_t> counted(tables_);
  for (size_t at = 0; at < sample->keys.size(); ++at) {
    const WatchedKey& key = sample->keys[at];
    const std::optional<uint32_t> device = device_of(key.table, key.bucket);
    if (!device) continue;  // it is read elsewhere
    Stream& stream = streams[{key.table, *device}];
    stream.keys.push_back(static_cast<int64_t>(key.hash));
    if (at < sample->warm) {
      ++stream.warm;
    } else {
      ++counted[key.table];
    }
  }
  std::vector<MissCurve> curves;
  for (const auto& [name, stream] : streams) {
    const auto& [table, device] = name;
    if (stream.counted() < kMinSamples || sample->reads[table] == 0) continue;
    const double share =
        static_cast<double>(stream.counted()) / static_cast<double>(counted[table]);
    std::optional<MissCurve> curve =
        CurveOf(stream, sample->factor, share * static_cast<double>(sample->reads[table]),
                rows_of(table, device));
    if (!curve) continue;
    curve->table = table;
    curve->device = device;
    curves.push_back(std::move(*curve));
  }
  return curves;
}

}  // namespace embertide
