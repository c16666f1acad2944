// libembertide_dense.so: AOTInductor packages behind the C ABI of plugin_abi.h.
//
// A package describes itself in its metadata, key "embertide", as JSON:
//   {"format": 1, "dense_features": D, "embedding_dim": E,
//    "parameters": [{"name": n, "shape": [..]}, ..]}            in the order of the graph's inputs
// The graph's inputs are dense_BD, embeddings_BE and then the parameters; its output is score_B.
// A net of several heads has "format": 2, "heads": their number, and as outputs one score_B each.
// With "one_sample": true there is a second program of that name, of the same inputs, which is fast
// for one sample and takes no more (trainer/model/one_sample.py).
// With "products": n there is a program "products" of the same inputs, whose larger products are
// oneDNN's and not MKL's: where MKL is slow, n samples and more gain by it
// (trainer/model/products.py). "packed": [place, ..] are its parameters that nothing but such
// products takes: it may be given them as oneDNN packs them. With "context": {"dense": [[begin,
// end], ..], "embeddings": [..], "direct": [name, ..], "prepared": [[..], ..]} those columns are
// the user's, and there are the program "context" and, if a tensor is prepared, "prepare"
// (trainer/model/rewrite/package.py). With "reduced": {"type": t, "rows": n, "weights": [name, ..]}
// there is a program "reduced" of the same inputs, but that those weights are of that type: "bf16",
// in the form that oneDNN packs them in, or "int8", whose scales are inputs behind all others; it
// is for n samples and more (trainer/model/reduced.py). In "context" it is {"rows": n, "tensors":
// [place, ..]}, places among the direct parameters and prepared tensors, and the program is
// "context_reduced". With "one_user": n in "context" there is a program "context_one_user" of the
// same inputs for one user, whose values are not copied for each candidate; it is for n candidates
// of him and more. "packed" and "one_user_packed" in "context" are places among the direct
// parameters and prepared tensors, for "context_products" and "context_one_user". "prepare" takes
// the parameters and gives tensors of the shapes said. "context" takes context_dense,
// context_embeddings, candidate_dense, candidate_embeddings, the user of each candidate (int64),
// the direct parameters and the prepared tensors; its outputs are as those of the other.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/Version.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "dense/plugin_abi.h"

