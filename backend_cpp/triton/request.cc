// Validation of a request's tensors.
#include "triton/request.h"

#include <algorithm>
#include <cmath>

namespace embertide::triton {
namespace {

Refusal Refuse(Reason reason, const std::string& message) {
  return {reason, Status(Code::kInvalidArgument, message)};
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t dim : shape) text += (text.size() > 1 ? "," : "") + std::to_string(dim);
  return text + "]";
}

// Type, rank and that the bytes are those of the shape.
Refusal CheckTensor(const Tensor& tensor, const char* dtype, uint64_t element_bytes) {
  if (tensor.dtype != dtype) {
    return Refuse(Reason::kDtype,
                  tensor.name + " has type " + tensor.dtype + "; it must be " + dtype);
  }
  if (tensor.shape.size() != 2 || tensor.shape[0] < 0 || tensor.shape[1] < 0) {
    return Refuse(Reason::kShape, tensor.name + " has shape " + ShapeText(tensor.shape) +
                                      "; it must have two dimensions");
  }
  uint64_t elements = 0;
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(tensor.shape[0], tensor.shape[1], &elements) ||
      __builtin_mul_overflow(elements, element_bytes, &bytes) || bytes != tensor.data.size()) {
    return Refuse(Reason::kShape, tensor.name + " has shape " + ShapeText(tensor.shape) + " but " +
                                      std::to_string(tensor.data.size()) + " bytes");
  }
  return {};
}

template <typename T>
std::span<const T> Elements(const Tensor& tensor) {
  return {reinterpret_cast<const T*>(tensor.data.data()), tensor.data.size() / sizeof(T)};
}

Refusal CheckBounds(uint64_t samples, uint64_t keys, const RequestLimits& limits) {
  if (samples == 0) return Refuse(Reason::kEmpty, "the request has no sample");
  if (samples > limits.max_samples) {
    return Refuse(Reason::kMaxSamples, "the request has " + std::to_string(samples) +
                                           " samples; max_samples is " +
                                           std::to_string(limits.max_samples));
  }
  if (keys > limits.max_keys) {
    return Refuse(Reason::kMaxKeys, "the request has " + std::to_string(keys) +
                                        " keys; max_keys is " + std::to_string(limits.max_keys));
  }
  return {};
}

std::string OwnColumnsText(const RequestLimits& limits) {
  if (limits.own_columns == 0) return {};
  return ", or [batch," + std::to_string(limits.own_columns) +
         "] without those that the node makes";
}

Refusal ParseRectangular(const Tensor& keys, const RequestLimits& limits, Bags* bags) {
  if (keys.shape[1] != limits.features) {
    return Refuse(keys.shape[1] == 0 ? Reason::kEmpty : Reason::kShape,
                  keys.name + " has shape " + ShapeText(keys.shape) +
                      "; without lengths it must be "
                      "[batch," +
                      std::to_string(limits.features) + "], one key for each feature" +
                      OwnColumnsText(limits));
  }
  bags->jagged = false;
  bags->offsets.clear();
  bags->samples = static_cast<uint32_t>(keys.shape[0]);
  return CheckBounds(static_cast<uint64_t>(keys.shape[0]), bags->keys.size(), limits);
}

// Offsets of the bags; every length must be >= 0 and their sum the number of keys.
Refusal SumLengths(const Tensor& lengths, const Tensor& keys, Bags* bags) {
  const auto values = Elements<int32_t>(lengths);
  bags->offsets.resize(values.size() + 1);
  uint64_t sum = 0;
  bags->offsets[0] = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] < 0) {
      return Refuse(Reason::kLengths, lengths.name + " of bag " + std::to_string(i) + " is " +
                                          std::to_string(values[i]) + "; it must not be negative");
    }
    sum += static_cast<uint64_t>(values[i]);
    // Beyond the keys the offset is of no use: the request is refused below.
    bags->offsets[i + 1] = static_cast<uint32_t>(std::min<uint64_t>(sum, bags->keys.size()));
  }
  if (sum == bags->keys.size()) return {};
  return Refuse(Reason::kLengths,
                lengths.name + " sum to " + (sum > bags->keys.size() ? "more than " : "") +
                    std::to_string(std::min<uint64_t>(sum, bags->keys.size())) + " but " +
                    keys.name + " has " + std::to_string(bags->keys.size()) + " keys");
}

