// HttpPage: health and metrics over HTTP, by GNU libmicrohttpd: nothing else is answered, and a
// request with a body is refused.
//
//   GET /v2/health/live    200 while the process answers
//   GET /v2/health/ready   200 while all models are loaded and the process is not leaving, else 503
//   GET /metrics           Triton's page, ours among it
//   GET /slow              the slowest inferences, as JSON
//
// One thread answers; connections, their memory and their silence are bounded. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "embertide/status.h"

namespace embertide::front {

struct HttpAnswers {
  std::function<bool()> ready;
  std::function<std::string()> metrics;
  std::function<std::string()> slow;
};

class HttpPage {
 public:
  // `listen`: host:port; of a name its first address. kDeviceError if it cannot listen there.
  static Result<std::unique_ptr<HttpPage>> Start(const std::string& listen, HttpAnswers answers);
  // Ends connections at once.
  ~HttpPage();
  HttpPage(const HttpPage&) = delete;
  HttpPage& operator=(const HttpPage&) = delete;

 private:
  struct Impl;
  explicit HttpPage(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace embertide::front