namespace {

struct Parameter {
  std::string name;
  std::vector<int64_t> shape;
};

// Rows that weights are packed for; others use them, too.
constexpr int64_t kPackedRows = 256;

struct Rejected : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string ShapeText(const std::vector<int64_t>& shape) { return nlohmann::json(shape).dump(); }

struct Loader : torch::inductor::AOTIModelPackageLoader {
  Loader(const char* package, const char* name)
      : AOTIModelPackageLoader(package, name, /*run_single_threaded=*/true, /*num_runners=*/1) {}
};

// Whether oneDNN's products by packed weights are faster. MKL leaves AVX-512 of AMD's CPUs unused,
// and packs weights anew for each product on any CPU (docs/results/serve.md). torch is asked, for
// it may have been told to leave vectors of this CPU unused (ATEN_CPU_CAPABILITY).
bool OneDnnIsFaster() { return at::get_cpu_capability() == "AVX512"; }

enum class Type : uint8_t { kBf16, kInt8 };

struct ReducedType {
  Type type;
  bool on_this_cpu;  // whether oneDNN has products in it that are faster, and exact in int8
};

// The type of this name; none for what this build does not know.
std::optional<ReducedType> ReducedTypeOf(const std::string& name) {
  bool bf16 = false;
  bool int8 = false;
#if defined(__x86_64__)
  __builtin_cpu_init();
  // A CPU with AMX has those of AVX-512, too.
  bf16 = __builtin_cpu_supports("avx512bf16") != 0;
  int8 = __builtin_cpu_supports("avx512vnni") != 0 || __builtin_cpu_supports("avxvnni") != 0;
#endif
  if (name == "bf16") return ReducedType{Type::kBf16, bf16};
  if (name == "int8") return ReducedType{Type::kInt8, int8};
  return std::nullopt;
}

// Places among so many tensors that the description has under a name, if it has it.
std::vector<size_t> PlacesOf(const embertide::Json& json, const char* name, size_t tensors) {
  if (!json.contains(name)) return {};
  std::vector<size_t> places = json.at(name);
  if (std::ranges::any_of(places, [tensors](size_t place) { return place >= tensors; })) {
    throw Rejected(std::string("the package says \"") + name + "\" of a tensor beyond its " +
                   std::to_string(tensors) + ": export it again");
  }
  return places;
}

// A version's tensors as the programs of a `BySize` take them; what is alike shares its memory.
struct Forms {
  std::vector<at::Tensor> plain;
  std::vector<at::Tensor> packed;   // for many rows
  std::vector<at::Tensor> reduced;  // empty: the program in reduced precision is not run
};

// A program to run, and the tensors that it takes.
struct Chosen {
  Loader& program;
  const std::vector<at::Tensor>& tensors;
  bool reduced = false;
};

// The tensors with some of them of a type and packed for oneDNN, which a product would do each
// time.
std::vector<at::Tensor> Packed(std::vector<at::Tensor> tensors, const std::vector<size_t>& places,
                               at::ScalarType type = at::kFloat) {
  static const auto pack = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("mkldnn::_reorder_linear_weight", "")
                               .typed<at::Tensor(const at::Tensor&, std::optional<int64_t>)>();
  for (const size_t at : places) {
    tensors[at] = pack.call(tensors[at].to(type), kPackedRows);
  }
  return tensors;
}

// The tensors with some of them in int8; the scales of their rows come behind, in that order. As
// trainer/model/reduced.py has it: 127 levels on both sides of 0, and NaN for what is not finite.
std::vector<at::Tensor> InInt8(std::vector<at::Tensor> tensors, const std::vector<size_t>& places) {
  constexpr double kLevels = 127;
  constexpr double kLeast = 1e-30;
  for (const size_t at : places) {
    const at::Tensor size = tensors[at].abs() * (1 / kLevels);
    const at::Tensor scale = (size + (size - size)).clamp_min(kLeast).amax(1, /*keepdim=*/true);
    tensors[at] = (tensors[at] / scale).round().nan_to_num(0).to(at::kChar);
    tensors.push_back(scale.squeeze(1));
  }
  return tensors;
}

// A program, and some that are faster for many rows.
class BySize {
 public:
  BySize(const char* package, const char* name) : few_(package, name) {}
  // `json` may say from how many rows on there is another program, of so many tensors.
  void TakeProducts(const char* package, const char* name, const embertide::Json& json,
                    size_t tensors) {
    if (!OneDnnIsFaster() || !json.contains("products")) return;
    first_ = json.at("products");
    packed_ = PlacesOf(json, "packed", tensors);
    many_.emplace(package, name);
  }
  // `weights`: places among the tensors that the program takes. Requires: a type that this CPU has.
  void TakeReduced(const char* package, const char* name, Type type, int64_t first,
                   std::vector<size_t> weights) {
    type_ = type;
    first_reduced_ = first;
    reduced_weights_ = std::move(weights);
    reduced_.emplace(package, name);
  }
  Loader& any() { return few_; }
  // Packs what the programs take packed; `reduced`: for the one in reduced precision, too, if there
  // is one.
  void Pack(bool reduced, Forms* forms) const {
    forms->packed = Packed(forms->plain, packed_);
    if (!reduced || !reduced_) return;
    forms->reduced = type_ == Type::kInt8 ? InInt8(forms->plain, reduced_weights_)
                                          : Packed(forms->plain, reduced_weights_, at::kBFloat16);
  }
  // The program that is fastest for so many rows, of those that the forms are there for.
  Chosen For(int64_t rows, const Forms& forms) {
    if (reduced_ && !forms.reduced.empty() && rows >= first_reduced_) {
      return {*reduced_, forms.reduced, true};
    }
    if (many_ && rows >= first_) return {*many_, forms.packed};
    return {few_, forms.plain};
  }

