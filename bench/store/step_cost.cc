// What a training step costs, its lookup and its gradients apart: run as it is for nanoseconds,
// under `valgrind --tool=callgrind` for instructions. Prints the nanoseconds of CPU a key as JSON.
//
//   step_cost ROWS DIM BAG BATCHES PLACES EXPONENT
//
// Batches of 200,000 keys in bags of BAG, drawn as by lookup_cost; row-wise Adagrad, utilities of
// four chunks. PLACES 1: the lookup tells where it found rows; 0: gradients look for them again.
// The first batch is not counted.
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "cost.h"
#include "embertide/row.h"
#include "one_table.h"

namespace embertide {
namespace {

constexpr uint32_t kChunks = 4;
constexpr uint64_t kRowBytes = 80;  // of index and state, at most

std::unique_ptr<Store> OpenTraining(uint64_t rows, uint32_t dim) {
  TableConfig table;
  table.name = "table";
  table.layout = {kChunks, static_cast<uint16_t>(dim / kChunks), DType::kFp32};
  table.bucket_bits = static_cast<uint32_t>(std::bit_width(rows / 100'000));
  StoreOptions options;
  options.tables = {table};
  options.profile = Profile::kTrain;
  options.ddr_budget_bytes = rows * (4 * dim + kRowBytes) + (64ULL << 20);
  auto opened = Store::Open(options);
  if (!opened.ok()) ExitIfError(opened.status());
  std::vector<int64_t> keys(rows);
  for (uint64_t row = 0; row < rows; ++row) keys[row] = static_cast<int64_t>(KeyOf(row));
  const auto made = (*opened)->EnsureRows(0, keys);
  if (!made.ok()) ExitIfError(made.status());
  SettleMemory(opened->get());
  return std::move(*opened);
}

// What callgrind collects: everything below the two.
[[gnu::noinline]] void MeasuredLookup(const Store& store, const LookupRequest& request) {
  auto view = store.PinNewest();
  if (!view.ok()) ExitIfError(view.status());
  ExitIfError(view->Lookup({&request, 1}, 1));
}

[[gnu::noinline]] void MeasuredGradients(Store* store, const BagGradients& bags) {
  const auto done = store->ApplyGradients({&bags, 1}, {0.01F}, 1);
  if (!done.ok()) ExitIfError(done.status());
}

void Run(uint64_t rows, uint32_t dim, uint32_t bag, size_t batches, bool places, double exponent) {
  const auto store = OpenTraining(rows, dim);
  const std::vector<std::vector<int64_t>> drawn = Draw(rows, batches + 1, exponent);
  const std::vector<uint32_t> offsets = BagsOf(bag);
  std::vector<float> out((offsets.size() - 1) * dim);
  std::vector<float> gradients(out.size());
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  for (float& each : gradients) each = normal(random);
  std::vector<double> lookups;
  std::vector<double> updates;
  for (size_t batch = 0; batch <= batches; ++batch) {
    RowPlaces told;
    LookupRequest request;
    request.keys = drawn[batch];
    request.pooling = Pooling::kSum;
    request.offsets = offsets;
    request.out = out.data();
    request.out_stride = dim;
    if (places) request.places = &told;
    BagGradients bags{0, drawn[batch], offsets, gradients.data(), dim};
    if (places) bags.places = &told;
    const double begin = CpuSeconds();
    MeasuredLookup(*store, request);
    const double looked_up = CpuSeconds();
    MeasuredGradients(store.get(), bags);
    if (batch == 0) continue;
    lookups.push_back(looked_up - begin);
    updates.push_back(CpuSeconds() - looked_up);
  }
  PrintNs("lookup_ns", std::move(lookups));
  PrintNs("gradients_ns", std::move(updates));
}

}  // namespace
}  // namespace embertide

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: step_cost ROWS DIM BAG BATCHES PLACES EXPONENT\n");
    return 1;
  }
  embertide::Run(std::strtoull(argv[1], nullptr, 10),
                 static_cast<uint32_t>(std::strtoul(argv[2], nullptr, 10)),
                 static_cast<uint32_t>(std::strtoul(argv[3], nullptr, 10)),
                 std::strtoull(argv[4], nullptr, 10), std::strtol(argv[5], nullptr, 10) != 0,
                 std::strtod(argv[6], nullptr));
}
