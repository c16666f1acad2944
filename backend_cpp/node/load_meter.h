// LoadMeter: what was read lately: per bucket, and which keys most, whether rows came from here,
// for a peer too, or were asked of others. Windows follow each other; the last whole one is told.
// Told of every read while those are few, else of so many that it hears some 20,000 a second, each
// of which stands for the others; and of all reads of a 64th of the keys (for distinct keys, by
// HyperLogLog: Flajolet et al. 2007). Beside them, what the process spent and answered in the
// window.
//
// Bounded: 88 bytes a bucket and window, 4,096 hot keys. Thread-safe; a reader that would wait is
// not counted, and that is.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "embertide/store.h"
#include "node/miss_meter.h"

namespace embertide {

struct BucketReads {
  uint64_t reads = 0;       // here
  uint64_t peer_reads = 0;  // of these, for peers
  uint64_t asked = 0;       // of peers
  uint64_t hot_reads = 0;   // of copies of their rows
  uint64_t unique_keys = 0;
  uint64_t bytes = 0;
  std::array<uint64_t, kSources> by_source{};
};

struct HotKeyReads {
  uint32_t table = 0;
  uint64_t key = 0;
  uint64_t reads = 0;  // at most, and at least reads - error
  uint64_t error = 0;
};

struct LoadWindow {
  uint64_t number = 0;  // 1 for the first; 0: none has passed yet
  uint64_t window_ms = 0;
  uint64_t cpu_us = 0;                            // of all threads of the process
  uint64_t requests = 0;                          // of the node's own, answered
  uint64_t request_us = 0;                        // sum of their latencies
  std::vector<std::vector<BucketReads>> buckets;  // by table, by bucket
  std::vector<HotKeyReads> hot_keys;              // most read first
  uint64_t dropped = 0;                           // observations, since the start
};

class LoadMeter : public ReadObserver {
 public:
  explicit LoadMeter(const std::vector<TableConfig>& tables,
                     std::chrono::milliseconds window = std::chrono::seconds(5));
  uint32_t every() const override { return every_.load(std::memory_order_relaxed); }
  void Observe(std::span<const ObservedRead> reads) override;
  void Watch(std::span<const WatchedKey> keys) override;
  // `requests` of the node's own were answered, each after `latency`. Takes no lock.
  void NoteAnswered(std::chrono::nanoseconds latency, uint64_t requests);
  const MissMeter& misses() const { return misses_; }
  // The last whole window; window_ms is 0 before there is one.
  LoadWindow Last(size_t hot_keys) const;

 private:
  struct Bucket {
    uint64_t bytes = 0;
    uint32_t for_peers = 0;
    std::array<uint32_t, kSources> by_source{};
  };
  static constexpr uint32_t kRegisterBits = 5;
  // HyperLogLog's, of all buckets; of the window under way and of the last one, in turns.
  using Registers = std::unique_ptr<std::atomic<uint8_t>[]>;
  // Since the start, or in a window.
  struct Totals {
    uint64_t cpu_us = 0;
    uint64_t requests = 0;
    uint64_t request_us = 0;
  };
  struct Count {
    uint64_t reads = 0;
    uint64_t error = 0;
  };
  struct KeyHash {
    size_t operator()(const std::pair<uint32_t, uint64_t>& key) const {
      return key.second * 0x9E3779B97F4A7C15ULL + key.first;
    }
  };
  struct Window {
    std::chrono::milliseconds length{0};
    Totals spent;
    std::vector<std::vector<Bucket>> buckets;
    std::unordered_map<std::pair<uint32_t, uint64_t>, Count, KeyHash> keys;
    uint64_t least = 0;  // what a key that is not listed may have been read
  };
  void Turn(std::chrono::steady_clock::time_point now) EMBERTIDE_REQUIRES(mutex_);
  // Keys looked up here, by table.
  static std::vector<uint64_t> ReadsHere(const std::vector<std::vector<Bucket>>& buckets);
  Totals TotalsNow() const;
  void Prune() EMBERTIDE_REQUIRES(mutex_);
  double DistinctOf(const Registers& registers, size_t table, size_t bucket) const;

  const std::chrono::milliseconds length_;
  std::vector<size_t> first_;  // by table, the place of its first bucket
  size_t buckets_ = 0;
  std::array<Registers, 2> registers_;
  std::atomic<uint32_t> counting_{0};  // which of them
  std::atomic<uint32_t> every_{8};
  std::atomic<uint64_t> dropped_{0};
  std::atomic<uint64_t> requests_{0};
  std::atomic<uint64_t> request_us_{0};
  mutable Mutex mutex_;
  std::chrono::steady_clock::time_point begun_ EMBERTIDE_GUARDED_BY(mutex_);
  uint64_t turns_ EMBERTIDE_GUARDED_BY(mutex_) = 0;
  // When the window under way began.
  Totals totals_ EMBERTIDE_GUARDED_BY(mutex_);
  Window now_ EMBERTIDE_GUARDED_BY(mutex_);
  Window last_ EMBERTIDE_GUARDED_BY(mutex_);
  // Reads, in the window under way, and by them.
  uint64_t told_ EMBERTIDE_GUARDED_BY(mutex_) = 0;
  uint64_t stood_for_ EMBERTIDE_GUARDED_BY(mutex_) = 0;
  MissMeter misses_;
};

}  // namespace embertide
