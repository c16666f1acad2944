// A caller of one KServe v2 server that costs little itself, so that what is measured is the
// server: requests are made beforehand, one thread sends them, and keeps as many at work as it is
// told.
//
//   front_load HOST:PORT QUESTIONS CONNECTIONS AT_ONCE SECONDS
//
// QUESTIONS is a file of bench/front/questions.py; they are asked in turn. A first part of the
// time, a fifth, does not count. Prints as JSON: requests a second, p50 and p99 in us, calls that
// failed, answers that were wrong, and CPU time of this process in us a request.
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "questions.h"

namespace {

using Clock = std::chrono::steady_clock;
using embertide::bench::IsRight;
using embertide::bench::Question;
using embertide::bench::ReadQuestions;

constexpr std::chrono::seconds kAnswer{30};
constexpr int64_t kWarmPart = 5;
constexpr uint64_t kLooksAt = 16;  // of so many answers one is compared

struct Call {
  const Question* question = nullptr;
  grpc::GenericStub* stub = nullptr;
  Clock::time_point begun;
  std::unique_ptr<grpc::ClientContext> context;
  grpc::ByteBuffer answer;
  grpc::Status status;
  std::unique_ptr<grpc::ClientAsyncResponseReader<grpc::ByteBuffer>> reader;
};

int64_t CpuUs() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto us = [](const timeval& time) {
    return int64_t{time.tv_sec} * 1'000'000 + time.tv_usec;
  };
  return us(usage.ru_utime) + us(usage.ru_stime);
}

class Load {
 public:
  Load(const std::string& address, std::vector<Question> questions, uint64_t connections)
      : questions_(std::move(questions)) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetMaxReceiveMessageSize(-1);
    for (uint64_t n = 0; n < connections; ++n) {
      stubs_.push_back(std::make_unique<grpc::GenericStub>(
          grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments)));
    }
  }

  nlohmann::json Run(uint64_t at_once, std::chrono::milliseconds lasts) {
    const Clock::time_point begun = Clock::now();
    const Clock::time_point counts = begun + lasts / kWarmPart;
    const Clock::time_point ends = begun + lasts;
    int64_t cpu_us = 0;
    std::vector<Call> calls(at_once);
    for (uint64_t n = 0; n < at_once; ++n) {
      calls[n].stub = stubs_[n % stubs_.size()].get();
      Start(&calls[n]);
    }
    uint64_t at_work = at_once;
    void* tag = nullptr;
    bool ok = false;
    while (at_work > 0 && queue_.Next(&tag, &ok)) {
      auto* const call = static_cast<Call*>(tag);
      const Clock::time_point now = Clock::now();
      if (call->begun >= counts)
        Note(*call, now);
      else
        cpu_us = CpuUs();
      if (now < ends)
        Start(call);
      else
        --at_work;
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - counts).count();
    cpu_us = CpuUs() - cpu_us;
    const auto count = static_cast<double>(std::max<size_t>(1, latency_us_.size()));
    return {{"requests_per_s", static_cast<double>(latency_us_.size()) / seconds},
            {"p50_us", Quantile(0.5)},
            {"p99_us", Quantile(0.99)},
            {"failed", failed_},
            {"wrong", wrong_},
            {"client_cpu_us", static_cast<double>(cpu_us) / count}};
  }

 private:
  void Start(Call* call) {
    call->question = &questions_[asked_++ % questions_.size()];
    call->answer.Clear();
    call->reader.reset();
    call->context = std::make_unique<grpc::ClientContext>();
    call->context->set_deadline(std::chrono::system_clock::now() + kAnswer);
    call->begun = Clock::now();
    call->reader = call->stub->PrepareUnaryCall(call->context.get(), call->question->path,
                                                call->question->request, &queue_);
    call->reader->StartCall();
    call->reader->Finish(&call->answer, &call->status, call);
  }

  void Note(const Call& call, Clock::time_point now) {
    if (!call.status.ok()) {
      ++failed_;
      return;
    }
    latency_us_.push_back(std::chrono::duration<double, std::micro>(now - call.begun).count());
    if (latency_us_.size() % kLooksAt == 0 && !IsRight(*call.question, call.answer)) ++wrong_;
  }

  double Quantile(double q) {
    if (latency_us_.empty()) return 0;
    const auto at = static_cast<size_t>(q * static_cast<double>(latency_us_.size() - 1));
    std::ranges::nth_element(latency_us_, latency_us_.begin() + static_cast<std::ptrdiff_t>(at));
    return latency_us_[at];
  }

  const std::vector<Question> questions_;
  std::vector<std::unique_ptr<grpc::GenericStub>> stubs_;
  grpc::CompletionQueue queue_;
  uint64_t asked_ = 0;
  std::vector<double> latency_us_;
  uint64_t failed_ = 0;
  uint64_t wrong_ = 0;
};

}  // namespace

int main(int count, char** words) {
  if (count != 6) {
    std::fprintf(stderr, "front_load HOST:PORT QUESTIONS CONNECTIONS AT_ONCE SECONDS\n");
    return 2;
  }
  try {
    std::vector<Question> questions = ReadQuestions(words[2]);
    const uint64_t connections = std::strtoull(words[3], nullptr, 10);
    const uint64_t at_once = std::strtoull(words[4], nullptr, 10);
    const double seconds = std::strtod(words[5], nullptr);
    if (questions.empty() || connections == 0 || at_once == 0 || !(seconds > 0)) {
      std::fprintf(stderr, "front_load: no question, connection, call or time was given\n");
      return 2;
    }
    Load load(words[1], std::move(questions), connections);
    const auto lasts = std::chrono::milliseconds(static_cast<int64_t>(1000 * seconds));
    std::printf("%s\n", load.Run(at_once, lasts).dump().c_str());
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "front_load: %s\n", error.what());
    return 1;
  }
}
