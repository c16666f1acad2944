// Registering, and beating over a stream or by calls.
#include "peer/control_link.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <random>
#include <stop_token>
#include <vector>

#include "base/background_task.h"
#include "embertide/v1/control.grpc.pb.h"

namespace embertide {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::chrono::seconds kRegisterDeadline{5};
constexpr std::chrono::minutes kStreamDeadline{50};  // an hour at most, says control.proto
// A longer interval says that the fleet is large, and a new plan is news for all its nodes at once.
constexpr milliseconds kSmallFleetInterval{200};
constexpr milliseconds kLongestSpread{500};
// How long the thread that reads a stream's answers may take to start reading.
constexpr milliseconds kReaderComes{500};

std::string NewId(const std::string& node) {
  std::random_device random;
  return node + "-" + std::to_string(::getpid()) + "-" + std::to_string(random());
}

std::vector<std::string> SplitAddresses(const std::string& all) {
  std::vector<std::string> addresses;
  size_t begin = 0;
  while (begin <= all.size()) {
    const size_t comma = std::min(all.find(',', begin), all.size());
    if (comma > begin) addresses.push_back(all.substr(begin, comma - begin));
    begin = comma + 1;
  }
  if (addresses.empty()) addresses.push_back(all);
  return addresses;
}

// Whether the control plane waits for what differs. Staleness and p99 differ all the time.
bool HasChanged(const v1::HeartbeatRequest& before, const v1::HeartbeatRequest& now) {
  return before.plan_epoch() != now.plan_epoch() || before.held_epoch() != now.held_epoch() ||
         before.held_since() != now.held_since() || before.buckets_left() != now.buckets_left() ||
         before.versions().newest().number() != now.versions().newest().number() ||
         before.versions().oldest().number() != now.versions().oldest().number();
}

// It is another control plane that may answer.
bool AsksForAnother(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::UNAVAILABLE ||
         status.error_code() == grpc::StatusCode::ABORTED ||
         status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED ||
         status.error_code() == grpc::StatusCode::CANCELLED;
}

}  // namespace

struct ControlLink::Impl {
  using Stream = grpc::ClientReaderWriter<v1::StreamBeatsRequest, v1::StreamBeatsResponse>;

  ControlLinkOptions options;
  v1::RegisterNodeRequest registration;
  std::function<void(v1::HeartbeatRequest*)> beat;
  std::vector<std::string> addresses;
  size_t address = 0;  // the one in use
  std::unique_ptr<v1::ControlService::Stub> stub;
  mutable std::mutex mutex;
  std::condition_variable_any wake;
  bool stop = false;
  bool now = false;
  std::string refusal;
  std::string incarnation;  // empty: not registered
  uint64_t sequence = 0;
  bool has_streams = true;
  milliseconds interval{200};
  grpc::ClientContext* calling = nullptr;  // what `stop` cancels
  Stream* stream = nullptr;                // what `replies` reads; null: nothing
  bool being_read = false;
  bool stream_ended = false;
  steady_clock::time_point answered;
  std::minstd_rand dice{std::random_device{}()};  // of the thread
  Status state = Status::Ok();                    // of the last registration or beat
  TaskReport* report = nullptr;                   // the same for others
  // Last: their threads use the members above.
  std::unique_ptr<BackgroundTask> replies;
  std::unique_ptr<BackgroundTask> task;

