// Executor: answers the requests of one execution, all at one version.
//
// An execution reads and proves each request, pins once, then works table by table: collect the
// keys of all requests, find each distinct key once, pool the bags from the rows where they lie.
// `lookup` pools into the outputs; `ranking` into one matrix, on which the dense net runs once for
// all requests. A request that is
// wrong gets its own error and costs the others nothing. Every request is answered, reported and
// released.
//
// One of it in each model instance; used by one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "embertide/node.h"
#include "triton/dedup.h"
#include "triton/metrics.h"
#include "triton/model_config.h"
#include "triton/request.h"
#include "triton/triton_abi.h"

namespace embertide::triton {

// Column of each feature in an answer, and the features of each table.
struct AnswerLayout {
  explicit AnswerLayout(const Node& node);
  std::vector<uint32_t> column;                       // by feature
  std::vector<std::vector<uint32_t>> table_features;  // by table
};

class Executor {
 public:
  // Requires: all arguments outlive it. `program` is its own; null for `lookup`.
  Executor(const ModelConfig& config, const Node& node, std::unique_ptr<DenseProgram> program,
           ModelMetrics* metrics);

  // Takes the requests over. Never throws.
  void Execute(TRITONBACKEND_ModelInstance* instance,
               std::span<TRITONBACKEND_Request* const> requests) noexcept;

 private:
  // A request on its way through an execution.
  struct Job {
    TRITONBACKEND_Request* request = nullptr;
    TRITONBACKEND_Response* response = nullptr;
    std::vector<Tensor> inputs;
    Bags bags;
    std::span<const float> dense;  // samples x dense features
    Refusal refusal;               // reason kNone while all is well
    std::vector<float> unasked;    // the embeddings of a lookup that did not ask for them
    float* embedding = nullptr;    // samples x total_dim
    float* score = nullptr;        // null unless asked for
    uint8_t* source = nullptr;     // null unless asked for
  };

  void Read(Job* job);
  Refusal Prove(Job* job);
  void Answer(std::span<Job> jobs);
  Status AnswerGroup(const Pinned& pinned, std::span<Job*> jobs);
  void PlaceEmbeddings(std::span<Job*> jobs);
  Status LookupTable(RowGather* gather, uint32_t table, std::span<Job*> jobs);
  void Collect(const std::vector<uint32_t>& features, std::span<Job*> jobs);
  void Scatter(const RowGather& gather, uint32_t feature, Job* job, size_t* cursor,
               ModelMetrics::SourceCounts* counts);
  Status Rank(const DenseWeights& weights, std::span<Job*> jobs);
  Status MakeOutputs(const VersionInfo& version, Job* job);
  Status SetParameters(const VersionInfo& version, TRITONBACKEND_Response* response) const;
  void Finish(TRITONBACKEND_ModelInstance* instance, std::span<Job> jobs, uint64_t exec_start_ns,
              uint64_t compute_start_ns, uint64_t compute_end_ns);
  void Send(Job* job);

  const ModelConfig& config_;
  const Node& node_;
  std::unique_ptr<DenseProgram> program_;
  ModelMetrics* metrics_;
  RequestLimits limits_;
  AnswerLayout layout_;
  // Working memory, kept between executions; bounded by max_keys (or the largest request).
  Dedup dedup_;
  std::vector<uint32_t> numbers_;  // of each key of the table at hand, in the order of Collect
  std::vector<uint8_t> sources_;
  std::vector<float> embeddings_;  // ranking: of all samples of a group
  std::vector<float> dense_;
  std::vector<float> scores_;
};

}  // namespace embertide::triton
