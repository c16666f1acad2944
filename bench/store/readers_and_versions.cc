// A reader beside a writer of whole versions, in one process. Prints the reader's latencies as
// JSON; run by bench.store.versions.
//
//   readers_and_versions ROWS_PER_S SECONDS
//
// The reader pools 64 bags of 10 Zipf-like keys through a view of the newest version; every 64th
// time it also checks that all rows of a bag are of that one version. The writer commits ten
// versions a second, each of a tenth of ROWS_PER_S random rows.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "embertide/hash.h"
#include "embertide/row.h"
#include "one_table.h"

namespace embertide {
namespace {

constexpr uint64_t kRows = 2'000'000;
constexpr uint32_t kDim = 32;
constexpr uint32_t kBucketBits = 4;
constexpr uint32_t kBags = 64;
constexpr uint32_t kBag = 10;
constexpr int kVersionsPerSecond = 10;
using Clock = std::chrono::steady_clock;

// Every value of a row says the version that wrote it; 0 of the first.
void Append(uint64_t key, float value, std::vector<std::vector<std::byte>>* records) {
  const RowLayout layout{1, kDim, DType::kFp32};
  const std::vector<float> values(kDim, value);
  std::vector<std::byte> payload(layout.PayloadBytes(1));
  EncodePayload(layout, 1, values.data(), payload.data());
  AppendRecord({key, 1, RecordKind::kRow, payload},
               &(*records)[BucketOfHash(HashKey(key), kBucketBits)]);
}

void Stage(ServingStore* store, uint64_t version,
           const std::vector<std::vector<std::byte>>& records) {
  for (uint32_t b = 0; b < records.size(); ++b) {
    ExitIfError(store->StageRecords(version, 0, b, records[b]));
  }
}

void Run(uint64_t rows_per_s, double seconds) {
  const auto opened = OpenOneTable(kDim, kBucketBits, kRows, kRows * 40 + (1ULL << 30));
  ServingStore& store = *opened;
  std::vector<std::vector<std::byte>> records(1U << kBucketBits);
  for (uint64_t key = 0; key < kRows; ++key) Append(key, 1.0F, &records);
  Stage(&store, 1, records);
  ExitIfError(store.Commit(1));

  std::atomic<bool> stop{false};
  uint64_t applied = 0;
  std::thread writer([&] {
    std::mt19937_64 random(2);
    auto next = Clock::now();
    for (uint64_t version = 2; !stop && rows_per_s > 0; ++version) {
      for (auto& each : records) each.clear();
      for (uint64_t r = 0; r < rows_per_s / kVersionsPerSecond; ++r) {
        Append(random() % kRows, static_cast<float>(version), &records);
      }
      Stage(&store, version, records);
      ExitIfError(store.Commit(version));
      store.Maintain();
      ++applied;
      next += std::chrono::milliseconds(1000 / kVersionsPerSecond);
      std::this_thread::sleep_until(next);
    }
  });

  std::mt19937_64 random(3);
  std::vector<int64_t> keys(kBags * kBag);
  std::vector<uint32_t> offsets(kBags + 1);
  for (uint32_t b = 0; b <= kBags; ++b) offsets[b] = b * kBag;
  std::vector<float> out(kBags * kDim);
  std::vector<float> row(kBag * kDim);
  std::vector<double> micros;
  uint64_t mixed = 0;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (Clock::now() < end) {
    for (int64_t& key : keys) {
      const double u = static_cast<double>(random() >> 11) * 0x1p-53;
      key = static_cast<int64_t>(std::pow(u, 4.0) * kRows);  // a hot head and a long tail
    }
    const auto begin = Clock::now();
    auto view = store.PinNewest();
    const Status read = view->Lookup({0, keys, Pooling::kSum, offsets, out.data(), kDim, nullptr});
    micros.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
    ExitIfError(read);
    if (micros.size() % 64 != 0) continue;
    // No row of a later version, and each row whole.
    const std::span<const int64_t> some(keys.data(), kBag);
    ExitIfError(view->Lookup({0, some, Pooling::kNone, {}, row.data(), kDim, nullptr}));
    for (uint32_t k = 0; k < kBag; ++k) {
      const float* values = &row[k * kDim];
      const bool whole =
          std::all_of(values, values + kDim, [&](float v) { return v == values[0]; });
      if (!whole || values[0] > static_cast<float>(view->version())) ++mixed;
    }
  }
  stop = true;
  writer.join();
  std::sort(micros.begin(), micros.end());
  const auto at = [&](double share) {
    return micros[static_cast<size_t>(share * static_cast<double>(micros.size() - 1))];
  };
  std::printf(
      "{\"reads\": %zu, \"versions\": %lu, \"mixed\": %lu, \"p50_us\": %.2f, "
      "\"p99_us\": %.2f, \"worst_us\": %.2f}\n",
      micros.size(), applied, mixed, at(0.5), at(0.99), micros.back());
}

}  // namespace
}  // namespace embertide

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "readers_and_versions ROWS_PER_S SECONDS\n");
    return 2;
  }
  embertide::Run(std::strtoull(argv[1], nullptr, 10), std::strtod(argv[2], nullptr));
  return 0;
}