 private:
  Loader few_;
  std::optional<Loader> many_;
  std::optional<Loader> reduced_;
  Type type_ = Type::kBf16;  // of `reduced_`
  std::vector<size_t> reduced_weights_;
  std::vector<size_t> packed_;  // of the program for many
  int64_t first_ = 0;
  int64_t first_reduced_ = 0;
};

// The programs for users and candidates.
struct ContextPrograms {
  explicit ContextPrograms(const char* package) : run(package, "context") {}
  BySize run;
  std::optional<Loader> one_user;  // of one that has so many candidates, or more
  int64_t one_user_from = 0;
  std::vector<size_t> one_user_packed;
  mutable std::mutex preparing;  // versions may be loaded by several threads
  mutable std::optional<Loader> prepare;
  std::vector<uint8_t> dense;  // by column: 1 for the user's
  std::vector<uint8_t> embeddings;
  std::vector<size_t> direct;  // places among the parameters
  std::vector<std::vector<int64_t>> prepared;
};

}  // namespace

struct EmbertideDenseProgram {
  explicit EmbertideDenseProgram(const char* package) : program(package, "model") {}
  BySize program;
  std::optional<Loader> one_sample;
  std::unique_ptr<ContextPrograms> contexts;  // null without
  EmbertideDenseShape shape{};
  std::string reduced_type;
  std::vector<Parameter> parameters;
};

struct EmbertideDenseWeights {
  Forms tensors;
  Forms of_contexts;                    // direct ones, then the prepared
  std::vector<at::Tensor> of_one_user;  // the same, packed for that program
};

