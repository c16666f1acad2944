// The entry points that Triton calls, and the objects that live between the calls:
//
//   BackendState          one a process: metric families, kept connections of a process that leaves
//   ModelState            one a loaded model: configuration, Node (all instances share it), metrics
//   ModelInstanceState    one an instance: its Executor
#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include "base/json.h"
#include "triton/edge.h"
#include "triton/execute.h"
#include "triton/kept_connections.h"
#include "triton/metrics.h"
#include "triton/model_config.h"
#include "triton/triton_abi.h"

namespace embertide::triton {
namespace {

struct BackendState {
  MetricFamilies families;
  std::unique_ptr<KeptConnections> kept = KeptConnections::OfEnvironment();
};

struct ModelState {
  std::string name;
  ModelConfig config;
  std::unique_ptr<Node> node;
  std::unique_ptr<ModelMetrics> metrics;  // after node: it reads it
  ContextColumns context;
};

struct ModelInstanceState {
  ModelInstanceState(const ModelState& model, std::vector<std::unique_ptr<DenseProgram>> programs)
      : executor(model.config, *model.node, model.context, std::move(programs),
                 model.metrics.get()) {}
  Executor executor;
};

Status CheckApiVersion() {
  uint32_t major = 0;
  uint32_t minor = 0;
  EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_ApiVersion(&major, &minor)));
  if (major == TRITONBACKEND_API_VERSION_MAJOR && minor >= TRITONBACKEND_API_VERSION_MINOR) {
    return Status::Ok();
  }
  return {Code::kRejected,
          "the server speaks backend API " + std::to_string(major) + "." + std::to_string(minor) +
              ", this backend needs " + std::to_string(TRITONBACKEND_API_VERSION_MAJOR) + "." +
              std::to_string(TRITONBACKEND_API_VERSION_MINOR) + " or a later minor"};
}

// Ends the message.
Result<std::string> JsonOf(TRITONSERVER_Message* message) {
  const char* text = nullptr;
  size_t bytes = 0;
  const Status status = FromTriton(TRITONSERVER_MessageSerializeToJson(message, &text, &bytes));
  std::string json = status.ok() ? std::string(text, bytes) : std::string();
  LogIfError(TRITONSERVER_MessageDelete(message), "message");
  if (!status.ok()) return status;
  return json;
}

// The version that the server says it has.
Result<std::string> ServerVersion(TRITONBACKEND_Model* model) {
  TRITONSERVER_Server* server = nullptr;
  EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_ModelServer(model, &server)));
  TRITONSERVER_Message* message = nullptr;
  EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONSERVER_ServerMetadata(server, &message)));
  Result<std::string> json = JsonOf(message);
  if (!json.ok()) return json.status();
  return Json::parse(*json).value("version", std::string("unknown"));
}

Status ReadConfig(TRITONBACKEND_Model* model, ModelConfig* config) {
  TRITONBACKEND_ArtifactType artifact{};
  const char* directory = nullptr;
  EMBERTIDE_RETURN_IF_ERROR(
      FromTriton(TRITONBACKEND_ModelRepository(model, &artifact, &directory)));
  TRITONSERVER_Message* message = nullptr;
  EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_ModelConfig(model, 1, &message)));
  Result<std::string> json = JsonOf(message);
  if (!json.ok()) return json.status();
  Result<ModelConfig> parsed = ParseModelConfig(*json, directory);
  if (!parsed.ok()) return parsed.status();
  *config = std::move(*parsed);
  return Status::Ok();
}

// Which of the two options a model is opened from, for messages.
std::string WhatIsServed(const NodeOptions& options) {
  return options.snapshot.empty() ? "publication " + options.publication
                                  : "snapshot " + options.snapshot;
}

// Refuses snapshots with parts that a dense net cannot be given.
Status CheckRankable(const Node& node) {
  for (const Feature& feature : node.features()) {
    if (feature.pooling == Pooling::kNone) {
      return {Code::kRejected, "snapshot " + node.options().snapshot + ": feature \"" +
                                   feature.name +
                                   "\" has pooling none, and the dense net takes one vector a "
                                   "feature: use sum or mean, or kind lookup"};
    }
  }
  return Status::Ok();
}