  void Connect() {
    grpc::ChannelArguments arguments;
    // A proxy that the environment names would read the token.
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    // The least time for a try, 20 s by default: one to an address that nobody has any more says
    // nothing for as long.
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
    // A connection of its own each time: the one before may lead to a process that has stopped.
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    stub = v1::ControlService::NewStub(
        grpc::CreateCustomChannel(addresses[address], options.credentials.channel(), arguments));
  }
  void TryNext() {
    if (addresses.size() < 2) return;
    address = (address + 1) % addresses.size();
    has_streams = true;
    Connect();
  }
  class Calling;
  void Prepare(grpc::ClientContext* context, milliseconds deadline) const {
    context->set_deadline(std::chrono::system_clock::now() + deadline);
    const std::string token = options.tokens == nullptr ? "" : options.tokens->Sent();
    if (!token.empty()) context->AddMetadata("authorization", token);
  }
  // True when it is time to stop.
  bool Wait(milliseconds time) {
    std::unique_lock lock(mutex);
    wake.wait_for(lock, time, [this] { return stop || now; });
    now = false;
    return stop;
  }
  void Refuse(const std::string& why) {
    const std::lock_guard lock(mutex);
    refusal = why;
  }
  void Follow(uint32_t interval_ms) {
    const std::lock_guard lock(mutex);
    if (interval_ms > 0) interval = milliseconds(interval_ms);
    answered = steady_clock::now();
  }
  milliseconds Interval() const {
    const std::lock_guard lock(mutex);
    return interval;
  }
  milliseconds Spread();
  v1::HeartbeatRequest NextBeat();
  void Mind(const grpc::Status& status);
  Status Failed(const char* what, const grpc::Status& status) const;
  Status Register();
  void Beat();
  void StreamBeats();
  Status ReadReplies(const std::stop_token& stop);
  bool KeepBeating(Stream* stream);
  bool WaitInStream(const v1::HeartbeatRequest& last);
  Status Round();
};

// A call that `stop` ends.
class ControlLink::Impl::Calling {
 public:
  Calling(Impl* impl, grpc::ClientContext* context) : impl_(impl) {
    const std::lock_guard lock(impl->mutex);
    impl->calling = context;
    if (impl->stop) context->TryCancel();
  }
  ~Calling() {
    const std::lock_guard lock(impl_->mutex);
    impl_->calling = nullptr;
  }
  Calling(const Calling&) = delete;
  Calling& operator=(const Calling&) = delete;

 private:
  Impl* const impl_;
};

// Returns an error that says what failed, why, and what to do.
Status ControlLink::Impl::Failed(const char* what, const grpc::Status& status) const {
  const auto remedy = [&]() -> const char* {
    switch (status.error_code()) {
      case grpc::StatusCode::ALREADY_EXISTS:
        return "give this node another name, or end the one that has it";
      case grpc::StatusCode::UNAUTHENTICATED:
      case grpc::StatusCode::PERMISSION_DENIED:
        return "give it a token or a certificate that the control plane knows";
      case grpc::StatusCode::UNAVAILABLE:
      case grpc::StatusCode::DEADLINE_EXCEEDED:
        return "is the control plane up, and is its address right?";
      case grpc::StatusCode::UNIMPLEMENTED:
        return "what listens there is no control plane of this version";
      default:
        return "the control plane's log says more";
    }
  };
  return {AsksForAnother(status) ? Code::kUnavailable : Code::kRejected,
          std::string(what) + " at " + addresses[address] + ": " + status.error_message() + "; " +
              remedy()};
}

Status ControlLink::Impl::Register() {
  if (registration.request_id().empty()) {
    registration.set_request_id(NewId(registration.node().name()));
  }
  grpc::ClientContext context;
  Prepare(&context, kRegisterDeadline);
  const Calling calling_now(this, &context);
  v1::RegisterNodeResponse response;
  const grpc::Status status = stub->RegisterNode(&context, registration, &response);
  if (status.ok()) {
    Refuse("");
    incarnation = response.incarnation();
    sequence = 0;
    Follow(response.heartbeat_interval_ms());
    return Status::Ok();
  }
  Status failed = Failed("registration", status);
  const bool for_good = status.error_code() == grpc::StatusCode::INVALID_ARGUMENT ||
                        status.error_code() == grpc::StatusCode::FAILED_PRECONDITION ||
                        status.error_code() == grpc::StatusCode::PERMISSION_DENIED ||
                        status.error_code() == grpc::StatusCode::UNAUTHENTICATED ||
                        status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED;
  if (for_good) Refuse("the control plane refuses this node: " + status.error_message());
  if (status.error_code() == grpc::StatusCode::ALREADY_EXISTS) registration.clear_request_id();
  if (AsksForAnother(status)) TryNext();
  return failed;
}