Refusal ParseJagged(const Tensor& keys, const Tensor& lengths, const RequestLimits& limits,
                    Bags* bags) {
  if (Refusal refusal = CheckTensor(lengths, "INT32", 4); refusal.reason != Reason::kNone) {
    return refusal;
  }
  for (const Tensor* tensor : {&keys, &lengths}) {
    if (tensor->shape[0] != 1) {
      return Refuse(Reason::kShape, tensor->name + " has shape " + ShapeText(tensor->shape) +
                                        "; with lengths the first dimension must be 1");
    }
  }
  if (lengths.shape[1] % limits.features != 0) {
    return Refuse(Reason::kLengths, lengths.name + " has " + std::to_string(lengths.shape[1]) +
                                        " values, not a multiple of the " +
                                        std::to_string(limits.features) + " features");
  }
  const uint64_t samples = static_cast<uint64_t>(lengths.shape[1]) / limits.features;
  if (Refusal refusal = CheckBounds(samples, bags->keys.size(), limits);
      refusal.reason != Reason::kNone) {
    return refusal;
  }
  bags->jagged = true;
  bags->samples = static_cast<uint32_t>(samples);
  return SumLengths(lengths, keys, bags);
}

// Parses a side of a request with contexts: one key a bag.
Refusal ParseSingles(const Tensor& keys, const RequestLimits& limits, const char* of, Bags* bags) {
  if (keys.shape[0] != 1) {
    return Refuse(Reason::kShape, keys.name + " has shape " + ShapeText(keys.shape) +
                                      "; in a request with contexts the first dimension must be 1");
  }
  if (bags->keys.size() % limits.features != 0) {
    return Refuse(Reason::kShape, keys.name + " has " + std::to_string(bags->keys.size()) +
                                      " keys; without lengths it has one for each of the " +
                                      std::to_string(limits.features) + " features of a " + of);
  }
  const uint64_t rows = bags->keys.size() / limits.features;
  if (Refusal refusal = CheckBounds(rows, bags->keys.size(), limits);
      refusal.reason != Reason::kNone) {
    return refusal;
  }
  bags->jagged = true;
  bags->samples = static_cast<uint32_t>(rows);
  bags->offsets.resize(bags->keys.size() + 1);
  for (uint32_t i = 0; i < bags->offsets.size(); ++i) bags->offsets[i] = i;
  return {};
}

}  // namespace

const char* ReasonName(Reason reason) {
  static constexpr std::array<const char*, kReasons> kNames = {
      "none",     "dtype",    "shape",   "lengths",   "max_samples",
      "max_keys", "empty",    "dense",   "weights",   "version",
      "degraded", "internal", "expired", "cancelled", "max_output_bytes",
      "context"};
  return kNames[static_cast<size_t>(reason)];
}

Refusal ParseDense(const std::string& name, const Tensor* dense, uint32_t columns,
                   const Transforms* transforms, const Bags& bags, std::span<const float>* values,
                   std::span<const std::string> names) {
  if (dense == nullptr) {
    if (columns == 0) return {};
    return Refuse(Reason::kDense, "input " + name + " is missing: the model takes " +
                                      std::to_string(columns) + " dense features a sample");
  }
  if (Refusal refusal = CheckTensor(*dense, "FP32", 4); refusal.reason != Reason::kNone) {
    return refusal;
  }
  const auto samples = static_cast<int64_t>(bags.samples);
  const std::vector<int64_t> want = bags.jagged ? std::vector<int64_t>{1, samples * columns}
                                                : std::vector<int64_t>{samples, int64_t{columns}};
  if (dense->shape != want) {
    return Refuse(Reason::kDense, name + " has shape " + ShapeText(dense->shape) + "; for " +
                                      std::to_string(samples) + " samples of " +
                                      std::to_string(columns) + " dense features it must be " +
                                      ShapeText(want));
  }
  *values = Elements<float>(*dense);
  for (size_t i = 0; i < values->size(); ++i) {
    const float value = (*values)[i];
    if (std::isfinite(value) || (transforms != nullptr && std::isnan(value))) continue;
    std::string message = name + " of sample " + std::to_string(i / columns) +
                          " is not finite in column " + std::to_string(i % columns);
    if (!names.empty()) {
      message.append(" (").append(names[i % columns]).append(")");
    } else if (transforms != nullptr) {
      message.append(" (").append(transforms->columns()[i % columns].name).append(")");
    }
    return Refuse(Reason::kDense, message.append(": ").append(std::to_string(value)));
  }
  return {};
}