namespace {

// Runs `body`; an exception becomes the ABI's result and text.
template <typename Body>
int Guard(char* error, size_t capacity, const Body& body) {
  int result = EMBERTIDE_DENSE_FAILED;
  try {
    body();
    return EMBERTIDE_DENSE_OK;
  } catch (const Rejected& rejected) {
    result = EMBERTIDE_DENSE_REJECTED;
    std::snprintf(error, capacity, "%s", rejected.what());
  } catch (const std::exception& failed) {
    std::snprintf(error, capacity, "%s", failed.what());
  } catch (...) {
    std::snprintf(error, capacity, "unknown exception");
  }
  return result;
}

// A byte a column: 1 within one of the ranges.
std::vector<uint8_t> MarksOf(const embertide::Json& ranges, uint32_t columns) {
  std::vector<uint8_t> marks(columns);
  for (const auto& range : ranges) {
    const uint32_t begin = range.at(0);
    const uint32_t end = range.at(1);
    if (begin >= end || end > columns) {
      throw Rejected("the package says that columns " + range.dump() + " of " +
                     std::to_string(columns) + " are the user's: export it again");
    }
    std::fill(marks.begin() + begin, marks.begin() + end, uint8_t{1});
  }
  return marks;
}

// The place of a parameter that a program, "for contexts" for one, takes.
size_t PlaceOf(const EmbertideDenseProgram& program, const std::string& name, const char* which) {
  const auto found = std::ranges::find(program.parameters, name, &Parameter::name);
  if (found == program.parameters.end()) {
    throw Rejected(std::string("the package's program ") + which + " takes parameter \"" + name +
                   "\", which the package lacks: export it again");
  }
  return found - program.parameters.begin();
}

void ReadContexts(const char* package, const embertide::Json& json,
                  EmbertideDenseProgram* program) {
  auto contexts = std::make_unique<ContextPrograms>(package);
  contexts->dense = MarksOf(json.at("dense"), program->shape.dense_features);
  contexts->embeddings = MarksOf(json.at("embeddings"), program->shape.embedding_dim);
  for (const auto& name : json.at("direct")) {
    contexts->direct.push_back(PlaceOf(*program, name.template get<std::string>(), "for contexts"));
  }
  for (const auto& shape : json.at("prepared")) contexts->prepared.push_back(shape);
  const size_t tensors = contexts->direct.size() + contexts->prepared.size();
  contexts->run.TakeProducts(package, "context_products", json, tensors);
  if (json.contains("one_user")) {
    contexts->one_user_from = json.at("one_user");
    contexts->one_user_packed = PlacesOf(json, "one_user_packed", tensors);
    contexts->one_user.emplace(package, "context_one_user");
  }
  const auto type = ReducedTypeOf(program->reduced_type);
  if (json.contains("reduced") && type && type->on_this_cpu) {
    const auto& reduced = json.at("reduced");
    contexts->run.TakeReduced(package, "context_reduced", type->type, reduced.at("rows"),
                              PlacesOf(reduced, "tensors", tensors));
  }
  if (!contexts->prepared.empty()) contexts->prepare.emplace(package, "prepare");
  program->shape.context_dense = contexts->dense.data();
  program->shape.context_embeddings = contexts->embeddings.data();
  program->contexts = std::move(contexts);
}

void ReadReduced(const char* package, const embertide::Json& json, EmbertideDenseProgram* program) {
  program->reduced_type = json.at("type");
  program->shape.reduced_type = program->reduced_type.c_str();
  const auto type = ReducedTypeOf(program->reduced_type);
  if (!type || !type->on_this_cpu) {
    program->shape.reduced =
        type ? EMBERTIDE_DENSE_REDUCED_NO_CPU : EMBERTIDE_DENSE_REDUCED_UNKNOWN;
    return;
  }
  program->shape.reduced = EMBERTIDE_DENSE_REDUCED_READY;
  std::vector<size_t> places;
  for (const auto& name : json.at("weights")) {
    places.push_back(PlaceOf(*program, name.template get<std::string>(), "in reduced precision"));
  }
  program->program.TakeReduced(package, "reduced", type->type, json.at("rows"), std::move(places));
}

void ReadDescription(const char* package, EmbertideDenseProgram* program) {
  const auto metadata = program->program.any().get_metadata();
  const auto found = metadata.find("embertide");
  if (found == metadata.end()) {
    throw Rejected("the package has no \"embertide\" metadata: make it with export-dense");
  }
  const auto json = embertide::Json::parse(found->second);
  const auto& format = json.at("format");
  if (format != 1 && format != 2) {
    throw Rejected("the package has format " + format.dump() +
                   ", this build reads 1 and 2: export it again");
  }
  program->shape.heads = format == 1 ? 1U : json.at("heads").template get<uint32_t>();
  if (program->shape.heads == 0) throw Rejected("the package has no head: export it again");
  program->shape.dense_features = json.at("dense_features");
  program->shape.embedding_dim = json.at("embedding_dim");
  for (const auto& each : json.at("parameters")) {
    program->parameters.push_back({each.at("name"), each.at("shape")});
  }
  program->program.TakeProducts(package, "products", json, program->parameters.size());
  if (json.value("one_sample", false)) program->one_sample.emplace(package, "one_sample");
  if (json.contains("reduced")) ReadReduced(package, json.at("reduced"), program);
  if (json.contains("context")) ReadContexts(package, json.at("context"), program);
}

// The threads are Triton's; a pool of torch's own on the same cores is ruinous. OpenMP and MKL keep
// the number for each thread that calls them, so every thread must say it.
void UseThisThreadAlone() {
  thread_local bool said = false;
  if (said) return;
  at::set_num_threads(1);
  said = true;
}

int Open(const char* package, EmbertideDenseProgram** out, EmbertideDenseShape* shape, char* error,
         size_t capacity) {
  return Guard(error, capacity, [&] {
    // Packages that torch unpacks at once may get one another's description or none: models of one
    // server are loaded by several threads.
    static std::mutex unpacking;
    const std::lock_guard lock(unpacking);
    UseThisThreadAlone();
    auto program = std::make_unique<EmbertideDenseProgram>(package);
    ReadDescription(package, program.get());
    *shape = program->shape;
    *out = program.release();
  });
}

void Close(EmbertideDenseProgram* program) { delete program; }

at::Tensor Copy(const EmbertideDenseTensor& tensor) {
  const at::IntArrayRef shape(tensor.shape, tensor.rank);
  return at::from_blob(const_cast<float*>(tensor.values), shape, at::kFloat).clone();
}

// Computes the tensors that the program for contexts takes beside a version's own.
void PrepareContexts(const ContextPrograms& contexts, EmbertideDenseWeights* weights) {
  for (const size_t at : contexts.direct)
    weights->of_contexts.plain.push_back(weights->tensors.plain[at]);
  if (!contexts.prepare) return;
  const std::lock_guard lock(contexts.preparing);
  UseThisThreadAlone();
  const std::vector<at::Tensor> prepared =
      contexts.prepare->boxed_run(std::vector<at::Tensor>(weights->tensors.plain));
  const bool as_said =
      std::ranges::equal(prepared, contexts.prepared, [](const at::Tensor& is, const auto& said) {
        return is.sizes().vec() == said && is.scalar_type() == at::kFloat;
      });
  if (!as_said) throw Rejected("the program that prepares tensors gives others than it says");
  // Each is copied: an output may share the memory of an input.
  for (const at::Tensor& each : prepared)
    weights->of_contexts.plain.push_back(each.contiguous().clone());
}

int Load(const EmbertideDenseProgram* program, const EmbertideDenseTensor* tensors, size_t count,
         int reduced, EmbertideDenseWeights** out, char* error, size_t capacity) {
  return Guard(error, capacity, [&] {
    const c10::InferenceMode inference;
    if (count != program->parameters.size()) {
      throw Rejected("the program has " + std::to_string(program->parameters.size()) +
                     " parameters, the version brings " + std::to_string(count));
    }
    auto weights = std::make_unique<EmbertideDenseWeights>();
    for (const Parameter& want : program->parameters) {
      const EmbertideDenseTensor* found = nullptr;
      for (size_t i = 0; i < count; ++i) {
        if (want.name == tensors[i].name) found = &tensors[i];
      }
      if (found == nullptr) throw Rejected("the version lacks parameter \"" + want.name + "\"");
      const std::vector<int64_t> shape(found->shape, found->shape + found->rank);
      if (shape != want.shape) {
        throw Rejected("parameter \"" + want.name + "\" has shape " + ShapeText(shape) +
                       ", the program wants " + ShapeText(want.shape));
      }
      weights->tensors.plain.push_back(Copy(*found));
    }
    if (program->contexts != nullptr) PrepareContexts(*program->contexts, weights.get());
    UseThisThreadAlone();
    program->program.Pack(reduced != 0, &weights->tensors);
    if (program->contexts != nullptr) {
      program->contexts->run.Pack(reduced != 0, &weights->of_contexts);
      weights->of_one_user = Packed(weights->of_contexts.plain, program->contexts->one_user_packed);
    }
    *out = weights.release();
  });
}

void Drop(EmbertideDenseWeights* weights) { delete weights; }

void TakeScores(const std::vector<at::Tensor>& outputs, uint32_t heads, int64_t batch,
                float* const* scores) {
  const bool as_said = std::ranges::all_of(outputs, [batch](const at::Tensor& score) {
    return score.numel() == batch && score.scalar_type() == at::kFloat;
  });
  if (outputs.size() != heads || !as_said) {
    throw Rejected("the program does not give one fp32 score a sample of each of its " +
                   std::to_string(heads) + " heads");
  }
  for (size_t head = 0; head < outputs.size(); ++head) {
    const at::Tensor score = outputs[head].contiguous();
    std::memcpy(scores[head], score.data_ptr<float>(), static_cast<size_t>(batch) * sizeof(float));
  }
}

int Run(EmbertideDenseProgram* program, const EmbertideDenseWeights* weights, int64_t batch,
        const float* dense, const float* embeddings, float* const* scores, char* error,
        size_t capacity) {
  return Guard(error, capacity, [&] {
    UseThisThreadAlone();
    const c10::InferenceMode inference;
    std::vector<at::Tensor> inputs;
    inputs.reserve(2 + weights->tensors.plain.size());
    const auto view = [&](const float* data, uint32_t columns) {
      return at::from_blob(const_cast<float*>(data), {batch, static_cast<int64_t>(columns)},
                           at::kFloat);
    };
    inputs.push_back(view(dense, program->shape.dense_features));
    inputs.push_back(view(embeddings, program->shape.embedding_dim));
    const Chosen chosen = program->program.For(batch, weights->tensors);
    const bool alone = batch == 1 && program->one_sample && !chosen.reduced;
    const auto& taken = alone ? weights->tensors.plain : chosen.tensors;
    inputs.insert(inputs.end(), taken.begin(), taken.end());
    Loader& runs = alone ? *program->one_sample : chosen.program;
    TakeScores(runs.boxed_run(std::move(inputs)), program->shape.heads, batch, scores);
  });
}

// Users and candidates as tensors of their inputs.
struct ContextRows {
  int64_t first_user = 0;
  int64_t users = 0;
  int64_t first_candidate = 0;
  int64_t candidates = 0;
};

// The inputs of a run over some of a request's rows, the tensors of the version last.
std::vector<at::Tensor> ContextInputs(const ContextPrograms& contexts,
                                      const EmbertideDenseContexts& request,
                                      const ContextRows& rows,
                                      const std::vector<at::Tensor>& taken) {
  std::vector<at::Tensor> inputs;
  inputs.reserve(5 + taken.size());
  const auto add = [&](const float* data, int64_t first, int64_t count,
                       const std::vector<uint8_t>& marks, uint8_t mark) {
    const auto columns = static_cast<int64_t>(std::ranges::count(marks, mark));
    inputs.push_back(
        at::from_blob(const_cast<float*>(data) + first * columns, {count, columns}, at::kFloat));
  };
  add(request.context_dense, rows.first_user, rows.users, contexts.dense, 1);
  add(request.context_embeddings, rows.first_user, rows.users, contexts.embeddings, 1);
  add(request.candidate_dense, rows.first_candidate, rows.candidates, contexts.dense, 0);
  add(request.candidate_embeddings, rows.first_candidate, rows.candidates, contexts.embeddings, 0);
  inputs.push_back(at::from_blob(const_cast<int64_t*>(request.user_of) + rows.first_candidate,
                                 {rows.candidates}, at::kLong));
  inputs.insert(inputs.end(), taken.begin(), taken.end());
  return inputs;
}

int RunContexts(EmbertideDenseProgram* program, const EmbertideDenseWeights* weights,
                const EmbertideDenseContexts* request, float* const* scores, char* error,
                size_t capacity) {
  return Guard(error, capacity, [&] {
    UseThisThreadAlone();
    const c10::InferenceMode inference;
    ContextPrograms& contexts = *program->contexts;
    const uint32_t heads = program->shape.heads;
    const int64_t candidates = request->candidates;
    const Chosen chosen = contexts.run.For(candidates, weights->of_contexts);
    const bool apart = !chosen.reduced && contexts.one_user &&
                       candidates >= contexts.one_user_from * request->users;
    if (!apart) {
      const ContextRows all{.users = request->users, .candidates = candidates};
      auto inputs = ContextInputs(contexts, *request, all, chosen.tensors);
      TakeScores(chosen.program.boxed_run(std::move(inputs)), heads, candidates, scores);
      return;
    }
    std::vector<float*> into(scores, scores + heads);
    for (int64_t first = 0; first < candidates;) {
      const int64_t user = request->user_of[first];
      int64_t end = first + 1;
      while (end < candidates && request->user_of[end] == user) ++end;
      const ContextRows rows{user, 1, first, end - first};
      auto inputs = ContextInputs(contexts, *request, rows, weights->of_one_user);
      TakeScores(contexts.one_user->boxed_run(std::move(inputs)), heads, rows.candidates,
                 into.data());
      for (float*& head : into) head += rows.candidates;
      first = end;
    }
  });
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const EmbertideDensePlugin*
embertide_dense_plugin() {
  static constexpr EmbertideDensePlugin kPlugin = {
      EMBERTIDE_DENSE_ABI, Open, Close, Load, Drop, Run, RunContexts};
  return &kPlugin;
}
