// Tensors of a Triton request, in pieces and at any address: what is taken are bags that lie in
// KEYS one after the other, and dense values, as many as the shapes say: finite, or missing
// where transforms say what that means.
//
// Requests with contexts become rows whose bags are those that were sent, each once.
//
//   input: [i64 version][u64 timeout] then for each of kInputs:
//          [u8 there][u8 dtype][u8 dims][i64]...[u8 pieces]([u16 length][bytes])...
#include <algorithm>
#include <cmath>

#include "fuzz/fuzz.h"
#include "node/context_columns.h"
#include "node/former_layouts.h"
#include "triton/fake_request.h"

namespace embertide::fuzz {
namespace {

using triton::FakeInput;
using triton::FakeRequest;
using triton::Reason;
using triton::Tensor;

constexpr triton::RequestLimits kLimits{2, 8, 64};
constexpr uint32_t kColumns = 3;
constexpr const char* kInputs[] = {
    "KEYS",         "LENGTHS",         "WEIGHTS",         "DENSE",
    "CONTEXT_KEYS", "CONTEXT_LENGTHS", "CONTEXT_WEIGHTS", "CONTEXT_DENSE",
    "CANDIDATES"};

FakeInput TakeInput(const char* name, std::string_view* input) {
  FakeInput made;
  made.name = name;
  constexpr TRITONSERVER_DataType kTypes[] = {TRITONSERVER_TYPE_INT64, TRITONSERVER_TYPE_INT32,
                                              TRITONSERVER_TYPE_FP32, TRITONSERVER_TYPE_BYTES};
  made.dtype = kTypes[Take<uint8_t>(input) % 4];
  for (int dims = Take<uint8_t>(input) % 4; dims > 0; --dims) {
    made.shape.push_back(Take<int64_t>(input));
  }
  for (int pieces = Take<uint8_t>(input) % 4; pieces > 0; --pieces) {
    const size_t length = std::min<size_t>(Take<uint16_t>(input), input->size());
    made.buffers.emplace_back(input->substr(0, length));
    input->remove_prefix(length);
  }
  return made;
}

template <typename T>
std::string Seed(uint8_t dtype, const std::vector<int64_t>& shape, const std::vector<T>& values,
                 size_t cut) {
  std::string bytes;
  for (const T value : values) bytes += Raw(value);
  std::string seed = Raw<uint8_t>(1) + Raw(dtype) + Raw(static_cast<uint8_t>(shape.size()));
  for (const int64_t dim : shape) seed += Raw(dim);
  const std::string first = bytes.substr(0, cut);
  const std::string rest = bytes.substr(first.size());
  seed += Raw<uint8_t>(rest.empty() ? 1 : 2) + Raw(static_cast<uint16_t>(first.size())) + first;
  return rest.empty() ? seed : seed + Raw(static_cast<uint16_t>(rest.size())) + rest;
}

const Transforms& Columns() {
  static const Transforms kMade = Transforms::Parse(R"({"format": 1, "columns": [
        {"name": "a", "steps": [], "fill": 0, "missing": false},
        {"name": "b", "steps": [], "fill": 0, "missing": true},
        {"name": "c", "steps": [], "fill": 0, "missing": false}]})")
                                      .value();
  return kMade;
}

// A model that had the columns of kLimits and kColumns once, of which it kept one each.
const Manifest& Changed() {
  static const Manifest kMade = [] {
    Manifest manifest;
    manifest.features = {{"new", "item", "sum"}, {"kept", "item", "sum"}, {"late", "item", "sum"}};
    manifest.dense_features = 2;
    manifest.dense_names = {"x", "c"};
    manifest.former = {{{"kept", "gone"}, {"a", "b", "c"}}};
    return manifest;
  }();
  return kMade;
}

