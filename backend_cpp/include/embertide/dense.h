// The dense net of a `ranking` model: one compiled program, and weights that each version brings.
//
// The program is an AOTInductor package whose parameters are graph inputs, so a new version swaps
// nothing inside it: a run is handed the weights of the version it is pinned to. Torch lives in a
// plugin (libembertide_dense.so) behind a C ABI, opened so that its symbols stay its own; nothing
// here or above includes it, and a `lookup` model never loads it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "embertide/status.h"

struct EmbertideDensePlugin;   // backend_cpp/dense/plugin_abi.h
struct EmbertideDenseProgram;  // of that plugin

namespace embertide {

// A tensor of fp32 parameters, row-major.
struct DenseTensor {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> values;
};

// Tensors of a safetensors file, ascending by name. kCorrupt naming the field for what is no such
// file, or holds another dtype than F32.
Result<std::vector<DenseTensor>> ParseTensors(std::span<const std::byte> bytes);

// A measurement of a version's net in reduced precision beside fp32, on events of its run's last
// day: it is part of the version (docs/formats.md).
struct ReducedMeasurement {
  std::string type;         // "bf16", "int8"
  bool taken = false;       // within the run's bounds
  uint64_t events = 0;      // that were scored both ways
  double auc_loss = 0;      // of fp32 less that of the type
  double max_error = 0;     // of a score
  std::string why_refused;  // empty if it is taken
};

// The measurement in a safetensors file; none where there is none. kCorrupt naming the field for
// one that is not what it should be.
Result<std::optional<ReducedMeasurement>> ParseReduced(std::span<const std::byte> bytes);

// Ok if this CPU can run code compiled for `baseline` ("x86-64-v2", "x86-64-v3", "x86-64-v4");
// kRejected naming the baseline and what to do otherwise.
Status CheckCpu(const std::string& baseline);

// The weights of one version, in the plugin's form. Immutable; shared by any number of threads.
class DenseWeights;

// Users and their candidates, row-major: each has its own columns, in the order that they have in
// the whole row.
struct DenseContexts {
  int64_t users = 0;       // at least 1
  int64_t candidates = 0;  // at least 1
  const float* context_dense = nullptr;
  const float* context_embeddings = nullptr;
  const float* candidate_dense = nullptr;
  const float* candidate_embeddings = nullptr;
  const int64_t* user_of = nullptr;  // by candidate, below `users`
};

// The program. Run may be called by one thread at a time: each Triton instance opens its own.
class DenseProgram {
 public:
  // Opens `package`, a .pt2 file that errors call `name`, with the plugin at `plugin`. kNotFound:
  // no such file. kRejected: the package lacks the description that `export-dense` writes.
  // kCorrupt: torch refused it. kDeviceError: the plugin cannot be loaded (the message has the
  // loader's reason).
  static Result<std::unique_ptr<DenseProgram>> Open(const std::string& plugin,
                                                    const std::string& package,
                                                    const std::string& name);
  ~DenseProgram();
  DenseProgram(const DenseProgram&) = delete;
  DenseProgram& operator=(const DenseProgram&) = delete;

  uint32_t dense_features() const { return dense_features_; }  // columns of DENSE
  uint32_t embedding_dim() const { return embedding_dim_; }    // columns of the pooled embeddings
  uint32_t heads() const { return heads_; }                    // scores of a sample
  // Whether the package has a program in reduced precision, and this build and CPU can run it.
  enum class Reduced : uint8_t { kNone, kReady, kNoCpu, kUnknown };
  Reduced reduced() const { return reduced_; }
  const std::string& reduced_type() const { return reduced_type_; }  // "bf16", "int8"; empty: none
  // If the program takes users and candidates, too: for each column of DENSE and of the embeddings,
  // whether it is the user's. Empty without.
  const std::vector<bool>& context_dense() const { return context_dense_; }
  const std::vector<bool>& context_embeddings() const { return context_embeddings_; }

  // Proves that `tensors` match the program's parameters one for one, by name and shape, and brings
  // them into the plugin's form. kRejected naming the first that differs. With `reduced`, runs of
  // many samples multiply in that type, by weights that are converted here. Requires: then kReady.
  Result<std::shared_ptr<const DenseWeights>> Load(std::span<const DenseTensor> tensors,
                                                   bool reduced = false) const;

  // scores_HB = program(dense_BD, embeddings_BE), into an array of `batch` for each head.
  // kDeviceError: torch's own error text. Requires: as many arrays as heads.
  Status Run(const DenseWeights& weights, int64_t batch, const float* dense_BD,
             const float* embeddings_BE, std::span<float* const> scores_HB);
  // The same of users and candidates: what depends on a user alone is computed once a user.
  // Requires: a program that takes them, `user_of` below `users`.
  Status RunContexts(const DenseWeights& weights, const DenseContexts& request,
                     std::span<float* const> scores_HB);

 private:
  DenseProgram() = default;
  const EmbertideDensePlugin* plugin_ = nullptr;
  EmbertideDenseProgram* program_ = nullptr;
  uint32_t dense_features_ = 0;
  uint32_t embedding_dim_ = 0;
  uint32_t heads_ = 1;
  Reduced reduced_ = Reduced::kNone;
  std::string reduced_type_;
  std::vector<bool> context_dense_;
  std::vector<bool> context_embeddings_;
};

}  // namespace embertide
