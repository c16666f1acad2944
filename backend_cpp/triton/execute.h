// Executor: answers the requests of one execution, all at one version but for those that name one.
//
// An execution reads and proves each request, pins once, and answers the samples of all requests
// together (requests that name a version: those of one version together); with several threads,
// each takes as many of the samples. A part looks up the keys of all tables in one pass: `lookup`
// pools into the outputs, `ranking` into one matrix, on which it then runs the dense net. A request
// that is wrong gets its own error and costs the others nothing. Every request is answered,
// reported and released.
//
// Requests are answered in groups, those with the earliest deadline first; a group has at most
// max_keys keys and max_output_bytes of outputs (or one request), and deadlines that are alike, as
// its requests share the time that peers get. Its outputs are made when its turn comes, and leave
// before those of the next group are made. A request that is cancelled, or whose deadline passes,
// is refused as soon as that is seen: before its lookup, before the dense net, and at the end.
//
// One of it in each model instance; used by one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/crew.h"
#include "embertide/node.h"
#include "node/context_columns.h"
#include "node/former_layouts.h"
#include "node/made_columns.h"
#include "triton/context_net.h"
#include "triton/metrics.h"
#include "triton/model_config.h"
#include "triton/request.h"
#include "triton/triton_abi.h"

namespace embertide::triton {

class Executor {
 public:
  // Requires: all arguments outlive it. `programs` are its own, one a thread of the configuration;
  // none for `lookup`.
  Executor(const ModelConfig& config, const Node& node, const ContextColumns& context,
           std::vector<std::unique_ptr<DenseProgram>> programs, ModelMetrics* metrics);

  // Why requests with contexts run the plain dense program; empty if they do not.
  const std::string& why_no_context_net() const { return context_net_.why_off(); }

  // Takes the requests over, unless it throws std::bad_alloc: then they are the server's still.
  void Execute(TRITONBACKEND_ModelInstance* instance,
               std::span<TRITONBACKEND_Request* const> requests);

 private:
  // The times of a group: when its turn came, and how long its parts took (stage_names.h).
  struct Stages {
    uint64_t began_ns = 0;
    uint64_t peers_ns = 0;
    uint64_t lookup_ns = 0;
    uint64_t net_ns = 0;
  };

  // A request on its way through an execution.
  struct Job {
    TRITONBACKEND_Request* request = nullptr;
    TRITONBACKEND_Response* response = nullptr;
    std::vector<Tensor> inputs;
    Deadline deadline = kNoDeadline;
    uint64_t wanted = 0;  // version; 0: the newest
    Bags bags;
    // Whether the request lacks the columns that the node makes: `bags` and `dense` show `whole`.
    bool own = false;
    WholeRequest whole;  // also of a request with contexts
    // The layout of a request in a former one; `bags` and `dense`, or `whole`, come from `brought`.
    const FormerLayout* former = nullptr;
    BroughtRequest brought;
    std::vector<uint32_t> lost;  // rows, by sequence: for their user no owner answered
    uint32_t lost_keys = 0;      // places of sequences that are not known for that
    // Places of bags in the answer, in floats, and its end; with sequences (placed_bags.h).
    std::vector<uint64_t> places;
    std::span<const float> dense;    // samples x columns of DENSE
    std::span<const float> weights;  // of the keys; empty without
    Refusal refusal;                 // reason kNone while all is well
    bool has_outputs = false;        // they are made
    bool sent = false;
    std::vector<float> unasked;  // the embeddings of a lookup that did not ask for them
    float* embedding = nullptr;  // samples x total_dim, or as `places` says
    int64_t* version = nullptr;  // one a sample (or one, jagged); null unless asked for
    std::vector<float*> scores;  // by head; null unless asked for
    uint8_t* source = nullptr;   // null unless asked for
    uint32_t degraded_keys = 0;  // read as default rows, as no owner answered
    bool wants_stages = false;
    std::string trace;              // of its caller (base/trace_id.h)
    uint64_t answered_version = 0;  // 0: none yet
    Stages stages;
  };

  // The part of an execution that one thread does.
  struct Part {
    size_t first = 0;  // sample of the group
    size_t samples = 0;
    std::vector<KeyBags> bags;
    // Whether all samples have contexts: `bags` are then those of samples' own features.
    bool own_bags = false;
    std::vector<uint32_t> own_offsets;
    std::vector<const uint64_t*> places;  // of each of `bags`; of a model with sequences
    std::vector<const Job*> jobs;         // of each of `bags`
    std::vector<SourceCounts> counts;     // by table
    uint64_t looked_up_ns = 0;            // how long rows took
    uint64_t net_ns = 0;                  // how long the dense net took
    std::vector<float> dense;             // what the net gets, where that is not DENSE itself
    bool by_context = false;              // whether the net computes a context's part once
    ContextNet::Memory contexts;
    std::vector<float*> scores;  // by head
    uint64_t missing = 0;        // values of DENSE
    Status status;
  };