// A request brought into today's columns has their number of bags, and no key that was not sent.
void CheckBrought(const triton::Bags& bags, std::span<const float> weights,
                  std::span<const float> dense) {
  static const FormerLayouts kLayouts =
      FormerLayouts::Resolve(Changed(), MadeColumns::Resolve(Changed()).value()).value();
  const FormerLayout& layout = kLayouts.layouts().front();
  const size_t columns = Changed().features.size();
  BroughtRequest brought;
  kLayouts.BringKeys(layout, bags.keys, bags.offsets, weights, &brought);
  EMBERTIDE_CHECK(brought.weights.size() == (weights.empty() ? 0 : brought.keys.size()));
  if (bags.jagged) {
    EMBERTIDE_CHECK(brought.offsets.size() == bags.samples * columns + 1);
    EMBERTIDE_CHECK(std::ranges::is_sorted(brought.offsets));
    EMBERTIDE_CHECK(brought.offsets.back() == brought.keys.size());
    EMBERTIDE_CHECK(brought.keys.size() <= bags.keys.size());
  } else {
    EMBERTIDE_CHECK(brought.keys.size() == bags.samples * columns);
  }
  if (dense.size() != size_t{bags.samples} * kColumns) return;
  FormerLayouts::BringDense(layout, dense, bags.samples, NAN, &brought);
  EMBERTIDE_CHECK(brought.dense.size() == bags.samples * size_t{Changed().dense_features});
}

// A model whose candidates have the columns of kLimits; its contexts have as many. Crosses are made
// of one side and of both.
struct ContextModel {
  ContextModel() {
    manifest.features = {
        {"user", "user", "sum"},   {"own", "pair", "sum", false, {"user", "place"}},
        {"cand", "item", "sum"},   {"both", "pair", "sum", false, {"cand", "user"}},
        {"place", "item", "mean"}, {"tags", "item", "sum"}};
    manifest.dense_features = 2;
    manifest.dense_names = {"hour", "price"};
    made = MadeColumns::Resolve(manifest).value();
    const std::vector<std::string> names = {"user", "place", "hour"};
    context = ContextColumns::Resolve(manifest, made, nullptr, names).value();
  }
  Manifest manifest;
  MadeColumns made;
  ContextColumns context;
};

// Bags of a request with contexts: none of the other side, and no key that was not sent or made.
void CheckContexts(const WholeRequest& whole, size_t contexts, size_t samples, size_t sent) {
  const size_t features = whole.is_context.size();
  EMBERTIDE_CHECK(whole.contexts == contexts && whole.rows == contexts + samples);
  EMBERTIDE_CHECK(whole.offsets.size() == whole.rows * features + 1);
  EMBERTIDE_CHECK(std::ranges::is_sorted(whole.offsets));
  EMBERTIDE_CHECK(whole.offsets.back() == whole.keys.size());
  EMBERTIDE_CHECK(whole.weights.empty() || whole.weights.size() == whole.keys.size());
  EMBERTIDE_CHECK(whole.keys.size() == sent + whole.rows);  // a cross of each side
  for (size_t bag = 0; bag + 1 < whole.offsets.size(); ++bag) {
    const bool mine = whole.is_context[bag % features] == (bag / features < contexts);
    EMBERTIDE_CHECK(mine || whole.offsets[bag] == whole.offsets[bag + 1]);
  }
  uint64_t repeated = 0;
  for (size_t s = 0; s < samples; ++s) {
    EMBERTIDE_CHECK(whole.context_of[s] < contexts);
    for (uint32_t f = 0; f < features; ++f) {
      const size_t bag = whole.RowOf(s, f) * features + f;
      repeated += whole.offsets[bag + 1] - whole.offsets[bag];
    }
  }
  EMBERTIDE_CHECK(repeated == whole.keys.size() + ContextColumns::KeysSaved(whole));
}

