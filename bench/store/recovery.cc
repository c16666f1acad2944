// A node's start after a kill. Prints JSON, a line an answer; run by bench.store.recovery.
//
//   recovery write DIR ROWS DIM       writes DIR/snapshot: one table of fp32 rows
//   recovery start DIR ROWS DIM       opens a node on it with DIR/ssd, DDR a tenth of the rows'
//                                     bytes; says when it is ready, then when it has a seal; waits
//                                     to be killed
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "embertide/hash.h"
#include "embertide/node.h"
#include "one_table.h"

namespace embertide {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kMaxSeconds = 600;  // to be ready and to have a seal

double Since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double CpuSeconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct Model {
  std::string directory;
  uint64_t rows = 0;
  TableConfig table;

  std::string snapshot() const { return directory + "/snapshot"; }
  uint64_t bytes() const { return rows * 4 * table.layout.dim(); }
  void Append(uint64_t key, uint64_t version, std::vector<std::byte>* records) const {
    std::vector<float> values(table.layout.dim());
    for (size_t d = 0; d < values.size(); ++d) {
      values[d] = InitialValue(version, 1, key, static_cast<uint32_t>(d), 1.0F);
    }
    std::vector<std::byte> payload(4 * values.size());
    EncodePayload(table.layout, 1, values.data(), payload.data());
    AppendRecord({key, 1, RecordKind::kRow, payload}, records);
  }
};

void Write(const Model& model) {
  Manifest manifest;
  manifest.model = "recovery";
  manifest.version = 1;
  manifest.schema_id = 1;
  manifest.tables = {model.table};
  manifest.features = {{"feature", model.table.name, "sum"}};
  std::vector<std::vector<uint64_t>> keys(model.table.buckets());
  for (uint64_t key = 0; key < model.rows; ++key) {
    keys[BucketOfHash(HashKey(key), model.table.bucket_bits)].push_back(key);
  }
  for (uint32_t bucket = 0; bucket < keys.size(); ++bucket) {
    std::vector<std::byte> records;
    for (const uint64_t key : keys[bucket]) model.Append(key, 1, &records);
    const auto info = WriteBucketFile(model.snapshot(), model.table, bucket, 1, records);
    if (!info.ok()) ExitIfError(info.status());
    manifest.buckets.push_back(info.value());
  }
  ExitIfError(WriteManifest(model.snapshot(), manifest));
}

NodeOptions Options(const Model& model) {
  NodeOptions options;
  options.snapshot = model.snapshot();
  options.devices = 1;
  options.ddr_budget_bytes = model.bytes() / 10;
  options.ssd_budget_bytes = model.bytes() * 3 / 2;
  options.ssd_directory = model.directory + "/ssd";
  options.ssd_seal_interval = std::chrono::milliseconds(1);
  return options;
}

void Start(const Model& model) {
  const auto begin = Clock::now();
  const auto node = Node::Open(Options(model));
  if (!node.ok()) ExitIfError(node.status());
  const ServingStore& store = node.value()->store();
  const Store::Usage usage = store.UsageOf(0, 0);
  std::printf(
      "{\"seconds\": %.4f, \"cpu_seconds\": %.4f, \"from_seal\": %s, \"rows\": %llu, "
      "\"ssd_rows\": %llu}\n",
      Since(begin), CpuSeconds(), node.value()->opened_from_seal() ? "true" : "false",
      static_cast<unsigned long long>(store.Stats().rows),
      static_cast<unsigned long long>(usage.ssd_rows));
  std::fflush(stdout);
  while (store.Stats().seal.version == 0) {
    if (Since(begin) > kMaxSeconds) {
      ExitIfError({Code::kUnavailable, "no seal: " + node.value()->seal_error()});
    }
    usleep(1000);
  }
  const SealStats seal = store.Stats().seal;
  std::printf("{\"sealed_seconds\": %.4f, \"bytes\": %llu}\n", seal.seconds,
              static_cast<unsigned long long>(seal.bytes));
  std::fflush(stdout);
  pause();
}

int Main(int argc, char** argv) {
  const std::string mode = argc > 4 ? argv[1] : "";
  if (mode != "write" && mode != "start") {
    std::fprintf(stderr, "see the head of bench/store/recovery.cc\n");
    return 2;
  }
  Model model;
  model.directory = argv[2];
  model.rows = std::strtoull(argv[3], nullptr, 10);
  model.table.name = "table";
  model.table.layout = {1, static_cast<uint16_t>(std::atoi(argv[4])), DType::kFp32};
  while (model.rows >> model.table.bucket_bits > 100'000) ++model.table.bucket_bits;
  if (mode == "write") {
    Write(model);
  } else {
    Start(model);
  }
  return 0;
}

}  // namespace
}  // namespace embertide

int main(int argc, char** argv) { return embertide::Main(argc, argv); }
