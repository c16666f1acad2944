// One execution, from requests to responses.
#include "triton/execute.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <limits>
#include <tuple>

#include "base/clock.h"
#include "node/placed_bags.h"
#include "triton/edge.h"
#include "triton/now_ns.h"
#include "triton/stage_names.h"
#include "triton/tensor_io.h"

namespace embertide::triton {
namespace {

// The least that is worth waking a thread for, which takes some 50 us: about 200 us of a dense net,
// and of lookups.
constexpr size_t kSamplesAPart = 16;
constexpr size_t kKeysAPart = 512;

const Tensor* FindTensor(const std::vector<Tensor>& tensors, const std::string& name) {
  for (const Tensor& tensor : tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

// Whether a request has any input of contexts.
bool HasContext(const std::vector<Tensor>& tensors, const TensorNames& names) {
  return std::ranges::any_of(tensors, [&](const Tensor& tensor) {
    return tensor.name == names.context_keys || tensor.name == names.candidates ||
           tensor.name == names.context_lengths || tensor.name == names.context_weights ||
           tensor.name == names.context_dense;
  });
}

RequestSide SideOf(const Bags& bags, std::span<const float> weights) {
  return {bags.keys, bags.offsets, weights};
}

}  // namespace

Executor::Executor(const ModelConfig& config, const Node& node, const ContextColumns& context,
                   std::vector<std::unique_ptr<DenseProgram>> programs, ModelMetrics* metrics)
    : config_(config),
      node_(node),
      context_(context),
      programs_(std::move(programs)),
      context_net_(node, context, programs_.empty() ? nullptr : programs_.front().get()),
      metrics_(metrics),
      sequences_(HasSequences(node.features())),
      weighed_(std::ranges::any_of(node.features(), &Feature::weighed)),
      remote_(node.NewRemoteLookup()),
      parts_(config.threads),
      crew_(config.threads, &node.task_board()) {
  uint32_t column = 0;
  for (const Feature& feature : node.features()) {
    if (context.any() && context.is_context()[features_.size()]) {
      if (context_ranges_.empty() || context_ranges_.back().second != column) {
        context_ranges_.emplace_back(column, column);
      }
      context_ranges_.back().second += feature.dim;
    } else if (context.any()) {
      sample_columns_.push_back(static_cast<uint32_t>(features_.size()));
      sample_features_.push_back({feature.table, feature.pooling, column});
    }
    features_.push_back({feature.table, feature.pooling, column});
    column += feature.dim;
  }
  if (config.ranking) {
    outputs_.push_back(config.tensors.score);
    for (size_t h = 1; h < node.manifest().scores(); ++h) {
      outputs_.push_back(std::string(kScoreOf) + node.manifest().heads[h]);
    }
    scores_.resize(outputs_.size());
  }
  limits_.features = static_cast<uint32_t>(node.features().size());
  if (node.made_columns().any()) limits_.own_columns = node.made_columns().own_columns();
  limits_.max_samples = config.max_samples;
  limits_.max_keys = config.max_keys;
}

bool Executor::IsAwaited(const Job& job) {
  return !HasPassed(job.deadline) && !IsCancelled(job.request);
}

bool Executor::DropIfExpired(Job* job) {
  if (job->refusal.reason != Reason::kNone) return true;
  if (HasPassed(job->deadline)) {
    job->refusal = {Reason::kExpired, {Code::kUnavailable, "the request's timeout has passed"}};
  } else if (IsCancelled(job->request)) {
    job->refusal = {Reason::kCancelled, {}};
  }
  return job->refusal.reason != Reason::kNone;
}

Refusal Executor::Validate(Job* job) {
  if (const Status read = ReadDeadline(job->request, &job->deadline); !read.ok()) {
    return {Reason::kInternal, read};
  }
  if (DropIfExpired(job)) return job->refusal;
  Refusal refusal = ValidateInputs(job);
  if (refusal.reason != Reason::kNone) return refusal;
  const uint64_t bytes = OutputBytesOf(*job);
  if (bytes <= config_.max_output_bytes) return {};
  return {
      Reason::kMaxOutput,
      {Code::kInvalidArgument,
       "the answer would take " + std::to_string(bytes) + " bytes; max_output_bytes is " +
           std::to_string(config_.max_output_bytes) + ": ask for fewer samples or keys at a time"}};
}

Refusal Executor::ValidateInputs(Job* job) {
  const Status read = ReadInputs(job->request, &job->inputs);
  if (!read.ok()) return {Reason::kInternal, read};
  RequestParameters parameters;
  if (const Status named = ReadParameters(job->request, &parameters); !named.ok()) {
    return {Reason::kVersion, named};
  }
  job->wanted = parameters.version;
  job->wants_stages = parameters.stages;
  job->trace = std::move(parameters.trace);
  const Tensor* keys = FindTensor(job->inputs, config_.tensors.keys);
  if (keys == nullptr) {
    return {Reason::kShape,
            Status(Code::kInvalidArgument, "input " + config_.tensors.keys + " is missing")};
  }
  if (HasContext(job->inputs, config_.tensors)) {
    return ValidateContext(*keys, parameters.columns, job);
  }
  job->former = FormerOf(*keys, parameters.columns, *job);
  Refusal refusal = job->former != nullptr ? AdaptFormerRequest(*keys, job)
                                           : ValidateBags(*keys, parameters.columns, job);
  if (refusal.reason == Reason::kNone && sequences_) {
    const Bags& bags = job->bags;
    job->places = PlaceBags(node_.features(), size_t{bags.samples} * limits_.features,
                            bags.jagged ? bags.offsets : std::span<const uint32_t>());
  }
  if (refusal.reason == Reason::kNone && !programs_.empty()) refusal = ValidateDense(job);
  if (refusal.reason == Reason::kNone && job->former != nullptr) metrics_->AddFormer();
  return refusal;
}

Refusal Executor::ValidateDense(Job* job) {
  const MadeColumns& made = node_.made_columns();
  const FormerLayout* former = job->former;
  const Tensor* dense = FindTensor(job->inputs, config_.tensors.dense);
  uint32_t columns = job->own ? made.own_dense() : node_.manifest().dense_features;
  if (former != nullptr) columns = former->dense();
  const std::span<const std::string> names =
      former != nullptr ? std::span(former->dense_names) : std::span<const std::string>();
  Refusal refusal = ParseDense(config_.tensors.dense, dense, columns, node_.transforms(), job->bags,
                               &job->dense, names);
  if (refusal.reason == Reason::kNone && former != nullptr) {
    // A net without transforms takes no NaN.
    const float missing =
        node_.transforms() != nullptr ? std::numeric_limits<float>::quiet_NaN() : 0.0F;
    FormerLayouts::BringDense(*former, job->dense, job->bags.samples, missing, &job->brought);
    job->dense = job->brought.dense;
  }
  if (refusal.reason == Reason::kNone && job->own && !made.sequences().empty()) {
    made.CompleteDense(job->dense, &job->whole);
    job->dense = job->whole.dense;
  }
  return refusal;
}

// A request has all columns of KEYS, or those that the node does not make: the number of columns
// tells which, of a jagged request the parameter `columns`.
Refusal Executor::ValidateBags(const Tensor& keys, uint64_t columns, Job* job) {
  const Tensor* lengths = FindTensor(job->inputs, config_.tensors.lengths);
  if (lengths == nullptr && keys.shape.size() == 2) columns = static_cast<uint64_t>(keys.shape[1]);
  const bool own = limits_.own_columns != 0 && columns == limits_.own_columns;
  if (lengths != nullptr && columns != 0 && !own && columns != limits_.features) {
    std::string message = "parameter columns is " + std::to_string(columns) + "; KEYS has " +
                          std::to_string(limits_.features) + " columns";
    if (limits_.own_columns != 0) {
      message += ", or " + std::to_string(limits_.own_columns) + " without those the node makes";
    }
    return {Reason::kShape, {Code::kInvalidArgument, message}};
  }
  RequestLimits limits = limits_;
  if (own) limits.features = limits_.own_columns;
  Refusal refusal = ParseBags(keys, lengths, limits, &job->bags);
  if (refusal.reason == Reason::kNone) {
    refusal =
        ParseWeights(config_.tensors.weights, FindTensor(job->inputs, config_.tensors.weights),
                     keys, weighed_, &job->weights);
  }
  return own && refusal.reason == Reason::kNone ? AddDerivedColumns(job) : refusal;
}

Refusal Executor::ValidateContext(const Tensor& keys, uint64_t columns, Job* job) {
  const TensorNames& names = config_.tensors;
  const auto refuse = [](Reason reason, const std::string& message) {
    return Refusal{reason, {Code::kInvalidArgument, message}};
  };
  if (!context_.any()) {
    return refuse(Reason::kContext,
                  "the model has no columns of contexts: send all columns with each sample");
  }
  if (columns != 0 && columns != context_.sample_keys()) {
    return refuse(Reason::kShape, "parameter columns is " + std::to_string(columns) +
                                      "; KEYS of a request with contexts has " +
                                      std::to_string(context_.sample_keys()) + " columns");
  }
  const Tensor* of_contexts = FindTensor(job->inputs, names.context_keys);
  if (of_contexts == nullptr) {
    return refuse(Reason::kContext, "input " + names.context_keys + " is missing");
  }
  Bags contexts;
  Bags samples;
  RequestLimits limits = limits_;
  limits.own_columns = 0;
  limits.features = context_.context_keys();
  Refusal refusal = ParseSide(*of_contexts, FindTensor(job->inputs, names.context_lengths), limits,
                              "context", &contexts);
  if (refusal.reason != Reason::kNone) return refusal;
  limits.features = context_.sample_keys();
  refusal = ParseSide(keys, FindTensor(job->inputs, names.lengths), limits, "candidate", &samples);
  if (refusal.reason != Reason::kNone) return refusal;
  WholeRequest& whole = job->whole;
  std::vector<uint32_t> context_of;
  refusal = ParseCandidates(names.candidates, FindTensor(job->inputs, names.candidates),
                            contexts.samples, samples.samples, &context_of);
  if (refusal.reason != Reason::kNone) return refusal;
  std::span<const float> context_weights;
  std::span<const float> sample_weights;
  const auto weighs = [&](bool context) {
    for (size_t f = 0; weighed_ && f < node_.features().size(); ++f) {
      if (node_.features()[f].weighed && context_.is_context()[f] == context) return true;
    }
    return false;
  };
  refusal = ParseWeights(names.context_weights, FindTensor(job->inputs, names.context_weights),
                         *of_contexts, weighs(true), &context_weights);
  if (refusal.reason != Reason::kNone) return refusal;
  refusal = ParseWeights(names.weights, FindTensor(job->inputs, names.weights), keys, weighs(false),
                         &sample_weights);
  if (refusal.reason != Reason::kNone) return refusal;
  const MadeColumns& made = node_.made_columns();
  const Status completed = context_.Complete(made, SideOf(contexts, context_weights),
                                             SideOf(samples, sample_weights), context_of, &whole);
  if (!completed.ok()) return {Reason::kLengths, completed};
  if (refusal = CheckKeys(whole.keys.size()); refusal.reason != Reason::kNone) return refusal;
  refusal = ValidateContextDense(contexts, samples, job);
  if (refusal.reason != Reason::kNone) return refusal;
  job->own = made.any();
  job->bags = {.jagged = true,
               .samples = samples.samples,
               .contexts = contexts.samples,
               .keys = whole.keys,
               .offsets = whole.offsets};
  job->weights = whole.weights;
  metrics_->AddContexts(contexts.samples, samples.samples, ContextColumns::KeysSaved(whole));
  return {};
}

Refusal Executor::ValidateContextDense(const Bags& contexts, const Bags& samples, Job* job) {
  const TensorNames& names = config_.tensors;
  std::span<const float> of_contexts;
  std::span<const float> of_samples;
  for (const auto& [name, bags, columns, values] :
       {std::tuple(&names.context_dense, &contexts, &context_.context_dense(), &of_contexts),
        std::tuple(&names.dense, &samples, &context_.sample_dense(), &of_samples)}) {
    Refusal refusal =
        ParseDense(*name, FindTensor(job->inputs, *name), static_cast<uint32_t>(columns->size()),
                   node_.transforms(), *bags, values, *columns);
    if (refusal.reason != Reason::kNone) return refusal;
  }
  context_.CompleteDense(of_contexts, of_samples, &job->whole);
  job->dense = job->whole.dense;
  return {};
}

const FormerLayout* Executor::FormerOf(const Tensor& keys, uint64_t columns, const Job& job) const {
  const std::vector<FormerLayout>& layouts = node_.former_layouts().layouts();
  if (layouts.empty()) return nullptr;
  const Tensor* lengths = FindTensor(job.inputs, config_.tensors.lengths);
  const Tensor* dense = FindTensor(job.inputs, config_.tensors.dense);
  const Tensor& wide = lengths != nullptr ? *lengths : keys;
  if (wide.shape.size() != 2 || wide.shape[0] < 0 || wide.shape[1] < 0) return nullptr;
  const auto width = static_cast<uint64_t>(wide.shape[1]);
  const bool says = lengths == nullptr || columns != 0;
  const auto is = [&](uint64_t key_columns, uint64_t dense_columns) {
    if (lengths == nullptr ? width != key_columns : columns != 0 && columns != key_columns) {
      return false;
    }
    if (width % key_columns != 0) return false;
    if (programs_.empty()) return true;
    if (dense == nullptr) return dense_columns == 0;
    if (dense->shape.size() != 2) return false;
    // Beyond max_samples the request is refused, whatever it is.
    const uint64_t samples =
        lengths == nullptr ? 1 : std::min<uint64_t>(width / key_columns, limits_.max_samples + 1);
    return static_cast<uint64_t>(dense->shape[1]) == samples * dense_columns;
  };
  if (is(limits_.features, node_.manifest().dense_features)) return nullptr;
  if (says && limits_.own_columns != 0 &&
      is(limits_.own_columns, node_.made_columns().own_dense())) {
    return nullptr;
  }
  const auto found = std::ranges::find_if(
      layouts, [&](const FormerLayout& layout) { return is(layout.keys, layout.dense()); });
  return found == layouts.end() ? nullptr : &*found;
}

// Brings a request of a former layout into the columns of today.
Refusal Executor::AdaptFormerRequest(const Tensor& keys, Job* job) {
  Bags& bags = job->bags;
  RequestLimits limits = limits_;
  limits.features = job->former->keys;
  limits.own_columns = 0;
  Refusal refusal =
      ParseBags(keys, FindTensor(job->inputs, config_.tensors.lengths), limits, &bags);
  if (refusal.reason == Reason::kNone) {
    refusal =
        ParseWeights(config_.tensors.weights, FindTensor(job->inputs, config_.tensors.weights),
                     keys, /*required=*/false, &job->weights);
  }
  if (refusal.reason != Reason::kNone) return refusal;
  BroughtRequest& brought = job->brought;
  node_.former_layouts().BringKeys(*job->former, bags.keys, bags.offsets, job->weights, &brought);
  if (weighed_ && job->weights.empty()) brought.weights.assign(brought.keys.size(), 1.0F);
  bags.keys = brought.keys;
  bags.offsets = brought.offsets;
  job->weights = brought.weights;
  if (limits_.own_columns != 0) return AddDerivedColumns(job);
  return CheckKeys(brought.keys.size());
}

Refusal Executor::CheckKeys(size_t keys) const {
  if (keys <= limits_.max_keys) return {};
  return {Reason::kMaxKeys,
          {Code::kInvalidArgument, "the request has " + std::to_string(keys) +
                                       " keys, made ones among them; max_keys is " +
                                       std::to_string(limits_.max_keys)}};
}

// Makes the columns that a request does not carry.
Refusal Executor::AddDerivedColumns(Job* job) {
  Bags& bags = job->bags;
  const Status made =
      node_.made_columns().Complete(bags.keys, bags.offsets, job->weights, &job->whole);
  if (!made.ok()) return {Reason::kLengths, made};
  if (Refusal refusal = CheckKeys(job->whole.keys.size()); refusal.reason != Reason::kNone) {
    return refusal;
  }
  job->own = true;
  bags.keys = job->whole.keys;
  bags.offsets = job->whole.offsets;
  job->weights = job->whole.weights;
  return {};
}

void Executor::Read(Job* job) {
  LogIfError(TRITONBACKEND_ResponseNew(&job->response, job->request), "response");
  try {
    job->refusal = Validate(job);
  } catch (const std::exception& error) {
    job->refusal = {Reason::kInternal, Status(Code::kResourceExhausted, error.what())};
  }
}

Status Executor::SetParameters(const VersionInfo& version, const Job& job) const {
  TRITONBACKEND_Response* const response = job.response;
  const auto integer = [&](const char* name, int64_t value) {
    return FromTriton(TRITONBACKEND_ResponseSetIntParameter(response, name, value));
  };
  EMBERTIDE_RETURN_IF_ERROR(integer("version", static_cast<int64_t>(version.number)));
  EMBERTIDE_RETURN_IF_ERROR(integer("plan_epoch", static_cast<int64_t>(node_.plan_epoch())));
  EMBERTIDE_RETURN_IF_ERROR(integer("watermark_ms", version.watermark_ms));
  if (version.committed_ms > 0) {
    EMBERTIDE_RETURN_IF_ERROR(
        integer("staleness_ms", static_cast<int64_t>(MsSince(version.committed_ms))));
  }
  if (remote_ != nullptr) {
    EMBERTIDE_RETURN_IF_ERROR(integer("degraded_keys", job.degraded_keys));
  }
  if (job.wants_stages) {
    const Stages& stages = job.stages;
    for (const auto& [name, ns] :
         {std::pair(kStageBegan, stages.began_ns), std::pair(kStagePeers, stages.peers_ns),
          std::pair(kStageLookup, stages.lookup_ns), std::pair(kStageNet, stages.net_ns)}) {
      EMBERTIDE_RETURN_IF_ERROR(integer(name, static_cast<int64_t>(ns)));
    }
  }
  return FromTriton(
      TRITONBACKEND_ResponseSetStringParameter(response, "node", node_.options().node.c_str()));
}

size_t Executor::FloatsOf(const Job& job) const {
  const Bags& bags = job.bags;
  return sequences_ ? job.places.back()
                    : (size_t{bags.contexts} + bags.samples) * node_.total_dim();
}

// All outputs that may be asked for, or the embeddings that scores are made from.
uint64_t Executor::OutputBytesOf(const Job& job) const {
  return FloatsOf(job) * sizeof(float) + job.bags.keys.size() +
         size_t{job.bags.samples} *
             (std::max<size_t>(scores_.size(), 1) * sizeof(float) + sizeof(int64_t));
}

Status Executor::MakeOutputs(Job* job) {
  if (job->has_outputs) return Status::Ok();
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
  job->scores.assign(outputs_.size(), nullptr);
  for (const std::string& name : names) {
    void* buffer = nullptr;
    const auto head = std::ranges::find(outputs_, name);
    if (name == config_.tensors.embedding && !config_.ranking) {
      EMBERTIDE_RETURN_IF_ERROR(make(name, TRITONSERVER_TYPE_FP32,
                                     static_cast<int64_t>(FloatsOf(*job)) / first, 4, &buffer));
      job->embedding = static_cast<float*>(buffer);
    } else if (head != outputs_.end()) {
      EMBERTIDE_RETURN_IF_ERROR(make(name, TRITONSERVER_TYPE_FP32, rest, 4, &buffer));
      job->scores[static_cast<size_t>(head - outputs_.begin())] = static_cast<float*>(buffer);
    } else if (name == config_.tensors.source) {
      const auto keys = static_cast<int64_t>(job->bags.keys.size());
      EMBERTIDE_RETURN_IF_ERROR(make(name, TRITONSERVER_TYPE_UINT8, keys / first, 1, &buffer));
      job->source = static_cast<uint8_t*>(buffer);
    } else if (name == config_.tensors.version) {
      EMBERTIDE_RETURN_IF_ERROR(make(name, TRITONSERVER_TYPE_INT64, 1, 8, &buffer));
      job->version = static_cast<int64_t*>(buffer);
    }
  }
  if (job->embedding == nullptr && !config_.ranking) {
    job->unasked.resize(FloatsOf(*job));
    job->embedding = job->unasked.data();
  }
  job->has_outputs = true;
  return Status::Ok();
}

// Writes what an answered request says of its version.
Status Executor::WriteVersionOutputs(const VersionInfo& version, Job* job) const {
  const int64_t count = job->bags.jagged ? 1 : job->bags.samples;
  job->answered_version = version.number;
  if (job->version != nullptr) {
    std::fill_n(job->version, count, static_cast<int64_t>(version.number));
  }
  return SetParameters(version, *job);
}

KeyBags Executor::BagsOf(const Job& job) const {
  KeyBags bags;
  bags.keys = job.bags.keys;
  if (job.bags.jagged) bags.offsets = job.bags.offsets;
  bags.out = job.embedding;
  bags.out_stride = node_.total_dim();
  bags.source = job.source;
  if (!job.weights.empty()) bags.weights = job.weights.data();
  return bags;
}

// Brings the dense features of a ranking group together, and gives each request its rows of one
// matrix of embeddings and of the scores of each head.
void Executor::Gather(std::span<Job*> jobs) {
  size_t samples = 0;
  uint32_t contexts = 0;
  dense_.clear();
  for (const Job* job : jobs) {
    samples += job->bags.samples;
    contexts += job->bags.contexts;
    dense_.insert(dense_.end(), job->dense.begin(), job->dense.end());
  }
  context_of_.assign(contexts == 0 ? 0 : samples, Transforms::kNoContext);
  contexts_.resize(std::max(contexts_.size(), contexts * size_t{node_.total_dim()}));
  size_t sample = 0;
  contexts = 0;
  for (const Job* job : jobs) {
    for (size_t s = 0; job->bags.contexts > 0 && s < job->bags.samples; ++s) {
      context_of_[sample + s] = contexts + job->whole.context_of[s];
    }
    sample += job->bags.samples;
    contexts += job->bags.contexts;
  }
  embeddings_.resize(std::max(embeddings_.size(), samples * node_.total_dim()));
  for (std::vector<float>& scores : scores_) scores.resize(std::max(scores.size(), samples));
  float* at = embeddings_.data();
  for (size_t j = 0; j < jobs.size(); ++j) {
    bags_[j].out = at;
    at += size_t{jobs[j]->bags.samples} * node_.total_dim();
  }
}

// Shares the samples of a group out among as many threads as they are worth waking.
uint32_t Executor::PlanParts(std::span<Job*> jobs) {
  size_t samples = 0;
  size_t keys = 0;
  for (const Job* job : jobs) {
    samples += job->bags.samples;
    keys += job->bags.keys.size();
  }
  const size_t worth = config_.ranking ? samples / kSamplesAPart : keys / kKeysAPart;
  const size_t count = std::clamp<size_t>(std::min(worth, samples), 1, crew_.size());
  for (size_t p = 0; p < count; ++p) {
    parts_[p].first = samples * p / count;
    parts_[p].samples = samples * (p + 1) / count - parts_[p].first;
    parts_[p].bags.clear();
    parts_[p].own_offsets.clear();
    parts_[p].places.clear();
    parts_[p].jobs.clear();
    parts_[p].counts.assign(node_.manifest().tables.size(), SourceCounts{});
  }
  size_t first = 0;  // sample of the job at hand
  for (size_t j = 0; j < jobs.size(); ++j) {
    const Bags& bags = jobs[j]->bags;
    for (size_t p = 0; p < count; ++p) {
      Part& part = parts_[p];
      const size_t begin = std::max(part.first, first);
      const size_t end = std::min(part.first + part.samples, first + bags.samples);
      if (begin >= end) continue;
      const size_t bag = (bags.contexts + begin - first) * limits_.features;
      const size_t count_bags = (end - begin) * limits_.features;
      KeyBags& mine = part.bags.emplace_back(bags_[j]);
      part.jobs.push_back(jobs[j]);
      if (sequences_) {
        part.places.push_back(jobs[j]->places.data() + bag);
      } else {
        mine.out += (begin - first) * node_.total_dim();
      }
      if (bags.jagged) {
        mine.offsets = mine.offsets.subspan(bag, count_bags + 1);
      } else {
        mine.keys = mine.keys.subspan(bag, count_bags);
        if (mine.source != nullptr) mine.source += bag;
        if (mine.remote_of != nullptr) mine.remote_of += bag;
        if (mine.weights != nullptr) mine.weights += bag;
      }
    }
    first += bags.samples;
  }
  for (size_t p = 0; p < count; ++p) PassOverContexts(&parts_[p]);
  return static_cast<uint32_t>(count);
}

// A sample with a context has the bags of its own features alone, and a history may have hundreds
// of others. Keys of bags that follow each other do so, too, where those between them are empty.
void Executor::PassOverContexts(Part* part) const {
  part->own_bags =
      std::ranges::none_of(part->jobs, [](const Job* job) { return job->bags.contexts == 0; });
  if (!part->own_bags) return;
  size_t offsets = 0;
  for (const KeyBags& bags : part->bags) {
    offsets += bags.bags() / limits_.features * sample_columns_.size() + 1;
  }
  part->own_offsets.resize(offsets);
  std::span<uint32_t> rest(part->own_offsets);
  for (KeyBags& bags : part->bags) {
    const size_t samples = bags.bags() / limits_.features;
    const std::span<uint32_t> own = rest.first(samples * sample_columns_.size() + 1);
    rest = rest.subspan(own.size());
    auto at = own.begin();
    for (size_t s = 0; s < samples; ++s) {
      for (const uint32_t f : sample_columns_) *at++ = bags.offsets[s * limits_.features + f];
    }
    *at = bags.offsets.back();
    bags.offsets = own;
  }
}

Status Executor::LookupContexts(const BagReader& rows, std::span<Job*> jobs) {
  std::vector<KeyBags> requests;
  std::vector<SourceCounts> counts(node_.manifest().tables.size());
  float* at = contexts_.data();
  for (size_t j = 0; j < jobs.size(); ++j) {
    const Bags& bags = jobs[j]->bags;
    if (bags.contexts == 0) continue;
    KeyBags& request = requests.emplace_back(bags_[j]);
    request.offsets = request.offsets.first(size_t{bags.contexts} * limits_.features + 1);
    request.out = at;
    at += size_t{bags.contexts} * node_.total_dim();
  }
  EMBERTIDE_RETURN_IF_ERROR(rows.Lookup(features_, requests, counts));
  for (uint32_t table = 0; table < counts.size(); ++table) {
    metrics_->AddKeys(table, counts[table]);
  }
  return Status::Ok();
}

void Executor::RepeatContexts(const Part& part) {
  const size_t width = node_.total_dim();
  for (size_t s = part.first; s < part.first + part.samples; ++s) {
    if (context_of_[s] == Transforms::kNoContext) continue;
    const float* from = contexts_.data() + context_of_[s] * width;
    float* to = embeddings_.data() + s * width;
    for (const auto& [begin, end] : context_ranges_) {
      std::copy(from + begin, from + end, to + begin);
    }
  }
}

// A part of requests with and without contexts repeats them: Triton puts together only requests of
// the same inputs.
bool Executor::RunsByContext(const Part& part) const {
  if (!context_net_.on() || context_of_.empty() || part.samples == 0) return false;
  return std::ranges::none_of(std::span(context_of_).subspan(part.first, part.samples),
                              [](uint32_t context) { return context == Transforms::kNoContext; });
}

Status Executor::RunNet(const DenseWeights& weights, uint32_t number, const float* dense) {
  Part& part = parts_[number];
  DenseProgram* program = programs_[number].get();
  const float* embeddings = embeddings_.data() + part.first * node_.total_dim();
  if (!part.by_context) {
    return program->Run(weights, static_cast<int64_t>(part.samples), dense, embeddings,
                        part.scores);
  }
  metrics_->AddOnceAContext(part.samples);
  const ContextNet::Samples samples{
      .count = part.samples,
      .dense = dense,
      .embeddings = embeddings,
      .context_embeddings = contexts_.data(),
      .context_of = std::span(context_of_).subspan(part.first, part.samples)};
  return context_net_.Run(program, weights, samples, &part.contexts, part.scores);
}

Status Executor::AnswerPart(const BagReader& rows, const VersionInfo& version, uint32_t number) {
  try {
    Part& part = parts_[number];
    const uint64_t begin_ns = NowNs();
    EMBERTIDE_RETURN_IF_ERROR(
        sequences_
            ? LookupPlaced(rows, node_.features(), part.bags, part.places, part.counts)
            : rows.Lookup(part.own_bags ? sample_features_ : features_, part.bags, part.counts));
    part.by_context = RunsByContext(part);
    if (!context_of_.empty() && !part.by_context) RepeatContexts(part);
    const uint64_t looked_up_ns = NowNs();
    part.looked_up_ns = looked_up_ns - begin_ns;
    part.net_ns = 0;
    if (!config_.ranking) return Status::Ok();
    const auto awaited = [](const Job* job) { return IsAwaited(*job); };
    if (std::ranges::none_of(part.jobs, awaited)) return Status::Ok();
    const size_t columns = node_.manifest().dense_features;
    const float* dense = dense_.data() + part.first * columns;
    part.missing = 0;
    if (const Transforms* transforms = node_.transforms(); transforms != nullptr) {
      part.dense.resize(part.samples * transforms->outputs());
      const std::span<const float> raw(dense, part.samples * columns);
      part.missing =
          context_of_.empty()
              ? transforms->Apply(raw, part.dense.data())
              : transforms->Apply(raw, std::span(context_of_).subspan(part.first, part.samples),
                                  context_.is_context_dense(), part.dense.data());
      dense = part.dense.data();
    }
    part.scores.clear();
    for (std::vector<float>& scores : scores_) part.scores.push_back(scores.data() + part.first);
    const Status ran = RunNet(*version.weights, number, dense);
    part.net_ns = NowNs() - looked_up_ns;
    return ran;
  } catch (const std::exception& error) {
    return {Code::kResourceExhausted, error.what()};
  }
}

Status Executor::Fetch(const Pinned& pinned, std::span<const BagFeature> features,
                       std::span<KeyBags> bags, Deadline deadline, FetchTerms terms) {
  const uint64_t begin_ns = NowNs();
  Status status = node_.Fetch(pinned, features, bags, deadline, remote_.get(), terms);
  peers_ns_ += NowNs() - begin_ns;
  return status;
}

std::span<const std::string_view> Executor::TracesOf(std::span<Job* const> jobs) {
  traces_.clear();
  if (std::ranges::all_of(jobs, [](const Job* job) { return job->trace.empty(); })) return {};
  for (const Job* job : jobs) traces_.emplace_back(job->trace);
  return traces_;
}

// Brings the histories of the users of requests that leave their columns to the node: a round of
// lookups before the one for the items, under the same pin.
Status Executor::FillHistories(const Pinned& pinned, std::span<Job*> jobs, FetchTerms terms) {
  std::vector<Job*> own;
  std::ranges::copy_if(jobs, std::back_inserter(own), &Job::own);
  for (Job* job : own) {
    job->lost.clear();
    job->lost_keys = 0;
  }
  for (uint32_t s = 0; !own.empty() && s < node_.made_columns().sequences().size(); ++s) {
    EMBERTIDE_RETURN_IF_ERROR(FillHistory(pinned, s, own, terms));
  }
  return Status::Ok();
}

Status Executor::FillHistory(const Pinned& pinned, uint32_t number, std::span<Job*> jobs,
                             FetchTerms terms) {
  const MadeColumns& made = node_.made_columns();
  const MadeSequence& sequence = made.sequences()[number];
  std::vector<std::vector<int64_t>> users;
  std::vector<KeyBags> bags;
  users.reserve(jobs.size());
  for (const Job* job : jobs) {
    bags.push_back({users.emplace_back(made.UsersOf(sequence, job->whole)), {}});
  }
  const BagFeature feature{sequence.table, Pooling::kNone, 0};
  if (remote_ != nullptr) {
    // The items' rows get the other half. The first job has the earliest deadline.
    Deadline deadline = jobs[0]->deadline;
    if (deadline != kNoDeadline) {
      const Deadline now = std::chrono::steady_clock::now();
      deadline = now + (deadline - now) / 2;
    }
    terms.traces = TracesOf(jobs);
    EMBERTIDE_RETURN_IF_ERROR(Fetch(pinned, {&feature, 1}, bags, deadline, terms));
  }
  const BagReader rows(pinned.rows);
  std::vector<int64_t> items;
  std::vector<uint8_t> sources;
  std::vector<SourceCounts> counts(node_.manifest().tables.size());
  for (size_t j = 0; j < jobs.size(); ++j) {
    Job* job = jobs[j];
    items.resize(users[j].size() * sequence.row_keys);
    sources.resize(users[j].size());
    EMBERTIDE_RETURN_IF_ERROR(
        rows.CopyKeys(sequence.table, bags[j], items.data(), sources.data(), counts));
    made.PutItems(sequence, items, &job->whole);
    const size_t first = MadeColumns::FirstRowOf(sequence, job->whole);
    for (size_t u = 0; u < users[j].size(); ++u) {
      if (sources[u] != static_cast<uint8_t>(Source::kUnanswered)) continue;
      job->lost.push_back(static_cast<uint32_t>(number * job->whole.rows + first + u));
      job->lost_keys += static_cast<uint32_t>(sequence.places.size());
    }
    if (remote_ == nullptr) continue;
    // Whether too many keys are lost is known only once the items are asked for, too.
    const FetchedRequest& fetched = Node::ResultOf(*remote_, j);
    if (fetched.status.code() == Code::kVersionGone) NoteFetched(fetched, job);
  }
  node_.NoteLookups({&feature, 1}, bags);
  if (remote_ != nullptr) Node::Release(remote_.get());
  metrics_->AddKeys(sequence.table, counts[sequence.table]);
  return Status::Ok();
}

// Places of a sequence whose user's row nobody gave are unanswered, whatever was looked up there.
void Executor::MarkUnanswered(const Job& job) const {
  if (job.source == nullptr) return;
  const MadeColumns& made = node_.made_columns();
  for (const uint32_t lost : job.lost) {
    const size_t sequence = lost / job.whole.rows;
    for (const uint32_t feature : made.sequences()[sequence].places) {
      job.source[made.PlaceOf(job.whole, lost % job.whole.rows, feature)] =
          static_cast<uint8_t>(Source::kUnanswered);
    }
  }
}

// A job that needs peers which do not answer costs the jobs beside it nothing.
void Executor::NoteFetched(const FetchedRequest& fetched, Job* job) const {
  job->degraded_keys = fetched.degraded_keys + job->lost_keys;
  const auto keys = static_cast<double>(job->bags.keys.size());
  if (job->lost_keys > 0 && fetched.status.ok() &&
      static_cast<double>(job->degraded_keys) > node_.options().max_degraded_share * keys) {
    job->refusal = {Reason::kDegraded,
                    {Code::kUnavailable,
                     "no owner answers for the histories of " + std::to_string(job->lost.size()) +
                         " samples, and " + std::to_string(job->degraded_keys) + " of " +
                         std::to_string(job->bags.keys.size()) +
                         " keys are more than max_degraded_share allows: try again in a second, or "
                         "at another node"}};
  }
  if (fetched.status.ok()) return;
  job->refusal = {Reason::kDegraded, fetched.status};
  if (fetched.status.code() == Code::kVersionGone) {
    job->refusal = {Reason::kVersion, {Code::kNotFound, fetched.status.message()}};
  }
}

// Brings the jobs that go on after a fetch, and their bags, to the front; returns how many.
size_t Executor::CompactLiveJobs(std::span<Job*> jobs) {
  size_t kept = 0;
  for (size_t j = 0; j < jobs.size(); ++j) {
    Job* job = jobs[j];
    if (remote_ != nullptr) NoteFetched(Node::ResultOf(*remote_, j), job);
    if (DropIfExpired(job)) continue;
    if (const Status made = MakeOutputs(job); !made.ok()) {
      job->refusal = {Reason::kInternal, made};
      continue;
    }
    bags_[j].out = job->embedding;
    bags_[j].source = job->source;
    std::swap(jobs[kept], jobs[j]);
    std::swap(bags_[kept], bags_[j]);
    ++kept;
  }
  bags_.resize(kept);
  return kept;
}

Status Executor::AnswerGroup(const Pinned& pinned, std::span<Job*> jobs, FetchTerms terms) {
  // Who is refused stands behind the others.
  const auto drop_expired = [&] {
    const auto refused = std::ranges::stable_partition(jobs, std::not_fn(DropIfExpired));
    jobs = jobs.first(jobs.size() - refused.size());
    return !jobs.empty();
  };
  if (!drop_expired()) return Status::Ok();
  const uint64_t begin_ns = NowNs();
  peers_ns_ = 0;
  uint64_t histories_ns = 0;  // but for what peers took of them
  if (!node_.made_columns().sequences().empty()) {
    EMBERTIDE_RETURN_IF_ERROR(FillHistories(pinned, jobs, terms));
    if (!drop_expired()) return Status::Ok();
    histories_ns = NowNs() - begin_ns - peers_ns_;
  }
  bags_.clear();
  for (const Job* job : jobs) bags_.push_back(BagsOf(*job));
  if (remote_ != nullptr) {
    terms.traces = TracesOf(jobs);
    // The first has the earliest deadline.
    EMBERTIDE_RETURN_IF_ERROR(Fetch(pinned, features_, bags_, jobs[0]->deadline, terms));
  }
  jobs = jobs.first(CompactLiveJobs(jobs));
  if (jobs.empty()) return Status::Ok();
  if (config_.ranking) Gather(jobs);
  const uint32_t count = PlanParts(jobs);
  const uint64_t fetched_ns = NowNs() - begin_ns;
  Status of_contexts;
  uint64_t contexts_ns = 0;
  {
    const BagReader rows(pinned.rows);
    if (config_.ranking && !context_of_.empty()) {
      of_contexts = LookupContexts(rows, jobs);
      contexts_ns = NowNs() - begin_ns - fetched_ns;
    }
    crew_.Run(count, [&](uint32_t number) {
      parts_[number].status = AnswerPart(rows, *pinned.info, number);
    });
  }
  node_.NoteLookups(features_, bags_);
  if (remote_ != nullptr) Node::Release(remote_.get());
  EMBERTIDE_RETURN_IF_ERROR(of_contexts);
  uint64_t longest_ns = 0;
  const Part* last = nullptr;  // that the others were waited for
  for (const Part& part : std::span(parts_).first(count)) {
    EMBERTIDE_RETURN_IF_ERROR(part.status);
    longest_ns = std::max(longest_ns, part.looked_up_ns);
    if (last == nullptr || part.looked_up_ns + part.net_ns > last->looked_up_ns + last->net_ns) {
      last = &part;
    }
    for (uint32_t table = 0; table < part.counts.size(); ++table) {
      metrics_->AddKeys(table, part.counts[table]);
    }
    metrics_->AddMissing(part.missing);
  }
  metrics_->AddLookup(std::chrono::nanoseconds(fetched_ns + contexts_ns + longest_ns));
  const Stages stages{begin_ns, peers_ns_, histories_ns + contexts_ns + last->looked_up_ns,
                      last->net_ns};
  size_t first = 0;
  for (Job* job : jobs) {
    job->stages = stages;
    MarkUnanswered(*job);
    for (size_t h = 0; h < job->scores.size(); ++h) {
      if (job->scores[h] == nullptr) continue;
      std::copy_n(scores_[h].data() + first, job->bags.samples, job->scores[h]);
    }
    first += job->bags.samples;
  }
  return Status::Ok();
}

// The number of these jobs, from the first on, that are answered together.
size_t Executor::GroupSize(std::span<Job* const> jobs) const {
  uint64_t keys = 0;
  uint64_t bytes = 0;
  // They share the time that peers get, which is the first one's: none loses more than half of its
  // own.
  const Deadline first = jobs[0]->deadline;
  const Deadline now = std::chrono::steady_clock::now();
  const Deadline last = first == kNoDeadline ? first : first + std::max(first - now, {});
  size_t size = 0;
  for (; size < jobs.size(); ++size) {
    keys += jobs[size]->bags.keys.size();
    bytes += OutputBytesOf(*jobs[size]);
    if (size == 0) continue;
    if (keys > limits_.max_keys || bytes > config_.max_output_bytes) break;
    if (jobs[size]->deadline > last) break;
  }
  return size;
}

// Answers requests group by group, all under one pin, and sends the answers. kVersionGone or
// kNotOwner, with some not sent, if the terms allow it: those are to be started over.
Code Executor::AnswerAll(const Pinned& pinned, std::span<Job*> jobs, FetchTerms terms) {
  // A row that cannot be read, or an answer that there is no memory for, costs the requests beside
  // it nothing: jobs before this one are asked each alone.
  size_t alone = 0;
  for (size_t first = 0; first < jobs.size();) {
    const size_t end = first + (first < alone ? 1 : GroupSize(jobs.subspan(first)));
    const std::span<Job*> group = jobs.subspan(first, end - first);
    Status status;
    try {
      status = AnswerGroup(pinned, group, terms);
    } catch (const std::exception& error) {
      status = {Code::kResourceExhausted, error.what()};
    }
    if (group.size() > 1 &&
        (status.code() == Code::kCorrupt || status.code() == Code::kDeviceError ||
         status.code() == Code::kResourceExhausted)) {
      alone = end;
      continue;
    }
    const bool over = status.code() == Code::kVersionGone || status.code() == Code::kNotOwner;
    if (over && terms.may_start_over) return status.code();
    for (Job* job : group) {
      if (!status.ok() && job->refusal.reason == Reason::kNone) {
        job->refusal = {Reason::kInternal, status};
      }
      if (!DropIfExpired(job)) {
        if (const Status said = WriteVersionOutputs(*pinned.info, job); !said.ok()) {
          job->refusal = {Reason::kInternal, said};
        }
      }
      Send(job);
    }
    first = end;
  }
  return Code::kOk;
}

// Answers the good requests, those that want the same version together.
void Executor::Answer(std::span<Job> jobs) {
  good_.clear();
  for (Job& job : jobs) {
    if (job.refusal.reason == Reason::kNone) good_.push_back(&job);
  }
  std::ranges::stable_sort(good_, {},
                           [](const Job* job) { return std::pair(job->wanted, job->deadline); });
  for (size_t first = 0; first < good_.size();) {
    size_t end = first + 1;
    while (end < good_.size() && good_[end]->wanted == good_[first]->wanted) ++end;
    AnswerAt(good_[first]->wanted, std::span(good_).subspan(first, end - first));
    first = end;
  }
}

void Executor::AnswerAt(uint64_t wanted, std::span<Job*> jobs) {
  for (const bool last : {false, true}) {
    const FetchTerms terms{.named = wanted != 0, .may_start_over = !last};
    const Result<Pinned> pinned = wanted == 0 ? node_.Pin() : node_.Pin(wanted);
    if (!pinned.ok()) {
      const Status& why = pinned.status();
      const Refusal refusal = wanted == 0
                                  ? Refusal{Reason::kInternal, why}
                                  : Refusal{Reason::kVersion, {Code::kNotFound, why.message()}};
      for (Job* job : jobs) job->refusal = refusal;
      return;
    }
    const Code code = AnswerAll(pinned.value(), jobs, terms);
    if (code == Code::kOk) return;
    // Who was refused may be answered at another version; who was sent an answer has it.
    const auto unsent = std::ranges::stable_partition(jobs, &Job::sent);
    jobs = {unsent.begin(), unsent.end()};
    for (Job* job : jobs) job->refusal = {};
    // A peer has a newer one. The first has the earliest deadline.
    if (code == Code::kNotOwner) node_.RefreshPlan(jobs[0]->deadline);
  }
}

// noexcept: each request must be released. Only memory for the text of an error could still
// throw, after all else that was large has been given back.
// NOLINTNEXTLINE(bugprone-exception-escape): see above.
void Executor::Run(TRITONBACKEND_ModelInstance* instance, std::span<Job> jobs,
                   uint64_t exec_start_ns) noexcept {
  for (Job& job : jobs) Read(&job);
  const uint64_t compute_start_ns = NowNs();
  try {
    Answer(jobs);
  } catch (const std::exception&) {
    for (Job& job : jobs) {
      if (job.sent || job.refusal.reason != Reason::kNone) continue;
      job.refusal = {Reason::kInternal, {Code::kResourceExhausted, "out of memory"}};
    }
  }
  Finish(instance, jobs, exec_start_ns, compute_start_ns, NowNs());
}

void Executor::Execute(TRITONBACKEND_ModelInstance* instance,
                       std::span<TRITONBACKEND_Request* const> requests) {
  const uint64_t exec_start_ns = NowNs();
  std::vector<Job> jobs(requests.size());
  good_.reserve(requests.size());
  for (size_t i = 0; i < jobs.size(); ++i) jobs[i].request = requests[i];
  Run(instance, jobs, exec_start_ns);
}

}  // namespace embertide::triton
