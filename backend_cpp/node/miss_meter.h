// MissMeter: miss curves of tables, from the reads of a sample of keys (spatial sampling by hash:
// Waldspurger et al., "Efficient MRC construction with SHARDS", FAST 2015). The newest samples are
// kept in a ring and replayed through the simulator of policies (simulation/simulate.h) at several
// capacities; the first half of them only warms it up.
//
// LoadMeter is told of all reads of every 64th key. Where these are too many for the ring to cover
// some windows, only every 2nd, 4th, ... of the keys is kept. Hot keys, which are sampled or not
// by chance, distort the counts; the reads of all keys put this right (SHARDS-adj).
//
// Bounded: 1 MiB. Thread-safe; a reader that would wait is not counted.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "embertide/store.h"

namespace embertide {

struct MissCurve {
  uint32_t table = 0;
  uint32_t device = 0;
  std::vector<uint64_t> bytes;  // of rows, ascending from 0 on
  std::vector<double> missed;   // share of the keys looked up; never rises
};

// The size of a table's rows on one device.
struct TableRows {
  uint64_t rows = 0;
  uint64_t bytes = 0;  // with all of them in one tier
};

class MissMeter {
 public:
  explicit MissMeter(size_t tables) : tables_(tables) {}
  void Note(std::span<const WatchedKey> keys);
  // A window ended in which so many keys of each table were looked up here.
  void EndWindow(std::vector<uint64_t> reads);
  // The curves of tables of which enough is known. `device_of` says where a bucket is held.
  std::vector<MissCurve> Curves(
      const std::function<std::optional<uint32_t>(uint32_t table, uint32_t bucket)>& device_of,
      const std::function<TableRows(uint32_t table, uint32_t device)>& rows_of) const;
  // Observations that were not counted.
  uint64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }

 private:
  struct Window {
    uint64_t begin = 0;  // its first sample, counted from the start
    std::vector<uint64_t> reads;
  };
  // The samples that the curves are made of.
  struct Sample {
    std::vector<WatchedKey> keys;
    size_t warm = 0;              // of them, those that warm up
    std::vector<uint64_t> reads;  // of all keys after that, by table
    double factor = 1;            // keys that one sampled key stands for
  };
  bool Samples(uint64_t hash) const EMBERTIDE_REQUIRES(mutex_);
  void Restart() EMBERTIDE_REQUIRES(mutex_);
  std::optional<Sample> Take() const;

  const size_t tables_;
  std::atomic<uint64_t> dropped_{0};
  mutable Mutex mutex_;
  std::vector<WatchedKey> ring_ EMBERTIDE_GUARDED_BY(mutex_);
  // Samples since the start.
  uint64_t told_ EMBERTIDE_GUARDED_BY(mutex_) = 0;
  // The window under way.
  uint64_t window_begin_ EMBERTIDE_GUARDED_BY(mutex_) = 0;
  uint32_t halvings_ EMBERTIDE_GUARDED_BY(mutex_) = 0;
  std::deque<Window> windows_ EMBERTIDE_GUARDED_BY(mutex_);
};

}  // namespace embertide
