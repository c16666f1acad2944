// What a pooled lookup costs by stage: run as it is for nanoseconds, under `valgrind
// --tool=callgrind` for instructions. Prints the nanoseconds of CPU a key as JSON.
//
//   lookup_cost ROWS DIM BATCHES SUMS INDEX EXPONENT
//
// Batches of 200,000 keys in bags of 10, the i-th most frequent with weight i^-EXPONENT (0: all
// alike; not 1); the first is not counted.
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "cost.h"
#include "embertide/row.h"
#include "one_table.h"

namespace embertide {
namespace {

constexpr uint32_t kBag = 10;

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
  const std::vector<uint32_t> offsets = BagsOf(kBag);
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
  PrintNs("ns", std::move(seconds));
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
