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

int64_t StalenessMs(int64_t watermark_ms) {
  const auto now = std::chrono::duration_cast<std::chrono::milliseconds>(
                       std::chrono::system_clock::now().time_since_epoch())
                       .count();
  return std::max<int64_t>(0, now - watermark_ms);
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

Executor::Executor(const ModelConfig& config, const Node& node, ModelMetrics* metrics)
    : config_(config), node_(node), metrics_(metrics), layout_(node) {
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
  return ParseBags(*keys, FindTensor(job->inputs, config_.tensors.lengths), limits_, &job->bags);
}

void Executor::Read(Job* job) {
  LogIfError(TRITONBACKEND_ResponseNew(&job->response, job->request), "response");
  try {
    job->refusal = Prove(job);
  } catch (const std::exception& error) {
    job->refusal = {Reason::kInternal, Status(Code::kResourceExhausted, error.what())};
  }
}

Status Executor::SetParameters(const ReadView& view, TRITONBACKEND_Response* response) const {
  const auto integer = [&](const char* name, uint64_t value) {
    return FromTriton(
        TRITONBACKEND_ResponseSetIntParameter(response, name, static_cast<int64_t>(value)));
  };
  EMBERTIDE_RETURN_IF_ERROR(integer("version", view.version()));
  EMBERTIDE_RETURN_IF_ERROR(integer("plan_epoch", node_.plan_epoch()));
  EMBERTIDE_RETURN_IF_ERROR(
      integer("staleness_ms", static_cast<uint64_t>(StalenessMs(node_.manifest().watermark_ms))));
  return FromTriton(
      TRITONBACKEND_ResponseSetStringParameter(response, "node", node_.options().name.c_str()));
}

Status Executor::MakeOutputs(const ReadView& view, Job* job) {
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
    if (name == config_.tensors.embedding) {
      EMBERTIDE_RETURN_IF_ERROR(
          make(name, TRITONSERVER_TYPE_FP32, rest * node_.total_dim(), 4, &buffer));
      job->embedding = static_cast<float*>(buffer);
    } else if (name == config_.tensors.source) {
      const auto keys = static_cast<int64_t>(job->bags.keys.size());
      EMBERTIDE_RETURN_IF_ERROR(make(name, TRITONSERVER_TYPE_UINT8, keys / first, 1, &buffer));
      job->source = static_cast<uint8_t*>(buffer);
    } else if (name == config_.tensors.version) {
      EMBERTIDE_RETURN_IF_ERROR(make(name, TRITONSERVER_TYPE_INT64, 1, 8, &buffer));
      std::fill_n(static_cast<int64_t*>(buffer), first, static_cast<int64_t>(view.version()));
    }
  }
  if (job->embedding == nullptr) {
    job->unasked.resize(size_t{job->bags.samples} * node_.total_dim());
    job->embedding = job->unasked.data();
  }
  return SetParameters(view, job->response);
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

// Sums in fp64 in the order of the bag and rounds once, as the store does: any split of the work
// over owners gives the same floats.
void Executor::Pool(Pooling pooling, std::span<const uint32_t> numbers, uint32_t dim, float* out) {
  if (numbers.size() == 1) {
    std::memcpy(out, &rows_[size_t{numbers[0]} * dim], size_t{dim} * sizeof(float));
    return;
  }
  sums_.assign(dim, 0.0);
  for (const uint32_t number : numbers) {
    const float* row = &rows_[size_t{number} * dim];
    for (uint32_t d = 0; d < dim; ++d) sums_[d] += static_cast<double>(row[d]);
  }
  const bool mean = pooling == Pooling::kMean && !numbers.empty();
  const double divisor = mean ? static_cast<double>(numbers.size()) : 1.0;
  for (uint32_t d = 0; d < dim; ++d) out[d] = static_cast<float>(sums_[d] / divisor);
}

void Executor::Scatter(uint32_t feature, uint32_t dim, Job* job, size_t* cursor,
                       ModelMetrics::SourceCounts* counts) {
  const Bags& bags = job->bags;
  const Pooling pooling = node_.features()[feature].pooling;
  for (size_t sample = 0; sample < bags.samples; ++sample) {
    const size_t bag = sample * limits_.features + feature;
    const uint32_t begin = bags.Begin(bag);
    const std::span<const uint32_t> numbers(numbers_.data() + *cursor, bags.End(bag) - begin);
    *cursor += numbers.size();
    Pool(pooling, numbers, dim,
         job->embedding + sample * node_.total_dim() + layout_.column[feature]);
    for (size_t i = 0; i < numbers.size(); ++i) {
      const uint8_t source = sources_[numbers[i]];
      ++(*counts)[source];
      if (job->source != nullptr) job->source[begin + i] = source;
    }
  }
}

Status Executor::LookupTable(const ReadView& view, uint32_t table, std::span<Job*> jobs) {
  const std::vector<uint32_t>& features = layout_.table_features[table];
  if (features.empty()) return Status::Ok();
  Collect(features, jobs);
  const uint32_t dim = node_.manifest().tables[table].layout.dim();
  rows_.resize(std::max(rows_.size(), dedup_.keys().size() * dim));
  sources_.resize(std::max(sources_.size(), dedup_.keys().size()));
  LookupRequest request;
  request.table = table;
  request.keys = dedup_.keys();
  request.out = rows_.data();
  request.out_stride = dim;
  request.source = sources_.data();
  EMBERTIDE_RETURN_IF_ERROR(view.Lookup(request));
  ModelMetrics::SourceCounts counts{};
  size_t cursor = 0;
  for (Job* job : jobs) {
    for (const uint32_t feature : features) Scatter(feature, dim, job, &cursor, &counts);
  }
  metrics_->AddKeys(table, counts);
  return Status::Ok();
}

Status Executor::AnswerGroup(const ReadView& view, std::span<Job*> jobs) {
  for (uint32_t table = 0; table < layout_.table_features.size(); ++table) {
    EMBERTIDE_RETURN_IF_ERROR(LookupTable(view, table, jobs));
  }
  return Status::Ok();
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
  const Result<ReadView> view = node_.Pin();
  if (!view.ok()) return fail(good, view.status());
  std::vector<Job*> group;
  uint64_t keys = 0;
  const auto flush = [&] {
    try {
      if (const Status status = AnswerGroup(view.value(), group); !status.ok()) fail(group, status);
    } catch (const std::exception& error) {
      fail(group, Status(Code::kResourceExhausted, error.what()));
    }
    group.clear();
    keys = 0;
  };
  for (Job* job : good) {
    if (const Status status = MakeOutputs(view.value(), job); !status.ok()) {
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
