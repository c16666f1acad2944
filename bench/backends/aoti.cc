// libtriton_aoti.so: a ranking model, tables and net, as one AOTInductor program.
//
// For KEYS [B,F], numbers of rows, and what else the program takes, it answers SCORE [B,1]; Triton
// has checked types and shapes. Requests of one execution are joined and answered in one run.
// bench/aoti.py and bench/rank/aoti_peer.py make programs. The model's parameters are "program",
// its folder; "inputs", with commas between, in the program's order; "instances", and "threads" of
// torch for each of them.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <sys/mman.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#include "backends/backend.h"
#include "triton/tensor_io.h"

namespace embertide::bench {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

struct Model {
  Model(const std::string& program, const std::string& names, size_t instances, int torch_threads)
      : loader(program, "model", /*run_single_threaded=*/false, instances), threads(torch_threads) {
    std::istringstream each(names);
    for (std::string name; std::getline(each, name, ',');) inputs.push_back(name);
  }
  std::vector<std::unique_ptr<void, decltype(&std::free)>> tables;  // the program borrows them
  torch::inductor::AOTIModelPackageLoader loader;
  std::vector<std::string> inputs;
  int threads;
};

// Takes the tables out of the mapped file of the program, whose pages are small: our rows lie in
// huge ones. All instances share them.
void MoveTables(Model* model) {
  std::unordered_map<std::string, at::Tensor> moved;
  for (const auto& [name, tensor] : model->loader.get_runner()->extract_constants_map(false)) {
    // Packed weights have no storage that could be moved.
    if (!tensor.has_storage() || !tensor.is_contiguous() || tensor.nbytes() < kHugePage) continue;
    const size_t bytes = (tensor.nbytes() + kHugePage - 1) / kHugePage * kHugePage;
    void* memory =
        model->tables.emplace_back(std::aligned_alloc(kHugePage, bytes), std::free).get();
    if (memory == nullptr) throw std::bad_alloc();
    madvise(memory, bytes, MADV_HUGEPAGE);  // a hint: without huge pages it is as good as before
    std::memcpy(memory, tensor.const_data_ptr(), tensor.nbytes());
    moved.emplace(name, at::from_blob(memory, tensor.sizes(), tensor.options()));
  }
  model->loader.load_constants(moved, /*use_inactive=*/false, /*check_full_update=*/false,
                               /*user_managed=*/true);
}

struct Job {
  TRITONBACKEND_Request* request = nullptr;
  std::vector<triton::Tensor> inputs;
  Status status;

  const triton::Tensor& Input(const std::string& name) const {
    for (const triton::Tensor& each : inputs) {
      if (each.name == name) return each;
    }
    throw std::invalid_argument("input " + name + " is missing");
  }
  int64_t Samples() const { return Input("KEYS").shape[0]; }
};

// An input of all jobs, one below the other; that of a single job is not copied.
at::Tensor Joined(std::span<const Job> jobs, const std::string& name, int64_t samples) {
  const triton::Tensor& first = jobs[0].Input(name);
  const at::ScalarType dtype = first.dtype == "INT64" ? at::kLong : at::kFloat;
  if (jobs.size() == 1) {
    return at::from_blob(const_cast<std::byte*>(first.data.data()), first.shape, dtype);
  }
  at::Tensor joined = at::empty({samples, first.shape[1]}, dtype);
  auto* to = static_cast<std::byte*>(joined.data_ptr());
  for (const Job& job : jobs) {
    const std::span<const std::byte> data = job.Input(name).data;
    std::memcpy(to, data.data(), data.size());
    to += data.size();
  }
  return joined;
}

// OpenMP and MKL keep their number of threads for each thread that calls them.
void UseThreads(int threads) {
  thread_local int said = 0;
  if (said != threads) at::set_num_threads(threads);
  said = threads;
}

at::Tensor Run(Model* model, std::span<const Job> jobs, int64_t samples) {
  UseThreads(model->threads);
  const c10::InferenceMode inference;
  std::vector<at::Tensor> inputs;
  for (const std::string& name : model->inputs) inputs.push_back(Joined(jobs, name, samples));
  std::vector<at::Tensor> outputs = model->loader.boxed_run(std::move(inputs));
  if (outputs.size() != 1 || outputs[0].numel() != samples ||
      outputs[0].scalar_type() != at::kFloat) {
    throw std::runtime_error("the program does not give one fp32 score a sample");
  }
  return outputs[0].contiguous();
}

Status Answer(const Job& job, const float* scores, TRITONBACKEND_Response* response) {
  void* buffer = nullptr;
  const int64_t samples = job.Samples();
  EMBERTIDE_RETURN_IF_ERROR(triton::MakeOutput(response, "SCORE", TRITONSERVER_TYPE_FP32,
                                               std::array{samples, int64_t{1}}, sizeof(float),
                                               &buffer));
  std::memcpy(buffer, scores, static_cast<size_t>(samples) * sizeof(float));
  return Status::Ok();
}

}  // namespace

Status Load(const Parameters& parameters, void** state) {
  const c10::InferenceMode inference;
  auto model = std::make_unique<Model>(parameters.at("program"), parameters.at("inputs"),
                                       std::stoul(parameters.at("instances")),
                                       std::stoi(parameters.at("threads")));
  MoveTables(model.get());
  *state = model.release();
  return Status::Ok();
}

void Delete(void* state) { delete static_cast<Model*>(state); }

// A row number beyond its table, or what else torch refuses, fails all requests of the execution.
Status Execute(void* state, TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests,
               uint32_t count) {
  Times times{NowNs(), 0};
  std::vector<Job> jobs(count);
  at::Tensor scores;
  int64_t samples = 0;
  Status status;
  try {
    for (uint32_t i = 0; i < count; ++i) {
      jobs[i].request = requests[i];
      EMBERTIDE_RETURN_IF_ERROR(triton::ReadInputs(requests[i], &jobs[i].inputs));
      samples += jobs[i].Samples();
    }
    scores = Run(static_cast<Model*>(state), jobs, samples);
  } catch (const std::exception& error) {
    status = Status(Code::kDeviceError, error.what());
  }
  times.end_ns = NowNs();
  const float* next = status.ok() ? scores.const_data_ptr<float>() : nullptr;
  for (const Job& job : jobs) {
    TRITONBACKEND_Response* response = nullptr;
    triton::LogIfError(TRITONBACKEND_ResponseNew(&response, job.request), "response");
    const Status answered = status.ok() ? Answer(job, next, response) : status;
    if (status.ok()) next += job.Samples();
    Finish(instance, job.request, response, answered, times);
  }
  ReportBatch(instance, static_cast<uint64_t>(samples), times);
  return Status::Ok();
}

}  // namespace embertide::bench
