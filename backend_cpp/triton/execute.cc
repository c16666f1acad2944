// One execution, from requests to responses.
#include "triton/execute.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "triton/edge.h"
#include "triton/tensor_io.h"

namespace embertide::triton {
namespace {

// Triton's own statistics are taken with this clock.
uint64_t NowNs() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

int64_t WallMs() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

const Tensor* FindTensor(const std::vector<Tensor>& tensors, const std::string& name) {
  for (const Tensor& tensor : tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

}  // namespace

AnswerLayout::AnswerLayout(const Node& node) : table_features(node.manifest().tables.size()) {
  uint32_t at = 0;
  for (uint32_t f = 0; f < node.features().size(); ++f) {
    column.push_back(at);
    at += node.features()[f].dim;
    table_features[node.features()[f].table].push_back(f);
  }
}

Executor::Executor(const ModelConfig& config, const Node& node,
                   std::unique_ptr<DenseProgram> program, ModelMetrics* metrics)
    : config_(config), node_(node), program_(std::move(program)), metrics_(metrics), layout_(node) {
  limits_.features = static_cast<uint32_t>(node.features().size());
  limits_.max_samples = config.max_samples;
  limits_.max_keys = config.max_keys;
}

Refusal Executor::Prove(Job* job) {
  const Status read = ReadInputs(job->request, &job->inputs);
  if (!read.ok()) return {Reason::kInternal, read};
  const Tensor* keys = FindTensor(job->inputs, config_.tensors.keys);
  if (keys == nullptr) {
    return {Reason::kShape,
            Status(Code::kInvalidArgument, "input " + config_.tensors.keys + " is missing")};
  }
  Refusal refusal =
      ParseBags(*keys, FindTensor(job->inputs, config_.tensors.lengths), limits_, &job->bags);
  if (refusal.reason != Reason::kNone || program_ == nullptr) return refusal;
  return ParseDense(config_.tensors.dense, FindTensor(job->inputs, config_.tensors.dense),
                    program_->dense_features(), job->bags, &job->dense);
}

void Executor::Read(Job* job) {
  LogIfError(TRITONBACKEND_ResponseNew(&job->response, job->request), "response");
  try {
    job->refusal = Prove(job);
  } catch (const std::exception& error) {
    job->refusal = {Reason::kInternal, Status(Code::kResourceExhausted, error.what())};
  }
}

Status Executor::SetParameters(const VersionInfo& version, TRITONBACKEND_Response* response) const {
  const auto integer = [&](const char* name, int64_t value) {
    return FromTriton(TRITONBACKEND_ResponseSetIntParameter(response, name, value));
  };
  EMBERTIDE_RETURN_IF_ERROR(integer("version", static_cast<int64_t>(version.number)));
  EMBERTIDE_RETURN_IF_ERROR(integer("plan_epoch", static_cast<int64_t>(node_.plan_epoch())));
  EMBERTIDE_RETURN_IF_ERROR(integer("watermark_ms", version.watermark_ms));
  if (version.committed_ms > 0) {
    EMBERTIDE_RETURN_IF_ERROR(
        integer("staleness_ms", std::max<int64_t>(0, WallMs() - version.committed_ms)));
  }
  return FromTriton(
      TRITONBACKEND_ResponseSetStringParameter(response, "node", node_.options().name.c_str()));
}

Status Executor::MakeOutputs(const VersionInfo& version, Job* job) {
  if (job->response == nullptr) return {Code::kDeviceError, "Triton gave no response object"};
  std::vector<std::string> names;
  EMBERTIDE_RETURN_IF_ERROR(ReadOutputNames(job->request, &names));
  const int64_t first = job->bags.jagged ? 1 : job->bags.samples;
  const int64_t rest = job->bags.jagged ? job->bags.samples : 1;
  const auto make = [&](const std::string& name, TRITONSERVER_DataType dtype, int64_t width,
                        uint64_t bytes, void** buffer) {
    const std::array<int64_t, 2> shape = {first, width};
    return MakeOutput(job->response, name, dtype, shape, bytes, buffer);
  };
  for (const std::string& name : names) {
    void* buffer = nullptr;
    if (name == config_.tensors.embedding && !config_.ranking) {
      EMBERTIDE_RETURN_IF_ERROR(
          make(name, TRITONSERVER_TYPE_FP32, rest * node_.total_dim(), 4, &buffer));
      job->embedding = static_cast<float*>(buffer);
    } else if (name == config_.tensors.score && config_.ranking) {
      EMBERTIDE_RETURN_IF_ERROR(make(name, TRITONSERVER_TYPE_FP32, rest, 4, &buffer));
      job->score = static_cast<float*>(buffer);
    } else if (name == config_.tensors.source) {
      const auto keys = static_cast<int64_t>(job->bags.keys.size());
      EMBERTIDE_RETURN_IF_ERROR(make(name, TRITONSERVER_TYPE_UINT8, keys / first, 1, &buffer));
      job->source = static_cast<uint8_t*>(buffer);
    } else if (name == config_.tensors.version) {
      EMBERTIDE_RETURN_IF_ERROR(make(name, TRITONSERVER_TYPE_INT64, 1, 8, &buffer));
      std::fill_n(static_cast<int64_t*>(buffer), first, static_cast<int64_t>(version.number));
    }
  }
  if (job->embedding == nullptr && !config_.ranking) {
    job->unasked.resize(size_t{job->bags.samples} * node_.total_dim());
    job->embedding = job->unasked.data();
  }
  return SetParameters(version, job->response);
}

void Executor::Collect(const std::vector<uint32_t>& features, std::span<Job*> jobs) {
  size_t most = 0;
  for (const Job* job : jobs) most += job->bags.keys.size();
  dedup_.Start(most);
  numbers_.clear();
  for (const Job* job : jobs) {
    const Bags& bags = job->bags;
    for (const uint32_t feature : features) {
      for (size_t bag = feature; bag < size_t{bags.samples} * limits_.features;
           bag += limits_.features) {
        for (uint32_t k = bags.Begin(bag); k < bags.End(bag); ++k) {
          numbers_.push_back(dedup_.Add(bags.keys[k]));
        }
      }
    }
  }
}

void Executor::Scatter(const RowGather& gather, uint32_t feature, Job* job, size_t* cursor,
                       ModelMetrics::SourceCounts* counts) {
  const Bags& bags = job->bags;
  const Pooling pooling = node_.features()[feature].pooling;
  for (size_t sample = 0; sample < bags.samples; ++sample) {
    const size_t bag = sample * limits_.features + feature;
    const uint32_t begin = bags.Begin(bag);
    const std::span<const uint32_t> numbers(numbers_.data() + *cursor, bags.End(bag) - begin);
    *cursor += numbers.size();
    gather.Pool(pooling, numbers,
                job->embedding + sample * node_.total_dim() + layout_.column[feature]);
    for (size_t i = 0; i < numbers.size(); ++i) {
      const uint8_t source = sources_[numbers[i]];
      ++(*counts)[source];
      if (job->source != nullptr) job->source[begin + i] = source;
    }
  }
}

Status Executor::LookupTable(RowGather* gather, uint32_t table, std::span<Job*> jobs) {
  const std::vector<uint32_t>& features = layout_.table_features[table];
  if (features.empty()) return Status::Ok();
  Collect(features, jobs);
  sources_.resize(std::max(sources_.size(), dedup_.keys().size()));
  EMBERTIDE_RETURN_IF_ERROR(gather->Find(table, dedup_.keys(), sources_.data()));
  ModelMetrics::SourceCounts counts{};
  size_t cursor = 0;
  for (Job* job : jobs) {
    for (const uint32_t feature : features) Scatter(*gather, feature, job, &cursor, &counts);
  }
  metrics_->AddKeys(table, counts);
  return Status::Ok();
}

// Gives each request of a ranking group its rows of one matrix.
void Executor::PlaceEmbeddings(std::span<Job*> jobs) {
  size_t samples = 0;
  for (const Job* job : jobs) samples += job->bags.samples;
  embeddings_.resize(std::max(embeddings_.size(), samples * node_.total_dim()));
  float* at = embeddings_.data();
  for (Job* job : jobs) {
    job->embedding = at;
    at += size_t{job->bags.samples} * node_.total_dim();
  }
}

// Runs the dense net once over all samples of a group.
Status Executor::Rank(const DenseWeights& weights, std::span<Job*> jobs) {
  size_t samples = 0;
  dense_.clear();
  for (const Job* job : jobs) {
    samples += job->bags.samples;
    dense_.insert(dense_.end(), job->dense.begin(), job->dense.end());
  }
  scores_.resize(std::max(scores_.size(), samples));
  EMBERTIDE_RETURN_IF_ERROR(program_->Run(weights, static_cast<int64_t>(samples), dense_.data(),
                                          embeddings_.data(), scores_.data()));
  const float* at = scores_.data();
  for (Job* job : jobs) {
    if (job->score != nullptr) std::copy_n(at, job->bags.samples, job->score);
    at += job->bags.samples;
  }
  return Status::Ok();
}

Status Executor::AnswerGroup(const Pinned& pinned, std::span<Job*> jobs) {
  if (config_.ranking) PlaceEmbeddings(jobs);
  {
    RowGather gather(pinned.rows);
    for (uint32_t table = 0; table < layout_.table_features.size(); ++table) {
      EMBERTIDE_RETURN_IF_ERROR(LookupTable(&gather, table, jobs));
    }
  }
  return config_.ranking ? Rank(*pinned.info->weights, jobs) : Status::Ok();
}

// Answers the good requests in groups of at most max_keys keys, all under one pin.
void Executor::Answer(std::span<Job> jobs) {
  const auto fail = [](std::span<Job*> failed, const Status& status) {
    for (Job* job : failed) job->refusal = {Reason::kInternal, status};
  };
  std::vector<Job*> good;
  for (Job& job : jobs) {
    if (job.refusal.reason == Reason::kNone) good.push_back(&job);
  }
  if (good.empty()) return;
  const Result<Pinned> pinned = node_.Pin();
  if (!pinned.ok()) return fail(good, pinned.status());
  std::vector<Job*> group;
  uint64_t keys = 0;
  const auto flush = [&] {
    try {
      if (const Status status = AnswerGroup(pinned.value(), group); !status.ok())
        fail(group, status);
    } catch (const std::exception& error) {
      fail(group, Status(Code::kResourceExhausted, error.what()));
    }
    group.clear();
    keys = 0;
  };
  for (Job* job : good) {
    if (const Status status = MakeOutputs(*pinned.value().info, job); !status.ok()) {
      fail({&job, 1}, status);
      continue;
    }
    if (!group.empty() && keys + job->bags.keys.size() > limits_.max_keys) flush();
    group.push_back(job);
    keys += job->bags.keys.size();
  }
  if (!group.empty()) flush();
}

void Executor::Send(Job* job) {
  if (job->refusal.reason != Reason::kNone) metrics_->AddRefused(job->refusal.reason);
  if (job->response == nullptr) return;
  TRITONSERVER_Error* error =
      job->refusal.reason == Reason::kNone ? nullptr : ToTriton(job->refusal.status);
  LogIfError(TRITONBACKEND_ResponseSend(job->response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, error),
             "response");
  if (error != nullptr) TRITONSERVER_ErrorDelete(error);
}

void Executor::Finish(TRITONBACKEND_ModelInstance* instance, std::span<Job> jobs,
                      uint64_t exec_start_ns, uint64_t compute_start_ns, uint64_t compute_end_ns) {
  for (Job& job : jobs) Send(&job);
  const uint64_t exec_end_ns = NowNs();
  uint64_t samples = 0;
  for (Job& job : jobs) {
    const bool success = job.refusal.reason == Reason::kNone;
    // Triton counts a jagged request as one, and so must we.
    if (success) samples += job.bags.jagged ? 1 : job.bags.samples;
    LogIfError(
        TRITONBACKEND_ModelInstanceReportStatistics(instance, job.request, success, exec_start_ns,
                                                    compute_start_ns, compute_end_ns, exec_end_ns),
        "statistics");
    LogIfError(TRITONBACKEND_RequestRelease(job.request, TRITONSERVER_REQUEST_RELEASE_ALL),
               "release");
  }
  LogIfError(TRITONBACKEND_ModelInstanceReportBatchStatistics(
                 instance, std::max<uint64_t>(1, samples), exec_start_ns, compute_start_ns,
                 compute_end_ns, exec_end_ns),
             "batch statistics");
}

// noexcept: what could still throw here is memory for a few pointers, and then nothing can be
// answered any more.
// NOLINTNEXTLINE(bugprone-exception-escape): see above.
void Executor::Execute(TRITONBACKEND_ModelInstance* instance,
                       std::span<TRITONBACKEND_Request* const> requests) noexcept {
  const uint64_t exec_start_ns = NowNs();
  std::vector<Job> jobs(requests.size());
  for (size_t i = 0; i < jobs.size(); ++i) {
    jobs[i].request = requests[i];
    Read(&jobs[i]);
  }
  const uint64_t compute_start_ns = NowNs();
  Answer(jobs);
  Finish(instance, jobs, exec_start_ns, compute_start_ns, NowNs());
}

}  // namespace embertide::triton