v1::HeartbeatRequest ControlLink::Impl::NextBeat() {
  v1::HeartbeatRequest request;
  beat(&request);
  request.set_node(registration.node().name());
  request.set_incarnation(incarnation);
  request.set_sequence(++sequence);
  return request;
}

// Does what a failed call or an ended stream asks for.
void ControlLink::Impl::Mind(const grpc::Status& status) {
  if (!status.ok()) state = Failed("beats", status);
  if (status.error_code() == grpc::StatusCode::NOT_FOUND) {
    incarnation.clear();
    registration.clear_request_id();
  }
  if (status.error_code() == grpc::StatusCode::FAILED_PRECONDITION) {
    Refuse("the control plane refuses this node: " + status.error_message());
  }
  if (AsksForAnother(status)) TryNext();
}

void ControlLink::Impl::Beat() {
  grpc::ClientContext context;
  Prepare(&context, std::max(Interval(), milliseconds(200)));
  const Calling calling_now(this, &context);
  v1::HeartbeatResponse response;
  const grpc::Status status = stub->Heartbeat(&context, NextBeat(), &response);
  if (status.ok()) {
    state = Status::Ok();
    Follow(response.heartbeat_interval_ms());
  } else {
    Mind(status);
  }
}

// Returns when the stream ends, or it is time to stop.
void ControlLink::Impl::StreamBeats() {
  grpc::ClientContext context;
  Prepare(&context, kStreamDeadline);
  const Calling calling_now(this, &context);
  const std::unique_ptr<Stream> opened = stub->StreamBeats(&context);
  bool has_reader = false;
  {
    std::unique_lock lock(mutex);
    stream = opened.get();
    being_read = stream_ended = false;
    answered = steady_clock::now();
    wake.notify_all();
    // One that has ended by now was there.
    has_reader = wake.wait_for(lock, kReaderComes, [this] { return being_read || stream_ended; });
    if (!has_reader) {
      stream = nullptr;
      context.TryCancel();
    }
  }
  if (!has_reader) {  // it fails: as if there were no streams
    opened->Finish();
    return Beat();
  }
  bool silent = false;
  // After an exception the stream is still closed, so that no thread goes on reading it.
  std::exception_ptr failure;
  try {
    silent = KeepBeating(opened.get());
  } catch (...) {
    failure = std::current_exception();
  }
  {
    // A stream that has ended by itself says why.
    std::unique_lock lock(mutex);
    if (silent || stop || failure != nullptr) context.TryCancel();
    wake.wait(lock, [this] { return !being_read; });
    stream = nullptr;
  }
  const grpc::Status status = opened->Finish();
  if (failure != nullptr) std::rethrow_exception(failure);
  {
    const std::lock_guard lock(mutex);
    if (stop) return;
  }
  // One that has lasted for long enough is opened again.
  state = Status::Ok();
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) return;
  const bool unanswerable = status.error_code() == grpc::StatusCode::UNIMPLEMENTED ||
                            status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED;
  if (unanswerable) has_streams = false;
  Mind(status);
  if (silent && addresses.size() < 2) Connect();
}

// Reads what the control plane answers to the beats of a stream.
Status ControlLink::Impl::ReadReplies(const std::stop_token& stopped) {
  Stream* read = nullptr;
  {
    std::unique_lock lock(mutex);
    if (!wake.wait(lock, stopped, [this] { return stream != nullptr; })) return Status::Ok();
    read = stream;
    being_read = true;
    wake.notify_all();
  }
  // Whatever comes of it, the one that beats waits for the end.
  const auto end = [this] {
    const std::lock_guard lock(mutex);
    stream_ended = true;
    being_read = false;
    stream = nullptr;
    wake.notify_all();
  };
  try {
    v1::StreamBeatsResponse response;
    while (read->Read(&response)) {
      report->Good();
      Follow(response.response().heartbeat_interval_ms());
    }
  } catch (...) {
    end();
    throw;
  }
  end();
  return Status::Ok();
}

