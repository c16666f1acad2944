// What a pooled lookup costs by stage: run as it is for nanoseconds, under `valgrind
// --tool=callgrind` for instructions. Prints the nanoseconds of CPU a key as JSON.
//
//   lookup_cost ROWS DIM BATCHES SUMS INDEX
//
// Batches of 200,000 keys in bags of 10, drawn evenly from the rows; the first is not counted.
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <random>
#include <thread>
#include <vector>

#include "embertide/hash.h"
#include "embertide/row.h"
#include "one_table.h"

namespace embertide {
namespace {

constexpr size_t kKeys = 200'000;
constexpr uint32_t kBag = 10;

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

// What callgrind collects: everything below it.
[[gnu::noinline]] void Measured(const ReadView& view, const LookupRequest& request) {
  ExitIfError(view.Lookup(request));
}

void Run(uint64_t rows, uint32_t dim, size_t batches, SumKind sums, IndexKind index) {
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
  std::mt19937_64 random(3);
  std::vector<int64_t> keys(kKeys);
  std::vector<uint32_t> offsets(kKeys / kBag + 1);
  for (uint32_t b = 0; b < offsets.size(); ++b) offsets[b] = b * kBag;
  std::vector<float> out((offsets.size() - 1) * dim);
  std::vector<uint8_t> sources(kKeys);
  LookupRequest request;
  request.table = 0;
  request.keys = keys;
  request.pooling = Pooling::kSum;
  request.offsets = offsets;
  request.out = out.data();
  request.out_stride = dim;
  request.source = sources.data();
  double seconds = 0.0;
  for (size_t batch = 0; batch <= batches; ++batch) {
    for (int64_t& key : keys) key = static_cast<int64_t>(KeyOf(random() % rows));
    const double begin = CpuSeconds();
    Measured(*pinned, request);
    if (batch > 0) seconds += CpuSeconds() - begin;
  }
  std::printf("{\"ns\": %.3f, \"keys\": %zu}\n",
              1e9 * seconds / static_cast<double>(batches * kKeys), (batches + 1) * kKeys);
}

}  // namespace
}  // namespace embertide

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: lookup_cost ROWS DIM BATCHES SUMS INDEX\n");
    return 1;
  }
  auto sums = embertide::ParseSumKind(argv[4]);
  if (!sums.ok()) embertide::ExitIfError(sums.status());
  auto index = embertide::ParseIndexKind(argv[5]);
  if (!index.ok()) embertide::ExitIfError(index.status());
  embertide::Run(std::strtoull(argv[1], nullptr, 10),
                 static_cast<uint32_t>(std::strtoul(argv[2], nullptr, 10)),
                 std::strtoull(argv[3], nullptr, 10), *sums, *index);
}
