// Registering and beating, one call at a time.
#include "peer/control_link.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>

#include "embertide/v1/control.grpc.pb.h"

namespace embertide {
namespace {

constexpr std::chrono::seconds kRegisterDeadline{5};

std::string NewId(const std::string& node) {
  std::random_device random;
  return node + "-" + std::to_string(::getpid()) + "-" + std::to_string(random());
}

}  // namespace

struct ControlLink::Impl {
  ControlLinkOptions options;
  v1::RegisterNodeRequest registration;
  std::function<void(v1::HeartbeatRequest*)> beat;
  std::unique_ptr<v1::ControlService::Stub> stub;
  mutable std::mutex mutex;
  std::condition_variable wake;
  bool stop = false;
  bool now = false;
  std::string refusal;
  std::string incarnation;  // empty: not registered
  uint64_t sequence = 0;
  std::chrono::milliseconds interval{200};
  std::thread thread;

  void Prepare(grpc::ClientContext* context, std::chrono::milliseconds deadline) const {
    context->set_deadline(std::chrono::system_clock::now() + deadline);
    if (!options.token.empty()) context->AddMetadata("authorization", "Bearer " + options.token);
  }
  // True when it is time to stop.
  bool Wait(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex);
    wake.wait_for(lock, time, [this] { return stop || now; });
    now = false;
    return stop;
  }
  void Refuse(const std::string& why) {
    const std::lock_guard lock(mutex);
    refusal = why;
  }
  bool Register();
  bool Beat();
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
    if (response.heartbeat_interval_ms() > 0) {
      interval = std::chrono::milliseconds(response.heartbeat_interval_ms());
    }
    return true;
  }
  const bool for_good = status.error_code() == grpc::StatusCode::INVALID_ARGUMENT ||
                        status.error_code() == grpc::StatusCode::FAILED_PRECONDITION ||
                        status.error_code() == grpc::StatusCode::PERMISSION_DENIED ||
                        status.error_code() == grpc::StatusCode::UNAUTHENTICATED ||
                        status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED;
  if (for_good) Refuse("the control plane refuses this node: " + status.error_message());
  if (status.error_code() == grpc::StatusCode::ALREADY_EXISTS) registration.clear_request_id();
  return false;
}

bool ControlLink::Impl::Beat() {
  grpc::ClientContext context;
  Prepare(&context, std::max(interval, std::chrono::milliseconds(200)));
  v1::HeartbeatRequest request;
  beat(&request);
  request.set_node(registration.node().name());
  request.set_incarnation(incarnation);
  request.set_sequence(++sequence);
  v1::HeartbeatResponse response;
  const grpc::Status status = stub->Heartbeat(&context, request, &response);
  if (status.error_code() == grpc::StatusCode::NOT_FOUND) {
    incarnation.clear();
    registration.clear_request_id();
  }
  if (status.error_code() == grpc::StatusCode::FAILED_PRECONDITION) {
    Refuse("the control plane refuses this node: " + status.error_message());
  }
  return status.ok();
}

void ControlLink::Impl::Run() {
  while (true) {
    if (incarnation.empty()) {
      if (!Register()) {
        if (Wait(options.retry_every)) return;
        continue;
      }
    }
    Beat();
    if (Wait(interval)) return;
  }
}

ControlLink::ControlLink(ControlLinkOptions options, v1::RegisterNodeRequest registration,
                         std::function<void(v1::HeartbeatRequest*)> beat)
    : impl_(std::make_unique<Impl>()) {
  impl_->options = std::move(options);
  impl_->registration = std::move(registration);
  impl_->beat = std::move(beat);
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  impl_->stub = v1::ControlService::NewStub(grpc::CreateCustomChannel(
      impl_->options.address, grpc::InsecureChannelCredentials(), arguments));
  impl_->thread = std::thread([impl = impl_.get()] { impl->Run(); });
}

ControlLink::~ControlLink() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
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
