// What it costs that a node counts what it reads: lookups in a store with a load meter and in one
// without, in turn, in one process. Prints the nanoseconds a key of each as JSON, and what share of
// them the meter was told; run by bench.drift.
//
//   metering REPETITIONS SECONDS
//
// Requests of 1,664 Zipf-like keys, each a row of 16 values, as 64 samples of 26 features.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "embertide/hash.h"
#include "embertide/row.h"
#include "node/load_meter.h"
#include "one_table.h"

namespace embertide {
namespace {

constexpr uint64_t kRows = 2'000'000;
constexpr uint32_t kDim = 16;
constexpr uint32_t kBucketBits = 5;
constexpr size_t kKeys = 1664;
constexpr size_t kRequests = 256;
using Clock = std::chrono::steady_clock;

// The keys told are counted on their way.
class Counting : public ReadObserver {
 public:
  explicit Counting(ReadObserver* next) : next_(next) {}
  uint32_t every() const override { return next_->every(); }
  void Watch(std::span<const WatchedKey> keys) override { next_->Watch(keys); }
  void Observe(std::span<const ObservedRead> reads) override {
    told += reads.size();
    next_->Observe(reads);
  }
  uint64_t told = 0;

 private:
  ReadObserver* next_;
};

std::unique_ptr<Store> Fill(ReadObserver* observer) {
  auto store = OpenOneTable(kDim, kBucketBits, kRows, kRows * 40 + (1ULL << 30), observer);
  const RowLayout layout{1, kDim, DType::kFp32};
  const std::vector<float> values(kDim, 1.0F);
  std::vector<std::byte> payload(layout.PayloadBytes(1));
  EncodePayload(layout, 1, values.data(), payload.data());
  std::vector<std::vector<std::byte>> records(1U << kBucketBits);
  for (uint64_t key = 0; key < kRows; ++key) {
    AppendRecord({key, 1, RecordKind::kRow, payload},
                 &records[BucketOfHash(HashKey(key), kBucketBits)]);
  }
  for (uint32_t b = 0; b < records.size(); ++b) {
    ExitIfError(store->StageRecords(1, 0, b, records[b]));
  }
  ExitIfError(store->Commit(1));
  return store;
}

void Run(int repetitions, double seconds) {
  TableConfig table;
  table.layout = {1, kDim, DType::kFp32};
  table.bucket_bits = kBucketBits;
  LoadMeter meter({table});
  Counting counting(&meter);
  const std::unique_ptr<Store> stores[] = {Fill(&counting), Fill(nullptr)};
  std::mt19937_64 random(3);
  std::vector<std::vector<int64_t>> requests(kRequests, std::vector<int64_t>(kKeys));
  for (auto& request : requests) {
    for (int64_t& key : request) {
      const double u = static_cast<double>(random() >> 11) * 0x1p-53;
      key = static_cast<int64_t>(std::pow(u, 4.0) * kRows);  // a hot head and a long tail
    }
  }
  std::vector<float> out(kKeys * kDim);
  std::vector<double> ns[2];
  uint64_t metered = 0;
  for (int r = -1; r < repetitions; ++r) {  // the first is not counted
    // In slices, so that what else the machine does meets both.
    double spent[2] = {};
    uint64_t keys[2] = {};
    while (spent[0] < seconds) {
      for (int s = 0; s < 2; ++s) {
        const auto begin = Clock::now();
        for (const auto& request : requests) {
          auto view = stores[s]->PinNewest();
          ExitIfError(view->Lookup({0, request, Pooling::kNone, {}, out.data(), kDim, nullptr}));
          keys[s] += kKeys;
        }
        spent[s] += std::chrono::duration<double>(Clock::now() - begin).count();
      }
    }
    metered += keys[0];
    for (int s = 0; s < 2 && r >= 0; ++s) {
      ns[s].push_back(spent[s] * 1e9 / static_cast<double>(keys[s]));
    }
  }
  const char* const names[] = {"metered", "plain"};
  std::printf("{\"told\": %.5f", static_cast<double>(counting.told) / static_cast<double>(metered));
  for (int s = 0; s < 2; ++s) {
    std::printf(", \"%s_ns\": [", names[s]);
    for (size_t i = 0; i < ns[s].size(); ++i) std::printf("%s%.3f", i == 0 ? "" : ", ", ns[s][i]);
    std::printf("]");
  }
  std::printf("}\n");
}

}  // namespace
}  // namespace embertide

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "metering REPETITIONS SECONDS\n");
    return 2;
  }
  embertide::Run(std::atoi(argv[1]), std::strtod(argv[2], nullptr));
  return 0;
}
