// Executor: answers the requests of one execution, all at one version.
//
// An execution reads and proves each request, pins once, then works table by table: collect the
// keys of all requests, each distinct key looked up once, pool into the outputs. A request that is
// wrong gets its own error and costs the others nothing. Every request is answered, reported and
// released.
//
// One of it in each model instance; used by one thread at a time.
#pragma once

#include <cstdint>
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
  // Requires: all arguments outlive it.
  Executor(const ModelConfig& config, const Node& node, ModelMetrics* metrics);

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
    Refusal refusal;             // reason kNone while all is well
    std::vector<float> unasked;  // the answer when the caller did not ask for it
    float* embedding = nullptr;
    uint8_t* source = nullptr;  // null unless asked for
  };

  void Read(Job* job);
  Refusal Prove(Job* job);
  void Answer(std::span<Job> jobs);
  Status AnswerGroup(const ReadView& view, std::span<Job*> jobs);
  Status LookupTable(const ReadView& view, uint32_t table, std::span<Job*> jobs);
  void Collect(const std::vector<uint32_t>& features, std::span<Job*> jobs);
  void Scatter(uint32_t feature, uint32_t dim, Job* job, size_t* cursor,
               ModelMetrics::SourceCounts* counts);
  void Pool(Pooling pooling, std::span<const uint32_t> numbers, uint32_t dim, float* out);
  Status MakeOutputs(const ReadView& view, Job* job);
  Status SetParameters(const ReadView& view, TRITONBACKEND_Response* response) const;
  void Finish(TRITONBACKEND_ModelInstance* instance, std::span<Job> jobs, uint64_t exec_start_ns,
              uint64_t compute_start_ns, uint64_t compute_end_ns);
  void Send(Job* job);

  const ModelConfig& config_;
  const Node& node_;
  ModelMetrics* metrics_;
  RequestLimits limits_;
  AnswerLayout layout_;
  // Working memory, kept between executions; bounded by max_keys (or the largest request).
  Dedup dedup_;
  std::vector<uint32_t> numbers_;  // of each key of the table at hand, in the order of Collect
  std::vector<float> rows_;
  std::vector<uint8_t> sources_;
  std::vector<double> sums_;
};

}  // namespace embertide::triton