// Clients place columns by the schema that the configuration tells them.
Status CheckSchema(const std::vector<std::string>& said, const Node& node) {
  if (said.empty()) return Status::Ok();
  const auto listed = [](std::string all, const std::string& name) {
    return all.empty() ? name : std::move(all) + ", " + name;
  };
  std::vector<std::string> names;
  for (const Feature& feature : node.features()) names.push_back(feature.name);
  if (said == names) return Status::Ok();
  return {Code::kRejected, "config.pbtxt: parameter \"schema\" names the features " +
                               std::accumulate(said.begin(), said.end(), std::string(), listed) +
                               "; the model has " +
                               std::accumulate(names.begin(), names.end(), std::string(), listed) +
                               ": leave it out, or have `embertide serve` write it again"};
}

// Each output of a further head is one of the model's; those that are not outputs are not served.
Status CheckHeads(const std::vector<std::string>& outputs, const Node& node) {
  const std::vector<std::string>& heads = node.manifest().heads;
  for (const std::string& name : outputs) {
    if (!heads.empty() && std::find(heads.begin() + 1, heads.end(), name) != heads.end()) continue;
    std::string message = "config.pbtxt: output ";
    message.append(kScoreOf).append(name).append(": the model has ");
    if (heads.size() < 2) {
      message += "one head, whose score is SCORE";
    } else {
      message.append("the heads ").append(heads[0]).append(", whose score is SCORE");
      for (size_t h = 1; h < heads.size(); ++h) message.append(", ").append(heads[h]);
    }
    return {Code::kRejected,
            message + ": leave the output out, or have `embertide serve` write it again"};
  }
  return Status::Ok();
}

Status FamiliesOf(TRITONBACKEND_Model* model, MetricFamilies** families) {
  TRITONBACKEND_Backend* backend = nullptr;
  void* state = nullptr;
  EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_ModelBackend(model, &backend)));
  EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_BackendState(backend, &state)));
  *families = &static_cast<BackendState*>(state)->families;
  return Status::Ok();
}

// Counts how a load ended, and passes its end on.
Status Counted(TRITONBACKEND_Model* model, const Status& status) {
  const char* name = nullptr;
  MetricFamilies* families = nullptr;
  EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_ModelName(model, &name)));
  EMBERTIDE_RETURN_IF_ERROR(FamiliesOf(model, &families));
  families->AddLoad(name, status.ok());
  return status;
}

Status LoadModel(TRITONBACKEND_Model* model) {
  auto state = std::make_unique<ModelState>();
  const char* name = nullptr;
  EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_ModelName(model, &name)));
  state->name = name;
  EMBERTIDE_RETURN_IF_ERROR(ReadConfig(model, &state->config));
  if (state->config.ranking) {
    TRITONBACKEND_Backend* own = nullptr;
    TRITONBACKEND_ArtifactType artifact{};
    const char* directory = nullptr;
    EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_ModelBackend(model, &own)));
    EMBERTIDE_RETURN_IF_ERROR(
        FromTriton(TRITONBACKEND_BackendArtifacts(own, &artifact, &directory)));
    state->config.node.dense_plugin = std::string(directory) + "/libembertide_dense.so";
  }
  state->config.node.log = [name = state->name](const std::string& line) {
    Log(TRITONSERVER_LOG_WARN, "model " + name + ": " + line);
  };
  Result<std::unique_ptr<Node>> node = Node::Open(state->config.node);
  if (!node.ok()) {
    return {node.status().code(),
            WhatIsServed(state->config.node) + ": " + node.status().message()};
  }
  state->node = std::move(*node);
  if (state->config.ranking) EMBERTIDE_RETURN_IF_ERROR(CheckRankable(*state->node));
  EMBERTIDE_RETURN_IF_ERROR(CheckSchema(state->config.schema_features, *state->node));
  EMBERTIDE_RETURN_IF_ERROR(CheckHeads(state->config.more_heads, *state->node));
  Result<ContextColumns> context =
      ContextColumns::Resolve(state->node->manifest(), state->node->made_columns(),
                              state->node->transforms(), state->config.context_columns);
  if (!context.ok()) {
    return {context.status().code(),
            "config.pbtxt: parameter " + context.status().message() + ": give names that it has"};
  }
  state->context = std::move(*context);

  MetricFamilies* families = nullptr;
  EMBERTIDE_RETURN_IF_ERROR(FamiliesOf(model, &families));
  Result<std::string> version = ServerVersion(model);
  if (!version.ok()) return version.status();
  state->metrics = std::make_unique<ModelMetrics>(*families, state->name, *state->node, *version);
  const Manifest& manifest = state->node->manifest();
  if (const std::string& why = state->node->seal_refusal(); !why.empty()) {
    Log(TRITONSERVER_LOG_WARN,
        "model " + state->name + " does not use the seal of its SSD tier: " + why);
  }
  Log(TRITONSERVER_LOG_INFO,
      "model " + state->name + " serves version " +
          std::to_string(state->node->store().Stats().newest_version) + " of \"" + manifest.model +
          "\": " + std::to_string(state->node->store().Stats().rows) + " rows, from " +
          (state->node->opened_from_seal() ? "a seal" : "the snapshot") + ", " +
          std::to_string(manifest.features.size()) + " features");
  EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_ModelSetState(model, state.get())));
  [[maybe_unused]] const auto* owned_by_triton = state.release();
  return Status::Ok();
}

