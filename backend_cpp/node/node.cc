// Node: loading a snapshot into a store, and the worker that maintains it.
#include "embertide/node.h"

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

namespace embertide {
namespace {

// How often the worker promotes, evicts and frees; a millisecond of work at most each time.
constexpr std::chrono::milliseconds kMaintainEvery{10};

Result<Pooling> ParsePooling(const std::string& name) {
  if (name == "sum") return Pooling::kSum;
  if (name == "mean") return Pooling::kMean;
  if (name == "none") return Pooling::kNone;
  return Status(Code::kInvalidArgument, "pooling \"" + name + "\"; use sum, mean or none");
}

Result<std::vector<Feature>> ResolveFeatures(const Manifest& manifest) {
  std::map<std::string, uint32_t> tables;
  for (uint32_t t = 0; t < manifest.tables.size(); ++t) tables[manifest.tables[t].name] = t;
  std::vector<Feature> features;
  for (const FeatureConfig& config : manifest.features) {
    const auto table = tables.find(config.table);
    if (table == tables.end()) {
      return Status(Code::kCorrupt, "feature \"" + config.name + "\" names table \"" +
                                        config.table + "\", which the manifest does not have");
    }
    const Result<Pooling> pooling = ParsePooling(config.pooling);
    if (!pooling.ok()) return pooling.status();
    features.push_back(
        {config.name, table->second, manifest.tables[table->second].layout.dim(), pooling.value()});
  }
  if (features.empty()) return Status(Code::kCorrupt, "the manifest has no feature");
  return features;
}

Status LoadBuckets(const std::string& directory, const Manifest& manifest, Store* store) {
  std::map<std::string, uint32_t> tables;
  for (uint32_t t = 0; t < manifest.tables.size(); ++t) tables[manifest.tables[t].name] = t;
  for (const BucketFileInfo& info : manifest.buckets) {
    const auto table = tables.find(info.table);
    if (table == tables.end()) {
      return {Code::kCorrupt,
              info.path + " is of table \"" + info.table + "\", which the manifest does not have"};
    }
    EMBERTIDE_RETURN_IF_ERROR(ReadBucketFile(
        directory, manifest.tables[table->second], info, [&](std::span<const std::byte> records) {
          return store->StageRecords(manifest.version, table->second, info.bucket, records);
        }));
  }
  return store->Commit(manifest.version);
}

}  // namespace

// The background thread of a node.
struct Node::Worker {
  explicit Worker(Store* store) : thread([this, store] { Run(store); }) {}
  ~Worker() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    wake.notify_all();
    thread.join();
  }
  void Run(Store* store) {
    std::unique_lock lock(mutex);
    while (!wake.wait_for(lock, kMaintainEvery, [this] { return stop; })) {
      lock.unlock();
      store->Maintain();
      lock.lock();
    }
  }
  std::mutex mutex;
  std::condition_variable wake;
  bool stop = false;
  std::thread thread;  // last: it uses the members above
};

Result<std::unique_ptr<Node>> Node::Open(const NodeOptions& options) {
  Result<Manifest> manifest = ReadManifest(options.snapshot);
  if (!manifest.ok()) return manifest.status();
  if (manifest->version == 0) return Status(Code::kCorrupt, "manifest.json: version is 0");
  Result<std::vector<Feature>> features = ResolveFeatures(*manifest);
  if (!features.ok()) return features.status();
  StoreOptions store_options;
  store_options.tables = manifest->tables;
  store_options.devices = options.devices;
  store_options.ddr_budget_bytes = options.ddr_budget_bytes;
  store_options.ssd_budget_bytes = options.ssd_budget_bytes;
  store_options.ssd_directory = options.ssd_directory;
  store_options.window_versions = options.window_versions;
  Result<std::unique_ptr<Store>> store = Store::Open(std::move(store_options));
  if (!store.ok()) return store.status();
  EMBERTIDE_RETURN_IF_ERROR(LoadBuckets(options.snapshot, *manifest, store->get()));

  std::unique_ptr<Node> node(new Node());
  node->options_ = options;
  node->manifest_ = std::move(*manifest);
  node->features_ = std::move(*features);
  for (const Feature& feature : node->features_) node->total_dim_ += feature.dim;
  node->store_ = std::move(*store);
  node->worker_ = std::make_unique<Worker>(node->store_.get());
  return node;
}

Node::~Node() { worker_.reset(); }

}  // namespace embertide
