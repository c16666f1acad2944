// ssd_peer: the SSD tier of a Store beside RocksDB, over the same rows, in one process.
//
//   ssd_peer DIRECTORY ROWS DIM MEMORY_BYTES
//
// Both get MEMORY_BYTES: the store as its DDR budget, index included; RocksDB as its block cache,
// its filters and index beside it. Both read past the page cache. When the rows are loaded a line
// of JSON says so. Then each line of standard input is a run, and is answered by a line of JSON:
//
//   store ENGINE THREADS SECONDS BATCH    batches of uniform keys through a pinned view
//   rocksdb - THREADS SECONDS BATCH       the same keys by MultiGet
#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/table.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <random>
#include <sstream>
#include <thread>

#include "embertide/hash.h"
#include "embertide/serving_store.h"
#include "ssd/block_file.h"

namespace embertide {
namespace {

constexpr size_t kBatchLoaded = 2048;  // by RocksDB
constexpr uint64_t kRowsALoad = 1'000'000;
// Buckets of nearly as many rows as an index of 16,384 groups holds: 128 bytes for 5.5 rows.
constexpr uint64_t kRowsABucket = 90'000;

void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "ssd_peer: %s\n", status.ToString().c_str());
  std::exit(1);
}

void Check(const rocksdb::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "ssd_peer: RocksDB: %s\n", status.ToString().c_str());
  std::exit(1);
}

void FillRow(uint64_t key, std::vector<float>* row) {
  for (size_t d = 0; d < row->size(); ++d) {
    (*row)[d] = InitialValue(7, 1, key, static_cast<uint32_t>(d), 1.0F);
  }
}

// One file, read by whichever engine is chosen; the first of them writes.
class ChosenFile : public BlockFile {
 public:
  explicit ChosenFile(const std::string& path) {
    for (const char* name : {"io_uring", "libaio", "pread"}) {
      auto file = OpenBlockFile(path, *ParseSsdEngine(name));
      Check(file.ok() ? Status::Ok() : file.status());
      files_[name] = std::move(*file);
    }
    Choose("io_uring");
  }
  void Choose(const std::string& name) { chosen_ = files_.at(name).get(); }

  Status Read(std::span<const uint64_t> blocks, const BlockSink& sink) override {
    return chosen_.load()->Read(blocks, sink);
  }
  Status Write(uint64_t block, std::span<const std::byte> bytes) override {
    return chosen_.load()->Write(block, bytes);
  }
  Status Sync() override { return chosen_.load()->Sync(); }
  const char* engine() const override { return chosen_.load()->engine(); }
  bool direct() const override { return chosen_.load()->direct(); }

 private:
  std::map<std::string, std::unique_ptr<BlockFile>> files_;
  std::atomic<BlockFile*> chosen_{nullptr};
};

// The work of a thread until the time is over: batches of kBatch keys, answered into floats.
using Answer = std::function<void(std::span<const int64_t> keys, float* out)>;

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

class Bench {
 public:
  Bench(std::string directory, uint64_t rows, uint32_t dim, uint64_t memory)
      : directory_(std::move(directory)), rows_(rows), dim_(dim) {
    OpenStore(memory);
    OpenRocks(memory);
    Load();
    const StoreStats stats = store_->Stats();
    const Store::Usage usage = store_->UsageOf(0, 0);
    std::printf(
        "{\"ddr_rows_share\": %.4f, \"index_bytes\": %lu, \"write_amplification\": %.3f}\n",
        static_cast<double>(usage.ddr_rows) / static_cast<double>(rows_), stats.index_bytes,
        static_cast<double>(stats.ssd.bytes_written) / static_cast<double>(stats.ssd.row_bytes));
    std::fflush(stdout);
  }