Status LoadInstance(TRITONBACKEND_ModelInstance* instance) {
  TRITONBACKEND_Model* model = nullptr;
  void* model_state = nullptr;
  EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_ModelInstanceModel(instance, &model)));
  EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_ModelState(model, &model_state)));
  const auto& loaded = *static_cast<ModelState*>(model_state);
  std::vector<std::unique_ptr<DenseProgram>> programs;
  for (uint32_t i = 0; loaded.config.ranking && i < loaded.config.threads; ++i) {
    Result<std::unique_ptr<DenseProgram>> opened = loaded.node->OpenProgram();
    if (!opened.ok()) return opened.status();
    programs.push_back(std::move(*opened));
  }
  auto state = std::make_unique<ModelInstanceState>(loaded, std::move(programs));
  if (const std::string& why = state->executor.why_no_context_net(); !why.empty()) {
    Log(TRITONSERVER_LOG_WARN,
        "model " + loaded.name + " computes the dense net whole for each candidate: " + why);
  }
  EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_ModelInstanceSetState(instance, state.get())));
  [[maybe_unused]] const auto* owned_by_triton = state.release();
  return Status::Ok();
}

}  // namespace
}  // namespace embertide::triton

using embertide::Status;
using embertide::triton::BackendState;
using embertide::triton::FromTriton;
using embertide::triton::Guard;
using embertide::triton::ModelInstanceState;
using embertide::triton::ModelState;

extern "C" {

TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend* backend) {
  return Guard([&]() -> Status {
    EMBERTIDE_RETURN_IF_ERROR(embertide::triton::CheckApiVersion());
    auto state = std::make_unique<BackendState>();
    EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_BackendSetState(backend, state.get())));
    [[maybe_unused]] const auto* owned_by_triton = state.release();
    return Status::Ok();
  });
}

TRITONSERVER_Error* TRITONBACKEND_Finalize(TRITONBACKEND_Backend* backend) {
  return Guard([&]() -> Status {
    void* state = nullptr;
    EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_BackendState(backend, &state)));
    delete static_cast<BackendState*>(state);
    return Status::Ok();
  });
}

TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  return Guard(
      [&] { return embertide::triton::Counted(model, embertide::triton::LoadModel(model)); });
}

TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
  return Guard([&]() -> Status {
    void* state = nullptr;
    EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_ModelState(model, &state)));
    delete static_cast<ModelState*>(state);
    return Status::Ok();
  });
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance* instance) {
  return Guard([&] { return embertide::triton::LoadInstance(instance); });
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance* instance) {
  return Guard([&]() -> Status {
    void* state = nullptr;
    EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_ModelInstanceState(instance, &state)));
    delete static_cast<ModelInstanceState*>(state);
    return Status::Ok();
  });
}

// Owns the requests once it returns nullptr; an error leaves them all to the server.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance* instance,
                                                       TRITONBACKEND_Request** requests,
                                                       const uint32_t request_count) {
  return Guard([&]() -> Status {
    void* state = nullptr;
    EMBERTIDE_RETURN_IF_ERROR(FromTriton(TRITONBACKEND_ModelInstanceState(instance, &state)));
    static_cast<ModelInstanceState*>(state)->executor.Execute(instance, {requests, request_count});
    return Status::Ok();
  });
}

}  // extern "C"
