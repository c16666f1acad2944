// Node: loading a snapshot into a store, and the worker that maintains it.
#include "embertide/node.h"

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <span>
#include <thread>

#include "base/file.h"

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
  return Status::Ok();
}

// The one dense file of a role.
Result<DenseFileInfo> DenseFile(const Manifest& manifest, const std::string& role) {
  for (const DenseFileInfo& file : manifest.dense) {
    if (file.role == role) return file;
  }
  return Status(Code::kRejected, "the snapshot has no dense " + role +
                                     ": it serves kind lookup only, or must be published with one");
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
  if (!options.dense_plugin.empty()) EMBERTIDE_RETURN_IF_ERROR(node->LoadDense());
  EMBERTIDE_RETURN_IF_ERROR(node->AddSnapshotVersion());
  node->worker_ = std::make_unique<Worker>(node->store_.get());
  return node;
}

Node::~Node() { worker_.reset(); }

// The program that proves weights, and that it fits the features.
Status Node::LoadDense() {
  const Result<DenseFileInfo> file = DenseFile(manifest_, "program");
  if (!file.ok()) return file.status();
  EMBERTIDE_RETURN_IF_ERROR(CheckCpu(manifest_.dense_cpu));
  program_path_ = options_.snapshot + "/" + file.value().path;
  const auto proved = ReadProvedFile(program_path_, file.value().bytes, file.value().crc32c);
  if (!proved.ok()) return proved.status();
  Result<std::unique_ptr<DenseProgram>> program = OpenProgram();
  if (!program.ok()) return program.status();
  program_ = std::move(*program);
  if (program_->embedding_dim() != total_dim_ ||
      program_->dense_features() != manifest_.dense_features) {
    return {Code::kRejected,
            "the dense program takes " + std::to_string(program_->dense_features()) + " + " +
                std::to_string(program_->embedding_dim()) +
                " inputs, the snapshot's features give " +
                std::to_string(manifest_.dense_features) + " + " + std::to_string(total_dim_)};
  }
  return Status::Ok();
}

Result<std::unique_ptr<DenseProgram>> Node::OpenProgram() const {
  return DenseProgram::Open(options_.dense_plugin, program_path_);
}

Result<std::shared_ptr<const DenseWeights>> Node::LoadWeights(
    std::span<const std::byte> tensors) const {
  const Result<std::vector<DenseTensor>> parsed = ParseTensors(tensors);
  if (!parsed.ok()) return parsed.status();
  return program_->Load(parsed.value());
}

Status Node::AddSnapshotVersion() {
  auto info = std::make_shared<VersionInfo>();
  info->lineage = manifest_.lineage;
  info->number = manifest_.version;
  info->watermark_ms = manifest_.watermark_ms;
  info->dense_id = manifest_.dense_id;
  if (program_ != nullptr) {
    const Result<DenseFileInfo> file = DenseFile(manifest_, "tensors");
    if (!file.ok()) return file.status();
    const Result<std::string> bytes = ReadProvedFile(options_.snapshot + "/" + file.value().path,
                                                     file.value().bytes, file.value().crc32c);
    if (!bytes.ok()) return bytes.status();
    auto weights = LoadWeights(std::as_bytes(std::span(bytes.value())));
    if (!weights.ok()) return weights.status();
    info->weights = std::move(*weights);
  }
  AddVersion(std::move(info));
  return store_->Commit(manifest_.version);
}

void Node::AddVersion(std::shared_ptr<const VersionInfo> info) {
  const std::shared_ptr<const Versions> old = versions_.load();
  auto next = old ? std::make_shared<Versions>(*old) : std::make_shared<Versions>();
  const uint64_t number = info->number;
  (*next)[number] = std::move(info);
  // A reader that pinned the oldest of the window just before it left still finds it.
  while (next->size() > size_t{2} * options_.window_versions) next->erase(next->begin());
  versions_.store(std::move(next));
}

Result<Pinned> Node::Pin() const {
  // Once round: a version is made known before it can be pinned, and is kept for two windows.
  for (int attempt = 0; attempt < 2; ++attempt) {
    Result<ReadView> view = store_->PinNewest();
    if (!view.ok()) return view.status();
    const std::shared_ptr<const Versions> versions = versions_.load();
    const auto found = versions->find(view->version());
    if (found != versions->end()) return Pinned{std::move(*view), found->second};
  }
  return Status(Code::kVersionGone, "the newest version left the window while it was pinned");
}

}  // namespace embertide