// True: the control plane has said nothing for too long.
bool ControlLink::Impl::KeepBeating(Stream* stream) {
  v1::StreamBeatsRequest request;
  while (true) {
    *request.mutable_beat() = NextBeat();
    if (!stream->Write(request)) return false;
    if (!WaitInStream(request.beat())) return false;
    const std::lock_guard lock(mutex);
    if (steady_clock::now() - answered > std::max(options.longest_silence, 5 * interval)) {
      return true;
    }
  }
}

// How long news waits, so that the nodes of a large fleet do not all beat at once: by chance, up to
// half of what the interval has been lengthened by. REQUIRES: mutex is held.
milliseconds ControlLink::Impl::Spread() {
  const milliseconds longest = std::min((interval - kSmallFleetInterval) / 2, kLongestSpread);
  if (longest <= milliseconds(0)) return milliseconds(0);
  return milliseconds(std::uniform_int_distribution<int64_t>(0, longest.count())(dice));
}

// Waits until another beat is due. False: none is, as the stream has ended or it is time to stop.
bool ControlLink::Impl::WaitInStream(const v1::HeartbeatRequest& last) {
  const auto sent = steady_clock::now();
  bool news = false;  // and when it is due
  steady_clock::time_point due;
  while (true) {
    std::unique_lock lock(mutex);
    if (!news) due = sent + interval;
    const auto until =
        std::min<steady_clock::time_point>(due, steady_clock::now() + options.look_every);
    wake.wait_until(lock, until, [&] { return stop || stream_ended || (now && !news); });
    if (stop || stream_ended) return false;
    const bool told = now;
    now = false;
    const milliseconds spread = Spread();
    lock.unlock();
    if (steady_clock::now() >= due) return true;
    if (news) continue;
    v1::HeartbeatRequest request;
    beat(&request);
    if (!told && !HasChanged(last, request)) continue;
    news = true;
    due = std::min<steady_clock::time_point>(due, steady_clock::now() + spread);
  }
}

// Says how it is doing: the last registration, or the last beat.
Status ControlLink::Impl::Round() {
  if (incarnation.empty()) {
    state = Register();
    if (incarnation.empty()) {
      Wait(options.retry_every);
      return state;
    }
  }
  // Without a thread that reads the answers of a stream, each beat is a call.
  const bool streams = has_streams && replies->running();
  if (streams) {
    StreamBeats();
  } else {
    Beat();
  }
  Wait(streams ? std::min(Interval(), options.retry_every) : Interval());
  return state;
}

ControlLink::ControlLink(ControlLinkOptions options, v1::RegisterNodeRequest registration,
                         std::function<void(v1::HeartbeatRequest*)> beat)
    : impl_(std::make_unique<Impl>()) {
  impl_->addresses = SplitAddresses(options.address);
  impl_->options = std::move(options);
  impl_->registration = std::move(registration);
  impl_->beat = std::move(beat);
  impl_->Connect();
  TaskBoard* const board = impl_->options.tasks;
  impl_->report = (board == nullptr ? TaskBoard::OfProcess() : *board).Of("control-link");
  impl_->replies = std::make_unique<BackgroundTask>(
      TaskOptions{.name = "control-replies", .board = board},
      [impl = impl_.get()](const std::stop_token& stop) { return impl->ReadReplies(stop); });
  impl_->task = std::make_unique<BackgroundTask>(
      TaskOptions{.name = "control-link", .board = board, .own_pace = true},
      [impl = impl_.get()](const std::stop_token&) { return impl->Round(); });
}

ControlLink::~ControlLink() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
    if (impl_->calling != nullptr) impl_->calling->TryCancel();
  }
  impl_->wake.notify_all();
  impl_->task.reset();
  impl_->replies.reset();
}

std::string ControlLink::refusal() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->refusal;
}

void ControlLink::BeatNow() {
  const std::lock_guard lock(impl_->mutex);
  impl_->now = true;
  impl_->wake.notify_all();
}

}  // namespace embertide
