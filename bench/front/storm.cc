// Impatient callers of one server, as bench/front/callers.py has them, over gRPC's C++ library:
// calls with deadlines of 0.1 to 10 ms, calls cancelled after as long, and calls that wait.
//
//   front_storm HOST:PORT QUESTIONS CALLS SEED CONNECTIONS
//
// QUESTIONS is a file of bench/front/questions.py. Prints how many calls ended how, as JSON.
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <queue>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "questions.h"

namespace {

using embertide::bench::IsRight;
using embertide::bench::Question;
using embertide::bench::ReadQuestions;

using Clock = std::chrono::system_clock;

constexpr int kAtOnce = 4;  // calls of a connection
constexpr std::chrono::seconds kAnswer{30};
constexpr std::chrono::milliseconds kAway{50};
constexpr double kShortestMs = 0.1;
constexpr double kLongestMs = 10;

// How calls ended. Thread-safe.
class Tally {
 public:
  explicit Tally(int64_t calls) : left_(calls) {}

  bool Take() { return left_.fetch_sub(1) > 0; }

  void Note(const char* kind, const std::string& ending) {
    if (ending == "UNAVAILABLE") left_.fetch_add(1);
    const std::lock_guard lock(mutex_);
    ++ended_[std::string(kind) + ": " + ending];
  }

  std::string Json() const {
    return nlohmann::json(ended_).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  }

 private:
  std::atomic<int64_t> left_;
  std::mutex mutex_;
  std::map<std::string, int64_t> ended_;
};

struct Call {
  const Question* question;
  const char* kind;
  grpc::ClientContext context;
  grpc::ByteBuffer answer;
  grpc::Status status;
  std::unique_ptr<grpc::ClientAsyncResponseReader<grpc::ByteBuffer>> reader;
};

std::string EndingOf(const Call& call) {
  switch (call.status.error_code()) {
    case grpc::StatusCode::OK:
      return IsRight(*call.question, call.answer) ? "right" : "wrong";
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      // A plain call got no answer, after a time that no call should take.
      return std::strcmp(call.kind, "plain") == 0 ? "no answer" : "DEADLINE_EXCEEDED";
    case grpc::StatusCode::CANCELLED:
      return "CANCELLED";
    case grpc::StatusCode::UNAVAILABLE:
      return "UNAVAILABLE";
    default:
      return std::to_string(call.status.error_code()) + " " +
             call.status.error_message().substr(0, 90);
  }
}

// One connection, its calls in one thread.
class Connection {
 public:
  Connection(const std::string& address, const std::vector<Question>& questions, uint64_t seed,
             Tally& tally)
      : questions_(questions), tally_(tally), rng_(seed) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
    stub_ = std::make_unique<grpc::GenericStub>(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
  }

  void Run() {
    int at_work = 0;
    while (at_work < kAtOnce && Start()) ++at_work;
    while (at_work > 0) {
      void* tag = nullptr;
      bool ok = false;
      const auto until = to_cancel_.empty() ? Clock::now() + kAnswer : to_cancel_.top().first;
      const auto got = queue_.AsyncNext(&tag, &ok, until);
      CancelDue();
      if (got != grpc::CompletionQueue::GOT_EVENT) continue;
      const auto id = reinterpret_cast<uintptr_t>(tag);
      const auto call = calls_.extract(id);
      const std::string ending = EndingOf(*call.mapped());
      tally_.Note(call.mapped()->kind, ending);
      if (ending == "UNAVAILABLE") std::this_thread::sleep_for(kAway);
      if (!Start()) --at_work;
    }
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) {
    }
  }

 private:
  std::chrono::microseconds Moment() {
    std::uniform_real_distribution<double> log(std::log(kShortestMs), std::log(kLongestMs));
    return std::chrono::microseconds(static_cast<int64_t>(1000 * std::exp(log(rng_))));
  }

  bool Start() {
    if (!tally_.Take()) return false;
    auto call = std::make_unique<Call>();
    call->question = &questions_[rng_() % questions_.size()];
    const uint64_t drawn = rng_() % 100;
    const uintptr_t id = ++started_;
    const auto now = Clock::now();
    call->kind = drawn < 20 ? "plain" : drawn < 65 ? "deadline" : "cancel";
    call->context.set_deadline(now + kAnswer);
    if (drawn >= 65) {
      to_cancel_.emplace(now + Moment(), id);
    } else if (drawn >= 20) {
      call->context.set_deadline(now + Moment());
    }
    call->reader = stub_->PrepareUnaryCall(&call->context, call->question->path,
                                           call->question->request, &queue_);
    call->reader->StartCall();
    call->reader->Finish(&call->answer, &call->status, reinterpret_cast<void*>(id));
    calls_.emplace(id, std::move(call));
    return true;
  }

  void CancelDue() {
    for (const auto now = Clock::now(); !to_cancel_.empty() && to_cancel_.top().first <= now;
         to_cancel_.pop()) {
      const auto found = calls_.find(to_cancel_.top().second);
      if (found != calls_.end()) found->second->context.TryCancel();
    }
  }

  using Due = std::pair<Clock::time_point, uintptr_t>;

  const std::vector<Question>& questions_;
  Tally& tally_;
  std::mt19937_64 rng_;
  std::unique_ptr<grpc::GenericStub> stub_;
  grpc::CompletionQueue queue_;
  uintptr_t started_ = 0;
  std::map<uintptr_t, std::unique_ptr<Call>> calls_;
  std::priority_queue<Due, std::vector<Due>, std::greater<>> to_cancel_;
};

int Storm(char** words) {
  const std::vector<Question> questions = ReadQuestions(words[2]);
  if (questions.empty()) {
    std::fprintf(stderr, "%s holds no question\n", words[2]);
    return 2;
  }
  Tally tally(std::strtoll(words[3], nullptr, 10));
  const uint64_t seed = std::strtoull(words[4], nullptr, 10);
  const uint64_t connections = std::strtoull(words[5], nullptr, 10);
  std::vector<std::thread> threads;
  threads.reserve(connections);
  for (uint64_t n = 0; n < connections; ++n) {
    threads.emplace_back([&, n] { Connection(words[1], questions, 1000 * seed + n, tally).Run(); });
  }
  for (std::thread& each : threads) each.join();
  std::printf("%s\n", tally.Json().c_str());
  return 0;
}

}  // namespace

int main(int count, char** words) {
  if (count != 6) {
    std::fprintf(stderr, "front_storm HOST:PORT QUESTIONS CALLS SEED CONNECTIONS\n");
    return 2;
  }
  try {
    return Storm(words);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "front_storm: %s\n", error.what());
    return 1;
  }
}
