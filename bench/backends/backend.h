// The common part of the benchmark's backends (backend.cc): Triton's entry points, parameters of a
// model, and how a request ends. Each backend defines the functions under "what a backend gives".
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "embertide/status.h"
#include "triton/edge.h"
#include "triton/triton_abi.h"

namespace embertide::bench {

using Parameters = std::map<std::string, std::string>;

// --- what a backend gives ------------------------------------------------------------------------

// Makes the state of a model from `parameters` of its config.pbtxt; Delete takes it. May throw.
Status Load(const Parameters& parameters, void** state);
void Delete(void* state);

// Answers the requests of one execution, and ends each by Finish.
Status Execute(void* state, TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests,
               uint32_t count);

// --- what it takes -------------------------------------------------------------------------------

// By the clock that Triton's own statistics are taken with.
uint64_t NowNs();

// When an execution began, and when its answers were there.
struct Times {
  uint64_t start_ns = 0;
  uint64_t end_ns = 0;
};

// Sends a response, or the error in its place, reports the request and gives it back.
void Finish(TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request* request,
            TRITONBACKEND_Response* response, const Status& status, const Times& times);

// Without these statistics, perf_analyzer refuses a model.
void ReportBatch(TRITONBACKEND_ModelInstance* instance, uint64_t samples, const Times& times);

}  // namespace embertide::bench
