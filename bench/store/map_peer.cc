// Bytes that absl::flat_hash_map takes over its payload while it grows: what a plain C++ store of
// rows would cost. Prints {"mean": .., "worst": ..}; run by bench.store.memory.
//
//   map_peer ROWS FROM        counted from FROM rows on
#include <absl/container/flat_hash_map.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "embertide/hash.h"

namespace {

constexpr uint64_t kPayloadBytes = 128;
using Row = std::array<float, kPayloadBytes / sizeof(float)>;

uint64_t g_bytes = 0;

// Counts what the map asks for; while it grows, that is the old table and the new one.
template <typename T>
struct Counting {
  using value_type = T;
  Counting() = default;
  template <typename U>
  explicit Counting(const Counting<U>& /*other*/) {}
  T* allocate(size_t n) {
    g_bytes += n * sizeof(T);
    return std::allocator<T>().allocate(n);
  }
  void deallocate(T* at, size_t n) {
    g_bytes -= n * sizeof(T);
    std::allocator<T>().deallocate(at, n);
  }
  bool operator==(const Counting& /*other*/) const { return true; }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "map_peer ROWS FROM\n");
    return 2;
  }
  const uint64_t rows = std::strtoull(argv[1], nullptr, 10);
  const uint64_t from = std::strtoull(argv[2], nullptr, 10);
  using Pair = std::pair<const uint64_t, Row>;
  absl::flat_hash_map<uint64_t, Row, absl::Hash<uint64_t>, std::equal_to<>, Counting<Pair>> map;
  double sum = 0;
  double worst = 0;
  for (uint64_t row = 0; row < rows; ++row) {
    const uint64_t before = g_bytes;
    map.emplace(embertide::HashKey(row), Row{});
    if (row < from) continue;
    const auto now = static_cast<double>(g_bytes) / static_cast<double>(row + 1);
    // A table that grew held both for a moment.
    const double peak = g_bytes == before
                            ? now
                            : static_cast<double>(g_bytes + before) / static_cast<double>(row + 1);
    sum += now;
    worst = std::max(worst, peak);
  }
  const double payload = kPayloadBytes;
  std::printf("{\"mean\": %.3f, \"worst\": %.3f}\n",
              sum / static_cast<double>(rows - from) - payload, worst - payload);
  return 0;
}
