// Measures the HBM tier once and prints one line of JSON: kernels on rows that are all resident,
// and lookups of a store with the tier, with a small one and without. bench/hbm.py runs it in turns
// with its peer. Usage: hbm_bench gpu|twin ROWS
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "embertide/hash.h"
#include "embertide/serving_store.h"
#include "hbm/device.h"
#include "hbm/places.h"
#include "zipf.h"

namespace embertide {
namespace {

constexpr uint32_t kDim = 128;  // fp32
constexpr uint32_t kRowBytes = kDim * sizeof(float);
constexpr uint32_t kBagKeys = 20;
constexpr int kRounds = 5;

using Samples = std::vector<double>;

double Seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void Must(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

template <typename T>
T Must(Result<T> result) {
  if (!result.ok()) Must(result.status());
  return std::move(*result);
}

// --- the kernels

class Kernels {
 public:
  Kernels(std::unique_ptr<HbmDevice> device, uint32_t rows)
      : device_(std::move(device)), rows_(rows), keys_(std::max(kBagKeys, rows)) {
    stream_ = Must(device_->AddStream());
    host_ = Must(device_->AllocateHost(kStagingBytes));
    staging_ = Must(device_->Allocate(kStagingBytes));
    Fill();
    std::mt19937_64 random(3);
    std::vector<uint64_t> keys(keys_);
    for (uint64_t& key : keys) key = placed_[random() % placed_.size()];
    probe_.keys = OnDevice(keys);
    probe_.tables = OnDevice(std::vector<uint16_t>(keys_, 0));
    probe_.count = keys_;
    probe_.version = 1;
    probe_.refs = OnDevice(std::vector<HbmRef>(keys_));
    probe_.answers = OnDevice(std::vector<uint32_t>(keys_));
    pool_ = Bags(kBagKeys);
    copies_ = Bags(1);
    bytes_ = uint64_t{keys_} * kRowBytes;
    from_ = Must(device_->Allocate(bytes_));
    to_ = Must(device_->Allocate(bytes_));
  }

  // Bytes read and written per second, and keys; each the rate of a few launches in a row.
  nlohmann::json Measure() {
    nlohmann::json answer;
    const double pooled = static_cast<double>(bytes_) * (1.0 + 1.0 / kBagKeys);
    const double copied = 2.0 * static_cast<double>(bytes_);
    for (int round = -1; round < kRounds; ++round) {  // the first warms up
      const double copy =
          Rate([&] { Must(device_->CopyFrom(stream_, to_, device_.get(), from_, bytes_)); });
      const double lookup = Rate([&] { Must(device_->Lookup(stream_, cache_, probe_)); });
      const double pool = Rate([&] { Must(device_->Pool(stream_, pool_)); });
      const double gather = Rate([&] { Must(device_->Pool(stream_, copies_)); });
      const double both = Rate([&] {
        Must(device_->Lookup(stream_, cache_, probe_));
        Must(device_->Pool(stream_, pool_));
      });
      if (round < 0) continue;
      answer["copy_bytes_per_s"].push_back(copy * copied);
      answer["pool_bytes_per_s"].push_back(pool * pooled);
      answer["gather_bytes_per_s"].push_back(gather * copied);
      answer["lookup_and_pool_bytes_per_s"].push_back(both * pooled);
      answer["lookup_keys_per_s"].push_back(lookup * keys_);
      answer["lookup_and_pool_keys_per_s"].push_back(both * keys_);
    }
    return answer;
  }

 private:
  static constexpr uint64_t kStagingBytes = 64ULL << 20;

  // Times a second.
  double Rate(const std::function<void()>& launch) {
    const int launches = device_->name() == "twin" ? 1 : 10;
    return launches / Seconds([&] {
             for (int i = 0; i < launches; ++i) launch();
             Must(device_->Wait(stream_));
           });
  }

  template <typename T>
  T* OnDevice(const std::vector<T>& values) {
    const uint64_t bytes = values.size() * sizeof(T);
    std::byte* memory = Must(device_->Allocate(bytes));
    const auto* from = reinterpret_cast<const std::byte*>(values.data());
    for (uint64_t at = 0; at < bytes; at += kStagingBytes) {
      const uint64_t part = std::min(kStagingBytes, bytes - at);
      std::copy_n(from + at, part, host_);
      Must(device_->Upload(stream_, memory + at, host_, part));
      Must(device_->Wait(stream_));
    }
    return reinterpret_cast<T*>(memory);
  }

  // Rows in the sets and ways that the cache gives them; the few whose sets are full have none.
  void Fill() {
    const uint32_t page_rows = kHbmPageBytes / kRowBytes;
    const uint32_t pages = rows_ / page_rows + 1;
    cache_.sets = rows_ / kHbmWays * 2 + 1;
    cache_.tags = OnDevice(std::vector<uint16_t>(size_t{cache_.sets} * kHbmWays, 0));
    cache_.entries = OnDevice(std::vector<HbmEntry>(size_t{cache_.sets} * kHbmWays));
    cache_.pages = Must(device_->Allocate(uint64_t{pages} * kHbmPageBytes));
    HbmPlaces places(cache_.sets, pages);
    std::vector<uint32_t> emptied;
    constexpr uint32_t kAtOnce = 65536;
    for (uint32_t first = 0; first < rows_; first += kAtOnce) {
      places.BeginBatch(0, &emptied);
      std::vector<HbmPlacement> placements;
      for (uint32_t key = first; key < std::min(rows_, first + kAtOnce); ++key) {
        const auto place = places.Put(0, key, kRowBytes, kHbmOpenEnd, ~0U, 0, &emptied);
        if (place.answer != HbmPlaces::Answer::kPlaced) continue;
        HbmPlacement placement;
        placement.entry = {key, 0, kHbmOpenEnd, place.slot, HbmMeta(0, 1)};
        placement.way = place.way;
        placement.bytes = kRowBytes;  // of the staging memory, whatever it holds
        placements.push_back(placement);
        placed_.push_back(key);
      }
      std::copy(placements.begin(), placements.end(), reinterpret_cast<HbmPlacement*>(host_));
      const uint64_t bytes = placements.size() * sizeof(HbmPlacement);
      Must(device_->Upload(stream_, staging_, host_, bytes));
      Must(device_->Place(stream_, cache_, reinterpret_cast<HbmPlacement*>(staging_),
                          static_cast<uint32_t>(placements.size()), staging_));
      Must(device_->Wait(stream_));
      places.EndBatch(1);
    }
  }

  HbmDevice::PoolArgs Bags(uint32_t bag_keys) {
    std::vector<HbmBag> bags;
    for (uint32_t first = 0; first + bag_keys <= keys_; first += bag_keys) {
      HbmBag bag;
      bag.first = first;
      bag.count = bag_keys;
      bag.out = static_cast<uint32_t>(bags.size()) * kDim;
      bags.push_back(bag);
    }
    const std::vector<HbmTable> tables = {{kDim, 1, kDim, DType::kFp32}};
    HbmDevice::PoolArgs args;
    args.bags = OnDevice(bags);
    args.count = static_cast<uint32_t>(bags.size());
    args.refs = probe_.refs;
    args.tables = OnDevice(tables);
    args.out = reinterpret_cast<float*>(Must(device_->Allocate(bags.size() * kRowBytes)));
    return args;
  }

  std::unique_ptr<HbmDevice> device_;
  const uint32_t rows_;
  const uint32_t keys_;
  uint32_t stream_ = 0;
  std::byte* host_ = nullptr;
  std::byte* staging_ = nullptr;
  HbmDirectory cache_;
  std::vector<uint64_t> placed_;  // keys that have a row
  HbmDevice::LookupArgs probe_;
  HbmDevice::PoolArgs pool_;
  HbmDevice::PoolArgs copies_;
  uint64_t bytes_ = 0;
  std::byte* from_ = nullptr;
  std::byte* to_ = nullptr;
};

// --- the store

class StoreUnderTest {
 public:
  StoreUnderTest(HbmKind kind, uint32_t rows, uint64_t hbm_bytes) : rows_(rows) {
    StoreOptions options;
    TableConfig table;
    table.name = std::string("t");
    table.id = 1;
    table.layout = {1, kDim, DType::kFp32};
    table.bucket_bits = 4;
    options.tables = {table};
    options.ddr_budget_bytes = uint64_t{rows} * kRowBytes * 2 + (1ULL << 30);
    options.hbm_budget_bytes = hbm_bytes;
    options.hbm_kind = kind;
    store_ = Must(ServingStore::Open(options));
    std::vector<std::vector<std::byte>> records(16);
    std::vector<float> values(kDim, 0.5F);
    std::vector<std::byte> payload(kRowBytes);
    for (uint64_t key = 0; key < rows; ++key) {
      values[0] = static_cast<float>(key);
      EncodePayload(table.layout, 1, values.data(), payload.data());
      AppendRecord({key, 1, RecordKind::kRow, payload}, &records[BucketOfHash(HashKey(key), 4)]);
    }
    for (uint32_t bucket = 0; bucket < records.size(); ++bucket) {
      Must(store_->StageRecords(1, 0, bucket, records[bucket]));
    }
    Must(store_->Commit(1));
  }

  // Keys a second of one thread that asks for bags of so many keys, so many keys a request.
  double KeysPerSecond(std::span<const int64_t> keys, size_t bag_keys, size_t request_keys) {
    std::vector<uint32_t> offsets;
    for (size_t at = 0; at <= request_keys; at += bag_keys) {
      offsets.push_back(static_cast<uint32_t>(at));
    }
    std::vector<float> out((offsets.size() - 1) * kDim);
    const ReadView view = Must(store_->PinNewest());
    const size_t requests = keys.size() / request_keys;
    const double seconds = Seconds([&] {
      for (size_t r = 0; r < requests; ++r) {
        Must(view.Lookup({0, keys.subspan(r * request_keys, request_keys), Pooling::kSum, offsets,
                          out.data(), kDim, nullptr}));
      }
    });
    return static_cast<double>(requests * request_keys) / seconds;
  }
  // Until no more rows enter; a fill takes only so many.
  void MakeResident() {
    for (uint64_t before = ~0ULL; hbm_rows() != before;) {
      before = hbm_rows();
      Sweep();
    }
  }
  void Maintain() { store_->Maintain(); }
  uint64_t Hits(Source source) const {
    return store_->Stats().hits[static_cast<size_t>(source)] - before_[static_cast<size_t>(source)];
  }
  void CountFromHere() {
    const StoreStats stats = store_->Stats();
    std::copy(std::begin(stats.hits), std::end(stats.hits), before_.begin());
  }
  double HitShare() const {
    const auto hbm = static_cast<double>(Hits(Source::kHbm));
    return hbm / (hbm + static_cast<double>(Hits(Source::kDdr)));
  }
  uint64_t hbm_rows() const { return store_->Stats().hbm.front().rows; }

 private:
  // Every key is asked for twice, so that it may enter.
  void Sweep() {
    constexpr uint32_t kAtOnce = 4000;
    std::vector<int64_t> keys(kAtOnce);
    for (uint32_t first = 0; first < rows_; first += kAtOnce) {
      for (uint32_t k = 0; k < kAtOnce; ++k) keys[k] = (first + k) % rows_;
      for (int time = 0; time < 2; ++time) KeysPerSecond(keys, kBagKeys, kAtOnce);
      store_->Maintain();
    }
  }

  const uint32_t rows_;
  std::unique_ptr<ServingStore> store_;
  SourceCounts before_{};
};

// Keys of a Zipf law with exponent 1.05.
std::vector<int64_t> ZipfKeys(uint32_t rows, size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform;
  std::vector<int64_t> keys(count);
  for (int64_t& key : keys) {
    key = static_cast<int64_t>(HashKey(ZipfRank(uniform(random), rows, 1.05)) % rows);
  }
  return keys;
}

nlohmann::json MeasureStores(HbmKind kind, uint32_t rows) {
  const uint64_t payload = uint64_t{rows} * kRowBytes;
  StoreUnderTest none(kind, rows, 0);
  StoreUnderTest all(kind, rows, payload * 2);
  StoreUnderTest tenth(kind, rows, payload / 10);
  all.MakeResident();
  for (uint64_t round = 0; round < 300; ++round) {
    tenth.KeysPerSecond(ZipfKeys(rows, 20000, 1000 + round), kBagKeys, 20000);
    tenth.Maintain();
  }
  all.CountFromHere();
  tenth.CountFromHere();
  nlohmann::json answer;
  constexpr size_t kKeys = 400'000;
  // All keys in one request; requests as a server gets them; and those of bags of one key.
  const struct {
    const char* name;
    size_t bag_keys;
    size_t request_keys;
  } cases[] = {{"", kBagKeys, kKeys}, {"requests_", kBagKeys, 2000}, {"single_keys_", 1, 2000}};
  for (int round = -1; round < kRounds; ++round) {
    const std::vector<int64_t> keys = ZipfKeys(rows, kKeys, static_cast<uint64_t>(round + 1));
    for (const auto& [name, bag_keys, request_keys] : cases) {
      const auto told = [&](const char* which, StoreUnderTest* store) {
        const double rate = store->KeysPerSecond(keys, bag_keys, request_keys);
        if (round >= 0) answer[std::string(which) + name + "keys_per_s"].push_back(rate);
      };
      told("ddr_", &none);
      told("hbm_resident_", &all);
      told("hbm_tenth_", &tenth);
    }
  }
  answer["resident_hit_share"] = all.HitShare();
  answer["resident_rows"] = all.hbm_rows();
  answer["tenth_hit_share"] = tenth.HitShare();
  answer["tenth_rows"] = tenth.hbm_rows();
  return answer;
}

}  // namespace

int Run(const std::string& kind, uint32_t rows) {
  nlohmann::json answer;
  answer["rows"] = rows;
  answer["dim"] = kDim;
  answer["bag_keys"] = kBagKeys;
  {
    auto device = kind == "gpu" ? Must(OpenGpu(0)) : OpenTwinDevice();
    answer["device"] = device->name();
    answer["kernels"] = Kernels(std::move(device), rows).Measure();
  }
  const uint32_t store_rows = std::min(rows, 1U << 20);
  answer["store"] = MeasureStores(kind == "gpu" ? HbmKind::kGpu : HbmKind::kTwin, store_rows);
  answer["store"]["rows"] = store_rows;
  std::printf("%s\n", answer.dump().c_str());
  return 0;
}

}  // namespace embertide

int main(int argc, char** argv) {
  const std::string kind = argc == 3 ? argv[1] : "";
  if (kind != "gpu" && kind != "twin") {
    std::fprintf(stderr, "usage: hbm_bench gpu|twin ROWS\n");
    return 2;
  }
  return embertide::Run(kind, static_cast<uint32_t>(std::strtoul(argv[2], nullptr, 10)));
}
