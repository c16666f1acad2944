// The end of an execution: answers leave, Triton and the node are told how it went, and requests
// are given back.
#include <algorithm>
#include <chrono>
#include <functional>
#include <new>
#include <span>
#include <vector>

#include "triton/edge.h"
#include "triton/execute.h"
#include "triton/now_ns.h"

namespace embertide::triton {
namespace {

// Slow requests that are kept of one execution, whose requests take the same time: more would leave
// no place for others.
constexpr size_t kSlowOfOne = 4;

double Microseconds(uint64_t ns) { return static_cast<double>(ns) / 1000; }

}  // namespace

void Executor::Send(Job* job) {
  if (job->sent) return;
  job->sent = true;
  if (job->refusal.reason != Reason::kNone) metrics_->AddRefused(job->refusal.reason);
  if (job->response == nullptr) return;
  TRITONSERVER_Error* error = nullptr;
  if (job->refusal.reason == Reason::kCancelled) {
    error = CancelledError();
  } else if (job->refusal.reason != Reason::kNone) {
    error = ToTriton(job->refusal.status);
  }
  LogIfError(TRITONBACKEND_ResponseSend(job->response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, error),
             "response");
  std::vector<float>().swap(job->unasked);
  if (error != nullptr) TRITONSERVER_ErrorDelete(error);
}

void Executor::NoteSlow(std::span<const Job> jobs, uint64_t whole_ns) const {
  if (!node_.IsSlow(Microseconds(whole_ns))) return;
  const auto ended = std::chrono::system_clock::now().time_since_epoch();
  std::vector<const Job*> largest;
  for (const Job& job : jobs) largest.push_back(&job);
  const size_t count = std::min(largest.size(), kSlowOfOne);
  std::ranges::partial_sort(largest, largest.begin() + static_cast<std::ptrdiff_t>(count),
                            std::greater(), [](const Job* job) { return job->bags.keys.size(); });
  for (const Job* job : std::span(largest).first(count)) {
    const Stages& stages = job->stages;
    const Reason reason = job->refusal.reason;
    node_.NoteSlow(
        {.ended_ms = std::chrono::duration_cast<std::chrono::milliseconds>(ended).count(),
         .trace = job->trace,
         .refusal = reason == Reason::kNone ? "" : ReasonName(reason),
         .version = job->answered_version,
         .samples = job->bags.samples,
         .keys = job->bags.keys.size(),
         .requests = static_cast<uint32_t>(jobs.size()),
         .whole_us = Microseconds(whole_ns),
         .peers_us = Microseconds(stages.peers_ns),
         .lookup_us = Microseconds(stages.lookup_ns),
         .net_us = Microseconds(stages.net_ns)});
  }
}

void Executor::Finish(TRITONBACKEND_ModelInstance* instance, std::span<Job> jobs,
                      uint64_t exec_start_ns, uint64_t compute_start_ns, uint64_t compute_end_ns) {
  for (Job& job : jobs) Send(&job);
  const uint64_t exec_end_ns = NowNs();
  node_.NoteLatency(std::chrono::nanoseconds(exec_end_ns - exec_start_ns), jobs.size());
  try {
    NoteSlow(jobs, exec_end_ns - exec_start_ns);
  } catch (const std::bad_alloc&) {
    LogIfError(ToTriton({Code::kResourceExhausted, "no memory to keep it"}), "slow request");
  }
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

}  // namespace embertide::triton