  void Read(Job* job);
  // Values of a lookup's answer.
  size_t FloatsOf(const Job& job) const;
  uint64_t OutputBytesOf(const Job& job) const;
  Refusal Validate(Job* job);
  Refusal ValidateInputs(Job* job);
  Refusal ValidateBags(const Tensor& keys, uint64_t columns, Job* job);
  Refusal ValidateDense(Job* job);
  Refusal ValidateContext(const Tensor& keys, uint64_t columns, Job* job);
  // The dense features of a request with contexts.
  Refusal ValidateContextDense(const Bags& contexts, const Bags& samples, Job* job);
  // The former layout that a request is in; null for today's, and for none that is known.
  const FormerLayout* FormerOf(const Tensor& keys, uint64_t columns, const Job& job) const;
  Refusal AdaptFormerRequest(const Tensor& keys, Job* job);
  Refusal AddDerivedColumns(Job* job);
  // Refuses more keys than a request may have.
  Refusal CheckKeys(size_t keys) const;
  // Whether its answer is of use to anybody still.
  static bool IsAwaited(const Job& job);
  // Refuses a job whose answer is of use to nobody; true for one that is refused, also before.
  static bool DropIfExpired(Job* job);
  void Run(TRITONBACKEND_ModelInstance* instance, std::span<Job> jobs,
           uint64_t exec_start_ns) noexcept;
  void Answer(std::span<Job> jobs);
  void AnswerAt(uint64_t wanted, std::span<Job*> jobs);
  Code AnswerAll(const Pinned& pinned, std::span<Job*> jobs, FetchTerms terms);
  size_t GroupSize(std::span<Job* const> jobs) const;
  Status AnswerGroup(const Pinned& pinned, std::span<Job*> jobs, FetchTerms terms);
  // Node::Fetch, timed. Requires: a node with peers.
  Status Fetch(const Pinned& pinned, std::span<const BagFeature> features, std::span<KeyBags> bags,
               Deadline deadline, FetchTerms terms);
  // By job; empty where none has one. Valid until the next call.
  std::span<const std::string_view> TracesOf(std::span<Job* const> jobs);
  Status FillHistories(const Pinned& pinned, std::span<Job*> jobs, FetchTerms terms);
  Status FillHistory(const Pinned& pinned, uint32_t number, std::span<Job*> jobs, FetchTerms terms);
  void MarkUnanswered(const Job& job) const;
  void NoteFetched(const FetchedRequest& fetched, Job* job) const;
  size_t CompactLiveJobs(std::span<Job*> jobs);
  KeyBags BagsOf(const Job& job) const;
  void Gather(std::span<Job*> jobs);
  // Looks up what contexts have, each once; parts repeat it.
  Status LookupContexts(const BagReader& rows, std::span<Job*> jobs);
  // Copies into a part's embeddings what its samples' contexts have.
  void RepeatContexts(const Part& part);
  // Whether the net can compute what a context has once for all of its samples.
  bool RunsByContext(const Part& part) const;
  // Runs the dense net over a part, whose columns of DENSE the net can be given.
  Status RunNet(const DenseWeights& weights, uint32_t number, const float* dense);
  uint32_t PlanParts(std::span<Job*> jobs);
  // Leaves out of a part's bags those of contexts, which are empty.
  void PassOverContexts(Part* part) const;
  Status AnswerPart(const BagReader& rows, const VersionInfo& version, uint32_t number);
  Status MakeOutputs(Job* job);
  Status WriteVersionOutputs(const VersionInfo& version, Job* job) const;
  Status SetParameters(const VersionInfo& version, const Job& job) const;
  void Finish(TRITONBACKEND_ModelInstance* instance, std::span<Job> jobs, uint64_t exec_start_ns,
              uint64_t compute_start_ns, uint64_t compute_end_ns);
  void Send(Job* job);
  // Tells the node of requests that were among the slowest. Throws std::bad_alloc.
  void NoteSlow(std::span<const Job> jobs, uint64_t whole_ns) const;

  const ModelConfig& config_;
  const Node& node_;
  const ContextColumns& context_;
  // Columns of embeddings that are contexts', as begin and end; ascending.
  std::vector<std::pair<size_t, size_t>> context_ranges_;
  std::vector<std::unique_ptr<DenseProgram>> programs_;  // by part
  const ContextNet context_net_;
  ModelMetrics* metrics_;
  RequestLimits limits_;
  std::vector<BagFeature> features_;
  std::vector<uint32_t> sample_columns_;     // those of features_ that samples with contexts have
  std::vector<BagFeature> sample_features_;  // the same
  std::vector<std::string> outputs_;         // of the heads' scores; none of a lookup
  const bool sequences_;                     // whether one of them is
  const bool weighed_;                       // whether one of them needs weights
  RemoteLookupPtr remote_;                   // null for a node alone
  // Working memory, kept between executions; bounded by max_keys and max_output_bytes.
  std::vector<Job*> good_;
  std::vector<Part> parts_;
  uint64_t peers_ns_ = 0;                 // of a group, in Fetch
  std::vector<KeyBags> bags_;             // of a group's requests
  std::vector<std::string_view> traces_;  // the same; empty: none has one
  std::vector<float> embeddings_;         // ranking: of all samples of a group
  std::vector<float> contexts_;           // the same of all contexts, as wide
  // By sample of a group, its row of `contexts_`, or Transforms::kNoContext; empty: the group has
  // no context.
  std::vector<uint32_t> context_of_;
  std::vector<float> dense_;
  std::vector<std::vector<float>> scores_;  // by head
  Crew crew_;                               // last: its threads use the members above
};

}  // namespace embertide::triton