Refusal ParseWeights(const std::string& name, const Tensor* weights, const Tensor& keys,
                     bool required, std::span<const float>* values) {
  if (weights == nullptr) {
    if (!required) return {};
    return Refuse(Reason::kWeights,
                  "input " + name + " is missing: the model has features whose keys are weighed");
  }
  if (Refusal refusal = CheckTensor(*weights, "FP32", 4); refusal.reason != Reason::kNone) {
    return refusal;
  }
  if (weights->shape != keys.shape) {
    return Refuse(Reason::kWeights, name + " has shape " + ShapeText(weights->shape) + "; " +
                                        keys.name + " has " + ShapeText(keys.shape) +
                                        ", and they must be alike");
  }
  *values = Elements<float>(*weights);
  for (size_t i = 0; i < values->size(); ++i) {
    if (!std::isfinite((*values)[i])) {
      return Refuse(Reason::kWeights, name + " of key " + std::to_string(i) + " is not finite");
    }
  }
  return {};
}

Refusal ParseCandidates(const std::string& name, const Tensor* candidates, uint32_t contexts,
                        uint32_t samples, std::vector<uint32_t>* context_of) {
  if (candidates == nullptr) {
    return Refuse(Reason::kContext,
                  "input " + name + " is missing: it says how many candidates each context has");
  }
  if (Refusal refusal = CheckTensor(*candidates, "INT32", 4); refusal.reason != Reason::kNone) {
    return refusal;
  }
  const std::vector<int64_t> want = {1, int64_t{contexts}};
  if (candidates->shape != want) {
    return Refuse(Reason::kContext, name + " has shape " + ShapeText(candidates->shape) + "; for " +
                                        std::to_string(contexts) + " contexts it must be " +
                                        ShapeText(want));
  }
  const auto counts = Elements<int32_t>(*candidates);
  uint64_t sum = 0;
  for (size_t c = 0; c < counts.size(); ++c) {
    if (counts[c] < 1) {
      return Refuse(Reason::kContext, name + " of context " + std::to_string(c) + " is " +
                                          std::to_string(counts[c]) +
                                          "; it must be at least 1: leave out who has none");
    }
    sum += static_cast<uint64_t>(counts[c]);
  }
  if (sum != samples) {
    return Refuse(Reason::kContext, name + " sum to " + std::to_string(sum) +
                                        " but the request has " + std::to_string(samples) +
                                        " candidates");
  }
  context_of->clear();
  for (size_t c = 0; c < counts.size(); ++c) {
    context_of->insert(context_of->end(), static_cast<size_t>(counts[c]), static_cast<uint32_t>(c));
  }
  return {};
}

Refusal ParseSide(const Tensor& keys, const Tensor* lengths, const RequestLimits& limits,
                  const char* of, Bags* bags) {
  if (Refusal refusal = CheckTensor(keys, "INT64", 8); refusal.reason != Reason::kNone) {
    return refusal;
  }
  bags->keys = Elements<int64_t>(keys);
  Refusal refusal = lengths != nullptr ? ParseJagged(keys, *lengths, limits, bags)
                                       : ParseSingles(keys, limits, of, bags);
  if (refusal.reason == Reason::kEmpty) {
    return Refuse(Reason::kEmpty, std::string("the request has no ") + of);
  }
  return refusal;
}

Refusal ParseBags(const Tensor& keys, const Tensor* lengths, const RequestLimits& limits,
                  Bags* bags) {
  if (Refusal refusal = CheckTensor(keys, "INT64", 8); refusal.reason != Reason::kNone) {
    return refusal;
  }
  bags->keys = Elements<int64_t>(keys);
  return lengths == nullptr ? ParseRectangular(keys, limits, bags)
                            : ParseJagged(keys, *lengths, limits, bags);
}

}  // namespace embertide::triton
