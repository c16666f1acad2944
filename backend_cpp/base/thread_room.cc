// The threads wait until all are there.
#include "base/thread_room.h"

#include <chrono>
#include <exception>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "base/sleep.h"
#include "base/task_faults.h"

namespace embertide {

Status CheckThreadRoom(size_t threads, const char* what) {
  std::vector<std::jthread> started;
  try {
    started.reserve(threads);
    while (started.size() < threads) {
      FaultAt(what, FaultPoint::kStart);
      started.emplace_back(
          [](const std::stop_token& stop) { SleepFor(stop, std::chrono::hours(1)); });
    }
  } catch (const std::exception& error) {
    return {Code::kResourceExhausted, std::string(what) + " needs " + std::to_string(threads) +
                                          " threads, and " + std::to_string(started.size()) +
                                          " can be started: " + error.what() +
                                          "; raise the limit of threads (ulimit -u, pids)"};
  }
  return Status::Ok();
}

}  // namespace embertide