  void Run(const std::string& who, const std::string& engine, uint32_t threads, double seconds,
           size_t batch) {
    if (who == "store") file_->Choose(engine);
    std::vector<std::thread> workers;
    std::atomic<bool> stop{false};
    std::atomic<uint64_t> answered{0};
    const uint64_t blocks = store_->Stats().ssd.blocks_read;
    const double cpu = CpuSeconds();
    const auto start = std::chrono::steady_clock::now();
    for (uint32_t t = 0; t < threads; ++t) {
      workers.emplace_back([&, seed = ++seed_] {
        std::mt19937_64 random(seed);
        std::vector<int64_t> keys(batch);
        std::vector<float> out(batch * dim_);
        while (!stop) {
          for (int64_t& key : keys) key = static_cast<int64_t>(random() % rows_);
          who == "store" ? AskStore(keys, out.data()) : AskRocks(keys, out.data());
          Prove(keys.front(), out.data());
          answered += batch;
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    stop = true;
    for (std::thread& worker : workers) worker.join();
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    std::printf("{\"rows\": %lu, \"seconds\": %.6f, \"cpu_seconds\": %.6f, \"blocks\": %lu}\n",
                answered.load(), passed.count(), CpuSeconds() - cpu,
                store_->Stats().ssd.blocks_read - blocks);
    std::fflush(stdout);
  }

 private:
  void OpenStore(uint64_t memory) {
    StoreOptions options;
    TableConfig table;
    table.name = "rows";
    table.id = 1;
    table.layout = {1, static_cast<uint16_t>(dim_), DType::kFp32};
    while ((rows_ >> table.bucket_bits) > kRowsABucket) ++table.bucket_bits;
    options.tables = {table};
    options.ddr_budget_bytes = memory;
    // Segments are packed while they are written; a twentieth more than the rows holds them.
    options.ssd_budget_bytes = rows_ * (dim_ * sizeof(float) + kRowOverhead) * 21 / 20 + (64 << 20);
    options.ssd_directory = directory_;
    options.wrap_ssd = [this](std::unique_ptr<BlockFile> /*file*/) {
      auto chosen = std::make_unique<ChosenFile>(directory_ + "/device-0.log");
      file_ = chosen.get();
      return chosen;
    };
    table_ = table;
    auto store = ServingStore::Open(options);
    Check(store.ok() ? Status::Ok() : store.status());
    store_ = std::move(*store);
  }

  void OpenRocks(uint64_t memory) {
    rocksdb::Options options;
    options.create_if_missing = true;
    options.use_direct_reads = true;
    options.use_direct_io_for_flush_and_compaction = true;
    options.compression = rocksdb::kNoCompression;
    options.write_buffer_size = 256 << 20;
    options.max_background_jobs = 4;
    rocksdb::BlockBasedTableOptions table;
    table.block_cache = rocksdb::NewLRUCache(memory);
    table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
    options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
    rocksdb::DB* db = nullptr;
    Check(rocksdb::DB::Open(options, directory_ + "/rocksdb", &db));
    rocks_.reset(db);
  }

  // RocksDB gets the keys in order; the store by buckets, as snapshots have them.
  void Load() {
    std::vector<float> row(dim_);
    std::vector<std::byte> payload(dim_ * sizeof(float));
    rocksdb::WriteOptions unlogged;
    unlogged.disableWAL = true;
    for (uint64_t first = 0; first < rows_; first += kRowsALoad) {
      std::vector<std::vector<std::byte>> records(table_.buckets());
      rocksdb::WriteBatch batch;
      for (uint64_t key = first; key < std::min(rows_, first + kRowsALoad); ++key) {
        FillRow(key, &row);
        EncodePayload(table_.layout, 1, row.data(), payload.data());
        AppendRecord({key, 1, RecordKind::kRow, payload},
                     &records[BucketOfHash(HashKey(key), table_.bucket_bits)]);
        const auto* bytes = reinterpret_cast<const char*>(row.data());
        Check(batch.Put(KeyOf(static_cast<int64_t>(key)), {bytes, dim_ * sizeof(float)}));
        if (batch.Count() < kBatchLoaded && key + 1 < rows_) continue;
        Check(rocks_->Write(unlogged, &batch));
        batch.Clear();
      }
      Check(rocks_->Write(unlogged, &batch));
      for (uint32_t b = 0; b < records.size(); ++b) {
        Check(store_->StageRecords(1, 0, b, records[b]));
      }
    }
    Check(store_->Commit(1));
    Check(rocks_->Flush({}));
    Check(rocks_->CompactRange({}, nullptr, nullptr));
  }

  // Big-endian: in the order of the keys.
  static std::string KeyOf(int64_t key) {
    const uint64_t swapped = __builtin_bswap64(static_cast<uint64_t>(key));
    return {reinterpret_cast<const char*>(&swapped), sizeof(swapped)};
  }

  void AskStore(std::span<const int64_t> keys, float* out) {
    const Result<ReadView> view = store_->PinNewest();
    Check(view.ok() ? Status::Ok() : view.status());
    Check(view.value().Lookup({0, keys, Pooling::kNone, {}, out, dim_, nullptr}));
  }

  void AskRocks(std::span<const int64_t> keys, float* out) {
    std::vector<std::string> names;
    names.reserve(keys.size());
    for (const int64_t key : keys) names.push_back(KeyOf(key));
    const std::vector<rocksdb::Slice> slices(names.begin(), names.end());
    std::vector<rocksdb::PinnableSlice> values(keys.size());
    std::vector<rocksdb::Status> statuses(keys.size());
    rocks_->MultiGet({}, rocks_->DefaultColumnFamily(), keys.size(), slices.data(), values.data(),
                     statuses.data());
    for (size_t k = 0; k < keys.size(); ++k) {
      Check(statuses[k]);
      std::memcpy(out + k * dim_, values[k].data(), dim_ * sizeof(float));
    }
  }

  void Prove(int64_t key, const float* out) const {
    std::vector<float> row(dim_);
    FillRow(static_cast<uint64_t>(key), &row);
    if (std::equal(row.begin(), row.end(), out)) return;
    std::fprintf(stderr, "ssd_peer: key %ld was answered wrongly\n", key);
    std::exit(1);
  }

  static constexpr uint64_t kRowOverhead = 64;  // of an entry, and its part of a block's tail
  const std::string directory_;
  const uint64_t rows_;
  const uint32_t dim_;
  TableConfig table_;
  std::unique_ptr<ServingStore> store_;
  ChosenFile* file_ = nullptr;
  std::unique_ptr<rocksdb::DB> rocks_;
  uint64_t seed_ = 0;
};

int Main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: ssd_peer DIRECTORY ROWS DIM MEMORY_BYTES\n");
    return 2;
  }
  Bench bench(argv[1], std::stoull(argv[2]), static_cast<uint32_t>(std::stoul(argv[3])),
              std::stoull(argv[4]));
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string who;
    std::string engine;
    uint32_t threads = 0;
    double seconds = 0;
    size_t batch = 0;
    if (!(words >> who >> engine >> threads >> seconds >> batch) || batch == 0) return 2;
    bench.Run(who, engine, threads, seconds, batch);
  }
  return 0;
}

}  // namespace
}  // namespace embertide

int main(int argc, char** argv) { return embertide::Main(argc, argv); }
