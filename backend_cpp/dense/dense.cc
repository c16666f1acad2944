// The backend's side of the dense plugin: loads it once a process, checks, and hands tensors over.
#include "embertide/dense.h"

#include <dlfcn.h>
#include <unistd.h>

#include <array>

#include "dense/plugin_abi.h"

namespace embertide {
namespace {

constexpr size_t kErrorBytes = 4096;

// Opens the library with its symbols kept to itself: torch exports protobuf's, and the server has
// its own. Never closed: torch keeps threads and statics.
Result<const EmbertideDensePlugin*> LoadPlugin(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
  if (library == nullptr) {
    return Status(Code::kDeviceError,
                  "the dense plugin cannot be loaded: " + std::string(dlerror()) +
                      "; build it with torch installed (make cpp)");
  }
  const auto entry = reinterpret_cast<EmbertideDenseEntry>(dlsym(library, EMBERTIDE_DENSE_ENTRY));
  if (entry == nullptr) return Status(Code::kRejected, path + " is not a dense plugin");
  const EmbertideDensePlugin* plugin = entry();
  if (plugin->abi != EMBERTIDE_DENSE_ABI) {
    return Status(Code::kRejected, path + " has plugin ABI " + std::to_string(plugin->abi) +
                                       ", this backend needs " +
                                       std::to_string(EMBERTIDE_DENSE_ABI) + ": build both again");
  }
  return plugin;
}

DenseProgram::Reduced ReducedOf(EmbertideDenseReduced reduced) {
  switch (reduced) {
    case EMBERTIDE_DENSE_REDUCED_NONE:
      return DenseProgram::Reduced::kNone;
    case EMBERTIDE_DENSE_REDUCED_READY:
      return DenseProgram::Reduced::kReady;
    case EMBERTIDE_DENSE_REDUCED_NO_CPU:
      return DenseProgram::Reduced::kNoCpu;
    case EMBERTIDE_DENSE_REDUCED_UNKNOWN:
      break;
  }
  return DenseProgram::Reduced::kUnknown;
}

Code CodeOf(int result, Code otherwise) {
  return result == EMBERTIDE_DENSE_REJECTED ? Code::kRejected : otherwise;
}

}  // namespace

class DenseWeights {
 public:
  DenseWeights(const EmbertideDensePlugin* plugin, EmbertideDenseWeights* weights)
      : plugin_(plugin), weights_(weights) {}
  ~DenseWeights() { plugin_->drop(weights_); }
  DenseWeights(const DenseWeights&) = delete;
  DenseWeights& operator=(const DenseWeights&) = delete;
  const EmbertideDenseWeights* get() const { return weights_; }

 private:
  const EmbertideDensePlugin* plugin_;
  EmbertideDenseWeights* weights_;
};

Status CheckCpu(const std::string& baseline) {
  const bool known = baseline == "x86-64-v2" || baseline == "x86-64-v3" || baseline == "x86-64-v4";
  bool can = false;
#if defined(__x86_64__)
  const char* remedy = "export it again with --cpu of a lower baseline";
  __builtin_cpu_init();
  if (baseline == "x86-64-v2") {
    can = __builtin_cpu_supports("x86-64-v2") != 0;
  } else if (baseline == "x86-64-v3") {
    can = __builtin_cpu_supports("x86-64-v3") != 0;
  } else if (baseline == "x86-64-v4") {
    can = __builtin_cpu_supports("x86-64-v4") != 0;
  }
#else
  const char* remedy = "serve ranking models on x86-64 machines";
#endif
  if (can) return Status::Ok();
  return {Code::kRejected,
          "the dense program is compiled for CPU \"" + baseline + "\", " +
              (known ? std::string("which this machine lacks: ") + remedy
                     : "which this build does not know: use x86-64-v2, -v3 or -v4")};
}

Result<std::unique_ptr<DenseProgram>> DenseProgram::Open(const std::string& plugin_path,
                                                         const std::string& package,
                                                         const std::string& name) {
  if (access(package.c_str(), R_OK) != 0) {
    return Status(Code::kNotFound, "dense program " + name + " cannot be read");
  }
  const Result<const EmbertideDensePlugin*> plugin = LoadPlugin(plugin_path);
  if (!plugin.ok()) return plugin.status();
  std::unique_ptr<DenseProgram> program(new DenseProgram());
  program->plugin_ = plugin.value();
  EmbertideDenseShape shape{};
  std::array<char, kErrorBytes> error{};
  const int result = program->plugin_->open(package.c_str(), &program->program_, &shape,
                                            error.data(), error.size());
  if (result != EMBERTIDE_DENSE_OK) {
    return Status(CodeOf(result, Code::kCorrupt), name + ": " + error.data());
  }
  program->dense_features_ = shape.dense_features;
  program->embedding_dim_ = shape.embedding_dim;
  program->heads_ = shape.heads;
  program->reduced_ = ReducedOf(shape.reduced);
  if (shape.reduced_type != nullptr) program->reduced_type_ = shape.reduced_type;
  if (shape.context_embeddings != nullptr) {
    program->context_dense_.assign(shape.context_dense, shape.context_dense + shape.dense_features);
    program->context_embeddings_.assign(shape.context_embeddings,
                                        shape.context_embeddings + shape.embedding_dim);
  }
  return program;
}

DenseProgram::~DenseProgram() {
  if (program_ != nullptr) plugin_->close(program_);
}

Result<std::shared_ptr<const DenseWeights>> DenseProgram::Load(std::span<const DenseTensor> tensors,
                                                               bool reduced) const {
  std::vector<EmbertideDenseTensor> views;
  views.reserve(tensors.size());
  for (const DenseTensor& tensor : tensors) {
    views.push_back(
        {tensor.name.c_str(), tensor.shape.data(), tensor.shape.size(), tensor.values.data()});
  }
  EmbertideDenseWeights* weights = nullptr;
  std::array<char, kErrorBytes> error{};
  const int result = plugin_->load(program_, views.data(), views.size(), reduced ? 1 : 0, &weights,
                                   error.data(), error.size());
  if (result != EMBERTIDE_DENSE_OK) {
    return Status(CodeOf(result, Code::kDeviceError), error.data());
  }
  return std::shared_ptr<const DenseWeights>(std::make_shared<DenseWeights>(plugin_, weights));
}

Status DenseProgram::Run(const DenseWeights& weights, int64_t batch, const float* dense_BD,
                         const float* embeddings_BE, std::span<float* const> scores_HB) {
  std::array<char, kErrorBytes> error{};
  const int result = plugin_->run(program_, weights.get(), batch, dense_BD, embeddings_BE,
                                  scores_HB.data(), error.data(), error.size());
  if (result == EMBERTIDE_DENSE_OK) return Status::Ok();
  return {CodeOf(result, Code::kDeviceError), std::string("dense net: ") + error.data()};
}

Status DenseProgram::RunContexts(const DenseWeights& weights, const DenseContexts& request,
                                 std::span<float* const> scores_HB) {
  const EmbertideDenseContexts given{request.users,           request.candidates,
                                     request.context_dense,   request.context_embeddings,
                                     request.candidate_dense, request.candidate_embeddings,
                                     request.user_of};
  std::array<char, kErrorBytes> error{};
  const int result = plugin_->run_contexts(program_, weights.get(), &given, scores_HB.data(),
                                           error.data(), error.size());
  if (result == EMBERTIDE_DENSE_OK) return Status::Ok();
  return {CodeOf(result, Code::kDeviceError), std::string("dense net: ") + error.data()};
}

}  // namespace embertide
