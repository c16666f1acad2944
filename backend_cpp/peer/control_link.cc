// Registering, and beating over a stream or by calls.
#include "peer/control_link.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

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
  std::condition_variable wake;
  bool stop = false;
  bool now = false;
  std::string refusal;
  std::string incarnation;  // empty: not registered
  uint64_t sequence = 0;
  bool has_streams = true;
  milliseconds interval{200};
  grpc::ClientContext* streaming = nullptr;  // what `stop` cancels
  bool stream_ended = false;
  steady_clock::time_point answered;
  std::minstd_rand dice{std::random_device{}()};  // of the thread
  std::thread thread;

  void Connect() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    // What a try may take at least, 20 s by default: one to an address that nobody has any more
    // says nothing for as long.
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
  bool Register();
  void Beat();
  void StreamBeats();
  bool KeepBeating(Stream* stream);
  bool WaitInStream(const v1::HeartbeatRequest& last);
  void Run();
};

// False: to be tried again.
bool ControlLink::Impl::Register() {
  if (registration.request_id().empty()) {
    registration.set_request_id(NewId(registration.node().name()));
  }
  grpc::ClientContext context;
  Prepare(&context, kRegisterDeadline);
  v1::RegisterNodeResponse response;
  const grpc::Status status = stub->RegisterNode(&context, registration, &response);
  if (status.ok()) {
    Refuse("");
    incarnation = response.incarnation();
    sequence = 0;
    Follow(response.heartbeat_interval_ms());
    return true;
  }
  const bool for_good = status.error_code() == grpc::StatusCode::INVALID_ARGUMENT ||
                        status.error_code() == grpc::StatusCode::FAILED_PRECONDITION ||
                        status.error_code() == grpc::StatusCode::PERMISSION_DENIED ||
                        status.error_code() == grpc::StatusCode::UNAUTHENTICATED ||
                        status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED;
  if (for_good) Refuse("the control plane refuses this node: " + status.error_message());
  if (status.error_code() == grpc::StatusCode::ALREADY_EXISTS) registration.clear_request_id();
  if (AsksForAnother(status)) TryNext();
  return false;
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
  v1::HeartbeatResponse response;
  const grpc::Status status = stub->Heartbeat(&context, NextBeat(), &response);
  if (status.ok()) {
    Follow(response.heartbeat_interval_ms());
  } else {
    Mind(status);
  }
}

// Returns when the stream ends, or it is time to stop.
void ControlLink::Impl::StreamBeats() {
  grpc::ClientContext context;
  Prepare(&context, kStreamDeadline);
  {
    const std::lock_guard lock(mutex);
    if (stop) return;
    streaming = &context;
    stream_ended = false;
    answered = steady_clock::now();
  }
  const std::unique_ptr<Stream> stream = stub->StreamBeats(&context);
  std::thread reader([&] {
    v1::StreamBeatsResponse response;
    while (stream->Read(&response)) Follow(response.response().heartbeat_interval_ms());
    const std::lock_guard lock(mutex);
    stream_ended = true;
    wake.notify_all();
  });
  const bool silent = KeepBeating(stream.get());
  {
    // A stream that has ended by itself says why.
    const std::lock_guard lock(mutex);
    if (silent || stop) context.TryCancel();
  }
  reader.join();
  const grpc::Status status = stream->Finish();
  {
    const std::lock_guard lock(mutex);
    streaming = nullptr;
    if (stop) return;
  }
  // One that has lasted for long enough is opened again.
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) return;
  const bool unanswerable = status.error_code() == grpc::StatusCode::UNIMPLEMENTED ||
                            status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED;
  if (unanswerable) has_streams = false;
  Mind(status);
  if (silent && addresses.size() < 2) Connect();
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

void ControlLink::Impl::Run() {
  while (true) {
    if (incarnation.empty()) {
      if (!Register()) {
        if (Wait(options.retry_every)) return;
        continue;
      }
    }
    if (has_streams) {
      StreamBeats();
    } else {
      Beat();
    }
    if (Wait(has_streams ? std::min(Interval(), options.retry_every) : Interval())) return;
  }
}

ControlLink::ControlLink(ControlLinkOptions options, v1::RegisterNodeRequest registration,
                         std::function<void(v1::HeartbeatRequest*)> beat)
    : impl_(std::make_unique<Impl>()) {
  impl_->addresses = SplitAddresses(options.address);
  impl_->options = std::move(options);
  impl_->registration = std::move(registration);
  impl_->beat = std::move(beat);
  impl_->Connect();
  impl_->thread = std::thread([impl = impl_.get()] { impl->Run(); });
}

ControlLink::~ControlLink() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
    if (impl_->streaming != nullptr) impl_->streaming->TryCancel();
  }
  impl_->wake.notify_all();
  impl_->thread.join();
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
