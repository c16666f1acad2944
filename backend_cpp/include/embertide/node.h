// Node: a model loaded for serving: the store filled from a snapshot, pins, counters.
//
// Knows no Triton. Bus, plan and peers join it here, behind the same Pin().
// Thread-safe: any thread may pin and look up; one background thread applies and maintains.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "embertide/snapshot.h"
#include "embertide/store.h"

namespace embertide {

struct NodeOptions {
  std::string name = "node-0";
  std::string snapshot;  // REQUIRED: a snapshot directory
  uint32_t devices = 2;
  uint64_t ddr_budget_bytes = 1ULL << 30;
  uint64_t ssd_budget_bytes = 0;
  std::string ssd_directory;
  uint32_t window_versions = 8;
};

// One feature as lookups need it, resolved from the manifest.
struct Feature {
  std::string name;
  uint32_t table = 0;  // index into Manifest::tables
  uint32_t dim = 0;
  Pooling pooling = Pooling::kSum;
};

class Node {
 public:
  // Loads the whole snapshot. Errors are those of ReadManifest, ReadBucketFile and Store::Open;
  // nothing is left behind when it fails.
  static Result<std::unique_ptr<Node>> Open(const NodeOptions& options);
  ~Node();

  const NodeOptions& options() const { return options_; }
  const Manifest& manifest() const { return manifest_; }
  const std::vector<Feature>& features() const { return features_; }
  // Sum of the features' dims: the width of a `lookup` answer when all features are pooled.
  uint32_t total_dim() const { return total_dim_; }
  const Store& store() const { return *store_; }
  uint64_t plan_epoch() const { return plan_epoch_.load(std::memory_order_acquire); }
  // Pins the newest version that this node holds.
  Result<ReadView> Pin() const { return store_->PinNewest(); }

 private:
  Node() = default;
  NodeOptions options_;
  Manifest manifest_;
  std::vector<Feature> features_;
  uint32_t total_dim_ = 0;
  std::unique_ptr<Store> store_;
  std::atomic<uint64_t> plan_epoch_{1};
  struct Worker;
  std::unique_ptr<Worker> worker_;
};

}  // namespace embertide
