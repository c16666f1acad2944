// What lookup_cost and step_cost have in common: batches, CPU time, and its report.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <random>
#include <thread>
#include <vector>

#include "../zipf.h"
#include "embertide/hash.h"
#include "embertide/store.h"

namespace embertide {

inline constexpr size_t kKeys = 200'000;  // of a batch
// Prime: rank -> row is a bijection that scatters the frequent rows.
inline constexpr uint64_t kScatter = 2'654'435'761;

// The keys of rows: hashed, as ids of users and items are.
inline uint64_t KeyOf(uint64_t row) { return HashKey(row + 0x5EED); }

inline double CpuSeconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Maintains the store until what it holds lies in huge pages, as far as the system gives any.
inline void SettleMemory(Store* store) {
  using std::chrono::milliseconds;
  using std::chrono::steady_clock;
  uint64_t huge = store->Stats().huge_bytes;
  for (auto since = steady_clock::now(); steady_clock::now() - since < milliseconds(1500);) {
    store->Maintain();
    const uint64_t now = store->Stats().huge_bytes;
    if (now != huge) since = steady_clock::now();
    huge = now;
    std::this_thread::sleep_for(milliseconds(10));
  }
}

// Batches of rows, of which no two repeat each other.
inline std::vector<std::vector<int64_t>> Draw(uint64_t rows, size_t batches, double exponent) {
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> uniform;
  std::vector<std::vector<int64_t>> drawn(batches, std::vector<int64_t>(kKeys));
  for (auto& keys : drawn) {
    for (int64_t& key : keys) {
      const uint64_t rank = ZipfRank(uniform(random), rows, exponent);
      key = static_cast<int64_t>(KeyOf(rank * kScatter % rows));
    }
  }
  return drawn;
}

// The places in a batch where bags of so many keys begin and end.
inline std::vector<uint32_t> BagsOf(uint32_t keys) {
  std::vector<uint32_t> offsets(kKeys / keys + 1);
  for (uint32_t b = 0; b < offsets.size(); ++b) offsets[b] = b * keys;
  return offsets;
}

// Nanoseconds a key, in the median and at least.
inline void PrintNs(const char* what, std::vector<double> seconds) {
  std::ranges::sort(seconds);
  std::printf("{\"%s\": %.3f, \"least\": %.3f, \"batches\": %zu}\n", what,
              1e9 * seconds[seconds.size() / 2] / static_cast<double>(kKeys),
              1e9 * seconds[0] / static_cast<double>(kKeys), seconds.size());
}

}  // namespace embertide
