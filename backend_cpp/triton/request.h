// One request, proved right: the two request forms brought to one (samples x features bags of
// keys).
//
//   rectangular   KEYS [B,F]                        one key a feature; bag i is keys[i]
//   jagged        KEYS [1,N], LENGTHS [1,B*F]       sample-major; bag i is keys[offsets[i]..[i+1])
//
// WEIGHTS, of the shape of KEYS, has what each key's row is multiplied by.
//
// A request of U contexts has a jagged form for each side; LENGTHS, where each bag has one key, may
// be left out of either:
//
//   context       CONTEXT_KEYS [1,M], CONTEXT_LENGTHS [1,U*C], CANDIDATES [1,U]: samples of each
//                 KEYS [1,N], LENGTHS [1,B*(F-C)]
//
// Pure and thread-safe; knows no Triton (tensor_io.h reads tensors of a Triton request).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "embertide/status.h"
#include "embertide/transform.h"

namespace embertide::triton {

// Why a request was refused: the label of embertide_requests_refused_total.
enum class Reason : uint8_t {
  kNone,
  kDtype,
  kShape,
  kLengths,
  kMaxSamples,
  kMaxKeys,
  kEmpty,
  kDense,
  kWeights,
  kVersion,
  kDegraded,
  kInternal,
  kExpired,
  kCancelled,
  kMaxOutput,
  kContext
};
inline constexpr size_t kReasons = 16;
const char* ReasonName(Reason reason);

struct Refusal {
  Reason reason = Reason::kNone;
  Status status;
};

// An input tensor as it came; `data` lives as long as the request.
struct Tensor {
  std::string name;
  std::string dtype;  // "INT64", "INT32", ...
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
  std::vector<std::byte> copy;  // holds the bytes when the request's own are split or unaligned
};

struct RequestLimits {
  uint32_t features = 0;
  uint32_t max_samples = 0;
  uint64_t max_keys = 0;
  // Columns of a request without those that the node makes; 0: it makes none.
  uint32_t own_columns = 0;
};

struct Bags {
  bool jagged = false;
  uint32_t samples = 0;
  uint32_t contexts = 0;          // rows of bags before those of the samples (context_columns.h)
  std::span<const int64_t> keys;  // into the KEYS tensor
  std::vector<uint32_t> offsets;  // jagged: rows * features + 1 ascending; else empty

  uint32_t Begin(size_t bag) const { return jagged ? offsets[bag] : static_cast<uint32_t>(bag); }
  uint32_t End(size_t bag) const {
    return jagged ? offsets[bag + 1] : static_cast<uint32_t>(bag + 1);
  }
};

// Proves DENSE to be samples x columns finite values, in the form of `bags` ([B,D] or [1,B*D]), and
// shows them in `values`. `dense` may be null where columns is 0, and must be there otherwise. With
// transforms a value may be missing, which is NaN. They have as many columns, unless `names`, one a
// column, says what these are.
Refusal ParseDense(const std::string& name, const Tensor* dense, uint32_t columns,
                   const Transforms* transforms, const Bags& bags, std::span<const float>* values,
                   std::span<const std::string> names = {});

// Proves WEIGHTS to be finite values of the shape of `keys`, and shows them in `values`. `weights`
// may be null, unless they are `required`.
Refusal ParseWeights(const std::string& name, const Tensor* weights, const Tensor& keys,
                     bool required, std::span<const float>* values);

// Proves CANDIDATES to say how many of `samples` samples, one after the other, each of `contexts`
// contexts has, one at least; fills `context_of` with the context of each sample. Null is refused.
Refusal ParseCandidates(const std::string& name, const Tensor* candidates, uint32_t contexts,
                        uint32_t samples, std::vector<uint32_t>* context_of);

// ParseBags of one side of a request with contexts: without `lengths` each bag has one key. `of` is
// what a row is, for messages. The limits' features are those of the side.
Refusal ParseSide(const Tensor& keys, const Tensor* lengths, const RequestLimits& limits,
                  const char* of, Bags* bags);

// Fills `bags` from the tensors. On a refusal (reason != kNone) `bags` is unspecified. The message
// names tensor, value and what was expected. Requires: data aligned for the dtype it should have.
Refusal ParseBags(const Tensor& keys, const Tensor* lengths, const RequestLimits& limits,
                  Bags* bags);

}  // namespace embertide::triton
