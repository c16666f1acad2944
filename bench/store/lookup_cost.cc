// What a pooled lookup costs by stage: run as it is for nanoseconds, under `valgrind
// --tool=callgrind` for instructions. Prints the nanoseconds of CPU a key as JSON.
//
//   lookup_cost ROWS DIM BATCHES SUMS INDEX EXPONENT
//
// Batches of 200,000 keys in bags of 10, the i-th most frequent with weight i^-EXPONENT (0: all
// alike; not 1); the first is not counted.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <random>
#include <thread>
#include <vector>

#include "../zipf.h"
#include "embertide/hash.h"
#include "embertide/row.h"
#include "one_table.h"

namespace embertide {
namespace {

constexpr size_t kKeys = 200'000;
constexpr uint32_t kBag = 10;
// Prime: rank -> row is a bijection that scatters the frequent rows.
constexpr uint64_t kScatter = 2'654'435'761;

// The keys of rows: hashed, as ids of users and items are.
uint64_t KeyOf(uint64_t row) { return HashKey(row + 0x5EED); }

double CpuSeconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Maintains the store until what it holds lies in huge pages, as far as the system gives any.
void SettleMemory(Store* store) {
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
std::vector<std::vector<int64_t>> Draw(uint64_t rows, size_t batches, double exponent) {
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

// What callgrind collects: everything below it.
[[gnu::noinline]] void Measured(const ReadView& view, const LookupRequest& request) {
  ExitIfError(view.Lookup(request));
}

void Run(uint64_t rows, uint32_t dim, size_t batches, SumKind sums, IndexKind index,
         double exponent) {
  const uint32_t bits = static_cast<uint32_t>(std::bit_width(rows / 100'000));
  const auto store = OpenOneTable(dim, bits, rows, rows * 40 + (64ULL << 20), nullptr, sums, index);
  const RowLayout layout{1, static_cast<uint16_t>(dim), DType::kFp32};
  std::vector<float> values(dim, 1.0F);
  std::vector<std::byte> payload(layout.PayloadBytes(1));
  EncodePayload(layout, 1, values.data(), payload.data());
  std::vector<std::vector<std::byte>> records(1U << bits);
  for (uint64_t row = 0; row < rows; ++row) {
    const uint64_t key = KeyOf(row);
    AppendRecord({key, 1, RecordKind::kRow, payload}, &records[BucketOfHash(HashKey(key), bits)]);
  }
  for (uint32_t b = 0; b < records.size(); ++b) {
    ExitIfError(store->StageRecords(1, 0, b, records[b]));
    records[b] = {};
  }
  ExitIfError(store->Commit(1));
  SettleMemory(store.get());
  auto pinned = store->Pin(1);
  if (!pinned.ok()) ExitIfError(pinned.status());
  const std::vector<std::vector<int64_t>> drawn = Draw(rows, batches + 1, exponent);
  std::vector<uint32_t> offsets(kKeys / kBag + 1);
  for (uint32_t b = 0; b < offsets.size(); ++b) offsets[b] = b * kBag;
  std::vector<float> out((offsets.size() - 1) * dim);
  std::vector<uint8_t> sources(kKeys);
  LookupRequest request;
  request.table = 0;
  request.pooling = Pooling::kSum;
  request.offsets = offsets;
  request.out = out.data();
  request.out_stride = dim;
  request.source = sources.data();
  std::vector<double> seconds;
  for (size_t batch = 0; batch <= batches; ++batch) {
    request.keys = drawn[batch];
    const double begin = CpuSeconds();
    Measured(*pinned, request);
    if (batch > 0) seconds.push_back(CpuSeconds() - begin);
  }
  std::ranges::sort(seconds);
  std::printf("{\"ns\": %.3f, \"least\": %.3f, \"keys\": %zu}\n",
              1e9 * seconds[seconds.size() / 2] / static_cast<double>(kKeys),
              1e9 * seconds[0] / static_cast<double>(kKeys), (batches + 1) * kKeys);
}

}  // namespace
}  // namespace embertide

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: lookup_cost ROWS DIM BATCHES SUMS INDEX EXPONENT\n");
    return 1;
  }
  auto sums = embertide::ParseSumKind(argv[4]);
  if (!sums.ok()) embertide::ExitIfError(sums.status());
  auto index = embertide::ParseIndexKind(argv[5]);
  if (!index.ok()) embertide::ExitIfError(index.status());
  embertide::Run(std::strtoull(argv[1], nullptr, 10),
                 static_cast<uint32_t>(std::strtoul(argv[2], nullptr, 10)),
                 std::strtoull(argv[3], nullptr, 10), *sums, *index, std::strtod(argv[6], nullptr));
}
