// A node's start after a kill, and what seals cost beside readers and a writer. Prints JSON, a line
// an answer; run by bench.store.recovery.
//
//   recovery write DIR ROWS DIM       writes DIR/snapshot: one table of fp32 rows
//   recovery start DIR ROWS DIM       opens a node on it with DIR/ssd, DDR a tenth of the rows'
//                                     bytes; says when it is ready, then when it has a seal; waits
//                                     to be killed
//   recovery cost DIR ROWS DIM DDR_PERCENT WINDOWS SECONDS
//                                     windows by turns with and without a seal being written:
//                                     latencies of a reader and of a writer, DDR so large; and how
//                                     many calls for one bucket's rows took the writer up to each
//                                     power of two nanoseconds
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "embertide/hash.h"
#include "embertide/node.h"
#include "one_table.h"

namespace embertide {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kBagKeys = 64;
constexpr uint64_t kRecordsAtOnce = 100;
constexpr uint32_t kPowers = 40;
constexpr double kMostSeconds = 600;  // to be ready and to have a seal
constexpr double kSkew = 8;           // most reads are of rows that DDR holds

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
  options.ssd_seal_interval_ms = 1;
  return options;
}

void Start(const Model& model) {
  const auto begin = Clock::now();
  const auto node = Node::Open(Options(model));
  if (!node.ok()) ExitIfError(node.status());
  const Store& store = node.value()->store();
  const Store::Usage usage = store.UsageOf(0, 0);
  std::printf(
      "{\"seconds\": %.4f, \"cpu_seconds\": %.4f, \"from_seal\": %s, \"rows\": %llu, "
      "\"ssd_rows\": %llu}\n",
      Since(begin), CpuSeconds(), node.value()->opened_from_seal() ? "true" : "false",
      static_cast<unsigned long long>(store.Stats().rows),
      static_cast<unsigned long long>(usage.ssd_rows));
  std::fflush(stdout);
  while (store.Stats().seal.version == 0) {
    if (Since(begin) > kMostSeconds) {
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

double Percentile(std::vector<double>* values, double part) {
  if (values->empty()) return 0;
  const auto at = static_cast<size_t>(part * static_cast<double>(values->size() - 1));
  std::nth_element(values->begin(), values->begin() + static_cast<ptrdiff_t>(at), values->end());
  return (*values)[at];
}

// What readers and the writer see, and seals that are written by turns.
class Cost {
 public:
  Cost(const Model& model, uint64_t ddr_percent) : model_(model) {
    StoreOptions options;
    options.tables = {model.table};
    options.ddr_budget_bytes = model.bytes() * ddr_percent / 100;
    options.ssd_budget_bytes = model.bytes() * 2;
    options.ssd_directory = model.directory + "/cost";
    auto opened = Store::Open(options);
    if (!opened.ok()) ExitIfError(opened.status());
    store_ = std::move(*opened);
    std::vector<std::vector<std::byte>> records(model.table.buckets());
    for (uint64_t key = 0; key < model.rows; ++key) {
      const uint32_t bucket = BucketOfHash(HashKey(key), model.table.bucket_bits);
      model.Append(key, 1, &records[bucket]);
      if (records[bucket].size() < (1U << 20) && key + 1 < model.rows) continue;
      ExitIfError(store_->StageRecords(1, 0, bucket, records[bucket]));
      records[bucket].clear();
    }
    for (uint32_t b = 0; b < records.size(); ++b) {
      ExitIfError(store_->StageRecords(1, 0, b, records[b]));
    }
    ExitIfError(store_->Commit(1));
  }

  void Run(int windows, double seconds) {
    std::thread reader([this] { Read(); });
    std::thread writer([this] { WriteVersions(); });
    std::thread worker([this] {
      while (!stop_) {
        store_->Maintain();
        usleep(10'000);
      }
    });
    for (int window = 0; window < 2 * windows; ++window) {
      const int turn = window % 2;
      turn_ = turn;
      const auto begin = Clock::now();
      SealOptions seal;
      seal.model = "recovery";
      seal.name = [](uint64_t number) { return SealedVersion{number, 1, 0}; };
      seal.bytes_per_s = NodeOptions().ssd_seal_bytes_per_s;
      seal.wait = [&](std::chrono::nanoseconds time) {
        std::this_thread::sleep_for(time);
        return Since(begin) < seconds;
      };
      while (Since(begin) < seconds) {
        if (turn == 0) {
          usleep(1000);
        } else {
          static_cast<void>(store_->Seal(seal));  // the window's end gives one up
        }
      }
      Report(turn);
    }
    stop_ = true;
    reader.join();
    writer.join();
    worker.join();
  }

 private:
  uint64_t Key(std::mt19937_64* random) const {
    const double u = static_cast<double>((*random)() >> 11) * 0x1p-53;
    return static_cast<uint64_t>(static_cast<double>(model_.rows) * std::pow(u, kSkew));
  }
  void Note(std::vector<double> (&of)[2], double us) {
    const std::lock_guard lock(mutex_);
    of[turn_].push_back(us);
  }
  void NoteStaged(std::chrono::nanoseconds took) {
    const auto ns = static_cast<uint64_t>(took.count());
    const std::lock_guard lock(mutex_);
    ++staged_[turn_][std::min<size_t>(std::bit_width(ns), kPowers - 1)];
  }
  void Read() {
    std::mt19937_64 random(1);
    std::vector<int64_t> keys(kBagKeys);
    std::vector<float> out(model_.table.layout.dim() * size_t{kBagKeys});
    while (!stop_) {
      for (int64_t& key : keys) key = static_cast<int64_t>(Key(&random));
      const auto begin = Clock::now();
      auto view = store_->PinNewest();
      if (!view.ok()) ExitIfError(view.status());
      ExitIfError(view->Lookup(
          {0, keys, Pooling::kNone, {}, out.data(), model_.table.layout.dim(), nullptr}));
      Note(read_us_, 1e6 * Since(begin));
    }
  }
  // 5,000 rows a second.
  void WriteVersions() {
    std::mt19937_64 random(2);
    uint64_t version = 2;
    std::vector<std::vector<std::byte>> records(model_.table.buckets());
    while (!stop_) {
      for (int part = 0; part < 10; ++part) {
        for (auto& each : records) each.clear();
        for (uint64_t n = 0; n < kRecordsAtOnce; ++n) {
          const uint64_t key = Key(&random);
          model_.Append(key, version,
                        &records[BucketOfHash(HashKey(key), model_.table.bucket_bits)]);
        }
        const auto begin = Clock::now();
        for (uint32_t b = 0; b < records.size(); ++b) {
          if (records[b].empty()) continue;
          const auto staged = Clock::now();
          ExitIfError(store_->StageRecords(version, 0, b, records[b]));
          NoteStaged(Clock::now() - staged);
        }
        Note(write_us_, 1e6 * Since(begin));
        usleep(20'000);
      }
      ExitIfError(store_->Commit(version++));
    }
  }
  void Report(int turn) {
    const std::lock_guard lock(mutex_);
    const SealStats seal = store_->Stats().seal;
    std::printf(
        "{\"sealing\": %s, \"reads\": %zu, \"read_us_p50\": %.2f, \"read_us_p99\": %.2f, "
        "\"writes\": %zu, \"write_us_p50\": %.2f, \"write_us_p99\": %.2f, \"seal_bytes\": %llu, "
        "\"refused\": %llu, \"stage_ns_histogram\": [",
        turn == 1 ? "true" : "false", read_us_[turn].size(), Percentile(&read_us_[turn], 0.5),
        Percentile(&read_us_[turn], 0.99), write_us_[turn].size(),
        Percentile(&write_us_[turn], 0.5), Percentile(&write_us_[turn], 0.99),
        static_cast<unsigned long long>(seal.bytes),
        static_cast<unsigned long long>(store_->Stats().refused_rows));
    for (uint32_t p = 0; p < kPowers; ++p) {
      std::printf("%s%llu", p == 0 ? "" : ", ",
                  static_cast<unsigned long long>(std::exchange(staged_[turn][p], 0)));
    }
    std::printf("]}\n");
    std::fflush(stdout);
    read_us_[turn].clear();
    write_us_[turn].clear();
  }

  const Model model_;
  std::unique_ptr<Store> store_;
  std::atomic<bool> stop_{false};
  std::atomic<int> turn_{0};
  std::mutex mutex_;
  std::vector<double> read_us_[2];
  std::vector<double> write_us_[2];
  std::array<uint64_t, kPowers> staged_[2] = {};
};

int Main(int argc, char** argv) {
  const std::string mode = argc > 4 ? argv[1] : "";
  if (mode != "write" && mode != "start" && (mode != "cost" || argc != 8)) {
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
  } else if (mode == "start") {
    Start(model);
  } else {
    Cost(model, std::strtoull(argv[5], nullptr, 10)).Run(std::atoi(argv[6]), std::atof(argv[7]));
  }
  return 0;
}

}  // namespace
}  // namespace embertide

int main(int argc, char** argv) { return embertide::Main(argc, argv); }