const Tensor* Find(const std::vector<Tensor>& tensors, const std::string& name) {
  for (const Tensor& tensor : tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

void CheckBags(const triton::Bags& bags, const Tensor& keys) {
  const size_t bag_count = size_t{bags.samples} * kLimits.features;
  EMBERTIDE_CHECK(bags.samples > 0 && bags.samples <= kLimits.max_samples);
  EMBERTIDE_CHECK(bags.keys.size() * 8 == keys.data.size());
  EMBERTIDE_CHECK(bags.keys.size() <= kLimits.max_keys);
  uint32_t at = 0;
  for (size_t bag = 0; bag < bag_count; ++bag) {
    EMBERTIDE_CHECK(bags.Begin(bag) == at && bags.End(bag) >= at);
    at = bags.End(bag);
  }
  EMBERTIDE_CHECK(at == bags.keys.size());
}

void RunContexts(const std::vector<Tensor>& tensors, const Tensor& keys) {
  static const ContextModel kModel;
  const Tensor* of_contexts = Find(tensors, "CONTEXT_KEYS");
  if (of_contexts == nullptr) return;
  triton::Bags contexts;
  triton::Bags samples;
  const auto taken = [](const triton::Refusal& refusal) { return refusal.reason == Reason::kNone; };
  if (!taken(triton::ParseSide(*of_contexts, Find(tensors, "CONTEXT_LENGTHS"), kLimits, "context",
                               &contexts)) ||
      !taken(triton::ParseSide(keys, Find(tensors, "LENGTHS"), kLimits, "candidate", &samples))) {
    return;
  }
  CheckBags(contexts, *of_contexts);
  CheckBags(samples, keys);
  std::vector<uint32_t> context_of;
  if (!taken(triton::ParseCandidates("CANDIDATES", Find(tensors, "CANDIDATES"), contexts.samples,
                                     samples.samples, &context_of))) {
    return;
  }
  EMBERTIDE_CHECK(context_of.size() == samples.samples && context_of.front() == 0);
  EMBERTIDE_CHECK(context_of.back() + 1 == contexts.samples);
  std::array<std::span<const float>, 2> weights;
  if (!taken(triton::ParseWeights("CONTEXT_WEIGHTS", Find(tensors, "CONTEXT_WEIGHTS"), *of_contexts,
                                  false, &weights[0])) ||
      !taken(triton::ParseWeights("WEIGHTS", Find(tensors, "WEIGHTS"), keys, false, &weights[1]))) {
    return;
  }
  WholeRequest whole;
  const ContextColumns& context = kModel.context;
  if (!context
           .Complete(kModel.made, {contexts.keys, contexts.offsets, weights[0]},
                     {samples.keys, samples.offsets, weights[1]}, context_of, &whole)
           .ok()) {
    return;
  }
  CheckContexts(whole, contexts.samples, samples.samples,
                contexts.keys.size() + samples.keys.size());
  std::array<std::span<const float>, 2> dense;
  if (!taken(triton::ParseDense("CONTEXT_DENSE", Find(tensors, "CONTEXT_DENSE"), 1, nullptr,
                                contexts, &dense[0])) ||
      !taken(triton::ParseDense("DENSE", Find(tensors, "DENSE"), 1, nullptr, samples, &dense[1]))) {
    return;
  }
  context.CompleteDense(dense[0], dense[1], &whole);
  EMBERTIDE_CHECK(whole.dense.size() == size_t{samples.samples} * 2);
  EMBERTIDE_CHECK(whole.dense.back() == dense[1].back());
  EMBERTIDE_CHECK(whole.dense[whole.dense.size() - 2] == dense[0].back());
}

}  // namespace

std::vector<std::string> Seeds() {
  const std::string none(1, '\0');
  return {
      Raw<int64_t>(0) + Raw<uint64_t>(1000) + Seed<int64_t>(0, {2, 2}, {1, 2, 3, 4}, 99) + none +
          none + Seed<float>(2, {2, 3}, {0, 1, 2, 3, 4, 5}, 5),
      Raw<int64_t>(7) + Raw(~uint64_t{0}) + Seed<int64_t>(0, {1, 3}, {1, 2, 3}, 11) +
          Seed<int32_t>(1, {1, 4}, {1, 0, 2, 0}, 99) + Seed<float>(2, {1, 3}, {0.5F, -1, 2}, 99) +
          Seed<float>(2, {1, 6}, {0, 1, 2, 3, 4, 5}, 99),
      // Two contexts, of two candidates and one.
      Raw<int64_t>(0) + Raw<uint64_t>(0) + Seed<int64_t>(0, {1, 5}, {1, 2, 3, 4, 5}, 99) +
          Seed<int32_t>(1, {1, 6}, {1, 0, 1, 2, 1, 0}, 99) + none +
          Seed<float>(2, {1, 3}, {0.5F, -1, 2}, 99) + Seed<int64_t>(0, {1, 4}, {6, 7, 8, 9}, 13) +
          none + Seed<float>(2, {1, 4}, {1, 1, 2, 3}, 99) + Seed<float>(2, {1, 2}, {7, 8}, 99) +
          Seed<int32_t>(1, {1, 2}, {2, 1}, 99)};
}

void Run(std::string_view input) {
  FakeRequest request;
  if (const auto version = Take<int64_t>(&input); version != 0) request.version = version;
  request.timeout_us = Take<uint64_t>(&input);
  for (const char* name : kInputs) {
    if (Take<uint8_t>(&input) % 2 == 1) request.inputs.push_back(TakeInput(name, &input));
  }
  triton::RequestParameters parameters;
  const Status wanted = triton::ReadParameters(request.handle(), &parameters);
  EMBERTIDE_CHECK(wanted.ok() == (request.version.value_or(1) > 0));
  // Any number of microseconds is a time to come, at most a day away.
  Deadline deadline{};
  const Deadline before = std::chrono::steady_clock::now();
  EMBERTIDE_CHECK(triton::ReadDeadline(request.handle(), &deadline).ok());
  EMBERTIDE_CHECK((deadline == kNoDeadline) == (request.timeout_us == 0));
  EMBERTIDE_CHECK(deadline == kNoDeadline ||
                  (deadline >= before && deadline - before < std::chrono::hours(25)));
  std::vector<Tensor> tensors;
  EMBERTIDE_CHECK(triton::ReadInputs(request.handle(), &tensors).ok());
  for (size_t t = 0; t < tensors.size(); ++t) {
    std::string whole;
    for (const std::string& piece : request.inputs[t].buffers) whole += piece;
    EMBERTIDE_CHECK(tensors[t].data.size() == whole.size());
    EMBERTIDE_CHECK(whole.empty() ||
                    std::memcmp(tensors[t].data.data(), whole.data(), whole.size()) == 0);
  }
  const Tensor* keys = Find(tensors, "KEYS");
  if (keys == nullptr) return;
  RunContexts(tensors, *keys);
  triton::Bags bags;
  if (triton::ParseBags(*keys, Find(tensors, "LENGTHS"), kLimits, &bags).reason != Reason::kNone) {
    return;
  }
  CheckBags(bags, *keys);
  std::span<const float> weights;
  const Tensor* weighed = Find(tensors, "WEIGHTS");
  if (triton::ParseWeights("WEIGHTS", weighed, *keys, false, &weights).reason != Reason::kNone) {
    return;
  }
  EMBERTIDE_CHECK(weights.size() == (weighed == nullptr ? 0 : bags.keys.size()));
  for (const float weight : weights) EMBERTIDE_CHECK(std::isfinite(weight));
  std::span<const float> dense;
  const Tensor* of = Find(tensors, "DENSE");
  for (const Transforms* with : {static_cast<const Transforms*>(nullptr), &Columns()}) {
    const triton::Refusal refusal = triton::ParseDense("DENSE", of, kColumns, with, bags, &dense);
    if (refusal.reason != Reason::kNone) continue;
    EMBERTIDE_CHECK(dense.size() == size_t{bags.samples} * kColumns);
    CheckBrought(bags, weights, dense);
    for (const float value : dense) {
      EMBERTIDE_CHECK(std::isfinite(value) || (with != nullptr && std::isnan(value)));
    }
  }
}

}  // namespace embertide::fuzz
